"""A shadow world: hosts that compile, at low priority, for a world that may follow.

On CPU no description of a topology can be had without its processes
(`jax.experimental.topologies` raises), so the processes are started: as many as the
smaller world would have. They compile, keep the executables for that world, and end.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from elastic_ckpt.core import errors, events, storage
from elastic_ckpt.elastic import host, host_start, supervisor
from elastic_ckpt.elastic.cluster import Assignment

if TYPE_CHECKING:
    from elastic_ckpt.elastic.host import Member

# Training processes that compete for a core get ten times as much of it.
_NICENESS = 10


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ahead:
    """A world that may follow.

    Attributes:
      program: compiles on each host of this machine.
      machines: of each host.
    """

    program: host.Program
    machines: Sequence[host_start.HostMachine]


def choices(assignment: Assignment, *, several: bool) -> list[tuple[int, ...]]:
    """The slices of the shadow worlds for a world that trains.

    The hosts of a world are numbered in the order of their slices, and each has a
    separate program. If one slice is lost, a host keeps its number, or takes that of
    the slice before it; so each machine needs the programs for two numbers.

    Args:
      assignment: of the world that trains.
      several: whether the slices are on several machines, which share no executables.
    """
    assert assignment.compile_ahead is not None
    smaller = assignment.compile_ahead.work.slices
    if not several:
        return [smaller]
    return [smaller, assignment.work.slices[1:][: len(smaller)]]


class ShadowWorlds:
    """Host processes that compile ahead, for one world after the other, in a thread.

    Args:
      worlds: that may follow.
      log_directory: for directories of their logs.
      budget_secs: how long all of them may take before they are ended.
      emit: called, in the thread, when they have compiled or failed.
    """

    def __init__(
        self,
        worlds: Sequence[Ahead],
        *,
        log_directory: str,
        budget_secs: float,
        emit: events.Emit,
    ) -> None:
        self._worlds = worlds
        self._num_hosts = len(worlds[0].machines)
        self._log_directory = log_directory
        self._budget_secs = budget_secs
        self._emit = emit
        self._is_closed = threading.Event()
        self._began_secs = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="shadow-world")
        self._thread.start()

    def close(self) -> None:
        """Ends the hosts, if they have not ended yet."""
        self._is_closed.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            for world in self._worlds:
                if self._is_closed.is_set():
                    return
                self._compile(world)
        except errors.ElasticCkptError as error:
            if not self._is_closed.is_set():
                why = str(error).partition("\n")[0]
                if self._secs() > self._budget_secs:
                    why = (
                        f"not done within {self._budget_secs:g} s; raise"
                        " elastic_compile_ahead_seconds"
                    )
                self._emit("compile_ahead_failed", hosts=self._num_hosts, why=why)
        else:
            self._emit("compiled_ahead", hosts=self._num_hosts, secs=self._secs())

    def _compile(self, world: Ahead) -> None:
        hosts = supervisor.HostProcesses(
            polite(world.program),
            num_hosts=len(world.machines),
            log_directory=storage.make_unique_directory(self._log_directory),
            emit=events.nobody,
            machines=world.machines,
        )
        hosts.run(self._look)

    def _look(self, hosts: supervisor.HostProcesses) -> None:
        if self._is_closed.is_set() or self._secs() > self._budget_secs:
            hosts.end()

    def _secs(self) -> float:
        return time.monotonic() - self._began_secs


def polite(program: host.Program) -> host.Program:
    """The program at low priority."""
    return functools.partial(_run_politely, program)


def _run_politely(
    program: host.Program, member: Member, channel: host.HostChannel
) -> None:
    os.nice(_NICENESS)
    program(member, channel)
