"""A cluster in virtual time, for which `elastic.run` decides as for a real cluster.

The clock advances from event to event: a slice is lost or rejoins, a phase of a world
ends, a step is saved. The cluster emits the events that a real world's hosts would
emit, and `monitoring.goodput` accounts for the time as in a real run.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import itertools
import math
import signal
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from elastic_ckpt.core import errors, storage
from elastic_ckpt.core import events as run_events
from elastic_ckpt.elastic import cluster, decision, runtime
from elastic_ckpt.elastic.failures import WorldLostError, silent_death
from elastic_ckpt.monitoring import goodput
from elastic_ckpt.simulation.failures import Failure
from elastic_ckpt.simulation.plan import RunPlan
from elastic_ckpt.steps import owners
from elastic_ckpt.steps.manifest import Host

# Times are floating-point sums, which have certainly passed this much later.
_MOMENT_SECS = 1e-6


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """The outcome of a simulated run.

    Attributes:
      goodput_percent: the percentage of the run's time that was spent on new steps.
      secs: the seconds by cause, as in `monitoring.goodput`.
      steps_lost: the number of steps retrained.
      losses: the number of worlds lost.
      restarts: the number of times that the run ended with an error and was restarted.
      restores: the number of restores by tier, `ram` or `storage`; `none` counts
        restarts from step 0.
    """

    goodput_percent: float
    secs: Mapping[str, float]
    steps: int
    rows: int
    steps_lost: int
    losses: int
    restarts: int
    restores: Mapping[str, int]


class _TimeIsUpError(Exception):
    """The plan's time is up, or nothing can change anymore."""


class _SliceLostError(Exception):
    """The world lost a slice or a slice's process."""


def simulate(plan: RunPlan, trace: Sequence[Failure]) -> Outcome:
    """Simulates a run on a cluster with the events of a trace, ordered by time.

    A run that ends with an error is restarted.
    """
    simulated = SimulatedCluster(plan, trace)
    counts, account = simulated.counts, goodput.Account(time=0.0)

    def emit(name: str, **fields: storage.Json) -> None:
        nonlocal account
        account = goodput.after(account, name, fields, time=simulated.now)

    with contextlib.suppress(_TimeIsUpError):
        while True:
            try:
                runtime.lead(
                    lambda _: None,
                    cluster=simulated,
                    present_policy=lambda: plan.policy,
                    work=plan.work,
                    emit=emit,
                    clock=lambda: simulated.now,
                )
                break
            except errors.RunError:
                counts["restarts"] += 1
                simulated.restart()
    # Accounts for the time since the last event.
    emit("world_started")
    return Outcome(
        goodput_percent=account.percent,
        secs=account.secs,
        steps=account.newest_step,
        rows=counts["rows"],
        steps_lost=counts["steps_lost"],
        losses=counts["losses"],
        restarts=counts["restarts"],
        restores={tier: counts[tier] for tier in ("ram", "storage", "none")},
    )


