import dataclasses
import json

import pytest

from elastic_ckpt.core import errors, events, jsonlog, storage
from elastic_ckpt.inspect import run_files
from elastic_ckpt.steps.step import Line
from elastic_ckpt.tiers.persistent import claims
from elastic_ckpt.training import journal, schema

RATES = {"tokens": 9, "learning_rate": 0.1}
STARTED = {
    "run": "a", "hosts": 1, "slices": 1, "devices": 1, "start_step": 3, "steps": 9,
}  # fmt: skip


@pytest.fixture
def config(tmp_path):
    run = schema.RunSection(run_name="a", base_output_directory=str(tmp_path))
    return dataclasses.replace(schema.Config(), run=run)


def recorded(config):
    path = f"{journal.path_of(config)}/{run_files.EVENTS}"
    log = jsonlog.read(path) if storage.absolute(path).exists() else []
    return [
        {name: value for name, value in event.items() if name != "time"}
        for event in log
    ]


def fail(config, error, *, steps=0, start=True):
    def run():
        with journal.kept(journal.path_of(config), events.nobody) as emit:
            if start:
                emit("run_started", **STARTED)
            for step in range(4, 4 + steps):
                emit("step", step=step, steps=9, loss=1.0, secs=1.0, **RATES)
            raise error

    with pytest.raises(type(error)):
        run()


@pytest.mark.parametrize(("steps", "step"), [(0, 3), (2, 5)])
def test_failure_is_kept_with_the_last_step_and_the_first_line(config, steps, step):
    fail(config, errors.RunError("host 1 failed\n| its log"), steps=steps)
    assert recorded(config) == [
        {"event": "run_started", **STARTED},
        {"event": "run_failed", "step": step, "why": "host 1 failed"},
    ]


@pytest.mark.parametrize(
    "error", [errors.StoppedError("late"), KeyboardInterrupt(), SystemExit(143)]
)
def test_run_that_was_ended_is_kept_as_stopped_without_a_save(config, error):
    fail(config, error, steps=1)
    assert recorded(config)[1:] == [{"event": "run_stopped", "step": 4, "saved": False}]


@pytest.mark.parametrize(
    ("events_", "stopped"),
    [
        # SIGTERM between two worlds, as after a handover: all hosts have saved.
        ([("world_left", {"step": 5})], {"step": 5, "saved": True}),
        ([("restored_from", {"step": 3})], {"step": 3, "saved": True}),
        ([("restored_from", {"step": 3}), ("step_done", {"step": 4})],
         {"step": 4, "saved": False}),
    ],
)  # fmt: skip
def test_a_run_that_is_ended_where_all_is_saved_says_so(config, events_, stopped):
    def run():
        with journal.kept(journal.path_of(config), lambda *_, **__: None) as emit:
            for name, fields in events_:
                emit(name, **fields)
            raise SystemExit(143)

    with pytest.raises(SystemExit):
        run()
    assert recorded(config)[-1] == {"event": "run_stopped", **stopped}


@pytest.mark.parametrize("error", [errors.DataError("refused"), SystemExit(143)])
def test_start_that_was_refused_leaves_no_event(config, error):
    fail(config, error, start=False)
    assert recorded(config) == []


def test_stop_that_was_asked_for_is_known(config):
    with journal.kept(journal.path_of(config), events.nobody) as emit:
        live = pytest.raises(errors.RunError, match="written by another live run")
        with live, journal.kept(journal.path_of(config), events.nobody):
            raise AssertionError("two at a time")
        assert not emit.is_stopped
        emit("run_stopped", step=4, saved=True)
        assert emit.is_stopped
    assert json.dumps(recorded(config)[0]) == (
        '{"event": "run_stopped", "step": 4, "saved": true}'
    )


def test_steps_that_an_earlier_start_has_trained_are_no_goodput_again(config):
    step = {"steps": 9, "loss": 1.0, "secs": 1.0, **RATES}
    for newest in (5, 6):
        path = journal.path_of(config)
        listeners = journal.listening(path, config.metrics)
        with journal.kept(
            journal.path_of(config), events.nobody, listeners=listeners
        ) as emit:
            emit("run_started", **STARTED)
            for number in range(4, newest + 1):
                emit("step", step=number, **step)
    lines = jsonlog.read(
        f"{journal.path_of(config)}/{run_files.METRICS}/host-00000.jsonl"
    )
    names = [line["metric"].rpartition("/")[2] for line in lines]
    # Step 5 in the first start, and step 6 in the second.
    assert names.count("productive_secs") == 2
    assert names.count("again_secs") == 1


def claim(config, save):
    start = claims.Claimant()
    steps = journal.steps_of(journal.path_of(config))
    writer = claims.Writer(steps, run="a", claimant=start)
    writer.begin()
    claimed = writer.claim(Line(save=save, parents=()))
    return {"world": claimed, "step": 0}


def two_starts(config):
    """A start that another one replaces, whose end comes before its own."""
    with journal.kept(journal.path_of(config), events.nobody) as old:
        old("run_started", **STARTED)
        old("world_claimed", **claim(config, "8"))
        old("saved", step=4, secs=1.0)
        old.sync()
        # Locks of network file systems may be lost, and object stores have none.
        storage.remove(f"{journal.path_of(config)}/{run_files.LOCK}")
        with journal.kept(journal.path_of(config), events.nobody) as new:
            new("world_claimed", **claim(config, "9"))
            old("saved", step=5, secs=1.0)
            new("run_finished", step=9, secs=1.0)
        old("run_failed", step=5, why="replaced")
    log = run_files.read_events(journal.path_of(config))
    return [event["event"] for event in log]


COUNTED = ["run_started", "world_claimed", "saved", "world_claimed", "run_finished"]


def test_run_whose_events_were_removed_meanwhile_fails(config):
    def run():
        with journal.kept(journal.path_of(config), events.nobody) as emit:
            emit("run_started", **STARTED)
            storage.remove(f"{journal.path_of(config)}/{run_files.EVENTS}")

    with pytest.raises(errors.RunError, match="was removed"):
        run()


@pytest.mark.parametrize("place", ["local", "gs"])
def test_events_of_a_replaced_start_are_not_read(steps_in, place):
    run = schema.RunSection(run_name="b", base_output_directory=steps_in(place))
    there = dataclasses.replace(schema.Config(), run=run)
    assert two_starts(there) == COUNTED
    # In a bucket they do not overwrite those of the other start.
    assert len(recorded(there)) == len(COUNTED) + 2 * (place == "local")


def test_events_of_a_start_that_was_replaced_before_it_claimed_a_world_are_not_read(
    config,
):
    directory = journal.path_of(config)
    with journal.kept(journal.path_of(config), events.nobody, is_locked=False) as first:
        first("world_claimed", **claim(config, "8"))
    with (
        journal.kept(
            journal.path_of(config), events.nobody, is_locked=False
        ) as cut_off,
        journal.kept(journal.path_of(config), events.nobody, is_locked=False) as new,
    ):
        cut_off("leader_found", machine=2, leader=2)
        new("world_claimed", **claim(config, "9"))
        cut_off("run_failed", step=5, why="too few slices")
    log = run_files.read_events(directory)
    assert [each["event"] for each in log] == [
        *("world_claimed", "leader_found", "world_claimed"),
    ]
