"""Steps that are preserved by hand: an empty file `preserve` in a step's directory.

It is the same in persistent storage, where Orbax looks at no such file, and in a host's
RAM disk, where it counts for the step on all hosts.
"""

from __future__ import annotations

from etils import epath

from elastic_ckpt.core import storage

FILE = "preserve"


def is_preserved(step_directory: epath.PathLike) -> bool:
    """Whether retention must keep the step there."""
    return (epath.Path(step_directory) / FILE).exists()


def pin(step_directory: epath.PathLike) -> None:
    """Makes retention keep the step from now on."""
    storage.write_atomic(epath.Path(step_directory) / FILE, b"")


def unpin(step_directory: epath.PathLike) -> None:
    """Undoes `pin`."""
    storage.remove(epath.Path(step_directory) / FILE)
