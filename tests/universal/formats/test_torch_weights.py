"""Weights of PyTorch and Meta are read bit-equal (`write_weights.py` wrote them)."""

import json
import pathlib
import shutil

import ml_dtypes
import numpy as np
import pytest

from elastic_ckpt.universal import opening
from elastic_ckpt.universal.formats import torch_file
from elastic_ckpt.universal.formats.format_error import FormatError
from tests.universal.formats import source_contents, torch_files
from tests.universal.formats.fragment_values import values_of

DATA = pathlib.Path(__file__).parent / "data" / "weights"
EXPECTED = np.load(DATA / "expected.npz")
MODEL = ("0.weight", "1.weight", "2.weight", "2.bias")
CONFIG = {"config/hidden_size": 4, "config/architectures": ["X"]}


def expected(name):
    array = EXPECTED[name]
    return array.view(ml_dtypes.bfloat16) if array.dtype == np.int16 else array


def assert_equal(values, array):
    assert (values.dtype, values.shape) == (array.dtype, array.shape)
    assert values.tobytes() == np.ascontiguousarray(array).tobytes()


@pytest.mark.parametrize(
    "path",
    [
        *("single", "single/pytorch_model.bin", "no_crc.pt"),
        *("sharded", "sharded/pytorch_model.bin.index.json"),
    ],
)
def test_a_model_is_read_bit_equal(path):
    checkpoint = opening.open_checkpoint(DATA / path)
    assert checkpoint.format == "PyTorch"
    tensors = {tensor.name: tensor for tensor in checkpoint.tensors}
    assert tuple(tensors) == MODEL
    for name, tensor in tensors.items():
        assert_equal(values_of(tensor), expected(name))
    config = {} if path == "no_crc.pt" else CONFIG
    assert config.items() <= checkpoint.values.items()
    files = sorted({each.file for t in checkpoint.tensors for each in t.fragments})
    # A file without checksums is not damaged, but cannot be verified.
    assert checkpoint.check(files) == (files if path == "no_crc.pt" else [])


def test_checksums_are_those_of_ranges_of_the_file():
    checkpoint = opening.open_checkpoint(DATA / "single")
    path = str(DATA / "single" / "pytorch_model.bin")
    spans = [(start, stop) for start, stop, _ in checkpoint.checksums(path)]
    for tensor in checkpoint.tensors:
        (fragment,) = tensor.fragments
        end = fragment.offset + values_of(tensor).nbytes
        assert any(a <= fragment.offset and end <= b for a, b in spans)


def test_each_byte_of_a_file_without_checksums_that_changes_is_read(tmp_path):
    path = tmp_path / "x.pt"
    shutil.copy(DATA / "no_crc.pt", path)
    (fragment,) = opening.open_checkpoint(path).tensors[0].fragments
    content = bytearray(path.read_bytes())
    content[fragment.offset] ^= 1
    path.write_bytes(content)
    checkpoint = opening.open_checkpoint(path)
    assert checkpoint.check([str(path)]) == [str(path)]
    assert torch_file.read_arrays(path)["0.weight"].shape == (6, 4)


def test_a_training_checkpoint_has_all_of_its_tensors_and_values():
    checkpoint = opening.open_checkpoint(DATA / "training.pt")
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


def test_files_of_model_parallel_ranks_are_an_axis():
    checkpoint = opening.open_checkpoint(DATA / "meta")
    assert checkpoint.format == "Meta consolidated"
    assert checkpoint.axes == {"tp": 2}
    assert checkpoint.values == {
        "config/dim": 4,
        "config/n_heads": 2,
        "config/norm_eps": 1e-5,
    }
    parts = {(t.name, t.ranks): values_of(t) for t in checkpoint.tensors}
    wq = [parts["layers.0.attention.wq.weight", (("tp", n),)] for n in range(2)]
    whole = np.arange(32).astype(ml_dtypes.bfloat16).reshape(8, 4)
    assert_equal(np.concatenate(wq), whole)
    assert_equal(parts["norm.weight", (("tp", 1),)], whole[0])


def test_one_file_of_meta_has_no_axis(tmp_path):
    shutil.copy(DATA / "meta" / "consolidated.00.pth", tmp_path)
    checkpoint = opening.open_checkpoint(tmp_path)
    assert (checkpoint.axes, checkpoint.tensors[0].ranks) == ({}, ())


def test_a_missing_rank_of_meta_is_an_error(tmp_path):
    shutil.copy(DATA / "meta" / "consolidated.01.pth", tmp_path)
    with pytest.raises(FormatError, match=r"lacks consolidated\.00\.pth"):
        opening.open_checkpoint(tmp_path)


def test_ranks_of_meta_with_other_tensors_are_an_error(tmp_path):
    shutil.copy(DATA / "meta" / "consolidated.00.pth", tmp_path)
    torch_files.write(tmp_path / "consolidated.01.pth", {"w": torch_files.tensor()})
    with pytest.raises(FormatError, match=r"01\.pth has no tensors, or others .*\(lay"):
        opening.open_checkpoint(tmp_path)


def test_lazy_bits_are_applied_where_values_are_moved():
    checkpoint = opening.open_checkpoint(DATA / "lazy.pt")
    views = {tensor.name: tensor.view for tensor in checkpoint.tensors}
    assert views == {"conj": "conj", "neg": "neg", "both": "conj neg", "plain": ""}
    for name, array in torch_file.read_arrays(DATA / "lazy.pt").items():
        assert_equal(array, expected(name))
    read = dict(source_contents.contents(DATA / "lazy.pt"))
    for tensor in checkpoint.tensors:
        values = read[source_contents.key_of(tensor)]
        assert values == expected(tensor.name).tobytes()


@pytest.mark.parametrize(
    ("weight_map", "match"),
    [
        ({"0.weight": "../x.bin"}, "lists 0.weight in '../x.bin', which is no file"),
        ({"0.weight": "other.bin"}, r"other\.bin is missing"),
        ({"absent": "pytorch_model-00001-of-00002.bin"}, "lacks absent, which"),
    ],
)
def test_an_index_that_does_not_fit_its_files_is_refused(tmp_path, weight_map, match):
    shutil.copytree(DATA / "sharded", tmp_path / "x")
    index = tmp_path / "x" / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(FormatError, match=match):
        opening.open_checkpoint(tmp_path / "x")


def test_several_files_without_an_index_need_a_choice(tmp_path):
    for name in ("a.pt", "b.pt", "training_args.bin"):
        torch_files.write(tmp_path / name, {"w": torch_files.tensor()})
    with pytest.raises(FormatError, match=r"2 files of PyTorch \(a\.pt, b\.pt\)"):
        opening.open_checkpoint(tmp_path)
    (tmp_path / "b.pt").unlink()
    assert [each.name for each in opening.open_checkpoint(tmp_path).tensors] == ["w"]


def test_a_name_that_two_dicts_make_is_refused(tmp_path):
    tensor = torch_files.tensor()
    path = torch_files.write(tmp_path / "x.pt", {"a": {"b": tensor}, "a.b": tensor})
    with pytest.raises(FormatError, match=r"has a\.b, and so has another"):
        opening.open_checkpoint(path)


def test_a_file_without_tensors_is_no_state_dict(tmp_path):
    path = torch_files.write(tmp_path / "x.pt", {"a": 1})
    with pytest.raises(FormatError, match="has no tensors; it is no state dict"):
        opening.open_checkpoint(path)
