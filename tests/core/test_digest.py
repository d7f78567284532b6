import hashlib

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from elastic_ckpt.core import digest, topology

# Few shapes: a program is compiled for each.
FEATURES = {
    "tokens": hnp.arrays(np.int32, (3, 4)),
    "label": hnp.arrays(np.int64, (3,)),
    "weight": hnp.arrays(np.float64, (3,), elements=st.floats(width=32)),
    "image": hnp.arrays(np.float32, (3, 2, 2), elements=st.floats(width=32)),
    "half": hnp.arrays(np.float16, (3, 2), elements=st.floats(width=16)),
    "brain": hnp.arrays(np.float32, (3, 2), elements=st.floats(width=16)).map(
        lambda values: values.astype(ml_dtypes.bfloat16)
    ),
    "wave": hnp.arrays(
        np.complex64,
        (3, 2),
        elements=st.builds(complex, *[st.floats(-9, 9, width=32)] * 2),
    ),
    "mask": hnp.arrays(np.bool_, (3,)),
    "id": hnp.arrays(np.uint64, (3, 2)),
}
BATCHES = st.fixed_dictionaries(FEATURES)


@settings(max_examples=20)
@given(BATCHES)
def test_numpy_and_jax_give_the_same_row_digests(batch):
    on_device = np.asarray(
        jax.jit(digest.row_digests)(jax.tree.map(jnp.asarray, batch))
    )
    np.testing.assert_array_equal(on_device, digest.row_digests(batch))


def test_row_digests_do_not_depend_on_the_sharding():
    batch = {"tokens": np.random.default_rng(0).integers(0, 259, (8, 50), np.int32)}
    mesh = topology.mesh_of(topology.present(2))
    sharded = jax.device_put(batch, topology.batch_sharding(mesh))
    np.testing.assert_array_equal(
        jax.jit(digest.row_digests)(sharded), digest.row_digests(batch)
    )


@pytest.mark.parametrize("feature", FEATURES)
@given(data=st.data())
@settings(max_examples=5)
def test_one_changed_value_changes_the_digest_of_its_row_alone(feature, data):
    batch = {feature: data.draw(FEATURES[feature]), "other": np.ones((3, 2))}
    values = np.where(np.isfinite(batch[feature]), batch[feature], 0)
    values = values.astype(batch[feature].dtype)
    changed = values.copy()
    place = tuple(data.draw(st.integers(0, size - 1)) for size in values.shape)
    # The highest bit of a token, the imaginary part of a complex number.
    added = {"tokens": -(2**31), "wave": 1j}
    added = added.get(feature, 0.25 if values.dtype.kind in "fV" else 1)
    values[place], changed[place] = 0, added
    before, after = ({**batch, feature: each} for each in (values, changed))
    differs = digest.row_digests(after) != digest.row_digests(before)
    assert np.flatnonzero(differs).tolist() == [place[0]]


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
