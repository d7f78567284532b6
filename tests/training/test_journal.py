import contextlib
import dataclasses
import functools
import sys
import threading

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from elastic_ckpt.core import errors, jsonlog, metrics, storage
from elastic_ckpt.inspect import run_files
from elastic_ckpt.monitoring import prometheus
from elastic_ckpt.steps.step import Line
from elastic_ckpt.tiers.persistent import claims
from elastic_ckpt.training import journal, schema
from tests.monitoring import event_file

STARTED = {"run": "a", "hosts": 1, "slices": 1, "devices": 1}
BEGUN = ("run_started", {**STARTED, "start_step": 3, "steps": 9})
RATES = {"loss": 1.0, "secs": 1.0, "tokens": 9, "learning_rate": 0.1}


def step(number):
    return "step", {"step": number, "steps": 9, **RATES}


def tell(emit, *events_):
    for name, fields in events_:
        emit(name, **fields)


def configured(directory, **sections):
    run = schema.RunSection(run_name="a", base_output_directory=str(directory))
    return dataclasses.replace(schema.Config(), run=run, **sections)


@pytest.fixture
def config(tmp_path):
    return configured(tmp_path)


def kept(config, **options):
    return journal.kept(journal.path_of(config), lambda *_, **__: None, **options)


def listening(config):
    return journal.listening(journal.path_of(config), config.metrics)


def recorded(config):
    path = f"{journal.path_of(config)}/{run_files.EVENTS}"
    log = jsonlog.read(path) if storage.absolute(path).exists() else []
    return [{k: v for k, v in event.items() if k != "time"} for event in log]


def stopped(step, *, saved):
    return {"event": "run_stopped", "step": step, "saved": saved}


# How many steps are done, and which one is saved.
TOLD = ("run_started", "step", "step_done", "saved", "restored_from", "world_left")
ENDS = [
    errors.RunError("host 1 failed\n| its log"),
    *(errors.StoppedError("late"), KeyboardInterrupt(), SystemExit(143)),
]


@given(
    told=st.lists(st.tuples(st.sampled_from(TOLD), st.integers(3, 4)), max_size=4),
    error=st.sampled_from(ENDS),
    first_step=st.integers(0, 1),
)
@example([("step", 4), ("saved", 3)], SystemExit(143), 0)
@settings(max_examples=60)
def test_end_of_a_run_is_kept_with_its_last_step(
    tmp_path_factory, told, error, first_step
):
    config, done, saved = configured(tmp_path_factory.mktemp("run")), 3, -1
    with pytest.raises(type(error)), kept(config, first_step=first_step) as emit:  # noqa: PT012
        tell(emit, BEGUN)
        for name, number in told:
            is_start, (_, fields) = name == "run_started", step(number)
            emit(name, **({**STARTED, "start_step": number} if is_start else fields))
            done = done if name == "saved" else number
            if name in ("saved", "restored_from"):
                saved = number + 1 - first_step
            elif name == "world_left":
                # All hosts have saved.
                saved = number
        raise error
    first, *_, last = recorded(config)
    assert first == {"event": BEGUN[0], **BEGUN[1]}
    # The first line.
    failed = {"event": "run_failed", "step": done, "why": "host 1 failed"}
    is_failed = "host" in str(error)
    assert last == (failed if is_failed else stopped(done, saved=saved >= done))
    assert not any(each["event"].startswith("step") for each in recorded(config))


@pytest.mark.parametrize("error", [errors.DataError("refused"), SystemExit(143)])
def test_start_that_was_refused_leaves_no_event(config, error):
    with pytest.raises(type(error)), kept(config):
        raise error
    assert recorded(config) == []


def test_run_is_locked_and_a_stop_that_was_asked_for_is_known(config):
    with kept(config) as emit:
        live = pytest.raises(errors.RunError, match="written by another live run")
        with live, kept(config):
            raise AssertionError("two at a time")
        assert not emit.is_stopped
        emit("run_stopped", step=4, saved=True)
        assert emit.is_stopped
    assert recorded(config) == [stopped(4, saved=True)]


def test_stop_is_in_the_bucket_before_the_process_exits(bucket):
    config = configured(bucket)
    with kept(config) as told:
        tell(told, BEGUN)
        told.sync()
        told.stopped_early()
        assert recorded(config)[-1]["event"] == "run_stopped"


def test_events_reach_a_bucket_though_an_upload_has_failed(bucket, monkeypatch):
    sync, failures, synced = jsonlog.JsonLog.sync, [OSError("busy")], threading.Event()

    def failing_once(log):
        if failures:
            raise failures.pop()
        sync(log)
        synced.set()

    monkeypatch.setattr(jsonlog.JsonLog, "sync", failing_once)
    monkeypatch.setattr(journal, "_SYNC_SECS", 0.01)
    config = configured(bucket)
    with kept(config) as told:
        tell(told, BEGUN)
        assert synced.wait(60)
        assert recorded(config)


