"""A run's checkpoints: weights and data state, saved and restored together."""

import contextlib
import errno
import os
import shutil

import jax
import numpy as np
import pytest
from orbax.checkpoint import v1 as ocp

from elastic_ckpt.checkpoint import foreign_steps, run_saver
from elastic_ckpt.core import errors, events, metrics, storage, topology
from elastic_ckpt.data import iterator
from tests.recorded_events import RecordedEvents


@pytest.fixture
def batches(data):
    mesh = topology.mesh_of(topology.present(2))
    return iterator.Batches(data, mesh=mesh, global_batch_size=16)


@pytest.fixture
def start(make, batches):
    """Starts a run over storage, and RAM unless it is None."""
    with contextlib.ExitStack() as stack:

        def start(ram="ram", emit=events.nobody, **saved):
            opened = make(ram=ram, every=2, local={"every": 2}, emit=emit)
            saved = run_saver.Saved(**saved)
            run = run_saver.RunSaver(checkpointer=opened, saved=saved, data=batches)
            stack.callback(run.close)
            return run

        yield start


def state(value=0.0):
    mesh = topology.mesh_of(topology.present(2))
    weights = np.arange(16, dtype=np.float32) + value
    return {"w": jax.device_put(weights, topology.batch_sharding(mesh))}


def abstract(tree):
    return jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), tree
    )


def steps_of(tmp_path):
    return list(foreign_steps.steps(tmp_path / "steps"))


@pytest.mark.parametrize("ram", ["ram", None])
def test_weights_and_data_come_back_together(start, batches, ram):
    run = start(ram)
    next(batches)
    run.save(2, state(5.0), last=False)
    expected = next(batches)
    run.close()
    again = start(ram)
    assert again.latest_step == 2
    restored = again.restore(abstract(state()))
    np.testing.assert_array_equal(restored["w"], state(5.0)["w"])
    assert restored["w"].sharding == state()["w"].sharding
    np.testing.assert_array_equal(next(batches)["example_id"], expected["example_id"])


def test_a_checkpoint_is_due_when_a_tier_is_and_at_the_end(start, tmp_path):
    run = start()
    due = [step for step in range(1, 10) if run.is_due(step, last=step == 9)]
    assert due == [2, 4, 6, 8, 9]
    run.save(9, state(), last=True)
    assert not run.is_due(9, last=True)
    run.close()
    unfinished = start(at_end=False)
    assert not unfinished.is_due(11, last=True)
    unfinished.close()
    # The last step went to storage whatever its number.
    assert steps_of(tmp_path) == [9]


@pytest.mark.parametrize("ram", ["ram", None])
def test_saves_and_restores_are_measured(start, recorded, ram):
    run = start(ram, in_background=False)
    run.save(2, state(), last=False)
    run.save(4, state(), last=False)
    run.close()
    start(ram).restore(abstract(state()))
    saves, blocks = (
        recorded[metrics.CHECKPOINT_SAVE],
        recorded[metrics.CHECKPOINT_SAVE_BLOCK],
    )
    assert len(saves) == len(blocks) == 2
    for saved, blocked in zip(saves, blocks, strict=True):
        # Nothing is left to the background here.
        assert 0 < saved <= blocked
    assert len(recorded[metrics.CHECKPOINT_LOAD]) == 1
    num_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(state()))
    assert recorded[metrics.CHECKPOINT_BACKUP][0] >= num_bytes
    nearness = "local" if ram else "persistent"
    assert recorded[metrics.CHECKPOINT_READ[nearness]][0] >= num_bytes
    assert recorded[metrics.CHECKPOINT_BAD_COPIES] == [0]


def fill(path):
    """Storage in which nothing can be written from now on."""
    os.makedirs(path, exist_ok=True)
    write = storage.write_atomic

    def write_or_fail(target, content, **options):
        if str(target).startswith(str(path)):
            raise OSError(errno.ENOSPC, "No space left on device")
        write(target, content, **options)

    return write_or_fail


def test_a_last_step_that_is_not_in_storage_is_an_error(start, tmp_path, breaks):
    run = start()
    breaks(errno.ENOSPC)
    run.save(7, state(1.0), last=True)
    missing = "step 7 was due in persistent storage and is not there.* No space left"
    with pytest.raises(errors.CheckpointError, match=missing):
        run.close()
    breaks(None)
    # Started once more, it is at its end, and saves it.
    again = start()
    assert again.latest_step in (7, None)
    assert again.is_due(7, last=True)
    again.save(7, state(1.0), last=True)
    again.close()
    assert steps_of(tmp_path) == [7]
    assert not start().is_due(7, last=True)


@pytest.fixture
def by_orbax(tmp_path, batches):
    """Steps as plain Orbax writes them: those of runs before version 0.1."""
    with ocp.training.Checkpointer(tmp_path / "steps") as stock:
        next(batches)
        stock.save_checkpointables(2, {"state": state(5.0), "data": batches})
    return tmp_path / "steps" / "2"


def test_a_step_of_plain_orbax_comes_back_with_its_data(by_orbax, start, batches):
    expected = next(batches)
    recorded = RecordedEvents()
    run = start(emit=recorded)
    restored = run.restore(abstract(state()))
    np.testing.assert_array_equal(restored["w"], state(5.0)["w"])
    np.testing.assert_array_equal(next(batches)["example_id"], expected["example_id"])
    (event,) = recorded.named("restored_from")
    assert (event["step"], event["persistent_bytes"]) == (2, 64)
    run.save(4, state(1.0), last=True)
    run.close()
    assert steps_of(by_orbax.parents[1]) == [2, 4]


def test_a_step_of_plain_orbax_that_is_damaged_is_one_error_of_ours(by_orbax, start):
    state_file = by_orbax / "data" / "data_state.json"
    whole = state_file.read_bytes()
    state_file.write_bytes(whole[:20])
    run = start()
    with pytest.raises(errors.DataError, match=r"data_state\.json is cut short"):
        run.restore(abstract(state()))
    state_file.write_bytes(whole)
    for path in (by_orbax / "state").rglob("*"):
        if path.is_file():
            path.write_bytes(b"")
    message = r"its part 'state' cannot be read \(.+\); restore it from a copy"
    with pytest.raises(errors.CheckpointError, match=message) as caught:
        run.restore(abstract(state()))
    assert "\n" not in str(caught.value)
    shutil.rmtree(by_orbax / "data")
    with pytest.raises(errors.CheckpointError, match=r"2 lacks \['data'\] of its part"):
        run.restore(abstract(state()))
