"""A live run loses slices, hosts and connections, and takes the slices in again."""

import pytest

from tests.processes import claims, great_runs


def worlds(run):
    return [each["slices"] for each in run.events("world_started")]


@pytest.mark.slow
class TestSlices(claims.Claims):
    """A broken one without its memory, one without a network, a preempted one."""

    scenario = great_runs.Scenario(
        slices=3,
        settings={"elastic_quarantine_failures": 2},
        faults=[
            {"break_slice": 2, "at_step": 12},
            {"kill_slice": 2, "at_step": 12},
            {"return_slice": 2, "at_step": 20},
            {"cut_off": 1, "at_step": 40, "in_world": 2},
            {"return_slice": 1, "at_step": 50, "in_world": 3},
            # That of process 0.
            {"preempt_slice": 0, "in_phase": "save", "in_world": 4},
        ],
        drive=lambda run: run.stop_after("world 5 starts"),
        tells=[
            *("slice_lost 2", "slice_returned 2", "slice_refused 2"),
            *("slice_quarantined 2", "slice_lost 1", "slice_returned 1"),
            "slice_preempted 0",
        ],
        verdicts=["slice_lost", "host_cut_off"],
    )

    def test_worlds_have_the_slices_that_are_sound(self, run):
        assert worlds(run) == [[0, 1, 2], [0, 1], [0], [0, 1], [1]]

    def test_a_planned_change_loses_no_step(self, run):
        left = [each["step"] for each in run.events("world_left")]
        starts = [each["start_step"] for each in run.events("run_started")]
        assert starts[3:] == left
        assert run.events("recovered")[-1]["steps_lost"] == 0


def hang(run):
    # Only compiled programs are kept, and not those of JAX's cache.
    run.stop_after("world 3 starts", f"jax_cache_dir={run.directory}/jax_cache")


@pytest.mark.slow
class TestHangs(claims.Claims):
    """A host that is stopped, and one that dies in the recovery."""

    scenario = great_runs.Scenario(
        settings={
            "elastic_min_slice_count": 2,
            "elastic_heartbeat_timeout_seconds": 20,
        },
        faults=[
            {"hang_host": 1, "at_step": 12},
            {"kill_host": 0, "in_phase": "restore", "in_world": 2},
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
        assert names == ["compiled", "executable_loaded"], (events, refused, told)

    def test_logs_have_the_stacks_of_a_host_that_hangs(self, run):
        logs = sorted((run.path / "logs").iterdir())[0]
        for host in range(2):
            assert "Thread 0x" in (logs / f"host-{host}.log").read_text()
