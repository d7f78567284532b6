"""Reads the parts of a checkpoint that a host needs, in groups."""
