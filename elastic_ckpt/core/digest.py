"""Digests: of JSON values on the host, and of batch rows wherever the rows are.

A row digest is a dot product with odd pseudo-random multipliers modulo 2**32 (a
multiply-shift hash, Dietzfelbinger et al. 1997, without the shift). It needs integer
arithmetic alone, so NumPy on the host and XLA on any number of devices give the same
bits.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import TypeVar

import jax
import numpy as np

from elastic_ckpt.core import storage

Array = TypeVar("Array", np.ndarray, jax.Array)


def json_digest(value: storage.Json) -> str:
    """BLAKE2b-128 of the canonical JSON of `value`, as 32 hex digits."""
    content = storage.canonical_json(value)
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def row_digests(tokens: Array) -> Array:
    """One digest a row, the same bits from NumPy and from JAX under any sharding.

    Args:
      tokens: integers of shape `[rows, length]`.

    Returns:
      uint32 of shape `[rows]`.
    """
    length = tokens.shape[1]
    weights = _odd_multipliers(length)
    # The shift by one keeps a zero token from vanishing in the sum.
    return ((tokens.astype(np.uint32) + np.uint32(1)) * weights).sum(
        axis=1, dtype=np.uint32
    )


def row_features(batch: Mapping[str, Array]) -> list[Array]:
    """The features of a batch that digests of its rows cover: `[rows, length]` each.

    The example ids are covered by `batch_digest`.
    """
    names = sorted(batch.keys() - {"example_id"})
    return [batch[name] for name in names if batch[name].ndim == 2]


def batch_digest(row_ids: Iterable[int], digests: Iterable[int]) -> str:
    """BLAKE2b-64 of the ordered row ids and row digests, as 16 hex digits."""
    ids = np.fromiter(row_ids, np.uint64)
    content = ids.astype("<u8").tobytes() + np.fromiter(digests, "<u4").tobytes()
    return hashlib.blake2b(content, digest_size=8).hexdigest()


def _odd_multipliers(count: int) -> np.ndarray:
    generator = np.random.Generator(np.random.Philox(key=0x5EED))
    return generator.integers(0, 2**32, size=count, dtype=np.uint32) | np.uint32(1)
