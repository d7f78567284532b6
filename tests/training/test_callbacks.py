import dataclasses
import logging

import pytest
from etils import epath

from elastic_ckpt.checkpoint.components import component
from elastic_ckpt.core import errors
from elastic_ckpt.training import callbacks, schema
from elastic_ckpt.training.callbacks import Action, Detection
from tests import iterator_contract
from tests.recorded_events import RecordedEvents

REPORT = callbacks.StepMetrics(loss=1.0, gradient_norm=2.0, tokens=8, learning_rate=0.1)


class Counter:
    """Counts steps, and has an opinion of one."""

    def __init__(self, action=None, *, at=2, since=1):
        self.steps = self.evaluations = 0
        self._action, self._at, self._since = action, at, since

    def after_step(self, step, report):
        assert report is REPORT
        self.steps += 1
        if self._action is None or step != self._at:
            return None
        return Detection(action=self._action, why="it counts", since=self._since)

    def after_evaluation(self, step, loss):
        del step, loss
        self.evaluations += 1

    def get_state(self):
        return {"steps": self.steps}

    def set_state(self, state):
        self.steps = state["steps"]


def made(**counters):
    return callbacks.Callbacks(counters)


def save(saved, directory):
    created = iterator_contract.Created(directory)
    iterator_contract.run(component.Component(saved).save(created))


def load(restored, directory):
    iterator_contract.run(component.Component(restored).load(epath.Path(directory)))


def test_states_come_back_under_their_names_in_any_order(tmp_path):
    one, two = Counter(), Counter()
    saved = made(one=one, two=two)
    saved.rollbacks = 2
    saved.after_step(1, REPORT)
    one.steps = 7
    save(saved, tmp_path)
    again = {"two": Counter(), "one": Counter()}
    restored = made(**again)
    load(restored, tmp_path)
    assert (again["one"].steps, again["two"].steps) == (7, 1)
    assert restored.rollbacks == 2


def test_renamed_and_new_callbacks_begin_anew_and_are_named(tmp_path, caplog):
    counter = Counter()
    counter.steps = 5
    save(made(old=counter, same=counter), tmp_path)
    new, same = Counter(), Counter()
    restored = made(new=new, same=same)
    new.steps = 9
    with caplog.at_level(logging.WARNING):
        load(restored, tmp_path)
    assert (new.steps, same.steps) == (0, 5)
    assert "callbacks ['new'] are new" in caplog.text
    assert "the state of callbacks ['old']" in caplog.text


def test_state_that_a_callback_refuses_is_named(tmp_path):
    save(made(one=Counter()), tmp_path)

    class Other(Counter):
        def set_state(self, state):
            self.steps = state["other"]

    with pytest.raises(errors.CheckpointError, match="the callback 'one' cannot"):
        load(made(one=Other()), tmp_path)


def test_of_several_findings_the_strongest_action_and_the_first_bad_step_count():
    recorded = RecordedEvents()
    several = callbacks.Callbacks(
        {
            "warns": Counter(Action.WARN, since=0),
            "goes_back": Counter(Action.ROLLBACK, since=2),
            "stops": Counter(Action.STOP, since=3),
        },
        emit=recorded,
    )
    several.after_step(1, REPORT)
    assert several.decision is None
    several.after_step(2, REPORT)
    assert several.decision == Detection(
        action=Action.STOP, why="stops: it counts", since=2
    )
    first, *others = recorded.named("divergence_found")
    assert len(others) == 2
    assert first == {
        "step": 2,
        "callback": "warns",
        "action": "warn",
        "why": "it counts",
    }


def test_finding_after_the_decision_is_ignored_though_callbacks_see_the_step():
    counter = Counter(Action.ABORT, at=3)
    both = made(first=Counter(Action.STOP, at=2, since=2), second=counter)
    for step in (1, 2, 3):
        both.after_step(step, REPORT)
    both.after_evaluation(3, 1.5)
    assert (both.decision.action, both.decided_step) == (Action.STOP, 2)
    assert (counter.steps, counter.evaluations) == (3, 1)


def configured(**keys):
    section = schema.DivergenceSection(**keys)
    return callbacks.configured(schema.Config(divergence=section))


def own_callbacks(config):
    assert isinstance(config, schema.Config)
    return {"mine": Counter()}


def test_run_has_detectors_and_the_callbacks_of_a_function():
    name = f"{__name__}:own_callbacks"
    both = configured(divergence_action="stop", training_callbacks=name)
    assert list(both.get_state()["callbacks"]) == ["non_finite", "mine"]
    assert not configured()


NAN = dataclasses.replace(REPORT, loss=float("nan"))


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
    assert asked == [(step, "the loss is nan")] * is_distrusted
    found = Detection(action=Action.DISTRUST, why="the loss is nan", since=5)
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
    class Diverged(Counter):
        def after_step(self, step, report):
            found = super().after_step(step, report)
            return found and dataclasses.replace(found, is_divergence=is_divergence)

    one, asked = distrusting(answer, one=Diverged(action))
    for step in (1, 2):
        one.after_step(step, REPORT)
    # What is no divergence may ask for it.
    is_asked = is_divergence or action is Action.DISTRUST
    assert asked == [(2, "one: it counts")] * is_asked
    decided = None if action in (Action.WARN, Action.DISTRUST) else action
    if answer and is_asked:
        decided = Action.DISTRUST
    assert (one.decision and one.decision.action) is decided
