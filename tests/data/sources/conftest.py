"""Fixtures of every test of files: no pauses, and separate caches and stores."""

import fsspec
import pytest

from elastic_ckpt.data.sources import files


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    cache = tmp_path / "cache"
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    monkeypatch.setattr(files, "_PAUSES_SECS", (0, 0, 0))
    yield cache
    fsspec.filesystem("memory").store.clear()
