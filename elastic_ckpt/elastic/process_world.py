"""A world of host processes, which may be prepared, runs, and is over or leaves."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from elastic_ckpt.core import events, storage
from elastic_ckpt.elastic import host_process, host_start, supervisor, watch
from elastic_ckpt.elastic.cluster import Assignment

# Hosts that stop before their last step report both; one of them is the reason.
_ENDS = ("world_left", "run_stopped")


class ProcessWorld:
    """The processes of one world.

    Args:
      program: of each host.
      assignment: of the world.
      log_directory: for the output of the hosts; a new directory is made in it.
      limits: of the run.
      machines: of each host.

    Attributes:
      hosts: the processes.
    """

    def __init__(
        self,
        program: host_process.Program,
        assignment: Assignment,
        *,
        log_directory: str,
        limits: watch.Limits,
        machines: Sequence[host_start.HostMachine],
    ) -> None:
        self._assignment = _of_hosts(assignment)
        self._emit: events.Emit = events.nobody
        self._ends: dict[str, dict[str, storage.Json]] = {}
        self.hosts = supervisor.HostProcesses(
            program,
            num_hosts=len(machines),
            # A new directory: this may be a second start of a run that is alive.
            log_directory=storage.make_unique_directory(log_directory),
            emit=self._receive,
            limits=limits,
            machines=machines,
        )

    def is_for(self, assignment: Assignment) -> bool:
        """Whether this is the world of `assignment`, whatever its spares are."""
        return self._assignment == _of_hosts(assignment)

    def run(
        self,
        emit: events.Emit,
        watch: Callable[[supervisor.HostProcesses], None],
        preempted: Callable[[supervisor.HostProcesses], bool],
    ) -> bool:
        """Runs the world; see `HostProcesses.run`.

        Returns:
          Whether the run is over; False if the hosts left for another world.
        """
        self._emit = emit
        self.hosts.run(watch, preempted)
        # The training may have ended before the hosts could leave.
        has_left = self.hosts.is_left and "world_left" in self._ends
        has_left |= self.hosts.is_abandoned
        name = "world_left" if has_left else "run_stopped"
        if name in self._ends:
            emit(name, **self._ends[name])
        return not has_left

    def _receive(self, name: str, **fields: storage.Json) -> None:
        if name in _ENDS:
            # Whether the hosts leave for another world may not be known yet.
            self._ends[name] = fields
        else:
            self._emit(name, **fields)


class Prepared:
    """The world that is prepared while another one trains, if there is one."""

    def __init__(self) -> None:
        self._world: ProcessWorld | None = None

    def hosts_for(
        self, assignment: Assignment, make: Callable[[Assignment], ProcessWorld]
    ) -> supervisor.HostProcesses:
        """The hosts of the world of `assignment`, which is prepared from now on.

        Args:
          assignment: of the world.
          make: makes it, unless it is there.
        """
        if self._world is None or not self._world.is_for(assignment):
            self.discard()
            self._world = make(assignment)
            self._world.hosts.prepare()
        return self._world.hosts

    def take(self, assignment: Assignment) -> ProcessWorld | None:
        """The world, if it is for this assignment, and no host of it has failed."""
        world = self._world
        if world is not None and world.is_for(assignment) and world.hosts.can_run():
            self._world = None
            return world
        self.discard()
        return None

    def discard(self) -> None:
        """Ends the hosts of the world."""
        if self._world is not None:
            self._world.hosts.close()
            self._world = None


def _of_hosts(assignment: Assignment) -> Assignment:
    # The part of an assignment that hosts depend on.
    work = dataclasses.replace(assignment.work, spares=())
    return dataclasses.replace(assignment, work=work, claimant=None)
