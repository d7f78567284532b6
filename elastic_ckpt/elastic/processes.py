"""A cluster of processes: each slice is a group of host processes.

They are of this machine, or of several, whose supervisors follow this one (`machines`).
The supervisors own what outlives worlds: the agents that serve the RAM of each slice
(`local_slices`), and here the state of the slices. Each world is a set of fresh
processes. A slice has its own directory on the RAM disk, like a separate machine, so
that it can be lost together with its memory. A slice that was lost is used again after
its devices have passed a check (`slice_check`).

Before a planned change the next world is prepared: its processes are started and have
joined when the hosts of the present one are asked to leave. When this machine gets
SIGTERM and other machines can continue the run, its hosts leave likewise, and one of
these machines leads (`machines.handover`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import time
from collections.abc import Callable, Sequence
from typing import Self

from etils import epath

from elastic_ckpt.core import errors, events, process, storage
from elastic_ckpt.elastic import (
    failures,
    faults,
    host_start,
    injector,
    local_slices,
    main_script,
    process_world,
    shadow_world,
    supervisor,
    watch,
    world_host,
)
from elastic_ckpt.elastic.cluster import (
    Assignment,
    CompileAhead,
    TrainFunction,
    leaving_for,
)
from elastic_ckpt.elastic.decision import Decision, Failure, Slices, Train
from elastic_ckpt.elastic.hardware import Hardware
from elastic_ckpt.elastic.machines import handover, places, slice_machines
from elastic_ckpt.tiers.persistent import claims

# The longest time between two looks at the slices.
_LOOK_SECS = 0.1
_MOST_ABANDONED = 3
# What hosts import, in the fork server.
_HOST_IMPORTS = (
    "elastic_ckpt.elastic.multicontroller",
    "elastic_ckpt.elastic.world_host",
    "elastic_ckpt.frontend",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OfMachine:
    """The part of one of several machines in a run.

    Attributes:
      place: of the machine.
      slices: of the machine; closed by the cluster.
      shared: a directory that all machines share.
      injected: faults, by their steps.
      lost_secs: after which a machine without a sign is lost.
    """

    place: places.Place
    slices: local_slices.LocalSlices
    shared: epath.PathLike
    injected: tuple[faults.Fault, ...]
    lost_secs: float


class ProcessCluster:
    """Slices of host processes on this machine, and on those that follow it.

    Args:
      own: the slices of this machine. A host that simulates several slices is one
        slice here. They are closed with the cluster, if no others follow.
      machines: with those that follow this one, closed by the caller; None if there
        are no others.
      injected: faults, by their steps.
      emit: called for what happens to slices before the first world; that of the run
        is called afterwards.
    """

    def __init__(
        self,
        own: local_slices.LocalSlices,
        machines: slice_machines.SliceMachines | None = None,
        *,
        injected: Sequence[faults.Fault] = (),
        emit: events.Emit | None = None,
    ) -> None:
        self._own = own
        self._machines = machines or slice_machines.SliceMachines(own)
        self._handover = handover.Handover(own, self._machines)
        self._injected = injected
        self._present_emit = emit or events.nobody
        self._resources = contextlib.ExitStack()
        if machines is None:
            self._resources.callback(own.close)
        self._of_machine: OfMachine | None = None
        # Of several machines any may continue the run.
        self._claimant = claims.Claimant(
            owner=process.this() if machines is None else None
        )
        self._injector = injector.Injector(
            injected,
            self._machines,
            gone=lambda number: self._since.pop(number, None),
            # Otherwise it is noted with its machine.
            returned=self._return if machines is None else lambda _: None,
            emit=self._emit,
        )
        # By slice that is alive, since when.
        self._since = dict.fromkeys(self._machines.slices(), time.monotonic())
        # The slices that were lost since they were last in a world.
        self._lost: set[int] = set()
        # Those whose hosts have died since, until they are checked.
        self._crashed: set[int] = set()
        # The slices that are absent from when their hosts have left: preempted.
        self._leaving: set[int] = set()
        # The slices that have slow hosts, until they are replaced.
        self._slow: set[int] = set()
        # The slices of the world that runs.
        self._training: frozenset[int] = frozenset()
        self._failures: list[Failure] = []
        self._prepared = process_world.Prepared()
        # The worlds in a row that ended before a step, for others.
        self._num_abandoned = 0
        self._step = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def devices_per_slice(self) -> int:
        """See `Cluster`."""
        return self._own.hosts_per_slice * self._own.hardware.devices_per_host

    def slices(self, current: frozenset[int]) -> Slices:
        """See `Cluster`."""
        self._note_machines()
        now_secs = time.monotonic()
        checkers = self._machines.checkers()
        for checked in [each for checker in checkers for each in checker.poll()]:
            if checked.problem is not None:
                self._refuse(checked.slice, why=checked.problem)
            elif checked.slice in self._crashed:
                # Nothing but its processes was lost.
                self._lost.discard(checked.slice)
            self._crashed.discard(checked.slice)
        unsound = {each for checker in checkers for each in checker.unsound}
        present = {
            number: now_secs - since
            for number, since in self._since.items()
            if number not in unsound
        }
        return Slices(
            current=current - self._lost,
            present_secs=present,
            failures=tuple(self._failures),
            slow=frozenset(self._slow),
            checking=frozenset(self._crashed & unsound & self._since.keys()),
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
        main_script.check_sent(train)
        self._present_emit = emit
        slices = assignment.work.slices
        self._training = frozenset(slices)
        self._lost -= set(slices)
        self._crashed.clear()
        self._injector.begin_world()
        has_trained = False
        program = self._own.program(train, assignment)
        # Until it has restored, a world is where the one before was left.
        start_step = self._step
        shadows = contextlib.ExitStack()

        def receive(name: str, **fields: storage.Json) -> None:
            nonlocal has_trained, start_step
            emit(name, **fields)
            if name == "restored_from":
                start_step = int(str(fields["step"]))
            if name in ("step", "step_done"):
                self._step = int(str(fields["step"]))
                if not has_trained:
                    has_trained = True
                    self._num_abandoned = 0
                    self._compile_ahead(assignment, shadows)
            elif name == "world_claimed":
                self._claimant = dataclasses.replace(self._claimant, has_claimed=True)
            elif name == "run_started" and assignment.number == 1:
                self._injector.pass_over(int(str(fields["start_step"])))

        def look(running: supervisor.HostProcesses) -> None:
            self._injector.inject(
                running,
                world=assignment.number,
                step=self._step,
                hosts_of=lambda number: self._own.hosts_of(number, slices),
            )
            if has_trained:
                self._own.stand_by(program)
            self._note_hosts(running, slices)
            decided = has_changed()
            if self._handover.began:
                self._handover.look(running, decided, self._training)
                return
            if not self._can_leave(running, train, assignment, decided):
                return
            if self._may_abandon(decided) and running.abandon():
                self._num_abandoned += 1
                emit("world_leaving", slices=leaving_for(decided))
            elif running.leave():
                emit("world_leaving", slices=leaving_for(decided))

        preempted = functools.partial(self._begin_handover, has_changed=has_changed)
        world = self._prepared.take(assignment) or self._world(train, assignment)
        try:
            with shadows, self._handover.of_lost_worlds():
                is_over = world.run(receive, look, preempted)
            if world.hosts.is_abandoned:
                emit("world_left", step=start_step)
            self._handover.check(is_over=is_over)
            return is_over
        except failures.WorldLostError as error:
            self._note_lost(error, slices)
            raise
        finally:
            for number in self._leaving:
                # Its machine goes, and its memory with it.
                self._own.drop_memory(number)
            self._leaving.clear()
            self._training = frozenset()

    def wait(self, secs: float) -> None:
        """See `Cluster`."""
        self._own.checks.wait(min(secs, _LOOK_SECS))

    def close(self) -> None:
        """Ends the agents, and removes the executables."""
        self._prepared.discard()
        self._resources.close()

    def _emit(self, name: str, **fields: storage.Json) -> None:
        self._present_emit(name, **fields)

    def _compile_ahead(
        self, assignment: Assignment, shadows: contextlib.ExitStack
    ) -> None:
        smaller = assignment.compile_ahead
        if smaller is None or not self._own.limits.compile_ahead_secs:
            return
        several = self._machines.are_several
        shadow = shadow_world.ShadowWorlds(
            [
                self._ahead(assignment.number, smaller, slices)
                for slices in shadow_world.choices(assignment, several=several)
            ],
            log_directory=self._own.log_directory,
            budget_secs=self._own.limits.compile_ahead_secs,
            emit=self._emit,
        )
        shadows.enter_context(contextlib.closing(shadow))

    def _ahead(
        self, number: int, smaller: CompileAhead, slices: tuple[int, ...]
    ) -> shadow_world.Ahead:
        work = dataclasses.replace(smaller.work, slices=slices)
        assignment = Assignment(number=number, work=work)
        return shadow_world.Ahead(
            program=self._own.program(smaller.compiles, assignment),
            machines=self._machines.of_world(assignment, is_ahead=True),
        )

    def _slice_of(self, host: int, slices: Sequence[int]) -> int:
        return slices[host // self._own.hosts_per_slice]

    def _begin_handover(
        self,
        running: supervisor.HostProcesses,
        has_changed: Callable[[], Decision | None],
    ) -> bool:
        # On SIGTERM: whether the run goes on without this machine.
        if self._handover.began or not self._machines.are_several:
            return self._handover.began
        numbers = self._since.keys() & set(self._own.numbers)
        before = {number: self._since.pop(number) for number in numbers}
        self._leaving |= numbers
        decided = has_changed()
        if not self._handover.can_begin(decided, self._training):
            self._leaving -= numbers
            self._since |= before
            return False
        for number in sorted(numbers):
            self._emit("slice_preempted", slice=number)
        if self._handover.begin(running):
            self._emit("world_leaving", slices=leaving_for(decided))
        return True

    def _note_lost(self, error: failures.WorldLostError, slices: Sequence[int]) -> None:
        self._note_machines()
        lost = {self._slice_of(host, slices) for host in error.hosts}
        is_there = self._since.keys() | self._leaving
        gone = set(slices) - is_there - lost
        error.gone = frozenset(set(slices) - is_there)
        error.machines = self._machines.numbers(error.gone)
        why = str(error).partition("\n")[0]
        for number in sorted(lost | gone):
            is_gone = number in gone
            self._lose(number, why="it is gone at the same time" if is_gone else why)
        hung = {self._slice_of(host, slices) for host in error.hung}
        self._crashed = lost - hung

    def _lose(self, number: int, *, why: str) -> None:
        self._lost.add(number)
        self._settle_again(number)
        if number not in self._leaving:
            self._fail(number)
        self._emit("slice_lost", slice=number, why=why)

    def _settle_again(self, number: int) -> None:
        # Unless it is gone, a slice is there again at once.
        if number in self._injector.cut_off:
            self._injector.absent.add(number)
            self._since.pop(number, None)
        elif number in self._since:
            self._since[number] = time.monotonic()
            self._machines.check(number)

    def _note_machines(self) -> None:
        # Machines come and go.
        if not self._machines.are_several:
            return
        self._machines.poll()
        connected = self._machines.slices() - self._injector.absent
        for number in sorted(self._since.keys() - connected):
            del self._since[number]
            if number not in self._training:
                # Otherwise the world is lost, too, and that is reported.
                self._emit("slice_lost", slice=number, why="its machine is lost")
        for number in sorted(connected - self._since.keys() - self._leaving):
            self._return(number)

    def _return(self, number: int) -> None:
        self._since[number] = time.monotonic()
        self._slow.discard(number)
        self._machines.check(number)
        self._emit("slice_returned", slice=number)

    def _refuse(self, number: int, *, why: str) -> None:
        self._fail(number)
        self._emit("slice_refused", slice=number, why=why)

    def _fail(self, number: int) -> None:
        self._failures.append(Failure(slice=number, at_secs=time.monotonic()))

    def _world(
        self, train: TrainFunction, assignment: Assignment
    ) -> process_world.ProcessWorld:
        assignment = dataclasses.replace(assignment, claimant=self._claimant)
        return process_world.ProcessWorld(
            self._own.program(train, assignment),
            assignment,
            machines=self._machines.of_world(
                assignment, cut_off=self._injector.cut_off
            ),
            log_directory=self._own.log_directory,
            limits=self._own.limits,
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
            self._prepared.discard()
            return bool(decided)
        following = Assignment(number=assignment.number + 1, work=decided)
        hosts = self._prepared.hosts_for(
            following, lambda following: self._world(train, following)
        )
        is_prepared, not_joined = hosts.is_prepared(), hosts.not_joined()
        missing = {self._slice_of(host, decided.slices) for host in not_joined}
        if running.noticed or not missing - self._training:
            return is_prepared or bool(running.noticed)
        # This world goes on.
        for number in sorted(missing - self._training):
            self._settle_again(number)
            self._refuse(number, why="its hosts do not join the others")
        self._prepared.discard()
        return False

    def _may_abandon(self, decided: Decision | None) -> bool:
        # Slices that come and go all the time must not keep the run from training.
        return isinstance(decided, Train) and self._num_abandoned < _MOST_ABANDONED

    def _note_hosts(
        self, running: supervisor.HostProcesses, slices: Sequence[int]
    ) -> None:
        for number in sorted({self._slice_of(h, slices) for h in running.noticed}):
            if number not in self._leaving:
                self._leaving.add(number)
                self._since.pop(number, None)
                self._emit("slice_preempted", slice=number)
        for slow in running.newly_slow():
            number = self._slice_of(slow.host, slices)
            self._slow.add(number)
            self._emit("slow_host", slice=number, **dataclasses.asdict(slow))


class Processes(ProcessCluster):
    """Slices of host processes, on this machine or on several.

    Each host process imports the script that makes this: make it, and call `run`, under
    `if __name__ == "__main__":`.

    Args:
      slices: the number of slices of the run, on all machines together.
      hosts_per_slice: the number of host processes of each slice.
      devices_per_host: the number of devices of each process: CPU devices, or GPUs that
        no other process uses.
      hardware: `"cpu"` or `"gpu"`.
      ram: the RAM disk of the machine, such as `/dev/shm`. Each slice has a directory
        in it, `world.ram_directory`, which an agent that outlives the hosts serves.
        None if hosts keep no checkpoints in RAM.
      run: the name of the run, and of its directories in `ram`.
      logs: the directory for the output of the hosts; by default `logs/<run>`.
      jax_cache_dir: the directory of JAX's compilation cache; empty for none.
      machines: the number of machines of the run, to which slices are assigned in
        order; on each the same program is started.
      machine: the number of this machine, from 0; by default `NODE_RANK`,
        `SLURM_NODEID` or `JOB_COMPLETION_INDEX` in the environment.
      shared: for a run on several machines, a directory of it that all of them reach,
        on a shared disk or in a bucket, such as that of `ec.Persistent`. The machine
        that leads holds a claim in it, `leaders/<number>.json`, with its address.
      interface: the address by which the other machines reach this one; by default
        `POD_IP`, or the address of its default route.
      machine_timeout_secs: a machine that is not heard of for so long is lost, and the
        claim of one that leads lapses.
      injected: faults to inject, in the order of their steps.
      limits: how long hosts may take.
      emit: called when a slice is lost or comes back before the first world; the
        `emit` of `run` is called afterwards.

    Raises:
      ConfigError: if the arguments do not fit together, or the script makes this
        outside of the `if` above.
      RunError: if the agents of the RAM disk cannot be started.
    """

    def __init__(
        self,
        slices: int,
        *,
        hosts_per_slice: int = 1,
        devices_per_host: int = 1,
        hardware: str = "cpu",
        ram: str | os.PathLike[str] | None = None,
        run: str | None = None,
        logs: str | os.PathLike[str] | None = None,
        jax_cache_dir: str = "",
        machines: int = 1,
        machine: int | None = None,
        shared: epath.PathLike | None = None,
        interface: str = "",
        machine_timeout_secs: float = 10.0,
        injected: Sequence[faults.Fault] = (),
        limits: watch.Limits | None = None,
        emit: events.Emit | None = None,
    ) -> None:
        main_script.check_guarded("ec.elastic.Processes")
        counts = {
            "slices": slices,
            "hosts_per_slice": hosts_per_slice,
            "devices_per_host": devices_per_host,
            "machines": machines,
        }
        for name, number in counts.items():
            if isinstance(number, bool) or not isinstance(number, int) or number < 1:
                raise errors.ConfigError(
                    f"Processes({name}={number!r}): give a whole number of at least 1"
                )
        if hardware not in ("cpu", "gpu"):
            raise errors.ConfigError(
                f"Processes(hardware={hardware!r}): host processes are started on 'cpu'"
                " and 'gpu'; for TPUs use ec.elastic.Pathways"
            )
        if run is not None and (not run or run != os.path.basename(run)):
            raise errors.ConfigError(
                f"Processes(run={run!r}): give a name that a directory can have, such"
                " as 'my_run'"
            )
        if ram is not None and run is None:
            raise errors.ConfigError(
                f"Processes(ram={os.fspath(ram)!r}) needs the name of the run, which"
                " its directories there get; add run='my_run'"
            )
        place = None
        if machines > 1:
            if shared is None:
                raise errors.ConfigError(
                    f"Processes(machines={machines}) needs a directory that all of them"
                    " share, in which the one that leads holds a claim; add"
                    " shared='gs://bucket/my_run', or a directory on a shared disk"
                )
            place = places.place(
                *(machines, machine),
                slices=slices,
                interface=interface,
                environment=os.environ,
            )
        for key, directory in (("ram", ram), ("logs", logs)):
            if directory is not None and not storage.is_local(directory):
                raise errors.ConfigError(
                    f"{key}={os.fspath(directory)!r} is not a directory of this"
                    f" machine, on which host processes append to files; give {key} a"
                    " local one (steps go to a bucket by ec.Persistent)"
                )
        memory = None
        if ram is not None and run is not None:
            memory = world_host.SliceMemory(directory=os.path.abspath(ram), run=run)
        logs = os.path.abspath(logs or os.path.join("logs", run or ""))
        for name, path in ("ram", ram), ("logs", logs):
            if path is not None:
                _check_writable(name, os.path.abspath(path))
        supervisor.warm_up(_HOST_IMPORTS)
        own = local_slices.LocalSlices(
            Hardware(
                hosts=slices * hosts_per_slice,
                slices=slices,
                devices_per_host=devices_per_host,
                hardware=hardware,
                jax_cache_dir=jax_cache_dir,
            ),
            log_directory=logs,
            memory=memory,
            limits=limits or watch.Limits(),
            numbers=None if place is None else place.slices,
            interface=(host_start.LOOPBACK if place is None else place.interface),
        )
        super().__init__(own, injected=injected, emit=emit)
        self._of_machine = None
        if place is not None and shared is not None:
            self._of_machine = OfMachine(
                place=place,
                slices=own,
                shared=storage.absolute(shared),
                injected=tuple(injected),
                lost_secs=machine_timeout_secs,
            )


def of_machine(cluster: object) -> OfMachine | None:
    """What the supervisor of one of several machines needs; None of any other."""
    return cluster._of_machine if isinstance(cluster, ProcessCluster) else None


def configured(
    hardware: Hardware,
    *,
    log_directory: str,
    memory: world_host.SliceMemory | None = None,
    injected: Sequence[faults.Fault] = (),
    limits: watch.Limits,
    emit: events.Emit,
) -> ProcessCluster:
    """The slices of this machine, for a run with a configuration.

    Args:
      hardware: the slices and hosts, and the devices of each host.
      log_directory: the directory for the logs of each world's hosts.
      memory: the RAM disks of the slices; None if hosts keep no checkpoints there.
      injected: faults, by their steps.
      limits: how long hosts may take to save and end after SIGTERM, and may hang.
      emit: called for what happens to slices before the first world.
    """
    own = local_slices.LocalSlices(
        hardware, log_directory=log_directory, memory=memory, limits=limits
    )
    return ProcessCluster(own, injected=injected, emit=emit)


def _check_writable(name: str, path: str) -> None:
    try:
        storage.make_directory(path)
    except OSError as error:
        raise errors.ConfigError(
            f"Processes({name}={path!r}): {error}; name a directory that can be written"
        ) from error
    if not os.access(path, os.W_OK):
        raise errors.ConfigError(
            f"Processes({name}={path!r}) cannot be written; name another directory"
        )
