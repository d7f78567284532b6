"""A run's checkpoints: weights and data state, saved and restored together."""

import contextlib
import shutil

import jax
import numpy as np
import pytest
from orbax.checkpoint import v1 as ocp

import elastic_ckpt as ec
from elastic_ckpt.core import errors, events, metrics, topology
from elastic_ckpt.data import iterator
from elastic_ckpt.training import run_saver
from tests.checkpoint.test_checkpointer import stored
from tests.recorded_events import RecordedEvents


@pytest.fixture
def batches(data):
    mesh = topology.mesh_of(topology.present(2))
    return iterator.Batches(data, mesh=mesh, global_batch_size=16)


@pytest.fixture
def start(tmp_path, batches):
    """Starts a run over storage, and RAM unless it is None."""
    with contextlib.ExitStack() as stack:

        def start(ram="ram", emit=events.nobody, every=2, **saved):
            tiers = [ec.Local(tmp_path / ram, every=every)] if ram else []
            tiers.append(ec.Persistent(tmp_path / "steps", every=every))
            opened = ec.Checkpointer(tiers, run="run", emit=emit)
            saved = run_saver.Saved(**saved)
            run = run_saver.RunSaver(checkpointer=opened, saved=saved, data=batches)
            stack.callback(run.close)
            return run

        yield start


def state(value=0.0):
    sharding = topology.batch_sharding(topology.mesh_of(topology.present(2)))
    return {"w": jax.device_put(np.arange(16, dtype=np.float32) + value, sharding)}


@pytest.mark.parametrize("ram", ["ram", None])
def test_weights_and_data_come_back_together(start, batches, recorded, ram):
    run = start(ram, in_background=False)
    next(batches)
    run.save(2, state(5.0), last=False)
    expected = next(batches)
    run.close()
    again = start(ram)
    assert again.latest_step == 2
    restored = again.restore(state())
    np.testing.assert_array_equal(restored["w"], state(5.0)["w"])
    assert restored["w"].sharding == state()["w"].sharding
    np.testing.assert_array_equal(next(batches)["example_id"], expected["example_id"])
    (saved,) = recorded[metrics.CHECKPOINT_SAVE]
    (blocked,) = recorded[metrics.CHECKPOINT_SAVE_BLOCK]
    # Nothing is left to the background here.
    assert 0 < saved <= blocked
    assert len(recorded[metrics.CHECKPOINT_LOAD]) == 1
    assert recorded[metrics.CHECKPOINT_BACKUP][0] >= state()["w"].nbytes
    read = metrics.CHECKPOINT_READ["local" if ram else "persistent"]
    assert recorded[read][0] >= state()["w"].nbytes
    assert recorded[metrics.CHECKPOINT_BAD_COPIES] == [0]


def test_a_checkpoint_is_due_when_a_tier_is_and_at_the_end(start, tmp_path):
    run = start()
    due = [step for step in range(1, 10) if run.is_due(step, last=step == 9)]
    assert due == [2, 4, 6, 8, 9]
    run.save(9, state(), last=True)
    assert not run.is_due(9, last=True)
    run.close()
    assert not start(at_end=False).is_due(11, last=True)
    # The last step went to storage whatever its number.
    assert stored(tmp_path) == [9]


def evaluate(run, *steps):
    """Evaluates steps, and saves those that are due."""
    for step, loss in steps:
        run.record(step, {"eval_loss": loss})
        if run.is_due(step, last=False):
            run.save(step, state(), last=False)
            run.checkpointer.wait()


@pytest.mark.parametrize("sign", [1, -1])
def test_the_best_step_so_far_is_saved_though_not_due(start, tmp_path, sign):
    best = ec.BestN(0, higher_is_better=sign < 0)
    run = start(best=best, every=100)
    losses = {1: 0.5, 2: 0.6, 3: 0.4, 4: 0.4, 5: float("nan")}
    evaluate(run, *((step, sign * loss) for step, loss in losses.items()))
    run.close()
    assert stored(tmp_path) == [1, 3]
    again = start(best=best, every=100)
    evaluate(again, (6, sign * 0.45), (7, sign * 0.3))
    assert stored(tmp_path) == [1, 3, 7]
    # A run that goes back to a step, and saves it again, keeps its evaluation.
    again.restore(state(), again.checkpointer.checkpoints[1])
    again.save_again(3, state())
    assert again.checkpointer.latest.metrics == {"eval_loss": sign * 0.4}


def test_a_step_of_plain_orbax_comes_back_with_its_data(start, batches, tmp_path):
    with ocp.training.Checkpointer(tmp_path / "steps") as stock:
        next(batches)
        stock.save_checkpointables(2, {"state": state(5.0), "data": batches})
    expected = next(batches)
    recorded = RecordedEvents()
    run = start(emit=recorded)
    restored = run.restore(state())
    np.testing.assert_array_equal(restored["w"], state(5.0)["w"])
    np.testing.assert_array_equal(next(batches)["example_id"], expected["example_id"])
    (event,) = recorded.named("restored_from")
    assert (event["step"], event["persistent_bytes"]) == (2, 64)
    # Damage is one error of ours.
    step = tmp_path / "steps" / "2"
    state_file = step / "data" / "data_state.json"
    whole = state_file.read_bytes()
    state_file.write_bytes(whole[:20])
    with pytest.raises(errors.DataError, match=r"data_state\.json is truncated"):
        run.restore(state())
    state_file.write_bytes(whole)
    for path in (step / "state").rglob("*"):
        if path.is_file():
            path.write_bytes(b"")
    message = (
        r"its checkpointable 'state' cannot be read \([^\n]+\); restore the step from"
    )
    with pytest.raises(errors.CheckpointError, match=message):
        run.restore(state())
    shutil.rmtree(step / "data")
    message = r"2 lacks \['data'\] of the requested checkpointables"
    with pytest.raises(errors.CheckpointError, match=message):
        run.restore(state())
