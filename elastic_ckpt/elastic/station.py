"""A machine's station, which starts hosts for the machine that leads the run.

The leader sends the same orders to all machines: to its own by a call, to the others
over a link. A station owns everything that outlives worlds: the warm fork server,
processes that stand by for the next world, the agents that serve its slices' RAM, and
the executables that its hosts compiled. Hosts never outlive their station.

    orders    {start: [world, host], assignment, member, log}
              {tell: [world, host], text}   {signal: [world, host], number}
              {fault: kind, slice}          {forget: [agents]}
    messages  {host: [world, host], ...}    as the host sent it
              {host: [world, host], exit}   its exit code
              {port}                        reserved for host 0 of the next world
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import itertools
import json
import multiprocessing
import os
import pickle
import signal
import socket
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing import connection, forkserver, process
from typing import Any, TypeAlias

from elastic_ckpt.core import bucket_clients, codec, storage
from elastic_ckpt.elastic import executables, host, termination
from elastic_ckpt.elastic.cluster import Assignment, TrainFunction
from elastic_ckpt.elastic.faults import Kind
from elastic_ckpt.elastic.host import Hardware
from elastic_ckpt.tiers.peers import agent
from elastic_ckpt.tiers.persistent import run_files
from elastic_ckpt.tiers.ram import machine

# A world number, and a host's index in that world.
Key: TypeAlias = tuple[int, int]
LOOPBACK = "127.0.0.1"
# The number of ports that stay reserved until a world's service has bound its own.
_MOST_PORTS = 4


def warm_up(modules: Sequence[str], directory: str = "") -> None:
    """Starts the fork server, which imports `modules` while the caller continues.

    Args:
      modules: the modules that hosts import; importing them must not start a thread or
        initialize a JAX backend.
      directory: the run's directory; if it is in an object store, hosts also import
        its client, which takes about half a second.
    """
    forkserver.set_forkserver_preload([*modules, *bucket_clients.modules(directory)])
    with termination.held():
        forkserver.ensure_running()


class HostProcess:
    """A child of the warm fork server that waits for its task.

    Args:
      example: a task with the same imports as the one to come; None if the task arrives
        immediately.

    Attributes:
      channel: the connection that receives the process's messages; it closes when the
        process and its forks have exited.
      ended: a descriptor that becomes readable when the process has exited.
    """

    def __init__(self, example: host.Task | None = None) -> None:
        context = multiprocessing.get_context("forkserver")
        self.channel, sender = context.Pipe()
        self._process: process.BaseProcess = context.Process(
            target=host.stand_by, args=(sender, example)
        )
        with termination.held():
            self._process.start()
        sender.close()
        assert self._process.pid is not None
        try:
            self.ended = os.pidfd_open(self._process.pid)
        except ProcessLookupError:
            self.ended = os.open(os.devnull, os.O_RDONLY)

    def tell(self, message: bytes) -> None:
        """Sends the process its task or an order, unless it has exited."""
        with contextlib.suppress(OSError):
            self.channel.send_bytes(message)

    def signal(self, number: int) -> None:
        """Sends the process a signal, unless it has exited."""
        # Works even if the fork server has exited.
        with contextlib.suppress(OSError):
            signal.pidfd_send_signal(self.ended, number)

    def wait(self) -> int:
        """Waits for the process to exit; returns its exit code."""
        self._process.join()
        self.channel.close()
        os.close(self.ended)
        return self._process.exitcode or 0


class Station:
    """This machine's hosts and the resources that outlive them.

    Args:
      hardware: the slices and hosts of the run, and the devices of each host. A host
        that simulates multiple slices counts as one slice.
      slices: this machine's slice numbers; None if it has all slices.
      memory: the RAM disks of the slices; None if hosts do not store checkpoints there.
      log_directory: the directory for the hosts' output.
      interface: the address at which other machines reach this one.

    Attributes:
      train: the training function; must be set before hosts start.
      number: this machine's index, computed from its slice numbers: all machines have
        equally many slices.
      hosts: the hosts that have not exited.
    """

    train: TrainFunction

    def __init__(
        self,
        hardware: Hardware,
        *,
        slices: Sequence[int] | None = None,
        memory: host.SliceMemory | None = None,
        log_directory: str,
        interface: str = LOOPBACK,
    ) -> None:
        num_slices = min(hardware.hosts, hardware.slices)
        self.slices = tuple(range(num_slices) if slices is None else slices)
        self.hosts_per_slice = hardware.hosts // num_slices
        self.hardware = hardware
        self.log_directory = log_directory
        self.interface = interface
        self._memory = memory
        self.number = self.slices[0] // len(self.slices)
        self.num_machines = num_slices // len(self.slices)
        self._agents: dict[int, agent.AgentProcess] = {}
        self.hosts: dict[Key, HostProcess] = {}
        self._standing_by: collections.deque[HostProcess] = collections.deque()
        # The program of the last host started, and a program that has trained a step.
        self._last: host.Program | None = None
        self._example: host.Program | None = None
        self._ports: list[socket.socket] = []
        with contextlib.ExitStack() as resources:
            resources.callback(self._end_all)
            self._owned = host.Owned(
                memory=memory,
                kept=resources.enter_context(executables.kept()),
                most_hosts=len(self.slices) * self.hosts_per_slice,
            )
            self._reserve()
            for number in self.slices:
                self._serve(number)
            self._resources = resources.pop_all()

    @property
    def hello(self) -> dict[str, Any]:
        """The facts that a leader needs about this machine."""
        return {
            "agents": [each.address.url for each in self._agents.values()],
            "interface": self.interface,
            "port": self._ports[-1].getsockname()[1],
        }

    def do(self, order: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Carries out an order; returns the messages that answer it."""
        match order:
            case {"start": [int(world), int(number)]}:
                self._start((world, number), order)
                if number == 0:
                    self._reserve()
                    return [{"port": self.hello["port"]}]
            case {"tell": key, "text": str(text)} if tuple(key) in self.hosts:
                self.hosts[tuple(key)].tell(text.encode())
            case {"signal": key, "number": int(number)} if tuple(key) in self.hosts:
                self.hosts[tuple(key)].signal(number)
            case {"fault": Kind.KILL_SLICE, "slice": number} if number in self._agents:
                gone = self._agents.pop(number)
                gone.close()
                self._forget([gone.address.url])
                assert self._memory is not None
                storage.remove(self._memory.root(number))
            case {"fault": Kind.RETURN_SLICE, "slice": int(number)}:
                self._serve(number)
            case {"fault": Kind.BREAK_SLICE, "slice": int(number)}:
                broken = self._owned.broken | {number}
                self._owned = dataclasses.replace(self._owned, broken=broken)
            case {"forget": list(agents)}:
                self._forget(agents)
        return []

    def wait(self, secs: float, *extra: Any) -> Iterator[dict[str, Any]]:
        """Waits for hosts to send messages or exit; yields these events as messages.

        A readable object in `extra` also ends the wait.
        """
        hosts = dict(self.hosts)
        waited = [
            each for host in hosts.values() for each in (host.channel, host.ended)
        ]
        ready = connection.wait([*waited, *extra], secs)
        for key, each in hosts.items():
            if each.channel in ready or each.ended in ready:
                yield {"host": [*key], **self._read(key, each)}

    def _read(self, key: Key, sender: HostProcess) -> dict[str, Any]:
        # A channel without a message may stay open: processes forked by a host hold it.
        with contextlib.suppress(EOFError, OSError):
            if sender.channel.poll():
                message = json.loads(sender.channel.recv_bytes())
                if "stepped" in message:
                    self._example = self._last
                return message
        return {"exit": self.hosts.pop(key).wait()}

    def stand_by(self) -> None:
        """Starts a process for the next world if too few stand by; called often."""
        if self._example is not None and (
            len(self._standing_by) < self._owned.most_hosts
        ):
            self._standing_by.append(
                HostProcess(functools.partial(host.run, self._example))
            )

    def end_hosts(self) -> None:
        """Kills all hosts."""
        for each in self.hosts.values():
            each.signal(signal.SIGKILL)
        while self.hosts:
            self.hosts.popitem()[1].wait()

    def close(self) -> None:
        """Kills the hosts and stops everything that outlives them."""
        self._resources.close()

    def program(self, assignment: Assignment) -> host.Program:
        """The program that each host of this machine runs in a world."""
        return functools.partial(
            host.run_host, self.train, self.hardware, assignment, self._owned
        )

    def _start(self, key: Key, order: Mapping[str, Any]) -> None:
        # Logs go to the directory that is configured on this machine.
        directory = f"{self.log_directory}/{os.path.basename(order['log'])}"
        storage.make_directory(directory)
        assignment = codec.decode(Assignment, order["assignment"])
        member = codec.decode(host.Member, order["member"])
        self._last = self.program(assignment)
        self.hosts[key] = self._waiting()
        log = f"{directory}/host-{member.host}.log"
        task = functools.partial(host.run, self._last, member, log)
        self.hosts[key].tell(pickle.dumps(task))

    def _waiting(self) -> HostProcess:
        # Returns a process without a task: a live one on standby, or a new one.
        while self._standing_by:
            first = self._standing_by.popleft()
            if not first.channel.poll():
                return first
            first.wait()
        return HostProcess()

    def _reserve(self) -> None:
        # The OS chooses the port, which stays reserved while the socket is open. gRPC
        # servers also bind with SO_REUSEPORT; only their listening socket accepts.
        reserved = socket.socket()
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        reserved.bind((self.interface, 0))
        self._ports.append(reserved)
        if len(self._ports) > _MOST_PORTS:
            self._ports.pop(0).close()

    def _serve(self, number: int) -> None:
        # The agent outlives worlds so that the next world can read from it immediately.
        if self._memory is None or number in self._agents:
            return
        root = self._memory.root(number)
        machine.machine_id(root)  # Creates the directory.
        self._agents[number] = agent.AgentProcess(
            agent.Service(
                root=root,
                interface=self.interface,
                tls_certificate=self._memory.tls_certificate,
                tls_key=self._memory.tls_key,
            )
        )

    def _forget(self, agents: Sequence[str]) -> None:
        # Otherwise the next world would wait for lost agents.
        for number, url in itertools.product(self._agents, agents):
            assert self._memory is not None
            run_files.forget_agent(self._memory.root(number), url)

    def _end_all(self) -> None:
        # Kills the processes on standby as it kills hosts.
        self.hosts |= {(0, -n): each for n, each in enumerate(self._standing_by)}
        self.end_hosts()
        while self._agents:
            self._agents.popitem()[1].close()
        while self._ports:
            self._ports.pop().close()
