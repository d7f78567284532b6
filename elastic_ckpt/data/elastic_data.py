"""The interfaces between elastic data and the iterators over it."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

import jax
import numpy as np

from elastic_ckpt.core import errors, storage
from elastic_ckpt.data import cursors, rows

Batch: TypeAlias = dict[str, jax.Array]

# The additional feature of finite data: true for real rows, false for padding.
MASK = "mask"
# The feature with the ID of each example: on devices two uint32, because JAX lacks
# int64 by default.
EXAMPLE_ID = "example_id"
# The ID of a padding row.
NO_ID = 2**64 - 1

# Reads the cursors of the given shards, no matter which hosts saved them.
ReadCursors = Callable[[Sequence[int]], cursors.Cursors]
# A position to go to, and how to read the cursors there.
Place = tuple[cursors.Position, ReadCursors]


class End(enum.Enum):
    """How data ends. You can pass a member or its value, such as `"padded"`.

    Attributes:
      NEVER: the data does not end.
      PADDED: the data ends after its last row. Rows of zeros, for which `mask` is
        false, fill up the last batches.
    """

    NEVER = "never"
    PADDED = "padded"

    @classmethod
    def _missing_(cls, value: object) -> End:
        raise errors.ConfigError(
            f"end={value!r} is invalid; use 'never', 'padded' or an ec.data.End"
        )


class HostBatches(Protocol):
    """One host's rows of each global batch."""

    @property
    def in_process_by_default(self) -> bool:
        """Whether rows are made in this process only because that is the default."""

    def __next__(self) -> dict[str, np.ndarray]:
        """The next rows: arrays of shape `[rows of the host, ...]`."""

    def get_state(self) -> cursors.HostState:
        """The position after the last rows, and the newest cursors of this host.

        The cursors are an immutable mapping.
        """

    def go_to(self, position: cursors.Position, read: ReadCursors) -> None:
        """Moves to a position and reads the cursors that the position requires.

        If this fails, the position does not change.
        """

    def close(self) -> None:
        """Stops threads and processes that read ahead; `go_to` restarts them."""


class ElasticData(Protocol):
    """Data whose global batches are the same on any number of hosts.

    `from_config`, `positional` and `sharded` create it, `ec.batches` iterates over it,
    and the iterators call the methods below. It must be picklable by cloudpickle.
    """

    @property
    def engine(self) -> str:
        """The engine name, which determines the form of positions."""

    @property
    def end(self) -> End:
        """How the data ends. Batches of finite data have a `mask`, bool `[B]`."""

    @property
    def num_shards(self) -> int:
        """The number of logical shards; 0 if the state is only a position."""

    def identity(self) -> dict[str, storage.Json]:
        """The settings, by configuration key, that determine the order of examples."""

    def host_batches(self, placement: rows.Placement) -> HostBatches:
        """The rows of each global batch that one host loads."""


def check(data: Any, *, caller: str) -> None:
    """Raises a ConfigError that explains how to create data unless `data` is valid."""
    if hasattr(data, "host_batches") and not isinstance(data, type):
        return
    raise errors.ConfigError(
        f"{caller}: data is of type {type(data).__name__}, not elastic data; pass the"
        " result of ec.data.from_config(keys). For a Grain MapDataset, pass"
        ' ec.data.positional(dataset, pipeline="a name, version 1") if it has no'
        " filters. Otherwise, pass ec.data.sharded(make_shard, num_shards=S,"
        ' pipeline="a name, version 1"), where make_shard(shard) returns'
        " dataset[shard::S].to_iter_dataset()"
    )


def batch_size(value: Any, *, caller: str) -> int:
    """Converts a global batch size to an int.

    Raises:
      ConfigError: if the value is neither a Python nor a NumPy integer.
    """
    if isinstance(value, bool | np.bool_) or not isinstance(value, int | np.integer):
        raise errors.ConfigError(
            f"{caller}: global_batch_size={value!r} is not an integer; pass the number"
            " of rows in a global batch"
        )
    return int(value)


def split_ids(ids: np.ndarray) -> np.ndarray:
    """Splits IDs, uint64, into uint32 `[rows, 2]`: the high half, then the low half."""
    return np.stack([ids >> np.uint64(32), ids], axis=1).astype(np.uint32)


def join_ids(halves: np.ndarray) -> np.ndarray:
    """The inverse of `split_ids`: the IDs in uint32 `[rows, 2]`, as uint64 `[rows]`."""
    high, low = halves[:, 0].astype(np.uint64), halves[:, 1].astype(np.uint64)
    return high << np.uint64(32) | low
