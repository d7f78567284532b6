"""From what hosts have loaded to the batch that a loop gets.

A batch is a global array. Hosts load the rows that their devices hold (`RowsHeld`), or
others, which `Delivery` puts into place on the devices; it also agrees on the end.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from elastic_ckpt.core import errors, metrics, topology
from elastic_ckpt.data import elastic_data


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowsHeld:
    """Which rows of a batch the devices of each host hold.

    Attributes:
      holders: the rows of each process, ascending, by process number.
      groups: the distinct ones of these, ordered by their first row; hosts that hold
        the same rows are one group, and count as one host.
    """

    holders: dict[int, tuple[int, ...]]
    groups: list[tuple[int, ...]]

    @classmethod
    def of(cls, sharding: Sharding, global_batch_size: int) -> RowsHeld:
        """The rows that `sharding` gives to each host.

        Raises:
          ConfigError: if the batch does not divide over the devices, or two hosts share
            some of their rows and not all.
        """
        held: dict[int, set[int]] = {}
        for device, index in _rows_of_devices(sharding, global_batch_size).items():
            part = (index or (slice(None),))[0]
            held.setdefault(device.process_index, set()).update(
                range(*part.indices(global_batch_size))
            )
        holders = {host: tuple(sorted(of_host)) for host, of_host in held.items()}
        groups = sorted(set(holders.values()), key=lambda group: group[0])
        if sum(map(len, groups)) != global_batch_size:
            raise errors.ConfigError(
                f"the sharding {sharding} gives hosts overlapping rows of a batch;"
                " shard the rows so that two hosts have the same rows or none in common"
            )
        return cls(holders=holders, groups=groups)

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


def _rows_of_devices(sharding: Sharding, global_batch_size: int) -> Mapping[Any, Any]:
    try:
        if global_batch_size > 0:
            return sharding.devices_indices_map((global_batch_size,))
    except ValueError:
        pass
    # Any batch with a row for each device divides.
    ranges = sharding.devices_indices_map((sharding.num_devices,)).values()
    parts = len({str(index) for index in ranges})
    raise errors.ConfigError(
        f"global_batch_size={global_batch_size} does not divide over the {parts} parts"
        f" into which the mesh cuts a batch; choose a positive multiple of {parts}"
    )


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
      sharding: how their rows lie on devices.
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
        order = self._data.row_order(held.row_hosts())
        self._exchange: Callable[[elastic_data.Batch], elastic_data.Batch] | None = None
        if order is not None:
            self._exchange = jax.jit(
                lambda batch: jax.tree.map(lambda leaf: leaf[order], batch),
                out_shardings=self._sharding,
            )
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
                return self._exchange(batch) if self._exchange else batch
        raise StopIteration

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
