"""Fragments of PyTorch's distributed checkpoints lead to the saved values."""

import pathlib
import shutil

import ml_dtypes
import numpy as np
import pytest

from benchmarks import dcp_writer
from elastic_ckpt.universal import opening
from elastic_ckpt.universal.formats import source_budget
from elastic_ckpt.universal.formats.format_error import FormatError
from tests.universal.formats.fragment_values import values_of

DATA = pathlib.Path(__file__).parent / "data"
WHOLE = np.load(DATA / "dcp.npz")
STATES = {"exp_avg": "first_moment", "exp_avg_sq": "second_moment", "step": "step"}


def expected(name):
    """The tensor of this name, as it was before it was saved."""
    array = WHOLE[name]
    return array.view(ml_dtypes.bfloat16) if array.dtype == np.int16 else array


def key(name):
    """The name and kind that a tensor of the sample has."""
    if not name.startswith("optim.state."):
        return name, "parameter"
    parameter, _, state = name.removeprefix("optim.state.").rpartition(".")
    return f"model.{parameter}", STATES[state]


def assert_equal(values, array):
    assert (values.dtype, values.shape) == (array.dtype, array.shape)
    assert values.tobytes() == np.ascontiguousarray(array).tobytes()


def test_a_checkpoint_of_fsdp_and_tensor_parallelism_is_read_bit_equal():
    checkpoint = opening.open_checkpoint(DATA / "dcp")
    tensors = {(tensor.name, tensor.kind): tensor for tensor in checkpoint.tensors}
    assert len(tensors) == len(checkpoint.tensors)
    assert tensors.keys() == {key(name) for name in WHOLE}
    for name in WHOLE:
        assert_equal(values_of(tensors[key(name)]), expected(name))
    assert len(tensors["model.up.weight", "first_moment"].fragments) == 4


def test_numbers_and_texts_are_among_the_values():
    values = opening.open_checkpoint(DATA / "dcp" / ".metadata").values
    assert (values["step"], values["note"]) == (2, "two steps")
    assert values["optim/param_groups/0/lr"] == 0.01
    assert values["optim/param_groups/0/betas"] == (0.9, 0.999)
    assert "up.weight" in values["optim/param_groups/0/params"]


def test_the_shards_of_its_hugging_face_writer_are_joined():
    checkpoint = opening.open_checkpoint(DATA / "dcp_hf")
    assert checkpoint.format == "safetensors shards of PyTorch DCP"
    tensors = {tensor.name: tensor for tensor in checkpoint.tensors}
    model = [name for name in WHOLE if name.startswith("model.")]
    assert tensors.keys() == {name.removeprefix("model.") for name in model}
    for name in model:
        tensor = tensors[name.removeprefix("model.")]
        assert_equal(values_of(tensor), expected(name))


def test_a_flipped_bit_is_detected(tmp_path):
    shutil.copytree(DATA / "dcp", tmp_path / "x")
    checkpoint = opening.open_checkpoint(tmp_path / "x")
    files = sorted({each.file for t in checkpoint.tensors for each in t.fragments})
    assert len(files) == 4
    metadata = str(tmp_path / "x" / ".metadata")
    assert checkpoint.check([*files, metadata]) == [metadata]
    fragment = checkpoint.tensors[0].fragments[-1]
    content = bytearray(pathlib.Path(fragment.file).read_bytes())
    content[fragment.offset] ^= 1
    pathlib.Path(fragment.file).write_bytes(content)
    with pytest.raises(FormatError, match=f"{fragment.file} is damaged: its bytes"):
        checkpoint.check(files)


def test_each_of_many_tensors_is_where_it_was_written(tmp_path):
    names = [f"layers.{number}.weight" for number in range(3000)]
    dcp_writer.write(tmp_path / "x", names, shape=(2, 3), files=2)
    tensors = opening.open_checkpoint(tmp_path / "x").tensors
    assert {tensor.name for tensor in tensors} == set(names)
    offsets = {(t.fragments[0].file, t.fragments[0].offset) for t in tensors}
    assert len(offsets) == len(names)
    for tensor in tensors[::500]:
        assert_equal(values_of(tensor), np.ones((2, 3), np.float32))


@pytest.mark.slow
def test_memory_is_limited_by_the_bytes_that_values_take(tmp_path, monkeypatch):
    monkeypatch.setattr(source_budget, "MOST_MEMORY_BYTES", 1 << 20)
    monkeypatch.setattr(source_budget, "_MEMORY_PER_BYTE", 100)
    names = [f"w{number}" for number in range(20_000)]
    dcp_writer.write(tmp_path / "x", names, shape=(2, 3), files=1)
    assert len(opening.open_checkpoint(tmp_path / "x").tensors) == len(names)
    file = tmp_path / "x" / "__0_0.distcp"
    size = file.stat().st_size
    # A hole is as long, and takes no space.
    file.write_bytes(b"")
    with file.open("r+b") as emptied:
        emptied.truncate(size)
    with pytest.raises(
        FormatError, match=r"\.metadata has a pickle that takes over 1048576"
    ):
        opening.open_checkpoint(tmp_path / "x")