def test_steps_that_an_earlier_start_has_trained_are_no_goodput_again(config):
    for newest in (5, 6, 7):
        with kept(config, listeners=listening(config)) as emit:
            tell(emit, BEGUN, *map(step, range(4, newest + 1)))
    file = f"{journal.path_of(config)}/{run_files.METRICS}/host-00000.jsonl"
    found = [line["metric"].rpartition("/")[2] for line in jsonlog.read(file)]
    # Each start has one new step.
    assert found.count("productive_secs") == 3
    assert found.count("again_secs") == 3


def claim(config, save):
    start = claims.Claimant()
    steps = journal.steps_of(journal.path_of(config))
    write_claim = claims.WriteClaim(steps, run="a", claimant=start)
    write_claim.begin()
    claimed = write_claim.claim(Line(save=save, parents=()))
    return "world_claimed", {"world": claimed, "step": 0}


def names(config):
    return [each["event"] for each in run_files.read_events(journal.path_of(config))]


SAVED = ("saved", {"step": 4, "secs": 1.0})


def test_run_whose_events_were_removed_meanwhile_fails(config):
    removed = pytest.raises(errors.RunError, match="was removed")
    with removed, kept(config) as emit:
        tell(emit, BEGUN)
        storage.remove(f"{journal.path_of(config)}/{run_files.EVENTS}")


@pytest.mark.parametrize("place", ["local", "gs"])
def test_events_of_a_replaced_start_are_not_read(steps_in, place):
    config = configured(steps_in(place))
    with kept(config) as old:
        tell(old, BEGUN, claim(config, "8"), SAVED)
        old.sync()
        # Locks of network file systems may be lost, and object stores have none.
        storage.remove(f"{journal.path_of(config)}/{run_files.LOCK}")
        with kept(config) as new:
            tell(new, claim(config, "9"))
            tell(old, SAVED)
            new("run_finished", step=9, secs=1.0)
        # Its end comes before that of the one that replaced it.
        old("run_failed", step=5, why="replaced")
    read = ["run_started", "world_claimed", "saved", "world_claimed", "run_finished"]
    assert names(config) == read
    # In a bucket they do not overwrite those of the other start.
    assert len(recorded(config)) == len(read) + 2 * (place == "local")


def test_events_of_a_start_that_was_replaced_before_it_claimed_a_world_are_not_read(
    config,
):
    unlocked = functools.partial(kept, config, is_locked=False)
    with unlocked() as first:
        tell(first, claim(config, "8"))
    with unlocked() as cut_off, unlocked() as new:
        cut_off("leader_found", machine=2, leader=2)
        tell(new, claim(config, "9"))
        cut_off("run_failed", step=5, why="too few slices")
    assert names(config) == ["world_claimed", "leader_found", "world_claimed"]


# The metrics of a process.


def test_processes_of_a_machine_have_files_and_ports_of_their_own(
    tmp_path, monkeypatch
):
    ports = []

    def serving(*, port, interface):
        return contextlib.nullcontext(ports.append((port, interface)))

    monkeypatch.setattr(prometheus, "serving", serving)
    config = configured(
        tmp_path,
        metrics=schema.MetricsSection(enable_tensorboard=True, prometheus_port=9100),
        world=schema.WorldSection(hosts=4),
        elastic=schema.ElasticSection(elastic_machines=2),
    )
    with contextlib.ExitStack() as listeners:
        for host in (0, 3, None):
            each = journal.listening_on_machine(config, host=host)
            listeners.enter_context(each)
        metrics.TRAIN_STEPS.record(40)
        metrics.GOODPUT.record(75)
    # The ports of the hosts of each machine are in a row, and the supervisor's follows.
    interface = config.metrics.prometheus_interface
    assert ports == [(port, interface) for port in (9100, 9101, 9102)]
    lines = jsonlog.read(tmp_path / "a" / "metrics" / "run.jsonl")
    assert [(line["last"], line["step"]) for line in lines] == [(40.0, 40), (75.0, 40)]
    assert event_file.scalars(tmp_path / "a" / "tensorboard" / "run") == [
        ("elastic_ckpt/train/steps", 40, 40.0),
        ("elastic_ckpt/goodput/percent", 40, 75.0),
    ]


def test_no_extra_is_asked_for_unless_it_is_needed(monkeypatch, tmp_path, config):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    monkeypatch.setitem(sys.modules, "tensorboardX.event_file_writer", None)
    with listening(config):
        pass
    for extra, key in (("tensorboard", "enable_tensorboard"), ("p", "prometheus_port")):
        section = schema.MetricsSection(**{key: 9100 if extra == "p" else True})
        needed = configured(tmp_path, metrics=section)
        missing = pytest.raises(errors.ConfigError, match=rf"pip install '\.\[{extra}")
        with missing, journal.listening_on_machine(needed):
            raise AssertionError("it begins")
