"""At which steps tiers are due."""

import itertools
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from orbax.checkpoint import v1 as ocp

from elastic_ckpt.checkpoint import schedule
from elastic_ckpt.steps.step import StepId
from elastic_ckpt.tiers.choices import Chosen, Local, Persistent
from tests import seams


class StepClock(seams.Clock):
    """A clock that moves on before each step alone."""

    secs = 0.0

    def monotonic(self):
        return self.secs

    def each(self, steps, secs):
        for step in steps:
            self.secs += secs
            yield step


def made(*tiers, agree=lambda *answers: answers, **options):
    chosen = Chosen.from_choices([*tiers, Persistent("/steps", **options)])
    backups = schedule.BackupClock(options.get("every_minutes"))
    return schedule.Schedule(chosen=chosen, clock=backups, agree=agree)


def due(made, steps):
    """Those at which the tiers are due, each of which is saved."""
    steps_due = []
    for step in steps:
        if made.is_due(StepId(step, ""), is_saving=False):
            back_up = made.is_backup_due(StepId(step, ""), is_saving=False)
            made.note_save(StepId(step, ""), back_up=back_up)
            steps_due.append(step)
    return steps_due


@given(
    period=st.integers(1, 12),
    every=st.integers(1, 12),
    start=st.integers(0, 40),
    backup=st.booleans(),
)
def test_a_backup_is_made_at_the_first_saved_step(period, every, start, backup):
    # MaxText saves at multiples of its period alone.
    of_both = made(Local("/ram", every=period), every=every)
    of_both.stored = [StepId(start, "")] if backup else []
    newest = start if backup else 0
    steps = range(newest + 1, newest + 100)
    both_due = [step for step in steps if not (step % period and step % every)]
    assert [
        s for s in steps if of_both.is_due(StepId(s, ""), is_saving=False)
    ] == both_due
    for step in steps:
        if step % period == 0:
            was_due = any(each % every == 0 for each in range(newest + 1, step + 1))
            is_due = of_both.is_backup_due(StepId(step, ""), is_saving=False)
            assert is_due == was_due
            of_both.note_save(StepId(step, ""), back_up=is_due)
            newest = step if is_due else newest


@pytest.mark.parametrize("secs", [0.5, 20.0])
def test_minutes_are_counted_without_a_local_tier(secs):
    clock, agree = StepClock(), mock.Mock(wraps=lambda *answers: answers)
    with seams.by(clock):
        by_minutes = made(agree=agree, every_minutes=10)
        steps_due = due(by_minutes, clock.each(range(1, 3000), secs))
    period = round(600 / secs)
    gaps = [after - before for before, after in itertools.pairwise(steps_due)]
    assert gaps
    # Hosts compare their clocks now and then.
    assert all(period <= gap <= period + 17 for gap in gaps)
    if secs < 20:
        assert agree.call_count < 3000 / 4


def test_a_policy_of_orbax_decides():
    policies = ocp.training.save_decision_policies
    any_of = policies.AnySavePolicy(
        [policies.InitialSavePolicy(), policies.SpecificStepsPolicy({5})]
    )
    assert due(made(save_decision_policy=any_of), range(1, 8)) == [1, 5]
    continued = made(save_decision_policy=any_of)
    continued.stored = [StepId(4, "")]
    assert due(continued, range(5, 8)) == [5]
    busy = made(save_decision_policy=policies.ContinuousCheckpointingPolicy())
    assert not busy.is_due(StepId(1, ""), is_saving=True)
    assert busy.is_due(StepId(2, ""), is_saving=False)
