"""A process as others on its machine recognise it: whether it is alive, provably."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import socket

# Linux gives each boot of a machine an id, which its containers share.
_BOOT_ID = pathlib.Path("/proc/sys/kernel/random/boot_id")
_NAMESPACE = "/proc/self/ns/pid"
_ENDED = ("X", "Z")
_STOPPED = ("T", "t")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Process:
    """A process of this or another machine.

    Attributes:
      host: the name of its machine.
      pid: its number.
      boot_id: of the machine; empty if it has none.
      pid_namespace: in which the number counts: containers have their own.
      start_ticks: when it was started, in clock ticks since the machine was.
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
        """Whether this process can tell if it is alive."""
        boot_id, namespace = _place()
        place = (self.boot_id, self.pid_namespace)
        return bool(boot_id and namespace) and place == (boot_id, namespace)

    @property
    def is_dead(self) -> bool:
        """Whether it has provably ended."""
        if not self.is_here:
            return False
        there = _status(self.pid)
        if there is None:
            # Other users' processes may be hidden.
            return not _exists(self.pid)
        state, start_ticks = there
        return start_ticks != self.start_ticks or state in _ENDED

    @property
    def is_running(self) -> bool:
        """Whether it is provably alive, and not stopped by a signal."""
        if not self.is_here or self.is_dead:
            return False
        there = _status(self.pid)
        return there is not None and there[0] not in _STOPPED


def this() -> Process:
    """The process that calls it."""
    boot_id, namespace = _place()
    there = _status(os.getpid())
    return Process(
        host=socket.gethostname(),
        pid=os.getpid(),
        boot_id=boot_id,
        pid_namespace=namespace,
        start_ticks=0 if there is None else there[1],
    )


def _place() -> tuple[str, str]:
    # Empty on systems that do not tell.
    try:
        return _BOOT_ID.read_text().strip(), os.readlink(_NAMESPACE)
    except OSError:
        return "", ""


def _status(pid: int) -> tuple[str, int] | None:
    # The state and the start of a process; None if it is not there, or hidden.
    try:
        text = pathlib.Path("/proc", str(pid), "stat").read_text()
    except OSError:
        return None
    # The name before it may have any characters.
    fields = text.rpartition(")")[2].split()
    return fields[0], int(fields[19])


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
