"""SIGTERM to a run of real host processes: it saves, or reports that it did not."""

import os
import signal
import time
from concurrent import futures

import pytest

from tests import runs, shared_memory
from tests.deploy import fake_slurm
from tests.multiprocess import callbacks, outer_launcher


def start(config, *settings, leads_group=False):
    """Starts a run that would not end."""
    return runs.Started(
        *("train", config, "steps=1000000", "termination_grace_period_seconds=900"),
        *settings,
        leads_group=leads_group,
    )


def stopped(config, *settings, everybody=False):
    """Starts a run, ends it by SIGTERM at its first step; its output and code."""
    output, at = "", "step "
    with start(config, *settings, leads_group=everybody) as started:
        for line in started.stdout:
            output += line
            if line.startswith(at):
                at = "never again"
                if everybody:
                    fake_slurm.signal_all([started.pid])
                else:
                    started.terminate()
    return output, started.returncode


def check_saved(run, output, code):
    """The step after which the run stopped, which has to be saved."""
    assert code == 128 + signal.SIGTERM, output
    event = runs.events(run, "run_stopped")[-1]
    step = event["step"]
    assert event["saved"] is True
    assert runs.saved_steps(run)[-1] == step
    assert f"stopped after step {step}, which is saved; the same command" in output
    return step


@pytest.mark.slow
@pytest.mark.parametrize("hosts", [1, 2])
def test_a_first_ctrl_c_saves_like_sigterm(tmp_path, corpus, hosts):
    run = tmp_path / "tiny"
    with shared_memory.directory("interrupted") as ram:
        config = runs.write_config(
            tmp_path,
            corpus,
            checkpoint_period=1000,
            enable_multi_tier_checkpointing=True,
            local_checkpoint_directory=ram,
            local_checkpoint_period=1000,
            multi_tier_checkpointing_backup_interval_steps=1000,
        )
        output, at = "", "step "
        with start(config, f"hosts={hosts}", leads_group=True) as started:
            for line in started.stdout:
                output += line
                if line.startswith(at):
                    at = "never again"
                    # As a terminal does: to every process of the group.
                    os.killpg(started.pid, signal.SIGINT)
    assert started.returncode == 128 + signal.SIGINT, output
    assert "stopped after step" in output, output
    event = runs.events(run, "run_stopped")[-1]
    assert event["saved"] is True
    assert runs.saved_steps(run)[-1] == event["step"]
    assert "saving and ending; Ctrl-C again ends at once" in output
    assert f"stopped after step {event['step']}, which is saved" in output


@pytest.mark.slow
@pytest.mark.parametrize("hosts", [1, 2])
def test_a_second_ctrl_c_ends_a_run_at_once(tmp_path, corpus, hosts):
    config = runs.write_config(
        tmp_path,
        corpus,
        checkpoint_period=1000,
        training_callbacks=callbacks.named(callbacks.stuck),
    )
    output, at = "", "step "
    with start(config, f"hosts={hosts}", leads_group=True) as started:
        for line in started.stdout:
            output += line
            if line.startswith(at) or "saving and ending" in line:
                at = "never again"
                os.killpg(started.pid, signal.SIGINT)
    assert started.returncode == 128 + signal.SIGINT, output
    assert "interrupted again, and ended at once" in output
    assert runs.saved_steps(tmp_path / "tiny") == []


@pytest.mark.slow
@pytest.mark.parametrize("tiers", [True, False])
def test_a_run_that_gets_sigterm_saves_and_continues_at_the_step(
    tmp_path, corpus, tiers
):
    run = tmp_path / "tiny"
    with shared_memory.directory("stopped") as ram:
        config = runs.write_config(
            tmp_path,
            corpus,
            checkpoint_period=1000,
            enable_multi_tier_checkpointing=tiers,
            local_checkpoint_directory=ram,
            local_checkpoint_period=1000,
            multi_tier_checkpointing_backup_interval_steps=1000,
        )
        first = check_saved(run, *stopped(config, "hosts=2"))
        output, code = stopped(config, "hosts=4", everybody=True)
        second = check_saved(run, output, code)
        assert f"from step {first} to step 1000000 on 4 hosts" in output
        output, code = stopped(config, "hosts=1")
        third = check_saved(run, output, code)
        assert first < second < third
        ended = runs.cli("train", config, "hosts=2", f"steps={third + 3}")
        assert ended.returncode == 0, ended.stderr
        assert f"from step {third} to step {third + 3} on 2 hosts" in ended.stdout
        audit = runs.verb("audit", run)
        assert "PASSED" in audit
        # Nothing that was trained was trained again.
        assert "trained again" not in audit


@pytest.mark.slow
def test_under_an_outer_launcher_one_host_that_gets_sigterm_stops_all(tmp_path, corpus):
    config = runs.write_config(tmp_path, corpus, checkpoint_period=1000, log_period=1)
    stopped_after = []
    # The second start gets it before its first step.
    for at in ("step ", "tiny: from step "):
        with outer_launcher.tasks(config, "steps=1000000") as tasks:
            output = ""
            for line in tasks[0].stdout:
                output += line
                if line.startswith(at):
                    break
            tasks[1].terminate()
            # Both pipes are read to the end, so that neither fills.
            with futures.ThreadPoolExecutor() as reading:
                (rest, _), _ = reading.map(lambda task: task.communicate(), tasks)
        output += rest
        step = check_saved(tmp_path / "tiny", output, tasks[0].returncode)
        stopped_after.append(step)
        assert tasks[1].returncode == 128 + signal.SIGTERM
    first, second = stopped_after
    assert first < second


@pytest.mark.slow
def test_a_run_that_cannot_save_says_so(tmp_path, corpus):
    config = runs.write_config(tmp_path, corpus, enable_checkpointing=False)
    output, code = stopped(config, "hosts=2")
    assert code == 128 + signal.SIGTERM, output
    (event,) = runs.events(tmp_path / "tiny", "run_stopped")
    assert event["saved"] is False
    assert (
        f"stopped after step {event['step']}, which was NOT saved; the same command"
        " starts it at step 0, for nothing was saved" in output
    )


@pytest.mark.slow
def test_a_run_that_has_not_begun_ends_at_once(tmp_path, corpus):
    # A host that stands still from its start: the run does not begin.
    faults = [{"hang_host": 1, "in_phase": "start"}]
    config = runs.write_config(tmp_path, corpus, faults=faults)
    with start(config, "hosts=2") as started:
        # It is made before the hosts are started.
        while not (tmp_path / "tiny" / "logs").exists():
            assert started.poll() is None
            time.sleep(0.01)
        started.terminate()
        output = started.stdout.read()
    assert started.returncode == 128 + signal.SIGTERM, output
    assert "ended by SIGTERM before the first step" in output


@pytest.mark.slow
def test_the_newest_step_of_a_live_run_is_not_modified(tmp_path, corpus):
    run = tmp_path / "tiny"
    config = runs.write_config(tmp_path, corpus, checkpoint_period=2)
    edit = ("--set", "step=5")
    with start(config, "hosts=2") as started:
        refused = ""
        for _ in started.stdout:
            steps = (run / "checkpoints").is_dir() and runs.saved_steps(run)
            # Until the step is the newest one when it is looked at.
            if steps and "by another live run" not in refused:
                path = run / "checkpoints" / str(steps[-1])
                refused = runs.verb("modify", path, *edit, code=1)
                if "by another live run" in refused:
                    started.terminate()
    assert "by another live run" in refused, refused
    newest = run / "checkpoints" / str(runs.saved_steps(run)[-1])
    assert "-> 5" in runs.verb("modify", newest, *edit)
