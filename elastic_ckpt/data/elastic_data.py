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

# The feature that is true for real rows and false for padding, in finite data.
MASK = "mask"
# The feature that numbers the examples.
EXAMPLE_ID = "example_id"

# Reads the cursors of the given shards, from all hosts that saved some.
ReadCursors = Callable[[Sequence[int]], cursors.Cursors]


class End(enum.Enum):
    """How data ends; each value can be given by its name, such as `"padded"`.

    Attributes:
      NEVER: it does not end.
      PADDED: after the last row. Zeros fill the last batches; `mask` is false there.
    """

    NEVER = "never"
    PADDED = "padded"

    @classmethod
    def _missing_(cls, value: object) -> End:
        raise errors.ConfigError(
            f"end={value!r}; use ec.data.End or one of 'never', 'padded'"
        )


class HostBatches(Protocol):
    """One host's rows of each global batch."""

    @property
    def in_process_by_default(self) -> bool:
        """Whether rows are made in this process because nobody chose where."""

    def __next__(self) -> dict[str, np.ndarray]:
        """The next rows: arrays of shape `[rows of the host, ...]`."""

    def position(self) -> cursors.Position:
        """The position after the last rows, the same on every host."""

    def shard_cursors(self) -> cursors.Cursors:
        """The newest cursors of the logical shards that this host runs.

        Later rows do not change the mapping.
        """

    def go_to(self, position: cursors.Position, read: ReadCursors) -> None:
        """Moves to a position that any host saved; reads the cursors that it needs.

        If this fails, the position does not change.
        """

    def close(self) -> None:
        """Ends threads and processes that read ahead; `go_to` starts them again."""


class ElasticData(Protocol):
    """Data whose global batches are the same on any number of hosts.

    `from_config`, `positional` and `sharded` make it, and `ec.batches` iterates over
    it; the methods below are what iterators call. It must be picklable by cloudpickle.
    """

    @property
    def engine(self) -> str:
        """The name of the engine, which determines the form of its positions."""

    @property
    def end(self) -> End:
        """How the data ends; if it does, batches have a `mask`, bool `[B]`."""

    @property
    def num_shards(self) -> int:
        """The number of logical shards; 0 if the state is a position alone."""

    def identity(self) -> dict[str, storage.Json]:
        """The settings that determine the order of examples, by configuration key."""

    def host_batches(self, placement: rows.Placement) -> HostBatches:
        """The rows of each global batch that one host loads."""


def check(data: Any, *, caller: str) -> None:
    """Raises a ConfigError that names a way, if `data` is no `ElasticData`."""
    if hasattr(data, "host_batches") and not isinstance(data, type):
        return
    raise errors.ConfigError(
        f"{caller}: data is a {type(data).__name__}; give the result of"
        " ec.data.from_config(keys), or that of ec.data.sharded(make_shard,"
        ' num_shards=S, pipeline="a name, version 1"), where make_shard(shard) returns'
        " the part dataset[shard::S] of a MapDataset of Grain, followed by"
        " .to_iter_dataset(); or, for a MapDataset that has no filters, that of"
        ' ec.data.positional(dataset, pipeline="a name, version 1")'
    )


def batch_size(value: Any, *, caller: str) -> int:
    """A global batch size, checked to be an integer of any type.

    Raises:
      ConfigError: if it is not.
    """
    if isinstance(value, bool | np.bool_) or not isinstance(value, int | np.integer):
        raise errors.ConfigError(
            f"{caller}: global_batch_size={value!r}; give a whole number of rows"
        )
    return int(value)
