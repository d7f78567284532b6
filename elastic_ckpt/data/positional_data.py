"""The positional engine: a Grain `MapDataset`, whose state is a position.

Example `n` of the run is element `n` of the dataset, so the state is the index of the
next example, as in Grain's `ElasticIterator`. Grain's iterator deals examples to hosts
round-robin; here, each host reads the rows of its own devices, so every batch equals
the single-host batch row by row.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Mapping
from typing import Any

import grain
import numpy as np

from elastic_ckpt.core import errors, storage
from elastic_ckpt.data import cursors, elastic_data, rows, shard_rows, state

Example = dict[str, np.ndarray]

# The position's key in Grain's `ElasticIterator`.
_POSITION = "global_next_index"
# Only datasets that repeat endlessly are longer.
_ENDLESS = sys.maxsize >> 16
_READ_OPTIONS = grain.ReadOptions(num_threads=4, prefetch_buffer_size=4)
_ADDED = {elastic_data.EXAMPLE_ID, elastic_data.MASK}


@dataclasses.dataclass(frozen=True, kw_only=True)
class PositionalData:
    """Elastic data whose examples are a dataset's elements; `positional` creates it.

    The attributes are the arguments of `positional`, except that `pipeline` is a dict,
    as in `identity`. Equality compares only `pipeline`.
    """

    dataset: grain.MapDataset = dataclasses.field(compare=False)
    pipeline: dict[str, storage.Json]
    read_options: grain.ReadOptions = dataclasses.field(compare=False)
    engine = "positional"
    num_shards = 0

    @property
    def end(self) -> elastic_data.End:
        """How the data ends."""
        is_endless = len(self.dataset) > _ENDLESS
        return elastic_data.End.NEVER if is_endless else elastic_data.End.PADDED

    def identity(self) -> dict[str, storage.Json]:
        """The settings, by configuration key, that determine the order of examples."""
        return {**self.pipeline, "num_examples": len(self.dataset)}

    def host_batches(self, placement: rows.Placement) -> elastic_data.HostBatches:
        """The rows of each global batch that one host loads."""
        return _HostBatches(self, placement)


def positional(
    dataset: grain.MapDataset,
    *,
    pipeline: storage.Json,
    read_options: grain.ReadOptions = _READ_OPTIONS,
) -> PositionalData:
    """Elastic data in which each element of a dataset is one example.

    This is the simplest kind of data: its state is the number of examples read. It
    allows any global shuffle, but no filters and no packing; use `sharded` for those.

        dataset = grain.MapDataset.source(source).seed(0).shuffle().map(decode).repeat()
        data = ec.data.positional(dataset, pipeline="decoded images, version 1")

    Args:
      dataset: a dataset of dicts of arrays with the same shapes in every example,
        picklable by cloudpickle. Without `.repeat()`, the data ends with the dataset,
        and batches have the feature `mask`, bool `[B]`, which is false for padding
        rows. Batches also have the feature `example_id`, uint32 `[B, 2]`, the index of
        the example.
      pipeline: a name and version for the dataset, as JSON; change it when the examples
        change.
      read_options: the number of reader threads on each host, and how many batches
        they read ahead.

    Raises:
      ConfigError: if `dataset` is not a `MapDataset`, or `pipeline` is empty.
    """
    if not isinstance(dataset, grain.MapDataset):
        raise errors.ConfigError(
            f"positional: dataset is of type {type(dataset).__name__}; pass a"
            " grain.MapDataset, or use ec.data.sharded"
        )
    if pipeline in ("", None):
        raise errors.ConfigError(
            'positional: pipeline is empty; pass pipeline="a name, version 1", and'
            " change it when the examples change"
        )
    return PositionalData(
        dataset=dataset, pipeline={"pipeline": pipeline}, read_options=read_options
    )


class _HostBatches:
    """One host's rows, read by a Grain `ElasticIterator` over only these rows."""

    # Grain's threads read the examples.
    in_process_by_default = False

    def __init__(self, data: PositionalData, placement: rows.Placement) -> None:
        self._data, self._placement = data, placement
        self._move(0)

    def __next__(self) -> Example:
        ids = self._next + self._placement.held
        try:
            batch = next(self._batches)
            if self._data.end is not elastic_data.End.NEVER:
                batch = {**batch, elastic_data.MASK: ids < len(self._data.dataset)}
            batch = shard_rows.with_ids(batch, ids)
        except BaseException:  # Ctrl-C too
            # Some rows of this batch were already taken, so the next call rereads all.
            self.close()
            raise
        size = self._placement.global_batch_size
        self._position = self._next + size
        self._next += self._placement.every * size
        return batch

    def get_state(self) -> cursors.HostState:
        return {_POSITION: self._position}, {}

    def go_to(self, position: cursors.Position, read: elastic_data.ReadCursors) -> None:
        del read  # positional data has no cursors
        self._batches.close()
        self._move(state.row_of(position))

    def close(self) -> None:
        self._batches.close()
        self._open()

    def _move(self, position: int) -> None:
        # `_next` is the first row of the next batch read here, at or after `position`.
        placement, self._position = self._placement, position
        self._next = position + placement.first * placement.global_batch_size
        self._open()

    def _open(self) -> None:
        # Reads nothing until the first batch is requested.
        row = functools.partial(_row, self._data.dataset, self._placement, self._next)
        self._batches = grain.experimental.ElasticIterator(
            grain.MapDataset.range(sys.maxsize).map(row),
            len(self._placement.held),
            grain.sharding.NoSharding(),
            read_options=self._data.read_options,
        )


def _row(
    dataset: grain.MapDataset, placement: rows.Placement, position: int, index: int
) -> Example:
    # The example or padding in a host's row, counted from `position`.
    batch, row = divmod(index, len(placement.held))
    first = position + batch * placement.every * placement.global_batch_size
    number = first + int(placement.held[row])
    is_padding = number >= len(dataset)
    element: Any = dataset[0 if is_padding else number]
    if not isinstance(element, Mapping) or _ADDED & element.keys():
        raise errors.DataError(
            f"positional: example {number} of the dataset is {element!r:.200}; examples"
            " must be dicts of arrays, and must not use the feature names"
            f" {sorted(_ADDED)}, which elastic_ckpt adds to each batch; if the dataset"
            " filters examples, use ec.data.sharded"
        )
    if is_padding:
        element = {n: shard_rows.zeros_like(each) for n, each in element.items()}
    return {name: shard_rows.array_of(each) for name, each in element.items()}
