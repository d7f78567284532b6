"""The work of stages that hosts do together; failures of hosts become events."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from absl import logging

from elastic_ckpt.checkpoint import part_passes
from elastic_ckpt.checkpoint.due_steps import DueSteps
from elastic_ckpt.checkpoint.host.answers import (
    CheckpointMetadata,
    HostsFailedError,
    Placed,
)
from elastic_ckpt.checkpoint.host.backup import HostBackup
from elastic_ckpt.checkpoint.host.copies import HostCopies
from elastic_ckpt.checkpoint.hosts import Hosts
from elastic_ckpt.checkpoint.saving import Saving
from elastic_ckpt.core import events, metrics, storage_cause
from elastic_ckpt.core.errors import MOST_NAMED
from elastic_ckpt.steps.step_id import StepId

# A peer that fails is asked again later; what is said of it differs meanwhile.
_UNLISTED = re.compile(r"the list of steps [^:]*: (https?://\S+) ")


class Copies(NamedTuple):
    """The copies of a step that hosts have made.

    Attributes:
      preserved: the steps that are preserved by hand on any machine, ascending.
      has_diverged: whether replicas differ.
      has_failed: whether copies were not made that could have been.
    """

    preserved: list[int]
    has_diverged: bool
    has_failed: bool


class StageWork:
    """Copies, backs up and removes steps.

    Args:
      hosts: of the world.
      world: its number in the run.
      emit: called for each event, in the threads of the stages.
      check_writer: raises an error if another program writes to storage.

    Attributes:
      due: the steps that persistent storage lacks.
    """

    def __init__(
        self,
        hosts: Hosts,
        *,
        world: int,
        emit: events.Emit,
        check_writer: Callable[[], None] = lambda: None,
    ) -> None:
        self._hosts = hosts
        self._check_writer = check_writer
        self._world = world
        self._emit = emit
        self._lacking: set[str] = set()
        self.due = DueSteps(emit, is_first=hosts.own == 0)

    def agreed(self, saving: Saving) -> tuple[Saving, str | None]:
        """The step as all hosts save it: with one set of notes and of components.

        Returns:
          The step; and how hosts differ, if they save different things.
        """
        agreed, difference = saving.agreed(self._hosts)
        if difference is not None:
            return agreed, difference
        saving.compare()
        agreed, left_out = agreed.complete(self._hosts)
        tier = "persistent" if saving.back_up else "local"
        for name, why in left_out.items():
            why = f"it is saved without the optional component {name!r}: {why}"
            self.degraded(tier, saving.step, why)
        return agreed, None

    def replicate(
        self, committed: CheckpointMetadata, *, is_late: bool = False
    ) -> Copies | None:
        """Copies parts of a step between hosts.

        Args:
          committed: the step.
          is_late: whether a world before has made copies; then what the step lacks is
            not reported, and no copies are no event.

        Returns:
          The copies that were made; None if a host failed.
        """
        step, began_secs = committed.step, time.monotonic()
        try:
            placed = self._place(committed.step_id)
            answers = self._hosts.all(HostCopies.take, committed.step_id)
        except HostsFailedError as error:
            self.degraded("peer", step, str(error))
            return None
        num_copies = sum(each.copies for each in answers)
        if not is_late:
            of_hosts = [why for each in answers for why in each.problems]
            self._report_lacking(step, [*placed.problems, *of_hosts])
        if num_copies or not is_late:
            num_bytes = sum(each.num_bytes for each in answers)
            secs = time.monotonic() - began_secs
            self._record(metrics.CHECKPOINT_COPY, num_bytes)
            self._record(metrics.CHECKPOINT_COPY_SECS, secs)
            self._emit(
                "replicated", step=step, copies=num_copies, bytes=num_bytes, secs=secs
            )
        return Copies(
            preserved=sorted({n for each in answers for n in each.preserved}),
            has_diverged=bool(placed.diverged),
            has_failed=placed.failed or any(each.failed for each in answers),
        )

    def _place(self, step_id: StepId) -> Placed:
        return part_passes.exchanged(
            self._hosts,
            "copies",
            offer=lambda: self._hosts.all(HostCopies.offer, step_id),
            decide=lambda: self._hosts.first(HostCopies.place, step_id),
        )

    def upload(self, saving: Saving) -> bool:
        """Uploads a step; returns whether it was committed to storage."""
        step, began_secs = saving.step, time.monotonic()
        try:
            num_bytes, bad = saving.upload(self._hosts, check_writer=self._check_writer)
        except HostsFailedError as error:
            self.not_taken("persistent", step, f"it was not backed up: {error}")
            return False
        saving.stored.set()
        self.due.store(step)
        secs = time.monotonic() - began_secs
        self._record(metrics.CHECKPOINT_BACKUP, num_bytes)
        self._record(metrics.CHECKPOINT_BACKUP_SECS, secs)
        self._emit(
            "backed_up", step=step, bytes=num_bytes, secs=secs, world=self._world
        )
        if bad:
            more = f", like {len(bad) - 1} more copies" if bad[1:] else ""
            why = f"{bad[0]}; it was backed up from elsewhere{more}"
            self.degraded("local", step, why)
        return True

    def collect_backups(self, saving: Saving) -> None:
        """Removes what storage does not keep now that the step is there."""
        try:
            saving.collect_backups(self._hosts)
        except HostsFailedError as error:
            why = f"older steps were not removed: {error}"
            self.degraded("persistent", saving.step, why)

    def clean(self, step_id: StepId) -> None:
        """Removes leftovers of crashed worlds from persistent storage."""
        try:
            removed = self._hosts.first(HostBackup.clean, step_id.save)
        except HostsFailedError as error:
            self.degraded(
                "persistent", step_id.step, f"leftovers were not removed: {error}"
            )
            return
        for number, path in removed:
            self._emit(
                "step_interrupted", step=number, path=path, resume_step=step_id.step
            )

    def not_taken(self, tier: str, step: int, why: str) -> None:
        """Reports that a tier has not taken a step that is due there."""
        if tier == "persistent":
            self.due.fail(step, why)
        self.degraded(tier, step, why)

    def degraded(self, tier: str, step: int, why: str) -> None:
        """Reports a failure that the run survives."""
        logging.warning("step %d, %s tier: %s", step, tier, why)
        cause = storage_cause.of_message(why).name
        self._record(metrics.CHECKPOINT_FAILURES, 1)
        self._emit("degraded", tier=tier, step=step, cause=cause, why=why)

    def _report_lacking(self, step: int, reasons: Sequence[str]) -> None:
        problems: dict[str, str] = {}
        for why in reasons:
            problems.setdefault(_lack(why), why)
        # A lack that persists is reported once.
        fresh = [why for lack, why in problems.items() if lack not in self._lacking]
        for why in fresh[:MOST_NAMED]:
            self.degraded("peer", step, why)
        if fresh[MOST_NAMED:]:
            more = len(fresh) - MOST_NAMED
            self.degraded("peer", step, f"and {more} more, in the logs of hosts")
            logging.warning("step %d: %s", step, "; ".join(fresh[MOST_NAMED:]))
        self._lacking = set(problems)

    def _record(self, metric: metrics.Metric, value: float) -> None:
        # Values of all hosts are recorded once.
        if self._hosts.own == 0:
            metric.record(value)


def _lack(why: str) -> str:
    # What is lacking: the same for all messages about one peer's list of steps.
    match = _UNLISTED.match(why)
    return match[1] if match else why
