"""Steps that a later version saved are not passed over as if there were none.

`tests/own_formats` has later versions of each file.
"""

import shutil

import numpy as np
import pytest
from orbax.checkpoint import v1 as ocp

import elastic_ckpt as ec
from elastic_ckpt import frontend
from elastic_ckpt.core import checked_blobs, errors
from tests.recorded_events import RecordedEvents


def opened(tmp_path, *, ram=True, keep=None, emit=lambda *_, **__: None):
    tiers = [ec.Local(tmp_path / "ram")] if ram else []
    tiers += [ec.Persistent(tmp_path / "steps", every=2, keep=keep)]
    return frontend.Checkpointer(tiers, run="run-7", emit=emit)


def save(checkpointer, *steps):
    for step in steps:
        assert checkpointer.save(step, {"w": np.full(4, step, np.float32)})
        # A backup that is late is skipped.
        checkpointer.wait()


def raise_versions(directory, step):
    """Has a step, in each place below a directory, saved by a later version."""
    for path in directory.rglob("manifest-*"):
        fields, blobs = checked_blobs.parse(path.read_bytes(), what="", version=1)
        if fields["step_id"][0] == step:
            del fields["version"], fields["sizes"]
            path.write_bytes(checked_blobs.to_bytes(fields, blobs, version=2))
    for path in directory.glob(f"**/{step}/commit_success.txt"):
        path.write_text(path.read_text().replace('"version": 1', '"version": 2'))


def test_a_step_of_a_later_version_in_storage_is_an_error_and_stays(tmp_path):
    steps = tmp_path / "steps"
    with opened(tmp_path) as checkpointer:
        save(checkpointer, 2, 4)
    raise_versions(tmp_path, 4)
    for ram in (True, False):
        with pytest.raises(errors.CheckpointError, match="later version") as error:
            opened(tmp_path, ram=ram)
        assert f"manifest {steps}/4/manifest-" in str(error.value)
        assert "it has version 2, and this program reads version 1" in str(error.value)
    shutil.move(steps / "4", tmp_path)
    with opened(tmp_path) as checkpointer:
        assert checkpointer.latest.step == 2
        save(checkpointer, 6)
    # An older one does not matter, and is not removed.
    shutil.move(tmp_path / "4", steps)
    keep = ocp.training.preservation_policies.LatestN(1)
    with opened(tmp_path, keep=keep) as checkpointer:
        assert checkpointer.latest.step == 6
        assert [each.step for each in checkpointer.checkpoints] == [2, 6]
        checkpointer.load(None, {"w": np.zeros(4, np.float32)})
        save(checkpointer, 8)
    assert {each.name for each in steps.glob("?")} == {"4", "8"}


def test_a_step_of_a_later_version_in_ram_is_passed_over_with_an_event_and_stays(
    tmp_path,
):
    with opened(tmp_path) as checkpointer:
        # The last one in RAM alone.
        save(checkpointer, 2, 4, 5)
    raise_versions(tmp_path / "ram", 5)
    recorded = RecordedEvents()
    with opened(tmp_path, emit=recorded) as checkpointer:
        loaded = checkpointer.load(None, {"w": np.zeros(4, np.float32)})
        np.testing.assert_array_equal(loaded["w"], np.full(4, 4))
        save(checkpointer, 6)
    passed_over = recorded.named("step_passed_over")
    assert {each["step"] for each in passed_over} == {5}
    assert "it has version 2" in passed_over[0]["why"]
    assert [*tmp_path.glob("ram/hosts/0/5-*")]
