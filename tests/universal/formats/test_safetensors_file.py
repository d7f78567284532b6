"""Safetensors files are read bit-equal; lying headers are refused."""

import json
import pathlib
import struct

import numpy as np
import pytest

from elastic_ckpt.universal.formats import safetensors_file
from elastic_ckpt.universal.formats.format_error import FormatError

GOLDEN = pathlib.Path(__file__).parents[2] / "golden" / "forgather"
VALUES = np.load(GOLDEN / "values.npz")


def write(path, fields, values=bytes(16)):
    header = fields if isinstance(fields, bytes) else json.dumps(fields).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + values)
    return path


def field(dtype="F32", shape=(2, 2), offsets=(0, 16)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def test_all_tensors_or_those_asked_for_are_read():
    path = GOLDEN / "single" / "model-00001-of-00001.safetensors"
    arrays = safetensors_file.read(path)
    assert sorted(arrays) == ["embed.weight", "head.weight"]
    for name, array in arrays.items():
        assert array.tobytes() == VALUES[f"single/{name}"].tobytes()
        assert array.shape == VALUES[f"single/{name}"].shape
    assert list(safetensors_file.read(path, ["head.weight"])) == ["head.weight"]
    with pytest.raises(FormatError, match="has no tensor tail"):
        safetensors_file.read(path, ["tail"])


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"w": field(shape=(2, 3))}, "has 16 bytes"),
        ({"w": field(shape=(-2, -2))}, "which is none"),
        ({"w": field(shape=(0, 1 << 62), offsets=(0, 0))}, "too large"),
        ({"w": field(offsets=(-16, 0))}, "no number from 0 up"),
        ({"w": field(offsets=(0, 17))}, "has 17 bytes"),
        ({"w": field(shape=(2,), offsets=(0, 8))}, "its header describes 8"),
        ({"w": field(shape=(2,), offsets=(8, 16))}, "gap or an overlap before w"),
        (
            {"v": field(), "w": field(shape=(1,), offsets=(12, 16))},
            "gap or an overlap before w",
        ),
        ({"w": field(dtype="F33")}, r"safetensors: w has the dtype 'F33', which is"),
        ({"w": [1]}, "no safetensors header"),
        ([1], "is no JSON object"),
        (b'{"w": {}, "w": {}}', "a name twice"),
        (b"[" * 100_000, "is no valid JSON"),
    ],
)
def test_lying_headers_are_refused(tmp_path, fields, match):
    with pytest.raises(FormatError, match=match):
        safetensors_file.read(write(tmp_path / "x.safetensors", fields))


def test_a_file_that_was_cut_short_is_refused_at_every_length(tmp_path):
    path = write(tmp_path / "x.safetensors", {"w": field()})
    content = path.read_bytes()
    for length in range(len(content)):
        path.write_bytes(content[:length])
        with pytest.raises(FormatError):
            safetensors_file.read(path)
    path.write_bytes(struct.pack("<Q", 1 << 62) + content[8:])
    with pytest.raises(FormatError, match="cut short"):
        safetensors_file.read(path)
