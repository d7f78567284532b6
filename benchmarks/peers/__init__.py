"""The peer sides of the data-loading benchmark: the speed of other loaders.

They need a separate environment, because they depend on 100 packages; `pyproject.toml`
beside this file describes its setup. `measure` is the driver, `peer` defines a peer,
and all of them read the corpus of `documents`.
"""
