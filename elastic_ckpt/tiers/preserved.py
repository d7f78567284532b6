"""Steps that retention must keep: pinned by hand, or held by a reader for a while.

A pin is an empty `preserve` file in a step's directory, on a RAM disk or in persistent
storage, where Orbax ignores it. A hold is a file `<root>/holds/<step>-<save>` on a RAM
disk; it expires at its modification time. A pin or hold on one host's RAM disk applies
to the step on all hosts.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import time

from etils import epath

from elastic_ckpt.core import storage

FILE = "preserve"
_HOLDS = "holds"


def is_preserved(step_directory: epath.PathLike) -> bool:
    """Whether a step is pinned."""
    return (epath.Path(step_directory) / FILE).exists()


def pin(step_directory: epath.PathLike) -> None:
    """Keeps a step until `unpin`, regardless of the preservation policy.

    Args:
      step_directory: the step directory in storage, or on any one host's RAM disk; a
        pin there applies to the step on all hosts.
    """
    storage.write_atomic(epath.Path(step_directory) / FILE, b"")


def unpin(step_directory: epath.PathLike) -> None:
    """Lets the preservation policy decide again, even if the step was not pinned."""
    storage.remove(epath.Path(step_directory) / FILE)


def hold(root: epath.PathLike, name: str, secs: int) -> None:
    """Keeps a step in the RAM of all hosts, for a reader that may be killed.

    Args:
      root: the RAM disk of any one host.
      name: the step and its save, as `<step>-<save>`.
      secs: the time to keep the step, in seconds from now.
    """
    until = time.time() + secs
    path = os.path.join(root, _HOLDS, name)
    storage.write_atomic(path, b"")
    os.utime(path, (until, until))


def held(root: epath.PathLike) -> set[int]:
    """The steps that readers hold on a RAM disk; removes expired holds."""
    steps = set()
    for path in pathlib.Path(root, _HOLDS).glob("[0-9]*-*"):
        # Another process may remove it in the meantime.
        with contextlib.suppress(FileNotFoundError):
            if path.stat().st_mtime > time.time():
                steps.add(int(path.name.partition("-")[0]))
            else:
                storage.remove(path)
    return steps
