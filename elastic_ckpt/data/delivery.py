"""From what hosts have loaded to the batch that a loop gets.

A batch is a global array. Hosts load the rows that their devices hold (`RowsHeld`), or
others, which `Delivery` puts into place on the devices; it also agrees on the end.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Iterable
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from jax.sharding import NamedSharding, PartitionSpec

from elastic_ckpt.core import errors, metrics, topology
from elastic_ckpt.data import elastic_data


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowsHeld:
    """Which rows of a batch each host loads for its devices.

    Hosts whose devices hold the same rows are one group, and count as one host. If
    devices of two hosts share some of their rows and not all, both hosts load the rows
    of both, and use a part of them; if that leaves groups of different sizes, all hosts
    load all rows.

    Attributes:
      holders: the rows of each process, ascending, by process number.
      groups: the distinct ones of these, ordered by their first row, of one size.
      unused: the most rows that a host loads and none of its devices holds.
    """

    holders: dict[int, tuple[int, ...]]
    groups: list[tuple[int, ...]]
    unused: int

    @classmethod
    def of(cls, sharding: NamedSharding, global_batch_size: int) -> RowsHeld:
        """The rows that the first entry of `sharding`'s spec gives to each host.

        Raises:
          ConfigError: if the batch does not divide over the mesh axes of that entry.
        """
        held: dict[int, set[int]] = {}
        rows = feature_sharding(sharding, "global_batch_size", (global_batch_size,))
        for device, index in rows.devices_indices_map((global_batch_size,)).items():
            held.setdefault(device.process_index, set()).update(
                range(*index[0].indices(global_batch_size))
            )
        groups = _groups(held.values())
        if len({len(group) for group in groups}) > 1:
            groups = [tuple(range(global_batch_size))]
        group_of_row = {row: group for group in groups for row in group}
        holders = {host: group_of_row[min(rows)] for host, rows in held.items()}
        unused = max(len(holders[host]) - len(held[host]) for host in held)
        return cls(holders=holders, groups=groups, unused=unused)

    def group(self, host: int) -> int:
        """The group of a host."""
        return self.groups.index(self.holders[host])

    def first_holder(self, host: int) -> int:
        """The first host that holds the rows of `host`."""
        mine = self.holders[host]
        return min(other for other, held in self.holders.items() if held == mine)

    def row_hosts(self) -> np.ndarray:
        """The group that holds each row, int `[B]`."""
        found = np.full(sum(map(len, self.groups)), -1)
        for number, held in enumerate(self.groups):
            found[list(held)] = number
        return found


def _groups(held: Iterable[set[int]]) -> list[tuple[int, ...]]:
    # The unions of the sets that have a row in common, ordered by their first row.
    groups: dict[int, set[int]] = {}
    group_of_row: dict[int, int] = {}
    for number, rows in enumerate({frozenset(rows) for rows in held}):
        merged = set(rows)
        for other in {group_of_row[row] for row in rows if row in group_of_row}:
            merged |= groups.pop(other)
        groups[number] = merged
        group_of_row.update(dict.fromkeys(merged, number))
    return sorted(tuple(sorted(rows)) for rows in groups.values())


@functools.lru_cache(maxsize=256)
def feature_sharding(
    sharding: NamedSharding, name: str, shape: tuple[int, ...]
) -> NamedSharding:
    """How a feature of a batch lies on the devices.

    A feature without the dims of the later entries of the batch's spec, such as `mask`
    of shape `[B]`, is sharded by the first ones; so is `example_id`, uint32 `[B, 2]`,
    whose dim 1 is no sequence.

    Args:
      sharding: that of a batch.
      name: the feature, or `global_batch_size` for the rows themselves.
      shape: its shape, `[B, ...]`.

    Raises:
      ConfigError: if a dim does not divide over the mesh axes that shard it.
    """
    num_dims = 1 if name == elastic_data.EXAMPLE_ID else len(shape)
    spec = PartitionSpec(*sharding.spec[:num_dims])
    for dim, entry in enumerate(tuple(spec) or (None,)):
        axes = {axis: sharding.mesh.shape[axis] for axis in topology.axes_of(entry)}
        parts = math.prod(axes.values())
        if shape[dim] < 1 or shape[dim] % parts:
            what = f"dim {dim} of feature {name!r}, of shape {list(shape)},"
            if not dim:
                what = f"global_batch_size={shape[0]}"
            over = ", ".join(f"{axis}={size}" for axis, size in axes.items())
            raise errors.ConfigError(
                f"{what} does not divide over the {parts} parts that the mesh makes of"
                f" it ({over or 'no axis'}); choose a positive multiple of {parts}, or"
                " shard it over fewer axes (spec=)"
            )
    return NamedSharding(sharding.mesh, spec)


def batches_of_end(data: elastic_data.ElasticData, global_batch_size: int) -> int:
    """Batches without a real row, one after the other, that mean the end of `data`.

    A batch that is all padding is otherwise passed over: the shards that it takes rows
    from have ended, others may not.
    """
    if data.end is not elastic_data.End.PADDED:
        return 1
    return -(-data.rows_of_end // global_batch_size)


class Loader(Protocol):
    """Whatever has the next batch on the devices."""

    def next(self) -> elastic_data.Batch:
        """The next batch that hosts have loaded."""

    def num_ready(self) -> int:
        """Batches that can be had without waiting."""

    def explain(self, waited_secs: float) -> str:
        """Why the loop has just waited so long, in words that name a host."""


class Delivery:
    """What is left to do with a global batch on devices before a loop may have it.

    Puts rows into the places of a one-host batch, if hosts load others than they hold;
    and ends data that is finite at the same batch on every host. Both are computations
    over all devices, so every host has to call it, in the same order. It measures how
    long the loop waits, and says so if that is too long.

    Args:
      data: what the batches are of.
      sharding: how a batch lies on devices; see `feature_sharding`.
      global_batch_size: rows of a global batch, B.
      warn_after_secs: a wait that is worth a warning; that for a first batch is not.
    """

    def __init__(
        self,
        data: elastic_data.ElasticData,
        *,
        sharding: NamedSharding,
        global_batch_size: int,
        warn_after_secs: float,
    ) -> None:
        self._data = data
        self._sharding = sharding
        self._warn_after_secs = warn_after_secs
        self._goes_on: Callable[[jax.Array], jax.Array] | None = None
        if data.end is not elastic_data.End.NEVER:
            replicated = NamedSharding(sharding.mesh, PartitionSpec())
            test = jnp.any if data.end is elastic_data.End.PADDED else jnp.all
            self._goes_on = jax.jit(test, out_shardings=replicated)
        self.resize(global_batch_size)

    def begin(self) -> None:
        """Expects a wait, for the loader begins at another position."""
        self._is_first = True

    def resize(self, global_batch_size: int) -> None:
        """Takes batches of another size from now on."""
        self.begin()
        held = RowsHeld.of(self._sharding, global_batch_size)
        self._order = self._data.row_order(held.row_hosts())
        self._exchange: Callable[[elastic_data.Batch], elastic_data.Batch] | None = None
        self._batches_of_end = batches_of_end(self._data, global_batch_size)
        self._num_bytes = 0
        self._num_rows = global_batch_size
        if topology.num_hosts() > 1:
            self._num_rows = len(held.holders[topology.this_host()])

    def __call__(self, loader: Loader) -> elastic_data.Batch:
        """The next batch that the loop gets, of those that `loader` has.

        Raises:
          StopIteration: if the data has ended.
        """
        metrics.DATA_READ_AHEAD.record(loader.num_ready())
        for _ in range(self._batches_of_end):
            batch = self._loaded(loader)
            if self._goes_on is None or bool(self._goes_on(batch[elastic_data.MASK])):
                metrics.DATA_ROWS.record(self._num_rows)
                self._num_bytes = self._num_bytes or self._bytes_here(batch)
                metrics.DATA_BYTES.record(self._num_bytes)
                return batch if self._order is None else self._in_order(batch)
        raise StopIteration

    def _in_order(self, batch: elastic_data.Batch) -> elastic_data.Batch:
        if self._exchange is None:
            order = self._order
            self._exchange = jax.jit(
                lambda batch: jax.tree.map(lambda leaf: leaf[order], batch),
                out_shardings={name: array.sharding for name, array in batch.items()},
            )
        return self._exchange(batch)

    def _loaded(self, loader: Loader) -> elastic_data.Batch:
        began = time.monotonic()
        batch = loader.next()
        waited = time.monotonic() - began
        metrics.DATA_WAIT.record(waited)
        if waited > self._warn_after_secs and not self._is_first:
            logging.warning("%s", loader.explain(waited))
        self._is_first = False
        return batch

    def _bytes_here(self, batch: elastic_data.Batch) -> int:
        of_all = sum(feature.nbytes for feature in batch.values())
        size = len(next(iter(batch.values())))
        return of_all * self._num_rows // size
