import numpy as np
import pytest

from elastic_ckpt.core import events, metrics
from elastic_ckpt.training import batch_size, callbacks, loop, train_step


class Journal:
    """Every part of a loop in one, noting who is called when."""

    def __init__(self, due=()):
        self.calls = []
        self.compilations = []
        self.last_saves = []
        self._due = due

    def step(self, state, batch):
        self.calls.append(f"step {batch}")
        report = train_step.StepReport(
            loss=np.float32(batch),
            example_id=None,
            row_digests=None,
            tokens=np.int32(8),
            learning_rate=np.float32(0.5),
            gradient_norm=np.float32(batch + 1),
        )
        return state + 1, report

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

    def append(self, step, report):
        self.calls.append(f"log {step}")
        return float(report.loss)

    def sync(self):
        self.calls.append("sync")

    def emit(self, name, **fields):
        events.check(name, fields)
        if name == "data_ended":
            self.calls.append(f"ended {fields['step']}")
            return
        if name == "save_blocked":
            assert fields["secs"] >= 0
            return
        assert name == "step"
        assert (fields["tokens"], fields["learning_rate"]) == (8, 0.5)
        self.calls.append(f"emit {fields['step']}/{fields['steps']}: {fields['loss']}")


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
        "program": journal,
        "emit": journal.emit,
        "compiled": journal.compiled,
        "batches": Batches(journal, 100),
        "sizes": batch_size.Schedule(stages=((0, 8),)),
        "log": journal,
        "saver": journal,
        "evaluation": None,
    }
    return loop.Loop(**(parts | changes)).run(0, start_step=0, steps=steps)


def run(journal, **changes):
    """The state and the step at the end."""
    ended = looped(journal, **changes)
    assert ended.is_stopped == ("leaving" in changes)
    return ended.state, ended.step


def test_what_is_saved_is_logged_and_durable_before(journal, recorded):
    barrier = journal.calls.append
    assert run(journal, barrier=lambda: barrier("all have compiled")) == (3, 3)
    # A thread writes what is logged.
    logged = [each for each in journal.calls if each.startswith(("log", "emit"))]
    assert logged == [
        *("log 0", "emit 1/3: 0.0", "log 1", "emit 2/3: 1.0"),
        *("log 2", "emit 3/3: 2.0"),
    ]
    assert [each for each in journal.calls if each not in logged] == [
        *("all have compiled", "step 0", "step 1", "sync", "save 2: 2"),
        *("step 2", "sync", "save 3: 3", "sync"),
    ]
    at = journal.calls.index
    assert at("emit 2/3: 1.0") < at("sync") < at("save 2: 2")
    assert at("emit 3/3: 2.0") < at("save 3: 3")
    assert recorded[metrics.TRAIN_GRADIENT_NORM] == [1.0, 2.0, 3.0]


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
        (0, ["sync", "ended 0", "sync"]),
        (1, ["emit 1/3: 0.0", "sync", "ended 1", "sync", "save 1: 1"]),
        # Step 2 was saved already, to the tiers that were due.
        (2, ["save 2: 2", "sync", "ended 2", "sync", "save 2: 2"]),
    ],
)
def test_last_step_of_data_that_ends_is_saved_as_the_last(journal, count, end):
    assert run(journal, batches=Batches(journal, count)) == (count, count)
    assert journal.calls[-5:] == end
    assert journal.last_saves == [count] * bool(count)


def test_host_that_writes_no_log_is_one_step_behind_the_devices_too(journal):
    class OnDevice:
        def __init__(self, step):
            self._step = step

        def block_until_ready(self):
            journal.calls.append(f"wait {self._step}")
            return self

    class Program(Journal):
        def step(self, state, batch):
            journal.calls.append(f"step {batch}")
            _, report = super().step(state, batch)
            return state + 1, report._replace(loss=OnDevice(batch))

    looped(Program(), log=None, saver=None)
    order = ["step 0", "wait 0", "step 1", "step 2", "wait 1", "wait 2"]
    assert journal.calls == order


def test_batch_size_changes_before_the_step_that_it_is_of(journal):
    sizes = batch_size.Schedule(stages=((0, 8), (1, 16), (2, 24)))
    run(journal, sizes=sizes, log=None, saver=None)
    assert journal.calls == ["step 0", "resize 16", "step 1", "resize 24", "step 2"]


def test_first_step_is_compiled_and_the_first_of_each_new_batch_size(journal):
    run(journal)
    assert journal.compilations == [1]
    journal.compilations.clear()
    run(journal, sizes=batch_size.Schedule(stages=((0, 8), (2, 16))))
    assert journal.compilations == [1, 3]


@pytest.mark.parametrize("step", [1, 2])
def test_loop_that_is_to_stop_saves_the_step_and_ends_there(journal, step):
    # Step 2 is due anyway, and is saved once.
    assert run(journal, leaving=lambda done: "stop" if done == step else None) == (
        step,
        step,
    )
    saves = [call for call in journal.calls if call.startswith("save")]
    assert saves == [f"save {step}: {step}"]
    assert journal.calls.index(f"log {step - 1}") < journal.calls.index(*saves)


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
    return looped(journal, steps=4, log=None, callbacks=recorded)


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
    recorded = []
    batches = Evaluated()
    evaluated = loop.Evaluation(
        evaluate=lambda _, batch: batch,
        batches=batches,
        interval=2,
        max_batches=max_batches,
        emit=lambda name, **fields: recorded.append(
            (name, fields["step"], fields["loss"])
        ),
    )
    run(journal, evaluation=evaluated)
    assert recorded == [("evaluated", 2, loss)]
    # Before the step is saved.
    evaluated_at = journal.calls.index(f"record 2: {{'eval_loss': {loss}}}")
    assert evaluated_at < journal.calls.index("save 2: 2")
    evaluated.run(4, None)
    assert recorded[-1] == ("evaluated", 4, loss)
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

    class Evaluation:
        def is_due(self, step):
            return step == 2

        def run(self, step, state):
            del state
            program.calls.append(f"evaluate {step}")
            return 1.0

    program = Program(due={2})
    asked = []
    recorded = callbacks.Callbacks()
    recorded.distrust_until(2, lambda step, why: asked.append((step, why)) or goes_back)
    # A host that does not write the log looks at the loss all the same.
    ended = looped(program, log=None, evaluation=Evaluation(), callbacks=recorded)
    assert asked == [(2, "the loss is nan")]
    if goes_back:
        assert (ended.step, ended.finding.action) == (2, callbacks.Action.DISTRUST)
        assert program.calls == ["step 0", "step 1"]
    else:
        assert (ended.step, ended.finding) == (3, None)
        assert "evaluate 2" in program.calls
        assert "save 2: 2" in program.calls
