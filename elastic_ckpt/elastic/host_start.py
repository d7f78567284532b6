"""Starts the hosts of a machine, which is this one or another one."""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import os
import signal
import socket
from multiprocessing import connection, process
from typing import Protocol

from elastic_ckpt.core import storage
from elastic_ckpt.elastic import host_process
from elastic_ckpt.elastic.member import Member

LOOPBACK = "127.0.0.1"


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


class LocalHost:
    """A host that is a process of this machine.

    Args:
      program: of the host.
      member: the host.
      log: the file for its output.
    """

    def __init__(self, program: host_process.Program, member: Member, log: str) -> None:
        context = multiprocessing.get_context("forkserver")
        self.channel, sender = context.Pipe()
        self._process: process.BaseProcess = context.Process(
            target=host_process.run,
            args=(program, member, log, sender),
            name=f"host-{member.host}",
        )
        self._process.start()
        sender.close()

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

    Args:
      interface: the address by which the hosts of a world reach it.
    """

    def __init__(self, interface: str = LOOPBACK) -> None:
        self._interface = interface

    def reserve(self) -> Reserved:
        """See `HostMachine`."""
        return ReservedPort(self._interface)

    def start(
        self, program: host_process.Program, member: Member, log: str
    ) -> StartedHost:
        """See `HostMachine`."""
        storage.make_directory(os.path.dirname(log))
        return LocalHost(program, member, log)


class CutOffMachine:
    """A machine that has lost its network: a fault.

    Its hosts reach no host of other machines, and none of those reaches them.

    Args:
      machine: starts the hosts.
    """

    def __init__(self, machine: HostMachine) -> None:
        self._machine = machine

    def reserve(self) -> Reserved:
        """See `HostMachine`; no host will use this port."""
        return self._machine.reserve()

    def start(
        self, program: host_process.Program, member: Member, log: str
    ) -> StartedHost:
        """See `HostMachine`; the host gets another address than the others."""
        # The port is unused, but for the host itself if it is host 0.
        alone = self._machine.reserve()
        member = dataclasses.replace(member, address=alone.address)
        alone.close()
        return self._machine.start(program, member, log)
