"""Finishes what the worlds before could not: copies of the step, and late backups.

A world that was left or killed may leave a step in RAM with fewer copies than it should
have, and steps that were due in storage without their backup. The next world makes the
copies when it has restored, and then the backups, from what RAM holds: the newest step
first, and older ones as long as no newer backup waits.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent import futures

from absl import logging

from elastic_ckpt.checkpoint.host.answers import (
    CheckpointMetadata,
    HostsFailedError,
    StepInRam,
)
from elastic_ckpt.checkpoint.host.backup import HostBackup
from elastic_ckpt.checkpoint.hosts import Hosts
from elastic_ckpt.checkpoint.saving import Saving
from elastic_ckpt.checkpoint.stage_work import StageWork
from elastic_ckpt.checkpoint.step_description import StepDescription
from elastic_ckpt.core import background, clock
from elastic_ckpt.steps.line import Line


class CatchUp:
    """The unfinished work of earlier worlds, from one restore on.

    Args:
      hosts: of the world.
      work: makes copies and backups.
      restored: the step that was restored.
      line: of this world; only steps of it are backed up.
    """

    def __init__(
        self,
        hosts: Hosts,
        work: StageWork,
        *,
        restored: CheckpointMetadata,
        line: Line,
    ) -> None:
        self._hosts = hosts
        self._work = work
        self._restored = restored
        self._line = line
        self._looked = threading.Event()
        self._copied = threading.Event()
        self._ended = threading.Event()
        self._is_short = False
        # Newest first; the first one is being backed up.
        self._owed: list[StepInRam] = []

    @property
    def in_flight(self) -> list[int]:
        """The steps that have to stay in RAM until they are backed up."""
        steps = [each.step_id.step for each in list(self._owed)]
        return steps[:1] if self._is_short else steps

    @property
    def is_backing_up(self) -> bool:
        """Whether backups are being made; returns once that is known."""
        self._looked.wait()
        return bool(self._owed) and not self._ended.is_set()

    def wait_for_copies(self) -> None:
        """Returns when the copies are made, or cannot be."""
        self._copied.wait()

    def make_room(self) -> None:
        """Gives up the backups that have not begun: RAM is full."""
        self._is_short = True

    def run(
        self,
        *,
        after: Sequence[futures.Future[None]],
        is_waiting: Callable[[], bool],
        late: Callable[[Saving], None],
    ) -> None:
        """Makes the copies, then the backups.

        Args:
          after: what has to end before a backup begins.
          is_waiting: whether a backup of this world waits.
          late: called for a step that could not be backed up.
        """
        try:
            try:
                held = self._look()
            finally:
                self._looked.set()
            if self._restored.step_id in [each.step_id for each in held]:
                self._work.replicate(self._restored, is_late=True)
            self._copied.set()
            if self._owed:
                background.wait(after)
                self._back_up(is_waiting, late)
        finally:
            self._copied.set()
            self._ended.set()

    def _look(self) -> Sequence[StepInRam]:
        try:
            held = self._hosts.first(HostBackup.steps_in_ram, self._line)
        except HostsFailedError as error:
            logging.warning("steps without a backup were not looked for: %s", error)
            return ()
        self._owed = [
            each
            for each in held[::-1]
            if each.step_id.step <= self._restored.step and each.is_owed
        ]
        return held

    def _back_up(
        self, is_waiting: Callable[[], bool], late: Callable[[Saving], None]
    ) -> None:
        newest: Saving | None = None
        for each in list(self._owed):
            # Host 0 decides: the stages of other processes may be a moment behind.
            waits = self._is_short or is_waiting()
            if newest is not None and self._hosts.share("backup_waits", waits)[0]:
                break
            if newest is None:
                self._work.due.add(each.step_id.step)
            try:
                saving = self._saving(each)
            except HostsFailedError as error:
                why = f"it was not backed up: {error}"
                self._work.not_taken("persistent", each.step_id.step, why)
                break
            if not self._work.upload(saving):
                late(saving)
                break
            newest = newest or saving
            self._owed = self._owed[1:]
        self._owed = []
        if newest is not None:
            self._work.collect_backups(newest)

    def _saving(self, held: StepInRam) -> Saving:
        contents = self._hosts.first(HostBackup.contents, held.step_id)
        return Saving(
            step_id=held.step_id,
            write_components=_nothing,
            back_up=True,
            overwrite=False,
            description=StepDescription.from_contents(contents),
            parents=contents.parents,
            began_secs=clock.monotonic(),
        )


def _nothing() -> None:
    """The components of the step were written by the world that saved it."""
