"""A step of this library opens alike from a RAM disk and from persistent storage."""

import pathlib
import shutil

import jax
import numpy as np
import pytest

import elastic_ckpt as ec
from elastic_ckpt.universal import opening
from elastic_ckpt.universal.formats.format_error import FormatError
from tests.tiers.test_local import sharded
from tests.universal.formats.fragment_values import values_of


def state():
    return {
        "params": {"w": sharded(np.arange(64.0, dtype=np.float32), "b")},
        "count": 3,
        "a/b": sharded(np.arange(24, dtype=np.int32).reshape(4, 6), "a"),
        "name": "hello",
    }


EXPECTED = {
    "params/w": np.arange(64.0, dtype=np.float32),
    "count": np.asarray(3),
    "a~1b": np.arange(24, dtype=np.int32).reshape(4, 6),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A RAM disk and a directory of steps, both with the steps 1 and 2."""
    path = tmp_path_factory.mktemp("saved")
    tiers = [ec.Local(path / "ram", every=1), ec.Persistent(path / "steps", every=1)]
    with ec.Checkpointer(tiers) as checkpointer:
        for step in (1, 2):
            tree = jax.tree.map(lambda leaf: leaf, state())
            checkpointer.save_checkpointables(step, {"state": tree})
    return path


def assert_same(checkpoint):
    tensors = {tensor.name: tensor for tensor in checkpoint.tensors}
    assert tensors.keys() == EXPECTED.keys()
    for name, array in EXPECTED.items():
        values = values_of(tensors[name])
        assert (values.dtype, values.shape) == (array.dtype, array.shape)
        assert values.tobytes() == array.tobytes()
    assert checkpoint.values["name"] == "hello"


def directory_of(saved, step):
    (path,) = (saved / "ram").glob(f"hosts/0/{step}-*")
    return path


def test_a_ram_disk_opens_at_its_newest_step(saved):
    checkpoint = opening.open_checkpoint(saved / "ram")
    assert checkpoint.format == "elastic_ckpt RAM disk"
    assert checkpoint.values["step"] == 2
    assert_same(checkpoint)
    (weights,) = (each for each in checkpoint.tensors if each.name == "params/w")
    assert len(weights.fragments) == 4


def test_a_step_in_a_ram_disk_opens(saved):
    newest = opening.open_checkpoint(saved / "ram").values["step"]
    checkpoint = opening.open_checkpoint(directory_of(saved, newest))
    assert checkpoint.values["step"] == newest
    assert_same(checkpoint)


def test_a_step_in_persistent_storage_has_the_same_tensors(saved):
    checkpoint = opening.open_checkpoint(saved / "steps" / "2")
    assert checkpoint.format == "Orbax"
    assert_same(checkpoint)


def copied(saved, path):
    shutil.copytree(saved / "ram", path)
    return directory_of(path.parent, 2) if path.name == "ram" else path


def test_a_flipped_bit_of_a_chunk_is_detected(saved, tmp_path):
    copied(saved, tmp_path / "ram")
    checkpoint = opening.open_checkpoint(tmp_path / "ram")
    files = [each.file for t in checkpoint.tensors for each in t.fragments]
    assert checkpoint.check([*files, "other"]) == ["other"]
    chunk = pathlib.Path(files[0])
    content = bytearray(chunk.read_bytes())
    content[0] ^= 1
    chunk.write_bytes(content)
    with pytest.raises(FormatError, match=f"{chunk} is damaged"):
        checkpoint.check(files)


@pytest.mark.parametrize("harm", ["missing", "short", "link"])
def test_files_that_are_not_as_listed_are_refused(saved, tmp_path, harm):
    step = copied(saved, tmp_path / "ram")
    chunk = sorted((step / "state" / "params" / "w" / "c").iterdir())[0]
    if harm == "missing":
        chunk.unlink()
    elif harm == "short":
        chunk.write_bytes(chunk.read_bytes()[:-5])
    else:
        chunk.rename(tmp_path / "elsewhere")
        chunk.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FormatError, match=str(chunk)):
        opening.open_checkpoint(step)


@pytest.mark.slow
def test_a_manifest_that_was_altered_is_refused(saved, tmp_path):
    step = copied(saved, tmp_path / "ram")
    (manifest,) = step.glob("manifest-*.json")
    manifest.write_bytes(manifest.read_bytes().replace(b"float32", b"float64"))
    with pytest.raises(FormatError, match="manifest"):
        opening.open_checkpoint(step)
