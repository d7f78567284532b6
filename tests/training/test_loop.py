import numpy as np
import pytest

from elastic_ckpt.core import events
from elastic_ckpt.data import data_keys
from elastic_ckpt.training import callbacks, model, schema, trainer
from elastic_ckpt.training.callbacks import Action
from tests.processes.callbacks import Stateless

NO_CALLBACKS = callbacks.Callbacks().get_state()


class Computed(float):
    """The loss of a step, which is computed once it is waited for."""

    def __new__(cls, parts, loss):
        made = super().__new__(cls, loss)
        made.parts = parts
        return made

    def block_until_ready(self):
        self.parts.calls.append(f"wait {self}")
        return self


class Parts:
    """Every part of a loop in one, noting who is called when."""

    def __init__(self, count=100, nan_at=None):
        self.calls = []
        self.last_step = None
        self.evaluations = 0
        self._numbers = iter(range(count))
        self._nan_at = nan_at

    def called(self, *kinds):
        return [call for call in self.calls if call.startswith(kinds)]

    # Batches, for training and for an evaluation.

    def __next__(self):
        return np.int32(next(self._numbers))

    def begin_at(self, step):
        pass

    def reset(self):
        self.evaluations += 1

    def __iter__(self):
        return iter([(6.0, 2), (9.0, 4)])

    # A program, whose state is the number of steps that are done.

    def step(self, state, batch):
        self.calls.append(f"step {batch}")
        report = model.StepReport(
            loss=Computed(self, np.nan if batch == self._nan_at else batch),
            example_id=None,
            row_digests=None,
            tokens=np.int32(8),
            learning_rate=np.float32(0.5),
            gradient_norm=np.float32(batch + 1),
        )
        return state + 1, report

    def evaluate(self, state, batch):
        del state
        return batch

    # A world.

    def begin(self, phase):
        pass

    def leaving(self, step):
        del step

    def compiled(self, jitted, state, batch, *, step):
        del state, batch, step
        return jitted

    # A saver.

    def is_due(self, step, *, last):
        return step == 2 or last

    def save(self, step, state, *, last):
        self.last_step = step if last else None
        self.calls.append(f"save {step}: {state}")

    def record(self, step, metrics):
        self.calls.append(f"record {step}: {metrics}")

    # The directory of a run.

    def log(self, step, batch, *, loss, tokens, learning_rate, _gradient_norm, _rows):
        del loss
        assert (tokens, learning_rate, _rows) == (8, 0.5, (None, None))
        assert _gradient_norm == batch + 1
        self.calls.append(f"log {step}")

    def emit(self, name, **fields):
        events.check(name, fields)
        if name != "save_blocked":
            self.calls.append(f"{name} {fields['step']}")


def looped(parts, *, steps=4, **changes):
    """The end of a loop with these parts, but for those that are changed."""
    names = ("world", "run", "program", "saver", "batches", "parts")
    others = {
        "config": schema.Config(),
        "sizes": ((0, 8),),
        "evaluated": None,
        "validation": None,
        "callbacks": callbacks.Callbacks(),
    }
    made = trainer.Trainer(**(dict.fromkeys(names, parts) | others | changes))
    return made.loop(0, start_step=0, steps=steps)


def test_steps_are_logged_before_they_are_saved_and_one_is_ahead_of_the_devices():
    parts = Parts()
    ended = looped(parts)
    assert (ended.state, ended.step, ended.is_stopped) == (4, 4, False)
    assert parts.calls == [
        *("step 0", "log 1", "wait 0.0"),
        *("step 1", "log 2", "wait 1.0", "save 2: 2"),
        *("step 2", "log 3"),
        *("step 3", "wait 2.0", "log 4", "wait 3.0", "save 4: 4"),
    ]


@pytest.mark.parametrize("count", [3, 100])
def test_state_is_validated_before_each_save(count):
    class Validation:
        def is_due(self, step, *, is_saving):
            del step
            return is_saving

        def run(self, step, state, *, components):
            assert (state, components) == (step, {"callbacks": NO_CALLBACKS})
            parts.calls.append(f"validate {step}")

    parts = Parts(count=count)
    looped(parts, validation=Validation())
    last = min(count, 4)
    expected = ["validate 2", "save 2: 2", f"validate {last}", f"save {last}: {last}"]
    assert parts.called("save", "validate") == expected


