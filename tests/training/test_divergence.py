"""Rules that find a divergence, and what a run does about what callbacks find."""

import functools
import json
import logging
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_ckpt.core import errors
from elastic_ckpt.training import callbacks, schema
from elastic_ckpt.training.callbacks import (
    Action,
    Detection,
    Detector,
    StepMetrics,
    good_step,
    step_to_go_back_to,
)
from tests.recorded_events import RecordedEvents

above_best = functools.partial(functools.partial, callbacks.loss_above_best)
spike = functools.partial(functools.partial, callbacks.gradient_spike)
RULES = {
    "non_finite": callbacks.non_finite,
    "loss": above_best(smoothing=0.8, factor=1.2),
    "gradient": spike(smoothing=0.9, factor=3.0),
}
each_rule = pytest.mark.parametrize("name", RULES)


def report(loss, gradient_norm=1.0):
    return StepMetrics(
        loss=loss, gradient_norm=gradient_norm, tokens=8, learning_rate=0.01
    )


def bad_steps(rule, values):
    """The steps, from 1, that a rule finds to be bad."""
    is_of_norm = getattr(rule, "func", None) is callbacks.gradient_spike
    reports = [report(1.0, each) if is_of_norm else report(each) for each in values]
    state = {}
    return [step for step, each in enumerate(reports, 1) if rule(state, each)]


numbers = st.floats(0, 20) | st.sampled_from([math.nan, math.inf, -math.inf])
histories = st.lists(st.tuples(numbers, numbers), max_size=30)


@each_rule
@given(history=histories, cut=st.integers(0, 30), patience=st.integers(1, 4))
def test_restored_detector_decides_as_one_that_never_stopped(
    name, history, cut, patience
):
    def make():
        return Detector(RULES[name], action=Action.STOP, patience=patience)

    whole, before, after = make(), make(), make()
    for step, values in enumerate(history, 1):
        if step == cut + 1:
            after.set_state(json.loads(json.dumps(before.get_state())))
        detector = before if step <= cut else after
        expected = whole.after_step(step, report(*values))
        assert detector.after_step(step, report(*values)) == expected


@each_rule
@given(start=st.floats(0.1, 20), ratios=st.lists(st.floats(0.5, 1.0), max_size=30))
def test_falling_values_are_never_bad(name, start, ratios):
    values = [start]
    for ratio in ratios:
        values.append(values[-1] * ratio)
    assert bad_steps(RULES[name], values) == []


@each_rule
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_value_that_is_not_finite_is_bad_at_once_and_enters_no_average(name, value):
    assert bad_steps(RULES[name], [1.0, 1.0, value, 1.0, 1.0]) == [3]
    rule = RULES["non_finite"]
    # Though the loss is finite.
    assert rule({}, report(1.0, value)).startswith("the gradient")


def test_smoothed_loss_is_compared_with_its_best():
    # Their averages, corrected for the begin: 2, 1.33, 1.14, 2.67, 3.35, 1.90
    losses = [2.0, 1.0, 1.0, 4.0, 4.0, 0.5]
    for factor, bad in ((1.5, [4, 5, 6]), (2.5, [5]), (3.0, [])):
        assert bad_steps(above_best(smoothing=0.5, factor=factor), losses) == bad


def test_single_spike_does_not_hide_the_next_and_a_lasting_norm_is_no_spike():
    rule = spike(smoothing=0.9, factor=5.0)
    assert bad_steps(rule, [1.0] * 10 + [1000.0] + [1.0] * 5 + [100.0]) == [11, 17]
    lasting = bad_steps(rule, [1.0] * 10 + [100.0] * 50)
    assert lasting[0] == 11
    assert lasting[-1] < 40


@given(bads=st.lists(st.booleans(), min_size=9), patience=st.integers(1, 3))
def test_detector_acts_after_its_patience_and_as_long_as_steps_are_bad(bads, patience):
    detector = Detector(
        lambda _, report: "it is bad" * int(report.loss),
        action=Action.ROLLBACK,
        **({"patience": patience} if patience > 1 else {}),
    )
    since, count = None, 0
    for step, is_bad in enumerate(bads, 1):
        since = (since or step) if is_bad else None
        count = (count + 1) * is_bad
        found = Detection(
            action=Action.ROLLBACK,
            why=f"it is bad, since step {since}",
            since=since,
            is_divergence=True,
        )
        acts = is_bad and count % patience == 0
        assert detector.after_step(step, report(is_bad)) == (found if acts else None)


