"""The peer sides of the data-loading benchmark: the speed of other loaders.

Peers need a separate environment, because they depend on 100 packages; the
`pyproject.toml` in this directory describes its setup. `measure` is the driver, `peer`
defines a peer, and all peers read the corpus of `documents`.
"""
