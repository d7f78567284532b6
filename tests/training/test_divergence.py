"""Rules that find a divergence, and what a run does about what callbacks find."""

import json
import logging
import math

import numpy as np
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
    step_to_go_back_to,
)
from tests.recorded_events import RecordedEvents


def report(loss, gradient_norm=1.0):
    return StepMetrics(
        loss=loss, gradient_norm=gradient_norm, tokens=8, learning_rate=0.01
    )


def averages(values, smoothing):
    """The weighted averages of the first values, their first two, and so on."""
    weights = smoothing ** np.arange(len(values))
    firsts = (values[:n] for n in range(1, len(values) + 1))
    return [np.average(each[::-1], weights=weights[: len(each)]) for each in firsts]


numbers = st.floats(0, 20) | st.sampled_from([0.0, 20.0, math.nan, math.inf])


@given(
    history=st.lists(st.tuples(numbers, numbers), min_size=5, max_size=30),
    smoothing=st.sampled_from([0.5, 0.9]),
    factor=st.sampled_from([1.2, 3.0]),
)
def test_rules_compare_with_averages_of_what_is_finite(history, smoothing, factor):
    options = {"smoothing": smoothing, "factor": factor}
    states, losses, norms = ({}, {}, {}), [], []
    for loss, norm in history:
        told = report(loss, norm)
        found = [
            callbacks.non_finite(states[0], told),
            callbacks.loss_above_best(states[1], told, **options),
            callbacks.gradient_spike(states[2], told, **options),
        ]
        # A restored state decides as one that never stopped.
        states = json.loads(json.dumps(states))
        is_above = is_spike = True
        if math.isfinite(loss):
            best = min(averages(losses, smoothing), default=math.inf)
            losses.append(loss)
            is_above = best > 0 and averages(losses, smoothing)[-1] > factor * best
        if math.isfinite(norm):
            # A spike enters the average as the largest norm that is none.
            (*_, most) = [math.inf, *averages(norms, smoothing)]
            norms.append(min(norm, factor * most))
            is_spike = norm > factor * most
        is_finite = math.isfinite(loss) and math.isfinite(norm)
        assert [*map(bool, found)] == [not is_finite, is_above, is_spike]
        if found[0]:
            begin = "the gradient" if math.isfinite(loss) else "the loss"
            assert found[0].startswith(begin)


@given(bads=st.lists(st.booleans(), min_size=9), patience=st.integers(1, 3))
def test_detector_acts_after_its_patience_and_as_long_as_steps_are_bad(bads, patience):
    def rule(state, told):
        state["steps"] = state.get("steps", 0) + 1
        return f"step {state['steps']} is bad" * int(told.loss)

    more = {"patience": patience} if patience > 1 else {}
    since, count, saved = None, 0, None
    for step, is_bad in enumerate(bads, 1):
        detector = Detector(rule, action=Action.ROLLBACK, **more)
        if saved:
            detector.set_state(json.loads(saved))
        since = (since or step) if is_bad else None
        count = (count + 1) * is_bad
        found = Detection(
            action=Action.ROLLBACK,
            why=f"step {step} is bad, since step {since}",
            since=since,
            is_divergence=True,
        )
        acts = is_bad and count % patience == 0
        assert detector.after_step(step, report(is_bad)) == (found if acts else None)
        saved = json.dumps(detector.get_state())


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


def counters_of(config):
    assert isinstance(config, schema.Config)
    return {"mine": Counter()}


def test_detectors_are_those_whose_threshold_is_set_and_others_follow():
    def made(**keys):
        section = schema.DivergenceSection(**keys)
        return callbacks.configured(schema.Config(divergence=section))

    def names(**keys):
        found = made(**keys)
        assert len(found) == len(found.get_state()["callbacks"])
        return [*found.get_state()["callbacks"]]

    own = f"{__name__}:counters_of"
    factors = {"divergence_loss_factor": 1.5, "divergence_gradient_norm_factor": 10.0}
    assert names(**factors) == []
    assert names(divergence_action="warn") == ["non_finite"]
    found = names(divergence_action="rollback", training_callbacks=own, **factors)
    assert found == ["non_finite", "loss_above_best", "gradient_norm", "mine"]
    several = made(divergence_action="stop", divergence_patience_steps=2, **factors)
    for step, loss in enumerate([1.0, 9.0, 9.0], 1):
        assert several.decision is None
        several.after_step(step, report(loss))
    assert (several.decision.action, several.decision.since) == (Action.STOP, 2)


