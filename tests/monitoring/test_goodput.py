"""The seconds of a run are divided among causes, and add up to its time."""

import functools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_ckpt.core import events, metrics
from elastic_ckpt.monitoring import goodput

RATES = {"steps": 40, "loss": 2.0, "tokens": 90, "learning_rate": 0.5}


def accounted(timed, *, newest_step=0):
    account = goodput.Account(time=0.0, newest_step=newest_step)
    for time, name, fields in timed:
        account = goodput.after(account, name, fields, time=time)
    return account


def secs(account):
    return {cause: each for cause, each in account.secs.items() if each}


def step(time, number):
    return time, "step", {"step": number, "secs": 1.0}


WAY_TO_A_STEP = [
    (1.0, "world_started", {}),
    (3.0, "world_joined", {}),
    (3.5, "run_started", {}),
    (3.75, "restored_from", {}),
    (4.0, "compile_started", {}),
    (8.0, "compiled", {"secs": 4.0}),
    (10.0, "step", {"step": 11}),
]


def test_way_to_the_first_step_of_a_world_is_lost_phase_by_phase():
    assert secs(accounted(WAY_TO_A_STEP)) == {
        "decide": 1.0,
        "start": 2.0,
        "prepare": 0.5,
        "restore": 0.25,
        "compile": 4.25,
        "first_step": 2.0,
    }


def test_steps_that_were_lost_count_once():
    way = [*WAY_TO_A_STEP, step(11.0, 12), step(13.0, 13)]
    assert secs(accounted(way, newest_step=12))["again"] == 1.0
    account = accounted(way, newest_step=12)
    assert account.secs["productive"] == 2.0
    assert account.percent == pytest.approx(100 * 2 / 13)


def test_saves_and_evaluations_are_not_the_time_of_a_step():
    way = [
        *WAY_TO_A_STEP,
        (11.0, "save_started", {}),
        (11.5, "save_blocked", {"secs": 0.5}),
        (12.0, "saved", {"secs": 1.0}),
        (13.0, "evaluated", {"secs": 0.75}),
        step(15.0, 12),
    ]
    account = accounted(way)
    assert (account.secs["save"], account.secs["evaluate"]) == (0.5, 0.75)
    assert account.secs["productive"] == 5.0 - 0.5 - 0.75


def test_lost_slice_costs_until_the_first_step_of_the_next_world():
    way = [
        *WAY_TO_A_STEP,
        step(11.0, 12),
        (12.5, "host_lost", {}),
        (12.75, "slice_lost", {}),
        (13.0, "waiting_for_slices", {}),
        (15.0, "world_started", {}),
        (15.5, "world_joined", {}),
        (16.0, "executable_loaded", {"secs": 0.5}),
        step(16.25, 12),
    ]
    account = accounted(way)
    expected = {"end": 1.75, "wait": 2.0, "decide": 1.25, "first_step": 2.25}
    assert expected.items() <= account.secs.items()
    assert sum(account.secs.values()) == 16.25
    distrusted = [
        *WAY_TO_A_STEP,
        (11.5, "restore_distrusted", {"to_step": 8}),
        (13.0, "restored_from", {}),
        (14.0, "step", {"step": 9}),
    ]
    before, after = accounted(WAY_TO_A_STEP).secs, accounted(distrusted).secs
    assert (after["end"], after["restore"]) == (1.5, before["restore"] + 1.5)


def test_a_recovery_has_its_seconds_phase_by_phase():
    account = accounted([*WAY_TO_A_STEP, step(12.0, 12)])
    # Noticed late in the step, and answered half a second later.
    account = goodput.lost(account, since=13.5, time=14.0)
    assert account.recovered() is None
    for time, name, fields in (
        (14.125, "waiting_for_slices", {}),
        (14.25, "world_started", {}),
        (15.25, "world_joined", {}),
        (15.75, "run_started", {}),
        (16.0, "restored_from", {}),
        (18.0, "executable_loaded", {"secs": 0.25}),
        step(18.0625, 11),
    ):
        account = goodput.after(account, name, fields, time=time)
    assert account.recovered() == {
        "secs": 4.5625,
        "end_secs": 0.5,
        "decide_secs": 0.25,
        "start_secs": 1.0,
        "prepare_secs": 0.5,
        "restore_secs": 0.25,
        "compile_secs": 2.0,
        "step_secs": 0.0625,
    }
    assert sum(account.secs.values()) == account.time


