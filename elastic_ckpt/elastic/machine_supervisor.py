"""The supervisor of one of several machines: it leads the run, or follows.

The same program is started on each machine. The supervisors agree on a leader
(`elastic.machines`). It decides, and has the others start hosts. When it is lost, the
next leader continues the run, as a new start of it would; so does one that comes back,
if no other machine is there.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import time
from collections.abc import Callable, Sequence

from elastic_ckpt.core import errors, events, storage
from elastic_ckpt.elastic import (
    faults,
    local_slices,
    main_script,
    processes,
    termination,
)
from elastic_ckpt.elastic.cluster import TrainFunction
from elastic_ckpt.elastic.decision import Policy
from elastic_ckpt.elastic.machines import follower, followers, handover, membership
from elastic_ckpt.elastic.machines.follower import Over

_POLL_SECS = 0.05


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """What a run does on its machines; the same on all of them.

    Attributes:
      functions: of each host.
      lead: trains on a cluster until the run has ended, and emits its events.
      kept: opens the journal of the run, while this machine leads: an `Emit`.
      configured: the digest of all that the machines have in common.
      min_slices: the least number of slices to train on.
      injected: faults, by their steps.
      wait_secs: how long to look for a leader.
      needs_majority: whether the run needs more than half of all machines.
    """

    functions: follower.Functions
    lead: Callable[[processes.ProcessCluster, events.Emit], None]
    kept: Callable[[], contextlib.AbstractContextManager[events.Emit]]
    configured: str
    min_slices: int
    injected: Sequence[faults.Fault] = ()
    wait_secs: float
    needs_majority: bool


class MachineSupervisor:
    """The supervisor of this machine, which leads or follows.

    Args:
      run: the run.
      slices: of this machine; closed by the caller.
      members: all machines; closed by the caller.
      show: called when this machine follows another one.
    """

    def __init__(
        self,
        run: Run,
        slices: local_slices.LocalSlices,
        members: membership.Membership,
        show: events.Emit,
    ) -> None:
        self._run = run
        self._slices = slices
        self._members = members
        self._show = show
        # Since when there is no leader that can be reached.
        self._since_secs = time.monotonic()

    def run(self) -> Over:
        """Leads and follows until the run, or this machine's part in it, has ended.

        Raises:
          RunError: with the first failure of the run; or if no leader can be reached.
        """
        while True:
            over = self._lead() if self._members.is_leader else self._follow()
            if over is not None:
                return over

    def _lead(self) -> Over | None:
        # Runs the run, and returns its end; None if this machine leads no more.
        others = followers.Followers(
            self._members,
            self._slices,
            configured=self._run.configured,
            needs_majority=self._run.needs_majority,
        )
        with contextlib.closing(others):
            try:
                with self._run.kept() as emit:
                    try:
                        is_stopped = self._train(others, emit)
                    except handover.HandedOverError:
                        # The others look for the next leader when the links end.
                        return Over(is_stopped=True)
                    except followers.LeadershipLostError:
                        return None
                    except SystemExit:
                        # SIGTERM between two worlds.
                        if not self._go_on(others):
                            raise
                        return Over(is_stopped=True)
            except errors.ReplacedError:
                others.replaced()
                raise
            except (errors.StoppedError, KeyboardInterrupt, SystemExit):
                others.end(is_stopped=True)
                raise
            except Exception as error:
                others.end(is_stopped=False, failure=str(error) or repr(error))
                raise
            others.end(is_stopped=is_stopped)
            return Over(is_stopped=is_stopped)

    def _follow(self) -> Over | None:
        # Follows the leader, and returns the run's end; None if there is no leader.
        self._members.poll()
        listener = json.loads(self._members.values.get(followers.LISTENER, "null"))
        link = None
        if listener is not None and not self._members.is_leader:
            link = follower.connected(
                self._members, self._slices, listener, self._run.configured
            )
        if link is None:
            secs = self._run.wait_secs
            if time.monotonic() - self._since_secs > secs:
                raise errors.RunError(
                    f"machine {self._members.own} has reached no leader of the run for"
                    f" {secs:g} s; check that the machines reach each other at the"
                    " addresses that are given for them, at any port"
                )
            time.sleep(_POLL_SECS)
            return None
        leader = self._members.leader
        assert leader is not None
        self._show("leader_found", machine=self._members.own, leader=leader)
        following = follower.Follower(
            link, self._slices, self._run.functions, self._members
        )
        try:
            with termination.Notice() as notice:
                over = following.run(notice)
            if over is None:
                self._slices.forget(listener["agents"])
            return over
        finally:
            self._since_secs = time.monotonic()

    def _train(self, others: followers.Followers, emit: events.Emit) -> bool:
        # Whether the run was asked to end.
        number, is_stopped = self._members.own, False

        def report(name: str, **fields: storage.Json) -> None:
            nonlocal is_stopped
            if name == "world_claimed":
                self._members.claimed()
            elif name == "waiting_for_slices":
                self._members.short()
            elif name == "run_stopped":
                is_stopped = True
            emit(name, **fields)

        emit("leader_found", machine=number, leader=number)
        others.await_all(self._members.lost_secs)
        cluster = processes.ProcessCluster(
            self._slices, others, injected=self._run.injected, emit=emit
        )
        with contextlib.closing(cluster):
            self._run.lead(cluster, report)
        return is_stopped

    def _go_on(self, others: followers.Followers) -> bool:
        # Whether the others have enough slices without this machine.
        return others.may_go_on() and len(others.slices()) >= self._run.min_slices


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
    shared = dataclasses.asdict(slices.hardware) | {"machines": [*place.addresses]}
    del shared["jax_cache_dir"]
    members = membership.Membership(
        place.number,
        place.addresses,
        log=os.path.join(slices.log_directory, f"membership-{place.number}.log"),
        lost_secs=machine.lost_secs,
    )
    with contextlib.closing(members):
        MachineSupervisor(
            Run(
                functions=follower.Functions(
                    train=train, compile_ahead=compile_ahead or train
                ),
                lead=lead,
                kept=lambda: contextlib.nullcontext(emit),
                configured=hashlib.sha256(storage.canonical_json(shared)).hexdigest(),
                min_slices=policy.min_slices,
                injected=machine.injected,
                wait_secs=policy.wait_secs,
                needs_majority=machine.needs_majority,
            ),
            slices,
            members,
            emit,
        ).run()
