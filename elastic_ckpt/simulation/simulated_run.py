"""A run in simulated time: worlds, steps, saves, losses and restores.

It goes from event to event. The events of the run that `monitoring.goodput` accounts
for are passed to it with their simulated times, so that causes are divided as in a real
run; `elastic.decision` chooses the slices of each world.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from elastic_ckpt.core import storage
from elastic_ckpt.elastic import decision
from elastic_ckpt.monitoring import goodput
from elastic_ckpt.simulation.cluster import MOMENT_SECS, SimulatedCluster
from elastic_ckpt.simulation.decisions import Decisions
from elastic_ckpt.simulation.run_plan import Outcome, RunPlan
from elastic_ckpt.simulation.saves import HostsOfWorld, Save, Saves
from elastic_ckpt.simulation.trace import Event, What
from elastic_ckpt.simulation.world_layout import Shape
from elastic_ckpt.steps import read_plan


def simulate(plan: RunPlan, trace: Sequence[Event], decisions: Decisions) -> Outcome:
    """The outcome of a run whose cluster has the events of a trace."""
    return _Run(plan, trace, decisions).run()


class _Run:
    def __init__(
        self, plan: RunPlan, trace: Sequence[Event], decisions: Decisions
    ) -> None:
        self._plan = plan
        self._costs = plan.setting.costs
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
        self._saves = Saves(plan.setting, decisions)
        self._account = goodput.Account(time=0.0)
        self._now = 0.0
        # The slices that are left of the last world, and whether its hosts left it.
        self._current: tuple[int, ...] = ()
        self._is_planned = False
        # The slices that were lost since the world began.
        self._lost: set[int] = set()
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
            hit = self._start(world) or self._train(world)
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

    def _advance(
        self, until: float, world: decision.Train | None = None
    ) -> Event | None:
        # Lets time pass; returns early with an event that ends the world. Slices may
        # return after the end of the time that is simulated.
        until = min(until, self._plan.secs)
        while self._cluster.next_event_secs() <= until:
            event, slices = self._cluster.take_event()
            self._now = max(self._now, event.time)
            self._saves.settle(self._now)
            if event.what.is_return:
                continue
            if not event.what.keeps_machines:
                machines = self._plan.hardware.hosts_of(event)
                self._saves.lose_memory(machines)
            self._lost.update(slices)
            if world is not None and set(slices) & set(world.slices):
                return event
        self._now = max(self._now, until)
        self._saves.settle(self._now)
        return None

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
        return min(
            self._cluster.next_event_secs(),
            self._cluster.next_moment(now_secs=self._now),
            self._plan.secs,
        )

    def _start(self, world: decision.Train) -> Event | None:
        # Until the first step is done; returns the event that ends the world before.
        costs, number = self._costs, len(world.slices)
        start = costs.planned_start_secs if self._is_planned else costs.start_secs
        self._is_planned = False
        for name, secs in (
            ("world_started", costs.decide_secs),
            ("world_joined", start),
            ("run_started", costs.prepare_secs),
        ):
            if hit := self._pass(name, secs, world):
                return hit
        if hit := self._restore(world):
            return hit
        self._emit("compile_started")
        is_kept = self._compiled.get(number, math.inf) <= self._now
        secs = costs.load_secs if is_kept else costs.compile_secs
        name = "executable_loaded" if is_kept else "compiled"
        if hit := self._advance(self._now + secs, world):
            return hit
        self._emit(name, secs=secs)
        self._note_compiled(world)
        if hit := self._advance(self._now + costs.first_step_secs, world):
            return hit
        self._counts["steps_lost"] += max(0, self._last_step - self._step)
        self._do_steps(1, world, began=self._now, step_secs=0.0)
        return None

    def _pass(self, name: str, secs: float, world: decision.Train) -> Event | None:
        hit = self._advance(self._now + secs, world)
        if hit is None:
            self._emit(name)
        return hit

    def _note_compiled(self, world: decision.Train) -> None:
        self._compiled[len(world.slices)] = self._now
        if self._plan.compiles_ahead and len(world.slices) > 1 and not world.spares:
            smaller = self._cluster.one_slice_fewer(world.slices)
            if isinstance(smaller, decision.Train):
                costs = self._costs
                ready = self._now + costs.first_step_secs
                ready += costs.compile_ahead_secs + costs.compile_secs
                self._compiled.setdefault(len(smaller.slices), ready)

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

    def _restore(self, world: decision.Train) -> Event | None:
        self._world_hosts = self._hosts(world)
        save = self._saves.newest()
        if save is not None:
            held, dead = self._saves.readable(save)
            readers = self._world_hosts.readers(save.hosts)
            reads = self._decisions.reads(held, dead, readers, is_stored=save.is_stored)
            secs = self._costs.restore_secs + self._costs.read_secs(reads.most)
            if hit := self._advance(self._now + secs, world):
                return hit
            for name, size in zip(read_plan.NEARNESS, reads.all_hosts, strict=True):
                self._saves.bytes[f"read_{name}"] += size
            self._restores[reads.farthest] += 1
            self._emit("restored_from")
        elif self._last_step:
            self._restores["none"] += 1
        self._step = 0 if save is None else save.step
        self._saves.go_on_from(save, at_secs=self._now)
        return None

    def _train(self, world: decision.Train) -> Event | None:
        # Until the world is left or the run is over; or returns the event that ends it.
        step_secs = self._step_secs(world)
        began = self._now + self._save_if_due()
        while not self._is_over:
            decided = self._cluster.decide(world.slices, now_secs=self._now)
            if not isinstance(decided, decision.Train) or (
                decided.slices != world.slices
            ):
                return self._leave(world, began, step_secs)
            horizon = self._next_moment()
            while (count := self._steps_to_save()) * step_secs + began <= horizon:
                end = began + count * step_secs
                if hit := self._advance(end, world):
                    return hit
                self._do_steps(count, world, began=began, step_secs=step_secs)
                began = end + self._save_if_due()
                if self._is_over:
                    return None
            count = max(0, int((horizon - began) / step_secs))
            if count:
                self._now = began + count * step_secs
                self._do_steps(count, world, began=began, step_secs=step_secs)
                began += count * step_secs
            if hit := self._advance(horizon, world):
                return hit
        return None

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

    def _leave(
        self, world: decision.Train, began: float, step_secs: float
    ) -> Event | None:
        # The hosts save and leave after the step that they compute.
        if hit := self._advance(max(self._now, began + step_secs), world):
            return hit
        self._do_steps(1, world, began=began, step_secs=step_secs)
        if hit := self._advance(self._now + self._costs.leave_secs, world):
            return hit
        save = Save(step=self._step, hosts=self._world_hosts, is_due=False)
        self._saves.finish(save, at_secs=self._now)
        self._saves.end_world(at_secs=self._now)
        self._emit("world_left", step=self._step)
        self._counts["planned"] += 1
        self._current, self._is_planned = world.slices, True
        return None

    def _lose(self, world: decision.Train, hit: Event) -> None:
        # The world was lost at the event, which is noticed later.
        self._saves.end_world(at_secs=self._now)
        is_hang = hit.what is What.HANG_HOST
        secs = self._plan.hang_secs if is_hang else self._costs.detect_secs
        self._advance(self._now + secs)
        self._emit("host_lost")
        lost = self._lost & set(world.slices)
        self._cluster.note_lost(lost, at_secs=self._now)
        self._current = tuple(each for each in world.slices if each not in lost)
        self._counts["losses"] += 1
        self._lost_worlds += 1
        if self._lost_worlds > self._plan.policy.max_retries:
            self._restart()
