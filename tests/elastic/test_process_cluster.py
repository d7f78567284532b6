"""Hosts of a world end, fail and stop, and their supervisor tells what happened."""

import contextlib
import dataclasses
import functools
import math
import os
import pickle
import signal
import subprocess
import sys

import pytest

from elastic_ckpt.core import errors
from elastic_ckpt.elastic import failures, host, process_cluster, station, watch
from tests import host_worlds, runs
from tests.elastic import failing_hosts
from tests.recorded_events import RecordedEvents


@pytest.fixture
def recorded():
    return RecordedEvents()


def run(program, directory, emit, *, num_hosts=2, **options):
    host_worlds.run(
        program, num_hosts=num_hosts, log_directory=directory, emit=emit, **options
    )


LOGGED = r"\n.*host-1\.log:\n.*host 1 was here"


@pytest.mark.parametrize(
    ("act", "says", "lost"),
    [
        # Our own errors have their own words.
        ((failing_hosts.raise_, errors.DataError("a is cut short")), "a is cut", ""),
        ((failing_hosts.raise_, ValueError("no")), f"ValueError: no{LOGGED}", ""),
        (
            (signal.raise_signal, signal.SIGKILL),
            f"killed by SIGKILL{LOGGED}",
            "killed by SIGKILL",
        ),
        ((os._exit, 3), "stopped with exit code 3\n", "stopped with exit code 3"),
    ],
)
def test_a_failed_host_ends_the_world_with_its_own_words(
    tmp_path, recorded, act, says, lost
):
    program = functools.partial(failing_hosts.stay, acts={1: functools.partial(*act)})
    # The other one would have slept for an hour.
    with pytest.raises(failures.WorldLostError, match=f"^host 1 failed: {says}"):
        run(program, tmp_path, recorded)
    # Only of a host that could not report it there is an event.
    assert recorded.named("host_lost") == [{"host": 1, "why": lost}] * bool(lost)


def test_all_hosts_that_die_together_are_reported(tmp_path, recorded, monkeypatch):
    # However slow this machine is.
    monkeypatch.setattr(process_cluster, "_TOGETHER_SECS", 600)

    def kill_both(cluster):
        if len(recorded.named("save_started")) == 2:
            cluster._training.kill()

    with pytest.raises(failures.WorldLostError) as lost:
        run(failing_hosts.stay, tmp_path, recorded, look=kill_both)
    assert lost.value.hosts == {0, 1}
    reported = recorded.named("host_lost")
    assert sorted(each["host"] for each in reported) == [0, 1]
    assert {each["why"] for each in reported} == {"killed by SIGKILL"}


def test_a_host_is_missed_though_one_that_it_has_forked_lives(tmp_path):
    own = station.Station(host.Hardware(), log_directory=tmp_path)
    with contextlib.closing(own):
        started = own.hosts[1, 0] = station.HostProcess()
        started.tell(pickle.dumps(failing_hosts.fork_and_be_killed))
        assert list(own.wait(600)) == [{"host": [1, 0], "exit": -signal.SIGKILL}]


def test_hosts_that_do_not_end_in_time_after_sigterm_are_killed(tmp_path, recorded):
    def emit(name, **fields):
        recorded(name, **fields)
        os.kill(os.getpid(), signal.SIGTERM)

    limits = watch.Limits(most_secs=math.inf, heartbeat_secs=math.inf, grace_secs=0.2)
    with pytest.raises(
        errors.StoppedError, match=r"hosts 0, 1 did not save and stop within 0\.2 s"
    ):
        run(failing_hosts.stay, tmp_path, emit, limits=limits)
    # Asked again, they get no further time.
    assert recorded.named("stop_requested") == [{"within_secs": 0.2}]
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_hosts_that_have_nothing_to_save_are_ended_at_once(tmp_path, recorded):
    with pytest.raises(errors.StoppedError, match="SIGTERM before the first step"):
        run(failing_hosts.end_the_supervisor, tmp_path, recorded)


@pytest.mark.parametrize("num_hosts", [1, 2])
def test_hosts_that_get_sigterm_while_they_start_agree_on_a_step(
    tmp_path, recorded, num_hosts
):
    """One gets it alone, and a run that is not elastic ends; several get it from us."""
    is_alone = num_hosts == 1

    def emit(name, **fields):
        recorded(name, **fields)
        if [name for name, _ in recorded.events] == ["save_started"] * 2:
            os.kill(os.getpid(), signal.SIGTERM)

    limits = watch.Limits(most_secs=math.inf, heartbeat_secs=math.inf, grace_secs=600)
    program = functools.partial(failing_hosts.take_the_signal, is_own=is_alone)
    run(program, tmp_path, emit, num_hosts=num_hosts, limits=limits)
    stopped = recorded.named("step_interrupted")
    assert {each["path"] for each in stopped} == {"stop after ['reach', 'join']"}
    # It may be the first one that they ask about.
    assert len({each["step"] for each in stopped}) == 1
    assert len(stopped) == num_hosts
    assert recorded.named("slice_preempted") == [{"slice": 0}] * is_alone
    assert recorded.named("stop_requested") == [{"within_secs": 600}]


