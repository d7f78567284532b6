"""Turns the rows that hosts have loaded into the batches that a loop receives.

A batch is a global array, of which each host loads the rows that its devices hold
(`placements`). `Delivery` ends finite data on all hosts at the same batch.
"""

from __future__ import annotations

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
from elastic_ckpt.data import elastic_data, rows


def rows_held(sharding: NamedSharding, global_batch_size: int) -> dict[int, np.ndarray]:
    """The rows that the first entry of `sharding`'s spec assigns to each host.

    Raises:
      ConfigError: if the batch does not divide over the mesh axes of that entry.
    """
    shape = (global_batch_size,)
    of_rows = feature_sharding(sharding, "global_batch_size", shape)
    held: dict[int, set[int]] = {}
    for device, index in of_rows.devices_indices_map(shape).items():
        held.setdefault(device.process_index, set()).update(
            range(*index[0].indices(global_batch_size))
        )
    return {host: np.array(sorted(own)) for host, own in sorted(held.items())}


@functools.lru_cache(maxsize=256)
def placements(
    sharding: NamedSharding, global_batch_size: int, later: tuple[int, ...] = ()
) -> dict[int, rows.Placement]:
    """The rows of each host, by its number, in batches that are sharded in some way.

    Args:
      sharding: the sharding of a batch.
      global_batch_size: B.
      later: other sizes that batches may have later.

    Raises:
      ConfigError: if a batch does not divide over the mesh.
    """
    held = rows_held(sharding, global_batch_size)
    others = {size: rows_held(sharding, size) for size in later}
    return {
        host: rows.Placement(
            global_batch_size=global_batch_size,
            held=own,
            later={size: of_size[host] for size, of_size in others.items()},
        )
        for host, own in held.items()
    }


@functools.lru_cache(maxsize=256)
def saved_shards(
    sharding: NamedSharding, global_batch_size: int, num_shards: int
) -> np.ndarray:
    """The host that saves each logical shard, int64 `[S]`."""
    held = rows_held(sharding, global_batch_size)
    return rows.shard_hosts(num_shards, global_batch_size, held)


def warn_of_shared_shards(
    data: elastic_data.ElasticData, placements: Iterable[rows.Placement]
) -> None:
    """Warns if several hosts run the same logical shards."""
    placements = list(placements)
    reads = rows.shard_reads(data.num_shards, placements) if data.num_shards else 1
    if reads > 1:
        logging.warning(
            "each of the %d logical shards is read %.3g times, as hosts with parts of"
            " %d rows run the same ones; choose a number of shards and batches that the"
            " number of hosts divides",
            data.num_shards,
            reads,
            placements[0].global_batch_size,
        )


@functools.lru_cache(maxsize=256)
def feature_sharding(
    sharding: NamedSharding, name: str, shape: tuple[int, ...]
) -> NamedSharding:
    """The sharding of a feature of a batch.

    A feature with fewer dims than the batch's spec has entries, such as `mask` of shape
    `[B]`, is sharded by the first entries. So is `example_id`, uint32 `[B, 2]`, whose
    dim 1 is not a sequence.

    Args:
      sharding: the sharding of a batch.
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
                f"{what} cannot be divided evenly among the {parts} parts that the mesh"
                f" makes of it ({over or 'no axis'}); choose a positive multiple of"
                f" {parts}, or shard it over fewer axes (spec=)"
            )
    return NamedSharding(sharding.mesh, spec)


def batches_of_end(data: elastic_data.ElasticData, global_batch_size: int) -> int:
    """The number of consecutive batches without a real row that mark the end of `data`.

    Fewer such batches are skipped: the shards of their rows have ended, but other
    shards may not have.
    """
    if data.end is elastic_data.End.NEVER or not data.num_shards:
        return 1
    return -(-data.num_shards // global_batch_size)


class Loader(Protocol):
    """Loads batches onto the devices."""

    def next(self) -> elastic_data.Batch:
        """The next batch that hosts have loaded."""

    def num_ready(self) -> int:
        """The number of batches that `next` returns without waiting."""

    def explain(self, waited_secs: float) -> str:
        """A message with the reason for the last wait, which names a host."""


class Delivery:
    """Gives the loop the global batches that hosts have loaded.

    It ends finite data at the same batch on every host. That is a computation over all
    devices, so all hosts must call it in the same order. It also measures the time that
    the loop waits, and warns about long waits.

    Args:
      data: the data of the batches.
      sharding: the sharding of a batch; see `feature_sharding`.
      global_batch_size: rows of a global batch, B.
      warn_after_secs: the length of a wait that causes a warning, except for the first
        batch.
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
        self._has_rows: Callable[[jax.Array], jax.Array] | None = None
        if data.end is not elastic_data.End.NEVER:
            replicated = NamedSharding(sharding.mesh, PartitionSpec())
            self._has_rows = jax.jit(jnp.any, out_shardings=replicated)
        self.resize(global_batch_size)

    def resize(self, global_batch_size: int) -> None:
        """Continues with batches of another size, or from another position."""
        # The first wait is no reason for a warning.
        self._is_first = True
        self._batches_of_end = batches_of_end(self._data, global_batch_size)
        self._rows_here = self._num_rows = global_batch_size
        if topology.num_hosts() > 1:
            held = rows_held(self._sharding, global_batch_size)
            self._rows_here = len(held[topology.this_host()])

    def __call__(self, loader: Loader) -> elastic_data.Batch:
        """The next batch for the loop, from those of `loader`.

        Raises:
          StopIteration: if the data has ended.
        """
        metrics.DATA_READ_AHEAD.record(loader.num_ready())
        for _ in range(self._batches_of_end):
            batch = self._loaded(loader)
            if self._has_rows is None or bool(self._has_rows(batch[elastic_data.MASK])):
                num_bytes = sum(feature.nbytes for feature in batch.values())
                metrics.DATA_ROWS.record(self._rows_here)
                metrics.DATA_BYTES.record(num_bytes * self._rows_here // self._num_rows)
                return batch
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
