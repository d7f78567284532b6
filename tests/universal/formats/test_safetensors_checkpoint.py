"""Fragments of safetensors checkpoints lead to the values that were written."""

import json
import math

import numpy as np
import pytest

from elastic_ckpt.universal import opening
from elastic_ckpt.universal.formats import safetensors_checkpoint
from elastic_ckpt.universal.formats.format_error import FormatError
from tests.universal.formats.fragment_values import values_of
from tests.universal.formats.test_safetensors_file import field, write


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
        ({"a": "/etc/passwd"}, "no file beside it"),
        ({"a": ["x"]}, "no file beside it"),
        ({"a": "x-3.safetensors"}, "x-3.safetensors is missing"),
        ({"d": "x-1.safetensors"}, "x-1.safetensors lacks d"),
    ],
)
def test_an_index_that_does_not_fit_its_files_is_refused(tmp_path, changes, match):
    indexed(tmp_path, **changes)
    with pytest.raises(FormatError, match=match):
        opening.open_checkpoint(tmp_path)


def test_a_tensor_in_two_files_is_refused(tmp_path):
    for name in ("a", "b"):
        written(tmp_path / f"{name}.safetensors", {"w": array(2)})
    with pytest.raises(FormatError, match="has w, and so has"):
        opening.open_checkpoint(tmp_path)


def shards(directory, starts, shapes):
    for n, (start, shape) in enumerate(zip(starts, shapes, strict=True)):
        written(
            directory / f"shard-0000{n}-model-00001-of-00001.safetensors",
            {"w": np.full(shape, n, np.float32)},
            DCP_SHARDING_INFO=json.dumps({"w": {"saved_offsets": start}}),
            DCP_VERSION="1.0",
        )
    return directory


def test_shards_of_a_tensor_are_joined(tmp_path):
    shards(tmp_path, [(0, 0), (2, 0), (2, 1)], [(2, 3), (3, 1), (3, 2)])
    expected = np.zeros((5, 3), np.float32)
    expected[2:, :1], expected[2:, 1:] = 1, 2
    assert_same(opening.open_checkpoint(tmp_path), {"w": expected})


@pytest.mark.parametrize(
    ("starts", "shapes", "match"),
    [
        ([(0,), (3,)], [(2,), (2,)], r"w lacks the part \[2:3\]"),
        ([(0,), (1,)], [(2,), (2,)], r"overlap, \[0:2\] and \[1:3\]"),
        ([(0,), (0,)], [(2,), (2,)], "overlap"),
        ([(0,), (2,)], [(2,), (2, 1)], "2 dims, and its first element"),
        ([(0,), (2, 0)], [(2,), (2, 1)], "another type or rank"),
        ([(0,), (1 << 60,)], [(2,), (2,)], "too large"),
        ([(0,), (-2,)], [(2,), (2,)], "which is none"),
        ([(0,), (0.5,)], [(2,), (2,)], "which is none"),
        ([(0,), 3], [(2,), (2,)], "no saved_offsets of w"),
    ],
)
def test_shards_that_do_not_make_a_tensor_are_refused(tmp_path, starts, shapes, match):
    shards(tmp_path, starts, shapes)
    with pytest.raises(FormatError, match=match):
        opening.open_checkpoint(tmp_path)


def test_places_of_shards_that_are_no_text_are_refused(tmp_path):
    written(tmp_path / "x.safetensors", {"w": array(2)}, DCP_SHARDING_INFO="\ud800")
    with pytest.raises(FormatError, match="is no valid JSON"):
        opening.open_checkpoint(tmp_path)


def test_several_indices_need_a_choice(tmp_path):
    for name in ("a", "b"):
        (tmp_path / f"{name}.safetensors.index.json").write_text("{}")
    with pytest.raises(FormatError, match=r"several indices \(a\.safet.*give the path"):
        safetensors_checkpoint.open_checkpoint(tmp_path)


def test_a_path_of_no_format_is_refused_with_the_formats_that_are_read(tmp_path):
    with pytest.raises(FormatError, match="does not exist"):
        opening.open_checkpoint(tmp_path / "missing")
    (tmp_path / "model.h5").write_text("x")
    with pytest.raises(FormatError, match=r"has model\.h5; looked for were .*safetens"):
        opening.open_checkpoint(tmp_path)
