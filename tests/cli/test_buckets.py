"""Runs and steps at `gs://` and `s3://`: verbs take them as they do local ones."""

import json

import pytest

from elastic_ckpt.core import storage
from elastic_ckpt.tiers.persistent import persistent_root
from elastic_ckpt.training import run_directory, schema
from tests import runs
from tests.tiers import tiered_steps

pytestmark = pytest.mark.slow


@pytest.fixture
def run(bucket, tmp_path):
    """A run with two steps, which are in its bucket alone."""
    run_directory.write_config(bucket, schema.Config())
    steps = f"{bucket}/checkpoints"
    with tiered_steps.checkpointer(tmp_path / "ram", steps) as checkpointer:
        tiered_steps.save(checkpointer, 1, 2)
    return bucket


def report(verb, *arguments, code=0):
    return json.loads(runs.verb(verb, *arguments, "--json", code=code))


def test_run_in_a_bucket_is_inspected_verified_and_shown(run):
    content = report("inspect", run)
    assert [each["step"] for each in content["steps"]] == [1, 2]
    leaves = {each["path"]: each["shape"] for each in content["steps"][0]["state"]}
    assert leaves["params/w"] == [16, 6]
    step = f"{run}/checkpoints/1"
    assert f"{step}: pinned" in runs.verb("pin", step)
    tiers = report("inspect", f"{run}/checkpoints")["tiers"]
    assert [each["preserved"] for each in tiers["steps"]] == [True, False]
    assert tiers["leftovers"] == []
    root = storage.absolute(run)
    events = root / run_directory.EVENTS
    events.write_bytes(b'{"time":1.0,"event":"run_stopped","step":2}\n')
    content = report("status", run)
    assert content["phase"] == "stopped"
    assert [each["step"] for each in content["tiers"]] == [None, 2]
    for path in (run, f"{run}/checkpoints", f"{run}/checkpoints/2"):
        assert report("verify", path)["passed"]
    damaged = root / "checkpoints" / "2" / "data" / "a.json"
    damaged.write_bytes(b"[" + damaged.read_bytes()[1:])
    (problem,) = report("verify", run, code=1)["problems"]
    assert (problem["part"], problem["path"]) == ("data/a.json", str(damaged))
    # An upload that was cut short.
    (root / "checkpoints" / "2" / persistent_root.COMMIT_FILE).unlink()
    tiers = report("inspect", f"{run}/checkpoints")["tiers"]
    assert [each["step"] for each in tiers["steps"]] == [1]
    assert [each["path"] for each in tiers["leftovers"]] == [
        str(root / "checkpoints" / "2")
    ]
