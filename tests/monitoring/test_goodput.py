"""The seconds of a run are divided among causes, and add up to its time."""

import functools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_ckpt.core import events, metrics
from elastic_ckpt.monitoring import goodput


def accounted(timed, account=None, *, newest_step=0):
    account = account or goodput.Account(time=0.0, newest_step=newest_step)
    for time, name, *fields in timed:
        account = goodput.after(account, name, dict(*fields), time=time)
    return account


def step(time, number):
    return time, "step", {"step": number, "secs": 1.0}


TO_A_STEP = (
    (1.0, "world_started"),
    (3.0, "world_joined"),
    (3.5, "run_started"),
    (3.75, "restored_from"),
    (4.0, "compile_started"),
    (8.0, "compiled", {"secs": 4.0}),
    step(10.0, 11),
)
OF_A_STEP = {"decide": 1.0, "start": 2.0, "prepare": 0.5, "restore": 0.25}
OF_A_STEP |= {"compile": 4.25, "first_step": 2.0}
SAVED = (
    (11.0, "save_started"),
    (11.5, "save_blocked", {"secs": 0.5}),
    (12.0, "saved", {"secs": 1.0}),
    (13.0, "evaluated", {"secs": 0.75}),
    step(15.0, 12),
)
LOST = (
    step(11.0, 12),
    (12.5, "host_lost"),
    (12.75, "slice_lost"),
    (13.0, "waiting_for_slices"),
    (15.0, "world_started"),
    (15.5, "world_joined"),
    (16.0, "executable_loaded", {"secs": 0.5}),
    step(16.25, 12),
)
DISTRUSTED = (
    (11.5, "restore_distrusted", {"to_step": 8}),
    (13.0, "restored_from"),
    step(14.0, 9),
)


@pytest.mark.parametrize(
    ("timed", "newest_step", "causes"),
    [
        ((), 0, {}),
        # Step 12 was trained before it was lost.
        ((step(11.0, 12), step(13.0, 13)), 12, {"again": 1.0, "productive": 2.0}),
        (SAVED, 0, {"save": 0.5, "evaluate": 0.75, "productive": 3.75}),
        (
            LOST,
            0,
            {"productive": 1.0, "end": 1.75, "wait": 2.0, "decide": 1.25}
            | {"start": 2.5, "prepare": 1.0, "first_step": 2.25},
        ),
        (DISTRUSTED, 0, {"end": 1.5, "restore": 1.75, "first_step": 3.0}),
    ],
)
def test_each_part_has_the_cause_of_the_phase_in_which_it_was_spent(
    timed, newest_step, causes
):
    account = accounted([*TO_A_STEP, *timed], newest_step=newest_step)
    expected = OF_A_STEP | causes
    assert {cause: secs for cause, secs in account.secs.items() if secs} == expected
    assert sum(expected.values()) == account.time
    productive = 100 * expected.get("productive", 0) / account.time
    assert account.percent == pytest.approx(productive)


def test_a_recovery_has_its_seconds_phase_by_phase():
    account = accounted([*TO_A_STEP, step(12.0, 12)])
    # Noticed late in the step, and answered half a second later.
    account = goodput.lost(account, since=13.5, time=14.0)
    assert account.recovered() is None
    way = [
        (14.125, "waiting_for_slices"),
        (14.25, "world_started"),
        (15.25, "world_joined"),
        (15.75, "run_started"),
        (16.0, "restored_from"),
        (18.0, "executable_loaded", {"secs": 0.25}),
        step(18.0625, 11),
    ]
    secs = zip(goodput.PHASES, (0.5, 0.25, 1, 0.5, 0.25, 2, 0.0625), strict=True)
    phases = {f"{phase}_secs": each for phase, each in secs}
    assert accounted(way, account).recovered() == {"secs": 4.5625, **phases}
    # It goes on when the next world is lost before a step.
    account = goodput.lost(account, since=110, time=111)
    assert accounted([step(115, 11)], account).recovered()["secs"] == 115 - 13.5


@given(
    st.lists(
        st.tuples(
            st.floats(0, 10),
            st.sampled_from(["step", "evaluated"]) | st.sampled_from([*events.NAMES]),
            st.fixed_dictionaries({"step": st.integers(0, 9), "secs": st.floats(0, 9)}),
        )
    )
)
def test_parts_add_up_to_the_whole(gaps):
    time, timed = 0.0, []
    for gap, *event in gaps:
        time += gap
        timed.append((time, *event))
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
    rates = {"secs": 2.0, "loss": 2.0, "tokens": 90, "learning_rate": 0.5}
    for name, fields in (
        ("world_started", {"world": 1, "slices": [0], "spares": [2]}),
        ("step", {"step": 1, "steps": 40, **rates}),
        ("step", {"step": 2, "steps": 40, **rates}),
        ("slice_lost", {"slice": 1, "why": "killed"}),
        ("slice_lost", {"slice": 2, "why": "killed"}),
        ("slice_returned", {"slice": 2}),
        ("slice_quarantined", {"slice": 1, "why": "too often"}),
        ("world_started", {"world": 2, "slices": [0], "spares": [1]}),
        ("host_lost", {"host": 1, "why": "killed"}),
        ("recovered", {"steps_lost": 3, "secs": 1.0}),
        ("run_started", {"slices": 2, "steps": None}),
        ("saved", {"step": 2, "secs": 0.5}),
        ("backed_up", {"step": 1, "secs": 0.5}),
        ("run_failed", {"step": 2, "why": "full"}),
    ):
        emit(name, **fields)
        assert emitted[-1] == name
    expected = {
        metrics.TRAIN_STEPS: [1.0, 2.0],
        metrics.TRAIN_LOSS: [2.0, 2.0],
        metrics.TRAIN_STEP: [2.0, 2.0],
        metrics.TRAIN_STEP_RATE: [0.5, 0.5],
        metrics.TRAIN_TOKENS: [90.0, 90.0],
        metrics.TRAIN_TOKEN_RATE: [45.0, 45.0],
        metrics.TRAIN_LEARNING_RATE: [0.5, 0.5],
        metrics.GOODPUT_SECS["productive"]: [2.0],
        metrics.LOST_STEPS: [3.0],
        metrics.LOST_HOSTS: [1.0],
        metrics.LOST_SLICES: [1.0, 1.0],
        metrics.FAILURES: [1.0],
        metrics.SAVED_STEPS: [2.0],
        metrics.STORED_STEPS: [1.0],
        metrics.SLICES: [1.0, 1.0, 2.0],
        # One that is out of use is missing until a world has it.
        metrics.MISSING_SLICES: [0, 1, 2, 1, 1, 0, 0],
    }
    # A loop of the user's own need not know how long it runs: nothing is planned.
    others = {metrics.GOODPUT, *metrics.GOODPUT_SECS.values()} - expected.keys()
    assert {m: recorded[m] for m in recorded if m not in others} == expected
    assert recorded[metrics.GOODPUT][2] == 50.0
