"""The slices of this machine: what its supervisor owns, and what outlives worlds."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Iterable, Sequence

from elastic_ckpt.core import storage
from elastic_ckpt.elastic import (
    faults,
    host_process,
    host_start,
    kept_executables,
    slice_check,
    watch,
    world_host,
)
from elastic_ckpt.elastic.cluster import Assignment, TrainFunction
from elastic_ckpt.elastic.hardware import Hardware
from elastic_ckpt.tiers.peers import agent
from elastic_ckpt.tiers.persistent import run_files
from elastic_ckpt.tiers.ram import machine


class LocalSlices:
    """The agents that serve the RAM of slices, their checks, and their executables.

    Args:
      hardware: the slices and hosts of the run, and the devices of each host. A host
        that simulates several slices is one slice here.
      log_directory: the directory for the logs of checks.
      memory: the RAM disks of the slices; None if hosts keep no checkpoints there.
      limits: how long hosts may take to save and end after SIGTERM, and may hang.
      numbers: of the slices of this machine; None if it has all.
      interface: the address by which other machines reach this one.

    Attributes:
      hardware: as given.
      log_directory: as given.
      limits: as given.
      interface: as given.
      numbers: of the slices.
      hosts_per_slice: the hosts of each.
      checks: of the slices that came back.
      machine: starts hosts.
    """

    def __init__(
        self,
        hardware: Hardware,
        *,
        log_directory: str,
        memory: world_host.SliceMemory | None = None,
        limits: watch.Limits,
        numbers: Iterable[int] | None = None,
        interface: str = host_start.LOOPBACK,
    ) -> None:
        num_slices = min(hardware.hosts, hardware.slices)
        self.numbers = tuple(range(num_slices) if numbers is None else numbers)
        self.hosts_per_slice = hardware.hosts // num_slices
        self.machine = host_start.ThisMachine(interface)
        self.hardware = hardware
        self.log_directory = log_directory
        self.limits = limits
        self.interface = interface
        self._agents: dict[int, agent.AgentProcess] = {}
        with contextlib.ExitStack() as resources:
            kept = resources.enter_context(kept_executables.kept())
            self._owned = world_host.Owned(
                memory=memory,
                kept=kept,
                grace_secs=limits.grace_secs,
                most_hosts=len(self.numbers) * self.hosts_per_slice,
                first_slice=self.numbers[0],
            )
            self.checks = slice_check.SliceChecks(
                hardware,
                machine=self.machine,
                kept=kept,
                hosts_per_slice=self.hosts_per_slice,
                first_slice=self.numbers[0],
                log_directory=log_directory,
                limits=limits,
            )
            resources.callback(self._end_agents)
            resources.callback(self.machine.close)
            resources.callback(self.checks.close)
            for number in self.numbers:
                self.serve(number)
            self._resources = resources.pop_all()

    def program(
        self, train: TrainFunction, assignment: Assignment
    ) -> host_process.Program:
        """The program of each host of this machine in a world."""
        return functools.partial(
            world_host.run_host, train, self.hardware, assignment, self._owned
        )

    def stand_by(self, program: host_process.Program) -> None:
        """Has processes stand by for the next world; called often while one trains.

        Args:
          program: of its hosts.
        """
        # Those of a slice check it first.
        hosts = (len(self.numbers) + 1) * self.hosts_per_slice
        self.machine.stand_by(hosts, program)

    def hosts_of(self, number: int, slices: Sequence[int]) -> range:
        """The hosts of a slice in a world of `slices`; none if it is not in it."""
        if number not in slices:
            return range(0)
        first = slices.index(number) * self.hosts_per_slice
        return range(first, first + self.hosts_per_slice)

    def serve(self, number: int) -> None:
        """Serves the memory of a slice, unless it does."""
        # The agent outlives worlds, so that the next one reads from it at once.
        memory = self._owned.memory
        if memory is None or number in self._agents:
            return
        root = memory.root(number)
        # Makes the directory.
        machine.machine_id(root)
        service = agent.Service(
            root=root,
            interface=self.interface,
            tls_certificate=memory.tls_certificate,
            tls_key=memory.tls_key,
        )
        self._agents[number] = agent.AgentProcess(service)

    @property
    def agents(self) -> list[str]:
        """The addresses of the agents."""
        return [each.address.url for each in self._agents.values()]

    def forget(self, agents: Iterable[str]) -> None:
        """Notes that the agents at these addresses are gone.

        The next world does not wait for them.
        """
        memory = self._owned.memory
        roots = [] if memory is None else map(memory.root, self._agents)
        for root, url in itertools.product(roots, agents):
            run_files.forget_agent(root, url)

    def drop_memory(self, number: int) -> None:
        """Removes the memory of a slice of this machine: a fault, or it is gone."""
        memory = self._owned.memory
        if memory is None or number not in self.numbers:
            return
        self.end_agent(number)
        storage.remove(memory.of_slice(number))

    def inject(self, kind: faults.Kind, number: int) -> None:
        """Carries out a fault of a slice of this machine, but for signals to hosts."""
        match kind:
            case faults.Kind.KILL_SLICE:
                self.checks.forget(number)
                self.drop_memory(number)
            case faults.Kind.BREAK_SLICE:
                self.checks.broken.add(number)
            case faults.Kind.RETURN_SLICE:
                self.serve(number)
            case _:
                raise AssertionError(kind)

    def end_agent(self, number: int) -> None:
        """Has the memory of a slice served no more, if it is."""
        if number not in self._agents:
            return
        gone = self._agents.pop(number)
        gone.close()
        self.forget([gone.address.url])

    def close(self) -> None:
        """Ends the checks and agents, and removes the executables."""
        self._resources.close()

    def _end_agents(self) -> None:
        for number in list(self._agents):
            self._agents.pop(number).close()
