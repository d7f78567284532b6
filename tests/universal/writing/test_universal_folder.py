"""Universal checkpoints that are written are read as they are, and as DeepSpeed's."""

import numpy as np
import pytest

from elastic_ckpt.core import errors
from elastic_ckpt.universal import opening
from elastic_ckpt.universal.formats import deepspeed_universal
from elastic_ckpt.universal.writing.universal_folder import UniversalFolder
from tests.universal.formats import stored_values

SAMPLE = "zero1_tp2_pp2_dp2_universal"


def test_a_checkpoint_of_deepspeed_is_written_again_bit_equal(tmp_path):
    source = stored_values.unpacked(f"deepspeed/{SAMPLE}.tar.xz", tmp_path)
    checkpoint = deepspeed_universal.open_checkpoint(source)
    folder = UniversalFolder(tmp_path / "again", tag="step2")
    for tensor in checkpoint.tensors:
        cat_dim = checkpoint.values.get(f"parameters/{tensor.name}/cat_dim", 0)
        values = stored_values.read(tensor)
        folder.write(tensor.name, tensor.kind, values, facts={"cat_dim": cat_dim})
    folder.commit(step=2, values={"iteration": 2})
    again = opening.open_checkpoint(tmp_path / "again")
    assert again.format == "DeepSpeed universal"
    assert again.values["iteration"] == 2
    assert again.values["parameters/1.dense.weight/cat_dim"] == 1
    expected = stored_values.by_key(checkpoint)
    written = stored_values.by_key(again)
    assert written.keys() == expected.keys()
    for key, tensor in expected.items():
        assert written[key].shape == tensor.shape, key
        assert written[key].dtype == tensor.dtype, key
        array = stored_values.read(written[key])
        assert array.tobytes() == stored_values.read(tensor).tobytes(), key
    files = sorted({part.file for each in again.tensors for part in each.fragments})
    assert again.check(files) == []


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/a", "a\\b", "a\0"])
def test_names_that_lead_elsewhere_are_refused(tmp_path, name):
    folder = UniversalFolder(tmp_path / "run", tag="step2")
    with pytest.raises(errors.CheckpointError, match="cannot be the name"):
        folder.write(name, "master", np.zeros(2, np.float32))
    with pytest.raises(errors.CheckpointError, match="cannot be the name"):
        folder.write("w", f"x/{name}", np.zeros(2, np.float32))
    with pytest.raises(errors.CheckpointError, match="cannot be the name"):
        UniversalFolder(tmp_path / "run", tag=name)
    assert not list(tmp_path.iterdir())


def test_an_empty_checkpoint_is_not_committed(tmp_path):
    with pytest.raises(errors.CheckpointError, match="no parameters"):
        UniversalFolder(tmp_path, tag="step2").commit(step=2)
    assert not list(tmp_path.iterdir())
