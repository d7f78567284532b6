"""Runs of the reference trainer: how they go back, and how they end."""

import json

import jax
import numpy as np
import pytest

from elastic_ckpt.core import errors, metrics
from elastic_ckpt.inspect import run_files
from elastic_ckpt.tiers.ram import ram_disk
from elastic_ckpt.training import run_saver, step_log
from elastic_ckpt.training.callbacks import Action, Detection
from tests import jobs, runs
from tests.processes.callbacks import Stateless
from tests.recorded_events import RecordedEvents


class At(Stateless):
    """Acts at a step."""

    def __init__(self, step, act):
        self._step, self._act = step, act

    def after_step(self, step, report):
        del report
        return self._act() if step == self._step else None


def planted(config):
    """Finds a divergence, once."""
    del config
    found = [Detection(action=Action.ROLLBACK, why="planted", since=4)]
    return {"planted": At(4, lambda: found.pop() if found else None)}


def failing(config):
    """Fails right after a save was begun, at the step after it."""
    del config
    return {"failing": At(5, lambda: 1 / 0)}


def configured(directory, corpus, **settings):
    values = {"save_checkpoint_on_completion": False, **settings}
    return jobs.configured(directory, corpus, **values)


def diverging(directory, corpus, period, **parts):
    """A run whose batch grows at step 4, which is bad; its end, and what it told."""
    config = configured(
        directory,
        corpus,
        steps=6,
        checkpoint_period=period,
        training_callbacks=f"{__name__}:planted",
        enable_rampup_batch_size=True,
        per_device_batch_size_start=2,
        per_device_batch_size_increment=2,
        per_device_batch_size=4,
        global_rampup_samples=32,
        global_batch_size=0,
        num_logical_shards=24,
    )
    recorded = RecordedEvents()
    ended = jobs.trained(jobs.assembled(config, emit=recorded, **parts))
    return config, ended, recorded


def test_run_that_goes_back_continues_with_the_same_batch_whenever_it_decides(
    tmp_path, corpus
):
    # It decides at once if step 4 may be saved.
    after = []
    for period in (2, 3):
        directory = tmp_path / str(period)
        config, ended, recorded = diverging(directory, corpus, period)
        assert ended.step == 6
        steps = [each["step"] for each in recorded.named("step")]
        # Step 5 was trained before it went back only if it decided late.
        assert steps == [*range(1, period + 3), *range(period + 1, 7)]
        # A program for each size of the batches.
        assert [each["step"] for each in recorded.named("compiled")] == [1, 5]
        outcome = json.loads(runs.verb("audit", directory / "tiny", "--json"))
        assert outcome["passed"], outcome
        first, again = step_log.read(directory / "tiny")
        assert (len(first.records), again.start_step) == (5, period)
        # A restart reads its first batch in the size that it has.
        restarted = jobs.assembled(config)
        with restarted.run:
            restarted.restore()
            assert len(next(restarted.batches)["inputs"]) == 16
            assert restarted.callbacks.rollbacks == 1
            restarted.close()
        after.append((again.left_out[-1][1], again.records[0].digest))
    assert after[0] == after[1]


def test_run_that_goes_back_while_its_hosts_leave_stops_at_the_older_step(
    tmp_path, corpus
):
    leaving = {4: "stop"}.get
    _, ended, recorded = diverging(tmp_path, corpus, 2, leaving=leaving)
    assert (ended.step, ended.is_stopped) == (2, True)
    assert recorded.named("run_stopped") == [{"step": 2, "saved": True}]
    assert step_log.read(tmp_path / "tiny")[-1].start_step == 2


# Stages of the data with rows of another length, and as many.
LENGTHS = {0: 8, 3: 16, 5: 8, 7: 24}
STAGES = [{"begin_step": at, "max_target_length": n} for at, n in LENGTHS.items()]


