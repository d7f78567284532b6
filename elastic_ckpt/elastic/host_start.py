"""Starts the hosts of a machine, which is this one or another one."""

from __future__ import annotations

import collections
import contextlib
import functools
import multiprocessing
import os
import pathlib
import re
import signal
import socket
from multiprocessing import connection, process
from typing import Protocol

from elastic_ckpt.core import storage
from elastic_ckpt.elastic import host_process, termination
from elastic_ckpt.elastic.member import Member

LOOPBACK = "127.0.0.1"
# Flags of a process in Linux: PF_EXITING, and PF_SIGNALED of one killed by a signal.
_ENDING = 0x4 | 0x400


class StartedHost(Protocol):
    """A host that was started.

    Attributes:
      channel: with the messages of the host; it ends when the host has ended.
    """

    channel: connection.Connection

    def tell(self, message: bytes) -> None:
        """Sends a message to the host, unless it has ended."""
        ...

    def send_signal(self, number: signal.Signals) -> None:
        """Sends a signal to the host, unless it has ended."""
        ...

    def wait(self) -> int:
        """Waits until the host has ended, and returns its exit code."""
        ...


class Reserved(Protocol):
    """A port that is reserved until `close`.

    Attributes:
      address: `host:port`.
    """

    address: str

    def close(self) -> None:
        """Releases the port."""
        ...


class HostMachine(Protocol):
    """A machine on which hosts are started."""

    def reserve(self) -> Reserved:
        """Reserves a port for the coordination service of a world."""
        ...

    def start(
        self, program: host_process.Program, member: Member, log: str
    ) -> StartedHost:
        """Starts a host, which writes to `log`, as a child of the warm fork server."""
        ...


class LocalProcess:
    """A process of this machine, which waits for its task; a `StartedHost`.

    It is a child of the warm fork server.

    Args:
      example: a task that imports what that of this process does; None if it begins at
        once.
    """

    def __init__(self, example: host_process.Task | None = None) -> None:
        context = multiprocessing.get_context("forkserver")
        self.channel, sender = context.Pipe()
        self._process: process.BaseProcess = context.Process(
            target=host_process.stand_by, args=(sender, example)
        )
        self._process.start()
        sender.close()

    @property
    def is_waiting(self) -> bool:
        """Whether a process that has no task yet has not ended."""
        return not self.channel.poll()

    @property
    def is_ending(self) -> bool:
        """Whether the process has ended, or a signal is ending it.

        Its channel shows that only when its memory is released, which for gigabytes
        takes a tenth of a second.
        """
        try:
            directory = pathlib.Path(f"/proc/{self._process.pid}")
            # In this order: a signal that is no longer pending has set its flag.
            status = (directory / "status").read_text()
            flags = int((directory / "stat").read_text().rpartition(")")[2].split()[6])
        except OSError:
            return True
        # The signal of the process stays pending when its thread has taken it.
        pending = re.findall(r"^(?:SigPnd|ShdPnd):\s*(\w+)$", status, re.MULTILINE)
        is_killed = any(int(each, 16) & 1 << signal.SIGKILL - 1 for each in pending)
        return bool(flags & _ENDING or is_killed)

    def begin(self, task: host_process.Task) -> None:
        """Has the process do a task, unless it has ended."""
        with contextlib.suppress(OSError):
            self.channel.send(task)

    def tell(self, message: bytes) -> None:
        """See `StartedHost`."""
        # A host that has just died is reported by the other end of its pipe.
        with contextlib.suppress(OSError):
            self.channel.send_bytes(message)

    def send_signal(self, number: signal.Signals) -> None:
        """See `StartedHost`."""
        if not self._process.is_alive():
            return
        assert self._process.pid is not None
        # The fork server may have reaped a host whose end it has not reported yet.
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._process.pid, number)

    def wait(self) -> int:
        """See `StartedHost`."""
        self._process.join()
        assert self._process.exitcode is not None
        return self._process.exitcode


class ReservedPort:
    """A port of this machine.

    Args:
      interface: the address, by which the other hosts reach this machine.
    """

    def __init__(self, interface: str) -> None:
        # The OS chooses the port and reserves it while this socket is open. gRPC
        # servers also bind with SO_REUSEPORT, and only a listening socket accepts
        # connections.
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        self._socket.bind((interface, 0))
        self.address = f"{interface}:{self._socket.getsockname()[1]}"

    def close(self) -> None:
        """See `Reserved`."""
        self._socket.close()


class ThisMachine:
    """This machine.

    Between worlds, processes stand by for the next one: they have imported all that its
    hosts need, and have no devices.

    Args:
      interface: the address by which the hosts of a world reach it.
    """

    def __init__(self, interface: str = LOOPBACK) -> None:
        self._interface = interface
        self._standing_by: collections.deque[LocalProcess] = collections.deque()

    def stand_by(self, number: int, program: host_process.Program) -> None:
        """Starts a process that stands by, if there are fewer than `number`.

        Args:
          number: of processes.
          program: of hosts like those to come.
        """
        if len(self._standing_by) < number:
            with termination.held():
                example = functools.partial(host_process.run, program)
                self._standing_by.append(LocalProcess(example))

    def process(self) -> LocalProcess:
        """A process without a task: one that stood by, or a new one."""
        while self._standing_by:
            first = self._standing_by.popleft()
            if first.is_waiting:
                return first
            first.wait()
        return LocalProcess()

    def close(self) -> None:
        """Ends the processes that stand by."""
        for each in self._standing_by:
            each.send_signal(signal.SIGKILL)
        while self._standing_by:
            self._standing_by.popleft().wait()

    def reserve(self) -> Reserved:
        """See `HostMachine`."""
        return ReservedPort(self._interface)

    def start(
        self, program: host_process.Program, member: Member, log: str
    ) -> StartedHost:
        """See `HostMachine`."""
        storage.make_directory(os.path.dirname(log))
        host = self.process()
        host.begin(functools.partial(host_process.run, program, member, log))
        return host
