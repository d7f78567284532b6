"""Hosts that leave the block of a checkpointer by an error, together or not."""

import functools

import numpy as np
import pytest
from jax.experimental import multihost_utils

from elastic_ckpt.core import topology
from tests.multiprocess import tier_worlds


def leave(checkpointer, mesh, *, alone):
    """Raises on all hosts, or on one, while a save is in flight."""
    del mesh
    for step in (1, 2):
        checkpointer.save_async(step, {"w": np.arange(2.0**20) + step})
    multihost_utils.sync_global_devices("saved")
    if topology.this_host() == 0 or not alone:
        raise ValueError("stop")
    # The other host goes on training.
    multihost_utils.sync_global_devices("never")


def run(tmp_path, *, alone):
    with pytest.raises(Exception, match="stop"):
        tier_worlds.run(
            functools.partial(leave, alone=alone),
            num_hosts=2,
            directories=[None, None],
            logs=tmp_path / "logs",
            persistent=str(tmp_path / "steps"),
        )
    return (tmp_path / "logs" / "host-0.log").read_text()


@pytest.mark.slow
def test_saves_in_flight_are_finished_by_hosts_that_leave_together(tmp_path):
    run(tmp_path, alone=False)
    steps = sorted(path.name for path in (tmp_path / "steps").iterdir())
    assert [name for name in steps if name.isdigit()] == ["1", "2"]


@pytest.mark.slow
def test_a_host_that_leaves_alone_does_not_wait_for_the_others(tmp_path):
    log = run(tmp_path, alone=True)
    assert "saves in flight are not finished" in log