@pytest.mark.slow
def test_poisoned_copy_in_ram_is_left_for_storage_and_rows_of_any_length_come_again(
    tmp_path, corpus, monkeypatch, recorded
):
    save = run_saver.RunSaver.save

    def poison(saver, step, state, *, last):
        """Has the weights be corrupt when step 6 is captured, and the run go on."""
        if step == 6:
            weights = jax.tree.map(lambda w: w * np.nan, state["params"])
            state = {**state, "params": weights}
        save(saver, step, state, last=last)

    def train(directory, steps, **settings):
        config = configured(
            directory,
            corpus,
            steps=steps,
            data_stages=json.dumps(STAGES),
            num_logical_shards=8,
            enable_multi_tier_checkpointing=True,
            local_checkpoint_directory=str(directory / "ram"),
            local_checkpoint_period=2,
            multi_tier_checkpointing_backup_interval_steps=4,
            **settings,
        )
        told, phases = RecordedEvents(), []
        parts = {"emit": told, "begin": phases.append}
        ended = jobs.trained(jobs.assembled(config, **parts))
        return ended, phases, told, [each["step"] for each in told.named("compiled")]

    one, other = tmp_path / "one", tmp_path / "other"
    undisturbed, _, _, compiled = train(other, 10, replica_validation="quick")
    # A program for each length: the first one serves the third stage, too.
    assert compiled == [1, 4, 8]
    # The copies of the state are compared before each save, and are equal.
    assert len(recorded[metrics.VALIDATION]) == 5
    assert metrics.VALIDATION_FINDINGS not in recorded
    monkeypatch.setattr(run_saver.RunSaver, "save", poison)
    # The first start ends within the second stage, and the second one with a bad copy.
    # Each kind of iterator loads the state that the other saved.
    train(one, 4)
    train(one, 6, colocated_python_data_input=False)
    ended, phases, told, compiled = train(one, 10)
    # It goes back over the begin of the third stage.
    assert told.named("restore_distrusted") == [
        {"step": 7, "restored_step": 6, "to_step": 4, "why": "the loss is nan"}
    ]
    assert ended.finding is None
    # A watch does not take the wait for uploads for a step that hangs.
    assert phases.count("restore") == 2
    assert compiled == [7, 5, 8]
    # It has the rows, losses and weights of the one that was not disturbed.
    jax.tree.map(np.testing.assert_array_equal, ended.state, undisturbed.state)
    logs = [runs.steps(directory / "tiny") for directory in (one, other)]
    first, second = ([(step.digest, step.loss) for step in log] for log in logs)
    assert first == second
    assert [each.start_step for each in step_log.read(one / "tiny")] == [0, 4, 6, 4]
    outcome = json.loads(runs.verb("audit", one / "tiny", "--json"))
    assert outcome["passed"], outcome
    # Steps 5 and 6, and those of the corrupt state until the loss was known.
    assert outcome["num_redone_steps"] >= 3
    assert outcome["num_left_out"] == 0


@pytest.mark.slow
def test_last_step_before_the_end_of_the_data_is_in_every_tier(tmp_path, corpus):
    ram = tmp_path / "ram"
    config = jobs.configured(
        tmp_path,
        corpus,
        num_logical_shards=8,
        num_epoch=1,
        steps=1000,
        enable_multi_tier_checkpointing=True,
        local_checkpoint_directory=str(ram),
        # RAM lacks the step after which the data ends.
        local_checkpoint_period=1000,
        multi_tier_checkpointing_backup_interval_steps=1000,
    )
    recorded = RecordedEvents()
    ended = jobs.trained(jobs.assembled(config, emit=recorded))
    (end,) = recorded.named("data_ended")
    assert end["step"] == ended.step
    assert 1 < ended.step < 1000
    assert runs.saved_steps(tmp_path / "tiny") == [ended.step]
    disk = ram_disk.RamDisk(f"{ram}/tiny", run="tiny")
    assert {step for step, _ in disk.known_saves()} == {ended.step}
    assert "PASSED" in runs.verb("audit", tmp_path / "tiny")
    # Another run does not begin with its steps.
    (tmp_path / "tiny").rename(tmp_path / "moved")
    with pytest.raises(errors.RunError, match="the steps of another run, 'tiny'"):
        jobs.assembled(jobs.configured(tmp_path, corpus, run_name="moved"))


@pytest.mark.slow
def test_run_of_one_process_that_fails_has_its_last_due_step(tmp_path, corpus):
    config = runs.write_config(tmp_path, corpus, steps=8, checkpoint_period=4)
    ended = runs.cli("train", config, f"training_callbacks={__name__}:failing")
    assert ended.returncode == 1, ended.stdout
    assert "ZeroDivisionError: division by zero" in ended.stderr
    assert runs.saved_steps(tmp_path / "tiny") == [4]
    (lines,) = run_files.read_metrics(tmp_path / "tiny" / "metrics").values()
    assert metrics.FAILURES.name in [line["metric"] for line in lines]
    ended = runs.cli("train", config)
    assert ended.returncode == 0, ended.stderr
    assert "from step 4 to step 8" in ended.stdout
    assert "PASSED" in runs.verb("audit", tmp_path / "tiny")
