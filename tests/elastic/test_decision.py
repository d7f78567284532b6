"""The reaction of a run to lost and returned slices is decided by numbers alone."""

import dataclasses
import math
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_ckpt.elastic import decision

WORK = decision.Work(num_slices=4, rows=24, devices_per_slice=2, max_rows_per_device=3)
LONG = 1e6


def present(*numbers, secs=LONG):
    return dict.fromkeys(numbers, secs)


def failed(*slices, at_secs=0.0):
    return tuple(decision.Failure(slice=each, at_secs=at_secs) for each in slices)


def decide(slices, *, work=WORK, waited_secs=0.0, **policy):
    chosen = decision.Policy(**policy)
    return decision.decide(slices, chosen, work, waited_secs=waited_secs)


ALL = (0, 1, 2, 3)
# The current slices, those that are there, what is special of them, the policy, and
# the slices, spares, rows and parts that are decided on.
DECISIONS = {
    "all at the start": ((), present(*ALL, secs=0), {}, {}, (ALL, (), 24, 1)),
    # Four rows a device, of which three fit.
    "the rest, in parts that fit into memory": (
        *(ALL, present(0, 2, 3), {}, {}),
        ((0, 2, 3), (), 24, 2),
    ),
    "the rest, with the rows of each device": (
        *(ALL, present(0, 2, 3), {}, {"batch": "keep_per_device"}),
        ((0, 2, 3), (), 18, 1),
    ),
    "a spare for a lost slice": (
        *((0, 1, 2), present(0, 2, 3, 4), {}, {"max_slices": 3}),
        ((0, 2, 3), (4,), 24, 2),
    ),
    "without one that has to settle": (
        *((0, 2, 3), present(0, 2, 3) | {1: 5.0}, {}, {"settle_secs": 6.0}),
        ((0, 2, 3), (), 24, 2),
    ),
    "with one that has settled": (
        *((0, 2, 3), present(0, 2, 3) | {1: 5.0}, {}, {"settle_secs": 5.0}),
        (ALL, (), 24, 1),
    ),
    "without a quarantined one": (
        *((), present(*ALL), {"failures": failed(1)}, {"quarantine_failures": 1}),
        ((0, 2, 3), (), 24, 2),
    ),
    # 24 rows do not divide over the ten devices of five slices.
    "those of the current world, if not all fit": (
        *((1, 2, 3, 4), present(0, 1, 2, 3, 4), {}, {}),
        ((1, 2, 3, 4), (0,), 24, 1),
    ),
    "without a slow one, if that is asked for and enough are left": (
        *(ALL, present(*ALL), {"slow": frozenset((1,))}),
        {"min_slices": 3, "leave_out_slow": True},
        ((0, 2, 3), (), 24, 2),
    ),
    "with a slow one, if too few are left": (
        *(ALL, present(*ALL), {"slow": frozenset((1,))}),
        {"min_slices": 4, "leave_out_slow": True},
        (ALL, (), 24, 1),
    ),
    "with a slow one, if nothing is asked for": (
        *(ALL, present(*ALL), {"slow": frozenset((1,))}, {"min_slices": 2}),
        (ALL, (), 24, 1),
    ),
}


@pytest.mark.parametrize("name", DECISIONS)
def test_run_trains_on(name):
    current, there, special, policy, decided = DECISIONS[name]
    slices = decision.Slices(current=frozenset(current), alive_secs=there, **special)
    trains, spares, rows, parts = decided
    assert decide(slices, **policy) == decision.Train(
        slices=trains, spares=spares, rows=rows, accumulated=parts
    )


def test_the_reason_names_slices_that_are_quarantined():
    slices = decision.Slices(alive_secs=present(0, 1), failures=failed(1, 2))
    decided = decide(slices, min_slices=2, quarantine_failures=1)
    assert decided.why == (
        "slices [0] are usable, but min_slices=2; slices [1] are quarantined after"
        " repeated failures"
    )


