"""The saves of a simulated run: where they are, and what is under way.

The stages are those of `checkpoint.save_stages`: a step is committed in RAM, then its
copies are made, then it is backed up if that is due; a stage that is late skips steps.
Which steps RAM keeps is decided by `steps.retention`, and which one a run continues
from by `Decisions`.
"""

from __future__ import annotations

import collections
import dataclasses
import datetime
import heapq
import itertools
from collections.abc import Callable, Iterable

import numpy as np

from elastic_ckpt.simulation.costs import Costs
from elastic_ckpt.simulation.decisions import Decisions, Held, Readers
from elastic_ckpt.simulation.world_layout import Shape
from elastic_ckpt.steps import retention

_BEGAN = datetime.datetime.fromtimestamp(0, datetime.UTC)


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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """The state that a run saves, and the costs.

    Attributes:
      costs: of phases.
      state_bytes: of the state, in one slice.
      in_ram: whether there is a local tier.
      most_mib_per_sec: that a host reads from peers; 0 sets no limit.
    """

    costs: Costs
    state_bytes: int
    in_ram: bool = True
    most_mib_per_sec: float = 0.0


class Saves:
    """The saves of a run, in RAM and in storage.

    Args:
      setting: of the run.
      decisions: about them.

    Attributes:
      bytes: moved, by the kind of move.
    """

    def __init__(self, setting: Setting, decisions: Decisions) -> None:
        self._setting = setting
        self._decisions = decisions
        self._in_ram: list[Save] = []
        self._stored: Save | None = None
        self._pending: list[tuple[float, int, Callable[[float], None]]] = []
        self._order = itertools.count()
        self._committing: Save | None = None
        self._committed_at = 0.0
        self._copying: Save | None = None
        self._storing: tuple[Save, float] | None = None
        self._late: Save | None = None
        self._covered: Save | None = None
        self.bytes: collections.Counter[str] = collections.Counter()

    def begin(self, save: Save, *, at_secs: float) -> float:
        """Begins a save; returns the seconds for which the loop is held up."""
        self.settle(at_secs)
        wait = max(0.0, self._committed_at - at_secs)
        self.settle(at_secs + wait)
        setting, hosts = self._setting, save.hosts.shape
        per_host = setting.state_bytes / hosts.hosts_per_slice
        block = wait + setting.costs.block_secs_of(per_host)
        self._committing = save
        if setting.in_ram:
            self._committed_at = at_secs + block + setting.costs.save_secs_of(per_host)
            self._at(self._committed_at, lambda time: self._commit(save, time))
        else:
            self._committed_at = at_secs + block + self._backup_secs(save)
            self._at(self._committed_at, lambda time: self._store(save, time))
        return block

    def finish(self, save: Save, *, at_secs: float) -> None:
        """Completes the last save of a world whose hosts leave, with its copies."""
        self.settle(max(at_secs, self._committed_at))
        self._committing = save
        if self._setting.in_ram:
            self._commit(save, at_secs)
            if not save.is_copied:
                self._copied(save, at_secs)
        else:
            self._store(save, at_secs)

    def settle(self, until_secs: float) -> None:
        """Completes what was under way and ends until a time."""
        while self._pending and self._pending[0][0] <= until_secs:
            time, _, work = heapq.heappop(self._pending)
            work(time)

    def lose_memory(self, machines: Iterable[int]) -> None:
        """Notes that the memory of machines is lost."""
        listed = list(machines)
        alive = self._in_ram + ([self._committing] if self._committing else [])
        for save in alive:
            save.dead.update(save.hosts.numbers(listed))

    def end_world(self, *, at_secs: float) -> None:
        """Drops what a world that was lost at a time had not completed."""
        self.settle(at_secs)
        self._pending.clear()
        self._committing = self._copying = None
        self._committed_at = at_secs
        if self._storing is not None:
            save, end = self._storing
            self._storing = (save, max(0.0, end - at_secs))

    def newest(self) -> Save | None:
        """The newest save that can be restored; None if there is none."""
        listed = [*self._in_ram, *([self._stored] if self._stored else [])]
        for save in sorted(listed, key=lambda each: each.step, reverse=True):
            if self._decisions.is_complete(
                self._held(save), save.dead, is_stored=save.is_stored
            ):
                return save
        return None

    def go_on_from(self, save: Save | None, *, at_secs: float) -> None:
        """Continues from a save: later ones are abandoned, a backup is continued."""
        step = -1 if save is None else save.step
        self._in_ram = [each for each in self._in_ram if each.step <= step]
        self._covered = save
        storing, self._storing = self._storing, None
        if self._late is not None and self._late.step > step:
            self._late = None
        if storing is None or storing[0] not in self._in_ram:
            return
        owed, left_secs = storing
        if self._decisions.is_complete(self._held(owed), owed.dead, is_stored=False):
            self._back_up(owed, at_secs + left_secs)

    def readable(self, save: Save) -> tuple[Held, set[int]]:
        """The holders of a save, and the hosts that hold nothing any more."""
        return self._held(save), save.dead

    def _held(self, save: Save) -> Held:
        held = save.hosts.held
        return held if save.is_copied else self._decisions.without_copies(held)

    def _at(self, secs: float, work: Callable[[float], None]) -> None:
        heapq.heappush(self._pending, (secs, next(self._order), work))

    def _commit(self, save: Save, time: float) -> None:
        self._committing = None
        # A step that is saved again replaces the save before.
        self._in_ram = [each for each in self._in_ram if each.step != save.step]
        self._in_ram.append(save)
        self.bytes["saved"] += self._setting.state_bytes * save.hosts.shape.slices
        copied_at = time
        if not save.hosts.held.copy_bytes:
            self._copied(save, time)
        elif self._copying is None:
            self._copying = save
            copied_at += self._setting.costs.copy_secs_of(
                save.hosts.held.most_copy_bytes,
                most_mib_per_sec=self._setting.most_mib_per_sec,
            )
            self._at(copied_at, lambda at: self._copied(save, at))
        if self._storing is None and (save.is_due or self._late is not None):
            self._late = None
            self._back_up(save, copied_at + self._backup_secs(save))
        elif save.is_due:
            self._late = save

    def _copied(self, save: Save, time: float) -> None:
        del time
        self._copying, self._covered, save.is_copied = None, save, True
        self.bytes["copied"] += save.hosts.held.copy_bytes
        storing = self._storing and self._storing[0]
        needed = [storing, self._late, self._covered]
        removed = retention.steps_to_delete(
            [_held_step(each) for each in self._in_ram],
            retention.NewestOnly(),
            newest_complete=save.step,
            in_flight=[each.step for each in needed if each],
            preserved=(),
        )
        for each in self._in_ram:
            if each.step in removed:
                each.dead.update(range(each.hosts.shape.hosts))
        self._in_ram = [each for each in self._in_ram if each.step not in removed]

    def _back_up(self, save: Save, end_secs: float) -> None:
        self._storing = (save, end_secs)
        self._at(end_secs, lambda time: self._store(save, time))

    def _store(self, save: Save, time: float) -> None:
        del time
        self._storing = None
        save.is_stored = True
        self.bytes["backed_up"] += self._setting.state_bytes
        if not self._setting.in_ram:
            # Nothing of it is in RAM.
            self._committing = None
            save.dead.update(range(save.hosts.shape.hosts))
        if self._stored is None or save.step >= self._stored.step:
            self._stored = save

    def _backup_secs(self, save: Save) -> float:
        # The hosts share the work.
        share = self._setting.state_bytes / save.hosts.shape.hosts
        return self._setting.costs.backup_secs_of(share)


def _held_step(save: Save) -> retention.HeldStep:
    time = _BEGAN + datetime.timedelta(seconds=save.step)
    return retention.HeldStep(step=save.step, time=time, metrics=None, complete=True)
