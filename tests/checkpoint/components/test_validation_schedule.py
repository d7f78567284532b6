"""A run whose replicas differ reports it before the step is saved, or stops."""

import jax
import numpy as np

from elastic_ckpt.checkpoint.components import validation_schedule
from elastic_ckpt.core import errors, metrics, topology
from elastic_ckpt.data import batch_size
from elastic_ckpt.training import loop, train_step
from tests.checkpoint.components.flipped import flipped

CORRUPT = 3


class Run:
    """The parts of a loop: from a step on a bit of the state of a device is flipped."""

    def __init__(self):
        self.events = []
        self._batches = iter(map(np.asarray, range(100)))
        mesh = topology.mesh_of(topology.present(1))
        self.state = jax.device_put(np.arange(6.0), topology.replicated(mesh))

    def __next__(self):
        return next(self._batches)

    def begin_at(self, step):
        assert not step

    def step(self, state, batch):
        report = train_step.StepReport(*[np.float32(batch)] * 6)
        if batch + 1 == CORRUPT:
            state = flipped(state, jax.devices()[4], 20)
        return state, report

    def compiled(self, jitted, *_, step):
        del step
        return jitted

    def is_due(self, step, *, last):
        return step % 2 == 0 or last

    def save(self, step, state, *, last):
        del state, last
        self.events.append(("save", step))

    def emit(self, name, **fields):
        if name in ("replicas_differ", "validated"):
            self.events.append((name, *fields.values()))


def trained(level, **options):
    run = Run()
    parts = loop.Loop(
        program=run,
        batches=run,
        sizes=batch_size.Schedule(stages=((0, 8),)),
        log=None,
        saver=run,
        evaluation=None,
        validation=validation_schedule.ValidationSchedule(
            level, emit=run.emit, **options
        ),
        emit=run.emit,
        compiled=run.compiled,
    )
    try:
        parts.run({"w": run.state}["w"], start_step=0, steps=6)
    except errors.RunError as error:
        return run, str(error)
    return run, None


def names(run):
    return [(name, step) for name, step, *_ in run.events]


def test_a_finding_is_an_event_and_a_metric_before_the_step_is_saved(recorded):
    run, error = trained("tensor")
    assert error is None
    assert names(run) == [
        *[("validated", 2), ("save", 2)],
        *[("replicas_differ", 4), ("validated", 4), ("save", 4)],
        *[("replicas_differ", 6), ("validated", 6), ("save", 6)],
    ]
    _, _, leaf, hosts, devices, is_certain, why = run.events[2]
    assert (leaf, hosts, devices, is_certain) == ("", [0], [4], True)
    assert why == "[0:6] of device 4 of host 0 differs from 7 equal copies"
    assert recorded[metrics.VALIDATION_FINDINGS] == [1, 1]
    assert len(recorded[metrics.VALIDATION]) == 3


def test_a_run_that_is_to_stop_does_not_save_the_step():
    run, error = trained("full", stops=True)
    assert names(run)[-2:] == [("replicas_differ", 4), ("validated", 4)]
    assert "after step 4 copies differ" in error
    assert "device 4 of host 0 differs from 7 equal copies, in 1 element" in error


def test_intervals_and_saves_are_chosen_apart():
    run, _ = trained("quick", at_saves=False, interval=3)
    validated = [step for name, step in names(run) if name == "validated"]
    assert validated == [3, 6]
