import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from elastic_ckpt.data import example_id


@given(st.lists(st.integers(0, 2**64 - 1)))
def test_example_ids_of_64_bits_survive_two_halves(ids):
    halves = example_id.split(np.array(ids, np.uint64))
    assert example_id.join(halves) == ids
