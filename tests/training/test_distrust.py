"""A run whose copy in RAM was corrupt when it was saved goes back to storage."""

import json

import jax
import numpy as np
import pytest

from elastic_ckpt.checkpoint import run_saver
from elastic_ckpt.training import step_log
from tests import jobs, runs
from tests.recorded_events import RecordedEvents


def poison(monkeypatch, poisoned):
    """Has the weights be corrupt when a step is captured, and the training go on."""
    save = run_saver.RunSaver.save

    def save_poisoned(saver, step, state, *, last):
        if step == poisoned:
            weights = jax.tree.map(lambda w: w * np.nan, state["params"])
            state = {**state, "params": weights}
        save(saver, step, state, last=last)

    monkeypatch.setattr(run_saver.RunSaver, "save", save_poisoned)


def train(directory, corpus, steps, **settings):
    """Trains in a new world; its end, the phases, and its events."""
    config = jobs.configured(
        directory,
        corpus,
        steps=steps,
        enable_multi_tier_checkpointing=True,
        local_checkpoint_directory=str(directory / "ram"),
        local_checkpoint_period=2,
        multi_tier_checkpointing_backup_interval_steps=4,
        save_checkpoint_on_completion=False,
        **settings,
    )
    recorded, phases = RecordedEvents(), []
    parts = {"emit": recorded, "begin": phases.append}
    ended = jobs.trained(jobs.assembled(config, slices=1, **parts))
    return ended, phases, recorded


def logged(directory):
    return [(step.digest, step.loss) for step in runs.steps(directory / "tiny")]


@pytest.mark.slow
def test_poisoned_copy_in_ram_is_left_for_storage_and_the_rows_come_again(
    tmp_path, corpus, monkeypatch
):
    one, other = tmp_path / "one", tmp_path / "other"
    undisturbed, _, _ = train(other, corpus, 12)
    poison(monkeypatch, 6)
    train(one, corpus, 6)
    ended, phases, recorded = train(one, corpus, 12)
    assert recorded.named("restore_distrusted") == [
        {"step": 7, "restored_step": 6, "to_step": 4, "why": "the loss is nan"}
    ]
    assert ended.finding is None
    # A watch does not take the wait for uploads for a step that hangs.
    assert phases.count("restore") == 2
    # It has the rows, losses and weights of the one that was not disturbed.
    jax.tree.map(np.testing.assert_array_equal, ended.state, undisturbed.state)
    assert logged(one) == logged(other)
    assert [each.start_step for each in step_log.read(one / "tiny")] == [0, 6, 4]
    outcome = json.loads(runs.verb("audit", one / "tiny", "--json"))
    assert outcome["passed"], outcome
    # Steps 5 and 6, and those of the corrupt state until the loss was known.
    assert outcome["num_redone_steps"] >= 3
    assert outcome["num_left_out"] == 0


# Stages of the data with rows of another length, and as many.
LENGTHS = {0: 8, 3: 16, 5: 8, 7: 24}
STAGES = [{"begin_step": at, "max_target_length": n} for at, n in LENGTHS.items()]


@pytest.mark.slow
def test_rows_of_another_length_train_on_over_starts_and_rollbacks(
    tmp_path, corpus, monkeypatch
):
    one, other = tmp_path / "one", tmp_path / "other"
    staged = {"data_stages": json.dumps(STAGES), "num_logical_shards": 8}
    undisturbed, _, recorded = train(other, corpus, 10, **staged)
    # A program for each length: the first one serves the third stage, too.
    assert [each["step"] for each in recorded.named("compiled")] == [1, 4, 8]
    poison(monkeypatch, 6)
    # The first start ends within the second stage, and the second one with a bad copy.
    train(one, corpus, 4, **staged)
    train(one, corpus, 6, **staged)
    # It goes back from step 7 to step 4: over the begin of the third stage.
    ended, _, recorded = train(one, corpus, 10, **staged)
    assert recorded.named("restore_distrusted")
    assert [each["step"] for each in recorded.named("compiled")] == [7, 5, 8]
    jax.tree.map(np.testing.assert_array_equal, ended.state, undisturbed.state)
    assert logged(one) == logged(other)
