"""What every great run has to show when it has ended."""

import json

import numpy as np
import pytest

from elastic_ckpt.core import jsonlog
from tests import runs
from tests.processes import great_runs

# Float32 sums over another number of devices, in another order.
LOSS_RTOL = 1e-5


class Claims:
    """The claims about the great run of `scenario`."""

    scenario: great_runs.Scenario

    @pytest.fixture(scope="class")
    @classmethod
    def run(cls, tmp_path_factory, corpus):
        directory = tmp_path_factory.mktemp("great")
        with great_runs.great_run(cls.scenario, directory, corpus) as finished:
            yield finished

    def test_audit_and_verification_pass(self, run):
        outcome = json.loads(runs.verb("audit", run.path, "--json"))
        assert outcome["passed"], outcome
        assert (outcome["num_lost"], outcome["num_repeated"]) == (0, 0)
        assert outcome["num_steps"] == len(run.records)
        assert self.scenario.redoes or not outcome["num_redone_steps"]
        assert "PASSED" in runs.verb("verify", run.path)

    def test_every_example_is_used_exactly_once_in_the_order_of_one_host(self, run):
        used, wanted = (
            [(each.row, each.rows, each.digest) for each in records]
            for records in (run.records, run.of_one_host)
        )
        assert used == wanted

    def test_losses_are_those_of_one_host_that_was_never_disturbed(self, run):
        np.testing.assert_allclose(
            [record.loss for record in run.records],
            [record.loss for record in run.of_one_host],
            rtol=LOSS_RTOL,
        )

    def test_events_tell_each_fault_and_nothing_else(self, run):
        # A slice that is refused is checked again later.
        told = {
            f"{each['event']} {each[great_runs.TELLING[each['event']]]}"
            for each in run.events(*great_runs.TELLING)
        }
        assert told == {*self.scenario.tells}

    def test_verdicts_are_right(self, run):
        # One after which the run goes on may be that of a machine that is busy.
        verdicts = run.events("verdict")
        kinds = [
            kind for kind, _ in {(each["kind"], each["which"]) for each in verdicts}
        ]
        assert sorted(kinds) == sorted(self.scenario.verdicts), verdicts

    def test_no_committed_step_is_lost(self, run):
        newest = 0
        copied = ["replicated"] * self.scenario.from_memory
        for event in run.events("backed_up", *copied, "run_started", "went_back"):
            match event["event"]:
                case "run_started":
                    assert event["start_step"] >= newest, event
                case "went_back":
                    newest = event["to_step"]
                case _:
                    newest = max(newest, event["step"])

    def test_restores_read_memory_alone(self, run):
        restored = run.events("restored_from")
        assert restored
        if self.scenario.from_memory:
            assert {each["persistent_bytes"] for each in restored} == {0}
        assert {each["bad_copies"] for each in restored} == {0}

    def test_status_agrees_with_the_log(self, run):
        status = json.loads(runs.verb("status", run.path, "--json"))
        last = run.events("run_stopped", "run_finished")[-1]
        assert status["phase"] == last["event"].removeprefix("run_")
        assert status["step"] == last["step"] == len(run.records)
        assert status["loss"] == run.records[-1].loss
        persistent = {each["tier"]: each["step"] for each in status["tiers"]}
        assert persistent["persistent"] == last["step"]

    def test_report_tells_of_the_same_worlds_and_audit(self, run, tmp_path):
        page = tmp_path / "report.html"
        runs.verb("report", run.path, "--output", page)
        text = page.read_text()
        assert f"Each of the {len(run.records):,} steps used the examples" in text
        for event in run.events("slice_lost"):
            assert f"slice {event['slice']} lost" in text

    def test_series_of_the_loss_are_those_of_the_log(self, run):
        points = {
            line["step"]: line["last"]
            # Host 0, or the supervisor of several hosts, writes them.
            for file in sorted((run.path / "metrics").iterdir())
            for line in jsonlog.read(file)
            if line["metric"] == "/elastic_ckpt/train/loss"
            and line.get("claim") not in self.scenario.replaced
        }
        losses = {each.step + 1: each.loss for each in run.records}
        # A leader that is killed has not written its last ones.
        assert points.items() <= losses.items()
        assert len(losses) in points

    def test_nothing_unfinished_is_left_in_storage(self, run):
        names = [each.name for each in (run.path / "checkpoints").iterdir()]
        unfinished = [name for name in names if "tmp" in name]
        # A start that is replaced leaves the step that it did not commit.
        assert len(unfinished) <= len(self.scenario.replaced), unfinished
