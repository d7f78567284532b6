"""What every other room stands on: errors, files, digests, topology, events."""
