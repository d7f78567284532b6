"""The supervisor of one machine of a run on multiple machines: it leads or follows.

The same command runs on each machine. The supervisor that holds the claim in storage
leads (`leader_claim`): it decides, and it sends orders to the stations of all machines,
which carry them out (`station`). If the leader is lost, the others kill their hosts,
and one of them takes the claim and continues the run as a restart would.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from etils import epath

from elastic_ckpt.core import bucket_clients, errors, events, storage
from elastic_ckpt.elastic import faults, leader_claim, termination, watch
from elastic_ckpt.elastic import link as links
from elastic_ckpt.elastic.decision import Policy
from elastic_ckpt.elastic.process_cluster import (
    HandedOverError,
    LeadershipLostError,
    Machines,
    ProcessCluster,
)
from elastic_ckpt.elastic.station import Station

_LOOK_SECS = 0.1
# The longest pause between checks of the claim; pauses are random, so that machines do
# not check at the same time.
_POLL_SECS = 0.3
# Trains on a cluster until the run has ended, and emits its events.
Lead = Callable[[ProcessCluster, events.Emit], None]


class _UnreachableError(Exception):
    """A leader or the leaders' claims cannot be reached; the message says why."""


class MachineSupervisor:
    """Leads the run or follows its leader, until the run has ended.

    Args:
      own: this machine's station; the caller closes it.
      lead: the function that trains while this machine leads; see `Lead`.
      shared: a directory that all machines share.
      injected: faults to inject, in step order.
      limits: the time limits of the hosts.
      lost_secs: the time after which a silent machine is lost.
      kept: a function that opens the run's journal while this machine leads.
      begin: a function called on the machine where the run begins, not where it
        continues.
      configured: a digest of the configuration, which must be the same on all machines.
      policy: the run's initial policy.
      show: a function called with an event when this machine follows a leader.
    """

    def __init__(
        self,
        own: Station,
        lead: Lead,
        *,
        shared: epath.PathLike,
        injected: Sequence[faults.Fault],
        limits: watch.Limits,
        lost_secs: float,
        kept: Callable[[], contextlib.AbstractContextManager[events.Emit]],
        configured: str,
        policy: Policy,
        show: events.Emit,
        begin: Callable[[], None] = lambda: None,
    ) -> None:
        self._own, self._lost_secs = own, lost_secs
        self._injected, self._limits = injected, limits
        self._lead_run, self._kept, self._show = lead, kept, show
        self._configured, self._policy, self._begin = configured, policy, begin
        self._claims = leader_claim.LeaderClaims(
            shared, machine=own.number, lost_secs=lost_secs
        )
        # The machines to wait for if this one leads, and the term of the last leader
        # that it followed; -1 if it has led since.
        self._expected, self._followed = {*range(own.num_machines)}, 0
        # The time since which no leader could be reached.
        self._since_secs = time.monotonic()
        # When this leader gives the claim back because slices are missing: another
        # machine may reach more. A leader does so only once before it has run a world.
        self._gives_way_secs, self._may_give_way = math.inf, True

    def run(self) -> bool:
        """Runs this machine; returns whether the run or this machine was asked to stop.

        Raises:
          RunError: if the run failed, with its first failure, or if no leader can be
            reached.
        """
        while True:
            why = (
                "a leader; run the command on every machine, and let all machines reach"
                " each other and the run directory"
            )
            try:
                ended = self._lead_or_follow()
                if ended is not None:
                    return ended
            except _UnreachableError as error:
                why = str(error)
            if time.monotonic() - self._since_secs > self._policy.wait_secs:
                raise errors.RunError(
                    f"for {self._policy.wait_secs:g} s, machine {self._own.number}"
                    f" could not reach {why}"
                )
            time.sleep(random.uniform(0, _POLL_SECS))

    def _lead_or_follow(self) -> bool | None:
        # Returns whether the run or this machine was asked to stop; None to try again.
        with self._claiming():
            leader = self._claims.look()
        if leader is None or leader.lost:
            return self._lead(leader)
        try:
            return self._follow(leader)
        except links.LinkLostError as error:
            is_refused = isinstance(error.__cause__, ConnectionRefusedError)
            if not (is_refused and self._followed == leader.term):
                raise _UnreachableError(
                    f"machine {leader.machine}, which leads the run, at"
                    f" {leader.address} ({error}). The leader still renews its claim,"
                    f" {leader.claim}; let the machines reach each other on all ports,"
                    " or stop the leader's supervisor so that another machine can lead"
                ) from error
        # This machine has followed that leader, which listened there while it lived.
        lost = f"nothing listens at {leader.address} anymore"
        return self._lead(dataclasses.replace(leader, lost=lost))

    @contextlib.contextmanager
    def _claiming(self) -> Iterator[None]:
        # Only for errors of the claims: any other error is a failure of the run.
        try:
            yield
        except (errors.CheckpointError, *bucket_clients.failures()) as error:
            raise _UnreachableError(
                f"the run's leader claims in {self._claims.directory} ({error});"
                " restore access to the storage, then run the same command on this"
                " machine again"
            ) from error

    def _lead(self, before: leader_claim.Leader | None) -> bool | None:
        # Returns as `_lead_or_follow` does. `before` is the lost leader, if any.
        listener = links.Listener(self._own.interface, self._lost_secs)
        machines = Machines(
            self._own,
            listener=listener,
            has_lead=lambda: (
                self._claims.has_lead and time.monotonic() < self._gives_way_secs
            ),
            configured=self._configured,
        )

        def tell(count: int) -> None:
            machines.tell(renewed=count, machines=sorted(machines.connected))

        with contextlib.closing(machines):
            with self._claiming():
                if not self._claims.take(
                    listener.address, listener.key, renewed_to=tell
                ):
                    return None
            try:
                is_stopped = self._train(machines, before)
                machines.end(self._lost_secs, is_stopped=is_stopped)
                return is_stopped
            except HandedOverError:
                return True
            except LeadershipLostError:
                if self._claims.has_lead:
                    # Steps down and leaves the claim to others for a while.
                    machines.close()
                    self._claims.release()
                    time.sleep(self._lost_secs)
                return None
            except BaseException as error:
                left = machines.slices(machines.connected - {self._own.number})
                is_exit = isinstance(error, SystemExit)
                if is_exit and len(left) >= self._policy.min_slices:
                    # SIGTERM arrived between worlds; the other machines continue.
                    return True
                if isinstance(error, errors.ReplacedError) and not self._claims.check():
                    # The next leader replaced this one; the run was not launched again.
                    return None
                is_stopped = isinstance(
                    error, (errors.StoppedError, SystemExit, KeyboardInterrupt)
                )
                failure = "" if is_stopped else str(error) or repr(error)
                machines.end(self._lost_secs, is_stopped=is_stopped, failure=failure)
                raise
            finally:
                # The others look for a claim when their links close.
                self._claims.release()
                self._since_secs = time.monotonic()

    def _train(self, machines: Machines, before: leader_claim.Leader | None) -> bool:
        number, is_stopped = self._own.number, False
        self._gives_way_secs = math.inf

        def report(name: str, **fields: storage.Json) -> None:
            nonlocal is_stopped
            is_stopped |= name == "run_stopped"
            # If all machines are connected, no other leader would reach more.
            are_all = len(machines.connected) == self._own.num_machines
            if name == "world_started":
                self._gives_way_secs, self._may_give_way = math.inf, True
            elif name == "waiting_for_slices" and self._may_give_way and not are_all:
                self._gives_way_secs = time.monotonic() + 2 * self._lost_secs
                self._may_give_way = False
            emit(name, **fields)

        with self._kept() as emit:
            emit("leader_found", machine=number, leader=number)
            is_first = before is None and not self._followed
            if before is not None:
                emit("leader_lost", machine=before.machine, why=before.lost)
            if is_first:
                self._begin()
            self._followed = -1
            # Waits for the machines that the last leader had.
            machines.wait_until(lambda there: there >= self._expected, self._lost_secs)
            with ProcessCluster(
                machines,
                limits=self._limits,
                injected=self._injected,
                emit=emit,
            ) as cluster:
                self._lead_run(cluster, report)
        return is_stopped

    def _follow(self, leader: leader_claim.Leader) -> bool | None:
        # Carries out the leader's orders and reports the results.
        own, until_secs = self._own, math.inf
        # The leader's agents; None until it has admitted this machine.
        agents: list[str] | None = None
        link = links.connect(
            *(leader.address, leader.key, self._lost_secs),
            **{"machine": own.number, "configured": self._configured, **own.hello},
        )
        with contextlib.closing(link), termination.Notice() as notice:
            try:
                # A machine that was asked to stop waits for its hosts.
                while until_secs == math.inf or (
                    own.hosts and time.monotonic() < until_secs
                ):
                    for message in own.wait(_LOOK_SECS, link.channel, notice):
                        link.send(**message)
                    if notice.is_coming() and notice.received():
                        # The leader asks all hosts to save and leave.
                        link.send(leaving=True)
                        until_secs = time.monotonic() + self._limits.grace_secs
                    own.stand_by()
                    for message in link.receive():
                        self._hear(leader, message)
                        if "over" in message:
                            return bool(message["is_stopped"])
                        agents = message.get("agents", agents)
                        for answer in own.do(message):
                            link.send(**answer)
                return True
            except links.LinkLostError:
                if agents is None:
                    raise
                own.do({"forget": agents})
                self._since_secs = time.monotonic()
                own.end_hosts()
                # SIGTERM may have arrived in the meantime.
                is_sent = notice.is_coming() and notice.received()
                return True if is_sent or until_secs < math.inf else None
            finally:
                own.end_hosts()

    def _hear(self, leader: leader_claim.Leader, message: Mapping[str, Any]) -> None:
        # Handles a leader's messages that are not orders.
        if "refused" in message:
            raise links.LinkLostError(message["refused"])
        if message.get("failure"):
            raise errors.RunError(f"the run has failed: {message['failure']}")
        if "renewed" in message:
            self._claims.note(leader.term, message["renewed"])
        if "machines" in message:
            self._expected = {*message["machines"]} - {leader.machine}
        if "agents" in message and self._followed != leader.term:
            self._followed = leader.term
            self._show("leader_found", machine=self._own.number, leader=leader.machine)
