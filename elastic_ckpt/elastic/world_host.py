"""The program of a host in a world of processes, and what it gets of its supervisor."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence

from elastic_ckpt.core import allgather, events
from elastic_ckpt.elastic import executables, host_process, watch
from elastic_ckpt.elastic.cluster import Assignment, TrainFunction
from elastic_ckpt.elastic.hardware import Hardware
from elastic_ckpt.elastic.member import Member
from elastic_ckpt.elastic.world import BetweenWorlds, Leaving, Steps, World
from elastic_ckpt.steps import layout

# How long hosts that got SIGTERM wait for the supervisor's order, which arrives at once
# unless the supervisor is lost; and for each other.
_ORDER_SECS = 5.0
_AGREE_SECS = 60.0


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
    """

    memory: SliceMemory | None
    kept: executables.KeptExecutables | None
    grace_secs: float
    most_hosts: int | None = None
    first_slice: int = 0

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
    from elastic_ckpt.elastic import multicontroller, termination

    _take_share(hardware, assignment, owned, member)
    slices, number = _simulated(assignment.work.slices, hardware, member)
    agreed = termination.agreed(
        grace_secs=owned.grace_secs, requested=_nothing, expired=_nothing
    )
    with multicontroller.joined(member, begin=channel.begin), agreed as is_leaving:
        multicontroller.check_devices(hardware.hardware)
        channel.wait()
        kept = None if owned.kept is None else executables.Executables(owned.kept)
        emit = steps = Steps(channel if member.host == 0 else events.nobody)
        emit("world_joined", world=assignment.number)
        channel.begin(watch.TRAIN)
        leaving = _Leaving(is_leaving, channel, steps)
        train(
            World(
                number=assignment.number,
                slices=slices,
                slice_name=str(number),
                ram_directory=owned.ram_directory(number),
                rows=assignment.work.rows,
                microbatches=assignment.work.accumulated,
                emit=emit,
                leaving=leaving,
                begin=channel.begin,
                _between=BetweenWorlds(
                    executables=kept,
                    claimant=assignment.claimant,
                    resumes=lambda: leaving.answer == "resume",
                    loses_memory=lambda: leaving.loses_memory,
                ),
            )
        )
        if leaving.answer is not None:
            emit("world_left", step=leaving.step)


class _Leaving:
    """Answers `World.leaving`, the same on all hosts.

    Args:
      is_reached: whether the hosts have agreed to leave after a number of steps.
      channel: to the supervisor, which says whether the run continues.
      steps: reports the steps.

    Attributes:
      answer: None until the hosts have agreed to leave.
      step: the steps that are done then.
      loses_memory: whether a host loses its memory when it leaves.
    """

    def __init__(
        self,
        is_reached: Callable[[int], bool],
        channel: host_process.HostChannel,
        steps: Steps,
    ) -> None:
        self._is_reached = is_reached
        self._channel = channel
        self._steps = steps
        self._hosts = allgather.new()
        self.answer: Leaving | None = None
        self.step = 0
        self.loses_memory = False

    def __call__(self, step: int) -> Leaving | None:
        self._channel.step()
        self._steps.done(step)
        if self.answer is None and self._is_reached(step):
            self._agree(step)
        return self.answer

    def _agree(self, step: int) -> None:
        # SIGTERM may reach a host before the supervisor's order reaches any.
        own = self._channel.order(_ORDER_SECS).decode()
        told = self._hosts.gather("leaving", own, timeout_secs=_AGREE_SECS)
        orders = {each.encode() for each in told}
        is_over = host_process.STOP in orders or orders == {b""}
        self.answer, self.step = "stop" if is_over else "resume", step
        self.loses_memory = host_process.LOSE_MEMORY in orders


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
