import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_ckpt.application import configured as settings
from elastic_ckpt.config import schema
from elastic_ckpt.core import errors
from elastic_ckpt.training import divergence
from elastic_ckpt.training.callbacks import (
    Action,
    Finding,
    Report,
    Rollbacks,
    good_step,
)

RULES = {
    "non_finite": divergence.NonFinite(),
    "margin": divergence.AboveBest(smoothing=0.8, margin=0.5),
    "factor": divergence.AboveBest(smoothing=0.8, factor=1.2),
    "scales": divergence.TwoScales(fast=0.5, slow=0.9, margin=0.3),
    "windows": divergence.Windows(steps=3, margin=0.4),
    "gradient": divergence.GradientSpike(smoothing=0.9, factor=3.0),
}


def report(loss, gradient_norm=1.0):
    return Report(loss=loss, gradient_norm=gradient_norm, tokens=8, learning_rate=0.01)


def bad_steps(rule, values, *, of_gradient=False):
    """The steps, from 1, that a rule finds to be bad."""
    state, bad = rule.begin(), []
    for step, value in enumerate(values, start=1):
        state, why = rule.after(
            state, report(1.0, value) if of_gradient else report(value)
        )
        if why:
            bad.append(step)
    return bad


numbers = st.floats(0, 20) | st.sampled_from([math.nan, math.inf, -math.inf])
histories = st.lists(st.tuples(numbers, numbers), max_size=30)


@pytest.mark.parametrize("name", RULES)
@given(history=histories, cut=st.integers(0, 30), patience=st.integers(1, 4))
def test_a_detector_that_is_restored_decides_as_if_nothing_had_happened(
    name, history, cut, patience
):
    def make():
        return divergence.Detector(
            RULES[name], action=Action.STOP, patience=patience, warmup=2
        )

    whole, before, after = make(), make(), make()
    expected = [
        whole.after_step(step, report(*values))
        for step, values in enumerate(history, 1)
    ]
    actual = []
    for step, values in enumerate(history, 1):
        if step == cut + 1:
            after.set_state(json.loads(json.dumps(before.get_state())))
        detector = before if step <= cut else after
        actual.append(detector.after_step(step, report(*values)))
    assert actual == expected
    assert make().get_state() == make().get_state()


@pytest.mark.parametrize("name", RULES)
@given(start=st.floats(0.1, 20), ratios=st.lists(st.floats(0.5, 1.0), max_size=30))
def test_a_loss_that_only_falls_is_never_bad(name, start, ratios):
    values = [start]
    for ratio in ratios:
        values.append(values[-1] * ratio)
    of_gradient = name == "gradient"
    assert bad_steps(RULES[name], values, of_gradient=of_gradient) == []


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_value_that_is_not_finite_is_bad_at_once_and_enters_no_average(name, value):
    of_gradient = name == "gradient"
    assert bad_steps(
        RULES[name], [1.0, 1.0, value, 1.0, 1.0], of_gradient=of_gradient
    ) == [3]


def test_a_gradient_that_is_not_finite_is_bad_though_the_loss_is_finite():
    rule = divergence.NonFinite()
    _, why = rule.after(rule.begin(), report(1.0, math.nan))
    assert why == "the gradient norm is nan"


def test_the_smoothed_loss_is_compared_with_its_best():
    # Their averages, corrected for the begin: 2, 1.33, 1.14, 2.67, 3.35, 1.90
    losses = [2.0, 1.0, 1.0, 4.0, 4.0, 0.5]
    rule = divergence.AboveBest(smoothing=0.5, margin=1.0)
    assert bad_steps(rule, losses) == [4, 5]
    rule = divergence.AboveBest(smoothing=0.5, factor=2.5)
    assert bad_steps(rule, losses) == [5]
    # Either limit is enough; without any, no loss is bad.
    rule = divergence.AboveBest(smoothing=0.5, factor=2.5, margin=1.0)
    assert bad_steps(rule, losses) == [4, 5]
    assert bad_steps(divergence.AboveBest(smoothing=0.5), [1.0, 100.0]) == []


def test_a_fast_average_is_compared_with_a_slow_one():
    rule = divergence.TwoScales(fast=0.0, slow=0.9, margin=0.5)
    assert bad_steps(rule, [1.0] * 10 + [2.0, 2.0, 1.0]) == [11, 12]
    # In the long run the slow one follows.
    assert bad_steps(rule, [1.0] * 10 + [2.0] * 100)[-1] < 30


def test_a_window_is_compared_with_the_one_before():
    rule = divergence.Windows(steps=2, margin=0.5)
    assert bad_steps(rule, [1.0, 1.0, 1.0, 2.0, 2.0, 2.0, 2.0]) == [5]


def test_a_single_spike_does_not_hide_the_next_and_a_lasting_norm_is_no_spike():
    rule = divergence.GradientSpike(smoothing=0.9, factor=5.0)
    norms = [1.0] * 10 + [100.0] + [1.0] * 5 + [100.0]
    assert bad_steps(rule, norms, of_gradient=True) == [11, 17]
    lasting = bad_steps(rule, [1.0] * 10 + [100.0] * 50, of_gradient=True)
    assert lasting[0] == 11
    assert lasting[-1] < 40


