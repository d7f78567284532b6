"""Orbax's commit, by a rename as on a POSIX directory and by a file as in a store."""

import threading

import jax
import pytest
from orbax.checkpoint import v1 as ocp

from elastic_ckpt.data import cursors
from tests.sidecar import held_pipeline
from tests.tiers import served

RENAME = ocp.options.AtomicityMode.ATOMIC_RENAME
COMMIT_FILE = ocp.options.AtomicityMode.COMMIT_FILE
MARKER = "commit_success.txt"


@pytest.mark.parametrize("mode", [RENAME, COMMIT_FILE])
def test_the_commit_waits_for_a_host_that_writes_late(
    remote, mode, tmp_path, monkeypatch
):
    begun, may_write, write = threading.Event(), threading.Event(), cursors.write

    def late(*arguments):
        begun.set()
        assert may_write.wait(held_pipeline.SOON_SECS)
        write(*arguments)

    monkeypatch.setattr(cursors, "write", late)
    batches = remote(held_pipeline.data(), size=8)
    checkpointables = {"state": {"w": jax.numpy.arange(4.0)}, "data": batches}
    step = tmp_path / "steps" / "1"
    options = ocp.options.AtomicityOptions(mode=mode)
    with ocp.training.Checkpointer(
        step.parent, context=ocp.Context(atomicity_options=options)
    ) as steps:
        next(batches)
        saving = steps.save_checkpointables_async(1, checkpointables)
        assert begun.wait(held_pipeline.SOON_SECS)
        # The training goes on.
        assert [held_pipeline.number(next(batches)) for _ in range(3)] == [1, 2, 3]
        # Orbax has had the time to write weights of 16 bytes.
        served.until(lambda: list(tmp_path.glob("steps/1*/state*/d/*")))
        # If Orbax renames, there is no directory yet; otherwise there is no marker.
        assert step.exists() == (mode is COMMIT_FILE)
        assert not (step / MARKER).exists()
        may_write.set()
        saving.result()
        assert (step / MARKER).exists()
        loaded = steps.load_checkpointables(1, checkpointables)
        assert loaded["state"]["w"].tolist() == [0, 1, 2, 3]
        assert held_pipeline.number(next(batches)) == 1
