"""A cluster of processes of this machine: each slice is a group of host processes.

The supervisor (this process) owns what outlives worlds: the agents that serve the RAM
of each slice, and the state of the slices. Each world is a set of fresh processes. A
slice has its own directory on the RAM disk, like a separate machine, so that
it can be lost together with its memory.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
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
    shadow_world,
    supervisor,
    watch,
)
from elastic_ckpt.elastic.cluster import Assignment, TrainFunction
from elastic_ckpt.elastic.decision import Slices
from elastic_ckpt.elastic.member import Member
from elastic_ckpt.elastic.world import World
from elastic_ckpt.manifests import layout
from elastic_ckpt.tiers.peers import agent, agent_process, known_agents

# The longest time between two looks at the slices.
_LOOK_SECS = 0.1


@dataclasses.dataclass(frozen=True, kw_only=True)
class SliceMemory:
    """The RAM disk of each slice.

    Attributes:
      directory: for the directories of the slices.
      run: the name of the run, the last part of each path.
    """

    directory: str
    run: str

    def of_slice(self, number: int) -> str:
        """The directory to which hosts of a slice add the run's name."""
        return layout.slice_directory(self.directory, number)

    def root(self, number: int) -> str:
        """The directory of the run in the RAM of a slice."""
        return os.path.join(self.of_slice(number), self.run)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Owned:
    """The things of a supervisor that its hosts use, and that outlive worlds.

    Attributes:
      memory: the RAM disks of the slices; None if hosts keep no checkpoints there.
      kept: the place of executables; None compiles in each world.
      grace_secs: the time limit for hosts to save and end after SIGTERM.
    """

    memory: SliceMemory | None
    kept: kept_executables.KeptExecutables | None
    grace_secs: float


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
        memory: SliceMemory | None = None,
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
        self._owned = Owned(
            memory=memory, kept=kept, grace_secs=self._limits.grace_secs
        )
        began_secs = time.monotonic()
        # By slice that is alive, since when.
        self._since = dict.fromkeys(range(num_slices), began_secs)
        # The slices that were lost since they were last in a world.
        self._lost: set[int] = set()
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
        present = {number: now_secs - since for number, since in self._since.items()}
        return Slices(current=current - self._lost, present_secs=present)

    def run_world(
        self,
        train: TrainFunction,
        assignment: Assignment,
        *,
        emit: events.Emit,
        has_changed: Callable[[], bool],
    ) -> bool:
        """See `Cluster`; runs in the main thread."""
        slices = assignment.work.slices
        self._lost -= set(slices)
        has_left = has_trained = False
        shadows = contextlib.ExitStack()

        def receive(name: str, **fields: storage.Json) -> None:
            nonlocal has_left, has_trained
            has_left |= name == "world_left"
            # Hosts that leave report both, and one of them is the reason.
            if name != ("run_stopped" if hosts.is_left else "world_left"):
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
            if has_changed():
                running.leave()

        hosts = supervisor.HostProcesses(
            self._program(train, assignment),
            num_hosts=len(slices) * self._hosts_per_slice,
            # A new directory: this may be a second start of a run that is alive.
            log_directory=storage.make_unique_directory(self._log_directory),
            emit=receive,
            limits=self._limits,
            watch=look,
        )
        try:
            with shadows:
                hosts.run()
        except host_failure.WorldLostError as error:
            lost = {self._slice_of(host, slices) for host in error.hosts}
            for number in sorted(lost):
                self._lose(number, why=str(error).partition("\n")[0])
            raise
        # The training may have ended before the hosts could leave.
        return not (has_left and hosts.is_left)

    def wait(self, secs: float) -> None:
        """See `Cluster`."""
        time.sleep(min(secs, _LOOK_SECS))

    def close(self) -> None:
        """Ends the agents, and removes the executables."""
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
            run_host, train, self._hardware, assignment, self._owned
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
        self._emit("slice_lost", slice=number, why=why)

    def _inject(self, running: supervisor.HostProcesses, slices: Sequence[int]) -> None:
        for fault in faults.due(self._faults, self._step):
            self._faults.remove(fault)
            match fault.kind:
                case faults.Kind.KILL_SLICE:
                    self._since.pop(fault.target, None)
                    running.send_signal(
                        self._hosts_of(fault.target, slices), signal.SIGKILL
                    )
                    self._drop_memory(fault.target)
                case faults.Kind.RETURN_SLICE:
                    self._serve(fault.target)
                    self._since[fault.target] = time.monotonic()
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


def run_host(
    train: TrainFunction,
    hardware: schema.WorldSection,
    assignment: Assignment,
    owned: Owned,
    member: Member,
    channel: host_process.HostChannel,
) -> None:
    """Joins a world as one of its hosts, and trains.

    Args:
      train: the training loop.
      hardware: the devices of each host.
      assignment: the world.
      owned: what outlives the world.
      member: this host.
      channel: to the supervisor.
    """
    from elastic_ckpt.data import token_blocks
    from elastic_ckpt.elastic import multicontroller, termination

    # All hosts are on this machine; its cores are shared.
    os.environ[token_blocks.LOCAL_HOSTS_VARIABLE] = str(member.num_hosts)
    slices = _simulated(assignment.work.slices, hardware)
    number = slices[member.host * len(slices) // member.num_hosts]
    multicontroller.configure(hardware)
    agreed = termination.agreed(
        grace_secs=owned.grace_secs, requested=_nothing, expired=_nothing
    )
    with multicontroller.joined(member), agreed as is_leaving:
        emit = channel if member.host == 0 else events.nobody
        emit("world_joined", world=assignment.number)
        channel.begin()
        left: list[int] = []

        def leave(step: int) -> bool:
            channel.begin()
            if is_leaving(step):
                left.append(step)
            return bool(left)

        train(
            World(
                number=assignment.number,
                slices=slices,
                slice_name=str(number),
                ram_directory=None
                if owned.memory is None
                else owned.memory.of_slice(number),
                rows=assignment.work.rows,
                microbatches=assignment.work.accumulated,
                kept=owned.kept,
                emit=emit,
                is_leaving=leave,
                is_left=lambda: channel.is_left,
                begin=channel.begin,
            )
        )
        if left:
            emit("world_left", step=left[-1])


def _simulated(slices: Sequence[int], hardware: schema.WorldSection) -> tuple[int, ...]:
    # A host may be several slices of the mesh.
    parts = max(1, hardware.slices // hardware.hosts)
    return tuple(number * parts + part for number in slices for part in range(parts))


def _nothing() -> None:
    """The supervisor reports requests to stop, and watches the time."""
