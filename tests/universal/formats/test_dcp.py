"""PyTorch's distributed checkpoints lead to the saved values, or are refused.

`write_dcp.py` wrote the samples, with PyTorch itself.
"""

import itertools
import pathlib
import shutil
import struct

import ml_dtypes
import numpy as np
import pytest

from elastic_ckpt.universal import opening
from elastic_ckpt.universal.formats.files import FormatError
from tests.universal.formats import dcp_files, stored_values
from tests.universal.formats.stored_values import DATA, assert_equal

WHOLE = np.load(DATA / "dcp.npz")
STATES = {"exp_avg": "first_moment", "exp_avg_sq": "second_moment", "step": "step"}


def key(name):
    """The name, kind and ranks that a tensor of the sample has."""
    if not name.startswith("optim.state."):
        return name, "parameter", ()
    parameter, _, state = name.removeprefix("optim.state.").rpartition(".")
    return f"model.{parameter}", STATES[state], ()


def test_a_checkpoint_of_fsdp_and_tensor_parallelism_is_read_bit_equal():
    tensors = stored_values.by_key(opening.open_checkpoint(DATA / "dcp"))
    assert tensors.keys() == {key(name) for name in WHOLE}
    for name, array in WHOLE.items():
        is_bfloat16 = array.dtype == np.int16
        whole = array.view(ml_dtypes.bfloat16) if is_bfloat16 else array
        assert_equal(stored_values.read(tensors[key(name)]), whole)
    assert len(tensors["model.up.weight", "first_moment", ()].fragments) == 4


def test_numbers_and_texts_are_among_the_values():
    values = opening.open_checkpoint(DATA / "dcp" / ".metadata").values
    assert (values["step"], values["note"]) == (2, "two steps")
    assert values["optim/param_groups/0/lr"] == 0.01
    assert values["optim/param_groups/0/betas"] == (0.9, 0.999)
    assert "up.weight" in values["optim/param_groups/0/params"]


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


EXPECTED = {
    "model.cut": np.arange(20, dtype=np.float32).reshape(5, 4),
    "model.both": np.arange(6, dtype=np.float32),
}


@pytest.mark.parametrize("path", ["async", "no_dist"])
def test_other_saves_are_read_bit_equal(path):
    checkpoint = opening.open_checkpoint(DATA / "dcp_saves" / path)
    assert checkpoint.format == "PyTorch distributed checkpoint"
    assert {each.name for each in checkpoint.tensors} == EXPECTED.keys()
    for tensor in checkpoint.tensors:
        assert_equal(stored_values.read(tensor), EXPECTED[tensor.name])
    assert dict(checkpoint.values) == {"step": 3}
    files = {part.file for each in checkpoint.tensors for part in each.fragments}
    assert checkpoint.check(sorted(files)) == []


@pytest.mark.parametrize(
    ("save", "match"),
    [
        ("zstd", r"\.metadata lists items that extensions changed.*'stream\.zstd/1'"),
        ("safetensors", r"__0_0\.distcp is no file of torch\.save"),
    ],
)
def test_extensions_and_other_formats_of_tensors_are_refused(save, match):
    with pytest.raises(FormatError, match=match):
        opening.open_checkpoint(DATA / "dcp_saves" / save)


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
    assert stored_values.read(tensor).tolist() == [n % 7 for n in range(count)]
    assert checkpoint.check([tensor.fragments[0].file]) == []


@pytest.mark.parametrize("keys", [(), 5, "w"])
def test_paths_of_names_that_are_none_are_passed_over(tmp_path, keys):
    parts, name = dcp_files.parts(), "o.state.w.exp_avg"
    parts.entries[name] = parts.entries["w"]
    parts.stored += [((name, first), place) for (_, first), place in parts.stored]
    parts.paths = {"w": keys, "absent": ("w",)}
    tensors = opening.open_checkpoint(parts.write(tmp_path / "x")).tensors
    kinds = [(t.name, t.kind) for t in tensors]
    assert kinds == [("w", "parameter"), ("w", "first_moment")]
