"""PyTorch's distributed checkpoints lead to the saved values, or are refused.

`write_dcp.py` and `write_dcp_saves.py` wrote the samples, with PyTorch itself.
"""

import itertools
import pathlib
import shutil
import struct

import ml_dtypes
import numpy as np
import pytest

from elastic_ckpt.universal import opening
from elastic_ckpt.universal.formats.format_error import FormatError
from tests.universal.formats import dcp_files
from tests.universal.formats.fragment_values import values_of
from tests.universal.formats.test_safetensors import written

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


def test_parts_of_tensors_as_safetensors_are_refused(tmp_path):
    arrays = {"w": np.ones((2, 3), np.float32)}
    path = written(tmp_path / "x.safetensors", arrays, DCP_SHARDING_INFO="{}")
    with pytest.raises(FormatError, match="enable_consolidation=True"):
        opening.open_checkpoint(path)


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


SAVES = pathlib.Path(__file__).parent / "data" / "dcp_saves"
EXPECTED = {
    "model.cut": np.arange(20, dtype=np.float32).reshape(5, 4),
    "model.both": np.arange(6, dtype=np.float32),
}


@pytest.mark.parametrize("path", ["async", "no_dist"])
def test_other_saves_are_read_bit_equal(path):
    checkpoint = opening.open_checkpoint(SAVES / path)
    assert checkpoint.format == "PyTorch distributed checkpoint"
    assert {each.name for each in checkpoint.tensors} == EXPECTED.keys()
    for tensor in checkpoint.tensors:
        assert_equal(values_of(tensor), EXPECTED[tensor.name])
    assert dict(checkpoint.values) == {"step": 3}
    files = {part.file for each in checkpoint.tensors for part in each.fragments}
    assert checkpoint.check(sorted(files)) == []


@pytest.mark.parametrize(
    ("save", "match"),
    [
        ("zstd", r"\.metadata lists items that extensions changed.*'stream\.zstd/1'"),
        ("safetensors", r"__0_0\.distcp has tensors as safetensors"),
    ],
)
def test_extensions_and_other_formats_of_tensors_are_refused(save, match):
    with pytest.raises(FormatError, match=match) as error:
        opening.open_checkpoint(SAVES / save)
    assert "save with" in str(error.value)


def test_metadata_of_single_ranks_are_refused(tmp_path):
    for rank in range(2):
        shutil.copy(SAVES / "async" / ".metadata", tmp_path / f"__{rank}.metadata")
    with pytest.raises(FormatError, match="of single ranks alone; save with collec"):
        opening.open_checkpoint(tmp_path)


def test_a_tensor_of_thousands_of_chunks_is_read(tmp_path):
    kinds = [
        dcp_files.item((1,), entries={"data/0": struct.pack("<f", n)}) for n in range(7)
    ]
    parts, count = dcp_files.parts(), 2100
    chunks = [((n,), (1,)) for n in range(count)]
    parts.entries = {"w": dcp_files.entry((count,), chunks)}
    parts.items = [kinds[n % 7] for n in range(count)]
    ends = itertools.accumulate(map(len, parts.items), initial=0)
    parts.stored = [
        (("w", (n,)), (dcp_files.FILE, at, len(parts.items[n])))
        for n, at in enumerate(itertools.islice(ends, count))
    ]
    checkpoint = opening.open_checkpoint(parts.write(tmp_path / "x"))
    (tensor,) = checkpoint.tensors
    assert values_of(tensor).tolist() == [n % 7 for n in range(count)]
    assert checkpoint.check([tensor.fragments[0].file]) == []


@pytest.mark.parametrize("keys", [(), 5, ([],), "w"])
def test_paths_of_names_that_are_none_are_passed_over(tmp_path, keys):
    parts = dcp_files.parts()
    parts.entries["o.state.w.exp_avg"] = parts.entries["w"]
    parts.stored += [
        (("o.state.w.exp_avg", first), place) for (_, first), place in parts.stored
    ]
    parts.paths = {"w": keys, "absent": ("w",)}
    tensors = opening.open_checkpoint(parts.write(tmp_path / "x")).tensors
    assert [(t.name, t.kind) for t in tensors] == [
        ("w", "parameter"),
        ("w", "first_moment"),
    ]
