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
from collections.abc import Callable, Sequence

from etils import epath

from elastic_ckpt.core import bucket_clients, errors, events, storage
from elastic_ckpt.elastic import (
    faults,
    local_slices,
    main_script,
    processes,
    termination,
    verdict,
)
from elastic_ckpt.elastic.cluster import TrainFunction
from elastic_ckpt.elastic.decision import Policy
from elastic_ckpt.elastic.machines import (
    follower,
    handover,
    leader_claim,
    machine_link,
    places,
    slice_machines,
)

_POLL_SECS = 0.1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """What a run does on its machines; the same on all of them.

    Attributes:
      train: of each host of a world.
      compile_ahead: of each host of a shadow world.
      lead: trains on a cluster until the run has ended, and emits its events.
      kept: opens the journal of the run, while this machine leads: an `Emit`.
      shared: a directory that all machines share: the leader's claim is there.
      configured: the digest of all that the machines have in common.
      min_slices: the least number of slices to train on.
      injected: faults, by their steps.
      wait_secs: how long to look for a leader.
      lost_secs: after which a machine that gives no sign is lost.
    """

    train: TrainFunction
    compile_ahead: TrainFunction
    lead: Callable[[processes.ProcessCluster, events.Emit], None]
    kept: Callable[[], contextlib.AbstractContextManager[events.Emit]]
    shared: epath.PathLike
    configured: str
    min_slices: int
    injected: Sequence[faults.Fault] = ()
    wait_secs: float
    lost_secs: float


class MachineSupervisor:
    """The supervisor of this machine, which leads or follows.

    Args:
      run: the run.
      place: of this machine.
      slices: of this machine; closed by the caller.
      show: called when this machine follows another one.
    """

    def __init__(
        self,
        run: Run,
        place: places.Place,
        slices: local_slices.LocalSlices,
        show: events.Emit,
    ) -> None:
        self._run = run
        self._number = place.number
        self._slices = slices
        self._show = show
        self._claims = leader_claim.LeaderClaims(
            run.shared, machine=place.number, duration_secs=run.lost_secs
        )
        # The machines to wait for, and the leader that was lost, if this one leads.
        self._expected = frozenset(range(place.num_machines))
        self._lost: leader_claim.Lost | None = None
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
        try:
            self._claims.look()
            leader = self._claims.leader()
            others = None if leader is not None else self._taken()
        except (errors.CheckpointError, *bucket_clients.failures()) as error:
            self._await(
                f"the claims of the run's leaders, {self._claims.directory} ({error});"
                " bring the storage back, and start the machine again"
            )
            return None
        if others is not None:
            return self._lead(others)
        return None if leader is None else self._follow(leader)

    def _taken(self) -> slice_machines.SliceMachines | None:
        # The machines that this one is to lead, if it gets the claim.
        if time.monotonic() < self._rests_until_secs:
            time.sleep(_POLL_SECS)
            return None
        lead = slice_machines.Lead(
            machine=self._number,
            claims=self._claims,
            listener=machine_link.Listener(self._slices.interface, self._run.lost_secs),
            configured=self._run.configured,
            lost_secs=self._run.lost_secs,
        )
        others = slice_machines.SliceMachines(self._slices, lead)
        self._lost = self._claims.lost()
        try:
            is_taken = self._claims.take(
                lead.listener.address, lead.listener.key, renewed_to=others.renewed
            )
        except BaseException:
            others.close()
            raise
        if is_taken:
            return others
        others.close()
        return None

    def _lead(self, others: slice_machines.SliceMachines) -> bool | None:
        # Runs the run, and returns its end; None if this machine leads no more.
        try:
            with self._run.kept() as emit:
                try:
                    is_stopped = self._train(others, emit)
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
            others.close()
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
                lost_secs=self._run.lost_secs,
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
                self._rests_until_secs = time.monotonic() + 2 * self._run.lost_secs
                self._may_rest = False

    def _await(self, what: str) -> None:
        # Waits a moment for what cannot be reached.
        secs = self._run.wait_secs
        if time.monotonic() - self._since_secs > secs:
            raise errors.RunError(
                f"machine {self._number} has not reached, for {secs:g} s, {what}"
            )
        time.sleep(_POLL_SECS)

    def _train(self, others: slice_machines.SliceMachines, emit: events.Emit) -> bool:
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
                until_secs = time.monotonic() + 2 * self._run.lost_secs
                others.leads_until_secs = until_secs
            elif name == "run_stopped":
                is_stopped = True
            emit(name, **fields)

        emit("leader_found", machine=self._number, leader=self._number)
        self._report_lost(emit)
        others.await_machines(self._expected)
        cluster = processes.ProcessCluster(
            self._slices, others, injected=self._run.injected, emit=emit
        )
        with contextlib.closing(cluster):
            self._run.lead(cluster, report)
        return is_stopped

    def _rest(self, others: slice_machines.SliceMachines) -> None:
        if time.monotonic() > others.leads_until_secs:
            others.tell(rest=True)
            self._rests_until_secs = time.monotonic() + 2 * self._run.lost_secs
            self._may_rest = False

    def _report_lost(self, emit: events.Emit) -> None:
        # The leader before, which has not given its claim back.
        if self._lost is None:
            return
        fields: dict[str, storage.Json] = {
            "machine": self._lost.machine,
            "why": self._lost.why,
        }
        emit("leader_lost", **fields)
        judged = verdict.judge(
            verdict.Evidence(
                event="leader_lost",
                fields=fields,
                at_secs=self._lost.since_secs,
                epoch_secs=time.time() - time.monotonic(),
            )
        )
        assert judged is not None
        emit("verdict", world=0, **judged.fields())


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
    place, slices = machine.place, machine.slices
    shared = dataclasses.asdict(slices.hardware) | {"machines": place.num_machines}
    del shared["jax_cache_dir"]
    MachineSupervisor(
        Run(
            train=train,
            compile_ahead=compile_ahead or train,
            lead=lead,
            kept=lambda: contextlib.nullcontext(emit),
            shared=machine.shared,
            configured=hashlib.sha256(storage.canonical_json(shared)).hexdigest(),
            min_slices=policy.min_slices,
            injected=machine.injected,
            wait_secs=policy.wait_secs,
            lost_secs=machine.lost_secs,
        ),
        place,
        slices,
        emit,
    ).run()
