"""Weights of safetensors and PyTorch lead to their values; what is wrong is refused.

`write_weights.py` wrote those of PyTorch.
"""

import json
import math
import shutil

import jax
import ml_dtypes
import numpy as np
import pytest

from elastic_ckpt import universal
from elastic_ckpt.universal import opening
from elastic_ckpt.universal.formats import safetensors, torch_file
from elastic_ckpt.universal.formats.files import FormatError
from tests.universal.formats import stored_values, torch_files
from tests.universal.formats.stored_values import DATA, assert_equal, write_safetensors

WEIGHTS = DATA / "weights"
EXPECTED = np.load(WEIGHTS / "expected.npz")
MODEL = ("0.weight", "1.weight", "2.weight", "2.bias")
WRITTEN = torch_files.tensor()
CONFIG = {"config/hidden_size": 4, "config/architectures": ["X"]}


def write(path, fields, values=bytes(16)):
    header = fields if isinstance(fields, bytes) else json.dumps(fields).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + values)
    return path


def field(dtype="F32", shape=(2, 2), offsets=(0, 16)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"w": field(shape=(2, 3))}, r"w has the data_offsets \[0, 16\]"),
        ({"w": field(shape=(-2, -2))}, "which is none"),
        ({"w": field(shape=(0, 1 << 62), offsets=(0, 0))}, "too large"),
        ({"w": field(offsets=(-16, 0))}, "the header is damaged"),
        ({"w": field(offsets=(0, 17))}, "the header is damaged"),
        ({"w": field(shape=(2,), offsets=(0, 8))}, "its header describes 8"),
        ({"w": field(shape=(2,), offsets=(8, 16))}, r"would be at \[0, 8\]"),
        ({"v": field(), "w": field(shape=(1,), offsets=(12, 16))}, "would be at"),
        ({"w": field(dtype="F33")}, r"safetensors: w has the dtype 'F33', which is"),
        ({"w": [1]}, "no safetensors header"),
        ({"__metadata__": {"DCP_SHARDING_INFO": "{}"}}, "enable_consolidation=True"),
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
    path.write_bytes((1 << 62).to_bytes(8, "little") + content[8:])
    with pytest.raises(FormatError, match="cut short"):
        safetensors.read_header(path)


def array(*shape):
    return np.random.default_rng(math.prod(shape)).random(shape, np.float32)


def assert_same(checkpoint, expected):
    tensors = {tensor.name: tensor for tensor in checkpoint.tensors}
    assert tensors.keys() == expected.keys()
    for name, tensor in tensors.items():
        assert_equal(stored_values.read(tensor), expected[name])


def test_a_file_opens_with_its_tensors_and_texts(tmp_path):
    arrays = {"w": array(3, 4), "s": array(), "n": np.arange(5), "e": array(0, 3)}
    path = tmp_path / "model.safetensors"
    write_safetensors(path, arrays, format="pt")
    for source in (path, tmp_path):
        checkpoint = opening.open_checkpoint(source)
        assert_same(checkpoint, arrays)
        assert checkpoint.format == "safetensors"
        assert checkpoint.values == {"format": "pt"}
        assert checkpoint.check([str(path)]) == [str(path)]


def test_sizes_of_the_model_of_hugging_face_are_values(tmp_path):
    write_safetensors(tmp_path / "model.safetensors", {"a": array(2)}, format="pt")
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


def indexed(directory, changes):
    """Two files of safetensors and their index; `changes` are of its weight_map."""
    arrays = {"a": array(2, 2), "b": array(3), "c": array(1)}
    files = {"a": "x-1.safetensors", "b": "x-2.safetensors", "c": "x-2.safetensors"}
    for file in set(files.values()):
        held = {name: arrays[name] for name in files if files[name] == file}
        write_safetensors(directory / file, held)
    index = {"metadata": {"total_size": 32}, "weight_map": files | changes}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return arrays


def test_an_indexed_directory_has_the_tensors_of_all_its_files(tmp_path):
    arrays = indexed(tmp_path, {})
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
    indexed(tmp_path, changes)
    with pytest.raises(FormatError, match=match):
        opening.open_checkpoint(tmp_path)


def test_a_numbered_set_of_files_without_an_index_is_complete_or_refused(tmp_path):
    arrays = {str(number): array(number) for number in (1, 2, 3)}
    for number, values in arrays.items():
        path = tmp_path / f"model-0000{number}-of-00003.safetensors"
        write_safetensors(path, {number: values})
    assert_same(opening.open_checkpoint(tmp_path), arrays)
    for left in (2, 1):
        (tmp_path / f"model-0000{left}-of-00003.safetensors").unlink()
        match = rf"{left} of the 3 files model-\*-of-00003\.safetensors, and no index"
        with pytest.raises(FormatError, match=match):
            opening.open_checkpoint(tmp_path)
    # What is left opens as itself.
    only = tmp_path / "model-00003-of-00003.safetensors"
    assert_same(opening.open_checkpoint(only), {"3": arrays["3"]})


