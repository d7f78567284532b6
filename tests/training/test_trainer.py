"""One process is several worlds in turn: each makes a trainer of the run."""

import jax
import numpy as np
import pytest

from elastic_ckpt.core import errors, metrics
from elastic_ckpt.training import step_log
from tests import jobs

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
