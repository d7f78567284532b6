"""Files that many tests of the data read."""

import pytest

from elastic_ckpt.data import units
from tests import formats


@pytest.fixture(scope="session")
def files(tmp_path_factory):
    """The documents of `tests.formats` in every format, by the format's name."""
    directory = tmp_path_factory.mktemp("formats")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(directory / "cache"))
        yield {name: formats.write(directory, name) for name in formats.FORMATS}


@pytest.fixture
def large_blocks(monkeypatch):
    """Blocks are read as large ones: each shard reads runs of records of its own."""
    monkeypatch.setattr(units, "_SMALL_RECORDS", 0)
