"""Hosts of a world end, fail and stop, and their supervisor tells what happened."""

import contextlib
import dataclasses
import functools
import math
import os
import pathlib
import pickle
import re
import signal
import subprocess

import pytest

from elastic_ckpt.core import errors, events
from elastic_ckpt.elastic import failures, host, process_cluster, station, watch
from tests import host_worlds, process_tree, runs
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
DIES = functools.partial(signal.raise_signal, signal.SIGKILL)
KILLED = "killed by SIGKILL"


@pytest.mark.parametrize(
    ("acts", "says", "lost"),
    [
        # Our own errors have their own words.
        ({1: errors.DataError("a is cut short")}, "1 failed: a is cut", {}),
        ({1: ValueError("no")}, f"1 failed: ValueError: no{LOGGED}", {}),
        # Only of a host that could not report it there is an event.
        ({1: DIES}, f"1 failed: {KILLED}{LOGGED}", {1: KILLED}),
        (
            {1: functools.partial(os._exit, 3)},
            "1 failed: stopped with exit code 3\n",
            {1: "stopped with exit code 3"},
        ),
        ({0: DIES, 1: DIES}, rf"\d failed: {KILLED}", {0: KILLED, 1: KILLED}),
        (
            dict(enumerate([*map(RuntimeError, "ab"), errors.DataError("cause")])),
            "2 failed: cause",
            {},
        ),
    ],
)
def test_a_world_ends_with_the_words_of_the_host_that_failed_first(
    tmp_path, recorded, monkeypatch, acts, says, lost
):
    if 0 in acts:
        # However slow this machine is, all are heard; else one stays for an hour.
        for pause in ("_TOGETHER_SECS", "_GRACE_SECS"):
            monkeypatch.setattr(process_cluster, pause, 600)
    program = functools.partial(failing_hosts.stay, acts=acts)
    with pytest.raises(failures.WorldLostError, match=f"^host {says}") as error:
        run(program, tmp_path, recorded, num_hosts=max(acts) + 1)
    assert error.value.hosts == lost.keys()
    told = {each["host"]: each["why"] for each in recorded.named("host_lost")}
    assert told == lost


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


def test_no_host_outlives_its_supervisor(tmp_path):
    program = functools.partial(failing_hosts.end_the_supervisor, by=signal.SIGKILL)
    ended = runs.forked(run, program, tmp_path, events.nobody)
    assert ended.returncode == -signal.SIGKILL
    # That the hosts are gone is what the fixture leaves_nothing_behind checks.


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


@pytest.mark.slow
def test_hosts_are_forked_by_one_thread_that_has_imported_all_they_need(
    tmp_path, corpus
):
    settings = {"hosts": 2, "slices": 2, "steps": 5, "local_checkpoint_period": 4}
    settings |= {"local_checkpoint_directory": str(tmp_path / "ram")}
    settings |= {"multi_tier_checkpointing_backup_interval_steps": 4}
    settings |= {"enable_multi_tier_checkpointing": True}
    settings |= {"colocated_python_data_input": False}
    config = runs.write_config(tmp_path, corpus, **settings)
    # A program of its own: the server of this session may have forked before.
    with subprocess.Popen(
        runs.command("train", config),
        env=os.environ | {"PYTHONPROFILEIMPORTTIME": "1"},
        stderr=subprocess.DEVNULL,
    ) as started:
        host = process_tree.host(started, tmp_path / "tiny", 1)
        (server,) = re.findall(
            r"PPid:\s(\d+)", pathlib.Path(f"/proc/{host}/status").read_text()
        )
        assert len(os.listdir(f"/proc/{server}/task")) == 1
        mapped = pathlib.Path(f"/proc/{server}/maps").read_text()
        assert "jaxlib" in mapped
        # It takes most of a second, and only agents serve HTTP.
        assert "aiohttp" not in mapped
    assert started.returncode == 0
    (log,) = tmp_path.glob("tiny/logs/*/host-1.log")
    # But for plug-ins of platforms, which JAX imports when it starts a backend.
    late = re.findall(
        r"^import time: .*\| +((?!jax_plugins|jax\._src\.cudacheck)"
        r"(?:jax|orbax|grain|tensorstore|elastic_ckpt)\S*)$",
        log.read_text(),
        re.M,
    )
    assert "import time: " in log.read_text()
    assert not late
