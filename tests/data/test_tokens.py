import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_ckpt.core import errors
from elastic_ckpt.data import example_id, tokens


@given(st.binary(max_size=20), st.integers(1, 24))
def test_tokens_hold_the_text_as_far_as_it_fits(text, length):
    encoded = tokens.encode(text, length)
    assert encoded.dtype == np.int32
    whole = [tokens.BEGIN, *(byte + 3 for byte in text), tokens.END]
    assert encoded.tolist() == (whole + [tokens.PAD] * length)[:length]


@given(st.lists(st.integers(0, 2**64 - 1)))
def test_example_ids_of_64_bits_survive_two_halves(ids):
    halves = example_id.split(np.array(ids, np.uint64))
    assert example_id.join(halves) == ids


@pytest.mark.parametrize("dtype", [np.int64, np.uint32])
def test_a_token_that_int32_cannot_hold_is_an_error(dtype):
    kept = np.array([0, 2**31 - 1], dtype)
    np.testing.assert_array_equal(
        tokens.narrowed(kept, place="a"), kept.astype(np.int32), strict=True
    )
    wide = 2**40 if dtype != np.uint32 else 2**31
    with pytest.raises(errors.DataError, match=f"a has the token {wide}, which does"):
        tokens.narrowed(np.array([1, wide], dtype), place="a")
