import dataclasses
import functools
import multiprocessing
import os
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
from jax.experimental import multihost_utils

from elastic_ckpt.core import errors, topology
from elastic_ckpt.elastic import (
    host_failure,
    multicontroller,
    supervisor,
    termination,
    watch,
)
from elastic_ckpt.training import schema
from tests import runs
from tests.recorded_events import RecordedEvents


def run(program, tmp_path, num_hosts=2):
    recorded = RecordedEvents()
    supervisor.HostProcesses(
        program, num_hosts=num_hosts, log_directory=tmp_path, emit=recorded
    ).run()
    return recorded.events


def sum_over_hosts(place, emit):
    multicontroller.configure(schema.WorldSection(devices_per_host=2))
    with multicontroller.joined(place):
        mine = np.array([10 ** topology.this_host()])
        total = int(multihost_utils.process_allgather(mine).sum())
        emit("save_started", step=total * 100 + len(jax.devices()))


def test_hosts_compute_together_and_their_events_are_heard(tmp_path):
    recorded = run(sum_over_hosts, tmp_path, num_hosts=3)
    assert recorded == [("save_started", {"step": 11106})] * 3


def test_a_second_world_starts_from_the_warm_server(tmp_path):
    for number in range(2):
        assert len(run(sum_over_hosts, tmp_path / str(number))) == 2


def fail(place, _, *, host, how):
    print(f"host {place.host} was here", flush=True)
    if place.host == host:
        how()
    # As a host would in a collective whose other members are gone.
    time.sleep(3600)


def raise_ours():
    raise errors.DataError("texts.array_record is cut short; restore it")


def raise_replaced():
    raise errors.ReplacedError("another start has continued it")


def raise_foreign():
    raise ZeroDivisionError("by zero")


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


def exit_3():
    os._exit(3)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (raise_replaced, r"^another start has continued it$"),
        (raise_ours, r"^texts\.array_record is cut short; restore it$"),
        (
            raise_foreign,
            r"(?s)^Traceback .*in raise_foreign\n.*\nZeroDivisionError: by zero\n\n"
            r"host 1 failed: ZeroDivisionError: by zero\nits log is .*host-1\.log$",
        ),
        (kill, r"^host 1 failed: killed by SIGKILL\n.*host-1\.log:\n.*host 1 was here"),
        (exit_3, r"^host 1 failed: ended with exit code 3\n"),
    ],
)
def test_a_failed_host_ends_the_world_with_its_own_words(tmp_path, how, message):
    began = time.monotonic()
    kind = errors.ReplacedError if how is raise_replaced else errors.RunError
    with pytest.raises(kind, match=message):
        run(functools.partial(fail, host=1, how=how), tmp_path, num_hosts=3)
    # The others would have slept for an hour.
    assert time.monotonic() - began < 1800


@pytest.mark.parametrize(
    ("how", "why"),
    [(kill, "killed by SIGKILL"), (exit_3, "ended with exit code 3"), (raise_ours, "")],
)
def test_a_host_that_dies_without_a_report_leaves_an_event(tmp_path, how, why):
    recorded = RecordedEvents()
    world = supervisor.HostProcesses(
        functools.partial(fail, host=1, how=how),
        num_hosts=2,
        log_directory=tmp_path,
        emit=recorded,
    )
    with pytest.raises(errors.RunError):
        world.run()
    assert recorded.events == ([("host_lost", {"host": 1, "why": why})] if why else [])


def test_all_hosts_that_die_together_are_reported(tmp_path, monkeypatch):
    # However slow this machine is.
    monkeypatch.setattr(supervisor, "_TOGETHER_SECS", 600)
    recorded = RecordedEvents()
    world = supervisor.HostProcesses(
        sleep, num_hosts=2, log_directory=tmp_path, emit=recorded
    )

    def kill_both(running):
        if [name for name, _ in recorded.events].count("save_started") == 2:
            running.send_signal([0, 1], signal.SIGKILL)

    with pytest.raises(host_failure.WorldLostError) as lost:
        world.run(kill_both)
    assert lost.value.hosts == {0, 1}
    why = "killed by SIGKILL"
    assert sorted(
        fields["host"]
        for name, fields in recorded.events
        if name == "host_lost" and fields["why"] == why
    ) == [0, 1]


class Clock:
    """The time; `stand_still` has it go by at once."""

    sleep = staticmethod(time.sleep)

    def __init__(self):
        self._skipped_secs = 0.0

    def monotonic(self):
        return time.monotonic() + self._skipped_secs

    def stand_still(self, *_):
        self._skipped_secs = 1000.0


