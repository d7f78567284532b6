"""What all other packages build on: errors, files, digests, topology, events."""
