"""Starts the hosts of a world as processes of this machine, and supervises them.

The processes are forked from a warm server (`multiprocessing`'s forkserver) that has
imported JAX, Orbax, Grain and this package but has started neither a backend nor a
thread. Each host writes to its own log and reports over a pipe. When one fails, the
others are killed at once, because they would hang in a collective, and the first
failure is raised with the end of its log. SIGTERM is forwarded to the hosts, which save
and end; hosts that do not end within the grace period are killed. `leave` asks them for
the same without ending the run. `prepare` starts hosts that join and wait for `run`,
while another world still trains. Hosts never outlive the supervisor.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import signal
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from multiprocessing import connection, forkserver

from elastic_ckpt.core import errors, events
from elastic_ckpt.elastic import (
    failures,
    host_process,
    host_start,
    slow_hosts,
    termination,
)
from elastic_ckpt.elastic import watch as hang_watch
from elastic_ckpt.elastic.failures import HostFailure
from elastic_ckpt.elastic.member import Member

# An exception may be the consequence of a death: how long to wait for further reports,
# and if devices have failed, or JAX has ended the host. All hosts report soon then.
_GRACE_SECS = 0.5
_DEVICES_GRACE_SECS = 4.0
# How long the deaths of hosts that are killed at the same time may be apart.
_TOGETHER_SECS = 0.1
# The longest time between two calls of `watch`.
_WATCH_SECS = 0.1
# How long hosts that hang have to write their stacks.
_STACKS_SECS = 0.5
# The longest time for hosts that are prepared to join.
_PREPARE_SECS = 60.0
_SHOWN_LOG_LINES = 15


class HostProcesses:
    """Host processes on this machine that compute together until their program ends.

    Args:
      program: runs on every host; picklable. SIGTERM is blocked until it has joined.
        It may wait for `run` (`HostChannel.wait`).
      num_hosts: the number of hosts.
      log_directory: the directory for `host-<n>.log`, the output of each host.
      emit: called for the events of every host, and for `host_lost` and
        `stop_requested`.
      limits: how long hosts may take to save and end after SIGTERM, and may hang; by
        default 60 s, and for any time.
      machines: of each host; None if all are processes of this machine.

    Attributes:
      is_left: whether the hosts were asked to leave, and not to end the run.
      is_abandoned: whether they were ended before their first step, for another world.
      has_stepped: whether a host has asked whether to leave after a step.
      is_running: whether a host has reported more than that it has joined.
      noticed: the hosts that got SIGTERM from others than this supervisor.
    """

    def __init__(
        self,
        program: host_process.Program,
        *,
        num_hosts: int,
        log_directory: str | os.PathLike[str],
        emit: events.Emit,
        limits: hang_watch.Limits | None = None,
        machines: Sequence[host_start.HostMachine] | None = None,
    ) -> None:
        self._machines = machines or [host_start.ThisMachine()] * num_hosts
        limits = limits or hang_watch.unlimited()
        self._hangs = hang_watch.Watch(limits, num_hosts, now_secs=time.monotonic())
        self._slow = slow_hosts.SlowHosts(now_secs=time.monotonic())
        self.is_left = self.is_abandoned = self.has_stepped = False
        self.noticed: set[int] = set()
        self._on_watch: Callable[[HostProcesses], None] = lambda _: None
        self._program = program
        self._num_hosts = num_hosts
        self._grace_secs = limits.grace_secs
        self._logs = [
            pathlib.Path(log_directory) / f"host-{host}.log"
            for host in range(num_hosts)
        ]
        self._emit = emit
        self._hosts: list[host_start.StartedHost] = []
        self._channels: dict[connection.Connection, int] = {}
        self._failures: list[HostFailure] = []
        # Whether the last of them was killed, which another failure does not cause.
        self._is_killed = False
        self._oom_kills = failures.oom_kills()
        # The hosts that have sent a message.
        self._heard: set[int] = set()
        self._reserved: host_start.Reserved | None = None
        # The hosts that wait for `run`, and since when hosts are prepared.
        self._ready: set[int] = set()
        self._prepared_secs = 0.0
        self.is_running = False
        # Whether SIGTERM has arrived, and ends the run, or takes this machine away.
        self._is_stopping = self._is_preempted = False
        # The time limit for hosts to end, or to report their failures after the first.
        self._deadline_secs: float | None = None

    def prepare(self) -> None:
        """Starts the hosts, which join and wait, and returns at once."""
        self._reserved = self._machines[0].reserve()
        self._prepared_secs = time.monotonic()
        with termination.held():
            self._start_hosts(self._reserved.address)

    def is_prepared(self) -> bool:
        """Whether `run` need not be waited for: all hosts have joined, or one fails."""
        for channel in connection.wait(list(self._channels), 0):
            assert isinstance(channel, connection.Connection)
            self._receive(channel)
        secs = time.monotonic() - self._prepared_secs
        are_ready = len(self._ready) == self._num_hosts
        return are_ready or not self.can_run() or secs > _PREPARE_SECS

    def not_joined(self) -> frozenset[int]:
        """The hosts for which a prepared world has waited in vain."""
        secs = time.monotonic() - self._prepared_secs
        if secs <= _PREPARE_SECS or not self.can_run():
            return frozenset()
        return self._hangs.behind()

    def can_run(self) -> bool:
        """Whether no host that was prepared has failed."""
        return not self._failures and len(self._channels) == self._num_hosts

    def close(self) -> None:
        """Ends hosts that were prepared."""
        self._kill()
        if self._reserved is not None:
            self._reserved.close()

    def run(
        self,
        watch: Callable[[HostProcesses], None] = lambda _: None,
        preempted: Callable[[HostProcesses], bool] = lambda _: False,
    ) -> None:
        """Starts the hosts and returns when all are done.

        In the main thread it forwards SIGTERM.

        Args:
          watch: called between events, every 0.1 s at least, in this thread.
          preempted: called when SIGTERM arrives; returns whether the hosts leave for a
            world without this machine, and do not end the run.

        Raises:
          WorldLostError: if hosts were lost, with the first failure; after all hosts
            have ended, as always.
          RunError: with the first failure of the program.
          ReplacedError: if that is one.
          StoppedError: if SIGTERM arrived, and hosts exceeded the grace period or died.
        """
        self._on_watch = watch
        try:
            with _notice() as notice:
                if not self._hosts:
                    self.prepare()
                now_secs = time.monotonic()
                self._hangs.start_again(now_secs=now_secs)
                self._slow = slow_hosts.SlowHosts(now_secs=now_secs)
                self._tell(host_process.BEGIN)
                self._watch(notice, preempted)
        finally:
            self.close()
        if self._failures:
            self._failures = [
                dataclasses.replace(
                    each,
                    log="\n".join(self._log_end(each.host)) if each.is_silent else "",
                    log_file=str(self._logs[each.host]),
                )
                for each in self._failures
            ]
            failure = failures.first_failure(self._failures)
            error = error_of(
                self._failures, self._num_hosts, described=self._describe(failure)
            )
            is_lost = isinstance(error, failures.WorldLostError)
            reported = {failure.host} | (error.hosts if is_lost else set())
            for each in self._failures:
                if each.is_silent and each.host in reported:
                    self._emit("host_lost", host=each.host, why=each.message)
            if is_lost and self._has_not_begun():
                error = failures.ProgramFailedError(
                    str(error),
                    failures=self._failures,
                    num_hosts=self._num_hosts,
                )
            elif is_lost and self._is_stopping:
                raise errors.StoppedError(
                    f"{error}\nafter {termination.cause()} to the run, so its last"
                    " step may not have been saved"
                )
            raise error
        if self._channels and not self.is_abandoned:
            raise errors.StoppedError(self._describe_stop())

    def leave(self) -> bool:
        """Asks the hosts to save and leave after a step that they agree on.

        Returns:
          Whether they are asked now; False if they have been before, or cannot be yet.
        """
        if not self.is_running or self._deadline_secs is not None or self.is_left:
            return False
        self.is_left = True
        # Hosts that the signal came to are about to go with their memory.
        is_lost = self._is_preempted or bool(self.noticed)
        self._tell(host_process.LOSE_MEMORY if is_lost else host_process.LEAVE)
        self._terminate()
        return True

    def abandon(self) -> bool:
        """Ends the hosts at once, for another world, if they have not done a step.

        They have nothing to save, and may be about to compile for long.

        Returns:
          Whether they are ended; False if they have done a step, or memory is about to
          be lost, of which they have to make copies.
        """
        is_needed = self.has_stepped or bool(self.noticed) or self._is_preempted
        if is_needed or self._deadline_secs is not None:
            return False
        self.is_left = self.is_abandoned = True
        self.end()
        return True

    def stop(self) -> None:
        """Asks the hosts to save and end within the grace period: the run ends."""
        self._is_stopping = True
        if not self.is_running:
            # There is nothing to save yet.
            self._deadline_secs = time.monotonic()
        elif self._deadline_secs is None:
            self._emit("stop_requested", within_secs=self._grace_secs)
            self._deadline_secs = time.monotonic() + self._grace_secs
            if not self.is_left:
                self._terminate()
            self.is_left = False

    def phase(self, host: int) -> str:
        """The phase that a host began last; empty if it has ended."""
        return self._hangs.phase(host)

    def newly_slow(self) -> list[slow_hosts.SlowHost]:
        """The hosts that were found to be slow since the last call."""
        return self._slow.newly_slow(now_secs=time.monotonic())

    def end(self) -> None:
        """Ends the hosts at once; `watch` calls it."""
        self._deadline_secs = time.monotonic()

    def send_signal(self, hosts: Iterable[int], number: signal.Signals) -> None:
        """Sends a signal to hosts: a fault, for tests and demonstrations."""
        for host in hosts:
            self._hosts[host].send_signal(number)

    def _tell(self, message: bytes) -> None:
        for host in self._channels.values():
            self._hosts[host].tell(message)

    def _start_hosts(self, address: str) -> None:
        for host, log in enumerate(self._logs):
            member = Member(address=address, num_hosts=self._num_hosts, host=host)
            started = self._machines[host].start(self._program, member, str(log))
            self._hosts.append(started)
            self._channels[started.channel] = host

    def _watch(
        self,
        notice: termination.Notice | None,
        preempted: Callable[[HostProcesses], bool],
    ) -> None:
        while not {*self._channels.values()} <= {f.host for f in self._failures}:
            wait_secs = None
            if self._deadline_secs is not None:
                wait_secs = self._deadline_secs - time.monotonic()
                if wait_secs <= 0 or self._have_others_not_died():
                    return
            else:
                # What ends this process may have been sent to the hosts, too: then
                # they are not about to leave without it.
                if notice is None or not notice.is_coming():
                    self._on_watch(self)
                wait_secs = _WATCH_SECS
            channels: list[connection.Connection | int] = [*self._channels]
            if notice is not None:
                channels.append(notice.fileno())
            for ready in connection.wait(channels, wait_secs):
                if isinstance(ready, connection.Connection):
                    self._receive(ready)
                elif notice is not None and notice.received():
                    self._is_preempted = True  # `leave` depends on it.
                    self._is_preempted = preempted(self)
                    if not self._is_preempted:
                        self.stop()
            if self._deadline_secs is None:
                self._find_hang()
        if (self.noticed or self._is_preempted) and self._deadline_secs is None:
            # All hosts may have ended before this was looked at.
            self._on_watch(self)

    def _receive(self, channel: connection.Connection) -> None:
        host = self._channels[channel]
        try:
            message = json.loads(channel.recv_bytes())
            self._heard.add(host)
        except (EOFError, OSError):
            # The host has ended, without a message or in the middle of one.
            del self._channels[channel]
            phase = self._hangs.phase(host)
            self._hangs.end(host)
            exit_code = self._hosts[host].wait()
            if exit_code and all(f.host != host for f in self._failures):
                # The count is that of this machine.
                is_local = isinstance(self._hosts[host], host_start.LocalProcess)
                killed = is_local * (failures.oom_kills() - self._oom_kills)
                death = failures.silent_death(host, exit_code, oom_kills=killed)
                self._fail(dataclasses.replace(death, phase=phase))
            return
        now_secs = time.monotonic()
        if "heartbeat" in message:
            begun = message["begun"]
            self._hangs.heartbeat(host, now_secs=now_secs, begun=begun)
            load = message["heartbeat"]
            self._slow.note(host, load, phase=self._hangs.phase(host))
        elif "phase" in message:
            self._hangs.begin(
                host, message["phase"], now_secs=now_secs, begun=message["begun"]
            )
        elif "stepped" in message:
            self.has_stepped = True
        elif "ready" in message:
            self._ready.add(host)
        elif "sigterm" in message:
            if self._deadline_secs is None and not self.is_left:
                self.noticed.add(host)
        elif "failure" in message:
            fields = message["failure"] | {"phase": self._hangs.phase(host)}
            self._fail(HostFailure(host=host, **fields))
        else:
            # A world that has only joined has nothing to save.
            self.is_running |= message["event"] != "world_joined"
            self._emit(message["event"], **message["fields"])

    def _fail(self, failure: HostFailure) -> None:
        if not self._failures:
            is_of_others = failure.is_of_devices or failure.is_consequence
            # What a host cannot import, others cannot, soon.
            is_of_others |= failure.host not in self._heard
            secs = _DEVICES_GRACE_SECS if is_of_others else _GRACE_SECS
            self._deadline_secs = time.monotonic() + secs
        if failure.is_signal and not failure.is_consequence:
            # Nothing else has caused it; the other hosts hang, or will, unless they
            # died together, or crash alike.
            self._is_killed = failure.message.startswith("killed by SIGKILL")
            is_sudden = self._is_killed or failure.is_hang
            secs = _TOGETHER_SECS if is_sudden else _GRACE_SECS
            self._deadline_secs = time.monotonic() + secs
        self._failures.append(failure)

    def _have_others_not_died(self) -> bool:
        # Whether no host has died together with one that was killed; so far as is
        # known, which it is of the hosts of this machine.
        failed = {each.host for each in self._failures}
        others = [
            self._hosts[host] for host in self._channels.values() if host not in failed
        ]
        return self._is_killed and not any(
            not isinstance(each, host_start.LocalProcess) or each.is_ending
            for each in others
        )

    def _find_hang(self) -> None:
        now_secs = time.monotonic()
        self._hangs.look(now_secs=now_secs)
        hang = self._hangs.hang(now_secs=now_secs)
        if hang is None:
            return
        alive = range(self._num_hosts)
        self.send_signal(alive, signal.SIGUSR1)
        self.send_signal(alive, signal.SIGCONT)
        time.sleep(_STACKS_SECS)
        for host in hang.hosts or [0]:
            phase = self._hangs.phase(host)
            self._fail(failures.of_hang(host, hang, phase, now_secs=now_secs))
        # Hosts that hang report nothing more.
        self.end()

    def _terminate(self) -> None:
        # JAX's preemption service handles the signal.
        self.send_signal(range(len(self._hosts)), signal.SIGTERM)

    def _kill(self) -> None:
        self.send_signal(range(len(self._hosts)), signal.SIGKILL)
        for host in self._hosts:
            host.wait()

    def _describe_stop(self) -> str:
        if not self.is_running:
            return f"ended by {termination.cause()} before the first step"
        hosts = ", ".join(map(str, self._channels.values()))
        return (
            f"hosts {hosts} did not save and end within {self._grace_secs:g} s of"
            f" {termination.cause()} and were killed; raise Limits.grace_secs (in a"
            " configuration termination_grace_period_seconds) if saving takes longer"
            " and the launcher waits for it"
        )

    def _has_not_begun(self) -> bool:
        # Whether no host could begin, which is no loss: another world would not either.
        ended = {each.host for each in self._failures if not each.is_signal}
        return len(ended) == self._num_hosts and not self._heard

    def _describe(self, failure: HostFailure) -> str:
        if failure.is_ours:
            return failure.message
        if self._has_not_begun():
            return (
                f"no host process could begin: host {failure.host} {failure.message}."
                " Each imports the program that starts the run, and what it printed is"
                " on standard error"
            )
        if failure.traceback and not failure.is_of_devices:
            num_hosts = self._num_hosts
            return failures.judge([failure], num_hosts=num_hosts, is_lost=False).words
        log = self._logs[failure.host]
        why = f"host {failure.host} failed: {failure.message}"
        lines = [f"  | {line}" for line in self._log_end(failure.host)]
        return "\n".join([why, f"the end of its log, {log}:", *lines])

    def _log_end(self, host: int) -> list[str]:
        # A host that failed to start has no log, and that of another machine is there.
        log = self._logs[host]
        text = log.read_text(errors="replace") if log.exists() else ""
        return text.splitlines()[-_SHOWN_LOG_LINES:]


def error_of(
    failed: Sequence[HostFailure], num_hosts: int, *, described: str
) -> errors.RunError:
    """The error of a world whose hosts failed.

    Args:
      failed: of its hosts.
      num_hosts: of the world.
      described: its message.
    """
    failure = failures.first_failure(failed)
    lost = failures.lost_hosts(failed)
    if lost is None and "ReplacedError" in failure.error:
        return errors.ReplacedError(described)
    if lost is None:
        return failures.ProgramFailedError(
            described, failures=failed, num_hosts=num_hosts
        )
    return failures.WorldLostError(
        described,
        hosts=lost or failures.hosts_of_bad_devices(failed, num_hosts),
        hung=frozenset(each.host for each in failed if each.is_hang),
        at_secs=min(each.at_secs for each in failed),
        failures=failed,
        num_hosts=num_hosts,
    )


def warm_up(modules: Sequence[str]) -> None:
    """Starts the fork server, which imports `modules` while the caller continues.

    Args:
      modules: the modules that hosts import; importing them must not start a thread or
        a JAX backend.
    """
    forkserver.set_forkserver_preload(list(modules))
    with termination.held():
        forkserver.ensure_running()


def _notice() -> contextlib.AbstractContextManager[termination.Notice | None]:
    is_main = threading.current_thread() is threading.main_thread()
    return termination.Notice() if is_main else contextlib.nullcontext()
