import numpy as np
import pytest

from elastic_ckpt.core import events
from elastic_ckpt.data import data_keys
from elastic_ckpt.training import batch_size, callbacks, loop, model


class Journal:
    """Every part of a loop in one, noting who is called when."""

    def __init__(self, due=()):
        self.calls = []
        self.compilations = []
        self.last_saves = []
        self._due = due

    def step(self, state, batch):
        self.calls.append(f"step {batch}")
        report = model.StepReport(
            loss=np.float32(batch),
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

    def begin(self, phase):
        pass

    def leaving(self, step):
        del step

    def compiled(self, jitted, state, batch, *, step):
        del state, batch
        assert jitted == self.step
        self.compilations.append(step)
        return jitted

    def is_due(self, step, *, last):
        return step in self._due or last

    def save(self, step, state, *, last):
        if last:
            self.last_saves.append(step)
        self.calls.append(f"save {step}: {state}")

    def record(self, step, metrics):
        self.calls.append(f"record {step}: {metrics}")

    def log(self, step, batch, *, loss, tokens, learning_rate, _gradient_norm, _rows):
        del loss
        assert (tokens, learning_rate, _rows) == (8, 0.5, (None, None))
        assert _gradient_norm == batch + 1
        self.calls.append(f"log {step}")

    def emit(self, name, **fields):
        events.check(name, fields)
        if name == "save_blocked":
            assert fields["secs"] >= 0
        else:
            self.calls.append(f"{name} {fields['step']}")


NO_CALLBACKS = callbacks.Callbacks().get_state()


class Batch(int):
    """A batch of so many rows, which is a number."""

    dtype = np.int32

    def __new__(cls, number, rows):
        made = super().__new__(cls, number)
        made.shape = (rows, 4)
        return made


class Batches:
    """So many batches."""

    def __init__(self, journal, count):
        self._journal = journal
        self._numbers = iter(range(count))
        self._rows = 8

    def __next__(self):
        return Batch(next(self._numbers), self._rows)

    def begin_at(self, step):
        pass

    def resize(self, global_batch_size):
        self._rows = global_batch_size
        self._journal.calls.append(f"resize {global_batch_size}")


@pytest.fixture
def journal():
    return Journal(due={2})


def looped(journal, *, steps=3, **changes):
    """The end of a loop whose parts are a journal, but for those that are changed."""
    parts = {
        **dict.fromkeys(("world", "run", "program", "saver"), journal),
        "data": data_keys.DataKeys(),
        "batches": Batches(journal, 100),
        "sizes": batch_size.Schedule(stages=((0, 8),)),
        "evaluated": None,
        "validation": None,
        "callbacks": callbacks.Callbacks(),
    }
    return loop.Loop(**(parts | changes)).run(0, start_step=0, steps=steps)


def run(journal, **changes):
    """The state and the step at the end."""
    ended = looped(journal, **changes)
    assert not ended.is_stopped
    return ended.state, ended.step


def test_each_step_is_logged_before_it_is_saved(journal):
    assert run(journal) == (3, 3)
    assert journal.calls == [
        *("step 0", "log 1", "step 1", "log 2", "save 2: 2"),
        *("step 2", "log 3", "save 3: 3"),
    ]


@pytest.mark.parametrize("count", [3, 100])
def test_state_is_validated_before_each_save(journal, count):
    class Validation:
        def is_due(self, step, *, is_saving):
            del step
            return is_saving

        def run(self, step, state, *, components):
            assert (state, components) == (step, {"callbacks": NO_CALLBACKS})
            journal.calls.append(f"validate {step}")

    run(journal, validation=Validation(), batches=Batches(journal, count), steps=4)
    calls = [call for call in journal.calls if call.startswith(("save", "validate"))]
    last = min(count, 4)
    expected = ["validate 2", "save 2: 2", f"validate {last}", f"save {last}: {last}"]
    assert calls == expected


@pytest.mark.parametrize(
    ("count", "end"),
    [
        (0, ["data_ended 0"]),
        (1, ["step 0", "log 1", "data_ended 1", "save 1: 1"]),
        # Step 2 was saved already, to the tiers that were due.
        (2, ["save 2: 2", "data_ended 2", "save 2: 2"]),
    ],
)
def test_last_step_of_data_that_ends_is_saved_as_the_last(journal, count, end):
    assert run(journal, batches=Batches(journal, count)) == (count, count)
    assert journal.calls[-len(end) :] == end
    assert journal.last_saves == [count] * bool(count)


def test_loop_is_at_most_one_step_ahead_of_the_devices(journal):
    class OnDevice:
        def __init__(self, step):
            self._step = step

        def block_until_ready(self):
            program.calls.append(f"wait {self._step}")
            return self

    class Program(Journal):
        def step(self, state, batch):
            _, report = super().step(state, batch)
            return state + 1, report._replace(loss=OnDevice(batch))

    program = Program()
    looped(program, run=journal, saver=None)
    order = ["step 0", "wait 0", "step 1", "step 2", "wait 1", "wait 2"]
    assert program.calls == order


def test_batch_size_changes_before_the_step_that_it_is_of(journal):
    sizes = batch_size.Schedule(stages=((0, 8), (1, 16), (2, 24)))
    run(journal, sizes=sizes, saver=None)
    calls = [call for call in journal.calls if not call.startswith("log")]
    assert calls == ["step 0", "resize 16", "step 1", "resize 24", "step 2"]


def test_first_step_is_compiled_and_the_first_of_each_new_batch_size(journal):
    run(journal)
    assert journal.compilations == [1]
    journal.compilations.clear()
    run(journal, sizes=batch_size.Schedule(stages=((0, 8), (2, 16))))
    assert journal.compilations == [1, 3]


@pytest.mark.parametrize("answer", ["stop", "resume"])
@pytest.mark.parametrize("step", [1, 2])
def test_loop_that_is_to_leave_saves_the_step_and_ends_there(journal, step, answer):
    journal.leaving = lambda done: answer if done == step else None
    ended = looped(journal)
    assert (ended.state, ended.step, ended.is_stopped) == (step, step, True)
    # Step 2 is due anyway, and is saved once.
    saves = [call for call in journal.calls if call.startswith("save")]
    assert saves == [f"save {step}: {step}"]
    assert journal.calls.index(f"log {step}") < journal.calls.index(*saves)


class Recorded:
    """A callback that notes its calls, and asks for an action at a step."""

    def __init__(self, journal, step=None, action=None):
        self._journal = journal
        self._step, self._action = step, action

    def after_step(self, step, report):
        self._journal.calls.append(f"called {step}: {report.loss}")
        assert report == callbacks.Report(
            loss=step - 1, gradient_norm=step, tokens=8, learning_rate=0.5
        )
        if step == self._step:
            return callbacks.Finding(action=self._action, why="it is", since=step)
        return None

    def after_evaluation(self, step, loss):
        self._journal.calls.append(f"evaluated {step}: {loss}")

    def get_state(self):
        return None

    def set_state(self, state):
        assert state is None


def called(journal, **options):
    recorded = callbacks.Callbacks({"recorded": Recorded(journal, **options)})
    ended = looped(journal, steps=4, callbacks=recorded)
    journal.calls = [call for call in journal.calls if not call.startswith("log")]
    return ended


def test_callbacks_are_called_one_step_behind_and_before_a_save(journal):
    assert called(journal).finding is None
    assert journal.calls == [
        "step 0",
        "called 1: 0.0",
        "step 1",
        "called 2: 1.0",
        "save 2: 2",
        "step 2",
        "step 3",
        "called 3: 2.0",
        "called 4: 3.0",
        "save 4: 4",
    ]


@pytest.mark.parametrize(
    ("action", "saves"),
    [
        (callbacks.Action.STOP, ["save 2: 2"]),
        (callbacks.Action.ABORT, []),
        (callbacks.Action.ROLLBACK, []),
        (callbacks.Action.WARN, ["save 2: 2", "save 4: 4"]),
    ],
)
def test_step_that_a_callback_found_to_be_bad_is_saved_by_stop_alone(
    journal, action, saves
):
    ended = called(journal, step=2, action=action)
    assert [call for call in journal.calls if call.startswith("save")] == saves
    if action is callbacks.Action.WARN:
        assert (ended.step, ended.finding) == (4, None)
        return
    assert (ended.step, ended.is_stopped) == (2, False)
    assert (ended.finding.action, ended.finding.since) == (action, 2)


class Evaluated:
    """Two batches a time, noting when it begins again."""

    def __init__(self):
        self.begun = 0

    def reset(self):
        self.begun += 1
        self._left = iter([(6.0, 2), (9.0, 4)])

    def __next__(self):
        return next(self._left)


@pytest.mark.parametrize(("max_batches", "loss"), [(0, 2.5), (1, 3.0)])
def test_evaluation_is_the_mean_over_all_targets_each_time_anew(
    journal, max_batches, loss
):
    batches = Evaluated()
    data = data_keys.DataKeys(eval_interval=2, eval_steps=max_batches)
    run(journal, evaluated=batches, data=data, steps=4)
    recorded = [call for call in journal.calls if call.startswith("record")]
    assert recorded == [f"record {step}: {{'eval_loss': {loss}}}" for step in (2, 4)]
    # Before the step is saved.
    assert journal.calls.index(recorded[0]) < journal.calls.index("save 2: 2")
    assert batches.begun == 2


@pytest.mark.parametrize("goes_back", [True, False])
def test_loop_that_distrusts_its_state_ends_without_a_save_or_an_evaluation(
    goes_back,
):
    class Program(Journal):
        def step(self, state, batch):
            state, report = super().step(state, batch)
            loss = np.float32(np.nan) if batch == 1 else report.loss
            return state, report._replace(loss=loss)

    program = Program(due={2})
    asked = []
    recorded = callbacks.Callbacks()
    recorded.distrust_until(2, lambda step, why: asked.append((step, why)) or goes_back)
    data = data_keys.DataKeys(eval_interval=2)
    parts = {"evaluated": Evaluated(), "data": data}
    ended = looped(program, callbacks=recorded, **parts)
    assert asked == [(2, "the loss is nan")]
    if goes_back:
        assert (ended.step, ended.finding.action) == (2, callbacks.Action.DISTRUST)
        assert program.calls == ["step 0", "log 1", "step 1", "log 2"]
    else:
        assert (ended.step, ended.finding) == (3, None)
        assert "evaluated 2" in program.calls
        assert "save 2: 2" in program.calls
