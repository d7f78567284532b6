"""Reading ahead: batches are ready before they are asked for, and no state knows of it.

`Prefetched` reads the rows of a host in a thread, and makes something of them there
(arrays on devices, for instance). Each batch comes with the cursors that it changed, so
that the state is always that of the last batch taken, however far the reading is ahead.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from elastic_ckpt.core import ahead, errors
from elastic_ckpt.data import cursors, elastic_data

if TYPE_CHECKING:
    import numpy as np


T = TypeVar("T")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReadAhead:
    """How far to read ahead of the loop.

    Attributes:
      batches: batches that are ready, or being made so; 0 reads when asked.
      max_bytes: bytes that they take on one host, at most; a batch that is larger than
        that is read when it is asked for.
      warn_after_secs: a host that has to wait longer for a batch, but for its first,
        is named in the log.
    """

    batches: int = 2
    max_bytes: int = 1 << 30
    warn_after_secs: float = 1.0

    def depth(self, batch_bytes: int) -> int:
        """Batches to be ahead, if one of them takes `batch_bytes` on a host."""
        return min(self.batches, self.max_bytes // max(batch_bytes, 1))


# What `LocalBatches` does by default.
IN_CALLER = ReadAhead(batches=0)
# What the others do.
TWO_BATCHES = ReadAhead()


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Made(Generic[T]):
    what: T
    position: cursors.Position
    changed: cursors.Cursors


class Prefetched(Generic[T]):
    """The rows of a host, read ahead, and what was made of them.

    Args:
      rows: the rows.
      make: makes of a batch's rows what is taken; called in the thread.
      read_ahead: how far.
    """

    def __init__(
        self,
        rows: elastic_data.HostBatches,
        *,
        make: Callable[[dict[str, np.ndarray]], T],
        read_ahead: ReadAhead,
    ) -> None:
        self._rows = rows
        self._making = _Making(rows, make)
        self._read_ahead = read_ahead
        self._ahead: ahead.Ahead[_Made[T]] | None = None
        self._is_first = True
        self._open = _Open(rows)
        ahead.close_with(self, self._open.close)

    def __next__(self) -> T:
        if self._ahead is None:
            what = next(self._making)
            if self._is_first:
                self._is_first = False
                self._read_on(self._making.batch_bytes)
            return what
        made = self._ahead.take()
        self._position = made.position
        self._cursors.update(made.changed)
        return made.what

    def num_ready(self) -> int:
        """Batches that can be taken without waiting."""
        return self._ahead.num_ready() if self._ahead else 0

    def position(self) -> cursors.Position:
        """The position after the last batch taken."""
        if self._ahead:
            return self._position
        self._making.check_made()
        return self._rows.position()

    def shard_cursors(self, *, shared: bool = False) -> cursors.Cursors:
        """The cursors after the last batch taken; see `HostBatches.shard_cursors`."""
        if self._ahead is None:
            return self._rows.shard_cursors(shared=shared)
        shards = self._cursors if shared else self._saves
        return {shard: self._cursors[shard] for shard in shards}

    def go_to(self, position: cursors.Position, read: elastic_data.ReadCursors) -> None:
        """Goes to a position; see `HostBatches.go_to`."""
        if self._ahead is None:
            self._rows.go_to(position, read)
        else:
            # Between two reads. If it fails, what was read is still good.
            self._ahead.submit(lambda: self._rows.go_to(position, read)).result()
            self._open.stop()
            self._ahead = None
        self._making.forget()
        self._is_first = True

    def close(self) -> None:
        """Ends what reads ahead; a read that hangs is left alone after a while."""
        self._open.close(wait=True)

    def _read_on(self, batch_bytes: int) -> None:
        depth = self._read_ahead.depth(batch_bytes)
        if not depth:
            return
        self._position = self._rows.position()
        self._cursors = dict(self._rows.shard_cursors(shared=True))
        self._saves = list(self._rows.shard_cursors())
        self._rows.changed()
        self._ahead = self._open.start(self._making.with_state, depth)


class _Open:
    """What a `Prefetched` has to close: its rows, and the thread if it has one."""

    def __init__(self, rows: elastic_data.HostBatches) -> None:
        self._rows = rows
        self._ahead: ahead.Ahead[Any] | None = None

    def start(self, call: Callable[[], Any], depth: int) -> ahead.Ahead[Any]:
        self._ahead = ahead.Ahead(call, depth=depth)
        return self._ahead

    def stop(self) -> None:
        if self._ahead:
            self._ahead.close()
        self._ahead = None

    def close(self, *, wait: bool) -> None:
        if self._ahead is None:
            self._rows.close()
            return
        # In the thread: it may be reading the rows.
        self._ahead.close(self._rows.close, wait=wait)


class _Making(Generic[T]):
    """Makes something of rows; those of which it could not are tried again."""

    def __init__(
        self,
        rows: elastic_data.HostBatches,
        make: Callable[[dict[str, np.ndarray]], T],
    ) -> None:
        self._rows = rows
        self._make = make
        self._unmade: dict[str, np.ndarray] | None = None
        self.batch_bytes = 0

    def __next__(self) -> T:
        if self._unmade is None:
            self._unmade = next(self._rows)
            self.batch_bytes = sum(part.nbytes for part in self._unmade.values())
        what = self._make(self._unmade)
        self._unmade = None
        return what

    def with_state(self) -> _Made[T]:
        what = next(self)
        position, changed = self._rows.position(), self._rows.changed()
        return _Made(what=what, position=position, changed=changed)

    def check_made(self) -> None:
        if self._unmade is not None:
            raise errors.DataError(
                "the last batch was read and not handed over; ask for it again before"
                " you save"
            )

    def forget(self) -> None:
        self._unmade = None
