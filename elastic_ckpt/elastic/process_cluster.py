"""A cluster of host processes, on this machine and on those that follow it.

Each world is a set of fresh processes, which the stations of the machines start. One
loop, in one thread, takes the messages of the hosts of all worlds: of the one that
trains; of the next one, which is prepared before a planned change, so that its hosts
have joined when those of the present one are asked to leave; and of those that are
being killed, whose ends nobody waits for.

When one host fails, the others are killed soon, because they would hang in a
collective, and the world ends with the first failure. A host whose process alone has
died is started again on the same slice; a slice that hung has to settle first; one
whose devices compute wrong values is refused for some time.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
import os
import pathlib
import signal
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from multiprocessing import connection
from typing import Any, Self

from elastic_ckpt.core import codec, errors, events, process, storage
from elastic_ckpt.elastic import (
    failures,
    faults,
    link,
    termination,
    watch,
)
from elastic_ckpt.elastic import host as host_process
from elastic_ckpt.elastic.cluster import Assignment, TrainFunction, leaving_for
from elastic_ckpt.elastic.decision import Decision, Failure, Slices, Train
from elastic_ckpt.elastic.failures import HostFailure, WorldLostError
from elastic_ckpt.elastic.host import BEGIN, LEAVE, LOSE_MEMORY, STOP, Member
from elastic_ckpt.elastic.station import Station
from elastic_ckpt.tiers.persistent import claims

# The longest time between two looks at the hosts and slices.
_LOOK_SECS = 0.1
# After a failure others may follow, or report the cause: how long to wait for them if a
# host was killed or hangs; if it raised; and if devices failed, or JAX aborted it.
_TOGETHER_SECS, _GRACE_SECS, _DEVICES_GRACE_SECS = 0.1, 0.5, 4.0
# How long a machine that has connected may take to say which it is.
_HELLO_SECS = 1.0
# How long hosts that hang have to write their stacks.
_STACKS_SECS = 0.5
# The longest time for the hosts of a prepared world to join.
_PREPARE_SECS = 60.0
# How long a slice is refused, and twice as long each further time.
_RETRY_SECS, _MOST_RETRY_SECS = 30.0, 3600.0
# So many worlds in a row may be abandoned before a step: slices that come and go all
# the time must not keep the run from training.
_MOST_ABANDONED = 3
_SHOWN_LOG_LINES = 15
_LATE = "its hosts do not join the others in time"
# What hosts are not told, but killed for.
_ABANDON = b"abandon"


class LeadershipLostError(errors.StoppedError):
    """This machine does not lead the run any more."""


class HandedOverError(LeadershipLostError):
    """This machine was asked to end, and another one leads the run."""


class Machines:
    """This machine and those that follow it, by number.

    Args:
      own: the station of this machine; each machine has as many slices.
      listener: to which the others connect; None if the run has no others.
      has_lead: returns whether this machine still leads.
      configured: the digest of the run's configuration, the same on all machines.

    Attributes:
      own: as given.
      number: of this machine.
      has_lead: as given.
      are_several: whether the run has other machines.
    """

    def __init__(
        self,
        own: Station,
        *,
        listener: link.Listener | None = None,
        has_lead: Callable[[], bool] = lambda: True,
        configured: str = "",
    ) -> None:
        self.own, self.number = own, own.number
        self.are_several = listener is not None
        self.has_lead = has_lead
        self._listener = listener
        self._configured = configured
        self._links: dict[int, link.Link] = {}
        self._hello: dict[int, dict[str, Any]] = {}
        # Machines that are about to go, and take no more hosts.
        self._leaving: set[int] = set()

    @property
    def connected(self) -> set[int]:
        """The machines that are there, those about to go included."""
        return {self.number, *self._links}

    def of_slice(self, number: int) -> int:
        """The machine that has a slice."""
        return number // len(self.own.slices)

    def slices(self, machines: Collection[int] | None = None) -> set[int]:
        """The slices of machines; by default of all that are there to stay."""
        each = len(self.own.slices)
        there = self.connected - self._leaving if machines is None else machines
        return {number * each + slice_ for number in there for slice_ in range(each)}

    def address(self, machine: int) -> str:
        """The address that a machine has reserved for host 0 of the next world."""
        # One that was just lost has its last one, and its hosts count as killed.
        hello = self.own.hello if machine == self.number else self._hello[machine]
        return f"{hello['interface']}:{hello['port']}"

    @property
    def lost_secs(self) -> float:
        """The time after which a machine that does not answer is lost."""
        return math.inf if self._listener is None else self._listener.lost_secs

    def order(self, machine: int, **order: Any) -> None:
        """Gives an order to a machine, unless it is lost."""
        if machine == self.number:
            self.own.do(order)
        elif machine in self._links:
            self._links[machine].send(**order)

    def tell(self, **message: Any) -> None:
        """Tells the other machines something, from any thread."""
        for each in list(self._links.values()):
            each.send(**message)

    def wait(self, secs: float, *extra: int) -> Iterator[tuple[int, dict[str, Any]]]:
        """Waits for messages; yields those that have come, with their machines.

        Of a machine that is lost the last one is `{"lost": True}`. It may be back at
        once, but its hosts have ended.

        Args:
          secs: how long, at most.
          *extra: descriptors that end the waiting when they are readable.
        """
        channels = self.own.channels
        links = [each.channel for each in self._links.values()]
        for ready in connection.wait([*channels, *links, *extra], secs):
            if isinstance(ready, connection.Connection) and ready in channels:
                yield self.number, self.own.read(ready, channels[ready])
        for number, each in list(self._links.items()):
            try:
                for message in each.receive():
                    if "port" in message:
                        self._hello[number] |= message
                    elif "leaving" in message:
                        self._leaving.add(number)
                    yield number, message
            except link.LinkLostError:
                self._forget(number)
                yield number, {"lost": True}
        while self._listener is not None and not self._listener.accepted.empty():
            self._admit(self._listener.accepted.get())

    def give_up(self, machine: int) -> None:
        """Takes another machine for lost; it may connect again."""
        if machine in self._links:
            self._links[machine].give_up()

    def wait_until(self, is_so: Callable[[set[int]], bool], secs: float) -> None:
        """Waits until it is so of the machines that are there, or time is over."""
        until_secs = time.monotonic() + secs
        while not is_so(self.connected) and time.monotonic() < until_secs:
            list(self.wait(_LOOK_SECS))

    def end(self, secs: float, *, is_stopped: bool, failure: str = "") -> None:
        """Reports the end of the run to the others, which then end their links.

        Args:
          secs: how long to wait for that, at most.
          is_stopped: whether the run was asked to end.
          failure: why it failed; empty if it did not.
        """
        self.tell(over=True, is_stopped=is_stopped, failure=failure)
        self.wait_until(lambda there: there == {self.number}, secs)

    def close(self) -> None:
        """Ends the links; machines that know of no end look for the next leader."""
        if self._listener is not None:
            self._listener.close()
        while self._links:
            self._links.popitem()[1].close()

    def _admit(self, accepted: link.Link) -> None:
        # It has shown the key, and says at once who it is.
        connection.wait([accepted.channel], _HELLO_SECS)
        with contextlib.suppress(link.LinkLostError, KeyError, TypeError):
            for hello in accepted.receive()[:1]:
                number = hello["machine"]
                if hello["configured"] != self._configured:
                    failure = (
                        f"machine {number} has another configuration than machine"
                        f" {self.number}, which leads; start all with the same one"
                    )
                    accepted.send(over=True, is_stopped=False, failure=failure)
                elif number not in range(self.own.num_machines):
                    why = f"the run has no machine {number}"
                    accepted.send(refused=why)
                elif number in self.connected:
                    why = f"another supervisor of machine {number} is there"
                    accepted.send(refused=why)
                else:
                    self._links[number], self._hello[number] = accepted, hello
                    agents = self.own.hello["agents"]
                    accepted.send(agents=agents, machines=sorted(self.connected))
                    return
        accepted.close()

    def _forget(self, number: int) -> None:
        self._links.pop(number).close()
        self._leaving.discard(number)
        for machine in self.connected:
            self.order(machine, forget=self._hello[number]["agents"])


class HostsOfWorld:
    """The hosts of one world: started, told, and what is known of them.

    Its only input and output are orders to machines and messages of hosts.

    Args:
      key: the number of the world among all that were started.
      assignment: of the world.
      machines: that have its slices.
      limits: how long hosts may take.

    Attributes:
      assignment: as given.
      emit: called for the events of the hosts; nobody hears those of a prepared world.
      slices: of each host.
      alive: the hosts that have not ended.
      failures: that hosts have reported, or that were found.
      deadline_secs: when the hosts are killed; infinite while they may go on.
      is_running: whether a host has reported more than that it has joined; before,
        there is nothing to save.
      has_stepped: whether a host has done a step.
      watch: finds hosts that hang or are slow.
      preempted: the slices of hosts that got SIGTERM from others than this machine.
    """

    def __init__(
        self,
        key: int,
        assignment: Assignment,
        machines: Machines,
        limits: watch.Limits,
    ) -> None:
        per_slice = machines.own.hosts_per_slice
        self.assignment = assignment
        self.emit: events.Emit = events.nobody
        self.slices = [n for n in assignment.work.slices for _ in range(per_slice)]
        self.alive = set(range(len(self.slices)))
        self.failures: list[HostFailure] = []
        self.deadline_secs = math.inf
        self.is_running = self.has_stepped = False
        self.preempted: set[int] = set()
        self._key, self._machines, self._limits = key, machines, limits
        # What they were asked last: an order to all, or `_ABANDON`; empty for nothing.
        self._asked = b""
        self._heard: set[int] = set()
        self._ready: set[int] = set()
        # Hosts that stop before their last step report both ends; which of them is the
        # reason is known when all have ended.
        self._ends: dict[str, dict[str, Any]] = {}
        now_secs = time.monotonic()
        self._join_until_secs = now_secs + _PREPARE_SECS
        self.watch = watch.Watch(limits, len(self.slices), now_secs=now_secs)
        self._oom_kills = failures.oom_kills()
        # A new directory: this may be a second start of a run that is alive.
        self._logs = storage.make_unique_directory(machines.own.log_directory)
        address = machines.address(machines.of_slice(self.slices[0]))
        for host in range(len(self.slices)):
            member = Member(address=address, num_hosts=len(self.slices), host=host)
            self._order(
                host,
                start=[key, host],
                assignment=codec.encode(assignment),
                member=codec.encode(member),
                log=os.path.basename(self._logs),
            )
        for machine in self.machines - machines.connected:
            self.lose(machine)

    @property
    def machines(self) -> set[int]:
        """The machines of the hosts that have not ended."""
        return {self._machine(host) for host in self.alive}

    @property
    def is_prepared(self) -> bool:
        """Whether `begin` need not be waited for: all have joined, or one fails."""
        is_late = time.monotonic() > self._join_until_secs
        return is_late or bool(self.failures) or len(self._ready) == len(self.slices)

    @property
    def unfit(self) -> frozenset[int]:
        """The slices whose hosts keep a world from being prepared."""
        hosts: Collection[int] = ()
        if self.failures:
            # Others may have failed because of these.
            hosts = failures.lost_hosts(self.failures) or {self.cause.host}
        elif time.monotonic() > self._join_until_secs:
            # Some do not join, or do not finish the check of their devices.
            missing = {*range(len(self.slices))} - self._ready
            hosts = self.watch.behind() or (missing if self._ready else set())
        return frozenset(self.slices[host] for host in hosts)

    @property
    def cause(self) -> HostFailure:
        """The failure that has caused the others."""
        return failures.first_failure(self.failures)

    @property
    def is_over(self) -> bool:
        """Whether all hosts have ended, or those that are left have to."""
        is_late = time.monotonic() > self.deadline_secs
        return is_late or self.alive <= {each.host for each in self.failures}

    def begin(self, emit: events.Emit) -> None:
        """Has the hosts begin, which wait for this once they have joined."""
        self.emit = emit
        self._tell(BEGIN)

    def signal(self, hosts: Iterable[int], number: int) -> None:
        """Sends hosts a signal."""
        for host in hosts:
            self._order(host, signal=[self._key, host], number=int(number))

    def kill(self) -> None:
        """Ends the hosts at once."""
        self.signal(self.alive, signal.SIGKILL)

    def leave(self, *, loses_memory: bool) -> bool:
        """Asks the hosts to save and leave after a step that they agree on.

        Args:
          loses_memory: whether the memory of some of them is lost then.

        Returns:
          Whether they are asked now; False if they have been, or cannot be yet.
        """
        if not self.is_running or self._asked:
            return False
        self._ask(LOSE_MEMORY if loses_memory else LEAVE)
        return True

    def abandon(self, step: int) -> bool:
        """Ends the hosts for another world at once, if they have done no step.

        They have nothing to save, and may be about to compile for long.

        Args:
          step: that the run has reached.

        Returns:
          Whether they are ended.
        """
        if self.has_stepped:
            return False
        self._asked, self._ends["world_left"] = _ABANDON, {"step": step}
        self.end()
        return True

    def end(self) -> None:
        """Ends the hosts now, whatever they have not saved."""
        self.deadline_secs = time.monotonic()

    def stop(self) -> None:
        """Asks the hosts to save and end within the grace period: the run ends."""
        if self._asked == STOP:
            return
        is_leaving, self._asked = bool(self._asked), STOP
        grace_secs = self._limits.grace_secs if self.is_running else 0.0
        # Hosts that are left after a failure have less time.
        until_secs = time.monotonic() + grace_secs
        self.deadline_secs = min(self.deadline_secs, until_secs)
        if self.is_running:
            self.emit("stop_requested", within_secs=grace_secs)
            if not is_leaving:
                self._ask(STOP)

    def take(self, host: int, message: Mapping[str, Any]) -> None:
        """Takes in a message of a host, or its end."""
        now_secs = time.monotonic()
        if "exit" not in message:
            self._heard.add(host)
        match message:
            case {"exit": int(code)}:
                self._end(host, code)
            case {"heartbeat": load, "begun": begun}:
                self.watch.heartbeat(host, begun, load)
            case {"phase": phase, "begun": begun}:
                self.watch.begin(host, phase, begun)
            case {"stepped": True}:
                self.has_stepped = True
            case {"ready": True}:
                self._ready.add(host)
            case {"sigterm": True} if not self._asked:
                self.preempted.add(self.slices[host])
            case {"failure": fields}:
                if self._machine(host) != self._machines.number:
                    # Each machine has a clock of its own.
                    fields = fields | {"at_secs": now_secs}
                self._fail(HostFailure(**fields))
            case {"event": ("world_left" | "run_stopped") as name, "fields": fields}:
                self._ends[name] = fields
            case {"event": name, "fields": fields}:
                self.is_running |= name != "world_joined"
                self.emit(name, **fields)

    def lose(self, machine: int) -> None:
        """Notes that a machine is lost, and its hosts with it."""
        for host in sorted(self.alive):
            if self._machine(host) == machine:
                self._end(host, -signal.SIGKILL)

    def look(self) -> None:
        """Finds hosts that hang; called often."""
        now_secs = time.monotonic()
        self.watch.look(now_secs=now_secs)
        hang = self.watch.hang()
        if hang is not None and self.deadline_secs == math.inf:
            self.signal(self.alive, signal.SIGUSR1)
            self.signal(self.alive, signal.SIGCONT)
            time.sleep(_STACKS_SECS)
            for host in hang.hosts or [0]:
                phase = self.watch.phase(host)
                self._fail(failures.of_hang(host, hang, phase, now_secs=now_secs))
            # Hosts that hang report nothing more.
            self.deadline_secs = now_secs

    def result(self) -> bool:
        """Returns whether the run is over; False if the hosts left for another world.

        Raises:
          WorldLostError: if hosts or devices were lost.
          RunError: if the program has failed.
          StoppedError: if hosts did not end in time, or died, after SIGTERM.
        """
        if self.failures:
            raise self._error()
        if self.alive and self._asked != _ABANDON:
            raise errors.StoppedError(self._describe_stop())
        # The training may have ended before the hosts could leave.
        has_left = self._asked not in (b"", STOP) and "world_left" in self._ends
        name = "world_left" if has_left else "run_stopped"
        if name in self._ends:
            self.emit(name, **self._ends[name])
        return not has_left

    def _machine(self, host: int) -> int:
        return self._machines.of_slice(self.slices[host])

    def _order(self, host: int, **order: Any) -> None:
        self._machines.order(self._machine(host), **order)

    def _tell(self, message: bytes) -> None:
        for host in self.alive:
            self._order(host, tell=[self._key, host], text=message.decode())

    def _ask(self, order: bytes) -> None:
        self._asked = order
        self._tell(order)
        # JAX's preemption service handles the signal.
        self.signal(self.alive, signal.SIGTERM)

    def _end(self, host: int, exit_code: int) -> None:
        self.alive.discard(host)
        if exit_code and all(each.host != host for each in self.failures):
            # The count is that of this machine.
            is_here = self._machine(host) == self._machines.number
            killed = is_here * (failures.oom_kills() - self._oom_kills)
            self._fail(failures.silent_death(host, exit_code, oom_kills=killed))
        self.watch.end(host)

    def _fail(self, failure: HostFailure) -> None:
        host, is_first, log = failure.host, not self.failures, ""
        log_file = f"{self._logs}/host-{host}.log"
        # A host that failed to start has none, and that of another machine is there.
        with contextlib.suppress(OSError):
            lines = pathlib.Path(log_file).read_text(errors="replace").splitlines()
            log = "\n".join(lines[-_SHOWN_LOG_LINES:])
        phase = self.watch.phase(host)
        self.failures.append(
            dataclasses.replace(failure, phase=phase, log=log, log_file=log_file)
        )
        if failure.is_hang or failure.message.startswith("killed by SIGKILL"):
            # Nothing else has caused it; the other hosts hang, or will.
            secs = _TOGETHER_SECS
        elif failure.is_of_devices or failure.is_consequence or host not in self._heard:
            # What a host cannot import, others cannot, soon.
            secs = _DEVICES_GRACE_SECS
        else:
            secs = _GRACE_SECS
        if is_first or (failure.is_signal and not failure.is_consequence):
            self.deadline_secs = time.monotonic() + secs

    def _error(self) -> errors.RunError:
        described = self._describe(self.cause)
        error = error_of(self.failures, len(self.slices), described=described)
        if not isinstance(error, WorldLostError):
            return error
        for each in self.failures:
            if each.is_silent and each.host in error.hosts:
                self.emit("host_lost", host=each.host, why=each.message)
        if self._asked == STOP:
            return errors.StoppedError(
                f"{error}\nafter {termination.cause()} to the run, so its last step may"
                " not have been saved"
            )
        return error

    def _describe(self, failure: HostFailure) -> str:
        ended = {each.host for each in self.failures if not each.is_signal}
        if len(ended) == len(self.slices) and not self._heard:
            return (
                f"no host process could begin: host {failure.host} {failure.message}."
                " Each imports the program that starts the run, and what it printed is"
                " on standard error"
            )
        if failure.is_ours or (failure.traceback and not failure.is_of_devices):
            return failures.judge([failure], num_hosts=len(self.slices)).words
        why = f"host {failure.host} failed: {failure.message}"
        lines = [f"  | {line}" for line in failure.log.splitlines()]
        return "\n".join([why, f"the end of its log, {failure.log_file}:", *lines])

    def _describe_stop(self) -> str:
        if not self.is_running:
            return f"ended by {termination.cause()} before the first step"
        hosts = ", ".join(map(str, sorted(self.alive)))
        return (
            f"hosts {hosts} did not save and end within {self._limits.grace_secs:g} s"
            f" of {termination.cause()} and were killed; raise Limits.grace_secs (in a"
            " configuration termination_grace_period_seconds) if saving takes longer"
            " and the launcher waits for it"
        )


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
    # The program is not to blame for a device that computes wrong values.
    wrong = frozenset(
        each.host
        for each in failed
        if host_process.DeviceWrongError.__name__ in each.error
    )
    lost = wrong or failures.lost_hosts(failed)
    if lost is None and "ReplacedError" in failure.error:
        return errors.ReplacedError(described)
    if lost is None:
        return failures.ProgramFailedError(
            described, failures=failed, num_hosts=num_hosts
        )
    return WorldLostError(
        described,
        hosts=lost or failures.hosts_of_bad_devices(failed, num_hosts),
        hung=frozenset(each.host for each in failed if each.is_hang),
        at_secs=min(each.at_secs for each in failed),
        failures=failed,
        num_hosts=num_hosts,
    )


class ProcessCluster:
    """Slices of host processes; a `Cluster`.

    Args:
      machines: this machine and those that follow it; closed by the caller.
      limits: how long hosts may take.
      injected: faults, by their steps.
      emit: called for what happens to slices before the first world; that of the run
        is called afterwards.
    """

    def __init__(
        self,
        machines: Machines,
        *,
        limits: watch.Limits,
        injected: Sequence[faults.Fault] = (),
        emit: events.Emit = events.nobody,
    ) -> None:
        self._machines, self._limits = machines, limits
        self._faults = list(injected)
        self._emit = emit
        # Of several machines any may continue the run.
        owner = None if machines.are_several else process.this()
        self._claimant = claims.Claimant(owner=owner)
        self._keys = itertools.count(1)
        # The worlds of which hosts may be alive, by key; the one that trains, and the
        # one that is prepared.
        self._worlds: dict[int, HostsOfWorld] = {}
        self._training: HostsOfWorld | None = None
        self._next: HostsOfWorld | None = None
        # By slice that is there, since when; and when the last world began.
        self._since = dict.fromkeys(machines.slices(), time.monotonic())
        self._began_secs = math.inf
        # Slices that are kept away; that are about to go, with their memory; that are
        # new, or have crashed, and are to be checked; that have slow hosts.
        self._absent: set[int] = set()
        self._leaving: set[int] = set()
        self._unchecked: set[int] = set()
        self._slow: set[int] = set()
        # By slice that was refused: until when, and how often.
        self._refused: dict[int, tuple[float, int]] = {}
        self._failures: list[Failure] = []
        # How many worlds in a row were abandoned; and the steps that are done.
        self._num_abandoned = self._step = 0
        # Whether this machine was asked to end, and others may go on.
        self._hands_over = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def devices_per_slice(self) -> int:
        """See `Cluster`."""
        own = self._machines.own
        return own.hosts_per_slice * own.hardware.devices_per_host

    def slices(self, current: frozenset[int]) -> Slices:
        """See `Cluster`."""
        now_secs = time.monotonic()
        there = self._machines.slices() - self._absent - self._leaving
        training = () if self._training is None else self._training.slices
        for number in sorted(self._since.keys() - there):
            del self._since[number]
            if number not in {*training, *self._absent, *self._leaving}:
                # Otherwise its world is lost, too, and that is reported.
                self._emit("slice_lost", slice=number, why="its machine is lost")
        for number in sorted(there - self._since.keys()):
            self._since[number] = now_secs
            self._refused.pop(number, None)
            self._unchecked.add(number)
            self._slow.discard(number)
            self._emit("slice_returned", slice=number)
        lasting = {n for n, secs in self._since.items() if secs <= self._began_secs}
        return Slices(
            current=current & lasting,
            present_secs={
                number: now_secs - since_secs
                for number, since_secs in self._since.items()
                if now_secs >= self._refused.get(number, (0.0, 0))[0]
            },
            failures=tuple(self._failures),
            slow=frozenset(self._slow),
        )

    def run_world(
        self,
        train: TrainFunction,
        assignment: Assignment,
        *,
        emit: events.Emit,
        has_changed: Callable[[], Decision | None],
    ) -> bool:
        """See `Cluster`; in the main thread it reacts to SIGTERM."""
        host_process.check_sent(train)
        self._machines.own.train = train
        self._emit = emit
        with termination.Notice() as notice:
            world = self._begun(assignment)
            try:
                while not world.is_over:
                    self._take_messages(_LOOK_SECS, notice.fileno())
                    if notice.is_coming() and notice.received():
                        self._terminate(world)
                    self._look(world)
                    # What ends this process may have been sent to the hosts, too: then
                    # they are not about to leave without it.
                    if not notice.is_coming():
                        self._change(world, has_changed)
                if world.has_stepped:
                    # Their devices have passed the check.
                    self._unchecked -= {*world.slices}
                is_over = world.result()
            except (WorldLostError, errors.StoppedError) as error:
                if isinstance(error, WorldLostError):
                    self._note_lost(error, world)
                if self._hands_over:
                    raise HandedOverError(str(error)) from error
                raise
            finally:
                # What its hosts still report is of steps that do not count.
                world.emit = events.nobody
                world.kill()
                self._training = None
                self._lose_memory()
                if self._machines.own.hardware.hardware != "cpu":
                    # Its devices are free when its processes have ended.
                    self._await_end([world])
        if self._hands_over and not is_over:
            raise HandedOverError("this machine was asked to end")
        return is_over

    def wait(self, secs: float) -> None:
        """See `Cluster`."""
        self._take_messages(min(secs, _LOOK_SECS))

    def close(self) -> None:
        """Ends the hosts that are left."""
        for world in self._worlds.values():
            world.kill()
        self._machines.own.end_hosts()

    def _world(self, assignment: Assignment) -> HostsOfWorld:
        key = next(self._keys)
        unchecked = self._unchecked.intersection(assignment.work.slices)
        assignment = dataclasses.replace(
            assignment, claimant=self._claimant, unchecked=frozenset(unchecked)
        )
        self._worlds[key] = HostsOfWorld(key, assignment, self._machines, self._limits)
        return self._worlds[key]

    def _begun(self, assignment: Assignment) -> HostsOfWorld:
        # The world of an assignment, which has begun; it may be prepared.
        self._began_secs = time.monotonic()
        prepared = self._next
        unchecked = self._unchecked.intersection(assignment.work.slices)
        if prepared and (
            prepared.failures
            or not _is_for(prepared, assignment)
            or not unchecked <= prepared.assignment.unchecked
        ):
            self._discard()
        world = self._training = self._next or self._world(assignment)
        self._next = None
        # They hold their slices' memory until they have ended. Meanwhile hosts join.
        self._await_end([each for each in self._worlds.values() if each is not world])
        world.begin(functools.partial(self._receive, assignment.number))
        return world

    def _discard(self) -> None:
        if self._next is not None:
            self._next.kill()
            self._next = None

    def _await_end(self, killed: Sequence[HostsOfWorld]) -> None:
        # A machine that does not report in time that its hosts have ended is lost.
        until_secs = time.monotonic() + self._machines.lost_secs
        while any(each.alive for each in killed):
            self._take_messages(_LOOK_SECS)
            if time.monotonic() > until_secs:
                for machine in set().union(*(each.machines for each in killed)):
                    self._machines.give_up(machine)

    def _take_messages(self, secs: float, *extra: int) -> None:
        if not self._machines.has_lead():
            raise LeadershipLostError("the machine does not lead the run any more")
        for machine, message in self._machines.wait(secs, *extra):
            if "leaving" in message:
                self._preempt(self._machines.slices([machine]))
            elif "lost" in message:
                for world in self._worlds.values():
                    world.lose(machine)
                # Those of the world that trains are forgotten when it has ended.
                training = () if self._training is None else self._training.slices
                self._leaving -= self._machines.slices([machine]) - {*training}
            elif "host" in message:
                key, host = message["host"]
                if key in self._worlds:
                    self._worlds[key].take(host, message)
        # A prepared world waits, for any time; one that is killed ends.
        if self._training is not None:
            self._training.look()
        for key, world in list(self._worlds.items()):
            if not world.alive and world not in (self._training, self._next):
                del self._worlds[key]

    def _receive(self, world: int, name: str, /, **fields: Any) -> None:
        self._emit(name, **fields)
        if name in ("step", "step_done", "restored_from"):
            self._step = int(fields["step"])
        if name in ("step", "step_done"):
            self._num_abandoned = 0
        elif name == "world_claimed":
            self._claimant = dataclasses.replace(self._claimant, has_claimed=True)
        elif name == "run_started" and world == 1:
            # An earlier start of the run has lived through the others.
            start = int(fields["start_step"])
            self._faults = [each for each in self._faults if each.at_step >= start]

    def _look(self, world: HostsOfWorld) -> None:
        self._inject(world)
        if world.has_stepped:
            self._machines.own.stand_by()
        for host, phase, why in world.watch.newly_slow():
            number = world.slices[host]
            self._slow.add(number)
            self._emit("slow_host", slice=number, host=host, phase=phase, why=why)

    def _change(
        self, world: HostsOfWorld, has_changed: Callable[[], Decision | None]
    ) -> None:
        # Ends a world for the next one, if that is decided on, and is prepared. What is
        # about to go does not wait.
        if world.deadline_secs < math.inf:
            return
        self._preempt(world.preempted)
        decided = has_changed()
        loses_memory = not self._leaving.isdisjoint(world.slices)
        is_left, is_planned = False, isinstance(decided, Train)
        if self._hands_over and not is_planned and (decided or loses_memory):
            # The other machines are too few, or have got SIGTERM, too.
            self._hands_over = False
            world.stop()
        elif self._hands_over and not world.is_running:
            world.end()
        elif not isinstance(decided, Train):
            self._discard()
            if decided or self._hands_over:
                is_left = world.leave(loses_memory=loses_memory)
            elif world.preempted:
                # Its hosts wait for an order, and a run that is not elastic ends.
                world.stop()
        elif self._hands_over or self._prepare(world, decided) or loses_memory:
            may_abandon = not loses_memory and self._num_abandoned < _MOST_ABANDONED
            is_abandoned = may_abandon and world.abandon(self._step)
            self._num_abandoned += is_abandoned
            is_left = is_abandoned or world.leave(loses_memory=loses_memory)
        if is_left:
            self._emit("world_leaving", slices=leaving_for(decided))

    def _prepare(self, world: HostsOfWorld, decided: Train) -> bool:
        # Prepares the world that is decided on; returns whether it is.
        following = Assignment(number=world.assignment.number + 1, work=decided)
        if self._next is None or not _is_for(self._next, following):
            self._discard()
            self._next = self._world(following)
        if unfit := self._next.unfit - {*world.slices}:
            has_failed = bool(self._next.failures)
            self._refuse(unfit, self._next.cause.message if has_failed else _LATE)
            self._discard()
            return False
        return self._next.is_prepared

    def _terminate(self, world: HostsOfWorld) -> None:
        # SIGTERM to this machine, or once more.
        if self._machines.are_several and not self._hands_over:
            # All hosts leave, and the next leader starts others without this machine.
            self._hands_over = True
            self._preempt(self._machines.own.slices)
        else:
            world.stop()

    def _preempt(self, slices: Collection[int]) -> None:
        for number in sorted({*slices} - self._leaving):
            self._leaving.add(number)
            self._since.pop(number, None)
            self._emit("slice_preempted", slice=number)

    def _lose_memory(self) -> None:
        # Their machines go, and their memory with them.
        for number in self._leaving & {*self._absent, *self._machines.own.slices}:
            self._absent.add(number)
            self._order_fault(faults.Kind.KILL_SLICE, number)
        self._leaving.clear()

    def _order_fault(self, kind: faults.Kind, number: int) -> None:
        machine = self._machines.of_slice(number)
        self._machines.order(machine, fault=kind.value, slice=number)

    def _refuse(self, slices: Iterable[int], why: str) -> None:
        for number in sorted(slices):
            _, times = self._refused.get(number, (0.0, 0))
            secs = min(_RETRY_SECS * 2**times, _MOST_RETRY_SECS)
            self._refused[number] = time.monotonic() + secs, times + 1
            self._settle_again(number)
            self._fail(number)
            self._emit("slice_refused", slice=number, why=why)

    def _fail(self, number: int) -> None:
        self._failures.append(Failure(slice=number, at_secs=time.monotonic()))

    def _settle_again(self, number: int) -> None:
        self._unchecked.add(number)
        if number in self._since:
            self._since[number] = time.monotonic()

    def _note_lost(self, error: WorldLostError, world: HostsOfWorld) -> None:
        there = self._machines.slices() - self._absent
        error.gone = frozenset({*world.slices} - there)
        if self._machines.are_several:
            error.machines = frozenset(map(self._machines.of_slice, error.gone))
        gone = error.gone - self._leaving
        lost = {world.slices[host] for host in error.hosts}
        hung = {world.slices[host] for host in error.hung}
        wrong = {
            world.slices[each.host]: each.message
            for each in error.failures
            if host_process.DeviceWrongError.__name__ in each.error
        }
        why = str(error).partition("\n")[0]
        for number in sorted(lost | gone):
            told = why if number in lost else "it is gone at the same time"
            self._emit("slice_lost", slice=number, why=told)
            self._unchecked.add(number)
            # Of the others nothing but processes was lost, which are started again.
            if number in gone:
                self._since.pop(number, None)
            elif number in hung:
                self._settle_again(number)
            if number in wrong:
                self._refuse([number], wrong[number])
            elif number not in self._leaving:
                self._fail(number)

    def _inject(self, world: HostsOfWorld) -> None:
        for fault in faults.due(self._faults, self._step):
            kind, target = faults.Kind(fault.kind), fault.target
            if kind is faults.Kind.RETURN_SLICE and target in world.slices:
                continue  # Its world has not ended yet.
            self._faults.remove(fault)
            self._emit(
                "fault_injected", kind=kind.value, target=target, step=self._step
            )
            of_hosts = kind in faults.OF_HOSTS
            named = range(len(world.slices)) if of_hosts else world.slices
            hosts = [host for host, number in enumerate(named) if number == target]
            match kind:
                case faults.Kind.KILL_HOST:
                    world.signal(hosts, signal.SIGKILL)
                case faults.Kind.HANG_HOST:
                    world.signal(hosts, signal.SIGSTOP)
                case faults.Kind.PREEMPT_SLICE:
                    self._absent.add(target)
                    self._preempt([target])
                case faults.Kind.KILL_SLICE:
                    self._absent.add(target)
                    world.signal(hosts, signal.SIGKILL)
                case faults.Kind.RETURN_SLICE:
                    self._absent.discard(target)
            if not of_hosts:
                self._order_fault(kind, target)


def _is_for(world: HostsOfWorld, assignment: Assignment) -> bool:
    # Whether its hosts are those of an assignment, whatever is spare.
    mine = world.assignment
    work = dataclasses.replace(assignment.work, spares=mine.work.spares)
    return (mine.number, mine.work) == (assignment.number, work)
