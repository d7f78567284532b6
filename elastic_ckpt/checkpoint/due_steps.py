"""The steps that are due in persistent storage and are not there: the backlog.

It is bounded: besides the step that is being uploaded, RAM keeps one that waits, the
newest; it stands for all that were due before. A newer step in storage ends the wait of
all before it. Storage that fails is tried again with the next step, at the end of the
run, and by the next world. A run that ends with a backlog fails.
"""

from __future__ import annotations

import threading
import time

from elastic_ckpt.checkpoint.saving import Saving
from elastic_ckpt.core import errors, events, metrics, storage_cause
from elastic_ckpt.steps.step import StepId


class DueSteps:
    """The backlog of a world, in any of its threads.

    Args:
      emit: called when storage takes steps again.
      is_first: whether this process records the metrics of all hosts.

    Attributes:
      is_owed: whether a step that was due reached neither storage nor RAM, so that the
        next one is due.
    """

    def __init__(self, emit: events.Emit, *, is_first: bool) -> None:
        self.is_owed = False
        self._emit = emit
        self._is_first = is_first
        self._lock = threading.Lock()
        self._steps: set[StepId] = set()
        # Those of them that are in RAM, from where they can be stored later; and what
        # else than storage failed, by step.
        self._in_ram: set[StepId] = set()
        self._blamed: dict[int, str] = {}
        # Backed up next, and now.
        self._late: Saving | None = None
        self._in_backup: StepId | None = None
        # The newest failure, the newest step that was not taken, and when the first one
        # was since storage took all that it was given.
        self._why = ""
        self._failed_step = 0
        self._failing_secs: float | None = None

    @property
    def is_late(self) -> bool:
        """Whether a step waits for its backup."""
        return self._late is not None

    @property
    def is_backing_up(self) -> bool:
        """Whether a step is being uploaded."""
        return self._in_backup is not None

    def in_flight(self) -> list[StepId]:
        """The steps that have to stay in RAM until they are in storage."""
        with self._lock:
            late = None if self._late is None else self._late.step_id
            return [each for each in (self._in_backup, late) if each is not None]

    def add(self, step_id: StepId, *, in_ram: bool = True) -> None:
        """Notes that a step is due.

        Args:
          step_id: the step.
          in_ram: whether it is in RAM.
        """
        with self._lock:
            self._steps.add(step_id)
            if in_ram:
                self._in_ram.add(step_id)
        self._record()

    def begin(self, step_id: StepId) -> None:
        """Notes that a step is being backed up, in place of one that waits."""
        with self._lock:
            self._late, self._in_backup = None, step_id
        self.is_owed = False

    def end(self) -> None:
        """Notes that the backup has ended, also if it failed."""
        self._in_backup = None

    def keep(self, saving: Saving) -> None:
        """Keeps the newest waiting step, in any order of threads."""
        with self._lock:
            if self._late is None or self._late.step_id < saving.step_id:
                self._late = saving

    def take(self) -> Saving | None:
        """Returns the step that waits, and forgets it."""
        with self._lock:
            late, self._late = self._late, None
        return late

    def blame(self, step: int, why: str) -> None:
        """Notes what else keeps a step from storage: a component, or another host."""
        with self._lock:
            self._blamed[step] = why

    def fail(self, step: int, why: str) -> None:
        """Notes that storage has not taken a step."""
        with self._lock:
            self._why = why
            self._failed_step = max(self._failed_step, step)
            if self._failing_secs is None:
                self._failing_secs = time.monotonic()

    def store(self, step_id: StepId) -> None:
        """Notes that a step is in storage, by an event if storage has recovered.

        It has when it takes a step that it did not take before, or a newer one: an
        upload that is done late leaves the steps that waited for it.
        """
        step = step_id.step
        with self._lock:
            stored = {each for each in self._steps if each <= step_id}
            self._steps -= stored
            self._in_ram -= stored
            self._blamed = {n: why for n, why in self._blamed.items() if n > step}
            began_secs, why = self._failing_secs, self._why
            if step < self._failed_step:
                began_secs = None
            else:
                self._failing_secs, self._failed_step, self._why = None, 0, ""
        self._record()
        if began_secs is not None:
            self._emit(
                "storage_recovered",
                step=step,
                cause=storage_cause.of_message(why),
                steps=len(stored),
                secs=time.monotonic() - began_secs,
            )

    def drop_after(self, step: int) -> None:
        """Drops the steps behind the one that the run goes on from."""
        with self._lock:
            self._steps = {each for each in self._steps if each.step <= step}
            if self._late is not None and self._late.step > step:
                self._late = None
            self._in_ram &= self._steps
            self._blamed = {n: why for n, why in self._blamed.items() if n <= step}
            self._failed_step = min(self._failed_step, step)

    def check(self) -> None:
        """Checks that nothing is due; no stage may be at work.

        Raises:
          NotStoredError: if a step that was due is not in storage.
        """
        # A second end of the run finds nothing to do.
        self.take()
        steps, self._steps = sorted(self._steps), set()
        if not steps:
            return
        newest, several = steps[-1], ""
        if steps[1:]:
            several = f", like {len(steps) - 1} before it since step {steps[0].step}"
        why = self._blamed.get(newest.step, self._why) or "its backup was not made"
        advice = storage_cause.advice(why)
        remedies = [] if advice in why else [advice]
        if newest in self._in_ram:
            remedies.append("start the run once more while the hosts' RAM has the step")
        else:
            remedies.append(
                "save it again: no tier has it, and a start goes on from the"
                " newest step that was saved"
            )
        raise errors.NotStoredError(
            f"step {newest.step} was due in persistent storage and is not there"
            f"{several}: {why}; {', and '.join(remedies)}"
        )

    def _record(self) -> None:
        if self._is_first:
            metrics.CHECKPOINT_BACKLOG.record(len(self._steps))
