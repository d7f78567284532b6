"""Files that many tests of the data read."""

import pytest

from elastic_ckpt.data import order
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
    """Data counts as large: each shard reads runs of records of its own."""
    monkeypatch.setattr(order, "_SMALL_RECORDS", 0)