@functools.lru_cache
def holders(
    slices: int, hosts_per_slice: int, policy: owners.Policy
) -> frozenset[frozenset[int]]:
    """The sets of slices (positions in the world) that store the same part of a step.

    All slices store the state. Each host also has a part of the data state, which only
    the host's copies protect.
    """
    hosts = [
        Host(id=f"{n:06d}", number=n, domains={"slice": f"{n // hosts_per_slice:06d}"})
        for n in range(slices * hosts_per_slice)
    ]
    planned = owners.Owners(hosts, policy).plan_copies(
        [(host.number,) for host in hosts], np.ones(len(hosts), np.int64)
    )
    held = [{host.number // hosts_per_slice} for host in hosts]
    for item, target in zip(
        planned.item.tolist(), planned.target.tolist(), strict=True
    ):
        held[item].add(target // hosts_per_slice)
    return frozenset(map(frozenset, held))


@dataclasses.dataclass(eq=False)
class Save:
    """A save of a step.

    Attributes:
      step: the step number; 0 for the beginning of a run.
      holders: the sets of slices that store the same part in RAM.
      done_at: the time at which the save is complete in each tier, perhaps in the
        future.
    """

    step: int = 0
    holders: frozenset[frozenset[int]] = frozenset()
    done_at: dict[str, float] = dataclasses.field(default_factory=dict)


class Saves:
    """The newest save in each tier and the saves in progress.

    If there is a RAM tier, a save goes to RAM and waits for the previous save. It is
    then uploaded from RAM if a backup is due and none is in progress.
    """

    def __init__(self, plan: RunPlan) -> None:
        self._plan = plan
        self._first = "ram" if plan.in_ram else "storage"
        # Ordered by time. The first entry is the run's beginning, which needs no save.
        self._saves = [Save(done_at={"none": 0.0, "storage": 0.0})]

    def begin(self, save: Save, *, now: float) -> float:
        """Begins a save; returns the seconds for which it blocks the loop."""
        plan, costs, mib = self._plan, self._plan.costs, self._plan.host_mib
        secs = {
            "ram": mib / costs.ram_mib_per_sec,
            "storage": mib / plan.work.num_slices / costs.storage_mib_per_sec,
        }
        wait = max(0.0, self._saves[-1].done_at.get(self._first, now) - now)
        block = wait + costs.block_secs + mib / costs.capture_mib_per_sec
        done = now + block + secs[self._first]
        last = [each for each in self._saves if "storage" in each.done_at][-1]
        is_due = save.step // plan.backup_steps > last.step // plan.backup_steps
        if is_due and last.done_at["storage"] <= done:
            save.done_at["storage"] = done + secs["storage"]
        save.done_at[self._first] = done
        under_way = (e for e in self._saves if max(e.done_at.values()) > now)
        kept = dict.fromkeys((*self._complete(now).values(), *under_way))
        self._saves = [*kept, save]
        return block

    def finish(self, save: Save, *, now: float) -> None:
        """Completes the last save of a world whose hosts leave."""
        self.end_world(now=now)
        save.done_at[self._first] = now
        self._saves.append(save)

    def lose(self, number: int, *, now: float) -> None:
        """Records that a slice lost its memory and with it any upload in progress."""
        for save in self._saves:
            save.holders = frozenset(each - {number} for each in save.holders)
            is_lost = self._plan.in_ram and not all(save.holders)
            if is_lost and save.done_at.get("storage", now) > now:
                del save.done_at["storage"]

    def end_world(self, *, now: float) -> None:
        """Drops a save that the world has not completed; uploads from RAM continue."""
        self._saves = [e for e in self._saves if e.done_at.get(self._first, now) <= now]

    def newest(self, *, now: float) -> tuple[str, Save]:
        """The newest save that can be restored, and its tier."""
        complete = self._complete(now)
        if not all(complete.get("ram", Save()).holders):
            del complete["ram"]
        return max(complete.items(), key=lambda each: (each[1].step, each[0] == "ram"))

    def _complete(self, now: float) -> dict[str, Save]:
        # The newest complete save in each tier.
        return {
            tier: save
            for save in self._saves
            for tier, done in save.done_at.items()
            if done <= now
        }


class SimulatedCluster(cluster.Cluster):
    """The slices of a plan, as `elastic.run` sees them.

    Args:
      trace: the failures and returns, ordered by time; all slices are alive at time 0.

    Attributes:
      now: the virtual time, in seconds.
      counts: counts of rows, steps lost, losses, and restores by tier.
    """

    def __init__(self, plan: RunPlan, trace: Sequence[Failure]) -> None:
        self._plan = plan
        self._events = collections.deque(trace)
        self.now = 0.0
        self.counts: collections.Counter[str] = collections.Counter()
        # Since when each live slice has been alive.
        self._since = dict.fromkeys(range(plan.slices), -math.inf)
        self._failures: list[decision.Failure] = []
        # The slices of the current world, and the slices lost since it began.
        self._world: frozenset[int] = frozenset()
        self._lost: set[int] = set()
        self._step = self._newest_step = 0
        self._saves = Saves(plan)
        # The numbers of slices for which the step is compiled.
        self._compiled: set[int] = set()

    @property
    def devices_per_slice(self) -> int:
        """See `Work`."""
        return self._plan.work.devices_per_slice

    def slices(self, current: frozenset[int]) -> decision.Slices:
        """The slices that are alive at this time."""
        return decision.Slices(
            current=(current - self._lost) & self._since.keys(),
            alive_secs={n: self.now - since for n, since in self._since.items()},
            failures=tuple(self._failures),
        )

    def wait(self, secs: float) -> None:
        """Advances the time, but no further than the next possible slice change."""
        moment = self._next_moment()
        if moment == math.inf:
            raise _TimeIsUpError
        self._advance(min(secs, moment - self.now) + _MOMENT_SECS)

    def restart(self) -> None:
        """Prepares a restart of the run, which forgets past failures.

        Waits for the slices to change if there are too few.
        """
        self._failures.clear()
        decided = decision.decide(
            self.slices(frozenset()), self._plan.policy, self._plan.work
        )
        if not isinstance(decided, decision.Train):
            self.wait(math.inf)

    def run_world(
        self,
        train: cluster.TrainFunction,
        assignment: cluster.Assignment,
        *,
        emit: run_events.Emit,
        has_changed: Callable[[], decision.Decision | None],
    ) -> bool:
        """Trains in virtual time until the steps are completed or the slices change."""
        del train
        plan, work = self._plan, assignment.work
        self._world = frozenset(work.slices)
        self._lost.clear()
        try:
            self._start(emit)
            return self._train(work, emit, has_changed)
        except _SliceLostError as lost:
            (number,), at_secs = lost.args, self.now
            self._failures.append(decision.Failure(slice=number, at_secs=at_secs))
            self.counts["losses"] += 1
            self._saves.end_world(now=at_secs)
            # More slices may be lost before the world has ended.
            self._world = frozenset()
            self._advance(plan.costs.end_secs)
            killed = silent_death(
                work.slices.index(number) * plan.hosts_per_slice, -signal.SIGKILL
            )
            raise WorldLostError(
                [dataclasses.replace(killed, at_secs=at_secs)],
                num_hosts=len(work.slices) * plan.hosts_per_slice,
                gone=self._lost.intersection(work.slices),
            ) from None
        finally:
            self._world = frozenset()

    def _start(self, emit: run_events.Emit) -> None:
        costs = self._plan.costs
        self._advance(costs.start_secs)
        emit("world_joined", world=0)
        self._advance(costs.prepare_secs)
        tier, save = self._saves.newest(now=self.now)
        emit("run_started", start_step=save.step, slices=len(self._world))
        if tier != "none":
            read_secs = self._plan.host_mib / getattr(costs, f"{tier}_mib_per_sec")
            self._advance(costs.restore_secs + read_secs)
        # Also at step 0: now the first batch is read and the step is compiled.
        emit("restored_from", step=save.step, bad_copies=0)
        self.counts[tier] += bool(self._step)
        self.counts["steps_lost"] += self._step - save.step
        self._step = save.step
        is_new = len(self._world) not in self._compiled
        self._advance(costs.load_secs + is_new * costs.compile_secs)
        self._compiled.add(len(self._world))
        emit("executable_loaded", step=self._step)

    def _train(
        self,
        work: decision.Train,
        emit: run_events.Emit,
        has_changed: Callable[[], decision.Decision | None],
    ) -> bool:
        plan = self._plan
        # Proportional to the rows on a device.
        step_secs = (
            plan.costs.step_secs
            * (work.rows / plan.work.rows)
            * (plan.work.num_slices / len(work.slices))
        )
        held = frozenset(
            frozenset(work.slices[place] for place in places)
            for places in holders(len(work.slices), plan.hosts_per_slice, plan.copies)
        )

        def do_steps(count: int, secs: float) -> Save:
            self._advance(secs)
            self._step += count
            self.counts["rows"] += max(0, self._step - self._newest_step) * work.rows
            self._newest_step = max(self._newest_step, self._step)
            emit("step", step=self._step)
            save = Save(self._step, held)
            if self._step % plan.period == 0:
                secs = self._saves.begin(save, now=self.now)
                self._advance(secs)
                emit("save_blocked", step=self._step, secs=secs)
            return save

        do_steps(1, plan.costs.first_step_secs)
        while self._step < plan.steps:
            moment = self._next_moment()
            # Until the next save, the end, the first new step, or the next change.
            count = min(
                plan.period - self._step % plan.period,
                plan.steps - self._step,
                self._newest_step - self._step or math.inf,
                max(1, (moment - self.now) // step_secs),
            )
            do_steps(int(count), int(count) * step_secs)
            if (
                self._step < plan.steps
                and self.now >= moment
                and (decided := has_changed())
            ):
                # The hosts agree on a step, save it, and leave.
                emit("world_leaving", slices=cluster.leaving_for(decided))
                save = do_steps(1, step_secs)
                self._advance(plan.costs.end_secs)
                self._saves.finish(save, now=self.now)
                emit("world_left", step=self._step)
                return False
        return True

    def _next_moment(self) -> float:
        # When the decision may change: slices are lost, rejoin or settle.
        settle_secs = self._plan.policy.settle_secs + _MOMENT_SECS
        coming = [
            *(since + settle_secs for since in self._since.values()),
            *(event.time for event in itertools.islice(self._events, 1)),
        ]
        return min([self._plan.secs, *(each for each in coming if each > self.now)])

    def _advance(self, secs: float) -> None:
        # Advances the time until a slice of the world is lost.
        until = min(self.now + secs, self._plan.secs)
        while self._events and self._events[0].time <= until:
            event = self._events.popleft()
            self.now = max(self.now, event.time)
            if event.name == "slice_returned":
                self._since.setdefault(event.slice, self.now)
            elif event.name == "slice_lost":
                self._since.pop(event.slice, None)
                self._lost.add(event.slice)
                self._saves.lose(event.slice, now=self.now)
            if event.name in ("slice_lost", "host_lost") and event.slice in self._world:
                raise _SliceLostError(event.slice)
        self.now = until
        if until == self._plan.secs:
            raise _TimeIsUpError
