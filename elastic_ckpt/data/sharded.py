"""The sharded engine: S logical shards, each a whole pipeline of its own.

A shard may filter, tokenise, chunk, shuffle and pack as it likes, for nothing inside it
depends on hosts or batches. Rows are taken from the shards in turn (`data.rows`); a
host runs the shards that it owns, and hands their cursors on when the hosts change.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import grain
import jax
import numpy as np

from elastic_ckpt.core import errors, storage
from elastic_ckpt.data import cursors, example_id, iterator, rows

# Marks a JSON list that was a tuple.
_TUPLE = "()"

MakeShard = Callable[[int], grain.IterDataset]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShardedData:
    """A pipeline for each logical shard, endless and elastic.

    Attributes:
      make_shard: makes the pipeline of a shard from the shard's number: a Grain
        `IterDataset` without end, of dicts of arrays that have the same shapes
        everywhere. It has to be a pure function and survive cloudpickle. Batches have
        one feature more, `example_id`, uint32 `[B, 2]`: each row's place in the stream.
      num_shards: S, frozen for the life of a run.
      pipeline: names what `make_shard` does; change it when the examples change.
    """

    make_shard: MakeShard
    num_shards: int
    pipeline: str = ""

    @property
    def engine(self) -> str:
        """Names the kind of position that the batches have."""
        return "sharded"

    def identity(self) -> dict[str, storage.Json]:
        """What decides which example comes when."""
        return {"num_logical_shards": self.num_shards, "pipeline": self.pipeline}

    def host_batches(self, placement: rows.Placement) -> iterator.HostBatches:
        """The rows of each global batch that one host loads."""
        return _HostBatches(self.make_shard, self.num_shards, placement)


def sharded(
    make_shard: MakeShard, *, num_shards: int, pipeline: str = ""
) -> ShardedData:
    """Elastic data from a pipeline for each logical shard; see `ShardedData`."""
    return ShardedData(make_shard=make_shard, num_shards=num_shards, pipeline=pipeline)


class _HostBatches:
    """The shards of one host, taken in turn."""

    def __init__(
        self, make_shard: MakeShard, num_shards: int, placement: rows.Placement
    ) -> None:
        self._make_shard = make_shard
        self._placement = placement
        self._batch = rows.BatchRows(
            num_shards=num_shards, global_batch_size=len(placement.row_hosts)
        )
        self._iterators: dict[int, grain.DatasetIterator] = {}
        self.go_to({"stream_row": 0}, lambda shards: dict.fromkeys(shards))

    def __iter__(self) -> _HostBatches:
        return self

    def __next__(self) -> dict[str, np.ndarray]:
        self._check_whole()
        try:
            return self._next()
        except Exception as error:
            # Some shards are further than the position now: neither go on nor save.
            self._error = error
            raise

    def _next(self) -> dict[str, np.ndarray]:
        shards = self._batch.shards(self._stream_row)[self._mine.rows]
        yielded = [self._next_row(shard) for shard in shards.tolist()]
        ids = rows.stream_rows(self._batch, self._stream_row)[self._mine.rows]
        self._stream_row += self._batch.global_batch_size
        batch = jax.tree.map(lambda *leaves: np.stack(leaves), *yielded)
        return {**batch, "example_id": np.stack([example_id.split(i) for i in ids])}

    def position(self) -> cursors.Position:
        self._check_whole()
        return {"stream_row": self._stream_row}

    def shard_cursors(self) -> cursors.Cursors:
        # A shard that was not opened since the last resume is still where it was.
        return self._unopened | {
            shard: _to_json(opened.get_state())
            for shard, opened in self._iterators.items()
        }

    def go_to(self, position: cursors.Position, read: iterator.ReadCursors) -> None:
        stream_row = position["stream_row"]
        assert isinstance(stream_row, int)
        mine = rows.assign(self._batch, self._placement.row_hosts, stream_row)[
            self._placement.host
        ]
        unopened = dict(read(mine.shards.tolist()))
        for opened in self._iterators.values():
            opened.close()
        self._iterators = {}
        self._unopened = unopened
        self._mine = mine
        self._stream_row = stream_row
        self._error: Exception | None = None

    def _check_whole(self) -> None:
        if self._error is not None:
            raise errors.DataError(
                "the data stopped in the middle of a batch; load a saved state before"
                f" you go on or save ({self._error})"
            ) from self._error

    def _next_row(self, shard: int) -> dict[str, Any]:
        opened = self._iterators.get(shard)
        if opened is None:
            opened = iter(self._make_shard(shard))
            cursor = self._unopened.pop(shard)
            if cursor is not None:
                opened.set_state(_from_json(cursor))
            self._iterators[shard] = opened
        try:
            return next(opened)
        except StopIteration:
            raise errors.DataError(
                f"logical shard {shard} came to its end; let make_shard repeat its"
                " records without end"
            ) from None


def _to_json(state: Any) -> Any:
    # Grain's states hold NumPy integers, and tuples that must not come back as lists:
    # its concat-then-split compares them with tuples.
    if isinstance(state, dict):
        return {key: _to_json(value) for key, value in state.items()}
    if isinstance(state, tuple):
        return {_TUPLE: [_to_json(value) for value in state]}
    if isinstance(state, list):
        return [_to_json(value) for value in state]
    return state.item() if isinstance(state, np.generic) else state


def _from_json(cursor: Any) -> Any:
    if isinstance(cursor, dict):
        if cursor.keys() == {_TUPLE}:
            return tuple(_from_json(value) for value in cursor[_TUPLE])
        return {key: _from_json(value) for key, value in cursor.items()}
    if isinstance(cursor, list):
        return [_from_json(value) for value in cursor]
    return cursor
