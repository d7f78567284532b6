"""The ways in which PyTorch saves distributed checkpoints: they are read, or refused.

`write_dcp_saves.py` wrote the samples, with PyTorch itself.
"""

import pathlib
import shutil

import numpy as np
import pytest

from elastic_ckpt.universal import opening
from elastic_ckpt.universal.formats.format_error import FormatError
from tests.universal.formats import dcp_files
from tests.universal.formats.fragment_values import values_of

SAVES = pathlib.Path(__file__).parent / "data" / "dcp_saves"
EXPECTED = {
    "model.cut": np.arange(20, dtype=np.float32).reshape(5, 4),
    "model.both": np.arange(6, dtype=np.float32),
}


@pytest.fixture
def copied(tmp_path):
    return shutil.copytree(SAVES / "per_rank", tmp_path / "x")


@pytest.mark.parametrize("path", ["per_rank", "per_rank/__1.metadata", "async"])
def test_saves_of_two_ranks_are_read_bit_equal(path):
    check(opening.open_checkpoint(SAVES / path))


def test_a_save_of_one_process_with_a_file_for_each_tensor_is_read_bit_equal():
    check(opening.open_checkpoint(SAVES / "no_dist"))


def check(checkpoint):
    assert checkpoint.format == "PyTorch distributed checkpoint"
    arrays = {each.name: values_of(each) for each in checkpoint.tensors}
    assert arrays.keys() == EXPECTED.keys()
    for name, array in EXPECTED.items():
        assert (arrays[name].dtype, arrays[name].shape) == (array.dtype, array.shape)
        assert arrays[name].tobytes() == array.tobytes(), name
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


@pytest.mark.parametrize(
    ("removed", "match"),
    [("__0.metadata", r"lacks __0\.metadata"), ("__1.metadata", "lacks the part")],
)
def test_metadata_of_a_rank_that_is_missing_is_an_error(copied, removed, match):
    (copied / removed).unlink()
    with pytest.raises(FormatError, match=match):
        opening.open_checkpoint(copied)


def test_metadata_of_two_saves_is_refused(copied):
    shutil.copy(SAVES / "async" / ".metadata", copied)
    with pytest.raises(FormatError, match="of two saves"):
        opening.open_checkpoint(copied)


def test_tensors_of_other_shapes_on_each_rank_are_refused(tmp_path):
    for rank, rows in ((0, 4), (1, 2)):
        parts = dcp_files.parts()
        parts.entries = {
            "w": dcp_files.entry((rows, 2), [((row, 0), (2, 2)) for row in (0, 2)])
        }
        written = parts.write(tmp_path / f"{rank}")
        (tmp_path / "x").mkdir(exist_ok=True)
        shutil.copy(written / ".metadata", tmp_path / "x" / f"__{rank}.metadata")
        shutil.copy(written / dcp_files.FILE, tmp_path / "x")
    with pytest.raises(FormatError, match=r"float32\[4, 2\].*float32\[2, 2\]"):
        opening.open_checkpoint(tmp_path / "x")
