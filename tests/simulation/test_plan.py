import pytest

from elastic_ckpt.core import errors, metrics
from elastic_ckpt.simulation import plan


def recovered(time, **secs):
    phases = ("end", "decide", "start", "prepare", "restore", "compile", "step")
    fields = {f"{phase}_secs": 0.0 for phase in phases} | secs
    return {"time": time, "event": "recovered", **fields}


def test_costs_of_a_run_are_the_means_of_its_changes_and_steps():
    events = [
        {"time": 3.0, "event": "compiled", "secs": 8.0},
        {"time": 20.5, "event": "host_lost"},
        recovered(24.0, end_secs=0.25, start_secs=1.0, restore_secs=0.5, step_secs=2.0),
        {"time": 33.0, "event": "compiled", "secs": 4.0},
        {"time": 34.0, "event": "world_left"},
        {"time": 35.0, "event": "executable_loaded", "secs": 0.5},
        recovered(36.0, end_secs=1.5, start_secs=0.5, restore_secs=1.0, step_secs=1.0),
    ]
    name = metrics.GOODPUT_SECS["productive"].name
    lines = [
        {"time": 9.0, "metric": name, "sum": 4.0, "count": 3},
        {"time": 25.0, "metric": name, "sum": 3.0, "count": 2},
    ]
    costs = plan.measured(events, lines)
    assert (costs.step_secs, costs.end_secs) == (1.4, 0.875)
    assert (costs.start_secs, costs.restore_secs) == (0.75, 0.75)
    assert (costs.compile_secs, costs.load_secs) == (6.0, 0.5)
    assert costs.first_step_secs == 1.5
    assert costs.block_secs == plan.Costs().block_secs
    with pytest.raises(errors.RunError, match="no step"):
        plan.measured(events, [])
