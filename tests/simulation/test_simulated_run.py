"""A simulated run: small clusters whose outcome can be counted by hand."""

import dataclasses

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from elastic_ckpt.elastic import decision
from elastic_ckpt.simulation import simulated_run
from elastic_ckpt.simulation.cluster import ClusterSize, Event, EventKind, FailureModel
from elastic_ckpt.simulation.costs import Costs
from elastic_ckpt.simulation.decisions import Decisions, WorldLayout
from elastic_ckpt.simulation.simulated_run import RunPlan
from elastic_ckpt.steps import owners

STATE_BYTES = 2**10
# Whole seconds; nothing else costs anything.
COSTS = dataclasses.replace(
    Costs(),
    **{
        field.name: 0.0
        for field in dataclasses.fields(Costs)
        if field.name.endswith("_secs")
    },
).with_values({"step_secs": 1.0, "start_secs": 7.0, "detect_secs": 2.0})
COPIES = owners.Policy(copies=2)
NO_COPIES = owners.Policy(copies=0)
POLICY = decision.Policy(min_slices=2, settle_secs=10.0, wait_secs=100.0)


def plan(*, slices=4, hosts=1, costs=COSTS, policy=POLICY, **changed):
    return RunPlan(
        hardware=ClusterSize(slices=slices, hosts_per_slice=hosts, hosts_per_rack=2),
        policy=policy,
        work=decision.Work(
            num_slices=slices, rows=12, devices_per_slice=1, max_rows_per_device=12
        ),
        costs=costs,
        state_bytes=STATE_BYTES,
        **{"period": 10, "backup_steps": 40, "steps": 100, **changed},
    )


def simulate(planned, *events, copies=COPIES, is_cached=True):
    domain = "rack" if planned.by_racks else "slice"
    policy = dataclasses.replace(copies, domain=domain)
    layout = WorldLayout(state_bytes=STATE_BYTES, domain=domain)
    decisions = Decisions(layout, policy, is_cached=is_cached)
    return simulated_run.simulate(planned, list(events), decisions)


def at(time, what, which):
    return Event(time=time, what=EventKind(what), which=which)


def seconds(outcome):
    return {cause: round(secs, 2) for cause, secs in outcome.secs.items() if secs > 0.1}


def test_lost_slice_costs_the_steps_since_the_last_save():
    outcome = simulate(plan())
    # The first step costs nothing here, and the world starts once.
    assert seconds(outcome) == {"productive": 99.0, "start": 7.0}
    assert (outcome.steps, outcome.rows, outcome.steps_lost) == (100, 1200, 0)
    assert outcome.bytes["saved"] == 10 * 4 * STATE_BYTES
    assert outcome.bytes["backed_up"] == 2 * STATE_BYTES
    assert outcome.restores == {}
    # Step 1 is done at 7 s, so that 35.5 s is within step 30.
    outcome = simulate(plan(), at(35.5, "kill_slice", 1))
    assert (outcome.losses, outcome.planned, outcome.steps_lost) == (1, 0, 9)
    # A step on three slices takes 4/3 s. Step 21 is the first one of the next world.
    assert seconds(outcome) == {
        "productive": pytest.approx(28 + 71 * 4 / 3, abs=0.01),
        "again": pytest.approx(8 * 4 / 3, abs=0.01),
        "end": 2.5,
        "start": 14.0,
    }
    assert outcome.restores == {"local": 1}
    # A slice that returns is used after a step that is saved, and reads from others.
    outcome = simulate(plan(), at(35.5, "kill_slice", 1), at(50.0, "return_slice", 1))
    assert (outcome.losses, outcome.planned, outcome.steps_lost) == (1, 1, 9)
    assert outcome.restores == {"local": 1, "distant": 1}
    assert outcome.bytes["read_distant"] == STATE_BYTES


@pytest.mark.parametrize(
    ("changes", "event", "restores"),
    [
        # A lost process leaves its memory.
        ({"slices": 2, "copies": NO_COPIES}, "kill_host", {"local": 1}),
        ({"backup_steps": 10, "in_ram": False}, "kill_host", {"persistent": 1}),
        ({"hang_secs": 30.0}, "hang_host", {"local": 1, "distant": 1}),
    ],
)
def test_steps_since_the_last_save_are_lost_whatever_fails(changes, event, restores):
    copies = changes.pop("copies", COPIES)
    outcome = simulate(plan(**changes), at(35.5, event, 1), copies=copies)
    assert (outcome.restores, outcome.steps_lost) == (restores, 9)
    # A hang ends a world later than a death.
    assert outcome.secs["end"] == pytest.approx(30.5 if "hang" in event else 2.5)


def test_without_copies_a_lost_machine_costs_the_steps_since_the_last_backup():
    events = [at(65.5, "kill_machine", 1), at(66.0, "return_machine", 1)]
    with_copies = simulate(plan(), *events)
    without = simulate(plan(), *events, copies=NO_COPIES)
    assert with_copies.restores.keys() == {"local", "distant"}
    # A part of the data state of step 50 was there alone.
    assert (with_copies.steps_lost, without.steps_lost) == (9, 19)
    assert without.restores == {"persistent": 1, "distant": 1}


def test_run_that_waits_too_long_is_started_anew():
    events = [at(25.5, "kill_slice", n) for n in range(3)]
    back = [at(500.0, "return_slice", n) for n in range(3)]
    outcome = simulate(plan(), *events, *back)
    assert outcome.restarts >= 1
    assert outcome.steps == 100
    assert outcome.secs["wait"] == pytest.approx(500 - 27.5)
    # Its slices may never return.
    assert simulate(plan(), *events).steps == 19


@settings(max_examples=4)
@given(
    st.integers(0, 10_000),
    st.integers(1, 3),
    st.integers(0, 2),
    st.booleans(),
    st.sampled_from([None, 3]),
)
# A slice returns after the end, while a world is left.
@example(113, 3, 0, False, None)
def test_run_is_the_same_with_and_without_the_cache(
    seed, hosts, copies, by_racks, most
):
    planned = plan(
        hosts=hosts,
        costs=Costs().with_values({"step_secs": 10.0, "copy_secs": 30.0}),
        policy=dataclasses.replace(POLICY, max_slices=most),
        by_racks=by_racks,
        secs=1800.0,
        steps=0,
    )
    model = FailureModel(
        between_hours=dict.fromkeys(("machine", "slice", "rack", "process"), 1.0),
        repair_hours={"machine": 0.2, "slice": 0.1, "rack": 0.1},
        seed=seed,
    )
    events = model.trace(planned.hardware, secs=planned.secs)
    policy = owners.Policy(copies=copies)
    cached, plain = (
        simulate(planned, *events, copies=policy, is_cached=is_cached)
        for is_cached in (True, False)
    )
    assert cached == plain
    # All of the time has a cause.
    assert sum(cached.secs.values()) <= planned.secs + 1e-6
