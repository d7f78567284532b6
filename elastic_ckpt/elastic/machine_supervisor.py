"""The supervisor of one of several machines: it leads the run, or follows.

The same program is started on each machine. The supervisor that holds the claim in
storage leads (`machines.leader_claim`): it decides, and has the others start hosts.
When it is lost, another takes the claim, and continues the run as a new start of it
would.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import math
import time
from collections.abc import Callable

from elastic_ckpt.core import bucket_clients, errors, events, storage
from elastic_ckpt.elastic import (
    main_script,
    processes,
    termination,
)
from elastic_ckpt.elastic.cluster import TrainFunction
from elastic_ckpt.elastic.decision import Policy
from elastic_ckpt.elastic.machines import (
    follower,
    handover,
    leader_claim,
    machine_link,
    slice_machines,
)

_POLL_SECS = 0.3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """What a run does on its machines.

    Attributes:
      machine: this one; all else is the same on all machines.
      train: of each host of a world.
      compile_ahead: of each host of a shadow world.
      lead: trains on a cluster until the run has ended, and emits its events.
      kept: opens the journal of the run, while this machine leads: an `Emit`.
      configured: the digest of all that the machines have in common.
      min_slices: the least number of slices to train on.
      wait_secs: how long to look for a leader.
    """

    machine: processes.OfMachine
    train: TrainFunction
    compile_ahead: TrainFunction
    lead: Callable[[processes.ProcessCluster, events.Emit], None]
    kept: Callable[[], contextlib.AbstractContextManager[events.Emit]]
    configured: str
    min_slices: int
    wait_secs: float


class MachineSupervisor:
    """The supervisor of this machine, which leads or follows.

    Args:
      run: the run.
      show: called when this machine follows another one.
    """

    def __init__(self, run: Run, show: events.Emit) -> None:
        self._run = run
        self._number = run.machine.place.number
        self._slices = run.machine.slices
        self._lost_secs = run.machine.lost_secs
        self._show = show
        self._claims = leader_claim.LeaderClaims(
            run.machine.shared, machine=self._number, lost_secs=self._lost_secs
        )
        # The machines to wait for, if this one leads.
        self._expected = frozenset(range(run.machine.place.num_machines))
        # The term of the leader that was followed last.
        self._followed = 0
        # Since when there is no leader that can be reached.
        self._since_secs = time.monotonic()
        # Until when this machine leaves the claim to those that it does not reach, and
        # whether it may do so again before it has a world.
        self._rests_until_secs = 0.0
        self._may_rest = True

    def run(self) -> bool:
        """Leads and follows until the run, or this machine's part in it, has ended.

        Returns:
          Whether the run, or this machine, was asked to end.

        Raises:
          RunError: with the first failure of the run; or if no leader can be reached.
        """
        while True:
            is_stopped = self._lead_or_follow()
            if is_stopped is not None:
                return is_stopped

    def _lead_or_follow(self) -> bool | None:
        # None when this machine has led, or followed, and the run goes on.
        others = slice_machines.SliceMachines(
            self._slices, self._claims, configured=self._run.configured
        )
        with contextlib.closing(others):
            try:
                self._claims.look()
                leader, is_free = self._claims.leader(), self._claims.is_free
                rests = is_free and time.monotonic() < self._rests_until_secs
                is_taken = is_free and not rests and others.take_lead()
            except (errors.CheckpointError, *bucket_clients.failures()) as error:
                self._await(
                    f"the claims of the run's leaders, {self._claims.directory}"
                    f" ({error}); bring the storage back, and start the machine again"
                )
                return None
            if is_taken:
                return self._lead(others, leader)
            if rests:
                time.sleep(_POLL_SECS)
            return None if leader is None or is_free else self._follow(leader)

    def _lead(
        self, others: slice_machines.SliceMachines, before: leader_claim.Leader | None
    ) -> bool | None:
        # Runs the run, and returns its end; None if this machine leads no more.
        # The leader before was lost, unless it is None.
        try:
            with self._run.kept() as emit:
                try:
                    is_stopped = self._train(others, before, emit)
                except handover.HandedOverError:
                    return True
                except slice_machines.LeadershipLostError:
                    self._rest(others)
                    return None
                except SystemExit:
                    # SIGTERM between two worlds.
                    left = others.slices() - {*self._slices.numbers}
                    if len(left) < self._run.min_slices:
                        raise
                    return True
                except errors.ReplacedError:
                    # By the next leader, unless it is another start.
                    if self._claims.check():
                        raise
                    return None
        except (errors.StoppedError, KeyboardInterrupt, SystemExit):
            others.end(is_stopped=True)
            raise
        except Exception as error:
            others.end(is_stopped=False, failure=str(error) or repr(error))
            raise
        else:
            others.end(is_stopped=is_stopped)
            return is_stopped
        finally:
            # The others take the claim when their links end.
            self._claims.give_back()
            self._since_secs = time.monotonic()

    def _follow(self, leader: leader_claim.Leader) -> bool | None:
        # Follows the leader, and returns the run's end; None if there is no leader.
        try:
            following = follower.Follower(
                leader,
                self._claims,
                self._number,
                self._slices,
                train=self._run.train,
                compile_ahead=self._run.compile_ahead,
                configured=self._run.configured,
                lost_secs=self._lost_secs,
            )
        except machine_link.LinkLostError as error:
            is_refused = isinstance(error.__cause__, ConnectionRefusedError)
            if is_refused and self._followed == leader.term:
                # It listened there as long as it lived.
                self._claims.note_end(
                    leader.term, f"nothing listens at {leader.address} any more"
                )
                return None
            self._await(
                f"machine {leader.machine}, which leads the run, at {leader.address}"
                f" ({error}). Its claim is {leader.claim}, and is renewed: let the"
                " machines reach each other at all ports, or end that supervisor, and"
                " another machine leads"
            )
            return None
        self._followed = leader.term
        self._show("leader_found", machine=self._number, leader=leader.machine)
        try:
            with termination.Notice() as notice:
                return following.run(notice)
        finally:
            self._since_secs = time.monotonic()
            self._expected = frozenset(following.machines) - {leader.machine}
            if following.is_to_rest:
                self._rests_until_secs = time.monotonic() + 2 * self._lost_secs
                self._may_rest = False

    def _await(self, what: str) -> None:
        # Waits a moment for what cannot be reached.
        secs = self._run.wait_secs
        if time.monotonic() - self._since_secs > secs:
            raise errors.RunError(
                f"machine {self._number} has not reached, for {secs:g} s, {what}"
            )
        time.sleep(_POLL_SECS)

    def _train(
        self,
        others: slice_machines.SliceMachines,
        before: leader_claim.Leader | None,
        emit: events.Emit,
    ) -> bool:
        # Whether the run was asked to end.
        is_stopped = False

        def report(name: str, **fields: storage.Json) -> None:
            nonlocal is_stopped
            if name == "world_claimed":
                self._may_rest = True
            elif name == "world_started":
                others.leads_until_secs = math.inf
            elif name == "waiting_for_slices" and self._may_rest:
                # Machines that it does not reach may be enough without it.
                until_secs = time.monotonic() + 2 * self._lost_secs
                others.leads_until_secs = until_secs
            elif name == "run_stopped":
                is_stopped = True
            emit(name, **fields)

        emit("leader_found", machine=self._number, leader=self._number)
        if before is not None:
            emit("leader_lost", machine=before.machine, why=before.lost)
        others.await_machines(self._expected)
        cluster = processes.ProcessCluster(
            self._slices, others, injected=self._run.machine.injected, emit=emit
        )
        with contextlib.closing(cluster):
            self._run.lead(cluster, report)
        return is_stopped

    def _rest(self, others: slice_machines.SliceMachines) -> None:
        if time.monotonic() > others.leads_until_secs:
            others.tell(rest=True)
            self._rests_until_secs = time.monotonic() + 2 * self._lost_secs
            self._may_rest = False


def run(
    machine: processes.OfMachine,
    train: TrainFunction,
    lead: Callable[[processes.ProcessCluster, events.Emit], None],
    *,
    policy: Policy,
    compile_ahead: TrainFunction | None,
    emit: events.Emit,
) -> None:
    """Supervises the hosts of this machine until a run without a journal has ended.

    Args:
      machine: this one.
      train: of each host.
      lead: see `Run`.
      policy: of the run at its start.
      compile_ahead: of each host of a shadow world; None if there is none.
      emit: called for each event of the run, and if this machine follows another one.

    Raises:
      ConfigError: if `train` cannot be sent to hosts.
      RunError: with the first failure of the run; or if no leader can be reached.
    """
    main_script.check_sent(train)
    shared = dataclasses.asdict(machine.slices.hardware)
    shared |= {"machines": machine.place.num_machines}
    del shared["jax_cache_dir"]
    MachineSupervisor(
        Run(
            machine=machine,
            train=train,
            compile_ahead=compile_ahead or train,
            lead=lead,
            kept=lambda: contextlib.nullcontext(emit),
            configured=hashlib.sha256(storage.canonical_json(shared)).hexdigest(),
            min_slices=policy.min_slices,
            wait_secs=policy.wait_secs,
        ),
        emit,
    ).run()
