"""Steps that a newer program saved are not passed over as if there were none.

`tests/own_formats` has later versions of each file.
"""

import json
import shutil

import numpy as np
import pytest

import elastic_ckpt as ec
from elastic_ckpt import frontend
from elastic_ckpt.core import checked_json, errors
from tests.recorded_events import RecordedEvents


def opened(tmp_path, *, ram=True, stored=True, emit=lambda *_, **__: None):
    tiers = [ec.Local(tmp_path / "ram")] if ram else []
    tiers += [ec.Persistent(tmp_path / "steps", every=2)] if stored else []
    return frontend.Checkpointer(tiers, run="run-7", emit=emit)


def save(checkpointer, *steps):
    for step in steps:
        assert checkpointer.save(step, {"w": np.full(4, step, np.float32)})
        # A backup that is late is skipped.
        checkpointer.wait()


def raise_versions(directory, step):
    """Has a step, in each place below a directory, saved by a newer program."""
    for path in directory.rglob("manifest-*.json"):
        fields = json.loads(path.read_bytes())
        if fields["step"] == step:
            del fields["digest"], fields["version"]
            path.write_bytes(checked_json.to_bytes(fields, version=2))


def refused(tmp_path, **tiers):
    """The error of a start."""
    with pytest.raises(errors.CheckpointError) as error:
        opened(tmp_path, **tiers)
    message = str(error.value)
    assert "manifest-" in message
    assert "has version 2, and this program reads version 1" in message
    assert "the newer elastic_ckpt that wrote it" in message
    return message


def test_a_run_neither_begins_anew_nor_goes_back_behind_a_step_in_storage(tmp_path):
    steps = tmp_path / "steps"
    with opened(tmp_path) as checkpointer:
        save(checkpointer, 2, 4)
    raise_versions(steps, 4)
    # The copy in RAM can be read, but is lost with the machine.
    with opened(tmp_path) as checkpointer:
        assert checkpointer.latest.step == 4
    raise_versions(tmp_path / "ram", 4)
    for ram in (True, False):
        assert "To continue from step 2 without it" in refused(tmp_path, ram=ram)
    raise_versions(steps, 2)
    raise_versions(tmp_path / "ram", 2)
    for ram in (True, False):
        message = refused(tmp_path, ram=ram)
        assert "step 4 cannot be read" in message
        assert "To begin anew, first move" in message
    assert "step 4 cannot be read" in refused(tmp_path, stored=False)
    for step in ("2", "4"):
        shutil.move(steps / step, tmp_path)
    shutil.rmtree(tmp_path / "ram")
    with opened(tmp_path) as checkpointer:
        assert checkpointer.latest is None
        save(checkpointer, 2, 6)
    # An older one does not matter.
    raise_versions(steps, 2)
    with opened(tmp_path) as checkpointer:
        assert checkpointer.latest.step == 6


def test_a_step_of_a_newer_program_in_ram_is_passed_over_with_an_event(tmp_path):
    with opened(tmp_path) as checkpointer:
        # The last one in RAM alone.
        save(checkpointer, 2, 4, 5)
    raise_versions(tmp_path / "ram", 5)
    recorded = RecordedEvents()
    with opened(tmp_path, emit=recorded) as checkpointer:
        assert checkpointer.latest.step == 4
        loaded = checkpointer.load(None, {"w": np.zeros(4, np.float32)})
        np.testing.assert_array_equal(loaded["w"], np.full(4, 4))
    passed_over = recorded.named("step_passed_over")
    assert {each["step"] for each in passed_over} == {5}
    assert "has version 2" in passed_over[0]["why"]
