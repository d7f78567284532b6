"""Identifies a process, so that others on its machine can prove whether it is alive."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import socket

import psutil

# Linux gives each boot of a machine an ID, which the machine's containers share.
_BOOT_ID = pathlib.Path("/proc/sys/kernel/random/boot_id")
_NAMESPACE = "/proc/self/ns/pid"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Process:
    """A process on this or another machine.

    Attributes:
      host: the machine name.
      pid: the process ID in `pid_namespace`.
      boot_id: the ID of the machine's boot; empty if the system has none.
      pid_namespace: the namespace, one per container; empty if the system has none.
      start_ticks: the start time, in clock ticks since the boot.
    """

    host: str
    pid: int
    boot_id: str
    pid_namespace: str
    start_ticks: int

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"

    @property
    def is_here(self) -> bool:
        """Whether the calling process can tell if this process is alive."""
        place = _place()
        return all(place) and place == (self.boot_id, self.pid_namespace)

    @property
    def is_dead(self) -> bool:
        """Whether the process has provably exited."""
        return self._state() in ("X", "Z")

    @property
    def is_running(self) -> bool:
        """Whether the process is provably alive and not stopped by a signal."""
        return self._state() not in ("", "X", "Z", "T", "t")

    def _state(self) -> str:
        # The kernel's letter; empty if unknown. X and Z mean exited; T and t, stopped.
        if not self.is_here:
            return ""
        try:
            state, start_ticks = _state_and_start(self.pid)
        except OSError:
            # Other users' processes may be hidden.
            return "" if psutil.pid_exists(self.pid) else "X"
        return state if start_ticks == self.start_ticks else "X"


def this() -> Process:
    """The calling process."""
    boot_id, namespace = _place()
    return Process(
        host=socket.gethostname(),
        pid=os.getpid(),
        boot_id=boot_id,
        pid_namespace=namespace,
        start_ticks=_state_and_start(os.getpid())[1],
    )


def _place() -> tuple[str, str]:
    # The boot id and PID namespace; empty on systems that have neither.
    try:
        return _BOOT_ID.read_text().strip(), os.readlink(_NAMESPACE)
    except OSError:
        return "", ""


def _state_and_start(pid: int) -> tuple[str, int]:
    # psutil's start time moves when the machine's clock is set.
    text = pathlib.Path("/proc", str(pid), "stat").read_text()
    # The process name, in parentheses, may contain any character.
    fields = text.rpartition(")")[2].split()
    return fields[0], int(fields[19])
