"""A cluster of host processes, on this machine and on the machines that follow it.

Each world is a set of fresh processes, which the machines' stations start. One loop, in
one thread, handles the messages from the hosts of all worlds: the world that trains;
the next world, prepared before a planned change so that its hosts have already joined
when the current world's hosts are asked to leave; and worlds being killed, which nobody
waits for.

When one host fails, the others are killed soon afterward, because they would hang in a
collective, and the world ends with the first failure. If only a host's process died, it
is restarted on the same slice. A slice that hung must settle first. A slice whose
devices compute wrong values is excluded for some time.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
import pathlib
import signal
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from elastic_ckpt.core import codec, errors, events, process, storage
from elastic_ckpt.elastic import failures, faults, link, termination, watch
from elastic_ckpt.elastic.cluster import Assignment, TrainFunction, leaving_for
from elastic_ckpt.elastic.decision import Decision, Failure, Slices, Train
from elastic_ckpt.elastic.failures import HostFailure, WorldLostError
from elastic_ckpt.elastic.host import (
    BEGIN,
    LEAVE,
    LOSE_MEMORY,
    STOP,
    Member,
    check_sent,
)
from elastic_ckpt.elastic.station import Station
from elastic_ckpt.tiers.persistent import claims

# The longest pause between checks of the hosts and slices.
_LOOK_SECS = 0.1
# After a failure, other hosts may fail or report the cause. The time to wait for them
# if a host was killed or hangs; if it raised; if devices failed or JAX aborted it.
_TOGETHER_SECS, _GRACE_SECS, _DEVICES_GRACE_SECS = 0.1, 0.5, 4.0
# The time that hosts that hang have to write their stacks.
_STACKS_SECS = 0.5
# The time limit for the hosts of a prepared world to join.
_PREPARE_SECS = 60.0
# How long a slice is excluded; doubles each time, up to the maximum.
_RETRY_SECS, _MOST_RETRY_SECS = 30.0, 3600.0
# How many worlds in a row may be abandoned before their first step: slices that come
# and go all the time must not keep the run from training.
_MOST_ABANDONED = 3
_SHOWN_LOG_LINES = 15
# The signal that a fault sends to the hosts.
_SIGNALS = {
    faults.Kind.KILL_HOST: signal.SIGKILL,
    faults.Kind.KILL_SLICE: signal.SIGKILL,
    faults.Kind.HANG_HOST: signal.SIGSTOP,
}


class LeadershipLostError(errors.StoppedError):
    """This machine no longer leads the run."""


class HandedOverError(LeadershipLostError):
    """This machine was asked to stop, and another machine leads the run."""


class Machines:
    """This machine and the machines that follow it.

    Args:
      own: this machine's station; every machine has the same number of slices.
      listener: the listener to which the others connect; None if there is only one
        machine.
      has_lead: a function that returns whether this machine still leads.
      configured: a digest of the configuration, which must be the same on all machines.

    Attributes:
      lost_secs: the time after which a silent machine is lost.
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
        self.lost_secs = math.inf if listener is None else listener.lost_secs
        self.has_lead = has_lead
        self._listener = listener
        self._configured = configured
        self._links: dict[int, link.Link] = {}

    @property
    def connected(self) -> set[int]:
        """This machine and all connected machines."""
        return {self.number, *self._links}

    def of_slice(self, number: int) -> int:
        """The machine that a slice is on."""
        return number // len(self.own.slices)

    def slices(self, machines: Iterable[int]) -> set[int]:
        """The slices on the given machines."""
        each = len(self.own.slices)
        return {n * each + slice_ for n in machines for slice_ in range(each)}

    def address(self, machine: int) -> str:
        """The address that a machine has reserved for host 0 of the next world."""
        # Any address will do for a machine that was just lost: its hosts count as
        # killed.
        far = self._links.get(machine)
        hello = self.own.hello if far is None else far.hello
        return f"{hello['interface']}:{hello['port']}"

    def order(self, machine: int, **order: Any) -> None:
        """Sends an order to a machine; does nothing if the machine is lost."""
        if machine == self.number:
            self.own.do(order)
        elif machine in self._links:
            self._links[machine].send(**order)

    def tell(self, **message: Any) -> None:
        """Sends a message to all other machines, from any thread."""
        for each in list(self._links.values()):
            each.send(**message)

    def wait(self, secs: float, *extra: Any) -> Iterator[tuple[int, dict[str, Any]]]:
        """Waits for messages; yields each with its machine's index.

        The last message from a lost machine is `{"lost": True}`. The machine may rejoin
        immediately, but its hosts are gone. A readable object in `extra` also ends the
        wait.
        """
        links = [each.channel for each in self._links.values()]
        for message in self.own.wait(secs, *links, *extra):
            yield self.number, message
        for number, each in list(self._links.items()):
            try:
                for message in each.receive():
                    if "port" in message:
                        each.hello |= message
                    yield number, message
            except link.LinkLostError:
                self.forget(number)
                yield number, {"lost": True}
        while self._listener is not None and not self._listener.accepted.empty():
            self._admit(self._listener.accepted.get())

    def forget(self, machine: int) -> None:
        """Declares another machine lost; it may connect again."""
        lost = self._links.pop(machine)
        lost.close()
        for each in self.connected:
            self.order(each, forget=lost.hello["agents"])

    def wait_until(self, is_so: Callable[[set[int]], bool], secs: float) -> None:
        """Waits until the connected machines satisfy `is_so` or the time is up."""
        until_secs = time.monotonic() + secs
        while not is_so(self.connected) and time.monotonic() < until_secs:
            list(self.wait(_LOOK_SECS))

    def end(self, secs: float, *, is_stopped: bool, failure: str = "") -> None:
        """Tells the others that the run ended; waits for them to close their links."""

        def are_told(there: set[int]) -> bool:
            # Repeated, because a machine may have just connected.
            self.tell(over=True, is_stopped=is_stopped, failure=failure)
            return there == {self.number}

        list(self.wait(0.0))
        self.wait_until(are_told, secs)

    def close(self) -> None:
        """Closes the links; machines that were not told look for the next leader."""
        if self._listener is not None:
            self._listener.close()
        while self._links:
            self._links.popitem()[1].close()

    def _admit(self, accepted: link.Link) -> None:
        number = accepted.hello.get("machine", -1)
        if accepted.hello.get("configured") != self._configured:
            failure = (
                f"machine {number} has a different configuration from machine"
                f" {self.number}, which leads; use the same configuration on all"
                " machines"
            )
            accepted.send(over=True, is_stopped=False, failure=failure)
        elif number in self.connected:
            accepted.send(refused=f"machine {number} already has a supervisor")
        else:
            self._links[number] = accepted
            accepted.send(
                agents=self.own.hello["agents"], machines=sorted(self.connected)
            )
            return
        accepted.close()


