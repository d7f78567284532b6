"""A run in simulated time: worlds, steps, saves, losses and restores.

It goes from event to event. The events of the run that `monitoring.goodput` accounts
for are passed to it with their simulated times, so that causes are divided as in a real
run; `elastic.decision` chooses the slices of each world.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, TypeAlias

import numpy as np

from elastic_ckpt.core import storage
from elastic_ckpt.elastic import decision
from elastic_ckpt.monitoring import goodput
from elastic_ckpt.simulation.cluster import (
    MOMENT_SECS,
    ClusterSize,
    Event,
    EventKind,
    SimulatedCluster,
)
from elastic_ckpt.simulation.costs import Costs
from elastic_ckpt.simulation.decisions import Decisions, Held, Readers, Shape
from elastic_ckpt.steps import read_plan, retention

_Stage: TypeAlias = Literal["copy", "store", "commit"]
# The order in which stages end that end at one time: a new save finds others free.
_STAGES: tuple[_Stage, ...] = ("copy", "store", "commit")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunPlan:
    """A run that is simulated.

    Attributes:
      hardware: of its cluster.
      policy: for slices that are lost and come back.
      work: of a step.
      costs: of phases.
      state_bytes: of the state, in one slice.
      period: steps between two saves.
      in_ram: whether there is a local tier.
      most_mib_per_sec: that a host reads from peers; 0 sets no limit.
      backup_steps: steps between two backups to storage; 0 if minutes count.
      backup_minutes: minutes between them; 0 if steps count.
      hang_secs: until a host that hangs is lost.
      by_racks: whether copies are spread over racks, and not over slices.
      secs: the time that is simulated; infinite until all steps are done.
      steps: of the run; 0 for as many as there is time for.
    """

    hardware: ClusterSize
    policy: decision.Policy
    work: decision.Work
    costs: Costs
    state_bytes: int
    period: int
    in_ram: bool = True
    most_mib_per_sec: float = 0.0
    backup_steps: int = 0
    backup_minutes: float = 0.0
    hang_secs: float = 30.0
    by_racks: bool = False
    secs: float = math.inf
    steps: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """The outcome of a simulated run.

    Attributes:
      goodput_percent: of its time, the part that trained new steps.
      secs: by cause, as in `monitoring.goodput`.
      steps: that it has done.
      rows: that they trained on.
      steps_lost: of all changes, trained again.
      losses: worlds that were lost.
      planned: worlds that were left for other slices.
      restarts: times that the run ended, and was started anew.
      restores: by the farthest kind of place that was read; `none` began anew.
      bytes: by what was done with them.
    """

    goodput_percent: float
    secs: Mapping[str, float]
    steps: int
    rows: int
    steps_lost: int
    losses: int
    planned: int
    restarts: int
    restores: Mapping[str, int]
    bytes: Mapping[str, int]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class HostsOfWorld:
    """The hosts of a simulated world.

    Attributes:
      slices: in the order of the mesh.
      shape: of the world.
      held: of a save by these hosts.
      racks: of each machine of the cluster, its failure domain, int64.
    """

    slices: tuple[int, ...]
    shape: Shape
    held: Held
    racks: np.ndarray

    @property
    def machines(self) -> np.ndarray:
        """The machine of each host, int64."""
        size = self.shape.hosts_per_slice
        return (np.array(self.slices)[:, None] * size + np.arange(size)).ravel()

    def numbers(self, machines: Iterable[int]) -> list[int]:
        """The numbers of the hosts on some machines; others are left out."""
        size = self.shape.hosts_per_slice
        place = {number: place for place, number in enumerate(self.slices)}
        return [
            place[machine // size] * size + machine % size
            for machine in machines
            if machine // size in place
        ]

    def readers(self, savers: HostsOfWorld) -> Readers:
        """These hosts, as readers of what those of another world have saved."""
        count = len(self.racks)
        number = np.full(count, -1)
        number[savers.machines] = np.arange(savers.shape.hosts)
        domains = savers.shape.domains
        of_rack = np.full(int(self.racks.max()) + 1, int(domains.max()) + 1)
        of_rack[self.racks[savers.machines]] = domains
        machines = self.machines
        return Readers(saver=number[machines], domain=of_rack[self.racks[machines]])


@dataclasses.dataclass(kw_only=True, eq=False)
class Save:
    """A save of a step.

    Attributes:
      step: its number.
      hosts: that saved it.
      is_due: whether it goes to storage.
      dead: the numbers of hosts whose memory was lost since.
      is_copied: whether its copies are made.
      is_stored: whether storage has it.
    """

    step: int
    hosts: HostsOfWorld
    is_due: bool
    dead: set[int] = dataclasses.field(default_factory=set)
    is_copied: bool = False
    is_stored: bool = False


class Saves:
    """The saves of a run, in RAM and in storage.

    The stages are those of `checkpoint.stages`: a step is committed in RAM, then
    its copies are made, then it is backed up if that is due; a stage that is late skips
    steps. Which steps RAM keeps is decided by `steps.retention`, and which one a run
    continues from by `Decisions`.

    Args:
      plan: of the run.
      decisions: about its saves.

    Attributes:
      bytes: moved, by the kind of move.
    """

    def __init__(self, plan: RunPlan, decisions: Decisions) -> None:
        self._plan = plan
        self._decisions = decisions
        self._in_ram: list[Save] = []
        self._stored: Save | None = None
        # The save that each stage works on, and when it is done.
        self._under_way: dict[_Stage, tuple[float, Save]] = {}
        self._committed_at = 0.0
        # A backup that a lost world has not completed, and the seconds that are left.
        self._owed: tuple[Save, float] | None = None
        self._late: Save | None = None
        self._covered: Save | None = None
        self.bytes: collections.Counter[str] = collections.Counter()

    def begin(self, save: Save, *, at_secs: float) -> float:
        """Begins a save; returns the seconds for which the loop is held up."""
        wait = max(0.0, self._committed_at - at_secs)
        self.settle(at_secs + wait)
        costs = self._plan.costs
        per_host = self._plan.state_bytes / save.hosts.shape.hosts_per_slice
        block = wait + costs.block_secs_of(per_host)
        secs = (
            costs.save_secs_of(per_host)
            if self._plan.in_ram
            else self._backup_secs(save)
        )
        self._committed_at = at_secs + block + secs
        self._under_way["commit"] = (self._committed_at, save)
        return block

    def finish(self, save: Save, *, at_secs: float) -> None:
        """Completes the last save of a world whose hosts leave, with its copies."""
        self.settle(max(at_secs, self._committed_at))
        self._commit(save, at_secs)
        if self._plan.in_ram and not save.is_copied:
            self._copied(save)

    def settle(self, until_secs: float) -> None:
        """Completes what was under way and ends until a time."""
        while self._under_way:
            stage = min(
                self._under_way,
                key=lambda each: (self._under_way[each][0], _STAGES.index(each)),
            )
            secs, save = self._under_way[stage]
            if secs > until_secs:
                return
            del self._under_way[stage]
            if stage == "commit":
                self._commit(save, secs)
            elif stage == "copy":
                self._copied(save)
            else:
                self._store(save)

    def lose_memory(self, machines: Iterable[int]) -> None:
        """Notes that the memory of machines is lost."""
        listed = list(machines)
        committing = self._under_way.get("commit")
        for save in [*self._in_ram, *([committing[1]] if committing else [])]:
            save.dead.update(save.hosts.numbers(listed))

    def end_world(self, *, at_secs: float) -> None:
        """Drops what a world that was lost at a time had not completed."""
        self.settle(at_secs)
        self._committed_at = at_secs
        if storing := self._under_way.get("store"):
            self._owed = (storing[1], max(0.0, storing[0] - at_secs))
        self._under_way.clear()

    def newest(self) -> Save | None:
        """The newest save that can be restored; None if there is none."""
        listed = [*self._in_ram, *([self._stored] if self._stored else [])]
        for save in sorted(listed, key=lambda each: each.step, reverse=True):
            if self._is_complete(save, is_stored=save.is_stored):
                return save
        return None

    def go_on_from(self, save: Save | None, *, at_secs: float) -> None:
        """Continues from a save: later ones are abandoned, a backup is continued."""
        step = -1 if save is None else save.step
        self._in_ram = [each for each in self._in_ram if each.step <= step]
        self._covered = save
        owed, self._owed = self._owed, None
        if self._late is not None and self._late.step > step:
            self._late = None
        if owed is None or owed[0] not in self._in_ram:
            return
        if self._is_complete(owed[0], is_stored=False):
            self._under_way["store"] = (at_secs + owed[1], owed[0])

    def held(self, save: Save) -> Held:
        """The holders of a save, with those of its copies once they are made."""
        held = save.hosts.held
        return held if save.is_copied else self._decisions.without_copies(held)

    def _is_complete(self, save: Save, *, is_stored: bool) -> bool:
        held = self.held(save)
        return self._decisions.is_complete(held, save.dead, is_stored=is_stored)

    def _commit(self, save: Save, secs: float) -> None:
        if not self._plan.in_ram:
            self._store(save)
            return
        held = save.hosts.held
        # A step that is saved again replaces the save before.
        self._in_ram = [each for each in self._in_ram if each.step != save.step]
        self._in_ram.append(save)
        self.bytes["saved"] += self._plan.state_bytes * save.hosts.shape.slices
        if not held.copy_bytes:
            self._copied(save)
        elif "copy" not in self._under_way:
            secs += self._plan.costs.copy_secs_of(
                held.most_copy_bytes, most_mib_per_sec=self._plan.most_mib_per_sec
            )
            self._under_way["copy"] = (secs, save)
        if "store" not in self._under_way and (save.is_due or self._late is not None):
            self._late = None
            self._under_way["store"] = (secs + self._backup_secs(save), save)
        elif save.is_due:
            self._late = save

    def _copied(self, save: Save) -> None:
        self._covered, save.is_copied = save, True
        self.bytes["copied"] += save.hosts.held.copy_bytes
        storing = self._under_way.get("store")
        needed = [storing and storing[1], self._late, self._covered]
        removed = retention.steps_to_delete(
            [
                retention.HeldStep(
                    step=each.step,
                    time_ms=1000 * each.step,
                    metrics=None,
                    complete=True,
                )
                for each in self._in_ram
            ],
            retention.BestN(0),
            newest_complete=save.step,
            in_flight=[each.step for each in needed if each],
            preserved=(),
        )
        for each in self._in_ram:
            if each.step in removed:
                each.dead.update(range(each.hosts.shape.hosts))
        self._in_ram = [each for each in self._in_ram if each.step not in removed]

    def _store(self, save: Save) -> None:
        save.is_stored = True
        self.bytes["backed_up"] += self._plan.state_bytes
        if not self._plan.in_ram:
            # Nothing of it is in RAM.
            save.dead.update(range(save.hosts.shape.hosts))
        if self._stored is None or save.step >= self._stored.step:
            self._stored = save

    def _backup_secs(self, save: Save) -> float:
        # The hosts share the work.
        share = self._plan.state_bytes / save.hosts.shape.hosts
        return self._plan.costs.backup_secs_of(share)


def simulate(plan: RunPlan, trace: Sequence[Event], decisions: Decisions) -> Outcome:
    """The outcome of a run whose cluster has the events of a trace."""
    return _Run(plan, trace, decisions).run()


class _WorldLostError(Exception):
    """The world was lost at an event of the cluster."""

    def __init__(self, event: Event) -> None:
        super().__init__()
        self.event = event


class _Run:
    def __init__(
        self, plan: RunPlan, trace: Sequence[Event], decisions: Decisions
    ) -> None:
        self._plan = plan
        self._costs = plan.costs
        self._decisions = decisions
        self._cluster = SimulatedCluster(
            plan.hardware,
            trace,
            policy=plan.policy,
            work=plan.work,
            check_secs=self._costs.check_secs,
        )
        size = plan.hardware
        per_domain = size.hosts_per_rack if plan.by_racks else size.hosts_per_slice
        self._racks = np.arange(size.hosts) // per_domain
        self._saves = Saves(plan, decisions)
        self._account = goodput.Account(time=0.0)
        self._now = 0.0
        # The slices that are left of the last world, and whether its hosts left it.
        self._current: tuple[int, ...] = ()
        self._is_planned = False
        # The slices that were lost since the world began.
        self._lost: set[int] = set()
        # Those of them of which the processes alone have died.
        self._crashed: set[int] = set()
        self._step = self._last_step = 0
        self._lost_worlds = 0
        self._backed_up_at = 0.0
        # By number of slices, when its program is there, or will be.
        self._compiled: dict[int, float] = {}
        self._world_hosts: HostsOfWorld
        self._counts: collections.Counter[str] = collections.Counter()
        self._restores: collections.Counter[str] = collections.Counter()

    def run(self) -> Outcome:
        while not self._is_over:
            world = self._await_slices()
            if world is None:
                break
            self._lost.clear()
            self._crashed.clear()
            self._cluster.begin_world(world.slices)
            hit = None
            try:
                self._start(world)
                self._train(world)
            except _WorldLostError as lost:
                hit = lost.event
            # A program that is being compiled is given up with the world.
            self._compiled = {
                number: ready
                for number, ready in self._compiled.items()
                if ready <= self._now
            }
            if hit is not None:
                self._lose(world, hit)
        self._saves.settle(math.inf)
        return Outcome(
            goodput_percent=self._account.percent,
            secs=self._account.secs,
            steps=self._account.newest_step,
            rows=self._counts["rows"],
            steps_lost=self._counts["steps_lost"],
            losses=self._counts["losses"],
            planned=self._counts["planned"],
            restarts=self._counts["restarts"],
            restores=dict(self._restores),
            bytes=dict(self._saves.bytes),
        )

    @property
    def _is_over(self) -> bool:
        plan = self._plan
        return self._now >= plan.secs or bool(plan.steps and self._step >= plan.steps)

    def _emit(self, name: str, **fields: storage.Json) -> None:
        self._account = goodput.after(self._account, name, fields, time=self._now)

    def _advance(self, until: float, world: decision.Train | None = None) -> None:
        # Lets time pass, until an event that ends the world. Slices may return after
        # the end of the time that is simulated.
        until = min(until, self._plan.secs)
        while self._cluster.next_event_secs() <= until:
            event = self._cluster.take_event()
            slices = self._plan.hardware.slices_of(event)
            self._now = max(self._now, event.time)
            self._saves.settle(self._now)
            if event.what.is_return:
                continue
            if not event.what.keeps_machines:
                machines = self._plan.hardware.hosts_of(event.what.target, event.which)
                self._saves.lose_memory(machines)
            self._lost.update(slices)
            if event.what is EventKind.KILL_HOST:
                self._crashed.update(slices)
            else:
                self._crashed.difference_update(slices)
            if world is not None and set(slices) & set(world.slices):
                raise _WorldLostError(event)
        self._now = max(self._now, until)
        self._saves.settle(self._now)

    def _await_slices(self) -> decision.Train | None:
        began, is_waiting = self._now, False
        while not self._is_over:
            decided = self._cluster.decide(
                self._current, now_secs=self._now, waited_secs=self._now - began
            )
            if isinstance(decided, decision.Train):
                return decided
            if not is_waiting:
                self._emit("waiting_for_slices")
                is_waiting = True
            until = self._next_moment()
            if isinstance(decided, decision.Wait):
                until = min(until, self._now + decided.within_secs + MOMENT_SECS)
            else:
                self._restart()
                began = self._now
            if until == math.inf:
                break
            self._advance(until)
        if is_waiting:
            self._emit("world_started")
        return None

    def _restart(self) -> None:
        self._counts["restarts"] += 1
        self._lost_worlds = 0
        self._current = ()
        self._cluster.restart()

    def _next_moment(self) -> float:
        return min(self._cluster.next_moment(now_secs=self._now), self._plan.secs)

    def _start(self, world: decision.Train) -> None:
        # Until the first step is done.
        costs, number = self._costs, len(world.slices)
        start = costs.planned_start_secs if self._is_planned else costs.start_secs
        self._is_planned = False
        for name, secs in (
            ("world_started", costs.decide_secs),
            ("world_joined", start),
            ("run_started", costs.prepare_secs),
        ):
            self._advance(self._now + secs, world)
            self._emit(name)
        self._restore(world)
        self._emit("compile_started")
        is_kept = self._compiled.get(number, math.inf) <= self._now
        secs = costs.load_secs if is_kept else costs.compile_secs
        self._advance(self._now + secs, world)
        self._emit("executable_loaded" if is_kept else "compiled", secs=secs)
        self._compiled[number] = self._now
        self._advance(self._now + costs.first_step_secs, world)
        self._counts["steps_lost"] += max(0, self._last_step - self._step)
        self._do_steps(1, world, began=self._now, step_secs=0.0)

    def _hosts(self, world: decision.Train) -> HostsOfWorld:
        plan = self._plan
        shape = Shape(
            slices=len(world.slices), hosts_per_slice=plan.hardware.hosts_per_slice
        )
        if plan.by_racks:
            size = shape.hosts_per_slice
            machines = np.array(world.slices)[:, None] * size + np.arange(size)
            racks = self._racks[machines.ravel()]
            # Racks are named by their order in the world.
            _, first, number = np.unique(racks, return_index=True, return_inverse=True)
            order = np.argsort(np.argsort(first))
            shape = dataclasses.replace(shape, racks=tuple(order[number].tolist()))
        return HostsOfWorld(
            slices=world.slices,
            shape=shape,
            held=self._decisions.held(shape),
            racks=self._racks,
        )

    def _restore(self, world: decision.Train) -> None:
        self._world_hosts = self._hosts(world)
        save = self._saves.newest()
        if save is not None:
            reads = self._decisions.reads(
                self._saves.held(save),
                save.dead,
                self._world_hosts.readers(save.hosts),
                is_stored=save.is_stored,
            )
            secs = self._costs.restore_secs + self._costs.read_secs(reads.most)
            self._advance(self._now + secs, world)
            for name, size in zip(read_plan.NEARNESS, reads.all_hosts, strict=True):
                self._saves.bytes[f"read_{name}"] += size
            self._restores[reads.farthest] += 1
            self._emit("restored_from")
        elif self._last_step:
            self._restores["none"] += 1
        self._step = 0 if save is None else save.step
        self._saves.go_on_from(save, at_secs=self._now)

    def _train(self, world: decision.Train) -> None:
        # Until the world is left or the run is over.
        step_secs = self._step_secs(world)
        began = self._now + self._save_if_due()
        while not self._is_over:
            decided = self._cluster.decide(world.slices, now_secs=self._now)
            if not isinstance(decided, decision.Train) or (
                decided.slices != world.slices
            ):
                self._leave(world, began, step_secs)
                return
            horizon = self._next_moment()
            while (count := self._steps_to_save()) * step_secs + began <= horizon:
                end = began + count * step_secs
                self._advance(end, world)
                self._do_steps(count, world, began=began, step_secs=step_secs)
                began = end + self._save_if_due()
                if self._is_over:
                    return
            count = max(0, int((horizon - began) / step_secs))
            if count:
                self._now = began + count * step_secs
                self._do_steps(count, world, began=began, step_secs=step_secs)
                began += count * step_secs
            self._advance(horizon, world)

    def _step_secs(self, world: decision.Train) -> float:
        work, number = self._plan.work, len(world.slices)
        all_rows = max(1, work.rows) / work.num_slices
        ratio = max(1, world.rows) / number / all_rows
        return self._costs.step_secs_on(number, rows_ratio=ratio)

    def _steps_to_save(self) -> int:
        plan, step = self._plan, self._step
        ends = [plan.period - step % plan.period]
        if plan.backup_steps:
            ends.append(plan.backup_steps - step % plan.backup_steps)
        if plan.steps:
            ends.append(plan.steps - step)
        return min(ends)

    def _do_steps(
        self, count: int, world: decision.Train, *, began: float, step_secs: float
    ) -> None:
        # Accounts for steps that are done now.
        now, newest = self._now, self._account.newest_step
        again = min(count, max(0, newest - self._step))
        if 0 < again < count:
            self._now = began + again * step_secs
            self._emit("step", step=self._step + again)
            self._now = now
        self._step = self._last_step = self._step + count
        self._emit("step", step=self._step)
        if count > again:
            self._counts["rows"] += (count - again) * world.rows
            self._lost_worlds = 0

    def _save_if_due(self) -> float:
        # Begins a save if one is due; returns the seconds that it holds up the loop.
        plan, step = self._plan, self._step
        minutes = plan.backup_minutes
        is_time = minutes and self._now - self._backed_up_at >= 60 * minutes
        is_due = bool(is_time or (plan.backup_steps and step % plan.backup_steps == 0))
        if not (is_due or step % plan.period == 0):
            return 0.0
        if is_due:
            self._backed_up_at = self._now
        save = Save(step=step, hosts=self._world_hosts, is_due=is_due)
        secs = self._saves.begin(save, at_secs=self._now)
        self._emit("save_blocked", secs=secs)
        return secs

    def _leave(self, world: decision.Train, began: float, step_secs: float) -> None:
        # The hosts save and leave after the step that they compute.
        self._advance(max(self._now, began + step_secs), world)
        self._do_steps(1, world, began=began, step_secs=step_secs)
        self._advance(self._now + self._costs.leave_secs, world)
        save = Save(step=self._step, hosts=self._world_hosts, is_due=False)
        self._saves.finish(save, at_secs=self._now)
        self._saves.end_world(at_secs=self._now)
        self._emit("world_left", step=self._step)
        self._counts["planned"] += 1
        self._current, self._is_planned = world.slices, True

    def _lose(self, world: decision.Train, hit: Event) -> None:
        # The world was lost at the event, which is noticed later.
        self._saves.end_world(at_secs=self._now)
        is_hang = hit.what is EventKind.HANG_HOST
        secs = self._plan.hang_secs if is_hang else self._costs.detect_secs
        self._advance(self._now + secs)
        self._emit("host_lost")
        lost = self._lost & set(world.slices)
        self._cluster.note_lost(lost, crashed=self._crashed, at_secs=self._now)
        self._current = tuple(each for each in world.slices if each not in lost)
        self._counts["losses"] += 1
        self._lost_worlds += 1
        if self._lost_worlds > self._plan.policy.max_retries:
            self._restart()
