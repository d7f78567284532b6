import dataclasses
import json

import pytest

from elastic_ckpt.application import journal, run_directory
from elastic_ckpt.config import schema
from elastic_ckpt.core import errors, events, storage

RATES = {"tokens": 9, "learning_rate": 0.1}
STARTED = {
    "run": "a", "hosts": 1, "slices": 1, "devices": 1, "start_step": 3, "steps": 9,
}  # fmt: skip


@pytest.fixture
def config(tmp_path):
    run = schema.RunSection(run_name="a", base_output_directory=str(tmp_path))
    return dataclasses.replace(schema.Config(), run=run)


def recorded(config):
    log = storage.read_log(f"{run_directory.path_of(config)}/{run_directory.EVENTS}")
    return [
        {name: value for name, value in event.items() if name != "time"}
        for event in log
    ]


def fail(config, error, *, steps=0, start=True):
    def run():
        with journal.kept(config, events.nobody) as emit:
            if start:
                emit("run_started", **STARTED)
            for step in range(4, 4 + steps):
                emit("step", step=step, steps=9, loss=1.0, secs=1.0, **RATES)
            raise error

    with pytest.raises(type(error)):
        run()


@pytest.mark.parametrize(("steps", "step"), [(0, 3), (2, 5)])
def test_a_failure_is_kept_with_the_last_step_and_the_first_line(config, steps, step):
    fail(config, errors.RunError("host 1 failed\n| its log"), steps=steps)
    assert recorded(config) == [
        {"event": "run_started", **STARTED},
        {"event": "run_failed", "step": step, "why": "host 1 failed"},
    ]


@pytest.mark.parametrize(
    "error", [errors.StoppedError("late"), KeyboardInterrupt(), SystemExit(143)]
)
def test_a_run_that_was_ended_is_kept_as_stopped_without_a_save(config, error):
    fail(config, error, steps=1)
    assert recorded(config)[1:] == [{"event": "run_stopped", "step": 4, "saved": False}]


@pytest.mark.parametrize("error", [errors.DataError("refused"), SystemExit(143)])
def test_a_start_that_was_refused_leaves_no_event(config, error):
    fail(config, error, start=False)
    assert recorded(config) == []


def test_a_stop_that_was_asked_for_is_known(config):
    with journal.kept(config, events.nobody) as emit:
        assert not emit.is_stopped
        emit("run_stopped", step=4, saved=True)
        assert emit.is_stopped
    assert json.dumps(recorded(config)[0]) == (
        '{"event": "run_stopped", "step": 4, "saved": true}'
    )


def test_a_run_has_one_journal_at_a_time(config):
    with (
        journal.kept(config, events.nobody),
        pytest.raises(errors.RunError, match="is being written by another live run"),
        journal.kept(config, events.nobody),
    ):
        raise AssertionError("two at a time")
