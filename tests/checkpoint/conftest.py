"""Checkpointers of one run below the directory of a test."""

import contextlib
import os
import threading

import pytest

from elastic_ckpt import frontend
from elastic_ckpt.core import events, storage
from elastic_ckpt.tiers.choices import Local, Persistent


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
    """Has writes below it fail with an errno, or wait for an event; None: neither."""
    write, problem = storage.write_atomic, [None]

    def write_atomic(target, content, **options):
        if os.fspath(target).startswith(str(path)):
            if isinstance(problem[0], threading.Event):
                problem[0].wait()
            elif problem[0]:
                raise OSError(problem[0], os.strerror(problem[0]))
        write(target, content, **options)

    def breaks(new):
        problem[0] = new

    monkeypatch.setattr(storage, "write_atomic", write_atomic)
    return breaks


@pytest.fixture
def breaks(tmp_path, monkeypatch):
    return broken_storage(tmp_path / "steps", monkeypatch)
