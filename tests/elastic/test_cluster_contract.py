"""The contract of a cluster: the same cases for host processes and for Pathways.

Pathways' stand-in is one process, whose CPU devices are divided into slices. They are
lost as by pathwaysutils' own fault simulator, and seen by its manager.
"""

import contextlib
import functools
import os
import threading

import jax
import pytest

from elastic_ckpt.core import errors
from elastic_ckpt.elastic import decision, faults, pathways, processes
from elastic_ckpt.elastic.cluster import Assignment
from elastic_ckpt.elastic.failures import WorldLostError
from tests.elastic import tiny_hosts
from tests.recorded_events import RecordedEvents

BOTH = frozenset((0, 1))
# Hosts train on while they agree on a step to leave after.
MANY = 1_000_000


class Case:
    """A cluster of two slices of four devices, and what it has reported."""

    def __init__(self, make, directory, **faults_at):
        self.directory, self.emit = directory, RecordedEvents()
        self.named = self.emit.named
        self.notes = functools.partial(tiny_hosts.notes, directory)
        listed = [
            faults.Fault(kind=kind, target=1, at_step=step)
            for kind, step in faults_at.items()
        ]
        self.cluster = make(directory / "logs", injected=listed, emit=self.emit)

    def run(self, *, slices=(0, 1), number=1, has_changed=lambda: False, **arguments):
        work = decision.Train(slices=slices, spares=(), rows=24, accumulated=3)
        train = functools.partial(
            tiny_hosts.counts, **{"directory": self.directory, "steps": 3, **arguments}
        )
        return self.cluster.run_world(
            train,
            Assignment(number=number, work=work),
            emit=self.emit,
            has_changed=has_changed,
        )


def of_processes(logs, **more):
    return processes.Processes(slices=2, devices_per_host=4, logs=logs, **more)


def of_pathways(_, **more):
    return pathways.Pathways(pathways.SimulatedSlices(2), **more)


@pytest.fixture(
    params=[pytest.param(of_processes, marks=pytest.mark.slow), of_pathways],
    ids=["processes", "pathways"],
)
def opened(request, tmp_path):
    """Opens the cluster of a test, with faults."""
    with contextlib.ExitStack() as resources:

        def open_case(**faults_at):
            case = Case(request.param, tmp_path, **faults_at)
            resources.enter_context(case.cluster)
            return case

        yield open_case


def test_faults_are_due_in_the_order_of_their_steps():
    text = '[{"return_slice": 1, "at_step": 8}, {"kill_slice": 0, "at_step": 4}]'
    listed = faults.parse(text)
    assert [(each.kind, each.target, each.at_step) for each in listed] == [
        *(("kill_slice", 0, 4), ("return_slice", 1, 8))
    ]
    num_due = [len(faults.due(listed, step)) for step in (3, 4, 7, 8, 9)]
    assert num_due == [0, 1, 1, 2, 2]
    assert faults.parse("") == ()


def test_a_world_that_was_decided_on_runs_to_its_end(opened):
    case = opened()
    assert case.cluster.devices_per_slice == 4
    assert case.run(number=6)
    assert [each["step"] for each in case.named("step")] == [1, 2, 3]
    assert {each["loss"] for each in case.named("step")} == {8.0}
    assert case.cluster.slices(BOTH).current == BOTH
    assert case.cluster.slices(BOTH).alive_secs.keys() == BOTH
    assert case.run(slices=(1,), number=7)
    began = {"number": 7, "slices": [1], "rows": 24, "parts": 3}
    assert case.notes("began-7") == [began]
    # Half of the devices.
    assert case.named("step")[-1]["loss"] == 4.0
    assert case.named("world_joined") == [{"world": 6}, {"world": 7}]


def test_a_lost_slice_is_reported_and_missing_and_new_when_it_returns(opened):
    threads, jitted = set(threading.enumerate()), jax.jit
    case = opened(kill_slice=2, return_slice=4)
    with pytest.raises(WorldLostError):
        case.run(steps=MANY)
    assert [each["slice"] for each in case.named("slice_lost")] == [1]
    left = case.cluster.slices(BOTH)
    assert (left.current, set(left.alive_secs)) == ({0}, {0})

    def has_changed():
        return 1 in case.cluster.slices(frozenset({0})).alive_secs

    assert not case.run(slices=(0,), number=2, steps=MANY, has_changed=has_changed)
    assert case.named("slice_returned") == [{"slice": 1}]
    there = case.cluster.slices(BOTH)
    # It was lost since, and is a member of the world only when it is in one again.
    assert there.current == {0}
    assert there.alive_secs[1] < there.alive_secs[0]
    assert case.run(number=3)
    assert case.cluster.slices(BOTH).current == BOTH
    # Nothing is left of the world that was lost.
    case.cluster.close()
    assert set(threading.enumerate()) <= threads
    assert jax.jit is jitted


def test_hosts_leave_after_the_same_step_stop_after_sigterm_and_fail_as_the_program(
    opened,
):
    case = opened()
    assert not case.run(steps=MANY, has_changed=lambda: True)
    (step,) = {each["step"] for each in case.notes("left-1")}
    assert {each["why"] for each in case.notes("left-1")} == {"resume"}
    assert case.named("world_left") == [{"step": step}]
    assert set(case.cluster.slices(BOTH).alive_secs) == BOTH
    assert case.run(number=2, steps=MANY, action=str(os.getpid()), at_step=2)
    assert case.named("stop_requested")
    assert {each["why"] for each in case.notes("left-2")} == {"stop"}
    assert len(case.named("world_left")) == 1
    # The exception is the user's.
    with pytest.raises(errors.RunError, match="ValueError: the number is wrong") as ei:
        case.run(number=3, action="raise", at_step=2)
    assert "tiny_hosts.py" in ei.value.failures[0].traceback
    assert not case.named("slice_lost")


@pytest.mark.slow
def test_devices_that_went_wrong_are_found_though_their_slice_was_sound(tmp_path):
    case = Case(of_processes, tmp_path, break_slice=0)
    with case.cluster:
        assert case.run()
        with pytest.raises(WorldLostError, match="wrong"):
            case.run(number=2)
    assert [each["slice"] for each in case.named("slice_refused")] == [1]
