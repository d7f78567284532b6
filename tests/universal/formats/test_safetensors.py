"""Safetensors files and indices lead to their values; lies are refused."""

import json
import math
import pathlib
import struct

import numpy as np
import pytest

from elastic_ckpt.universal import opening
from elastic_ckpt.universal.formats import safetensors, weights
from elastic_ckpt.universal.formats.format_error import FormatError
from tests.universal.formats.fragment_values import values_of

GOLDEN = pathlib.Path(__file__).parents[2] / "golden" / "forgather"
VALUES = np.load(GOLDEN / "values.npz")


def write(path, fields, values=bytes(16)):
    header = fields if isinstance(fields, bytes) else json.dumps(fields).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + values)
    return path


def field(dtype="F32", shape=(2, 2), offsets=(0, 16)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


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
        (b'{"w": {}, "w": {}}', "a name twice"),
        (b"[" * 100_000, "is no valid JSON"),
    ],
)
def test_lying_headers_are_refused(tmp_path, fields, match):
    with pytest.raises(FormatError, match=match):
        safetensors.read_header(write(tmp_path / "x.safetensors", fields))


def test_a_file_that_was_cut_short_is_refused_at_every_length(tmp_path):
    path = write(tmp_path / "x.safetensors", {"w": field()})
    content = path.read_bytes()
    for length in range(len(content)):
        path.write_bytes(content[:length])
        with pytest.raises(FormatError):
            safetensors.read_header(path)
    path.write_bytes(struct.pack("<Q", 1 << 62) + content[8:])
    with pytest.raises(FormatError, match="cut short"):
        safetensors.read_header(path)


def written(path, arrays, **metadata):
    """A file of arrays, as safetensors writes it."""
    fields, at = {}, 0
    for name, array in arrays.items():
        dtype = {"float32": "F32", "int64": "I64"}[array.dtype.name]
        offsets = (at, at + array.nbytes)
        fields[name] = field(dtype, array.shape, offsets)
        at += array.nbytes
    if metadata:
        fields["__metadata__"] = metadata
    return write(path, fields, b"".join(each.tobytes() for each in arrays.values()))


def array(*shape):
    return np.random.default_rng(math.prod(shape)).random(shape, np.float32)


def assert_same(checkpoint, expected):
    arrays = {tensor.name: values_of(tensor) for tensor in checkpoint.tensors}
    assert arrays.keys() == expected.keys()
    for name, values in arrays.items():
        assert (values.dtype, values.shape) == (
            expected[name].dtype,
            expected[name].shape,
        )
        assert values.tobytes() == expected[name].tobytes(), name


def test_a_file_opens_with_its_tensors_and_texts(tmp_path):
    arrays = {"w": array(3, 4), "s": array(), "n": np.arange(5), "e": array(0, 3)}
    path = written(tmp_path / "model.safetensors", arrays, format="pt")
    for source in (path, tmp_path):
        checkpoint = opening.open_checkpoint(source)
        assert_same(checkpoint, arrays)
        assert checkpoint.format == "safetensors"
        assert checkpoint.values == {"format": "pt"}
        assert checkpoint.check([str(path)]) == [str(path)]


def indexed(directory, **changes):
    arrays = {"a": array(2, 2), "b": array(3), "c": array(1)}
    written(directory / "x-1.safetensors", {"a": arrays["a"]})
    written(directory / "x-2.safetensors", {"b": arrays["b"], "c": arrays["c"]})
    files = {"a": "x-1.safetensors", "b": "x-2.safetensors", "c": "x-2.safetensors"}
    index = {"metadata": {"total_size": 32}, "weight_map": files | changes}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return arrays


def test_sizes_of_the_model_of_hugging_face_are_values(tmp_path):
    written(tmp_path / "model.safetensors", {"a": array(2)}, format="pt")
    config = {"head_dim": 4, "text": {"heads": 2}, "types": ["x"], "other": None}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert opening.open_checkpoint(tmp_path).values == {
        "format": "pt",
        "config/head_dim": 4,
        "config/text/heads": 2,
        "config/types": ["x"],
        "config/other": None,
    }
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(FormatError, match=r"config\.json is no valid JSON"):
        opening.open_checkpoint(tmp_path)


def test_an_indexed_directory_has_the_tensors_of_all_its_files(tmp_path):
    arrays = indexed(tmp_path)
    for source in (tmp_path, tmp_path / "model.safetensors.index.json"):
        checkpoint = opening.open_checkpoint(source)
        assert_same(checkpoint, arrays)
        assert checkpoint.values == {"total_size": 32}


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"a": "../x-1.safetensors"}, "lists a in '../x-1.safetensors', which is no"),
        ({"a": ["x"]}, "no file beside it"),
        ({"a": "x-3.safetensors"}, "x-3.safetensors is missing"),
        ({"d": "x-1.safetensors"}, "x-1.safetensors lacks d"),
    ],
)
def test_an_index_that_does_not_fit_its_files_is_refused(tmp_path, changes, match):
    indexed(tmp_path, **changes)
    with pytest.raises(FormatError, match=match):
        opening.open_checkpoint(tmp_path)


def test_a_numbered_set_of_files_without_an_index_is_complete_or_refused(tmp_path):
    arrays = {str(number): array(number) for number in (1, 2, 3)}
    for number, values in arrays.items():
        path = tmp_path / f"model-0000{number}-of-00003.safetensors"
        written(path, {number: values})
    assert_same(opening.open_checkpoint(tmp_path), arrays)
    for left in (2, 1):
        (tmp_path / f"model-0000{left}-of-00003.safetensors").unlink()
        match = (
            rf"has {left} of the 3 files model-\*-of-00003\.safetensors, and no index"
        )
        with pytest.raises(FormatError, match=match):
            opening.open_checkpoint(tmp_path)
    # What is left opens as itself.
    only = tmp_path / "model-00003-of-00003.safetensors"
    assert_same(opening.open_checkpoint(only), {"3": arrays["3"]})


def test_a_tensor_in_two_files_is_refused(tmp_path):
    for name in ("a", "b"):
        written(tmp_path / f"{name}.safetensors", {"w": array(2)})
    with pytest.raises(FormatError, match="has w, and so has"):
        opening.open_checkpoint(tmp_path)


def test_several_indices_need_a_choice(tmp_path):
    for name in ("a", "b"):
        (tmp_path / f"{name}.safetensors.index.json").write_text("{}")
    with pytest.raises(FormatError, match=r"several indices \(a\.safet.*give the path"):
        weights.SAFETENSORS.open_checkpoint(tmp_path)