@pytest.mark.parametrize(
    ("at_secs", "is_quarantined"),
    [
        ((), False),
        ((0, 10), False),
        ((0, 10, 20), True),
        ((20, 0, 10), True),
        ((0, 10, 20.5), False),
        ((0, 30, 40, 50), True),
        # The failures of a slice stay.
        ((0, 10, 20, 1e9), True),
    ],
)
def test_a_slice_that_fails_repeatedly_is_quarantined(at_secs, is_quarantined):
    failures = sum((failed(1, at_secs=each) for each in at_secs), failed(0, 2))
    slices = decision.Slices(alive_secs={}, failures=failures)
    policy = decision.Policy(quarantine_failures=3, quarantine_secs=20.0)
    assert slices.quarantined(policy) == ({1} if is_quarantined else set())
    assert not slices.quarantined(decision.Policy())


def test_too_few_slices_are_waited_for_and_then_the_run_stops():
    slices = decision.Slices(current=frozenset((0, 1)), alive_secs=present(1))
    waiting = decide(slices, min_slices=2, wait_secs=60, waited_secs=20)
    assert waiting == decision.Wait(
        why="slices [1] are usable, but min_slices=2", within_secs=40
    )
    stopped = decide(slices, min_slices=2, wait_secs=60, waited_secs=60)
    assert stopped.within_secs == 0


def test_an_objection_of_the_data_is_part_of_the_reason():
    slices = decision.Slices(alive_secs=present(0, 1))
    asked = []

    def objection(num_slices, rows):
        asked.append((num_slices, rows))
        return f"{num_slices} do not divide the shards"

    work = dataclasses.replace(WORK, objection=objection)
    decided = decide(slices, work=work)
    assert asked == [(2, 24), (1, 24)]
    assert decided.why == (
        "no subset of slices [0, 1] can divide a batch: 2 do not divide the shards;"
        " 1 do not divide the shards"
    )


@given(
    st.sets(st.integers(0, 9)),
    st.sets(st.integers(0, 9)),
    st.sets(st.integers(0, 9)),
    st.integers(1, 4),
    st.integers(1, 10),
    st.sampled_from(get_args(decision.Batch)),
    st.integers(1, 6),
)
def test_whatever_is_decided_can_be_done(
    current, alive, quarantined, least, most, batch, max_rows
):
    slices = decision.Slices(
        current=frozenset(current),
        alive_secs=dict.fromkeys(alive, LONG),
        failures=failed(*quarantined),
    )
    work = decision.Work(
        num_slices=4, rows=24, devices_per_slice=2, max_rows_per_device=max_rows
    )
    policy = {"min_slices": least, "max_slices": most, "batch": batch}
    decided = decide(slices, work=work, quarantine_failures=1, **policy)
    usable = alive - quarantined
    if not isinstance(decided, decision.Train):
        assert isinstance(decided, decision.Wait)
        fitting = [
            number
            for number in range(least, min(len(usable), most) + 1)
            if batch == "keep_per_device" or 24 % (2 * number) == 0
        ]
        assert not fitting
        return
    assert set(decided.slices) | set(decided.spares) == usable
    assert not set(decided.slices) & set(decided.spares)
    assert least <= len(decided.slices) <= most
    # A spare is used only if there are too few of the current ones.
    if set(decided.slices) - current:
        assert usable & current <= set(decided.slices)
    devices = 2 * len(decided.slices)
    rows_per_part = decided.rows / devices / decided.accumulated
    assert rows_per_part == math.floor(rows_per_part) <= max_rows
    if batch == "keep_global":
        assert decided.rows == 24
    else:
        assert decided.rows == 3 * devices


@pytest.mark.parametrize(("rows", "parts"), [(1, 1), (3, 1), (4, 2), (5, 5), (12, 4)])
def test_the_parts_are_equal_and_as_few_as_possible(rows, parts):
    slices = decision.Slices(alive_secs=present(0))
    work = decision.Work(
        num_slices=1, rows=rows, devices_per_slice=1, max_rows_per_device=3
    )
    assert decide(slices, work=work).accumulated == parts
