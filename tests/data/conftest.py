"""Files that many tests of the data read."""

import functools

import pytest
from grain._src.python.experimental.index_shuffle.python import index_shuffle_module

from tests import formats


@pytest.fixture(scope="session")
def files(tmp_path_factory):
    """The documents of `tests.formats` in every format, by the format's name."""
    directory = tmp_path_factory.mktemp("formats")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(directory / "cache"))
        yield {name: formats.write(directory, name) for name in formats.FORMATS}


@pytest.fixture(scope="session", autouse=True)
def indices_that_grain_shuffles_are_kept():
    """Each takes 10 ms in a small window, of which there are many of the same seed."""
    kept = functools.cache(index_shuffle_module.index_shuffle)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(index_shuffle_module, "index_shuffle", kept)
        yield
