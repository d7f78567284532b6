"""Dtypes of the same category are those that JAX takes for one."""

import itertools

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from elastic_ckpt.universal.rules import dtypes

_NAMES = (
    "bool int8 uint8 int32 int64 uint64 float16 float32 float64 complex64 complex128"
    " bfloat16 float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz int4 uint4"
)
_CATEGORIES = (np.bool_, np.integer, np.floating, np.complexfloating)


def test_categories_are_those_of_jax():
    for names in itertools.product(_NAMES.split(), repeat=2):
        one, other = (np.dtype(getattr(ml_dtypes, each, each)) for each in names)
        expected = any(
            jnp.issubdtype(one, category) and jnp.issubdtype(other, category)
            for category in _CATEGORIES
        )
        assert dtypes._same_category(one, other) == expected, names
