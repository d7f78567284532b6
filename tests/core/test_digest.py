import hashlib

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from elastic_ckpt.core import digest, topology

FEATURES = {
    "tokens": (np.int32, (3, 4)),
    "label": (np.int64, (3,)),
    "weight": (np.float64, (3,)),
    "image": (np.float32, (3, 2, 2)),
    "half": (np.float16, (3, 2)),
    "brain": (ml_dtypes.bfloat16, (3, 2)),
    "wave": (np.complex64, (3, 2)),
    "mask": (np.bool_, (3,)),
    "id": (np.uint64, (3, 2)),
}
SPECIAL = [0.0, -0.0, 0.3, -7.5, 6e-8, np.inf, -np.inf, np.nan]


def drawn(feature, random):
    """Values of a feature."""
    dtype, shape = FEATURES[feature]
    if np.dtype(dtype).kind in "biu":
        return random.integers(-(2**63), 2**63, shape).astype(dtype)
    values = random.choice([*SPECIAL, *random.normal(size=8)], (*shape, 2))
    return (values.view(np.complex128) if feature == "wave" else values)[..., 0].astype(
        dtype
    )


@pytest.mark.parametrize("seed", range(8))
def test_numpy_and_jax_give_the_same_row_digests(seed):
    random = np.random.default_rng(seed)
    batch = {feature: drawn(feature, random) for feature in FEATURES}
    on_device = jax.jit(digest.row_digests)(jax.tree.map(jnp.asarray, batch))
    np.testing.assert_array_equal(on_device, digest.row_digests(batch))


def test_row_digests_do_not_depend_on_the_sharding():
    batch = {"tokens": np.random.default_rng(0).integers(0, 259, (8, 50), np.int32)}
    mesh = topology.mesh_of(topology.present(2))
    sharded = jax.device_put(batch, topology.batch_sharding(mesh))
    np.testing.assert_array_equal(
        jax.jit(digest.row_digests)(sharded), digest.row_digests(batch)
    )


@pytest.mark.parametrize("feature", FEATURES)
def test_one_changed_value_changes_the_digest_of_its_row_alone(feature):
    random = np.random.default_rng(0)
    values = drawn(feature, random)
    # The highest bit of a token, the imaginary part of a complex number.
    added = {"tokens": -(2**31), "wave": 1j}
    added = added.get(feature, 0.25 if values.dtype.kind in "fV" else 1)
    for place in np.ndindex(values.shape):
        batches = []
        for value in (0, added):
            changed = values.copy()
            changed[place] = value
            batches.append({feature: changed, "other": np.ones((3, 2))})
        first, second = map(digest.row_digests, batches)
        assert np.flatnonzero(first != second).tolist() == [place[0]]


def test_padding_is_not_the_same_as_a_shorter_row():
    row = {"tokens": np.array([[5, 6]])}
    padded = {"tokens": np.array([[5, 6, 0]])}
    assert digest.row_digests(row) != digest.row_digests(padded)


def test_a_batch_digest_knows_ids_tokens_and_their_order():
    batches = [([1, 2], [3, 4]), ([2, 1], [4, 3]), ([1, 2], [4, 3]), ([1], [3])]
    batches += [([1, 2], [3, 4 + 2**16]), ([1, 2 + 2**32], [3, 4])]
    assert len({digest.batch_digest(ids, rows) for ids, rows in batches}) == 6


def test_a_json_digest_is_the_blake2b_of_the_canonical_text():
    expected = hashlib.blake2b(b'{"a":[1,null],"b":"x"}', digest_size=16).hexdigest()
    assert digest.json_digest({"b": "x", "a": [1, None]}) == expected
