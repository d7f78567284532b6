"""Checkpointers of one run below the directory of a test."""

import contextlib
import os

import pytest

from elastic_ckpt import frontend
from elastic_ckpt.core import events, storage
from elastic_ckpt.tiers.choices import Local, Persistent
from elastic_ckpt.tiers.persistent import persistent_root


@pytest.fixture
def make(tmp_path):
    """Opens checkpointers, and closes them at the end of the test.

    Args of what it gives:
      *more: further tiers.
      ram: the name of the RAM disk; None has none.
      every: the interval of persistent storage; None has none.
      local: more options of the RAM disk; all others are those of storage.
    """
    with contextlib.ExitStack() as stack:

        def make(
            *more,
            ram="ram",
            every=1,
            emit=events.nobody,
            run="run",
            local=None,
            **stored,
        ):
            tiers = [Local(tmp_path / ram, **(local or {}))] if ram else []
            if every:
                tiers.append(Persistent(tmp_path / "steps", every=every, **stored))
            opened = frontend.Checkpointer([*tiers, *more], run=run, emit=emit)
            return stack.enter_context(opened)

        yield make


def broken_storage(path, monkeypatch):
    """Has writes below it fail with an errno; None: they do not."""
    write, problem = storage.write_atomic, [None]

    def write_atomic(target, content, **options):
        if problem[0] and os.fspath(target).startswith(str(path)):
            raise OSError(problem[0], os.strerror(problem[0]))
        write(target, content, **options)

    def breaks(new):
        problem[0] = new

    monkeypatch.setattr(storage, "write_atomic", write_atomic)
    return breaks


@pytest.fixture
def breaks(tmp_path, monkeypatch):
    return broken_storage(tmp_path / "steps", monkeypatch)


@pytest.fixture(params=["renamed", "in place"])
def kind(request, monkeypatch):
    """How steps are committed: as on a disk, or as in a bucket."""

    def from_path(path):
        options = {"in_place": request.param == "in place"}
        return persistent_root.PersistentRoot(path=storage.absolute(path), **options)

    monkeypatch.setattr(persistent_root.PersistentRoot, "from_path", from_path)
    return request.param
