"""What elastic data is to those that iterate over it, and what they are to it."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeAlias

import jax
import numpy as np

from elastic_ckpt.core import storage
from elastic_ckpt.data import cursors, rows

Batch: TypeAlias = dict[str, jax.Array]

# The feature that tells real rows from padding, in data that ends.
MASK = "mask"
# The feature that numbers the examples.
EXAMPLE_ID = "example_id"

# Reads the cursors of the given shards, whoever saved them.
ReadCursors = Callable[[Sequence[int]], cursors.Cursors]


class End(enum.Enum):
    """How data ends.

    PADDED: with the last real row; what is missing of the last batch is zeros, and
    `mask` tells them apart. DROPPED: with the last batch of which every row is real.
    """

    NEVER = "never"
    PADDED = "padded"
    DROPPED = "dropped"


class HostBatches(Protocol):
    """One host's rows of each global batch."""

    def __next__(self) -> dict[str, np.ndarray]:
        """The next rows: arrays of shape `[rows of the host, ...]`."""

    def position(self) -> cursors.Position:
        """The position after the last rows, the same on every host."""

    def shard_cursors(self, *, shared: bool = False) -> cursors.Cursors:
        """The cursors of the logical shards that this host saves, as they are now.

        With `shared` also of those that it runs, and another host saves.
        """

    def changed(self) -> cursors.Cursors:
        """The cursors that changed since the last call of this or `shard_cursors`."""

    def go_to(self, position: cursors.Position, read: ReadCursors) -> None:
        """Goes to a position of any host, reading the cursors that it needs here.

        If that fails, the host stays where it is.
        """

    def close(self) -> None:
        """Ends threads and processes that read ahead; `go_to` opens it again."""


class ElasticData(Protocol):
    """Data that any number of hosts can share; it has to survive cloudpickle."""

    @property
    def engine(self) -> str:
        """Names the kind of position that its batches have."""

    @property
    def end(self) -> End:
        """How it ends; if it does, batches have the feature `mask`, bool `[B]`."""

    @property
    def rows_of_end(self) -> int:
        """Rows of padding, one after the other, behind which there is no real one."""

    def identity(self) -> dict[str, storage.Json]:
        """What decides which example comes when, named by configuration keys."""

    def continuing(self, pipeline: Mapping[str, storage.Json]) -> ElasticData:
        """This data, its datasets under the names that a saved pipeline has for them.

        Args:
          pipeline: the identity in a saved state.
        """

    def row_order(self, row_hosts: np.ndarray) -> np.ndarray | None:
        """Where each row of a batch stands in what the hosts load; None if in place."""

    def host_batches(self, placement: rows.Placement) -> HostBatches:
        """The batches of one host."""
