import hashlib

import jax
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from elastic_ckpt.core import digest, topology

# Few shapes: a program is compiled for each.
SHAPES = st.sampled_from([(1, 1), (3, 4), (8, 7)])
TOKENS = hnp.arrays(np.int32, SHAPES, elements=st.integers(0, 258))


@settings(max_examples=8)
@given(TOKENS)
def test_numpy_and_jax_give_the_same_row_digests_under_any_sharding(tokens):
    sharded = jax.numpy.asarray(tokens)
    if len(tokens) == 8:
        mesh = topology.mesh_of(topology.present(2))
        sharded = jax.device_put(tokens, topology.batch_sharding(mesh))
    on_device = np.asarray(jax.jit(digest.row_digests)(sharded))
    np.testing.assert_array_equal(on_device, digest.row_digests(tokens))


@given(TOKENS, st.data())
def test_one_changed_bit_changes_the_digest_of_its_row_alone(tokens, data):
    row = data.draw(st.integers(0, tokens.shape[0] - 1))
    column = data.draw(st.integers(0, tokens.shape[1] - 1))
    changed = tokens.copy()
    bit = data.draw(st.sampled_from([1, 2**31]))
    changed.view(np.uint32)[row, column] ^= np.uint32(bit)
    differs = digest.row_digests(changed) != digest.row_digests(tokens)
    assert np.flatnonzero(differs).tolist() == [row]


def test_padding_is_not_the_same_as_a_shorter_row():
    row, padded = np.array([[5, 6]]), np.array([[5, 6, 0]])
    assert digest.row_digests(row) != digest.row_digests(padded)


def test_a_batch_digest_knows_ids_tokens_and_their_order():
    batches = [([1, 2], [3, 4]), ([2, 1], [4, 3]), ([1, 2], [4, 3]), ([1], [3])]
    batches += [([1, 2], [3, 4 + 2**16]), ([1, 2 + 2**32], [3, 4])]
    assert len({digest.batch_digest(ids, rows) for ids, rows in batches}) == 6


def test_a_json_digest_is_the_blake2b_of_the_canonical_text():
    expected = hashlib.blake2b(b'{"a":[1,null],"b":"x"}', digest_size=16).hexdigest()
    assert digest.json_digest({"b": "x", "a": [1, None]}) == expected