def wait_and_end(*_):
    time.sleep(1)


def test_hosts_are_not_lost_after_the_supervisor_stood_still(tmp_path, monkeypatch):
    clock = Clock()
    monkeypatch.setattr(supervisor, "time", clock)
    supervisor.HostProcesses(
        wait_and_end,
        num_hosts=2,
        log_directory=tmp_path,
        emit=RecordedEvents(),
        limits=watch.Limits(most_secs=900.0, heartbeat_secs=900.0),
    ).run(clock.stand_still)


def report_and_sleep(place, emit):
    emit("save_started", step=place.host)
    time.sleep(600)


def test_hosts_that_do_not_end_in_time_after_sigterm_are_killed(tmp_path):
    events = []

    def emit(name, **fields):
        events.append((name, fields))
        os.kill(os.getpid(), signal.SIGTERM)

    world = supervisor.HostProcesses(
        report_and_sleep,
        num_hosts=2,
        log_directory=tmp_path,
        emit=emit,
        limits=watch.unlimited(grace_secs=0.2),
    )
    with pytest.raises(
        errors.StoppedError, match=r"hosts 0, 1 did not save and end within 0\.2 s"
    ):
        world.run()
    # Asked again, they get no further time.
    assert [name for name, _ in events].count("stop_requested") == 1
    assert ("stop_requested", {"within_secs": 0.2}) in events
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def end_the_supervisor(place, _):
    if place.host == 0:
        os.kill(multiprocessing.parent_process().pid, signal.SIGTERM)
    time.sleep(600)


def test_hosts_that_have_nothing_to_save_are_ended_at_once(tmp_path):
    with pytest.raises(errors.StoppedError, match="SIGTERM before the first step"):
        run(end_the_supervisor, tmp_path)


def take_the_signal(place, emit):
    """Emits the step it stops after, though the signal arrives before it has joined."""
    emit("save_started", step=place.host)
    while signal.SIGTERM not in signal.sigpending():
        time.sleep(0.01)
    multicontroller.configure(schema.WorldSection())
    step = 7
    with (
        multicontroller.joined(place),
        termination.agreed(
            grace_secs=600, requested=no_call, expired=no_call
        ) as is_stopping,
    ):
        while not is_stopping(step):
            step += 1
            time.sleep(0.05)
        emit("saved", step=step, secs=0.0)


def no_call():
    raise AssertionError("in a world of several hosts the supervisor watches the time")


def test_hosts_that_get_sigterm_while_they_start_agree_on_a_step(tmp_path):
    recorded = RecordedEvents()

    def emit(name, **fields):
        recorded(name, **fields)
        if [name for name, _ in recorded.events].count("save_started") == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    supervisor.HostProcesses(
        take_the_signal,
        num_hosts=2,
        log_directory=tmp_path,
        emit=emit,
        limits=watch.unlimited(grace_secs=600),
    ).run()
    first, second = recorded.named("saved")
    # It may be the first one that they ask about.
    assert first == second


def fail_in_turn(place, _):
    if place.host == 2:
        raise errors.DataError("the cause")
    time.sleep(0.05 * place.host)
    raise RuntimeError(f"an echo in host {place.host}")


def test_of_several_failures_the_cause_is_told(tmp_path, monkeypatch):
    # However slow this machine is, the cause arrives in time.
    monkeypatch.setattr(supervisor, "_GRACE_SECS", 600)
    with pytest.raises(errors.RunError, match=r"^the cause$"):
        run(fail_in_turn, tmp_path, num_hosts=3)


WARM_WORLD = """
import sys
from elastic_ckpt.training import elastic_run
from elastic_ckpt.core import events
from elastic_ckpt.elastic import supervisor
from tests.elastic import warm_host

def recorded(name, **fields):
    print(fields["path"], fields["step"], flush=True)

if __name__ == "__main__":
    elastic_run.warm_up()
    supervisor.HostProcesses(
        warm_host.look_around, num_hosts=1, log_directory=sys.argv[1], emit=recorded
    ).run()
"""


@pytest.mark.slow
def test_a_warm_server_has_imported_everything_and_started_nothing(tmp_path):
    script = tmp_path / "world.py"
    script.write_text(WARM_WORLD)
    ended = subprocess.run(
        [sys.executable, script, tmp_path / "logs"],
        env=os.environ | {"PYTHONPATH": f"{os.getcwd()}:{os.environ['PYTHONPATH']}"},
        capture_output=True,
        text=True,
        check=True,
    )
    # The modules that a host still lacked, and the threads that its server had.
    assert ended.stdout == "[] 1\n"


