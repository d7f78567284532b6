"""The ids and digests of a batch whose step is computed elsewhere."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from elastic_ckpt.core import digest, errors
from elastic_ckpt.data import elastic_data


def digested(batch: elastic_data.Batch) -> tuple[jax.Array, jax.Array]:
    """The ids of a batch's rows and digests of their tokens, on every host.

    Args:
      batch: global, with `example_id` and all of its features.

    Raises:
      ConfigError: if the batch is not from `ec.batches`.
    """
    if elastic_data.EXAMPLE_ID not in batch:
        raise errors.ConfigError(
            f"the batch to log has no {elastic_data.EXAMPLE_ID!r}, but"
            f" {', '.join(sorted(batch))}; log what ec.batches yields, before"
            " anything is taken out of it"
        )
    sharding = batch[elastic_data.EXAMPLE_ID].sharding
    assert isinstance(sharding, NamedSharding)
    replicated = NamedSharding(sharding.mesh, PartitionSpec())
    return _jitted(replicated)(batch)


@functools.lru_cache(maxsize=8)
def _jitted(replicated: NamedSharding) -> jax.stages.Wrapped:
    def ids_and_digests(batch: elastic_data.Batch) -> tuple[jax.Array, jax.Array]:
        tokens = jnp.concatenate(digest.row_features(batch), axis=1)
        return batch[elastic_data.EXAMPLE_ID], digest.row_digests(tokens)

    return jax.jit(ids_and_digests, out_shardings=replicated)
