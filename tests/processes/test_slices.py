"""A live run loses slices and hosts, and takes those in again that are sound."""

import os
import pathlib
import signal
import time

import pytest

from tests import process_tree
from tests.processes import claims, great_runs


def worlds(run):
    return [each["slices"] for each in run.events("world_started")]


def of_another_run(run):
    return pathlib.Path(run.ram, "slice-2", "another_run")


def preempt_after_refusal(run):
    """When slice 2 was refused, the host of slice 0, process 0, gets SIGTERM."""
    of_another_run(run).mkdir(parents=True)

    def preempt(started):
        os.kill(process_tree.host(started, run.path, 0), signal.SIGTERM)
        while len(run.events("recovered")) < 2:
            assert started.poll() is None
            time.sleep(0.05)
        started.terminate()

    # The output is not read meanwhile, and a full pipe blocks the run.
    run.stop_after("slice 2 is quarantined", "log_period=200", act=preempt)


@pytest.mark.slow
class TestSlices(claims.Claims):
    """One returns without its memory, and is broken; another is preempted."""

    scenario = great_runs.Scenario(
        slices=3,
        settings={"elastic_quarantine_failures": 2},
        faults=[
            {"break_slice": 2, "at_step": 12},
            {"kill_slice": 2, "at_step": 12},
            {"return_slice": 2, "at_step": 20},
        ],
        drive=preempt_after_refusal,
        tells=[
            *("slice_lost 2", "slice_returned 2", "slice_refused 2"),
            *("slice_quarantined 2", "slice_preempted 0"),
        ],
        verdicts=["slice_lost"],
    )

    def test_worlds_have_the_slices_that_are_sound(self, run):
        assert worlds(run) == [[0, 1, 2], [0, 1], [1]]

    def test_the_memory_of_another_run_on_a_lost_slice_stays(self, run):
        assert of_another_run(run).exists()

    def test_a_planned_change_loses_no_step(self, run):
        left = [each["step"] for each in run.events("world_left")]
        starts = [each["start_step"] for each in run.events("run_started")]
        assert starts[2:] == left
        assert run.events("recovered")[-1]["steps_lost"] == 0


def hang(run):
    # Only compiled programs are kept, and not those of JAX's cache.
    run.stop_after("world 3 starts", f"jax_cache_dir={run.directory}/jax_cache")


@pytest.mark.slow
class TestHangs(claims.Claims):
    """A host that is stopped, and one that dies after the recovery."""

    scenario = great_runs.Scenario(
        settings={
            "elastic_min_slice_count": 2,
            "elastic_heartbeat_timeout_seconds": 20,
        },
        faults=[
            {"hang_host": 1, "at_step": 12},
            # Well after the steps that the first world does until it stands still.
            {"kill_host": 0, "at_step": 60},
        ],
        drive=hang,
        tells=["slice_lost 1", "slice_lost 0"],
        verdicts=["host_stopped", "host_killed"],
    )

    def test_a_host_that_dies_on_a_sound_machine_costs_one_change(self, run):
        assert worlds(run) == [[0, 1]] * 3

    def test_a_world_loads_the_program_that_one_before_has_compiled(self, run):
        events = run.events("compiled", "executable_loaded")
        names = [each["event"] for each in events]
        told = [
            line
            for log in run.path.glob("logs/*/host-*.log")
            for line in log.read_text().splitlines()
            if "executable" in line
        ]
        refused = run.events("executable_refused")
        assert names == ["compiled", *["executable_loaded"] * 2], (
            events,
            refused,
            told,
        )

    def test_logs_have_the_stacks_of_a_host_that_hangs(self, run):
        logs = sorted((run.path / "logs").iterdir())[0]
        for host in range(2):
            assert "Thread 0x" in (logs / f"host-{host}.log").read_text()
