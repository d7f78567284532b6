"""Numbers of a saved step are edited, and the step is a checkpoint as before."""

import json
import shutil

import jax.numpy as jnp
import numpy as np
import pytest
from orbax.checkpoint import v1 as ocp

import elastic_ckpt as ec
from elastic_ckpt import frontend
from tests import runs


def state(step):
    return {
        "w": jnp.arange(6.0).reshape(2, 3) + step,
        "opt": {"lr": jnp.float32(0.5), "half": jnp.bfloat16(2), "on": jnp.bool_(True)},
        "step": step,
    }


def schedule():
    return ec.components.Component(
        {"base_lr": 0.1, "count": 30, "warm": (True, {"lr": jnp.bfloat16(2)})}, "global"
    )


def opened(directory, **options):
    tiers = [ec.Persistent(directory, every=1, **options)]
    return frontend.Checkpointer(tiers, run="run-7", slice_name="s0")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Two steps of a run that has ended."""
    return save_two_steps(tmp_path_factory.mktemp("saved") / "steps")


def save_two_steps(directory):
    with opened(directory) as checkpointer:
        for step in (1, 2):
            checkpointables = {"state": state(step), "schedule": schedule()}
            assert checkpointer.save_checkpointables(step, checkpointables)
    return directory


@pytest.fixture
def steps(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "steps")


def modify(step_path, *options, code=0):
    return runs.verb("modify", str(step_path), *options, code=code)


def loaded(step_path):
    return ocp.load_checkpointables(step_path, {"state": None})["state"]


SET = ("--set", "step=3")


def test_numbers_are_edited_and_all_else_is_as_it_was(steps):
    before = loaded(steps / "2")
    edits = ["--set", "step=100", "--scale", "opt/lr=0.1", "--set", "opt/on=false"]
    output = modify(steps / "2", *edits, "--scale", "opt/half=1.5")
    assert "state/step (int64): 2 -> 100" in output
    assert "state/opt/on (bool): True -> False" in output
    after = loaded(steps / "2")
    assert after["step"] == 100
    assert after["opt"]["lr"] == np.float32(0.5) * np.float32(0.1)
    assert (after["opt"]["half"], bool(after["opt"]["on"])) == (3, False)
    np.testing.assert_array_equal(after["w"], before["w"])
    runs.verb("verify", "--strict", str(steps))
    assert [each["step"] for each in _listed(steps)] == [1, 2]
    keep = ocp.training.preservation_policies.LatestN(1)
    with opened(steps, keep=keep) as checkpointer:
        assert checkpointer.latest.step == 2
        assert checkpointer.load(None, None)["step"] == 100
        # All else is as it was.
        restored = schedule()
        restored.state["base_lr"] = 0
        checkpointer.load_checkpointables(None, {"schedule": restored})
        assert restored.state == schedule().state
        assert checkpointer.save(3, state(3))
    assert not list(steps.glob("*.aside"))
    assert not (steps / "2").exists()


REFUSED = [
    (["--tree", "schedule", "--set", "lr=1"], "has no pytree 'schedule'"),
    (["--set", "step=1.5"], "cannot become 1.5"),
    (["--set", "nothing=1"], "paths of its numeric values: "),
    (["--set", "w=1"], "no numeric value at 'state/w'"),
    (["--scale", "step=0.3"], "cannot become 0.3 times its value"),
    (["--scale", "opt/lr=1e300"], "float32 cannot represent the result"),
    (["--set", "opt/on=2"], "cannot become 2"),
    (["--set", "step=1", "--tree", "other"], "has no pytree 'other'"),
    ([], "specify at least one edit"),
    (["--scale", "step=x"], "cannot become x times its value"),
]


def test_edit_that_cannot_be_made_is_refused_and_nothing_is_written(steps):
    for edit, why in REFUSED:
        assert why in modify(steps / "2", *edit, code=1)
    assert "only the newest step, 2, can" in modify(steps / "1", *SET, code=1)
    assert "state/step (int64): 2 -> 3\nnothing was written" in modify(
        steps / "2", *SET, "--dry-run"
    )
    assert [each["step"] for each in _listed(steps)] == [1, 2]


def _listed(steps):
    return json.loads(runs.verb("inspect", "--json", str(steps)))["steps"]


def test_step_of_a_live_run_is_not_edited(steps):
    with opened(steps) as checkpointer:
        assert checkpointer.save(3, state(3))
        refused = runs.cli("modify", steps / "3", "--set", "step=4")
        assert "is being written by another live program" in refused.stderr
        assert "wait for that program or stop it" in refused.stderr
        assert "-> 4" in modify(steps / "3", "--set", "step=4", "--dry-run")
    modify(steps / "3", "--set", "step=4")
    assert loaded(steps / "3")["step"] == 4
    assert [each["step"] for each in _listed(steps)] == [1, 2, 3]
