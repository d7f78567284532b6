import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_ckpt.data.sources import arrayrecord, record_format, source, tfrecord
from tests import corpora, source_contract, tfrecord_files

# The example of TensorFlow's tutorial "TFRecord and tf.train.Example", as it prints it.
TENSORFLOW_EXAMPLE = (
    b"\nR\n\x11\n\x08feature0\x12\x05\x1a\x03\n\x01\x00"
    b"\n\x11\n\x08feature1\x12\x05\x1a\x03\n\x01\x04"
    b"\n\x14\n\x08feature2\x12\x08\n\x06\n\x04goat"
    b"\n\x14\n\x08feature3\x12\x08\x12\x06\n\x04[\xd3|?"
)

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


@given(st.dictionaries(st.text(max_size=8), values, max_size=4))
def test_what_was_encoded_is_decoded(element):
    record = tfrecord_files.example(element)
    actual = tfrecord.TFRecord(files=("a",))._decoded(record, "place")
    assert actual.keys() == element.keys()
    for name, value in element.items():
        assert type(actual[name]) is type(value)
        np.testing.assert_array_equal(actual[name], value, strict=True)


def test_an_example_has_the_bytes_that_tensorflow_writes():
    element = {
        "feature0": 0,
        "feature1": 4,
        "feature2": "goat",
        "feature3": np.float32(0.9876),
    }
    assert tfrecord_files.example(element) == TENSORFLOW_EXAMPLE


@pytest.mark.parametrize(
    ("make", "write"),
    [
        (arrayrecord.ArrayRecord, corpora.write_records),
        (tfrecord.TFRecord, tfrecord_files.write),
    ],
)
@pytest.mark.parametrize(
    ("limit", "most", "num_shards"),
    [
        ("BLOCK_RECORDS", 7, 1),
        ("BLOCK_RECORDS", 1, 5),
        ("BLOCK_BYTES", 1, 1),
        ("BLOCK_BYTES", 100, 5),
    ],
)
def test_raw_records_of_any_size_are_read(
    tmp_path, monkeypatch, make, write, limit, most, num_shards
):
    monkeypatch.setattr(source, limit, most)
    records = [bytes([n]) * (n * n % 257) for n in range(100)]
    write(tmp_path / "a", records)
    dataset = make(files=(str(tmp_path / "a"),), record_format=record_format.BYTES)
    assert source_contract.texts(dataset, num_shards) == records