def test_of_several_failures_the_cause_is_told(tmp_path, recorded, monkeypatch):
    # However slow this machine is, the cause arrives in time.
    monkeypatch.setattr(process_cluster, "_GRACE_SECS", 600)
    said = [RuntimeError("an echo"), RuntimeError("another"), errors.DataError("cause")]
    acts = [functools.partial(failing_hosts.raise_, each) for each in said]
    program = functools.partial(failing_hosts.stay, acts=dict(enumerate(acts)))
    with pytest.raises(errors.RunError, match=r"^host 2 failed: cause"):
        run(program, tmp_path, recorded, num_hosts=3)


def failure(host, at_secs, **kind):
    return failures.HostFailure(host=host, message="", at_secs=at_secs, **kind)


def test_the_first_failure_is_ours_then_a_signal_then_the_earliest():
    ours = failure(3, 4.0, is_ours=True)
    in_order = [
        ours,
        failure(2, 3.0, is_signal=True),
        failure(0, 1.0),
        failure(1, 2.0),
        dataclasses.replace(ours, error=["NotStoredError"]),
        failure(4, 0.5, is_signal=True, is_consequence=True),
        failure(5, 0.2, is_of_devices=True),
    ]
    for number, first in enumerate(in_order):
        assert failures.first_failure(in_order[number:][::-1]) == first


def dead(host, at_secs, *, is_consequence=True):
    return failure(host, at_secs, is_silent=True, is_consequence=is_consequence)


@pytest.mark.parametrize(
    ("failed", "lost"),
    [
        ([dead(1, 2.0)], {1}),
        # The end of the program on host 0 ends the service.
        ([failure(0, 1.0), dead(1, 2.0)], set()),
        ([failure(2, 1.0), dead(1, 2.0)], {1}),
        ([dead(1, 2.0), failure(0, 3.0)], {1}),
        # Host 0 has the service itself, so that the others have lost host 0.
        ([dead(1, 2.0), dead(0, 2.5)], {0}),
        ([failure(0, 1.0), dead(1, 2.0), dead(2, 2.5, is_consequence=False)], {2}),
        ([failure(2, 1.0, error=["DeviceWrongError"]), dead(1, 2.0)], {2}),
    ],
)
def test_a_host_that_is_aborted_is_lost_unless_the_program_failed_before(failed, lost):
    assert failures.lost_hosts(failed) == lost


SLEEPING_WORLD = """
import sys
from tests import host_worlds
from tests.elastic import failing_hosts

host_worlds.run(
    failing_hosts.stay,
    num_hosts=2,
    log_directory=sys.argv[1],
    emit=lambda name, **_: print(name, flush=True),
)
"""


@pytest.mark.slow
def test_no_host_outlives_its_supervisor(tmp_path):
    with subprocess.Popen(
        [sys.executable, "-c", SLEEPING_WORLD, tmp_path],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=os.environ | {"PYTHONPATH": f"{os.getcwd()}:{os.environ['PYTHONPATH']}"},
        text=True,
    ) as started:
        assert [started.stdout.readline() for _ in range(2)] == ["save_started\n"] * 2
        started.kill()
        assert started.wait(600) != 0
    # That the hosts are gone is what the fixture leaves_nothing_behind checks.


@pytest.mark.slow
def test_a_host_that_trains_imports_nothing_after_the_fork(tmp_path, corpus):
    config = runs.write_config(
        tmp_path,
        corpus,
        steps=5,
        colocated_python_data_input=False,
        enable_multi_tier_checkpointing=True,
        local_checkpoint_directory=str(tmp_path / "ram"),
        local_checkpoint_period=4,
        multi_tier_checkpointing_backup_interval_steps=4,
    )
    # A program of its own: the server of this session may have forked before.
    ended = subprocess.run(
        [sys.executable, "-m", "tests.elastic.warm_host", tmp_path / "logs", config],
        env=os.environ | {"PYTHONPATH": f"{os.getcwd()}:{os.environ['PYTHONPATH']}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    # Its server had one thread.
    assert ended.stdout == "[] 1\n"
