"""Removes the steps that persistent storage does not keep, after a commit."""

from __future__ import annotations

from elastic_ckpt.checkpoint.host.world import HostWorld
from elastic_ckpt.core import storage
from elastic_ckpt.steps import retention
from elastic_ckpt.steps.line import Line
from elastic_ckpt.steps.step_id import StepId
from elastic_ckpt.tiers.persistent import evaluations, leases


class BackupCollector:
    """Removes steps from storage; host 0 of a world has one.

    Args:
      world: the host among the others; with persistent storage.
    """

    def __init__(self, world: HostWorld) -> None:
        assert world.storage is not None
        assert world.root is not None
        assert world.persistent is not None
        self._run = world.run
        self._keep = world.storage.keep
        self._root = world.root
        self._tier = world.persistent
        self._leases = leases.Watch()

    def collect(self, line: Line, step: int, *, overwrite: bool) -> None:
        """Removes what is no longer kept.

        Also finishes the removals of worlds that were killed meanwhile.

        Keeps the newest complete step, those that are preserved by hand or leased, and
        those that plain Orbax or another run saved.

        Args:
          line: of the save that was committed.
          step: the training step.
          overwrite: whether older saves of the step that were set aside go too.
        """
        evaluations.settle(self._root, line, run=self._run)
        gone = self._replaced(StepId(step, line.save)) if overwrite else []
        if self._keep is not None:
            known = set(gone)
            gone += [each for each in self._not_kept(self._keep) if each not in known]
        if not gone:
            return
        numbers = {number for number, _ in gone}
        with leases.announced(self._root, numbers, by=line.save) as cut_short:
            for number in cut_short:
                if not self._root.is_committed(number):
                    storage.remove(self._root.final(number))
            leased = self._leases.leased(self._root)
            for number, save in gone:
                if number in leased:
                    continue
                if save is None:
                    self._tier.remove(number)
                else:
                    self._root.discard_aside(StepId(number, save))

    def _replaced(self, step_id: StepId) -> list[tuple[int, str | None]]:
        # Older saves of a step that were set aside.
        aside = self._root.set_aside_steps()
        if step_id.step in self._tier.preserved_aside():
            return []
        return [
            each for each in aside if each[0] == step_id.step and each[1] < step_id.save
        ]

    def _not_kept(
        self, keep: retention.PreservationPolicy
    ) -> list[tuple[int, str | None]]:
        # Steps, and saves of steps that are set aside.
        held = self._tier.held()
        removed = retention.steps_to_delete(
            held,
            keep,
            newest_complete=max(
                (each.step for each in held if each.complete), default=None
            ),
            # Uploads lie elsewhere until they are committed.
            in_flight=(),
            # A preserved step that was saved again is preserved in its new save, too.
            preserved=[*self._tier.preserved(), *self._tier.preserved_aside()],
        )
        abandoned = retention.abandoned_to_delete(
            self._tier.abandoned(), held, keep, preserved=self._tier.preserved_aside()
        )
        aside = [(each.step, each.save) for each in abandoned]
        return [*((step, None) for step in removed), *aside]
