import numpy as np
from hypothesis import given
from hypothesis import strategies as st

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
