import json

import grain
import numpy as np
import pytest
from grain import experimental
from hypothesis import given
from hypothesis import strategies as st

from elastic_ckpt.data.lm import packing

IN_CALLER = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)


def examples(lengths):
    """Examples of the given lengths; no two tokens are alike."""
    ends = np.cumsum(lengths)
    drawn = [
        {"a": np.arange(end - size, end), "b": -np.arange(end - size, end)}
        for size, end in zip(lengths, ends, strict=True)
    ]
    return grain.MapDataset.source(drawn).to_iter_dataset(IN_CALLER)


def packed(lengths, *, length=8, features=("a", "b")):
    return packing.ConcatThenSplit(examples(lengths), features=features, length=length)


LENGTHS = st.lists(st.integers(1, 30), min_size=1, max_size=20)


@given(LENGTHS, st.integers(1, 12))
def test_rows_are_those_of_grains_packer(lengths, length):
    theirs = experimental.ConcatThenSplitIterDataset(
        examples(lengths), length_struct={"a": length, "b": length}
    )
    ours = list(packed(lengths, length=length))
    theirs = list(theirs)
    assert len(ours) == len(theirs)
    for own, other in zip(ours, theirs, strict=True):
        assert own.keys() == other.keys()
        for name, array in other.items():
            np.testing.assert_array_equal(own[name], array)


@given(LENGTHS)
def test_the_state_before_every_row_can_be_resumed_from(lengths):
    rows = iter(packed(lengths))
    states, actual = [rows.get_state()], []
    for row in rows:
        actual.append(row)
        states.append(rows.get_state())
    for number, row in enumerate(actual):
        fresh = iter(packed(lengths))
        fresh.set_state(json.loads(json.dumps(states[number])))
        for name, array in next(fresh).items():
            np.testing.assert_array_equal(array, row[name])
    fresh = iter(packed(lengths))
    fresh.set_state(states[-1])
    with pytest.raises(StopIteration):
        next(fresh)
