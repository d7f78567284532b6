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
    """Keeps a step whatever the preservation policy, until `unpin`.

    Args:
      step_directory: the directory of the step in storage or on a RAM disk; on one
        host's RAM disk, it counts for the step on all hosts.
    """
    storage.write_atomic(epath.Path(step_directory) / FILE, b"")


def unpin(step_directory: epath.PathLike) -> None:
    """Leaves a step that was pinned to the preservation policy again.

    Args:
      step_directory: as for `pin`; not an error if the step is not pinned.
    """
    storage.remove(epath.Path(step_directory) / FILE)
