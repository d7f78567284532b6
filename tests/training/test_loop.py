"""The order in which a loop steps, logs, evaluates, validates and saves."""

import re

import numpy as np
import pytest

from elastic_ckpt.core import events
from elastic_ckpt.data import data_keys
from elastic_ckpt.training import callbacks, model, schema, trainer
from elastic_ckpt.training.callbacks import Action, Callbacks, Detection
from tests.processes.callbacks import Stateless


class Computed(float):
    """The loss of a step, which is computed once it is waited for."""

    def __new__(cls, calls, loss):
        made = super().__new__(cls, loss)
        made.calls = calls
        return made

    def block_until_ready(self):
        self.calls.append(f"wait {self:g}")
        return self


class Parts(Stateless):
    """Every part of a loop in one, noting who is called when.

    Args:
      count: of the batches.
      nan_at: the step from 0 whose loss is no number.
      asks: what a callback asks for after step 2.
      leaves: the steps after which the hosts are to leave, and how.
      at_end: whether the last step is due.
    """

    def __init__(self, *, count=100, nan_at=None, asks=None, leaves=(), at_end=True):
        self.calls, self._numbers = [], iter(range(count))
        self._nan_at, self._asks, self._at_end = nan_at, asks, at_end
        # Of a saver, a world, and batches that an evaluation begins anew.
        self.last_step, self._leaves = None, dict(leaves)
        self.begin = self.begin_at = lambda _: None

    def __next__(self):
        return np.int32(next(self._numbers))

    def reset(self):
        self._evaluation = iter([(6.0, 2), (9.0, 4)])

    def __iter__(self):
        return self._evaluation

    def leaving(self, done):
        # The supervisor hears of the first step when it is computed.
        assert "wait 0" in self.calls
        return self._leaves.get(done)

    # A program, whose state is the number of steps that are done.

    def step(self, state, batch):
        self.calls.append(f"step {batch}")
        loss = np.nan if batch == self._nan_at else batch
        return state + 1, model.StepReport(
            loss=Computed(self.calls, loss),
            example_id=None,
            row_digests=None,
            tokens=np.int32(8),
            learning_rate=np.float32(0.5),
            gradient_norm=np.float32(batch + 1),
        )

    def evaluate(self, state, batch):
        del state
        return batch

    def compiled(self, jitted, state, batch, *, step):
        del state, batch, step
        return jitted

    # A saver and a validation of replicas, to which step 2 is due.

    def is_due(self, step, *, last=False, is_saving=False):
        return step == 2 or (last and self._at_end) or is_saving

    def run(self, step, state, *, components):
        assert (state, components) == (step, {"callbacks": Callbacks().get_state()})
        self.calls.append(f"validate {step}")

    def save(self, step, state, *, last):
        assert state == step
        self.last_step = step if last else None
        self.calls.append(f"{'last' if last else 'save'} {step}")

    def record(self, step, metrics):
        self.calls.append(f"record {step} {metrics['eval_loss']}")

    # The directory of a run.

    def log(self, step, batch, *, loss, tokens, learning_rate, _gradient_norm, _rows):
        assert (tokens, learning_rate, _rows) == (8, 0.5, (None, None))
        assert (loss, _gradient_norm) == (batch, step) or np.isnan(loss)
        self.calls.append(f"log {step}")

    def emit(self, name, **fields):
        events.check(name, fields)
        if name != "save_blocked":
            self.calls.append(f"{name} {fields['step']}")

    # A callback.

    def after_step(self, step, report):
        self.calls.append(f"called {step}")
        assert report == callbacks.StepMetrics(
            loss=step - 1, gradient_norm=step, tokens=8, learning_rate=0.5
        )
        return self._asks if step == 2 else None

    def after_evaluation(self, step, loss):
        self.calls.append(f"called {step} {loss}")


def looped(parts, *, steps=4, **changes):
    """The end of a loop with these parts, but for those that are changed."""
    names = ("world", "run", "program", "saver", "batches", "parts")
    others = {
        "config": schema.Config(),
        "sizes": ((0, 8),),
        "evaluated": None,
        "validation": None,
        "callbacks": Callbacks(),
    }
    made = trainer.Trainer(**(dict.fromkeys(names, parts) | others | changes))
    ended = made.loop(0, start_step=0, steps=steps)
    assert ended.state == ended.step
    return ended


