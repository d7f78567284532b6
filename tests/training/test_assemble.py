"""One process is several worlds in turn: each assembles the run's job anew."""

import jax
import numpy as np
import pytest

from elastic_ckpt.core import errors, metrics, topology
from elastic_ckpt.training import step_log
from elastic_ckpt.training.job import assemble
from tests import jobs

# The same float32 sums in another order, over other devices.
LOSS_RTOL = 1e-5


def configured(directory, corpus, **settings):
    values = {"save_checkpoint_on_completion": False, **settings}
    return jobs.configured(directory, corpus, **values)


def assembled(config, slices, num_devices):
    job = jobs.assembled(config, slices=slices, devices=num_devices)
    assert (job.world.slices, job.world.devices) == (slices, num_devices)
    assert set(mesh_of(job).devices.flat) == set(jax.devices()[-num_devices:])
    assert mesh_of(job).shape["slice"] == slices
    return job


def mesh_of(job):
    return job.loop.program.abstract_state["step"].sharding.mesh


def train(job):
    state = job.restore_or_init()
    for leaf in jax.tree.leaves(state):
        assert leaf.sharding.device_set == set(mesh_of(job).devices.flat)
    ended = job.run(state)
    job.close()
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


def test_devices_of_another_topology_are_refused(tmp_path, corpus):
    world = topology.Topology(hosts=2, slices=2, devices=4)
    with pytest.raises(
        errors.ConfigError, match=r"hosts=1, slices=2, devices=8.*topology of the run"
    ):
        assemble(configured(tmp_path, corpus), world)
    assert not (tmp_path / "tiny").exists()
