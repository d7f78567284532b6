"""A run of two hosts, then of one, is that of one host that never stopped."""

import collections
import json
import shutil

from elastic_ckpt.core import jsonlog, metrics
from tests import runs
from tests.processes import claims, great_runs


def resize(run):
    run.train("steps=4")
    run.train("hosts=1", "devices_per_host=1", "slices=1", "steps=8")


class TestResized(claims.Claims):
    """Two starts with steps in storage alone, whose data is read in the sidecar."""

    scenario = great_runs.Scenario(
        drive=resize,
        memory=False,
        from_memory=False,
        redoes=False,
        settings={"checkpoint_period": 2, "colocated_python_data_input": True},
    )

    def test_each_start_continues_where_the_last_one_ended(self, run):
        assert "tiny: to step 4 on 2 hosts, 2 slices, 2 devices" in run.output
        assert "tiny: from step 4 to step 8 on 1 host, 1 slice, 1 device" in run.output

    def test_audit_tells_both_numbers_of_hosts(self, run):
        audit = runs.verb("audit", run.path)
        assert "8 steps took 96 rows; hosts: 2 -> 1" in audit
        assert "batches of the one-host run: 8 of 8\n" in audit

    def test_an_audit_without_the_log_of_the_last_start_fails(self, run, tmp_path):
        copy = tmp_path / "copy"
        shutil.copytree(run.path, copy)
        (copy / "step_log" / "attempt-00002.jsonl").unlink()
        output = runs.verb("audit", copy, code=1)
        assert "FAILED: the step log is incomplete: world 2 saved steps" in output

    def test_inspect_shows_arrays_and_data_of_every_step(self, run):
        content = json.loads(runs.verb("inspect", run.path, "--json"))
        steps = {step["step"]: step for step in content["steps"]}
        assert list(steps) == [2, 4, 6, 8]
        for number, step in steps.items():
            assert step["data"]["position"] == {"batches": [[12, number]]}
            leaves = {leaf.pop("path"): leaf for leaf in step["state"]}
            leaf = leaves["params/mlp_in"]
            slices = 2 if number <= 4 else 1
            assert leaf.pop("sharding") == f"[whole] over slice={slices}, fsdp=1"
            assert leaf == {"shape": [1, 16, 64], "dtype": "float32", "num_bytes": 4096}

    def test_every_host_leaves_its_metrics_of_every_start(self, run):
        for host, saves, loads in ((0, 4, 1), (1, 2, 0)):
            counts = collections.Counter()
            for line in jsonlog.read(run.path / f"metrics/host-{host:05d}.jsonl"):
                counts[line["metric"]] += line["count"]
            assert counts[metrics.CHECKPOINT_SAVE.name] == saves
            assert counts[metrics.CHECKPOINT_LOAD.name] == loads