def test_states_come_back_under_their_names_and_others_begin_anew(caplog):
    one = Counter()
    saved = callbacks.Callbacks({"one": one, "two": Counter(), "old": Counter()})
    saved.rollbacks, one.state["steps"] = 2, 6
    saved.after_step(1, REPORT)
    state = saved.get_state()
    # It is written while the run goes on.
    saved.after_step(2, REPORT)
    again = {name: Counter() for name in ("new", "two", "one")}
    restored = callbacks.Callbacks(again)
    again["new"].state["steps"] = 9
    with caplog.at_level(logging.WARNING):
        restored.set_state(json.loads(json.dumps(state)))
    assert [each.state["steps"] for each in again.values()] == [0, 1, 7]
    assert restored.rollbacks == 2
    assert "callbacks ['new'] are new" in caplog.text
    assert "the state of callbacks ['old']" in caplog.text
    with pytest.raises(errors.CheckpointError, match="the callback 'one' cannot"):
        restored.set_state({**state, "callbacks": {"one": {}}})


def test_strongest_action_and_first_bad_step_of_the_first_step_with_any_count():
    recorded = RecordedEvents()
    late = Counter(Action.ABORT, at=3)
    counters = {
        "warns": Counter(Action.WARN, since=0),
        "goes_back": Counter(Action.ROLLBACK, since=2),
        "stops": Counter(Action.STOP, since=3),
        "late": late,
    }
    several = callbacks.Callbacks(counters, emit=recorded)
    several.after_step(1, REPORT)
    assert several.decision is None
    for step in (2, 3):
        several.after_step(step, REPORT)
    several.after_evaluation(3, 1.5)
    expected = Detection(action=Action.STOP, why="stops: it counts", since=2)
    assert (several.decision, several.decided_step) == (expected, 2)
    assert (late.state["steps"], late.evaluations) == (3, 1)
    told = recorded.named("divergence_found")
    named = [(each["callback"], each["action"]) for each in told]
    assert named == [("warns", "warn"), ("goes_back", "rollback"), ("stops", "stop")]
    assert {(each["step"], each["why"]) for each in told} == {(2, "it counts")}


def distrusting(answer, **counters):
    """Callbacks that distrust steps up to 5, and when they asked to go back."""
    asked, distrusted = [], callbacks.Callbacks(counters)
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


NOTHING = "complete steps: none"


@pytest.mark.parametrize(
    ("first_due", "saved", "since", "options", "step"),
    [
        (0, [2, 4, 6, 8, 10], 10, {"before": 1, "most": 2, "margin": 3}, 4),
        # The state right before the bad step, then step 0.
        (4, [4], 5, {}, 4),
        (4, [4], 5, {"before": 1, "began_at": 4}, 0),
        (4, [4], 5, {"before": 1, "began_at": 0}, 4),
        (4, [4], 5, {"began_at": 4}, 4),
        # Nothing is saved, or only steps that are bad.
        (4, [], 1, {}, 0),
        (4, [], 3, {}, 0),
        (4, [4, 8], 4, {}, 0),
        # A good one was due, and is gone.
        (4, [], 6, {}, NOTHING),
        # Older steps were saved once: the beginning would lose them all.
        (4, [40], 41, {}, 40),
        (4, [40], 41, {"before": 1, "began_at": 40}, r"\[40\]\); keep more"),
        (0, [], 1, {}, NOTHING),
        (0, [7, 8], 10, {"margin": 3}, r"complete steps: \[7, 8\]\); keep more"),
        (0, [2, 4], 10, {"before": 2, "most": 2}, "run has already rolled back 2"),
    ],
)
def test_run_goes_back_to_the_newest_good_step_or_to_its_beginning(
    first_due, saved, since, options, step
):
    finding = Detection(action=Action.ROLLBACK, why="the loss is nan", since=since)
    options = {"before": 0, "first_due": first_due, **options}
    if isinstance(step, int):
        assert step_to_go_back_to(finding, saved, **options) == step
        return
    with pytest.raises(errors.DivergedError, match=step):
        step_to_go_back_to(finding, saved, **options)