class Counter:
    """Counts steps, and has an opinion of one."""

    def __init__(self, action=None, *, at=2, since=1, is_divergence=False):
        self.state, self.evaluations, self._at = {"steps": 0}, 0, at
        self._finding = action and Detection(
            action=action, why="it counts", since=since, is_divergence=is_divergence
        )

    def after_step(self, step, report):
        assert report in (REPORT, NAN)
        self.state["steps"] += 1
        return self._finding if step == self._at else None

    def after_evaluation(self, *_):
        self.evaluations += 1

    def get_state(self):
        return self.state

    def set_state(self, state):
        self.state = {"steps": state["steps"]}


REPORT = report(1.0)
NAN = report(math.inf)


def made(**counters):
    return callbacks.Callbacks(counters)


def counters_of(config):
    assert isinstance(config, schema.Config)
    return {"mine": Counter()}


def test_detectors_are_those_whose_threshold_is_set_and_others_follow():
    def names(**keys):
        section = schema.DivergenceSection(**keys)
        found = callbacks.configured(schema.Config(divergence=section))
        assert len(found) == len(found.get_state()["callbacks"])
        return [*found.get_state()["callbacks"]]

    own = f"{__name__}:counters_of"
    assert names(divergence_loss_factor=1.5) == []
    assert names(divergence_action="warn") == ["non_finite"]
    assert names(
        divergence_action="rollback",
        divergence_loss_factor=1.5,
        divergence_gradient_norm_factor=10.0,
        training_callbacks=own,
    ) == ["non_finite", "loss_above_best", "gradient_norm", "mine"]


def test_states_come_back_under_their_names_and_others_begin_anew(caplog):
    one = Counter()
    saved = made(one=one, two=Counter(), old=Counter())
    saved.rollbacks, one.state["steps"] = 2, 6
    saved.after_step(1, REPORT)
    state = saved.get_state()
    # It is written while the run goes on.
    saved.after_step(2, REPORT)
    again = {name: Counter() for name in ("new", "two", "one")}
    restored = made(**again)
    again["new"].state["steps"] = 9
    with caplog.at_level(logging.WARNING):
        restored.set_state(json.loads(json.dumps(state)))
    assert [each.state["steps"] for each in again.values()] == [0, 1, 7]
    assert restored.rollbacks == 2
    assert "callbacks ['new'] are new" in caplog.text
    assert "the state of callbacks ['old']" in caplog.text
    with pytest.raises(errors.CheckpointError, match="the callback 'one' cannot"):
        made(one=Counter()).set_state({**state, "callbacks": {"one": {}}})


def test_strongest_action_and_first_bad_step_of_the_first_step_with_any_count():
    recorded = RecordedEvents()
    counters = {
        "warns": Counter(Action.WARN, since=0),
        "goes_back": Counter(Action.ROLLBACK, since=2),
        "stops": Counter(Action.STOP, since=3),
        "late": Counter(Action.ABORT, at=3),
    }
    several = callbacks.Callbacks(counters, emit=recorded)
    several.after_step(1, REPORT)
    assert several.decision is None
    for step in (2, 3):
        several.after_step(step, REPORT)
    several.after_evaluation(3, 1.5)
    expected = Detection(action=Action.STOP, why="stops: it counts", since=2)
    assert (several.decision, several.decided_step) == (expected, 2)
    late = counters["late"]
    assert (late.state["steps"], late.evaluations) == (3, 1)
    told = {"step": 2, "action": "warn", "why": "it counts"}
    first, *others = recorded.named("divergence_found")
    assert (first, len(others)) == ({"callback": "warns", **told}, 2)


def distrusting(answer, **counters):
    """Callbacks that distrust steps up to 5, and when they asked to go back."""
    asked = []
    distrusted = made(**counters)
    distrusted.distrust_until(5, lambda *given: asked.append(given) or answer)
    return distrusted, asked