class HostsOfWorld:
    """Starts the hosts of one world, sends them orders, and tracks their state.

    Its only input is messages from hosts; its only output is orders to machines.

    Args:
      key: the world's sequence number among all worlds that were started.
      assignment: the world's slices and rows.
      machines: the machines that have the world's slices.
      limits: the time limits of the hosts.

    Attributes:
      emit: a function called with the hosts' events once the world has begun.
      slices: the slice of each host.
      alive: the hosts that have not exited.
      failures: the failures that were reported or detected.
      deadline_secs: the time at which the hosts are killed; infinite while they may
        continue.
      is_running: whether a host has done anything except join; until then, there is
        nothing to save.
      has_stepped: whether a host has completed a step.
      preempted: the slices of hosts that received a SIGTERM that this cluster did not
        send.
    """

    def __init__(
        self,
        key: int,
        assignment: Assignment,
        machines: Machines,
        limits: watch.Limits,
    ) -> None:
        self.assignment = assignment
        self.emit: events.Emit = events.nobody
        hosts_of_slice = range(machines.own.hosts_per_slice)
        self.slices = [n for n in assignment.work.slices for _ in hosts_of_slice]
        self.alive = set(range(len(self.slices)))
        self.failures: list[HostFailure] = []
        self.deadline_secs = math.inf
        self.is_running = False
        self.has_stepped = False
        self.preempted: set[int] = set()
        self._key, self._machines, self._limits = key, machines, limits
        # The last order to the hosts; empty for none.
        self._asked = b""
        # The hosts that have not joined.
        self._missing = {*self.alive}
        # The fields of `world_left` and `run_stopped`. Hosts that stop before their
        # last step report both; which one applies is known when all have exited.
        self._ends: dict[str, dict[str, Any]] = {}
        now_secs = time.monotonic()
        self._join_until_secs = now_secs + _PREPARE_SECS
        self.watch = watch.Watch(limits, len(self.slices), now_secs=now_secs)
        self._oom_kills = failures.oom_kills()
        # Unique, because an earlier launch of the run may still be alive.
        self._logs = storage.make_unique_directory(machines.own.log_directory)
        address = machines.address(machines.of_slice(self.slices[0]))
        for number in range(len(self.slices)):
            member = Member(address=address, num_hosts=len(self.slices), host=number)
            self._order(
                "start",
                [number],
                assignment=codec.encode(assignment),
                member=codec.encode(member),
                log=self._logs,
            )
        for machine in self.machines - machines.connected:
            self.lose(machine)

    @property
    def machines(self) -> set[int]:
        """The machines whose hosts have not all exited."""
        return {self._machine(host) for host in self.alive}

    @property
    def is_prepared(self) -> bool:
        """Whether waiting longer is pointless: all hosts joined, or some cannot."""
        is_late = time.monotonic() > self._join_until_secs
        return not self._missing or bool(self.failures) or is_late

    def unfit(self) -> dict[int, str]:
        """The slices whose hosts prevent the world's preparation, with the reasons."""
        hosts: Collection[int] = ()
        why = "its hosts did not join the others in time"
        if self.failures:
            # Blames only the hosts that caused the other failures.
            cause = failures.first_failure(self.failures)
            hosts = failures.lost_hosts(self.failures) or {cause.host}
            why = cause.message
        elif self._missing and self.is_prepared:
            # Some hosts do not join or do not finish checking their devices.
            missing = self._missing if len(self._missing) < len(self.slices) else ()
            hosts = self.watch.behind() or missing
        return {self.slices[each]: why for each in sorted(hosts)}

    @property
    def is_over(self) -> bool:
        """Whether all hosts have exited, or the deadline for the others has passed."""
        have_ended = self.alive <= {each.host for each in self.failures}
        return have_ended or time.monotonic() > self.deadline_secs

    def begin(self, emit: events.Emit) -> None:
        """Lets the hosts begin; hosts that have joined wait for this."""
        self.emit = emit
        self._order("tell", self.alive, text=BEGIN.decode())

    def signal(self, hosts: Iterable[int], number: int) -> None:
        """Sends hosts a signal."""
        self._order("signal", hosts, number=int(number))

    def kill(self) -> None:
        """Kills the hosts."""
        self.signal(self.alive, signal.SIGKILL)

    def leave(self, step: int, *, loses_memory: bool, may_abandon: bool) -> bool:
        """Asks the hosts to leave for the next world.

        They agree on a step, save after it, and leave. With `may_abandon`, hosts that
        have not completed a step are killed immediately instead: they have nothing to
        save and may be about to compile for a long time.

        Args:
          step: the step that the run has reached.
          loses_memory: whether some hosts' memory is lost when they leave.
          may_abandon: see above.

        Returns:
          False if the hosts are already leaving or cannot be asked yet.
        """
        is_abandoned = may_abandon and not self.has_stepped
        if self._asked == LEAVE and loses_memory:
            # A machine must also leave, and the newest order takes precedence.
            self._ask(LOSE_MEMORY)
        if self._asked or not (is_abandoned or self.is_running):
            return False
        if is_abandoned:
            self._asked, self._ends["world_left"] = LEAVE, {"step": step}
            self.deadline_secs = time.monotonic()
        else:
            self._ask(LOSE_MEMORY if loses_memory else LEAVE)
        return True

    @property
    def is_stopping(self) -> bool:
        """Whether the hosts were asked to stop because the run is ending."""
        return self._asked == STOP

    def stop(self) -> None:
        """Asks the hosts to save and stop within the grace period: the run ends."""
        if self.is_stopping:
            return
        grace_secs = self._limits.grace_secs if self.is_running else 0.0
        # After a failure, the deadline may be earlier.
        self.deadline_secs = min(self.deadline_secs, time.monotonic() + grace_secs)
        if self.is_running:
            self.emit("stop_requested", within_secs=grace_secs)
            self._ask(STOP)
        self._asked = STOP

    def take(self, host: int, message: Mapping[str, Any]) -> None:
        """Handles a message from a host, or the host's exit."""
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
                self._missing.discard(host)
            case {"sigterm": True} if not self._asked:
                self.preempted.add(self.slices[host])
            case {"failure": fields}:
                if self._machine(host) != self._machines.number:
                    # Each machine has its own clock.
                    fields = fields | {"at_secs": time.monotonic()}
                self._fail(HostFailure(**fields))
            case {"event": ("world_left" | "run_stopped") as name, "fields": fields}:
                self._ends[name] = fields
            case {"event": name, "fields": fields}:
                self.is_running |= name != "world_joined"
                self.emit(name, **fields)

    def lose(self, machine: int) -> None:
        """Records that a machine and its hosts are lost."""
        for host in sorted(self.alive):
            if self._machine(host) == machine:
                self._end(host, -signal.SIGKILL)

    def look(self) -> None:
        """Finds hosts that hang; must be called often."""
        now_secs = time.monotonic()
        self.watch.look(now_secs=now_secs)
        hang = self.watch.hang()
        if hang is not None and self.deadline_secs == math.inf:
            self.signal(self.alive, signal.SIGUSR1)
            self.signal(self.alive, signal.SIGCONT)
            time.sleep(_STACKS_SECS)
            for host in hang.hosts or [0]:
                self._fail(failures.of_hang(host, hang, now_secs=now_secs))
            # Hung hosts report nothing more.
            self.deadline_secs = now_secs

    def result(self) -> bool:
        """Returns whether the run is over; False if the hosts left for another world.

        Raises:
          WorldLostError: if hosts failed.
          StoppedError: if hosts died or did not stop in time after SIGTERM.
        """
        if self.failures:
            lost = WorldLostError(self.failures, num_hosts=len(self.slices))
            if self.is_stopping and not lost.is_of_program:
                raise errors.StoppedError(
                    f"{lost}\nthis happened after {termination.cause()} had asked the"
                    " run to stop, so the run's last step may not have been saved"
                )
            raise lost
        if self.alive and self.is_stopping:
            hosts = ", ".join(map(str, sorted(self.alive)))
            raise errors.StoppedError(
                f"stopped by {termination.cause()} before the first step"
                if not self.is_running
                else f"hosts {hosts} did not save and stop within"
                f" {self._limits.grace_secs:g} s of {termination.cause()} and were"
                " killed; raise Limits.grace_secs (termination_grace_period_seconds in"
                " a configuration) if saving takes longer and the launcher waits that"
                " long"
            )
        # The training may have ended before the hosts could leave.
        has_left = not self.is_stopping and "world_left" in self._ends
        name = "world_left" if has_left else "run_stopped"
        if name in self._ends:
            self.emit(name, **self._ends[name])
        return not has_left

    def _machine(self, host: int) -> int:
        return self._machines.of_slice(self.slices[host])

    def _order(self, kind: str, hosts: Iterable[int], **more: Any) -> None:
        for host in hosts:
            self._machines.order(
                self._machine(host), **{kind: [self._key, host]}, **more
            )

    def _ask(self, order: bytes) -> None:
        self._order("tell", self.alive, text=order.decode())
        if not self._asked:
            # JAX's preemption service handles the signal.
            self.signal(self.alive, signal.SIGTERM)
        self._asked = order

    def _end(self, host: int, exit_code: int) -> None:
        self.alive.discard(host)
        if exit_code and all(each.host != host for each in self.failures):
            # The count covers only this machine.
            is_here = self._machine(host) == self._machines.number
            killed = is_here * (failures.oom_kills() - self._oom_kills)
            self._fail(failures.silent_death(host, exit_code, oom_kills=killed))
        self.watch.end(host)

    def _fail(self, failure: HostFailure) -> None:
        host, is_first, log = failure.host, not self.failures, ""
        log_file = f"{self._logs}/host-{host}.log"
        # A host that failed to start has no log; other machines keep their own logs.
        with contextlib.suppress(OSError):
            lines = pathlib.Path(log_file).read_text(errors="replace").splitlines()
            log = "\n".join(lines[-_SHOWN_LOG_LINES:])
        phase = self.watch.phase(host)
        self.failures.append(
            dataclasses.replace(failure, phase=phase, log=log, log_file=log_file)
        )
        if failure.is_hang or failure.message.startswith("killed by SIGKILL"):
            # Nothing else caused this failure; the other hosts hang or will hang.
            secs = _TOGETHER_SECS
        elif failure.is_of_devices or failure.is_consequence or phase == "start":
            # Hosts that fail at imports fail soon after each other.
            secs = _DEVICES_GRACE_SECS
        else:
            secs = _GRACE_SECS
        if is_first or (failure.is_signal and not failure.is_consequence):
            self.deadline_secs = time.monotonic() + secs


