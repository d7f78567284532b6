"""The supervisor of a machine that follows the leader of the run.

It starts, watches and ends hosts of this machine when the leader asks it to, and
reports their messages. When the leader is lost it ends them at once: they would hang,
and the next leader begins another world.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import time
from collections.abc import Mapping
from multiprocessing import connection
from typing import Any

from elastic_ckpt.core import errors
from elastic_ckpt.elastic import (
    faults,
    host_start,
    local_slices,
    shadow_world,
    termination,
)
from elastic_ckpt.elastic.cluster import TrainFunction
from elastic_ckpt.elastic.machines import machine_link, membership, remote_machine
from elastic_ckpt.elastic.member import Member

# The longest time between two looks at the membership.
_LOOK_SECS = 0.1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Functions:
    """The functions of a host, the same as the leader's.

    Attributes:
      train: of each host of a world.
      compile_ahead: of each host of a shadow world.
    """

    train: TrainFunction
    compile_ahead: TrainFunction


@dataclasses.dataclass(frozen=True, kw_only=True)
class Over:
    """The end of the run, or of this machine's part in it.

    Attributes:
      is_stopped: whether the run, or this machine, was asked to end.
    """

    is_stopped: bool


class Follower:
    """Follows one leader until the run is over or the leader is lost.

    Args:
      link: to the leader.
      own: the slices of this machine.
      functions: of each host.
      members: the membership, in which another machine leads.
    """

    def __init__(
        self,
        link: machine_link.Link,
        own: local_slices.LocalSlices,
        functions: Functions,
        members: membership.Membership,
    ) -> None:
        self._link = link
        self._own = own
        self._functions = functions
        self._members = members
        self._term = members.term
        self._hosts: dict[int, host_start.StartedHost] = {}
        self._channels: dict[connection.Connection, int] = {}
        self._reserved: dict[str, host_start.Reserved] = {}
        # The time limit for hosts to end after SIGTERM to this machine.
        self._deadline_secs: float | None = None

    def run(self, sigterm: termination.Notice) -> Over | None:
        """Returns the end of the run; None if the leader is lost, or leads no more.

        Args:
          sigterm: receives the signal to this machine; then its hosts save with
            all others, and leave.

        Raises:
          RunError: if the run has failed.
        """
        try:
            while True:
                over = self._step(sigterm)
                if over is not None:
                    return over
        except machine_link.LinkLostError:
            # SIGTERM may have arrived meanwhile.
            is_pending = bool(connection.wait([sigterm], 0))  # type: ignore[list-item]
            is_stopped = is_pending and sigterm.received()
            return Over(is_stopped=True) if is_stopped or self._is_leaving else None
        finally:
            self._end_hosts()
            self._link.cut()
            for reserved in self._reserved.values():
                reserved.close()

    def _step(self, sigterm: termination.Notice) -> Over | None:
        self._members.poll()
        if self._members.leader is None or self._members.term != self._term:
            raise machine_link.LinkLostError
        if self._deadline_secs is not None and (
            not self._hosts or time.monotonic() > self._deadline_secs
        ):
            return Over(is_stopped=True)
        for checked in self._own.checks.poll():
            self._link.send(checked=checked.slice, problem=checked.problem)
        ready = connection.wait(
            [self._link, sigterm, *self._channels],  # type: ignore[list-item]
            _LOOK_SECS,
        )
        for each in ready:
            if isinstance(each, connection.Connection):
                self._pass_on(each)
        if sigterm in ready and sigterm.received():
            self._leave()
        while self._link.has_message():
            over = self._take(self._link.receive())
            if over is not None:
                return over
        return None

    @property
    def _is_leaving(self) -> bool:
        return self._deadline_secs is not None

    def _leave(self) -> None:
        # Its hosts report SIGTERM to the leader.
        self._link.send(leaving=True)
        self._deadline_secs = time.monotonic() + self._own.limits.grace_secs
        for host in self._hosts.values():
            host.send_signal(signal.SIGTERM)

    def _pass_on(self, channel: connection.Connection) -> None:
        number = self._channels[channel]
        try:
            message = channel.recv_bytes()
        except (EOFError, OSError):
            del self._channels[channel]
            self._link.send(host=number, exit=self._hosts.pop(number).wait())
        else:
            self._link.send(host=number, message=message.decode())

    def _take(self, message: Mapping[str, Any]) -> Over | None:
        match message:
            case {"reserve": True}:
                reserved = self._own.machine.reserve()
                self._reserved[reserved.address] = reserved
                self._link.send(reserved=reserved.address)
            case {"release": str(address)}:
                if address in self._reserved:
                    self._reserved.pop(address).close()
            case {"start": int(number)}:
                self._start(number, message)
            case {"tell": int(number), "message": str(text)}:
                if number in self._hosts:
                    self._hosts[number].tell(text.encode())
            case {"signal": int(number), "number": int(signal_number)}:
                if number in self._hosts:
                    self._hosts[number].send_signal(signal.Signals(signal_number))
            case {"fault": str(kind), "slice": int(number)}:
                self._own.inject(faults.Kind(kind), number)
            case {"forget": list(agents)}:
                self._own.forget(agents)
            case {"check": int(number)}:
                self._own.checks.begin(number)
            case {"replaced": True}:
                self._members.replaced()
                raise machine_link.LinkLostError
            case {"over": True, "failure": str(failure)}:
                raise errors.RunError(f"the run has failed: {failure}")
            case {"over": True}:
                return Over(is_stopped=message["is_stopped"])
            case _:
                raise AssertionError(message)
        return None

    def _start(self, number: int, message: Mapping[str, Any]) -> None:
        assignment = remote_machine.assignment_of(message["assignment"])
        world, name = map(os.path.basename, message["log"])
        functions = self._functions
        if message["is_ahead"]:
            program = shadow_world.polite(
                self._own.program(functions.compile_ahead, assignment)
            )
        else:
            program = self._own.program(functions.train, assignment)
        with termination.held():
            host = self._own.machine.start(
                program,
                Member(**message["member"]),
                os.path.join(self._own.log_directory, world, name),
            )
        self._hosts[number] = host
        self._channels[host.channel] = number

    def _end_hosts(self) -> None:
        for host in self._hosts.values():
            host.send_signal(signal.SIGKILL)
        for host in self._hosts.values():
            host.wait()
        self._hosts.clear()


def connected(
    members: membership.Membership,
    own: local_slices.LocalSlices,
    listener: Mapping[str, Any],
    configured: str,
) -> machine_link.Link | None:
    """A link to the leader's listener; None if it cannot be had now.

    Args:
      members: the membership.
      own: the slices of this machine.
      listener: as the leader published it.
      configured: the digest of the run's configuration.
    """
    with contextlib.suppress(machine_link.LinkLostError):
        link = machine_link.connect(listener["address"], listener["key"])
        link.send(machine=members.own, configured=configured, agents=own.agents)
        return link
    return None