@given(
    st.lists(
        st.tuples(
            st.floats(0, 10),
            st.sampled_from(sorted(events.NAMES)),
            st.fixed_dictionaries({"step": st.integers(0, 9), "secs": st.floats(0, 9)}),
        )
    )
)
def test_parts_add_up_to_the_whole(gaps):
    time, timed = 0.0, []
    for gap, name, fields in gaps:
        time += gap
        timed.append((time, name, fields))
    account = accounted(timed)
    assert min(account.secs.values()) >= 0
    assert sum(account.secs.values()) == pytest.approx(account.time)
    assert account.time <= time


def test_events_of_a_run_are_recorded_as_metrics(recorded):
    clock = iter([0.0, 1.0, 2.0, 4.0, *map(float, range(5, 30))])
    emitted = []
    emit = goodput.RunMetrics(
        lambda name, **_: emitted.append(name), clock=functools.partial(next, clock)
    )
    for name, fields in (
        ("world_started", {"world": 1, "slices": [0], "spares": [2]}),
        ("step", {"step": 1, "secs": 2.0, **RATES}),
        ("step", {"step": 2, "secs": 2.0, **RATES}),
        ("slice_lost", {"slice": 1, "why": "killed"}),
        ("slice_lost", {"slice": 2, "why": "killed"}),
        ("slice_returned", {"slice": 2}),
        ("slice_quarantined", {"slice": 1, "why": "too often"}),
        ("host_lost", {"host": 1, "why": "killed"}),
        ("recovered", {"steps_lost": 3, "secs": 1.0}),
        ("run_started", {"slices": 2, "steps": None}),
        ("saved", {"step": 2, "secs": 0.5}),
        ("backed_up", {"step": 1, "secs": 0.5}),
        ("run_failed", {"step": 2, "why": "full"}),
    ):
        emit(name, **fields)
        assert emitted[-1] == name
    assert recorded[metrics.TRAIN_STEPS] == [1.0, 2.0]
    assert recorded[metrics.TRAIN_LOSS] == [2.0, 2.0]
    assert recorded[metrics.TRAIN_STEP_RATE] == [0.5, 0.5]
    assert recorded[metrics.TRAIN_TOKEN_RATE] == [45.0, 45.0]
    assert recorded[metrics.TRAIN_LEARNING_RATE] == [0.5, 0.5]
    assert recorded[metrics.GOODPUT_SECS["productive"]] == [2.0]
    assert recorded[metrics.GOODPUT][2] == 50.0
    for metric, value in (
        (metrics.LOST_STEPS, 3.0),
        (metrics.LOST_HOSTS, 1.0),
        (metrics.FAILURES, 1.0),
        (metrics.SAVED_STEPS, 2.0),
        (metrics.STORED_STEPS, 1.0),
    ):
        assert recorded[metric] == [value]
    assert recorded[metrics.LOST_SLICES] == [1.0, 1.0]
    assert recorded[metrics.SLICES] == [1.0, 2.0]
    # One that is out of use for good is missing still.
    assert recorded[metrics.MISSING_SLICES] == [0, 1, 2, 1, 1, 1]
    # A loop of the user's own need not know how long it runs.
    assert metrics.TRAIN_PLANNED not in recorded


def test_recovery_goes_on_when_the_next_world_is_lost_before_a_step():
    account = goodput.lost(goodput.Account(time=0.0), since=7, time=10)
    account = goodput.lost(account, since=110, time=111)
    account = goodput.after(account, "step", {"step": 1}, time=115)
    assert account.recovered()["secs"] == 115 - 7
