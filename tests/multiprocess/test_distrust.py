"""A live run restores a step from RAM that was corrupt when it was saved."""

import json

import jax
import numpy as np
import pytest

import elastic_ckpt as ec
from elastic_ckpt.training import step_log
from tests import runs
from tests.multiprocess import callbacks, test_elastic_run
from tests.multiprocess.test_elastic_run import ram  # noqa: F401

STEPS = 16


def trained(directory, corpus, ram, **settings):  # noqa: F811
    config = test_elastic_run.configured(
        directory,
        corpus,
        ram,
        hosts=2,
        slices=2,
        steps=STEPS,
        local_checkpoint_period=2,
        multi_tier_checkpointing_backup_interval_steps=4,
        # The step before a fault is complete when the fault comes.
        async_checkpointing=False,
        **settings,
    )
    return test_elastic_run.trained(config)


def weights(run):
    with ec.Checkpointer(
        [ec.Persistent(run / "checkpoints")], read_only=True
    ) as opened:
        assert opened.latest.step == STEPS
        return opened.load()["params"]


@pytest.mark.slow
def test_the_hosts_of_a_run_go_back_to_storage_together_and_repeat_its_rows(
    tmp_path,
    corpus,
    ram,  # noqa: F811
):
    run = trained(
        tmp_path / "disturbed",
        corpus,
        f"{ram}/disturbed",
        faults=[{"kill_host": 1, "at_step": 11}],
        training_callbacks=callbacks.named(callbacks.poisoned),
    )
    (event,) = runs.events(run, "restore_distrusted")
    assert (event["step"], event["restored_step"]) == (11, 10)
    assert event["why"] == "the loss is nan"
    # Whether step 8 was backed up before the fault depends on the machine.
    assert event["to_step"] in (4, 8)
    starts = [each.start_step for each in step_log.read(run)]
    assert starts == [0, 10, event["to_step"]]
    outcome = json.loads(runs.verb("audit", run, "--json"))
    assert outcome["passed"], outcome
    assert outcome["num_left_out"] == 0
    calm = trained(tmp_path / "calm", corpus, f"{ram}/calm")
    steps, others = runs.steps(run), runs.steps(calm)
    assert [(s.digest, s.loss) for s in steps] == [(s.digest, s.loss) for s in others]
    jax.tree.map(np.testing.assert_array_equal, weights(run), weights(calm))
