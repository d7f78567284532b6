"""Reads the parts of a checkpoint that a host needs, group by group."""
