"""The reaction of a run to lost and returned slices is decided by numbers alone."""

import dataclasses
import math
from typing import get_args

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from elastic_ckpt.elastic import decision

WORK = decision.Work(num_slices=4, rows=24, devices_per_slice=2, max_rows_per_device=3)
LONG = 1e6


def failed(*slices, at_secs=0.0):
    return tuple(decision.Failure(slice=each, at_secs=at_secs) for each in slices)


def decide(slices, *, work=WORK, waited_secs=0.0, **policy):
    chosen = decision.Policy(**policy)
    return decision.decide(slices, chosen, work, waited_secs=waited_secs)


ALL, REST = (0, 1, 2, 3), (0, 2, 3)


@pytest.mark.parametrize(
    ("current", "secs", "is_slow", "policy", "decided"),
    [
        # All at the start, and later those that have settled.
        ((), 0.0, False, {}, ALL),
        (REST, 5.0, False, {"settle_secs": 6.0}, REST),
        (REST, 5.0, False, {"settle_secs": 5.0}, ALL),
        # At once where there are too few.
        (REST, 5.0, False, {"settle_secs": 6.0, "min_slices": 4}, ALL),
        # A slow one is left out if that is asked for and enough others are there.
        (ALL, LONG, True, {"leave_out_slow": True, "min_slices": 3}, REST),
        (ALL, LONG, True, {"leave_out_slow": True, "min_slices": 4}, ALL),
        (ALL, LONG, True, {"min_slices": 2}, ALL),
    ],
)
def test_run_trains_on_slices_that_have_settled(
    current, secs, is_slow, policy, decided
):
    slices = decision.Slices(
        current=frozenset(current),
        alive_secs=dict.fromkeys(REST, LONG) | {1: secs},
        slow=frozenset([1] * is_slow),
    )
    chosen = decide(slices, **policy)
    assert (chosen.slices, chosen.spares) == (decided, ())


@given(st.lists(st.integers(0, 60), max_size=6))
@example([0, 10, 20])
@example([20, 0, 10, 1000])
@example([0, 10, 21])
def test_a_slice_that_fails_repeatedly_is_quarantined(at_secs):
    ordered = sorted(at_secs)
    is_often = any(c - a <= 20 for a, c in zip(ordered, ordered[2:], strict=False))
    failures = sum((failed(1, at_secs=each) for each in at_secs), failed(0, 2))
    slices = decision.Slices(alive_secs={}, failures=failures)
    policy = decision.Policy(quarantine_failures=3, quarantine_secs=20.0)
    assert slices.quarantined(policy) == ({1} if is_often else set())
    assert not slices.quarantined(decision.Policy())


def test_too_few_slices_are_waited_for_and_then_the_run_stops():
    slices = decision.Slices(
        alive_secs=dict.fromkeys(range(2), LONG), failures=failed(1, 2)
    )
    policy = {"min_slices": 2, "wait_secs": 60, "quarantine_failures": 1}
    assert decide(slices, waited_secs=20, **policy) == decision.Wait(
        why="slices [0] are usable, but min_slices=2; slices [1] are quarantined after"
        " repeated failures",
        within_secs=40,
    )
    assert decide(slices, waited_secs=61, **policy).within_secs == 0
    # An objection of the data is part of the reason.
    asked = []

    def objection(num_slices, rows):
        asked.append((num_slices, rows))
        return f"{num_slices} do not divide the shards"

    decided = decide(slices, work=dataclasses.replace(WORK, objection=objection))
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
# Five parts would fit, but not be equal; slice 0 is a spare; five slices do not divide.
@example(set(), {0}, set(), 1, 10, "keep_global", 2)
@example({1, 2}, {0, 1, 2, 3}, {3}, 1, 2, "keep_per_device", 3)
@example({1, 2, 3, 4}, {0, 1, 2, 3, 4}, set(), 1, 10, "keep_global", 3)
def test_the_most_slices_that_divide_the_batch_train_in_the_fewest_parts(
    current, alive, quarantined, least, most, batch, max_rows
):
    slices = decision.Slices(
        current=frozenset(current),
        alive_secs=dict.fromkeys(alive, LONG),
        failures=failed(*quarantined),
    )
    work = dataclasses.replace(WORK, max_rows_per_device=max_rows)
    policy = {"min_slices": least, "max_slices": most, "batch": batch}
    decided = decide(slices, work=work, quarantine_failures=1, **policy)
    # Those of the current world come first.
    usable = sorted(alive - quarantined, key=lambda each: (each not in current, each))
    rows = {
        number: 6 * number if batch == "keep_per_device" else 24
        for number in range(least, min(len(usable), most) + 1)
    }
    fitting = [number for number in rows if rows[number] % (2 * number) == 0]
    if not fitting:
        assert isinstance(decided, decision.Wait)
        return
    number = fitting[-1]
    per_device = rows[number] // (2 * number)
    least_parts = math.ceil(per_device / max_rows)
    assert decided == decision.Train(
        slices=tuple(sorted(usable[:number])),
        spares=tuple(sorted(usable[number:])),
        rows=rows[number],
        accumulated=next(
            n for n in range(least_parts, per_device + 1) if per_device % n == 0
        ),
    )
