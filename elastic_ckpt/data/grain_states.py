"""Converts the saved states of Grain iterators into an elastic data state.

The conversion is exact if each of P processes ran its own pipeline and saved its state:
if logical shard `p` of P is the same pipeline, its cursor is that state. From then on
the run is elastic.
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
    """Converts the states of Grain iterators, one a process, to elastic data.

    A run of P processes with Grain alone continues with P logical shards, on any number
    of hosts.

    Args:
      directory: the directory to write the data state to; with Orbax, that of a
        checkpointable.
      data: data of P logical shards, in which shard `p` is the pipeline that process
        `p` had.
      states: the results of `get_state` of the P iterators, before rows are batched.
      num_rows: the number of rows that each iterator had yielded.

    Raises:
      DataError: if there are not as many states as shards.
    """
    if len(states) != data.num_shards:
        raise errors.DataError(
            f"{len(states)} Grain states were given for {data.num_shards} logical"
            " shards; give the state of every process, and make num_shards their"
            " number"
        )
    position: cursors.Position = {"stream_row": num_rows * data.num_shards}
    by_shard = {shard: shard_rows.to_json(value) for shard, value in enumerate(states)}
    cursors.write(directory, by_shard, position)
    state.write(
        directory,
        state.DataState(
            engine=data.engine, position=position, pipeline=data.identity()
        ),
    )