WARM_TRAINING = """
import functools
import sys
from elastic_ckpt.training import elastic_run
from elastic_ckpt.training import load
from elastic_ckpt.elastic import supervisor
from tests.elastic import warm_host

def recorded(name, **fields):
    if name == "step_interrupted":
        print(fields["path"], flush=True)

if __name__ == "__main__":
    elastic_run.warm_up()
    supervisor.HostProcesses(
        functools.partial(warm_host.train, load.load(sys.argv[2])),
        num_hosts=1,
        log_directory=sys.argv[1],
        emit=recorded,
    ).run()
"""


@pytest.mark.slow
def test_a_host_that_trains_imports_nothing_after_the_fork(tmp_path, corpus):
    script = tmp_path / "world.py"
    script.write_text(WARM_TRAINING)
    config = runs.write_config(
        tmp_path,
        corpus,
        colocated_python_data_input=False,
        enable_multi_tier_checkpointing=True,
        local_checkpoint_directory=str(tmp_path / "ram"),
        local_checkpoint_period=4,
        multi_tier_checkpointing_backup_interval_steps=4,
    )
    ended = subprocess.run(
        [sys.executable, script, tmp_path / "logs", config],
        env=os.environ | {"PYTHONPATH": f"{os.getcwd()}:{os.environ['PYTHONPATH']}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == "[]\n"


def failure(host, at_secs, **kind):
    return host_failure.HostFailure(host=host, message="", at_secs=at_secs, **kind)


def test_the_first_failure_is_ours_then_a_signal_then_the_earliest():
    early, late = failure(0, 1.0), failure(1, 2.0)
    killed, ours = failure(2, 3.0, is_signal=True), failure(3, 4.0, is_ours=True)
    assert host_failure.first_failure([late, early]) == early
    assert host_failure.first_failure([early, killed, late]) == killed
    assert host_failure.first_failure([early, killed, ours]) == ours
    not_stored = dataclasses.replace(ours, may_follow=True)
    assert host_failure.first_failure([not_stored, killed]) == killed
    aborted = failure(4, 0.5, is_signal=True, is_consequence=True)
    devices = failure(5, 0.2, is_of_devices=True)
    assert host_failure.first_failure([devices, aborted, early]) == early
    assert host_failure.first_failure([devices, aborted]) == aborted


def test_a_host_that_is_aborted_is_lost_unless_the_program_failed_before():
    aborted = failure(1, 2.0, is_silent=True, is_consequence=True)
    assert host_failure.lost_hosts([aborted]) == {1}
    assert host_failure.lost_hosts([failure(0, 1.0), aborted]) is None
    # Its end on another host, or later, has not ended the service.
    assert host_failure.lost_hosts([failure(2, 1.0), aborted]) == {1}
    assert host_failure.lost_hosts([aborted, failure(0, 3.0)]) == {1}
    # Host 0 has the service itself, so that the others have lost host 0.
    first = failure(0, 2.5, is_silent=True, is_consequence=True)
    assert host_failure.lost_hosts([aborted, first]) == {0}
    killed = failure(2, 2.5, is_silent=True)
    assert host_failure.lost_hosts([failure(0, 1.0), aborted, killed]) == {2}


SLEEPING_WORLD = """
import sys, time
from elastic_ckpt.core import events
from elastic_ckpt.elastic import supervisor
from tests.elastic import test_supervisor

def recorded(name, **fields):
    print(name, flush=True)

if __name__ == "__main__":
    supervisor.HostProcesses(
        test_supervisor.sleep, num_hosts=2, log_directory=sys.argv[1], emit=recorded
    ).run()
"""


def sleep(place, emit):
    emit("save_started", step=place.host)
    time.sleep(3600)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_no_host_outlives_its_supervisor(tmp_path, number):
    script = tmp_path / "world.py"
    script.write_text(SLEEPING_WORLD)
    with subprocess.Popen(
        [sys.executable, script, tmp_path / "logs"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=os.environ | {"PYTHONPATH": f"{os.getcwd()}:{os.environ['PYTHONPATH']}"},
        text=True,
    ) as world:
        assert [world.stdout.readline() for _ in range(2)] == ["save_started\n"] * 2
        world.send_signal(number)
        assert world.wait(600) != 0
    # That the hosts are gone is what the fixture leaves_nothing_behind checks.
