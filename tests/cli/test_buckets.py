"""Runs and steps at `gs://` and `s3://`: verbs take them as they do local ones."""

import json

import numpy as np
import pytest
from orbax.checkpoint import v1 as ocp

from elastic_ckpt.core import metrics, storage
from elastic_ckpt.simulation import cluster
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


def test_steps_in_a_bucket_come_back_without_the_ram(run, tmp_path):
    steps = f"{run}/checkpoints"
    with tiered_steps.checkpointer(tmp_path / "other", steps) as checkpointer:
        assert [each.step for each in checkpointer.checkpoints] == [1, 2]
        restored = checkpointer.load(None, tiered_steps.state(0))
        saved = tiered_steps.state(2)
        for name in ("w", "b"):
            restored_value, expected = restored["params"][name], saved["params"][name]
            assert (
                np.asarray(restored_value).tobytes() == np.asarray(expected).tobytes()
            )
        assert checkpointer.delete(1)
        assert [each.step for each in checkpointer.checkpoints] == [2]


def test_a_run_in_a_bucket_is_inspected(run):
    content = report("inspect", run)
    assert [each["step"] for each in content["steps"]] == [1, 2]
    for step in content["steps"]:
        leaves = {each["path"]: each["shape"] for each in step["state"]}
        assert leaves["params/w"] == [16, 6]
        assert step["num_bytes"] > 16 * 6 * 4
    tiers = content["tiers"]
    assert tiers["run"] == tiered_steps.RUN
    assert [each["problem"] for each in tiers["steps"]] == [None, None]
    assert tiers["leftovers"] == []
    steps = report("inspect", f"{run}/checkpoints")["tiers"]["steps"]
    assert [each["step"] for each in steps] == [1, 2]


def test_a_run_in_a_bucket_is_verified(run):
    for path in (run, f"{run}/checkpoints", f"{run}/checkpoints/2"):
        assert report("verify", path)["passed"]
    damaged = storage.absolute(run) / "checkpoints" / "2" / "data" / "a.json"
    damaged.write_bytes(b"[" + damaged.read_bytes()[1:])
    (problem,) = report("verify", run, code=1)["problems"]
    assert (problem["part"], problem["tier"]) == ("data/a.json", "persistent")
    assert problem["path"] == str(damaged)


def test_an_upload_to_a_bucket_that_was_cut_short_is_a_leftover(run):
    step = storage.absolute(run) / "checkpoints" / "2"
    (step / persistent_root.COMMIT_FILE).unlink()
    tiers = report("inspect", f"{run}/checkpoints")["tiers"]
    assert [each["step"] for each in tiers["steps"]] == [1]
    assert [each["path"] for each in tiers["leftovers"]] == [str(step)]


def test_a_step_in_a_bucket_is_preserved(run):
    step = f"{run}/checkpoints/1"
    assert f"{step}: pinned" in runs.verb("pin", step)
    steps = report("inspect", f"{run}/checkpoints")["tiers"]["steps"]
    assert [each["preserved"] for each in steps] == [True, False]


def test_where_no_run_is_it_says_so(bucket):
    output = runs.verb("inspect", bucket, code=1)
    assert f"{bucket}: there is no such directory" in output


# Orbax reads no other store with the protocol of S3 than Amazon's.
@pytest.mark.parametrize("bucket", ["gs"], indirect=True)
@pytest.mark.filterwarnings("ignore:Sharding info not provided")
def test_stock_orbax_loads_a_step_from_a_bucket(run):
    with ocp.training.Checkpointer(f"{run}/checkpoints") as orbax:
        restored = orbax.load_checkpointables(2, {"state": None})["state"]
    expected = tiered_steps.state(2)["params"]["w"]
    assert (
        np.asarray(restored["params"]["w"]).tobytes() == np.asarray(expected).tobytes()
    )


def test_a_run_in_a_bucket_has_a_status(run):
    events = storage.absolute(run) / run_directory.EVENTS
    events.write_bytes(b'{"time":1.0,"event":"run_stopped","step":2}\n')
    content = report("status", run)
    assert content["phase"] == "stopped"
    assert [each["step"] for each in content["tiers"]] == [None, 2]
    assert content["last_event"] == {"time": 1.0, "event": "run_stopped", "step": 2}
    assert "in storage step 2" in runs.verb("status", run)


def test_failures_of_a_run_in_a_bucket_are_simulated_with_its_costs(
    run, bucket, tmp_path
):
    root, config = storage.absolute(run), f"{bucket}/config.yml"
    local = runs.write_config(tmp_path, "texts", hosts=2)
    storage.write_atomic(config, local.read_bytes())
    arguments = [config, "--costs", run, "--state-gib", "1", "--days", "0.01"]
    output = runs.verb("simulate", *arguments, code=1)
    assert "the run of --costs has recorded no step" in output
    started = b'{"time":1.0,"event":"run_started","slices":1}\n'
    (root / run_directory.EVENTS).write_bytes(started)
    name = metrics.GOODPUT_SECS["productive"].name
    line = {"time": 2.0, "metric": name, "count": 10, "sum": 70.0}
    path = f"{run}/{run_directory.METRICS}/run.jsonl"
    storage.write_atomic(path, storage.canonical_json(line) + b"\n")
    page, killed = f"{bucket}/page.html", f"{bucket}/trace.jsonl"
    events = [cluster.Event(time=400.0, what=cluster.EventKind.KILL_SLICE, which=0)]
    storage.write_atomic(killed, cluster.to_bytes(events))
    arguments += ["--output", page, "--trace", killed]
    (result,) = report("simulate", *arguments)
    assert result["losses"] == 1
    # A step takes 7 s; those since the last save before the loss are trained again.
    assert 0.9 * 400 / 7 < result["steps"] <= 864 / 7
    assert "<svg" in storage.absolute(page).read_text()
    assert f"--trace {bucket}/none" in runs.verb(
        "simulate", *arguments[:-1], f"{bucket}/none", code=1
    )


def test_a_manifest_is_made_from_and_written_to_a_bucket(bucket):
    shipped = runs.ROOT / "configs"
    name = "deploy/multicontroller_v6e"
    for path in (f"{name}.yml", "base.yml"):
        storage.write_atomic(f"{bucket}/{path}", (shipped / path).read_bytes())
    made = f"{bucket}/{name}.yaml"
    assert runs.verb("manifest", f"{bucket}/{name}.yml", "--output", made) == ""
    expected = (shipped / f"{name}.yaml").read_text()
    assert storage.absolute(made).read_text() == expected


def test_a_container_of_azure_is_one_error_wherever_a_run_would_be(tmp_path, corpus):
    config = runs.write_config(
        tmp_path, corpus, base_output_directory="az://container/runs"
    )
    run = "az://container/runs/tiny"
    ended = runs.cli("train", config)
    assert ended.returncode == 78
    outputs = {"train": ended.stderr}
    for verb in ("inspect", "verify", "audit", "status", "report"):
        outputs[verb] = runs.verb(verb, run, code=1)
    for verb, output in outputs.items():
        (line,) = output.splitlines()
        assert line.startswith(f"elastic-ckpt {verb}: az://container/runs")
        assert "can only hold training data" in line
