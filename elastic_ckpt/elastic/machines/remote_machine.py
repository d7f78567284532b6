"""Another machine of the run, as the leader sees it: hosts, and checks of slices."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import multiprocessing
import os
import queue
import signal
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from elastic_ckpt.core import codec
from elastic_ckpt.elastic import faults, host_process, host_start
from elastic_ckpt.elastic.cluster import Assignment
from elastic_ckpt.elastic.machines import machine_link
from elastic_ckpt.elastic.member import Member
from elastic_ckpt.elastic.slice_check import Checked


class RemoteHost:
    """A host on another machine.

    Args:
      number: of the host on its link.
      link: to its supervisor.
      lost_secs: how long to wait for a machine that does not answer.
    """

    def __init__(
        self, number: int, link: machine_link.Link, *, lost_secs: float
    ) -> None:
        self._number = number
        self._link = link
        self._lost_secs = lost_secs
        self.channel, self._sender = multiprocessing.Pipe(duplex=False)
        self._has_ended = threading.Event()
        # Unless its machine reports another one.
        self._exit_code = -signal.SIGKILL

    def tell(self, message: bytes) -> None:
        """See `StartedHost`."""
        self._link.send(tell=self._number, message=message.decode())

    def send_signal(self, number: signal.Signals) -> None:
        """See `StartedHost`."""
        if not self._has_ended.is_set():
            self._link.send(signal=self._number, number=int(number))

    def wait(self) -> int:
        """See `StartedHost`; a machine that does not answer counts as lost."""
        # Messages that are not read any more must not keep its end from arriving.
        self.channel.close()
        if not self._has_ended.wait(self._lost_secs):
            self._link.cut()
        return self._exit_code

    def take(self, message: str) -> None:
        """Passes on a message of the host."""
        with contextlib.suppress(OSError):
            self._sender.send_bytes(message.encode())

    def end(self, exit_code: int | None = None) -> None:
        """Notes that the host has ended; None if its machine is lost."""
        if exit_code is not None:
            self._exit_code = exit_code
        self._has_ended.set()
        self._sender.close()


@dataclasses.dataclass(kw_only=True)
class _RemotePort:
    address: str
    close: Callable[[], None]


class RemoteMachine:
    """A machine with a link to its supervisor.

    Args:
      number: of the machine.
      link: to it.
      lost_secs: how long to wait for a machine that does not answer.
      agents: the addresses of its agents.

    Attributes:
      number: of the machine.
      link: to it.
      agents: the addresses of its agents, as long as they count.
      is_lost: whether the link is lost.
      is_leaving: whether it is about to go, and takes no more hosts.
      unsound: the slices that have not passed their checks.
    """

    def __init__(
        self,
        number: int,
        link: machine_link.Link,
        *,
        lost_secs: float,
        agents: Iterable[str] = (),
    ) -> None:
        self.number = number
        self.agents = list(agents)
        self.is_lost = False
        self.is_leaving = False
        self.unsound: set[int] = set()
        self.link = link
        self._lost_secs = lost_secs
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._hosts: dict[int, RemoteHost] = {}
        self._ports: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[Checked] = queue.SimpleQueue()

    def serve(self) -> None:
        """Takes in the messages of the machine until the link is lost; in a thread."""
        with contextlib.suppress(machine_link.LinkLostError):
            while True:
                self._take(self.link.receive())
        with self._lock:
            self.is_lost = True
            for host in self._hosts.values():
                host.end()
            self._hosts.clear()

    def reserve(self) -> host_start.Reserved:
        """See `HostMachine`; of a lost machine, whose hosts fail, a port of none."""
        self.link.send(reserve=True)
        try:
            address = self._ports.get(timeout=self._lost_secs)
        except queue.Empty:
            self.link.cut()
            address = f"{host_start.LOOPBACK}:1"
        return _RemotePort(
            address=address, close=lambda: self.link.send(release=address)
        )

    def start(self, assignment: Assignment, member: Member, log: str) -> RemoteHost:
        """Starts a host of a world, with a program of its machine.

        Args:
          assignment: the world.
          member: the host.
          log: the file for its output.
        """
        with self._lock:
            number = next(self._numbers)
            host = RemoteHost(number, self.link, lost_secs=self._lost_secs)
            if self.is_lost:
                host.end()
                return host
            self._hosts[number] = host
        world, name = os.path.split(os.path.normpath(log))
        self.link.send(
            start=number,
            assignment=codec.encode(assignment),
            member=codec.encode(member),
            log=[os.path.basename(world), name],
        )
        return host

    def begin(self, number: int) -> None:
        """Has a slice checked; it is `unsound` until then."""
        self.unsound.add(number)
        self.link.send(check=number)

    def poll(self) -> list[Checked]:
        """The checks that have ended since the last call."""
        results = []
        with contextlib.suppress(queue.Empty):
            while True:
                results.append(self._results.get_nowait())
        self.unsound -= {each.slice for each in results if each.problem is None}
        return results

    def inject(self, kind: faults.Kind, number: int) -> None:
        """Carries out a fault of a slice on the machine; see `LocalSlices.inject`."""
        if kind is faults.Kind.KILL_SLICE:
            self.unsound.discard(number)
        self.link.send(fault=kind.value, slice=number)

    def _take(self, message: Mapping[str, Any]) -> None:
        match message:
            case {"host": number, "message": str(text)}:
                self._host(number).take(text)
            case {"host": number, "exit": int(exit_code)}:
                with self._lock:
                    host = self._hosts.pop(number)
                host.end(exit_code)
            case {"reserved": str(address)}:
                self._ports.put(address)
            case {"checked": int(number), "problem": problem}:
                self._results.put(Checked(slice=number, problem=problem))
            case {"leaving": True}:
                self.is_leaving = True
            case {"beat": True}:
                pass
            case _:
                raise AssertionError(message)

    def _host(self, number: int) -> RemoteHost:
        with self._lock:
            return self._hosts[number]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RemoteStart:
    """A `HostMachine` for one world.

    Attributes:
      machine: with the program of a host.
      assignment: the world.
    """

    machine: RemoteMachine
    assignment: Assignment

    def reserve(self) -> host_start.Reserved:
        """See `HostMachine`."""
        return self.machine.reserve()

    def start(
        self, program: host_process.Program, member: Member, log: str
    ) -> host_start.StartedHost:
        """See `HostMachine`; the machine has the program itself."""
        del program
        return self.machine.start(self.assignment, member, log)
