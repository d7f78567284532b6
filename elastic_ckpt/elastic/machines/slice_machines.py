"""The machines that have the slices of a run: this one, and those that follow it.

The supervisors of the others (`follower`) connect to the leader, whose address is in
its claim, and start, watch and end hosts when it asks them to. A machine is lost when
its link is, or when nothing was heard on it for too long.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Collection
from multiprocessing import connection
from typing import Any

from absl import logging

from elastic_ckpt.core import errors
from elastic_ckpt.elastic import faults, host_start, local_slices, slice_check
from elastic_ckpt.elastic.cluster import Assignment
from elastic_ckpt.elastic.machines import leader_claim, machine_link
from elastic_ckpt.elastic.machines.remote_machine import RemoteMachine, RemoteStart

_POLL_SECS = 0.05


class LeadershipLostError(errors.StoppedError):
    """This machine does not lead the run any more."""


class SliceMachines:
    """Finds the machine of each slice.

    Args:
      own: the slices of this machine; each has as many.
      claims: of the leaders, as this machine sees them; None if there are no others.
      configured: the digest of the run's configuration, the same on all machines.

    Attributes:
      are_several: whether the run has other machines.
      leads_until_secs: when this machine leads no more, by the monotonic clock.
    """

    def __init__(
        self,
        own: local_slices.LocalSlices,
        claims: leader_claim.LeaderClaims | None = None,
        *,
        configured: str = "",
    ) -> None:
        self._own = own
        self._claims = claims
        self._configured = configured
        self._listener: machine_link.Listener | None = None
        self.are_several = claims is not None
        self.leads_until_secs = math.inf
        self._lock = threading.Lock()
        # The others by their numbers, and those that have just connected.
        self._machines: dict[int, RemoteMachine] = {}
        self._arrived: dict[int, RemoteMachine] = {}

    def take_lead(self) -> bool:
        """Takes the claim of the leader, which is free, unless another machine has.

        Raises:
          CheckpointError: see `LeaderClaims.take`; likewise others.
        """
        assert self._claims is not None
        listener = machine_link.Listener(self._own.interface, self._claims.lost_secs)
        self._listener = listener
        return self._claims.take(
            listener.address, listener.key, renewed_to=self._tell_renewed
        )

    def await_machines(self, numbers: Collection[int]) -> None:
        """Waits for machines, until those that are not there count as lost."""
        assert self._claims is not None
        deadline_secs = time.monotonic() + self._claims.lost_secs
        while not {self._claims.machine, *self.numbers(self.slices())} >= {*numbers}:
            self.poll()
            if time.monotonic() > deadline_secs:
                break
            time.sleep(_POLL_SECS)

    def poll(self) -> None:
        """Takes in machines that come and go; called often.

        Raises:
          LeadershipLostError: if this machine leads no more.
        """
        if self._claims is None or self._listener is None:
            return
        is_over = time.monotonic() > self.leads_until_secs
        if is_over or not self._claims.has_lead:
            raise LeadershipLostError("the machine does not lead the run any more")
        while (accepted := self._listener.accept()) is not None:
            threading.Thread(
                target=self._serve, args=(accepted,), name="machine", daemon=True
            ).start()
        with self._lock:
            self._machines |= self._arrived
            self._arrived.clear()
        lost = [each for each in self._machines.values() if each.is_lost]
        if gone := [agent for machine in lost for agent in machine.agents]:
            self._own.forget(gone)
            self.tell(forget=gone)
            for machine in lost:
                machine.agents.clear()

    def slices(self) -> frozenset[int]:
        """The slices of all machines that are there."""
        per_machine = len(self._own.numbers)
        return frozenset(self._own.numbers).union(
            each.number * per_machine + number
            for each in self.others()
            if not each.is_leaving
            for number in range(per_machine)
        )

    def others(self) -> list[RemoteMachine]:
        """The other machines that are there."""
        return [each for each in list(self._machines.values()) if not each.is_lost]

    def numbers(self, slices: Collection[int]) -> frozenset[int]:
        """The machines of slices; empty if the run has only one."""
        if not self.are_several:
            return frozenset()
        return frozenset(number // len(self._own.numbers) for number in slices)

    def checkers(self) -> list[slice_check.SliceChecks | RemoteMachine]:
        """The checks of the slices of each machine."""
        return [self._own.checks, *self.others()]

    def check(self, number: int) -> None:
        """Begins to check a slice."""
        (self._remote(number) or self._own.checks).begin(number)

    def inject(self, kind: faults.Kind, number: int) -> None:
        """Carries out a fault of a slice on its machine, but for signals to hosts.

        Nothing happens on a machine that is not there.
        """
        if number in self.slices():
            (self._remote(number) or self._own).inject(kind, number)

    def of_world(self, assignment: Assignment) -> list[host_start.HostMachine]:
        """The machines that start the hosts of a world, by host."""
        machines: list[host_start.HostMachine] = []
        for number in assignment.work.slices:
            remote = self._remote(number)
            machine: host_start.HostMachine = self._own.machine
            if remote is not None:
                machine = RemoteStart(machine=remote, assignment=assignment)
            machines += [machine] * self._own.hosts_per_slice
        return machines

    def tell(self, **message: Any) -> None:
        """Sends a message to the other machines."""
        for machine in self.others():
            machine.link.send(**message)

    def end(self, *, is_stopped: bool, failure: str | None = None) -> None:
        """Reports the end of the run to the other machines.

        Args:
          is_stopped: whether it was asked to end.
          failure: why it failed; None if it did not.
        """
        assert self._claims is not None
        self.tell(over=True, is_stopped=is_stopped, failure=failure)
        # They end the links when they have received it.
        deadline_secs = time.monotonic() + self._claims.lost_secs
        while self.others() and time.monotonic() < deadline_secs:
            time.sleep(_POLL_SECS)

    def close(self) -> None:
        """Ends the links; machines that have not received the end look for a leader."""
        if self._listener is not None:
            self._listener.close()
        for machine in self.others():
            machine.link.cut()

    def _remote(self, number: int) -> RemoteMachine | None:
        # The other machine that has a slice, and may just have been lost.
        if number in self._own.numbers:
            return None
        return self._machines[number // len(self._own.numbers)]

    def _tell_renewed(self, count: int) -> None:
        assert self._claims is not None
        there = [self._claims.machine, *(each.number for each in self.others())]
        self.tell(renewed=count, machines=there)

    def _serve(self, accepted: connection.Connection) -> None:
        claims, listener = self._claims, self._listener
        assert claims is not None
        assert listener is not None
        with contextlib.suppress(machine_link.LinkLostError):
            link = listener.authenticated(accepted)
            hello = link.receive()
            number = hello["machine"]
            refused = ""
            machine = RemoteMachine(
                number, link, lost_secs=claims.lost_secs, agents=hello["agents"]
            )
            with self._lock:
                there = self._arrived.get(number) or self._machines.get(number)
                if hello["configured"] != self._configured:
                    refused = (
                        f"machine {number} has another configuration than machine"
                        f" {claims.machine}, which leads; start all with the same one"
                    )
                    link.send(over=True, is_stopped=False, failure=refused)
                elif number == claims.machine or (there and not there.is_lost):
                    refused = f"another supervisor of machine {number} is there"
                    link.send(refused=refused)
                else:
                    self._arrived[number] = machine
            if refused:
                link.cut()
                logging.warning("%s", refused)
                return
            link.send(agents=self._own.agents)
            link.begin_beats()
            machine.serve()