@dataclasses.dataclass(kw_only=True)
class _Slice:
    """The state of a slice.

    Attributes:
      since_secs: the time at which the slice became available; infinite if it is not.
      is_away: whether the slice is unused until its machine rejoins.
      is_leaving: whether the current world must soon do without the slice.
      is_slow: whether the slice has slow hosts.
    """

    since_secs: float
    is_away: bool = False
    is_leaving: bool = False
    is_slow: bool = False
    refused_until_secs: float = 0.0
    refusals: int = 0

    def settle_again(self) -> None:
        """Requires the slice to settle before it is used."""
        self.since_secs = max(self.since_secs, time.monotonic())


class ProcessCluster(contextlib.AbstractContextManager["ProcessCluster"]):
    """Slices of host processes; a `Cluster`.

    Args:
      machines: this machine and its followers; the caller closes it.
      limits: the time limits of the hosts.
      injected: faults to inject, in step order.
      emit: a function called with events before the first world; `run` uses its own
        `emit` afterward.
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
        # With multiple machines, there is no owner: any of them may continue the run.
        owner = None if machines.own.num_machines > 1 else process.this()
        self._claimant = claims.Claimant(owner=owner)
        self._keys = itertools.count(1)
        # By key, the worlds whose hosts may be alive; the world that trains; the world
        # that is being prepared.
        self._worlds: dict[int, HostsOfWorld] = {}
        self._training: HostsOfWorld | None = None
        self._next: HostsOfWorld | None = None
        # Slices of machines that already follow are available immediately.
        there, now_secs = machines.slices(machines.connected), time.monotonic()
        self._slices = {
            number: _Slice(since_secs=now_secs if number in there else math.inf)
            for number in sorted(machines.slices(range(machines.own.num_machines)))
        }
        # When the last world began.
        self._began_secs = math.inf
        self._failures: list[Failure] = []
        # The number of worlds abandoned in a row, and the number of completed steps.
        self._num_abandoned = self._step = 0
        # Whether this machine was asked to stop, and whether others may continue.
        self._is_ending = self._hands_over = False

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
        connected = self._machines.slices(self._machines.connected)
        for number, each in self._slices.items():
            is_there = number in connected and not (each.is_away or each.is_leaving)
            if is_there and each.since_secs == math.inf:
                self._slices[number] = _Slice(since_secs=now_secs)
                self._emit("slice_returned", slice=number)
            elif not is_there and each.since_secs < math.inf:
                each.since_secs = math.inf
                if not each.is_away and number not in self._busy:
                    # The loss of a world is reported separately.
                    self._emit("slice_lost", slice=number, why="its machine is lost")
        there = {
            n: each for n, each in self._slices.items() if each.since_secs <= now_secs
        }
        return Slices(
            current=frozenset(
                number
                for number in current & there.keys()
                if there[number].since_secs <= self._began_secs
            ),
            alive_secs={
                number: now_secs - each.since_secs
                for number, each in there.items()
                if now_secs >= each.refused_until_secs
            },
            failures=tuple(self._failures),
            slow=frozenset(number for number, each in there.items() if each.is_slow),
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
        check_sent(train)
        self._machines.own.train = train
        self._emit = emit
        with termination.Notice() as notice:
            world = self._begun(assignment)
            try:
                while not world.is_over:
                    self._take_messages(_LOOK_SECS, notice)
                    if notice.is_coming() and notice.received():
                        self._terminate(world)
                    self._look(world)
                    # If this process received a SIGTERM, the hosts may also have
                    # received it. In that case, they do not leave for a world without
                    # this machine.
                    if not notice.is_coming() and world.deadline_secs == math.inf:
                        self._preempt(world.preempted)
                        self._change(world, has_changed())
                is_over = world.result()
            except (WorldLostError, errors.StoppedError) as error:
                if isinstance(error, WorldLostError):
                    self._note_lost(error, world)
                if self._hands_over:
                    raise HandedOverError(str(error)) from error
                raise
            finally:
                # Ignores steps that the world's hosts still report.
                world.emit = events.nobody
                world.kill()
                self._training = None
                self._lose_memory()
                if self._machines.own.hardware.hardware != "cpu":
                    # The devices become free only when the world's processes have
                    # exited.
                    self._await_end([world])
        if self._hands_over and not is_over:
            raise HandedOverError("this machine was asked to stop")
        return is_over

    def wait(self, secs: float) -> None:
        """See `Cluster`."""
        self._take_messages(min(secs, _LOOK_SECS))

    def close(self) -> None:
        """Kills the remaining hosts."""
        for world in self._worlds.values():
            world.kill()
        self._machines.own.end_hosts()

    @property
    def _busy(self) -> Collection[int]:
        # The slices of the world that trains.
        return () if self._training is None else self._training.slices

    def _world(self, assignment: Assignment) -> HostsOfWorld:
        key = next(self._keys)
        self._worlds[key] = HostsOfWorld(key, assignment, self._machines, self._limits)
        return self._worlds[key]

    def _begun(self, assignment: Assignment) -> HostsOfWorld:
        # Begins an assignment's world: the prepared world, if it matches.
        self._began_secs = time.monotonic()
        assignment = dataclasses.replace(assignment, claimant=self._claimant)
        if self._next and (self._next.failures or not _is_for(self._next, assignment)):
            self._discard()
        world = self._training = self._next or self._world(assignment)
        self._next = None
        # Old hosts use their slices' memory until they exit. New hosts join in the
        # meantime.
        self._await_end([each for each in self._worlds.values() if each is not world])
        world.begin(functools.partial(self._receive, assignment.number))
        return world

    def _discard(self) -> None:
        if self._next is not None:
            self._next.kill()
            self._next = None

    def _await_end(self, killed: Sequence[HostsOfWorld]) -> None:
        # A machine that does not report its hosts' exits in time is lost.
        until_secs = time.monotonic() + self._machines.lost_secs
        while any(each.alive for each in killed):
            self._take_messages(_LOOK_SECS)
            if time.monotonic() > until_secs:
                late = set().union(*(each.machines for each in killed))
                for machine in late - {self._machines.number}:
                    self._machines.forget(machine)
                    self._lose(machine)

    def _take_messages(self, secs: float, *extra: termination.Notice) -> None:
        if not self._machines.has_lead():
            raise LeadershipLostError("the machine no longer leads the run")
        for machine, message in self._machines.wait(secs, *extra):
            if "leaving" in message:
                self._preempt(self._machines.slices([machine]))
            elif "lost" in message:
                self._lose(machine)
            elif "host" in message:
                key, number = message["host"]
                if key in self._worlds:
                    self._worlds[key].take(number, message)
        # Only the training world can hang: a prepared world waits as long as necessary,
        # and a killed world goes away.
        if self._training is not None:
            self._training.look()
        self._worlds = {
            key: world
            for key, world in self._worlds.items()
            if world.alive or world in (self._training, self._next)
        }

    def _lose(self, machine: int) -> None:
        for world in self._worlds.values():
            world.lose(machine)
        for number in self._machines.slices([machine]):
            self._slices[number].is_away = False

    def _receive(self, world: int, name: str, /, **fields: Any) -> None:
        self._emit(name, **fields)
        if name in ("step", "step_done", "restored_from"):
            self._step = int(fields["step"])
        if name in ("step", "step_done"):
            self._num_abandoned = 0
        elif name == "world_claimed":
            self._claimant = dataclasses.replace(self._claimant, has_claimed=True)
        elif name == "run_started" and world == 1:
            # Earlier faults happened in an earlier launch of the run.
            start = int(fields["start_step"])
            self._faults = [each for each in self._faults if each.at_step >= start]

    def _look(self, world: HostsOfWorld) -> None:
        self._inject(world)
        if world.has_stepped:
            self._machines.own.stand_by()
        for host, phase, why in world.watch.newly_slow():
            number = world.slices[host]
            self._slices[number].is_slow = True
            self._emit("slow_host", slice=number, host=host, phase=phase, why=why)

    def _change(self, world: HostsOfWorld, decided: Decision | None) -> None:
        # Ends a world once the next one is decided on and prepared. A slice that is
        # about to be lost does not wait for the preparation.
        loses_memory = any(self._slices[number].is_leaving for number in world.slices)
        is_planned = isinstance(decided, Train)
        if self._hands_over and not is_planned and (decided or loses_memory):
            # The other machines are too few or also received SIGTERM.
            self._hands_over = False
            world.stop()
            return
        if isinstance(decided, Train) and not self._hands_over:
            is_due = self._prepare(world, decided) or loses_memory
        else:
            self._discard()
            is_due = self._hands_over or bool(decided)
            if (world.preempted or loses_memory) and not is_due:
                # The hosts wait for an order: a run that is not elastic ends.
                world.stop()
        is_rare = self._num_abandoned < _MOST_ABANDONED
        may_abandon = is_planned and is_rare and not loses_memory
        # A machine that leaves does not wait until its hosts have something to save.
        may_abandon |= self._hands_over and not world.is_running
        if is_due and world.leave(
            self._step, loses_memory=loses_memory, may_abandon=may_abandon
        ):
            self._num_abandoned += not world.has_stepped
            self._emit("world_leaving", slices=leaving_for(decided))

    def _prepare(self, world: HostsOfWorld, decided: Train) -> bool:
        # Prepares the world that is decided on; returns whether it is ready.
        number = world.assignment.number + 1
        following = Assignment(number=number, work=decided, claimant=self._claimant)
        if self._next is None or not _is_for(self._next, following):
            self._discard()
            self._next = self._world(following)
        is_prepared, unfit = self._next.is_prepared, self._next.unfit()
        for number in sorted(unfit.keys() - {*world.slices}):
            self._refuse(number, unfit[number])
            self._discard()
        return is_prepared and self._next is not None

    def _terminate(self, world: HostsOfWorld) -> None:
        # Handles SIGTERM to this machine, including a repeated one.
        own = self._machines.own
        if own.num_machines == 1 or self._hands_over or world.is_stopping:
            world.stop()
        else:
            # All hosts leave; the next leader starts new ones without this machine.
            self._is_ending = self._hands_over = True
            self._preempt(own.slices)

    def _preempt(self, slices: Iterable[int]) -> None:
        for number in sorted(slices):
            each = self._slices[number]
            if not (each.is_away or each.is_leaving):
                each.is_away, each.is_leaving = True, number in self._busy
                each.since_secs = math.inf
                self._emit("slice_preempted", slice=number)

    def _lose_memory(self) -> None:
        # Removes the memory of this machine's leaving slices, unless the machine itself
        # was asked to stop: the memory may still be there when it restarts.
        for number, each in self._slices.items():
            is_own = number in self._machines.own.slices
            if each.is_leaving and is_own and not self._is_ending:
                self._machines.own.do(
                    {"fault": faults.Kind.KILL_SLICE, "slice": number}
                )
            each.is_leaving = False

    def _refuse(self, number: int, why: str) -> None:
        each, now_secs = self._slices[number], time.monotonic()
        secs = min(_RETRY_SECS * 2**each.refusals, _MOST_RETRY_SECS)
        each.refused_until_secs = now_secs + secs
        each.refusals += 1
        each.settle_again()
        self._failures.append(Failure(slice=number, at_secs=now_secs))
        self._emit("slice_refused", slice=number, why=why)

    def _note_lost(self, error: WorldLostError, world: HostsOfWorld) -> None:
        # Slices that are not lost have lost only processes, which are restarted.
        connected = self._machines.connected
        machines = {number: self._machines.of_slice(number) for number in world.slices}
        error.gone = frozenset(
            number
            for number, machine in machines.items()
            if machine not in connected or self._slices[number].is_away
        )
        error.machines = frozenset(machines.values()) - connected
        lost: dict[int, HostFailure] = {}
        for failure in error.failures:
            if failure.host in error.hosts:
                lost[world.slices[failure.host]] = failure
                if failure.is_silent:
                    self._emit("host_lost", host=failure.host, why=failure.message)
        for number in sorted(lost.keys() | error.gone):
            each, cause = self._slices[number], lost.get(number)
            if each.is_leaving and cause is None:
                continue
            why = "it was lost at the same time" if cause is None else str(error)
            self._emit("slice_lost", slice=number, why=why.partition("\n")[0])
            if number in error.gone:
                each.since_secs = math.inf
            elif cause is not None and cause.is_hang:
                each.settle_again()
            if cause is not None and "DeviceWrongError" in cause.error:
                self._refuse(number, cause.message)
            elif not each.is_leaving:
                self._failures.append(Failure(slice=number, at_secs=time.monotonic()))

    def _inject(self, world: HostsOfWorld) -> None:
        for fault in faults.due(self._faults, self._step):
            kind, target = faults.Kind(fault.kind), fault.target
            if kind is faults.Kind.RETURN_SLICE and target in world.slices:
                continue  # The world that lost it has not ended yet.
            self._faults.remove(fault)
            self._emit(
                "fault_injected", kind=kind.value, target=target, step=self._step
            )
            of_hosts = kind in faults.OF_HOSTS
            named = range(len(world.slices)) if of_hosts else world.slices
            hosts = [host for host, number in enumerate(named) if number == target]
            if kind in _SIGNALS:
                world.signal(hosts, _SIGNALS[kind])
            if kind in (faults.Kind.KILL_SLICE, faults.Kind.RETURN_SLICE):
                self._slices[target].is_away = kind is faults.Kind.KILL_SLICE
            if not of_hosts:
                self._machines.order(
                    self._machines.of_slice(target), fault=kind, slice=target
                )


def _is_for(world: HostsOfWorld, assignment: Assignment) -> bool:
    # Whether a world matches an assignment, apart from its spares.
    mine = world.assignment
    work = dataclasses.replace(assignment.work, spares=mine.work.spares)
    return mine.number == assignment.number and mine.work == work
