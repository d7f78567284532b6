"""What a run must be able to load, whatever happened: `{StepId: values, parents}`.

A save is *sure* when the product has said so and it is still in enough places: from its
commit on in the RAM of all its machines, with its copies also without one of them, and
once it is stored without any. A save that goes on from an older step ends the surety of
those that it leaves behind, and copies of a save that of those before it.

A restore of the newest step has to find the newest save that is sure, or one that was
begun later, with the values that were saved.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(kw_only=True, eq=False)
class Save:
    """A save of a step.

    Attributes:
      values: that were saved.
      parent: the save that it goes on from; None at the start of a run.
      machines: that have it in RAM, and are needed.
      spare: how many of them it can do without.
      in_ram: whether it is known to be there, unless machines are lost.
      stored: whether it is known to be in storage.
      kept: by whom storage has to keep it: `pin` and `lease`.
      lost: the machines that have lost it, or have a bad copy.
      is_covered: whether it has the copies that could be made.
      is_spoilt: whether a file of it in storage went bad.
      is_abandoned: whether no restore may find it any more.
      loss: the metric that was recorded for it; None for none.
    """

    step: int
    values: object
    parent: Save | None
    machines: frozenset = frozenset()
    spare: int = 0
    in_ram: bool = False
    stored: bool = False
    kept: set = dataclasses.field(default_factory=set)
    lost: set = dataclasses.field(default_factory=set)
    is_covered: bool = False
    is_spoilt: bool = False
    is_abandoned: bool = False
    loss: int | None = None

    @property
    def is_stored(self):
        """Whether it is known to be in storage, as it was saved."""
        return self.stored and not self.is_spoilt

    def is_sure(self, out_of_reach=frozenset()):
        """Whether it can be loaded by those who do not reach some machines."""
        lost = self.machines & (self.lost | out_of_reach)
        return self.is_stored or (self.in_ram and len(lost) <= self.spare)

    def line(self):
        """This save and all that led to it."""
        save = self
        while save is not None:
            yield save
            save = save.parent


class Model:
    """The saves of a run, in the order in which they were begun, by their `StepId`."""

    def __init__(self, *, stored_steps=None):
        self.saves = {}
        self._stored_steps = stored_steps

    def begin(self, step_id, values, parent, *, replaces=None):
        """Notes a save; what it leaves behind counts no more."""
        assert step_id not in self.saves
        save = Save(step=step_id.step, values=values, parent=parent)
        line = set(save.line())
        for each in self.saves.values():
            if each not in line and each is not replaces:
                each.in_ram = each.stored = False
        self.saves[step_id] = save
        return save

    def commit(self, save, machines):
        """Notes that a save is in the RAM of machines."""
        save.machines, save.in_ram = frozenset(machines), True
        self._drop(lambda each: each not in set(save.line()))

    def copy(self, save, spare, machines):
        """Notes that machines have made all copies that they can."""
        save.spare = max(save.spare, spare)
        save.machines |= frozenset(machines)
        save.in_ram = save.is_covered = True

    def collect(self, newest):
        """Notes that saves may leave RAM, but for the newest, and that with copies."""
        line = list(newest.line())
        covered = [each for each in line if each.is_covered][:1]
        for each in set(line) - {newest, *covered}:
            each.in_ram = False

    def store(self, save):
        """Notes that a save is in storage; retention may remove others."""
        save.stored = True
        # It may be one that a world before has left to be stored late.
        line = {s for s in self.saves.values() if save in s.line()} | set(save.line())
        self._drop(lambda each: each not in line)
        if self._stored_steps is not None:
            stored = sorted(s.step for s in line if s.stored)
            for each in line:
                if each.step not in stored[-self._stored_steps :] and not each.kept:
                    each.stored = False

    def _drop(self, is_left):
        for each in filter(is_left, list(self.saves.values())):
            each.in_ram = each.stored = False

    def leave(self, save):
        """Notes that the run has left all saves that did not lead to one, on record."""
        line = set(save.line())
        self._drop(lambda each: each not in line)
        for each in set(self.saves.values()) - line:
            each.is_abandoned = True

    def lose(self, machine):
        """Notes that a machine has lost its memory, or a part of it."""
        for each in self.saves.values():
            each.lost.add(machine)

    def newest(self, out_of_reach=frozenset()):
        """The newest save that is sure; None if there is none."""
        sure = [s for s in self.saves.values() if s.is_sure(out_of_reach)]
        return sure[-1] if sure else None

    def may_be_restored(self, save, out_of_reach=frozenset()):
        """Whether a restore of the newest step may find a save, or None for none."""
        newest, order = self.newest(out_of_reach), list(self.saves.values())
        if save is not None and save.is_abandoned:
            return False
        if newest is None or save is None:
            return newest is save or newest is None
        return order.index(save) >= order.index(newest)
