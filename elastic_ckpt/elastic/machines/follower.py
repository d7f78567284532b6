"""The supervisor of a machine that follows the leader of the run.

It starts, watches and ends hosts of this machine when the leader asks it to, and
reports their messages. When the leader is lost it ends them at once: they would hang,
and the next leader begins another world.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Collection, Mapping
from multiprocessing import connection
from typing import Any

from elastic_ckpt.core import codec, errors
from elastic_ckpt.elastic import (
    faults,
    host_process,
    host_start,
    local_slices,
    termination,
)
from elastic_ckpt.elastic.cluster import Assignment, TrainFunction
from elastic_ckpt.elastic.machines import leader_claim, machine_link
from elastic_ckpt.elastic.member import Member

# The longest time between two looks at the link.
_LOOK_SECS = 0.1


class Follower:
    """Follows one leader until the run is over or the leader is lost.

    Args:
      leader: as its claim names it.
      claims: of the leaders, as this machine sees them.
      machine: the number of this one.
      own: the slices of this machine.
      train: of each host of a world, the same as the leader's.
      configured: the digest of the run's configuration.
      lost_secs: after which a leader that is not heard of is lost.

    Attributes:
      machines: those that were there when the leader was heard of last.
      is_to_rest: whether the leader gives way to machines that it does not reach.

    Raises:
      LinkLostError: if the leader cannot be reached, or does not take this machine.
    """

    def __init__(
        self,
        leader: leader_claim.Leader,
        claims: leader_claim.LeaderClaims,
        machine: int,
        own: local_slices.LocalSlices,
        *,
        train: TrainFunction,
        configured: str,
        lost_secs: float,
    ) -> None:
        self.machines: Collection[int] = {machine}
        self.is_to_rest = False
        self._leader = leader
        self._claims = claims
        self._own = own
        self._train = train
        # The agents of the leader's machine.
        self._agents: list[str] = []
        self._hosts: dict[int, host_start.StartedHost] = {}
        self._channels: dict[connection.Connection, int] = {}
        self._reserved: dict[str, host_start.Reserved] = {}
        # Of the hosts of this world; and that of others that stand by for the next one,
        # once these have trained a step.
        self._program: host_process.Program | None = None
        self._trained: host_process.Program | None = None
        # The time limit for hosts to end after SIGTERM to this machine.
        self._deadline_secs: float | None = None
        self._link = machine_link.connect(leader.address, leader.key, lost_secs)
        self._link.send(machine=machine, configured=configured, agents=own.agents)
        try:
            self._take(self._link.receive())
        except BaseException:
            self._link.cut()
            raise
        self._link.begin_beats()

    def run(self, sigterm: termination.Notice) -> bool | None:
        """Returns whether the run was asked to end; None if the leader is lost.

        Args:
          sigterm: receives the signal to this machine; then its hosts save with
            all others, and leave.

        Raises:
          RunError: if the run has failed.
        """
        try:
            while True:
                is_stopped = self._step(sigterm)
                if is_stopped is not None:
                    return is_stopped
        except machine_link.LinkLostError:
            self._own.forget(self._agents)
            # SIGTERM may have arrived meanwhile.
            is_pending = bool(connection.wait([sigterm], 0))  # type: ignore[list-item]
            is_stopped = is_pending and sigterm.received()
            return True if is_stopped or self._is_leaving else None
        finally:
            self._end_hosts()
            self._link.cut()
            for reserved in self._reserved.values():
                reserved.close()

    def _step(self, sigterm: termination.Notice) -> bool | None:
        if self._deadline_secs is not None and (
            not self._hosts or time.monotonic() > self._deadline_secs
        ):
            return True
        for checked in self._own.checks.poll():
            self._link.send(checked=checked.slice, problem=checked.problem)
        if self._trained is not None:
            self._own.stand_by(self._trained)
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
            is_stopped = self._take(self._link.receive())
            if is_stopped is not None:
                return is_stopped
        if self._link.is_silent:
            raise machine_link.LinkLostError("it gives no sign")
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
            if "stepped" in json.loads(message):
                self._trained = self._program

    def _take(self, message: Mapping[str, Any]) -> bool | None:
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
            case {"renewed": int(count), "machines": list(numbers)}:
                self._claims.note(self._leader.term, count)
                self.machines = numbers
            case {"agents": list(agents)}:
                self._agents = agents
            case {"beat": True}:
                pass
            case {"rest": True}:
                self.is_to_rest = True
                raise machine_link.LinkLostError("it gives way")
            case {"refused": str(why)}:
                raise machine_link.LinkLostError(why)
            case {"over": True, "failure": str(failure)}:
                raise errors.RunError(f"the run has failed: {failure}")
            case {"over": True}:
                return bool(message["is_stopped"])
            case _:
                raise AssertionError(message)
        return None

    def _start(self, number: int, message: Mapping[str, Any]) -> None:
        assignment = codec.decode(Assignment, message["assignment"])
        world, name = map(os.path.basename, message["log"])
        program = self._program = self._own.program(self._train, assignment)
        self._trained = None
        with termination.held():
            host = self._own.machine.start(
                program,
                codec.decode(Member, message["member"]),
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
