"""One process is several worlds in turn: each makes a trainer of the run."""

import json
import types

import jax
import numpy as np
import pytest

from elastic_ckpt.core import errors, metrics
from elastic_ckpt.training import step_log
from elastic_ckpt.training.callbacks import Action, Detection
from tests import jobs, runs
from tests.recorded_events import RecordedEvents

# The same float32 sums in another order, over other devices.
LOSS_RTOL = 1e-5


def configured(directory, corpus, **settings):
    values = {"save_checkpoint_on_completion": False, **settings}
    return jobs.configured(directory, corpus, **values)


def assembled(config, slices, num_devices):
    trainer = jobs.assembled(config, slices=slices, devices=num_devices)
    mesh = mesh_of(trainer)
    assert set(mesh.devices.flat) == set(jax.devices()[-num_devices:])
    assert mesh.shape["slice"] == slices
    return trainer


def mesh_of(trainer):
    return trainer.program.abstract_state["step"].sharding.mesh


def train(trainer):
    with trainer.run:
        state = trainer.restore()
        for leaf in jax.tree.leaves(state):
            assert leaf.sharding.device_set == set(mesh_of(trainer).devices.flat)
        ended = trainer.train(state)
        trainer.close()
    return ended


def of_steps(attempt, steps, *fields):
    records = {record.step: record for record in attempt.records}
    return [[getattr(records[step], name) for name in fields] for step in steps]


def batches(attempt, steps):
    return of_steps(attempt, steps, "digest", "row", "rows")


def losses(attempt, steps):
    return of_steps(attempt, steps, "loss")


@pytest.mark.slow
def test_worlds_of_one_process_repeat_the_steps_after_the_checkpoint(
    tmp_path, corpus, recorded
):
    worlds = ((2, 4, 6), (1, 2, 7), (2, 4, 7))
    starts = []
    for number, (slices, num_devices, steps) in enumerate(worlds):
        # Each kind of iterator loads the state that the other saved.
        config = configured(
            tmp_path,
            corpus,
            steps=steps,
            colocated_python_data_input=number % 2 == 0,
            replica_validation="none" if number else "quick",
        )
        job = assembled(config, slices, num_devices)
        starts.append(job.start_step)
        assert train(job).step == steps
    # Step 4 is the only one that was saved: the other worlds repeat what followed it.
    assert starts == [0, 4, 4]
    # Before that the copies of the state were compared, and are equal.
    assert len(recorded[metrics.VALIDATION]) == 1
    assert metrics.VALIDATION_FINDINGS not in recorded
    attempts = step_log.read(tmp_path / "tiny")
    assert [(a.slices, a.devices) for a in attempts] == [(s, d) for s, d, _ in worlds]
    first, *others = attempts
    for other in others:
        assert batches(other, (4, 5)) == batches(first, (4, 5))
        assert batches(other, (6,)) == batches(others[0], (6,))
        np.testing.assert_allclose(
            losses(other, (4, 5)), losses(first, (4, 5)), rtol=LOSS_RTOL
        )
    # On the same topology the losses are equal to the bit.
    assert losses(others[-1], (4, 5)) == losses(first, (4, 5))


def test_slices_that_do_not_share_the_devices_are_refused(tmp_path, corpus):
    with pytest.raises(errors.ConfigError, match="slices=3: 8 devices cannot"):
        jobs.assembled(configured(tmp_path, corpus), slices=3, devices=8)
    assert not (tmp_path / "tiny").exists()


def planted(config):
    """A callback that finds a divergence at step 4, once."""
    del config
    found = [Detection(action=Action.ROLLBACK, why="planted", since=4)]
    return {
        "planted": types.SimpleNamespace(
            after_step=lambda step, _: found.pop() if found and step == 4 else None,
            after_evaluation=lambda *_: None,
            get_state=lambda: None,
            set_state=lambda _: None,
        )
    }


def test_run_that_goes_back_continues_with_the_same_batch_whenever_it_decides(
    tmp_path, corpus
):
    # The batch grows at step 4, which is decided on at once if it may be saved.
    ramp = {
        "enable_rampup_batch_size": True,
        "per_device_batch_size_start": 2,
        "per_device_batch_size_increment": 2,
        "per_device_batch_size": 4,
        "global_rampup_samples": 32,
        "global_batch_size": 0,
        "num_logical_shards": 24,
    }
    after = []
    for period in (2, 3):
        directory = tmp_path / str(period)
        config = configured(
            directory,
            corpus,
            steps=6,
            checkpoint_period=period,
            training_callbacks=f"{__name__}:planted",
            **ramp,
        )
        recorded = RecordedEvents()
        assert jobs.trained(jobs.assembled(config, emit=recorded)).step == 6
        steps = [each["step"] for each in recorded.named("step")]
        # Step 5 was trained before it went back only if it decided late.
        assert steps == [*range(1, period + 3), *range(period + 1, 7)]
        outcome = json.loads(runs.verb("audit", directory / "tiny", "--json"))
        assert outcome["passed"], outcome
        first, again = step_log.read(directory / "tiny")
        assert (len(first.records), again.start_step) == (5, period)
        # A restart reads its first batch in the size that it has.
        restarted = jobs.assembled(config)
        with restarted.run:
            restarted.restore()
            assert len(next(restarted.batches)["inputs"]) == 16
            restarted.close()
        after.append((again.left_out[-1][1], again.records[0].digest))
    assert after[0] == after[1]


def test_run_that_goes_back_while_its_hosts_leave_stops_at_the_older_step(
    tmp_path, corpus
):
    called = f"{__name__}:planted"
    config = configured(
        tmp_path, corpus, checkpoint_period=2, training_callbacks=called
    )
    recorded = RecordedEvents()
    parts = {"emit": recorded, "leaving": lambda step: "stop" if step == 4 else None}
    ended = jobs.trained(jobs.assembled(config, **parts))
    assert (ended.step, ended.is_stopped) == (2, True)
    assert recorded.named("run_stopped") == [{"step": 2, "saved": True}]
    assert step_log.read(tmp_path / "tiny")[-1].start_step == 2