@pytest.mark.parametrize(
    ("count", "end"),
    [
        (0, ["data_ended 0"]),
        (1, ["step 0", "data_ended 1", "save 1: 1"]),
        # Step 2 was saved already, to the tiers that were due.
        (2, ["save 2: 2", "data_ended 2", "save 2: 2"]),
    ],
)
def test_last_step_of_data_that_ends_is_saved_as_the_last(count, end):
    parts = Parts(count=count)
    ended = looped(parts)
    assert (ended.state, ended.step) == (count, count)
    assert parts.called("step", "data", "save")[-len(end) :] == end
    assert parts.last_step == (count or None)


@pytest.mark.parametrize("answer", ["stop", "resume"])
@pytest.mark.parametrize("step", [1, 2])
def test_loop_that_is_to_leave_saves_the_step_and_ends_there(step, answer):
    parts = Parts()
    parts.leaving = lambda done: answer if done == step else None
    ended = looped(parts, steps=3)
    assert (ended.state, ended.step, ended.is_stopped) == (step, step, True)
    # Step 2 is due anyway, and is saved once.
    assert parts.called("save") == [f"save {step}: {step}"]


class Recorded(Stateless):
    """A callback that notes its calls, and asks for an action at step 2."""

    def __init__(self, parts, action=None):
        self._parts, self._action = parts, action

    def after_step(self, step, report):
        self._parts.calls.append(f"called {step}: {report.loss}")
        assert report == callbacks.StepMetrics(
            loss=step - 1, gradient_norm=step, tokens=8, learning_rate=0.5
        )
        if step == 2 and self._action:
            return callbacks.Detection(action=self._action, why="it is", since=step)
        return None

    def after_evaluation(self, step, loss):
        self._parts.calls.append(f"called after {step}: {loss}")


@pytest.mark.parametrize(
    ("action", "saves"),
    [
        (None, ["save 2: 2", "save 4: 4"]),
        (Action.WARN, ["save 2: 2", "save 4: 4"]),
        (Action.STOP, ["save 2: 2"]),
        (Action.ABORT, []),
        (Action.ROLLBACK, []),
    ],
)
def test_callbacks_see_each_step_before_it_is_saved_and_may_prevent_it(action, saves):
    parts = Parts()
    called = callbacks.Callbacks({"one": Recorded(parts, action)})
    ended = looped(parts, callbacks=called)
    assert parts.called("save") == saves
    if action in (None, Action.WARN):
        assert (ended.step, ended.finding) == (4, None)
        assert parts.called("step", "called", "save") == [
            *("step 0", "called 1: 0.0", "step 1", "called 2: 1.0", "save 2: 2"),
            *("step 2", "step 3", "called 3: 2.0", "called 4: 3.0", "save 4: 4"),
        ]
        return
    assert (ended.step, ended.is_stopped) == (2, False)
    assert (ended.finding.action, ended.finding.since) == (action, 2)


@pytest.mark.parametrize(("max_batches", "loss"), [(0, 2.5), (1, 3.0)])
def test_evaluation_is_the_mean_over_all_targets_each_time_anew(max_batches, loss):
    parts = Parts()
    data = data_keys.DataKeys(eval_interval=2, eval_steps=max_batches)
    config = schema.Config(data=data)
    called = callbacks.Callbacks({"one": Recorded(parts)})
    looped(parts, evaluated=parts, config=config, callbacks=called)
    # Before the step is saved.
    assert parts.called("evaluated", "called after", "record", "save") == [
        line
        for step in (2, 4)
        for line in (
            f"evaluated {step}",
            f"called after {step}: {loss}",
            f"record {step}: {{'eval_loss': {loss}}}",
            f"save {step}: {step}",
        )
    ]
    assert parts.evaluations == 2


@pytest.mark.parametrize("goes_back", [True, False])
def test_loop_that_distrusts_its_state_ends_without_a_save_or_an_evaluation(goes_back):
    parts, asked = Parts(nan_at=1), []
    none = callbacks.Callbacks()
    none.distrust_until(2, lambda step, why: asked.append((step, why)) or goes_back)
    config = schema.Config(data=data_keys.DataKeys(eval_interval=2))
    ended = looped(parts, steps=3, callbacks=none, evaluated=parts, config=config)
    assert asked == [(2, "the loss is nan")]
    calls = [] if goes_back else ["evaluated 2", "save 2: 2", "save 3: 3"]
    assert parts.called("evaluated", "save") == calls
    if goes_back:
        assert (ended.step, ended.finding.action) == (2, Action.DISTRUST)
    else:
        assert (ended.step, ended.finding) == (3, None)