def test_several_files_or_indices_need_a_choice(tmp_path):
    for name in ("a", "b"):
        write_safetensors(tmp_path / f"{name}.safetensors", {"w": array(2)})
    with pytest.raises(FormatError, match="has w, and so has"):
        opening.open_checkpoint(tmp_path)
    for name in ("a", "b"):
        (tmp_path / f"{name}.safetensors.index.json").write_text("{}")
    with pytest.raises(FormatError, match=r"several indices \(a\.safet.*give the path"):
        opening.open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    "path",
    [
        *("single", "single/pytorch_model.bin", "no_crc.pt"),
        *("sharded", "sharded/pytorch_model.bin.index.json"),
    ],
)
def test_a_model_of_pytorch_is_read_bit_equal(path):
    checkpoint = opening.open_checkpoint(WEIGHTS / path)
    assert checkpoint.format == "PyTorch"
    arrays = {name: EXPECTED[name] for name in MODEL}
    for name in MODEL[2:]:
        arrays[name] = arrays[name].view(ml_dtypes.bfloat16)
    assert_same(checkpoint, arrays)
    config = {} if path == "no_crc.pt" else CONFIG
    assert config.items() <= checkpoint.values.items()
    files = sorted({each.file for t in checkpoint.tensors for each in t.fragments})
    # A file without checksums is not damaged, but cannot be verified.
    assert checkpoint.check(files) == (files if path == "no_crc.pt" else [])


def test_a_training_checkpoint_has_all_of_its_tensors_and_values():
    checkpoint = opening.open_checkpoint(WEIGHTS / "training.pt")
    names = {tensor.name for tensor in checkpoint.tensors}
    assert {f"model.{name}" for name in MODEL} <= names
    assert {"optimizer.state.0.exp_avg", "optimizer.state.1.step", "rng"} <= names
    values = checkpoint.values
    # Names of classes that are not known are plain values, and reject nothing.
    wanted = {
        "epoch": 3,
        "args/lr": 0.1,
        "args/dtype": "bfloat16",
        "scope": 2,
        "settings/rate": 0.5,
        "settings/names": ["a"],
        "counts/seen": [1, 2],
        "device": "cuda:1",
        "version": "2.13.0+cpu",
        "path": "/data/x",
        "optimizer/param_groups/0/lr": 0.1,
        "model/1._extra_state/state": [b"state of another program", 0, None],
    }
    assert {key: values.get(key) for key in wanted} == wanted


def test_lazy_bits_are_applied_when_tensors_are_loaded():
    tensors = opening.open_checkpoint(WEIGHTS / "lazy.pt").tensors
    assert [t.view for t in tensors] == ["conj", "neg", "conj neg", ""]
    like = {t.name: jax.ShapeDtypeStruct(t.shape, t.dtype) for t in tensors}
    loaded = universal.load(WEIGHTS / "lazy.pt", like)
    for name, array in torch_file.read_arrays(WEIGHTS / "lazy.pt").items():
        assert_equal(np.asarray(loaded[name]), EXPECTED[name])
        assert_equal(array, EXPECTED[name])


def test_one_of_several_files_of_pytorch_is_chosen(tmp_path):
    for name in ("a.pt", "b.pt", "training_args.bin"):
        torch_files.write(tmp_path / name, {"w": torch_files.tensor()})
    with pytest.raises(FormatError, match=r"2 files of PyTorch \(a\.pt, b\.pt\)"):
        opening.open_checkpoint(tmp_path)
    (tmp_path / "b.pt").unlink()
    assert [each.name for each in opening.open_checkpoint(tmp_path).tensors] == ["w"]
    name = "pytorch_model-00001-of-00002.bin"
    shutil.copy(WEIGHTS / "sharded" / name, tmp_path)
    with pytest.raises(FormatError, match=r"1 of the 2 files pytorch_model-\*-of-0000"):
        opening.open_checkpoint(tmp_path)
    assert opening.open_checkpoint(tmp_path / name).tensors


@pytest.mark.parametrize(
    ("value", "match"),
    [
        (
            {"a": {"b": torch_files.tensor()}, "a.b": torch_files.tensor()},
            "has a.b, and",
        ),
        ({"a": 1}, "has no tensors"),
    ],
)
def test_a_file_with_a_tensor_twice_or_none_is_refused(tmp_path, value, match):
    path = torch_files.write(tmp_path / "x.pt", value)
    with pytest.raises(FormatError, match=match):
        opening.open_checkpoint(path)
