"""Which rows of a global batch each host loads, and how they become a global array."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np
from absl import logging
from jax import dtypes
from jax.sharding import NamedSharding, PartitionSpec

from elastic_ckpt.core import errors, topology
from elastic_ckpt.data import elastic_data, rows


def rows_held(sharding: NamedSharding, global_batch_size: int) -> dict[int, np.ndarray]:
    """The rows that the first entry of `sharding`'s spec assigns to each host.

    Raises:
      ConfigError: if the batch cannot be split evenly over that entry's mesh axes.
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
    """Each host's rows by host index; `later` lists batch sizes that may follow.

    Raises:
      ConfigError: if a batch cannot be split evenly over the mesh.
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
    """The index of the host that saves each logical shard, int64 `[S]`."""
    return rows.shard_hosts(
        num_shards, global_batch_size, rows_held(sharding, global_batch_size)
    )


def warn_of_shared_shards(
    data: elastic_data.ElasticData, placements: Iterable[rows.Placement]
) -> None:
    """Warns if multiple hosts or loader workers run the same logical shards."""
    reads = rows.shard_reads(data.num_shards, placements) if data.num_shards else 1
    if reads > 1:
        logging.warning(
            "each of the %d logical shards is read %.3g times on average, because"
            " multiple hosts or loader workers run the same shards; choose a number of"
            " shards and a batch size that are multiples of the number of hosts and,"
            " with loader workers, a number of shards that is a multiple of"
            " global_batch_size * num_workers",
            data.num_shards,
            reads,
        )


@functools.lru_cache(maxsize=256)
def feature_sharding(
    sharding: NamedSharding, name: str, shape: tuple[int, ...]
) -> NamedSharding:
    """Returns the sharding of a batch's feature.

    If a feature has fewer dims than the batch's spec has entries, as `mask` of shape
    `[B]` may have, only the first entries apply. For `example_id`, uint32 `[B, 2]`,
    only the first entry applies, because its dim 1 is not a sequence.

    Args:
      sharding: the sharding of a batch.
      name: the feature's name, or `global_batch_size` for the rows themselves.
      shape: the shape of the feature, `[B, ...]`.

    Raises:
      ConfigError: if a dim cannot be split evenly over the mesh axes that shard it.
    """
    num_dims = 1 if name == elastic_data.EXAMPLE_ID else len(shape)
    spec = PartitionSpec(*sharding.spec[:num_dims])
    for dim, entry in enumerate(tuple(spec) or (None,)):
        count = math.prod(sharding.mesh.shape[axis] for axis in topology.axes_of(entry))
        if shape[dim] < 1 or shape[dim] % count:
            of_feature = f"dim {dim} of feature {name!r}, of shape {list(shape)},"
            what = of_feature if dim else f"{name}={shape[0]}"
            raise errors.ConfigError(
                f"{what} cannot be divided evenly among the {count} shards of {spec} on"
                f" this mesh; choose a positive multiple of {count}, or shard it over"
                " fewer axes (spec=)"
            )
    return NamedSharding(sharding.mesh, spec)


def placed(
    loaded: dict[str, np.ndarray],
    *,
    sharding: NamedSharding,
    placement: rows.Placement,
) -> elastic_data.Batch:
    """Places a host's rows on its devices as a global batch."""
    num_rows, held = placement.global_batch_size, placement.held

    def part(feature: np.ndarray, index: Any) -> np.ndarray:
        start, stop, _ = index[0].indices(num_rows)
        # A device's rows are consecutive among its host's rows.
        first = int(np.searchsorted(held, start))
        return feature[first : first + stop - start, *index[1:]]

    placed: elastic_data.Batch = {}
    for name, feature in loaded.items():
        shape = (num_rows, *feature.shape[1:])
        # A program may have disallowed implicit transfers, such as this one.
        with jax.transfer_guard("allow"):
            placed[name] = jax.make_array_from_callback(
                shape,
                feature_sharding(sharding, name, shape),
                functools.partial(part, _narrowed(name, feature)),
            )
    return placed


def _narrowed(name: str, feature: np.ndarray) -> np.ndarray:
    # Converts a feature to JAX's dtype for it: 32 bits without jax_enable_x64.
    kind = feature.dtype.kind
    if kind in "OSU":
        raise errors.DataError(
            f"feature {name!r} has values such as {next(feature.flat, None)!r:.40}, but"
            " JAX arrays can contain only numbers; in make_shard, drop the feature or"
            " convert it to numbers (ec.data.LocalBatches delivers bytes and text"
            " unchanged)"
        )
    narrowed = feature.astype(dtypes.canonicalize_dtype(feature.dtype), copy=False)
    if kind in "iu" and narrowed is not feature and (narrowed != feature).any():
        value = feature[narrowed != feature][0]
        raise errors.DataError(
            f"feature {name!r} has value {value}, which is out of range for"
            f" {narrowed.dtype}, to which JAX would convert it; use smaller values, or"
            " set jax_enable_x64"
        )
    return narrowed


def batches_of_end(data: elastic_data.ElasticData, global_batch_size: int) -> int:
    """How many consecutive batches without a real row mark the end of `data`.

    Fewer such batches are skipped, because other shards may still have rows.
    """
    if data.end is elastic_data.End.NEVER or not data.num_shards:
        return 1
    return -(-data.num_shards // global_batch_size)
