"""A flat range as boxes."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_ckpt.universal.flat_ranges import boxes_of_range


@st.composite
def ranges(draw):
    shape = tuple(draw(st.lists(st.integers(1, 5), max_size=4)))
    bounds = st.integers(0, math.prod(shape))
    start, stop = sorted((draw(bounds), draw(bounds)))
    return shape, start, stop


@given(ranges())
def test_the_boxes_hold_the_elements_of_the_range_in_their_order(case):
    shape, start, stop = case
    elements = np.arange(math.prod(shape)).reshape(shape)
    boxes = boxes_of_range(shape, start, stop)
    parts = [
        elements[tuple(map(slice, box.start, box.stop))].reshape(-1) for box in boxes
    ]
    assert np.concatenate([np.arange(0), *parts]).tolist() == list(range(start, stop))
    assert len(boxes) <= max(1, 2 * len(shape) - 1)


def test_a_range_outside_of_the_array_is_refused():
    with pytest.raises(ValueError, match="not inside shape"):
        boxes_of_range((2, 3), 4, 7)
