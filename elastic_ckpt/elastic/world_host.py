"""The program of a host in a world of processes, and what it gets of its supervisor."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Sequence

from elastic_ckpt.core import events
from elastic_ckpt.elastic import device_check, host_process, kept_executables, watch
from elastic_ckpt.elastic.cluster import Assignment, TrainFunction
from elastic_ckpt.elastic.hardware import Hardware
from elastic_ckpt.elastic.member import Member
from elastic_ckpt.elastic.world import BetweenWorlds, Steps, World
from elastic_ckpt.steps import layout


@dataclasses.dataclass(frozen=True, kw_only=True)
class SliceMemory:
    """The RAM disk of each slice.

    Attributes:
      directory: for the directories of the slices.
      run: the name of the run, the last part of each path.
      tls_certificate: of the agents that serve it, a PEM file; None for no TLS.
      tls_key: its private key, a PEM file.
    """

    directory: str
    run: str
    tls_certificate: str | None = None
    tls_key: str | None = None

    def of_slice(self, number: int) -> str:
        """The RAM disk of a slice, which is lost with it."""
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
      most_hosts: that this machine can have in a world; None for all hosts of it.
      first_slice: the lowest number of the slices of this machine.
      broken: the slices whose devices are to compute wrong values: a fault.
    """

    memory: SliceMemory | None
    kept: kept_executables.KeptExecutables | None
    grace_secs: float
    most_hosts: int | None = None
    first_slice: int = 0
    broken: frozenset[int] = frozenset()

    def local_hosts(self, member: Member) -> int:
        """The number of hosts of a world that this machine has, at most."""
        return min(member.num_hosts, self.most_hosts or member.num_hosts)

    def slot(self, member: Member, slices: Sequence[int]) -> int:
        """The number of a host on this machine, the same in all worlds.

        Args:
          member: the host.
          slices: of its world.
        """
        hosts_per_slice = member.num_hosts // len(slices)
        index, host_of_slice = divmod(member.host, hosts_per_slice)
        return (slices[index] - self.first_slice) * hosts_per_slice + host_of_slice

    def ram_directory(self, number: int) -> str | None:
        """The run's directory on the RAM disk of a slice; None if there is none."""
        return None if self.memory is None else self.memory.root(number)


def run_host(
    train: TrainFunction,
    hardware: Hardware,
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
    from elastic_ckpt.elastic import executables, multicontroller, termination

    _take_share(hardware, assignment, owned, member)
    slices, number = _simulated(assignment.work.slices, hardware, member)
    agreed = termination.agreed(
        grace_secs=owned.grace_secs, requested=_nothing, expired=_nothing
    )
    with multicontroller.joined(member, begin=channel.begin), agreed as is_leaving:
        multicontroller.check_devices(hardware.hardware)
        kept = owned.kept
        await_check = _begin_check(assignment, owned, member)
        if not channel.has_begun:
            # A prepared world is for sound slices only.
            await_check()
        channel.wait()
        preloaded = None if kept is None else executables.Preloaded(kept)
        emit = steps = Steps(channel if member.host == 0 else events.nobody)
        emit("world_joined", world=assignment.number)
        channel.begin(watch.TRAIN)
        left: list[int] = []

        def is_ending(step: int) -> bool:
            if is_leaving(step):
                left.append(step)
            return bool(left)

        def leave(step: int) -> bool:
            await_check()
            channel.step()
            steps.done(step)
            return is_ending(step)

        train(
            World(
                number=assignment.number,
                slices=slices,
                slice_name=str(number),
                ram_directory=owned.ram_directory(number),
                rows=assignment.work.rows,
                microbatches=assignment.work.accumulated,
                emit=emit,
                should_stop=leave,
                should_stop_early=is_ending,
                will_resume=lambda: bool(left) and channel.is_left,
                begin=channel.begin,
                _between=BetweenWorlds(
                    executables=kept,
                    preloaded=preloaded,
                    claimant=assignment.claimant,
                    loses_memory=lambda: bool(left) and channel.loses_memory,
                ),
            )
        )
        if left:
            emit("world_left", step=left[-1])


def _take_share(
    hardware: Hardware,
    assignment: Assignment,
    owned: Owned,
    member: Member,
) -> None:
    from elastic_ckpt.data.lm import documents
    from elastic_ckpt.elastic import multicontroller

    # The hosts of a machine share its cores, but no devices.
    os.environ[documents.LOCAL_HOSTS_VARIABLE] = str(owned.local_hosts(member))
    slot = owned.slot(member, assignment.work.slices)
    multicontroller.configure(hardware, slot=slot)


def _begin_check(
    assignment: Assignment, owned: Owned, member: Member
) -> Callable[[], None]:
    # Beside the restore; what it returns waits for its end, if it is needed.
    import jax

    from elastic_ckpt.elastic import executables

    slices = assignment.work.slices
    own = slices[member.host * len(slices) // member.num_hosts]
    if own not in assignment.unchecked:
        return _nothing
    return device_check.begin(
        functools.partial(
            device_check.check_devices,
            jax.local_devices(),
            executables.Executables(kept=owned.kept).compiled,
            error=int(own in owned.broken),
        )
    )


def _simulated(
    slices: Sequence[int], hardware: Hardware, member: Member
) -> tuple[tuple[int, ...], int]:
    # The slices of the mesh, and the first that is this host's: it may be several.
    parts = max(1, hardware.slices // hardware.hosts)
    simulated = tuple(
        number * parts + part for number in slices for part in range(parts)
    )
    return simulated, simulated[member.host * len(simulated) // member.num_hosts]


def _nothing() -> None:
    """The supervisor reports requests to stop, and watches the time."""
