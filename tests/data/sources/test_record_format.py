import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_ckpt.core import errors
from elastic_ckpt.data.sources import tfrecord
from tests import tfrecord_files

# The example of TensorFlow's tutorial "TFRecord and tf.train.Example", as it prints it.
TENSORFLOW_EXAMPLE = (
    b"\nR\n\x11\n\x08feature0\x12\x05\x1a\x03\n\x01\x00"
    b"\n\x11\n\x08feature1\x12\x05\x1a\x03\n\x01\x04"
    b"\n\x14\n\x08feature2\x12\x08\n\x06\n\x04goat"
    b"\n\x14\n\x08feature3\x12\x08\x12\x06\n\x04[\xd3|?"
)
# Feature `a` with the int64s 1, 2 and 300, each in a separate field, as an encoder that
# does not pack them writes it.
NOT_PACKED = bytes.fromhex("0a10 0a0e 0a0161 1209 1a07 0801 0802 08ac02")

values = st.one_of(
    st.binary(max_size=20),
    st.lists(st.binary(max_size=20), min_size=2, max_size=4),
    st.lists(st.integers(-(2**63), 2**63 - 1), max_size=5).map(
        lambda numbers: np.array(numbers, np.int64)
    ),
    st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=5).map(
        lambda numbers: np.array(numbers, np.float32)
    ),
)


def parse(record, *columns):
    return tfrecord.TFRecord(files=("a",), columns=columns)._decoded(record, "place")


def assert_equal(actual, expected):
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert type(actual[name]) is type(value)
        np.testing.assert_array_equal(actual[name], value, strict=True)


@given(st.dictionaries(st.text(max_size=8), values, max_size=4))
def test_what_was_encoded_is_decoded(element):
    assert_equal(parse(tfrecord_files.example(element)), element)


def test_an_example_has_the_bytes_that_tensorflow_writes():
    element = {
        "feature0": 0,
        "feature1": 4,
        "feature2": "goat",
        "feature3": np.float32(0.9876),
    }
    assert tfrecord_files.example(element) == TENSORFLOW_EXAMPLE


def test_a_missing_feature_is_named_with_those_that_exist():
    with pytest.raises(
        errors.DataError, match=r"no feature \['b', 'c'\], only \['a'\]"
    ):
        parse(NOT_PACKED, "c", "a", "b")
