"""Foundations of every other package: errors, files, digests, topology, events."""