@pytest.mark.parametrize(("step", "is_distrusted"), [(5, True), (6, False)])
def test_loss_that_is_not_finite_soon_after_a_restore_distrusts_it(step, is_distrusted):
    none, asked = distrusting(True)
    assert [none.reads(each) for each in (5, 6)] == [True, False]
    none.after_step(4, REPORT)
    none.after_step(step, NAN)
    assert asked == [(step, "the loss is inf")] * is_distrusted
    found = Detection(action=Action.DISTRUST, why="the loss is inf", since=5)
    assert none.decision == (found if is_distrusted else None)
    # Once for each restore, and another state is trusted.
    none.reset()
    none.after_step(step, NAN)
    none.distrust_until(9, None)
    none.set_state(none.get_state())
    none.after_step(7, NAN)
    assert none.decision is None
    assert not none.reads(8)


@pytest.mark.parametrize("answer", [True, False])
@pytest.mark.parametrize("action", list(Action))
@pytest.mark.parametrize("is_divergence", [True, False])
def test_divergence_distrusts_a_restore_before_anything_else_is_done(
    action, answer, is_divergence
):
    one, asked = distrusting(answer, one=Counter(action, is_divergence=is_divergence))
    for step in (1, 2, 2):
        one.after_step(step, REPORT)
    # Once; what is no divergence may ask for it, too.
    is_asked = is_divergence or action is Action.DISTRUST
    assert asked == [(2, "one: it counts")] * is_asked
    decided = None if action in (Action.WARN, Action.DISTRUST) else action
    if answer and is_asked:
        decided = Action.DISTRUST
    assert (one.decision and one.decision.action) is decided


@given(
    saved=st.lists(st.integers(1, 40), unique=True),
    since=st.integers(1, 42),
    margin=st.integers(0, 5),
)
def test_newest_step_whose_own_loss_was_good_is_chosen(saved, since, margin):
    step = good_step(saved, since=since, margin=margin)
    # The loss of the state after n steps is that of step n + 1.
    good = [s for s in saved if s + 1 < since - margin]
    assert step == (max(good) if good else None)


FIRST_DUE = {"first_due": 4}
NEVER_ANEW = {"most": 2, "margin": 3}


@pytest.mark.parametrize(
    ("bounds", "saved", "since", "options", "step"),
    [
        (NEVER_ANEW, [2, 4, 6, 8, 10], 10, {"before": 1}, 4),
        # The state right before the bad step, then step 0.
        (FIRST_DUE, [4], 5, {}, 4),
        (FIRST_DUE, [4], 5, {"before": 1, "began_at": 4}, 0),
        (FIRST_DUE, [4], 5, {"before": 1, "began_at": 0}, 4),
        (FIRST_DUE, [4], 5, {"began_at": 4}, 4),
        # Nothing is saved, or only steps that are bad.
        (FIRST_DUE, [], 1, {}, 0),
        (FIRST_DUE, [], 3, {}, 0),
        (FIRST_DUE, [4, 8], 4, {}, 0),
        # A good one was due, and is gone.
        (FIRST_DUE, [], 6, {}, "complete steps: none"),
        # Older steps were saved once: the beginning would lose them all.
        (FIRST_DUE, [40], 41, {}, 40),
        (FIRST_DUE, [40], 41, {"before": 1, "began_at": 40}, r"\[40\]\); keep more"),
        ({}, [], 1, {}, "complete steps: none"),
        (NEVER_ANEW, [7, 8], 10, {}, r"complete steps: \[7, 8\]\); keep more"),
        (NEVER_ANEW, [2, 4], 10, {"before": 2}, "run has already rolled back 2"),
    ],
)
def test_run_goes_back_to_the_newest_good_step_or_to_its_beginning(
    bounds, saved, since, options, step
):
    finding = Detection(action=Action.ROLLBACK, why="the loss is nan", since=since)
    options = {"before": 0, **bounds, **options}
    if isinstance(step, int):
        assert step_to_go_back_to(finding, saved, **options) == step
        return
    with pytest.raises(errors.DivergedError, match=step):
        step_to_go_back_to(finding, saved, **options)
