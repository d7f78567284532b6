"""A shadow world: hosts that compile, at low priority, for a world that may follow.

On CPU no description of a topology can be had without its processes
(`jax.experimental.topologies` raises), so the processes are started: as many as the
smaller world would have. They compile, keep the executables for that world, and end.
"""

from __future__ import annotations

import functools
import os
import threading
import time
from typing import TYPE_CHECKING

from elastic_ckpt.core import errors, events
from elastic_ckpt.elastic import host_process, supervisor

if TYPE_CHECKING:
    from elastic_ckpt.elastic.member import Member

# Training processes that compete for a core get ten times as much of it.
_NICENESS = 10


class ShadowWorld:
    """Host processes that compile ahead, supervised by a thread.

    Args:
      program: of each host.
      num_hosts: their number.
      log_directory: for their logs.
      budget_secs: how long they may take before they are ended.
      emit: called, in the thread, when they have compiled or failed.
    """

    def __init__(
        self,
        program: host_process.Program,
        *,
        num_hosts: int,
        log_directory: str,
        budget_secs: float,
        emit: events.Emit,
    ) -> None:
        self._hosts = supervisor.HostProcesses(
            functools.partial(_run_politely, program),
            num_hosts=num_hosts,
            log_directory=log_directory,
            emit=events.nobody,
        )
        self._num_hosts = num_hosts
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
            self._hosts.run(self._look)
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

    def _look(self, hosts: supervisor.HostProcesses) -> None:
        if self._is_closed.is_set() or self._secs() > self._budget_secs:
            hosts.end()

    def _secs(self) -> float:
        return time.monotonic() - self._began_secs


def _run_politely(
    program: host_process.Program, member: Member, channel: host_process.HostChannel
) -> None:
    os.nice(_NICENESS)
    program(member, channel)
