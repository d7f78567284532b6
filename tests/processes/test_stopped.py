"""SIGTERM, Ctrl-C and `scale`: a run saves, or reports that it did not."""

import os
import signal
import time

import pytest

from tests import process_tree, runs
from tests.deploy import fake_slurm
from tests.processes import callbacks, claims, great_runs, outer_launcher


def interrupt(started):
    # As a terminal does: to every process of the group.
    os.killpg(started.pid, signal.SIGINT)


def stop_in_each_way(run):
    """Scaled and stopped; stopped with all of its hosts, and by Ctrl-C; then ended."""

    def scale(started):
        run.refused = runs.cli("scale", run.path, "--slices", 3)
        run.scaled = runs.cli("scale", run.path, "--slices", 1)
        while not run.events("recovered"):
            assert started.poll() is None
            time.sleep(0.05)
        started.terminate()

    # The output is not read meanwhile, and a full pipe blocks the run.
    run.stops = [run.stop_after("tiny: ", "log_period=200", act=scale)]
    run.stops += [
        run.stop_after(
            "tiny: ",
            act=lambda started: fake_slurm.signal_all([started.pid]),
            leads_group=True,
        )
    ]
    one = ("hosts=1", "slices=1", "elastic_enabled=false")
    output = run.train_until("tiny:", *one, act=interrupt, leads_group=True)
    assert run.code == 128 + signal.SIGINT, output
    assert "saving and stopping; press Ctrl-C again to exit now" in output
    run.stops.append(run.stopped(output))
    run.stops.append(stop_tasks(run))
    run.train(*one, f"steps={run.stops[-1] + 3}")


def stop_tasks(run):
    """Under an outer launcher, one host that gets SIGTERM stops all."""
    not_elastic = ("elastic_enabled=false", "log_period=1")
    with outer_launcher.tasks(run.config, *not_elastic) as tasks:
        output = ""
        for line in tasks[0].stdout:
            output += line
            if line.startswith("tiny: from step "):
                break
        tasks[1].terminate()
        rest, _ = outer_launcher.outputs(tasks)
    assert [task.returncode for task in tasks] == [128 + signal.SIGTERM] * 2
    run.output += output + rest
    return run.stopped(output + rest)


@pytest.mark.slow
class TestStopped(claims.Claims):
    scenario = great_runs.Scenario(
        drive=stop_in_each_way,
        from_memory=False,
        redoes=False,
        settings={"local_checkpoint_period": 1000},
        tells=["scale_requested 1"],
    )

    def test_each_start_continues_at_the_step_after_which_the_last_one_stopped(
        self, run
    ):
        starts = [attempt.start_step for attempt in run.attempts]
        (left,) = [each["step"] for each in run.events("world_left")]
        assert starts == [0, left, *run.stops]
        assert run.stops == sorted({*run.stops})
        assert runs.saved_steps(run.path) == [*run.stops, run.stops[-1] + 3]

    def test_scale_requests_slices_and_refuses_more_than_there_are(self, run):
        assert (run.refused.returncode, run.refused.stdout) == (1, "")
        assert "the run trains on 1 to 2 slices" in run.refused.stderr
        assert run.scaled.returncode == 0, run.scaled.stderr
        back = run.events("recovered")[0]
        assert (back["world"], back["steps_lost"]) == (2, 0)


@pytest.mark.slow
def test_a_second_ctrl_c_ends_a_run_at_once(tmp_path, corpus):
    config = runs.write_config(
        tmp_path,
        corpus,
        steps=1_000_000,
        checkpoint_period=1000,
        training_callbacks=callbacks.named(callbacks.stuck),
    )
    output, at = "", "step "
    with runs.Started("train", config, "hosts=2", leads_group=True) as started:
        for line in started.stdout:
            output += line
            if line.startswith(at) or "saving and stopping" in line:
                at = "never again"
                interrupt(started)
    assert started.returncode == 128 + signal.SIGINT, output
    assert "interrupted again; exiting immediately" in output
    assert runs.saved_steps(tmp_path / "tiny") == []


@pytest.mark.slow
def test_a_run_that_has_not_begun_ends_at_once(tmp_path, corpus):
    config = runs.write_config(tmp_path, corpus, termination_grace_period_seconds=900)
    with runs.Started("train", config, "hosts=2") as started:
        # A host that stands still from its start: the run does not begin.
        os.kill(process_tree.host(started, tmp_path, 1), signal.SIGSTOP)
        started.terminate()
        output = started.stdout.read()
    assert started.returncode == 128 + signal.SIGTERM, output
    assert "stopped by SIGTERM before the first step" in output