class Scripted:
    """A rule that finds the losses 1 to be bad."""

    def begin(self):
        return {}

    def after(self, state, report):
        return state, "it is bad" * int(report.loss)


def findings(losses, **options):
    detector = divergence.Detector(Scripted(), action=Action.ROLLBACK, **options)
    acted = [
        detector.after_step(step, report(loss)) for step, loss in enumerate(losses, 1)
    ]
    return {step: f.since for step, f in enumerate(acted, 1) if f is not None}


def test_a_detector_acts_after_its_patience_and_again_as_long_as_steps_are_bad():
    assert findings([0, 1, 1, 0, 1, 1, 1, 1, 1, 1, 0], patience=3) == {7: 5, 10: 5}
    assert findings([1, 1, 1, 1, 0, 1], warmup=3) == {4: 4, 6: 6}
    assert findings([0, 1]) == {2: 2}


def test_a_finding_says_what_and_since_when():
    detector = divergence.Detector(Scripted(), action=Action.WARN)
    assert detector.after_step(7, report(1)) == Finding(
        action=Action.WARN,
        why="it is bad, since step 7",
        since=7,
        is_divergence=True,
    )


def test_the_state_of_another_rule_is_refused():
    saved = divergence.Detector(RULES["windows"], action=Action.STOP).get_state()
    other = divergence.Detector(RULES["margin"], action=Action.STOP)
    with pytest.raises(ValueError, match="another rule"):
        other.set_state(saved)


def configured(**keys):
    return settings.detectors(schema.DivergenceSection(**keys))


def test_a_detector_whose_threshold_is_0_does_not_exist():
    assert configured() == {}
    assert list(configured(divergence_action="warn")) == ["non_finite"]
    everything = configured(
        divergence_action="rollback",
        divergence_non_finite=False,
        divergence_loss_factor=1.5,
        divergence_slow_margin=1.0,
        divergence_window_margin=1.0,
        divergence_gradient_norm_factor=10.0,
    )
    assert list(everything) == [
        "loss_above_best",
        "loss_of_late",
        "loss_windows",
        "gradient_norm",
    ]


@pytest.mark.parametrize(("fast", "slow"), [(0.9, 1.0), (0.99, 0.9)])
def test_weights_that_are_no_weights_are_refused(fast, slow):
    with pytest.raises(errors.ConfigError, match="set the first below the second"):
        configured(
            divergence_action="warn",
            divergence_loss_smoothing=fast,
            divergence_slow_smoothing=slow,
        )


@given(
    saved=st.lists(st.integers(1, 40), unique=True),
    since=st.integers(1, 42),
    margin=st.integers(0, 5),
)
def test_the_newest_step_whose_own_loss_was_good_is_chosen(saved, since, margin):
    step = good_step(saved, since=since, margin=margin)
    # The loss of the state after n steps is that of step n + 1.
    good = [s for s in saved if s + 1 < since - margin]
    assert step == (max(good) if good else None)


ROLLBACKS = Rollbacks(most=2, margin=3)
FINDING = Finding(action=Action.ROLLBACK, why="the loss is nan", since=10)


def test_a_run_goes_back_so_often():
    saved = [2, 4, 6, 8, 10]
    assert ROLLBACKS.choose(FINDING, saved, before=1) == 4
    with pytest.raises(errors.DivergedError, match=r"nan, and the run has gone back 2"):
        ROLLBACKS.choose(FINDING, saved, before=2)


def test_a_run_without_a_good_step_says_which_there_are():
    with pytest.raises(
        errors.DivergedError, match=r"complete steps are \[7, 8\]\. Keep more"
    ):
        ROLLBACKS.choose(FINDING, [7, 8], before=0)


def chosen(saved, since, *, first_due=4, **options):
    finding = Finding(action=Action.ROLLBACK, why="the loss is nan", since=since)
    rollbacks = Rollbacks(first_due=first_due)
    return rollbacks.choose(finding, saved, **{"before": 0, **options})


def test_at_the_first_save_a_run_goes_back_to_the_step_before_or_to_the_beginning():
    # The state right before the bad step, then step 0.
    assert chosen([4], since=5) == 4
    assert chosen([4], since=5, before=1, began_at=4) == 0
    assert chosen([4], since=5, before=1, began_at=0) == 4
    # Nothing is saved, or only steps that are bad.
    assert chosen([], since=1) == 0
    assert chosen([], since=3) == 0
    assert chosen([4, 8], since=4) == 0
    # Older steps were saved once: going back to the beginning would lose them all.
    assert chosen([40], since=41) == 40
    with pytest.raises(
        errors.DivergedError, match=r"complete steps are \[40\]\. Keep more"
    ):
        chosen([40], since=41, before=1, began_at=40)
    with pytest.raises(errors.DivergedError, match="complete steps are none"):
        chosen([], since=1, first_due=0)
