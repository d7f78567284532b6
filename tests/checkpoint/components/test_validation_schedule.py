"""A run whose replicas differ reports it, keeps the step from before, or stops."""

import jax
import numpy as np
import pytest
from orbax.checkpoint import v1 as ocp

from elastic_ckpt.checkpoint import run_saver
from elastic_ckpt.checkpoint.components.validation_schedule import ValidationSchedule
from elastic_ckpt.core import errors, metrics, topology
from tests.checkpoint.components.flipped import flipped
from tests.checkpoint.test_checkpointer import stored
from tests.recorded_events import RecordedEvents


@pytest.fixture
def values():
    mesh = topology.mesh_of(topology.present(1))
    return jax.device_put(np.arange(6.0), topology.replicated(mesh))


@pytest.fixture
def bad(values):
    return flipped(values, jax.devices()[4], 20)


def test_it_is_due_at_saves_and_intervals_as_they_are_chosen():
    def due(**options):
        schedule = ValidationSchedule(level="quick", emit=RecordedEvents(), **options)
        steps = range(1, 7)
        return [s for s in steps if schedule.is_due(s, is_saving=s % 2 == 0)]

    assert due() == [2, 4, 6]
    assert due(interval=3) == [2, 3, 4, 6]
    assert due(at_saves=False, interval=3) == [3, 6]


def test_a_finding_is_an_event_and_a_metric(recorded, values, bad):
    emit = RecordedEvents()
    schedule = ValidationSchedule(level="tensor", emit=emit)
    assert schedule.run(2, values) == []
    (finding,) = schedule.run(4, bad, components={"same": values})
    (event,) = emit.named("replicas_differ")
    assert event.pop("why") == str(finding)
    expected = {"step": 4, "leaf": "", "hosts": [0], "devices": [4]}
    assert event == {**expected, "is_certain": True}
    validated = emit.named("validated")
    assert [(each["step"], each["findings"]) for each in validated] == [(2, 0), (4, 1)]
    assert recorded[metrics.VALIDATION_FINDINGS] == [1]
    assert len(recorded[metrics.VALIDATION]) == 2


def test_a_run_that_is_to_stop_names_the_step_and_the_copy(bad):
    emit = RecordedEvents()
    schedule = ValidationSchedule(level="full", emit=emit, stops=True)
    with pytest.raises(errors.RunError, match="after step 4 copies differ") as raised:
        schedule.run(4, bad)
    said = "device 4 of host 0 differs from 7 equal copies, in 1 element"
    assert said in str(raised.value)
    assert emit.named("validated")


def test_the_newest_step_from_before_a_finding_stays_once(make, tmp_path, values, bad):
    latest = ocp.training.preservation_policies.LatestN(1)

    def run(steps, *, restored=0):
        """The steps that are preserved while some are compared and saved."""
        emit = RecordedEvents()
        with make(ram=None, keep=latest) as opened:
            schedule = ValidationSchedule(
                level="tensor",
                emit=emit,
                preserve=lambda step: run_saver.preserve_newest(opened, up_to=step),
            )
            if restored:
                schedule.equal_step = restored
            for step, state in steps.items():
                schedule.run(step, {"w": state})
                # The backup of the step before may not be done yet.
                assert opened.save_async(step, {"w": state})
        return [each["step"] for each in emit.named("step_preserved")]

    assert run({1: values, 2: values, 3: bad, 4: bad}) == [2]
    assert stored(tmp_path) == [2, 4]
    # Replicas of a step that was restored are equal, whatever was saved in it.
    assert run({5: bad, 6: values, 7: bad}, restored=4) == [4, 6]
    assert stored(tmp_path) == [2, 4, 6, 7]
