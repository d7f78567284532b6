"""Elastic data: global batches that are the same on any number of hosts."""
