"""Once copies of the state differ, the newest step from before stays in storage."""

import jax
import numpy as np
import pytest
from orbax.checkpoint import v1 as ocp

import elastic_ckpt as ec
from elastic_ckpt import frontend
from elastic_ckpt.checkpoint import run_saver
from elastic_ckpt.checkpoint.components import validation_schedule
from elastic_ckpt.core import topology
from tests.checkpoint.components.flipped import flipped
from tests.checkpoint.test_tier_retention import stored


@pytest.fixture
def values():
    mesh = topology.mesh_of(topology.present(1))
    return jax.device_put(np.arange(6.0), topology.replicated(mesh))


class Run:
    """A run that keeps one step, compares copies before a save, and goes on."""

    def __init__(self, tmp_path, *, restored=0):
        keep = ocp.training.preservation_policies.LatestN(1)
        tiers = [ec.Persistent(tmp_path / "steps", every=1, keep=keep)]
        self.checkpointer = frontend.Checkpointer(tiers, run="run", slice_name="s0")
        self.events = []
        self._validation = validation_schedule.ValidationSchedule(
            "tensor",
            emit=lambda name, **fields: self.events.append((name, fields["step"])),
            preserve=lambda step: run_saver.preserve_newest(
                self.checkpointer, up_to=step
            ),
        )
        if restored:
            self._validation.restored(restored)

    def save(self, step, values):
        self._validation.run(step, {"w": values})
        assert self.checkpointer.save_async(step, {"w": values})

    @property
    def preserved(self):
        return [step for name, step in self.events if name == "step_preserved"]


def test_the_newest_step_from_before_a_finding_stays_once(tmp_path, values):
    bad = flipped(values, jax.devices()[4], 20)
    run = Run(tmp_path)
    with run.checkpointer:
        for step in (1, 2):
            run.save(step, values)
        # Its backup may not be done yet.
        for step in (3, 4):
            run.save(step, bad)
    assert run.preserved == [2]
    assert stored(tmp_path) == [2, 4]
    # Replicas of a step that was restored are equal, whatever was saved in it.
    again = Run(tmp_path, restored=4)
    with again.checkpointer:
        again.save(5, bad)
        again.save(6, values)
        again.save(7, bad)
    assert again.preserved == [4, 6]
    assert stored(tmp_path) == [2, 4, 6, 7]
