import pytest

from elastic_ckpt.core import errors, metrics
from elastic_ckpt.simulation import plan


def line(cause, total, count=1):
    return {"metric": metrics.GOODPUT_SECS[cause].name, "sum": total, "count": count}


def test_costs_of_a_run_are_the_means_of_its_worlds_and_steps():
    events = [
        *[{"event": "world_started"}] * 4,
        *[{"event": "recovered"}] * 3,
        *({"event": "compiled", "secs": secs} for secs in (8.0, 4.0)),
    ]
    lines = [
        *(line("productive", 4.0, 3), line("productive", 2.0, 1), line("again", 1.0)),
        # Another process has recorded a part.
        *(line("end", 2.5), line("end", 2.0), line("start", 3.0), line("restore", 3.0)),
        *(line("compile", 14.0), line("first_step", 6.0)),
    ]
    costs = plan.measured(events, lines)
    assert (costs.step_secs, costs.end_secs) == (1.4, 1.5)
    assert (costs.start_secs, costs.restore_secs) == (0.75, 0.75)
    assert (costs.compile_secs, costs.load_secs) == (6.0, 0.5)
    assert costs.first_step_secs == 1.5
    assert costs.block_secs == plan.Costs().block_secs
    with pytest.raises(errors.RunError, match="has not recorded a step"):
        plan.measured(events, [])


def test_what_a_run_has_not_paid_costs_as_by_default():
    measured, default = plan.measured([], [line("productive", 6.0, 3)]), plan.Costs()
    assert measured.step_secs == 2.0
    assert (measured.end_secs, measured.load_secs) == (
        default.end_secs,
        default.load_secs,
    )
