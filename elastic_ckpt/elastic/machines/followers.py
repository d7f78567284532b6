"""The other machines of a run, as its leader sees them.

The leader publishes its listener through the membership. The supervisors of the other
machines (`follower`) connect, and start, watch and end hosts when it asks them to. A
machine is lost when its link is, or when it has given the membership no sign for too
long.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Collection
from multiprocessing import connection

from absl import logging

from elastic_ckpt.core import errors
from elastic_ckpt.elastic import local_slices
from elastic_ckpt.elastic.machines import machine_link, membership
from elastic_ckpt.elastic.machines.remote_machine import RemoteMachine

# The value of the membership with the leader's listener.
LISTENER = "listener"
_POLL_SECS = 0.05


class LeadershipLostError(errors.StoppedError):
    """This machine does not lead the run any more."""


class Followers:
    """The machines that follow this one.

    Args:
      members: the membership, in which this machine leads.
      own: the slices of this machine; each has as many.
      configured: the digest of the run's configuration, the same on all machines.
      needs_majority: whether the run continues only with more than half of all.
    """

    def __init__(
        self,
        members: membership.Membership,
        own: local_slices.LocalSlices,
        *,
        configured: str,
        needs_majority: bool,
    ) -> None:
        self._members = members
        self._term = members.term
        self._own = own
        self._slices_per_machine = len(own.numbers)
        self._configured = configured
        self._needs_majority = needs_majority
        self._listener = machine_link.Listener(own.interface)
        self._is_complete = False
        self._lock = threading.Lock()
        # New ones, by the time of their links, and those that were there.
        self._arrived: list[tuple[RemoteMachine, float]] = []
        self._machines: dict[int, tuple[RemoteMachine, float]] = {}
        listener = {
            "address": self._listener.address,
            "key": self._listener.key,
            "agents": own.agents,
        }
        members.publish({LISTENER: json.dumps(listener)})

    def await_all(self, within_secs: float) -> None:
        """Waits for the machines that were alive before, and at first for all."""
        deadline_secs = time.monotonic() + within_secs
        expected = self._members.expected - {self._members.own}
        while not {machine.number for machine in self.all()} >= expected:
            self.poll()
            if time.monotonic() > deadline_secs:
                break
            time.sleep(_POLL_SECS)
        self._is_complete = True

    def poll(self) -> None:
        """Takes in machines that come and go; called often.

        Raises:
          LeadershipLostError: if this machine leads no more.
          RunError: if a majority is needed, and too few machines are alive.
        """
        self._members.poll()
        if not self._members.is_leader or self._members.term != self._term:
            raise LeadershipLostError("the machine does not lead the run any more")
        while (accepted := self._listener.accept()) is not None:
            threading.Thread(
                target=self._serve, args=(accepted,), name="machine", daemon=True
            ).start()
        with self._lock:
            arrived, self._arrived = self._arrived, []
        for machine, at_secs in arrived:
            if machine.number in self._machines:
                self._machines[machine.number][0].cut()
            self._machines[machine.number] = (machine, at_secs)
        self._drop_lost()
        self._check_majority()

    def of_slice(self, number: int) -> RemoteMachine | None:
        """The machine of a slice, which may just have been lost; None if it is this."""
        machine = number // self._slices_per_machine
        return None if machine == self._members.own else self._machines[machine][0]

    def slices(self) -> frozenset[int]:
        """The slices of the machines that are there, without this one."""
        return frozenset(
            machine * self._slices_per_machine + each
            for machine, (remote, _) in self._machines.items()
            if not remote.is_lost and not remote.is_leaving
            for each in range(self._slices_per_machine)
        )

    def all(self) -> Collection[RemoteMachine]:
        """The machines that are there, without this one."""
        return [each for each, _ in self._machines.values() if not each.is_lost]

    def may_go_on(self) -> bool:
        """Whether the other machines may continue the run without this one."""
        staying = [each.number for each in self.all() if not each.is_leaving]
        most = self._members.num_machines
        return not self._needs_majority or membership.has_majority(staying, most)

    def end(self, *, is_stopped: bool, failure: str | None = None) -> None:
        """Reports the end of the run to the other machines.

        Args:
          is_stopped: whether it was asked to end.
          failure: why it failed; None if it did not.
        """
        for machine in self.all():
            machine.end(is_stopped=is_stopped, failure=failure)
        self._await_ends()

    def replaced(self) -> None:
        """Has the other machines follow the leader that has replaced this one."""
        for machine in self.all():
            machine.replaced()
        self._await_ends()

    def _await_ends(self) -> None:
        # They end the links when they have received it.
        deadline_secs = time.monotonic() + self._members.lost_secs
        while self.all() and time.monotonic() < deadline_secs:
            time.sleep(_POLL_SECS)

    def close(self) -> None:
        """Ends the links; machines that have not received the end look for a leader."""
        self._listener.close()
        for machine in self.all():
            machine.cut()

    def _serve(self, accepted: connection.Connection) -> None:
        with contextlib.suppress(machine_link.LinkLostError):
            link = self._listener.authenticated(accepted)
            hello = link.receive()
            if hello["configured"] != self._configured:
                why = (
                    f"machine {hello['machine']} has another configuration than machine"
                    f" {self._members.own}, which leads; start all with the same one"
                )
                link.send(over=True, is_stopped=False, failure=why)
                link.cut()
                logging.warning("%s", why)
                return
            machine = RemoteMachine(
                hello["machine"],
                link,
                lost_secs=self._members.lost_secs,
                agents=hello["agents"],
            )
            with self._lock:
                self._arrived.append((machine, time.monotonic()))
            machine.serve()

    def _check_majority(self) -> None:
        alive = {self._members.own, *(machine.number for machine in self.all())}
        most = self._members.num_machines
        if not self._is_complete or not self._needs_majority:
            return
        if not membership.has_majority(alive, most):
            raise errors.RunError(
                f"only machines {sorted(alive)} of {most} are left, which is not a"
                " majority. Others may have continued the run, so this one stops;"
                " bring machines back and start it again, or, if all machines write to"
                " one storage, set needs_majority=False"
                " (elastic_machine_majority=false in a configuration)"
            )

    def _drop_lost(self) -> None:
        alive, now_secs = self._members.machines(), time.monotonic()
        for number, (machine, at_secs) in list(self._machines.items()):
            is_new = now_secs - at_secs < self._members.lost_secs
            if number not in alive and not is_new:
                machine.cut()
        lost = [each for each, _ in self._machines.values() if each.is_lost]
        if gone := [agent for machine in lost for agent in machine.agents]:
            self._own.forget(gone)
            for machine in self.all():
                machine.forget(gone)
            for machine in lost:
                machine.agents.clear()
