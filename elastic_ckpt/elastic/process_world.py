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
      num_hosts: the number of hosts.
      log_directory: for the output of the hosts; a new directory is made in it.
      limits: of the run.
      machines: of each host; None if all are processes of this machine.

    Attributes:
      hosts: the processes.
    """

    def __init__(
        self,
        program: host_process.Program,
        assignment: Assignment,
        *,
        num_hosts: int,
        log_directory: str,
        limits: watch.Limits,
        machines: Sequence[host_start.HostMachine] | None = None,
    ) -> None:
        self._assignment = _of_hosts(assignment)
        self._emit: events.Emit = events.nobody
        self._ends: dict[str, dict[str, storage.Json]] = {}
        self.hosts = supervisor.HostProcesses(
            program,
            num_hosts=num_hosts,
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
        self, emit: events.Emit, watch: Callable[[supervisor.HostProcesses], None]
    ) -> bool:
        """Runs the world; see `HostProcesses.run`.

        Returns:
          Whether the run is over; False if the hosts left for another world.
        """
        self._emit = emit
        self.hosts.run(watch)
        # The training may have ended before the hosts could leave.
        has_left = self.hosts.is_left and "world_left" in self._ends
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


def _of_hosts(assignment: Assignment) -> Assignment:
    # The part of an assignment that hosts depend on.
    work = dataclasses.replace(assignment.work, spares=())
    return dataclasses.replace(assignment, work=work, claimant=None, compile_ahead=None)
