import pytest

from elastic_ckpt.core import errors, metrics
from elastic_ckpt.simulation.costs import Costs, measured


def event(time, name, **fields):
    return {"time": time, "event": name, **fields}


def recovered(time, **secs):
    phases = ("end", "decide", "start", "prepare", "restore", "compile", "step")
    fields = {f"{phase}_secs": 0.0 for phase in phases} | secs
    return event(time, "recovered", secs=sum(fields.values()), **fields)


def productive(time, *, secs, count=1):
    name = metrics.GOODPUT_SECS["productive"].name
    return {"time": time, "metric": name, "sum": secs, "count": count}


EVENTS = [
    event(0.0, "world_started", slices=[0, 1]),
    event(1.0, "run_started", slices=2),
    event(2.0, "compiled", secs=9.0),
    event(10.0, "save_blocked", secs=0.25),
    event(11.0, "saved", secs=1.0),
    event(20.0, "fault_injected", kind="kill_slice", target=1, step=5),
    event(20.5, "host_lost"),
    event(20.5, "slice_lost", slice=1),
    event(21.0, "world_started", slices=[0]),
    event(22.0, "run_started", slices=1),
    event(23.0, "executable_loaded", secs=0.5),
    recovered(24.0, end_secs=0.25, start_secs=1.0, restore_secs=0.5, step_secs=2.0),
    event(30.0, "fault_injected", kind="return_slice", target=1, step=9),
    event(30.0, "slice_returned", slice=1),
    event(33.0, "world_leaving"),
    event(34.0, "world_left"),
    event(34.0, "run_started", slices=2),
    recovered(36.0, end_secs=1.5, start_secs=0.125, restore_secs=0.75, step_secs=1.0),
]
LINES = [
    productive(9.0, secs=4.0, count=4),
    productive(10.0, secs=2.0),
    productive(25.0, secs=3.0),
]


def test_costs_of_a_run_are_those_of_its_phases():
    costs = measured(EVENTS, LINES, given=Costs())
    assert costs.step_secs_by_slices == {1: 3.0, 2: 1.2}
    assert costs.step_secs == 1.2
    assert costs.step_secs_on(1, rows_ratio=2.0) == 3.0
    assert costs.step_secs_on(3, rows_ratio=0.5) == 0.6
    assert (costs.detect_secs, costs.check_secs) == (0.5, 3.0)
    assert (costs.start_secs, costs.planned_start_secs) == (1.0, 0.125)
    assert (costs.leave_secs, costs.restore_secs) == (1.5, 0.625)
    assert (costs.load_secs, costs.compile_secs) == (0.5, 9.0)
    assert (costs.block_secs, costs.save_secs) == (0.25, 1.0)
    # The run has backed up nothing.
    assert costs.backup_secs == Costs().backup_secs
    chosen = costs.with_values({"step_secs": 5.0})
    assert chosen.step_secs_on(1, rows_ratio=2.0) == 10.0
    with pytest.raises(errors.RunError, match="no step"):
        measured(EVENTS, [], given=Costs())
