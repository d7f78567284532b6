"""The way in for a run that has saved the states of Grain iterators so far.

It is exact where each of P processes ran a pipeline of its own and saved its state: if
logical shard `p` of P is that very pipeline, its cursor is that very state. From then
on the run is elastic.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from etils import epath

from elastic_ckpt.core import errors
from elastic_ckpt.data import cursors, shard_rows, state
from elastic_ckpt.data.sharded_data import ShardedData


def adopt(
    directory: epath.PathLike,
    data: ShardedData,
    *,
    states: Sequence[Any],
    num_rows: int,
) -> None:
    """Writes a data state into `directory` that any iterator of `data` can load.

    Args:
      directory: where to write; to Orbax, the directory of a checkpointable.
      data: P logical shards, of which shard `p` is the pipeline of process `p`.
      states: what `get_state` of the P Grain iterators gave, one row an element.
      num_rows: rows that each of them had yielded.

    Raises:
      DataError: if there is not one state for each shard.
    """
    if len(states) != data.num_shards:
        raise errors.DataError(
            f"{len(states)} Grain states for {data.num_shards} logical shards; give the"
            " state of each process, and as many shards"
        )
    position: cursors.Position = {"stream_row": num_rows * data.num_shards}
    found = {shard: shard_rows.to_json(value) for shard, value in enumerate(states)}
    cursors.write(directory, found, position)
    state.write(
        directory,
        state.DataState(
            engine=data.engine, position=position, pipeline=data.identity()
        ),
    )
