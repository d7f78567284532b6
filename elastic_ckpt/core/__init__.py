"""The foundation of all other packages: errors, files, digests, topology, events."""
