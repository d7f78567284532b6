"""The peer sides of the data-loading benchmark: what others' loaders reach.

They live in an environment of their own, for they bring 100 packages; `pyproject.toml`
beside this file says how to set it up. `measure` is the driver, `peer` says what a peer
is, `documents` is what they all read.
"""
