"""A run's checkpoints in tiers: weights and data state, saved and restored together."""

import errno
import os

import jax
import numpy as np
import pytest

from elastic_ckpt.checkpoint import factory, summary, tiered_run
from elastic_ckpt.config import schema
from elastic_ckpt.core import errors, metrics, storage, topology
from elastic_ckpt.data import iterator
from elastic_ckpt.tiers.choices import Local, Persistent
from tests.checkpoint.test_checkpointer import abstract, state


@pytest.fixture
def batches(data):
    mesh, _ = topology.make_mesh(2)
    return iterator.Batches(data, mesh=mesh, global_batch_size=16)


@pytest.fixture
def make(tmp_path, batches):
    made = []

    def make(**section):
        over_tiers = factory.Checkpointer(
            [Local(tmp_path / "ram", every=2), Persistent(tmp_path / "steps", every=4)]
        )
        made.append(
            tiered_run.TieredRunCheckpointer(
                over_tiers, schema.CheckpointSection(**section), data=batches
            )
        )
        return made[-1]

    yield make
    for run in made:
        run.close()


def test_weights_and_data_come_back_together(make, batches):
    run = make()
    next(batches)
    run.save(2, state(5.0), last=False)
    expected = next(batches)
    run.close()
    again = make()
    assert again.latest_step == 2
    restored = again.restore(abstract(state()))
    np.testing.assert_array_equal(restored["w"], state(5.0)["w"])
    assert restored["w"].sharding == state()["w"].sharding
    np.testing.assert_array_equal(next(batches)["example_id"], expected["example_id"])


def test_a_checkpoint_is_due_when_a_tier_is_and_at_the_end(make):
    run = make()
    due = [step for step in range(1, 10) if run.is_due(step, last=step == 9)]
    assert due == [2, 4, 6, 8, 9]
    run.save(9, state(), last=True)
    assert not run.is_due(9, last=True)
    run.close()
    unfinished = make(save_checkpoint_on_completion=False)
    assert not unfinished.is_due(11, last=True)


def test_the_last_step_goes_to_storage_whatever_its_number(make, tmp_path):
    run = make()
    run.save(2, state(), last=False)
    run.save(7, state(1.0), last=True)
    run.close()
    assert list(summary.steps(tmp_path / "steps")) == [7]


def test_saves_and_restores_are_measured(make, heard):
    run = make(async_checkpointing=False)
    run.save(2, state(), last=False)
    run.save(4, state(), last=False)
    run.close()
    make().restore(abstract(state()))
    assert len(heard[metrics.CHECKPOINT_SAVE]) == 2
    assert len(heard[metrics.CHECKPOINT_SAVE_BLOCK]) == 2
    assert len(heard[metrics.CHECKPOINT_LOAD]) == 1
    num_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(state()))
    assert heard[metrics.CHECKPOINT_BACKUP][0] >= num_bytes
    assert heard[metrics.CHECKPOINT_READ["local"]][0] >= num_bytes
    assert heard[metrics.CHECKPOINT_BAD_COPIES] == [0]


def fill(path):
    """Storage in which nothing can be written from now on."""
    os.makedirs(path, exist_ok=True)
    write = storage.write_atomic

    def write_or_fail(target, content, **options):
        if str(target).startswith(str(path)):
            raise OSError(errno.ENOSPC, "No space left on device")
        write(target, content, **options)

    return write_or_fail


def test_a_last_step_that_is_not_in_storage_is_an_error(make, tmp_path, monkeypatch):
    run = make()
    monkeypatch.setattr(storage, "write_atomic", fill(tmp_path / "steps"))
    run.save(7, state(1.0), last=True)
    with pytest.raises(errors.CheckpointError, match="step 7, the last of the run"):
        run.close()
    monkeypatch.undo()
    # Started once more, it is at its end, and saves it again.
    again = make()
    assert again.latest_step == 7
    assert again.is_due(7, last=True)
    again.save(7, state(1.0), last=True)
    again.close()
    assert list(summary.steps(tmp_path / "steps")) == [7]
    assert not make().is_due(7, last=True)
