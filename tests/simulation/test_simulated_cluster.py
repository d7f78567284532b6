"""A simulated run: small clusters whose outcome can be counted by hand."""

import dataclasses
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_ckpt.elastic import decision
from elastic_ckpt.simulation import failures, simulated_cluster
from elastic_ckpt.simulation.failures import Failure
from elastic_ckpt.simulation.plan import Costs, RunPlan
from elastic_ckpt.steps import owners

# Whole seconds; nothing else costs anything.
COSTS = Costs(
    **{field.name: 0.0 for field in dataclasses.fields(Costs) if "_secs" in field.name}
    | {"step_secs": 1.0, "start_secs": 7.0, "end_secs": 2.0}
)


def plan(*, slices=4, hosts=1, copies=2, **changed):
    planned = RunPlan(
        slices=slices,
        hosts_per_slice=hosts,
        work=decision.Work(
            num_slices=slices, rows=12, devices_per_slice=1, max_rows_per_device=12
        ),
        copies=owners.Policy(copies=copies),
        host_mib=1e-3,
        policy=decision.Policy(min_slices=2, settle_secs=10, wait_secs=100),
        costs=COSTS,
        period=10,
        backup_steps=40,
        steps=100,
    )
    return dataclasses.replace(planned, **changed)


def simulate(planned, *events):
    return simulated_cluster.simulate(planned, [Failure(*each) for each in events])


def seconds(outcome):
    return {cause: round(secs, 2) for cause, secs in outcome.secs.items() if secs > 0.1}


def restores(outcome):
    return {tier: count for tier, count in outcome.restores.items() if count}


def test_lost_slice_costs_the_steps_since_the_last_save():
    outcome = simulate(plan())
    # The first step costs nothing here, and the world starts once.
    assert seconds(outcome) == {"productive": 99.0, "start": 7.0}
    assert (outcome.steps, outcome.rows, outcome.steps_lost) == (100, 1200, 0)
    assert restores(outcome) == {}
    # Step 1 is done at 7 s, so that 35.5 s is within step 30.
    outcome = simulate(plan(), (35.5, "slice_lost", 1))
    assert (outcome.losses, outcome.steps_lost, outcome.steps) == (1, 9, 100)
    # A step on three slices takes 4/3 s. Step 21 is the first one of the next world.
    assert seconds(outcome) == {
        "productive": pytest.approx(28 + 71 * 4 / 3, abs=0.01),
        "again": pytest.approx(8 * 4 / 3, abs=0.01),
        "end": 2.5,
        "start": 14.0,
    }
    assert restores(outcome) == {"ram": 1}
    # A slice that returns is used after a step that is saved.
    outcome = simulate(plan(), (35.5, "slice_lost", 1), (50.0, "slice_returned", 1))
    assert (outcome.losses, outcome.steps_lost, outcome.rows) == (1, 9, 1200)
    assert restores(outcome) == {"ram": 2}


def test_each_number_of_slices_is_compiled_for_once():
    costs = dataclasses.replace(COSTS, compile_secs=19.0, load_secs=1.0)
    # On four slices, on three, on four again, and on three.
    outcome = simulate(
        plan(costs=costs, steps=200),
        *((55.5, "slice_lost", 1), (90.0, "slice_returned", 1)),
        (150.0, "slice_lost", 2),
    )
    assert outcome.secs["compile"] == 2 * 19.0 + 4 * 1.0
    assert outcome.secs["restore"] < 0.1


@pytest.mark.parametrize(
    ("changes", "name", "restored", "steps_lost"),
    [
        # A lost process leaves its memory.
        ({"copies": 0}, "host_lost", "ram", 9),
        ({"copies": 0}, "slice_lost", "storage", 19),
        ({"copies": 1}, "slice_lost", "ram", 9),
        ({"in_ram": False, "backup_steps": 10}, "host_lost", "storage", 9),
    ],
)
def test_what_a_loss_costs_depends_on_the_copies(changes, name, restored, steps_lost):
    # Within step 60.
    outcome = simulate(plan(**changes), (65.5, name, 1))
    assert (restores(outcome), outcome.steps_lost) == ({restored: 1}, steps_lost)


def test_run_that_waits_too_long_is_started_anew():
    lost = [(25.5, "slice_lost", n) for n in range(3)]
    back = [(500.0, "slice_returned", n) for n in range(3)]
    outcome = simulate(plan(), *lost, *back)
    assert (outcome.restarts, outcome.steps) == (1, 100)
    assert outcome.secs["wait"] == pytest.approx(500 - 27.5)
    # Its slices may never return.
    assert simulate(plan(), *lost).steps == 19


@settings(max_examples=30)
@given(st.integers(0, 10_000), st.integers(1, 3), st.integers(0, 2), st.booleans())
def test_time_and_losses_add_up_whatever_fails(seed, hosts, copies, in_ram):
    planned = plan(
        **{"hosts": hosts, "copies": copies, "in_ram": in_ram, "costs": Costs()},
        secs=3600.0,
        steps=math.inf,
    )
    trace = failures.draw(
        slices=4,
        hosts_per_slice=hosts,
        secs=3600.0,
        machine_hours=1.0,
        repair_hours=0.1,
        seed=seed,
    )
    outcome = simulate(planned, *trace)
    assert outcome == simulate(planned, *trace)
    assert sum(outcome.secs.values()) == pytest.approx(3600.0)
    assert outcome.losses <= sum(event.name == "slice_lost" for event in trace)
    assert (outcome.losses == 0) <= (outcome.steps_lost == 0)
    # With a spare it waits no longer than without.
    whole, spared = (
        dataclasses.replace(
            planned,
            policy=decision.Policy(min_slices=most, max_slices=most, settle_secs=0),
        )
        for most in (4, 3)
    )
    waited, waited_spared = (
        simulate(each, *trace).secs["wait"] for each in (whole, spared)
    )
    assert waited_spared <= waited + 1e-3


def test_run_without_failures_only_pays_for_its_start_and_saves():
    planned = plan(costs=Costs(), steps=1000)
    secs = simulate(planned).secs
    costs = planned.costs
    assert secs["save"] == pytest.approx(99 * costs.block_secs, rel=0.1)
    assert secs["productive"] == pytest.approx(999 * costs.step_secs)
    assert secs["again"] + secs["end"] < 1e-6


def test_the_first_step_of_a_world_is_saved_if_it_is_due():
    outcome = simulate(plan(period=1), (7.5, "host_lost", 1))
    assert (restores(outcome), outcome.steps_lost) == ({"ram": 1}, 0)


def test_a_change_after_the_last_step_trains_no_further_one():
    for at_secs in range(90, 120):
        events = ((35.5, "slice_lost", 1), (float(at_secs), "slice_returned", 1))
        assert simulate(plan(steps=60), *events).steps == 60
