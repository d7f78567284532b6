"""A cluster of processes of this machine: each slice is a group of host processes.

The supervisor (this process) owns what outlives worlds: the agents that serve the RAM
of each slice, and the state of the slices. Each world is a set of fresh processes. A
slice has its own directory on the RAM disk, like a separate machine, so that
it can be lost together with its memory. A slice that was lost is used again after
its devices have passed a check (`slice_check`).

Before a planned change the next world is prepared: its processes are started and have
joined when the hosts of the present one are asked to leave.
"""

from __future__ import annotations

import contextlib
import functools
import signal
import time
from collections.abc import Callable, Sequence

from elastic_ckpt.config import schema
from elastic_ckpt.core import events, storage
from elastic_ckpt.elastic import (
    faults,
    host_failure,
    host_process,
    kept_executables,
    process_world,
    shadow_world,
    slice_check,
    supervisor,
    watch,
    world_host,
)
from elastic_ckpt.elastic.cluster import Assignment, TrainFunction, leaving_for
from elastic_ckpt.elastic.decision import Decision, Failure, Slices, Train
from elastic_ckpt.tiers.peers import agent, agent_process, known_agents

# The longest time between two looks at the slices.
_LOOK_SECS = 0.1


class Processes:
    """Slices of host processes on this machine.

    Args:
      hardware: the slices and hosts, and the devices of each host. A host that
        simulates several slices is one slice here.
      log_directory: the directory for the logs of each world's hosts.
      memory: the RAM disks of the slices; None if hosts keep no checkpoints there.
      injected: faults, by their steps.
      limits: how long hosts may take to save and end after SIGTERM, and may hang.
      emit: called when a slice is lost or comes back.
    """

    def __init__(
        self,
        hardware: schema.WorldSection,
        *,
        log_directory: str,
        memory: world_host.SliceMemory | None = None,
        injected: Sequence[faults.Fault] = (),
        limits: watch.Limits | None = None,
        emit: events.Emit = events.nobody,
    ) -> None:
        self._hardware = hardware
        num_slices = min(hardware.hosts, hardware.slices)
        self._hosts_per_slice = hardware.hosts // num_slices
        self._log_directory = log_directory
        self._faults = list(injected)
        self._emit = emit
        self._resources = contextlib.ExitStack()
        kept = self._resources.enter_context(kept_executables.kept())
        self._limits = limits or watch.Limits()
        self._owned = world_host.Owned(
            memory=memory, kept=kept, grace_secs=self._limits.grace_secs
        )
        began_secs = time.monotonic()
        # By slice that is alive, since when.
        self._since = dict.fromkeys(range(num_slices), began_secs)
        # The slices that were lost since they were last in a world.
        self._lost: set[int] = set()
        # The slices that are absent from when their hosts have left: preempted.
        self._leaving: set[int] = set()
        self._failures: list[Failure] = []
        self._checks = slice_check.SliceChecks(
            hardware,
            hosts_per_slice=self._hosts_per_slice,
            log_directory=log_directory,
            limits=self._limits,
        )
        self._resources.callback(self._checks.close)
        self._prepared: process_world.ProcessWorld | None = None
        self._step = 0
        self._agents: dict[int, agent_process.AgentProcess] = {}
        for number in self._since:
            self._serve(number)

    @property
    def devices_per_slice(self) -> int:
        """See `Cluster`."""
        return self._hosts_per_slice * self._hardware.devices_per_host

    def slices(self, current: frozenset[int]) -> Slices:
        """See `Cluster`."""
        now_secs = time.monotonic()
        for verdict in self._checks.poll():
            if verdict.problem is not None:
                self._fail(verdict.slice)
                self._emit("slice_refused", slice=verdict.slice, why=verdict.problem)
        present = {
            number: now_secs - since
            for number, since in self._since.items()
            if number not in self._checks.unsound
        }
        return Slices(
            current=current - self._lost,
            present_secs=present,
            failures=tuple(self._failures),
        )

    def run_world(
        self,
        train: TrainFunction,
        assignment: Assignment,
        *,
        emit: events.Emit,
        has_changed: Callable[[], Decision | None],
    ) -> bool:
        """See `Cluster`; runs in the main thread."""
        slices = assignment.work.slices
        self._lost -= set(slices)
        has_trained = False
        shadows = contextlib.ExitStack()

        def receive(name: str, **fields: storage.Json) -> None:
            nonlocal has_trained
            emit(name, **fields)
            if name == "step":
                self._step = int(str(fields["step"]))
                if not has_trained:
                    has_trained = True
                    self._compile_ahead(assignment, shadows)
            elif name == "run_started" and assignment.number == 1:
                # Faults that an earlier start of the run has lived through are over.
                start_step = int(str(fields["start_step"]))
                self._faults = [f for f in self._faults if f.at_step >= start_step]

        def look(running: supervisor.HostProcesses) -> None:
            self._inject(running, slices)
            self._note_preempted(running, slices)
            decided = has_changed()
            if self._can_leave(running, train, assignment, decided) and running.leave():
                emit("world_leaving", slices=leaving_for(decided))

        world = self._taken(assignment) or self._world(train, assignment)
        try:
            with shadows:
                return world.run(receive, look)
        except host_failure.WorldLostError as error:
            lost = {self._slice_of(host, slices) for host in error.hosts}
            for number in sorted(lost):
                self._lose(number, why=str(error).partition("\n")[0])
            raise
        finally:
            for number in self._leaving:
                # Its machine goes, and its memory with it.
                self._drop_memory(number)
            self._leaving.clear()

    def wait(self, secs: float) -> None:
        """See `Cluster`."""
        time.sleep(min(secs, _LOOK_SECS))

    def close(self) -> None:
        """Ends the agents, and removes the executables."""
        self._discard()
        self._resources.close()
        for number in list(self._agents):
            self._agents.pop(number).close()

    def _compile_ahead(
        self, assignment: Assignment, shadows: contextlib.ExitStack
    ) -> None:
        smaller = assignment.compile_ahead
        if smaller is None or not self._limits.compile_ahead_secs:
            return
        program = self._program(
            smaller.compiles, Assignment(number=assignment.number, work=smaller.work)
        )
        shadow = shadow_world.ShadowWorld(
            program,
            num_hosts=len(smaller.work.slices) * self._hosts_per_slice,
            log_directory=storage.make_unique_directory(self._log_directory),
            budget_secs=self._limits.compile_ahead_secs,
            emit=self._emit,
        )
        shadows.enter_context(contextlib.closing(shadow))

    def _program(
        self, train: TrainFunction, assignment: Assignment
    ) -> host_process.Program:
        return functools.partial(
            world_host.run_host, train, self._hardware, assignment, self._owned
        )

    def _slice_of(self, host: int, slices: Sequence[int]) -> int:
        return slices[host // self._hosts_per_slice]

    def _hosts_of(self, number: int, slices: Sequence[int]) -> range:
        if number not in slices:
            return range(0)
        first = slices.index(number) * self._hosts_per_slice
        return range(first, first + self._hosts_per_slice)

    def _lose(self, number: int, *, why: str) -> None:
        self._lost.add(number)
        if number in self._since:
            # It is there again at once, and has to settle.
            self._since[number] = time.monotonic()
            self._checks.begin(number)
        if number not in self._leaving:
            self._fail(number)
        self._emit("slice_lost", slice=number, why=why)

    def _fail(self, number: int) -> None:
        self._failures.append(Failure(slice=number, at_secs=time.monotonic()))

    def _world(
        self, train: TrainFunction, assignment: Assignment
    ) -> process_world.ProcessWorld:
        return process_world.ProcessWorld(
            self._program(train, assignment),
            assignment,
            num_hosts=len(assignment.work.slices) * self._hosts_per_slice,
            log_directory=self._log_directory,
            limits=self._limits,
        )

    def _can_leave(
        self,
        running: supervisor.HostProcesses,
        train: TrainFunction,
        assignment: Assignment,
        decided: Decision | None,
    ) -> bool:
        # Whether hosts can leave at once for what is decided: the next world is
        # prepared. Preempted hosts leave in any case.
        if not isinstance(decided, Train):
            self._discard()
            return bool(decided)
        following = Assignment(number=assignment.number + 1, work=decided)
        if self._prepared is None or not self._prepared.is_for(following):
            self._discard()
            self._prepared = self._world(train, following)
            self._prepared.hosts.prepare()
        return self._prepared.hosts.is_prepared() or bool(running.noticed)

    def _taken(self, assignment: Assignment) -> process_world.ProcessWorld | None:
        # The prepared world, if it is for this assignment.
        world = self._prepared
        if world is not None and world.is_for(assignment) and world.hosts.can_run():
            self._prepared = None
            return world
        self._discard()
        return None

    def _discard(self) -> None:
        if self._prepared is not None:
            self._prepared.hosts.close()
            self._prepared = None

    def _note_preempted(
        self, running: supervisor.HostProcesses, slices: Sequence[int]
    ) -> None:
        for number in sorted({self._slice_of(h, slices) for h in running.noticed}):
            if number not in self._leaving:
                self._leaving.add(number)
                self._since.pop(number, None)
                self._emit("slice_preempted", slice=number)

    def _inject(self, running: supervisor.HostProcesses, slices: Sequence[int]) -> None:
        for fault in faults.due(self._faults, self._step):
            self._faults.remove(fault)
            match fault.kind:
                case faults.Kind.KILL_SLICE:
                    self._since.pop(fault.target, None)
                    running.send_signal(
                        self._hosts_of(fault.target, slices), signal.SIGKILL
                    )
                    self._checks.forget(fault.target)
                    self._drop_memory(fault.target)
                case faults.Kind.PREEMPT_SLICE:
                    running.send_signal(
                        self._hosts_of(fault.target, slices), signal.SIGTERM
                    )
                case faults.Kind.BREAK_SLICE:
                    self._checks.broken.add(fault.target)
                case faults.Kind.RETURN_SLICE:
                    self._serve(fault.target)
                    self._since[fault.target] = time.monotonic()
                    self._checks.begin(fault.target)
                    self._emit("slice_returned", slice=fault.target)
                case faults.Kind.KILL_HOST:
                    running.send_signal([fault.target], signal.SIGKILL)
                case faults.Kind.HANG_HOST:
                    running.send_signal([fault.target], signal.SIGSTOP)

    def _serve(self, number: int) -> None:
        # The agent outlives worlds, so that the next one reads from it at once.
        if self._owned.memory is None or number in self._agents:
            return
        root = self._owned.memory.root(number)
        storage.make_directory(root)
        self._agents[number] = agent_process.AgentProcess(agent.Service(root=root))

    def _drop_memory(self, number: int) -> None:
        if self._owned.memory is None:
            return
        if number in self._agents:
            gone = self._agents.pop(number)
            gone.close()
            for other in self._agents:
                # The next world does not wait for it.
                known_agents.forget(self._owned.memory.root(other), gone.address.url)
        storage.remove(self._owned.memory.of_slice(number))