ONE = "step 0, log 1, wait 0, "
TWO = ONE + "step 1, log 2, wait 1, "
THREE = TWO + "save 2, step 2, log 3, "
# Steps are logged before they are saved, and one is ahead of the devices.
FOUR = THREE + "step 3, wait 2, log 4, wait 3, last 4"


@pytest.mark.parametrize(
    ("given", "calls", "step"),
    [
        ({}, FOUR, 4),
        ({"count": 0}, "data_ended 0", 0),
        ({"count": 1}, ONE + "data_ended 1, last 1", 1),
        # Step 2 was saved already, to the tiers that were due.
        ({"count": 2}, TWO + "save 2, data_ended 2, last 2", 2),
        ({"leaves": {1: "stop"}}, ONE + "last 1", 1),
        ({"leaves": {1: "stop"}, "at_end": False}, ONE + "last 1", 1),
        # Step 2 is due anyway, and is saved once.
        ({"leaves": {2: "resume"}}, TWO + "last 2", 2),
        ({"leaves": {4: "stop"}}, FOUR, 4),
    ],
)
@pytest.mark.parametrize("is_validated", [False, True])
def test_loop_logs_validates_saves_and_ends(given, calls, step, is_validated):
    parts, changes = Parts(**given), {}
    if is_validated:
        calls = re.sub(r"(?:save|last) (\d)", r"validate \1, \g<0>", calls)
        changes = {"validation": parts}
    ended = looped(parts, **changes)
    assert ", ".join(parts.calls) == calls
    is_stopped = step < 4 and "leaves" in given
    assert ended == trainer.Ended(step, step, is_stopped, None)


def called(calls):
    """The same with a callback, which sees each step once it is computed."""
    return re.sub(r"wait (\d)", lambda m: f"{m[0]}, called {int(m[1]) + 1}", calls)


@pytest.mark.parametrize(
    ("action", "is_divergence", "calls"),
    [
        (None, False, FOUR),
        (Action.WARN, False, FOUR),
        (Action.STOP, False, TWO + "last 2"),
        (Action.STOP, True, TWO[:-2]),
        (Action.ABORT, False, TWO[:-2]),
        (Action.ROLLBACK, False, TWO[:-2]),
    ],
)
def test_callbacks_see_each_step_before_it_is_saved_and_may_prevent_it(
    action, is_divergence, calls
):
    found = {"why": "it is", "since": 2, "is_divergence": is_divergence}
    parts = Parts(asks=action and Detection(action=action, **found))
    ended = looped(parts, callbacks=Callbacks({"one": parts}))
    assert ", ".join(parts.calls) == called(calls)
    if calls == FOUR:
        assert (ended.step, ended.finding) == (4, None)
    else:
        assert (ended.step, ended.is_stopped) == (2, False)
        assert (ended.finding.action, ended.finding.since) == (action, 2)


def evaluating(max_batches=0):
    data = data_keys.DataKeys(eval_interval=2, eval_steps=max_batches)
    return schema.Config(data=data)


@pytest.mark.parametrize(("max_batches", "loss"), [(0, 2.5), (1, 3.0)])
def test_evaluation_is_the_mean_over_all_targets_each_time_anew(max_batches, loss):
    parts = Parts()
    changes = {"callbacks": Callbacks({"one": parts}), "evaluated": parts}
    looped(parts, config=evaluating(max_batches), **changes)
    before = rf"evaluated \1, called \1 {loss}, record \1 {loss}, \g<0>"
    expected = re.sub(r"(?:save|last) (\d)", before, called(FOUR))
    assert ", ".join(parts.calls) == expected


@pytest.mark.parametrize("goes_back", [True, False])
def test_loop_that_distrusts_its_state_ends_without_a_save_or_an_evaluation(goes_back):
    parts, asked, none = Parts(nan_at=1), [], Callbacks()
    none.distrust_until(2, lambda step, why: asked.append((step, why)) or goes_back)
    changes = {"callbacks": none, "evaluated": parts, "config": evaluating()}
    ended = looped(parts, steps=3, **changes)
    assert asked == [(2, "the loss is nan")]
    calls = ONE + "step 1, log 2, wait nan"
    if not goes_back:
        calls += ", evaluated 2, record 2 2.5, save 2, step 2, log 3, wait 2, last 3"
    assert ", ".join(parts.calls) == calls
    action = ended.finding and ended.finding.action
    assert (ended.step, action) == ((2, Action.DISTRUST) if goes_back else (3, None))
