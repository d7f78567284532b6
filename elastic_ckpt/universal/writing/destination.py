"""A checkpoint that a conversion writes, by one or several processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from elastic_ckpt.universal.writing.conversion import Needed

# Called with the bytes that are done and the total of this process, from any thread.
Progress = Callable[[int, int], None]


class Destination(Protocol):
    """Writes a checkpoint of one format.

    One process calls `prepare`. Then each of several calls `write`, with its number,
    and the first one `commit` when all of them have returned.
    """

    def prepare(self) -> str:
        """Checks what is there, and keeps what an earlier attempt has completed.

        Returns:
          The name of this attempt, for `write` and `commit`.

        Raises:
          CheckpointError: if the checkpoint exists.
        """
        ...

    def needed(self, host: int, num_hosts: int) -> Needed:
        """The boxes that a process writes, by target."""
        ...

    def write(
        self, attempt: str, host: int, num_hosts: int, progress: Progress
    ) -> None:
        """Writes the boxes of a process, durably, and compares what reads back.

        Raises:
          CheckpointError: if the source cannot be read, or storage fails.
        """
        ...

    def commit(self, attempt: str, num_hosts: int) -> None:
        """Makes the checkpoint visible.

        Raises:
          CheckpointError: if a process has not written its boxes, or storage fails.
        """
        ...
