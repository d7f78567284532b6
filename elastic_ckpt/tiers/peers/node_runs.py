"""The directories of runs on a node, and which of them are to be removed."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Iterator, Mapping

from elastic_ckpt.core import errors, storage
from elastic_ckpt.tiers.peers import node_record
from elastic_ckpt.tiers.ram import machine

_REMOVED = ".removed-"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lifetime:
    """How long the directory of a run lasts after its last use.

    Attributes:
      unused_secs: it is removed after this time; None keeps it.
      limit_bytes: of all runs together; above it, the runs that were unused for the
        longest time are removed. None sets no limit.
      least_unused_secs: the time for which the limit removes no run, so that its pods
        can be replaced.
    """

    unused_secs: float | None = None
    limit_bytes: int | None = None
    least_unused_secs: float = 600.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Use:
    """The memory of a run.

    Attributes:
      unused_secs: since a process used it; 0 while one has it.
      num_bytes: that its directory takes now.
      granted_bytes: that it may use, by the answer to its request.
    """

    unused_secs: float
    num_bytes: int
    granted_bytes: int = 0

    @property
    def claimed_bytes(self) -> int:
        """The bytes that others cannot have while the run lasts."""
        if self.unused_secs:
            return self.num_bytes
        return max(self.num_bytes, self.granted_bytes)

    def __str__(self) -> str:
        unused = f"unused for {self.unused_secs:.0f} s" if self.unused_secs else ""
        return f"{self.claimed_bytes} bytes ({unused or 'in use'})"


def runs(directory: str) -> Iterator[str]:
    """The paths below `directory` of the directories of runs."""
    pending = [("", node_record.MOST_LEVELS)]
    while pending:
        below, levels = pending.pop()
        for name in _subdirectories(os.path.join(directory, below)):
            path = os.path.join(below, name)
            if os.path.isfile(os.path.join(directory, path, machine.FILE)):
                yield path
            elif levels > 1:
                pending.append((path, levels - 1))


def unused_secs(root: str) -> float:
    """The seconds since a process last changed a run's directory; 0 while one has it.

    A process has the directory while it holds one of its slots.
    """
    newest = 0.0
    for each in (root, *_slots(root)):
        with contextlib.suppress(FileNotFoundError):
            newest = max(newest, os.stat(each).st_mtime)
    if any(storage.is_locked(_lock(slot)) for slot in _slots(root)):
        return 0.0
    return max(0.0, time.time() - newest)


def to_remove(
    uses: Mapping[str, Use], lifetime: Lifetime, *, needed_bytes: int = 0
) -> list[str]:
    """The runs to remove, those that were unused for the longest time first.

    A run that a process has is never among them, nor, for the limit alone, one whose
    pods may just be replaced (`Lifetime.least_unused_secs`).

    Args:
      uses: the runs, by path.
      lifetime: of runs, with the limit.
      needed_bytes: for another run.
    """
    removable: list[str] = []
    excess = 0
    if lifetime.limit_bytes is not None:
        claimed = sum(use.claimed_bytes for use in uses.values())
        excess = claimed + needed_bytes - lifetime.limit_bytes
    for path in sorted(uses, key=lambda path: (-uses[path].unused_secs, path)):
        secs = uses[path].unused_secs
        is_over = lifetime.unused_secs is not None and secs > lifetime.unused_secs
        if is_over or (excess > 0 and secs > lifetime.least_unused_secs):
            removable.append(path)
            excess -= uses[path].claimed_bytes
    return removable


def check_room(
    path: str, num_bytes: int, others: Mapping[str, Use], lifetime: Lifetime
) -> None:
    """Raises a RunError if a run does not fit beside others.

    Args:
      path: of the run that needs room.
      num_bytes: that it uses at most.
      others: those that are not removed, by path.
      lifetime: of runs, with the limit.
    """
    if lifetime.limit_bytes is None:
        return
    claimed = sum(use.claimed_bytes for use in others.values())
    free = lifetime.limit_bytes - claimed
    if free >= num_bytes:
        return
    remaining = [f"{each} {use}" for each, use in sorted(others.items())]
    raise errors.RunError(
        f"run {path} needs {num_bytes} bytes of this node's memory, but only"
        f" {max(0, free)} of {lifetime.limit_bytes} are available: other runs use"
        f" [{errors.first_of(remaining)}]; lower local_checkpoint_size_limit, raise"
        " --max-bytes of the agent, or use another node"
    )


def remove(root: str) -> bool:
    """Removes a run's directory; returns False if a process has it."""
    parent, name = os.path.split(root)
    hidden = os.path.join(parent, f"{_REMOVED}{name}")
    try:
        with contextlib.ExitStack() as locks:
            for slot in _slots(root):
                locks.enter_context(storage.exclusive_lock(_lock(slot)))
            # A host that starts meanwhile finds no directory, rather than half of one.
            storage.remove(hidden)
            storage.rename(root, hidden)
    except errors.RunError:
        return False
    storage.remove(hidden)
    return True


def remove_leftovers(directory: str) -> None:
    """Removes directories whose removal a crash cut short."""
    for below in ("", *_subdirectories(directory)):
        parent = os.path.join(directory, below)
        with contextlib.suppress(FileNotFoundError):
            for name in os.listdir(parent):
                if name.startswith(_REMOVED):
                    storage.remove(os.path.join(parent, name))


def _slots(root: str) -> list[str]:
    slots = os.path.join(root, "hosts")
    return [os.path.join(slots, name) for name in _subdirectories(slots)]


def _lock(slot: str) -> str:
    return os.path.join(slot, "lock")


def _subdirectories(path: str) -> list[str]:
    # It may be removed meanwhile. No link is followed, and hidden ones are temporary.
    try:
        with os.scandir(path) as entries:
            return [
                entry.name
                for entry in entries
                if entry.is_dir(follow_symlinks=False) and entry.name[0] != "."
            ]
    except (FileNotFoundError, NotADirectoryError):
        return []
