"""`kill -9` of a whole run, at named points of a save and at any moment."""

import contextlib
import os
import random
import signal
import time

import pytest

from tests import runs
from tests.faults import killed_world

# Point and its occurrence in the second save, the steps that are complete then, and
# whether an interrupted step is left: nothing is uploaded before the data state of all
# hosts is written.
POINTS = [
    ("before_the_state_is_taken", 2, [4], False),
    ("after_the_state_is_taken", 2, [4], False),
    ("before_the_state_is_written", 2, [4], False),
    # Each save writes it twice: beside the step, and when it is uploaded.
    ("with_the_state_half_written", 3, [4], False),
    ("after_the_state_is_written", 2, [4], False),
    ("before_the_step_is_committed", 1, [4], True),
    ("after_the_step_is_committed", 1, [4, 8], False),
]


def kill_at(point, occurrence, config, hosts, victim="all"):
    settings = [str(config), f"hosts={hosts}"]
    killed = runs.forked(
        killed_world.train, point, occurrence, victim, settings, leads_group=True
    )
    if victim == "all":
        assert killed.returncode == -signal.SIGKILL, killed.stdout + killed.stderr
    else:
        assert f"host {victim} failed: killed by SIGKILL" in killed.stderr
        run = config.parent / "tiny"
        (lost,) = runs.events(run, "host_lost")
        assert (lost["host"], lost["why"]) == (victim, "killed by SIGKILL")
        (failed,) = runs.events(run, "run_failed")
        assert failed["why"] == f"host {victim} failed: killed by SIGKILL"
        assert "the same command continues it from the newest" in killed.stdout


def continue_and_audit(config, run, hosts):
    ended = runs.cli("train", config, f"hosts={hosts}")
    assert ended.returncode == 0, ended.stderr
    assert "12 steps" in runs.verb("audit", run)
    return ended.stdout


def is_interrupted(run):
    names = [path.name for path in (run / "checkpoints").iterdir()]
    return any(".orbax-checkpoint-tmp" in name for name in names)


@pytest.mark.slow
@pytest.mark.parametrize(("point", "occurrence", "complete", "leaves_half"), POINTS)
def test_a_run_killed_in_its_second_save_continues_from_the_newest_complete_step(
    tmp_path, corpus, point, occurrence, complete, leaves_half
):
    config = runs.write_config(tmp_path, corpus)
    run = tmp_path / "tiny"
    kill_at(point, occurrence, config, hosts=2)
    assert runs.saved_steps(run) == complete
    assert is_interrupted(run) == leaves_half
    inspected = runs.verb("inspect", run)
    assert ("step 8 was interrupted while it was saved" in inspected) == leaves_half

    output = continue_and_audit(config, run, hosts=2)
    assert f"from step {complete[-1]} to step 12" in output
    assert ("step 8 was interrupted while it was saved" in output) == leaves_half
    assert not is_interrupted(run)
    assert runs.saved_steps(run) == [4, 8, 12]


@pytest.mark.night
def test_a_run_killed_in_its_first_save_begins_anew(tmp_path, corpus):
    config = runs.write_config(tmp_path, corpus)
    kill_at("with_the_state_half_written", 1, config, hosts=2)
    assert runs.saved_steps(tmp_path / "tiny") == []
    output = continue_and_audit(config, tmp_path / "tiny", hosts=1)
    assert "tiny: to step 12" in output


@pytest.mark.night
def test_a_run_killed_between_two_saves_repeats_the_steps_since(tmp_path, corpus):
    config = runs.write_config(tmp_path, corpus, async_checkpointing=False)
    kill_at("between_two_saves", 7, config, hosts=2)
    output = continue_and_audit(config, tmp_path / "tiny", hosts=1)
    assert "from step 4 to step 12 on 1 host" in output
    audit = runs.verb("audit", tmp_path / "tiny")
    assert "steps trained again after an interruption: 3" in audit


@pytest.mark.slow
def test_a_run_killed_at_any_moment_again_and_again_ends_as_if_nothing_were(
    tmp_path, corpus
):
    config = runs.write_config(tmp_path, corpus, steps=60, checkpoint_period=3)
    seed = int(time.time())
    print(f"random moments with seed {seed}")
    moments = random.Random(seed)
    for hosts in (2, 4, 1, 2, 4, 2, 1, 4):
        world = runs.Started(
            *("train", config, f"hosts={hosts}"),
            output=tmp_path / "output.txt",
            leads_group=True,
        )
        with world:
            time.sleep(moments.uniform(1, 6))
            # It may have ended.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(world.pid, signal.SIGKILL)
    ended = runs.cli("train", config, "hosts=2")
    assert ended.returncode == 0, ended.stderr
    assert "60 steps took" in runs.verb("audit", tmp_path / "tiny")
