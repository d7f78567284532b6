"""Orbax's commit, by a rename as on a POSIX directory and by a file as in a store."""

import threading

import jax
import numpy as np
import pytest
from orbax.checkpoint import v1 as ocp

import elastic_ckpt as ec
from elastic_ckpt.core import topology
from elastic_ckpt.data import cursors
from tests.sidecar import held_pipeline

RENAME = ocp.options.AtomicityMode.ATOMIC_RENAME
COMMIT_FILE = ocp.options.AtomicityMode.COMMIT_FILE
MARKER = "commit_success.txt"
WEIGHTS = {"w": np.arange(4.0, dtype=np.float32)}


@pytest.fixture(autouse=True)
def valve():
    held_pipeline.VALVE.reset()


@pytest.fixture
def batches():
    made = ec.batches(
        held_pipeline.data(),
        mesh=topology.mesh_of(topology.present(2)),
        global_batch_size=8,
        colocated=True,
    )
    yield made
    made.close()


@pytest.fixture(params=[RENAME, COMMIT_FILE], ids=lambda mode: mode.name.lower())
def mode(request):
    return request.param


def checkpointer(directory, mode):
    options = ocp.options.AtomicityOptions(mode=mode)
    return ocp.training.Checkpointer(
        directory, context=ocp.Context(atomicity_options=options)
    )


def parts(batches):
    return {"state": jax.tree.map(jax.numpy.asarray, WEIGHTS), "data": batches}


@pytest.fixture
def late_writer(monkeypatch):
    """Delays the writing of the cursors; signals its begin."""
    begun, may_write, write = threading.Event(), threading.Event(), cursors.write

    def late(*arguments):
        begun.set()
        assert may_write.wait(held_pipeline.SOON_SECS)
        write(*arguments)

    monkeypatch.setattr(cursors, "write", late)
    yield begun, may_write
    may_write.set()


def test_the_commit_waits_for_a_host_that_writes_late(
    batches, mode, tmp_path, late_writer
):
    begun, may_write = late_writer
    with checkpointer(tmp_path / "steps", mode) as steps:
        next(batches)
        saving = steps.save_checkpointables_async(1, parts(batches))
        assert begun.wait(held_pipeline.SOON_SECS)
        # The training goes on.
        assert [held_pipeline.number(next(batches)) for _ in range(5)] == [
            1,
            2,
            3,
            4,
            5,
        ]
        # Orbax has had the time to write weights of 16 bytes.
        held_pipeline.wait_until(lambda: list(tmp_path.glob("steps/1*/state*/d/*")))
        # If Orbax renames, there is no directory yet; otherwise there is no marker.
        assert (tmp_path / "steps" / "1").exists() == (mode is COMMIT_FILE)
        assert not (tmp_path / "steps" / "1" / MARKER).exists()
        may_write.set()
        saving.result()
        assert (tmp_path / "steps" / "1" / MARKER).exists()
        loaded = steps.load_checkpointables(1, parts(batches))
        np.testing.assert_array_equal(loaded["state"]["w"], WEIGHTS["w"])
        assert held_pipeline.number(next(batches)) == 1
