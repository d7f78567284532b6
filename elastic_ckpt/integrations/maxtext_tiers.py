"""MaxText's train state and data in our tiers, under its own flags for them.

With `enable_multi_tier_checkpointing` MaxText makes Orbax's replicator manager, which
saves no data state. `TieredManager` takes its place: to MaxText it is the Orbax v1
`training.Checkpointer` that it uses otherwise.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

from etils import epath
from orbax.checkpoint import v1 as ocp

from elastic_ckpt.application import configured
from elastic_ckpt.checkpoint import component_io, run_saver
from elastic_ckpt.checkpoint.components import validation_schedule
from elastic_ckpt.config.schema import ValidationSection
from elastic_ckpt.core import events, storage
from elastic_ckpt.frontend import Checkpointer

# The names under which MaxText saves its train state and its iterator.
ITEMS = "items"
ITERATOR = "iter"

Guard = Callable[[], contextlib.AbstractContextManager[None]]


class TieredManager:
    """The verbs that MaxText calls, on a checkpointer over tiers.

    Args:
      checkpointer: over the tiers.
      directory: of the persistent tier.
      data: returns what the data state is loaded into.
      last_step: that is backed up, due or not; None if MaxText saves no last step.
      use_async: whether saves return before they are committed.
      guard: wraps each call, so that errors of ours pass MaxText's handlers by.
    """

    def __init__(
        self,
        checkpointer: Checkpointer,
        *,
        directory: epath.PathLike,
        data: Callable[[], ocp.StatefulCheckpointable],
        last_step: int | None,
        use_async: bool,
        guard: Guard,
    ) -> None:
        self._checkpointer = checkpointer
        self._directory = storage.absolute(directory)
        self._data = data
        self._last_step = last_step
        self._has_ended = False
        # Whether what is saved next is the last, because the data has ended.
        self._is_ending = False
        self._guard = guard
        self._validation: validation_schedule.ValidationSchedule | None = None
        # MaxText reads this attribute, which it sets on Orbax's.
        self.use_async = use_async

    @property
    def __class__(self) -> type:
        """Orbax's class, which is final, and which MaxText asserts before a load."""
        return ocp.training.Checkpointer

    def validate(self, section: ValidationSection, emit: events.Emit) -> None:
        """Compares the replicas of what is saved from now on, as configured."""

        def preserve(step: int) -> int | None:
            return run_saver.preserve_newest(self._checkpointer, up_to=step)

        self._validation = configured.validation(section, emit, preserve=preserve)

    def end(self) -> None:
        """Saves what is saved next to every tier, also a step that RAM has already."""
        self._is_ending = True

    @property
    def directory(self) -> epath.Path:
        """The directory of backups; newer steps may be in RAM alone."""
        return self._directory

    @property
    def latest(self) -> Any:
        """The newest complete step of all tiers, which has a `step`."""
        if self._is_ending:
            # MaxText would leave out a step that is there.
            return None
        with self._guard():
            return self._checkpointer.latest

    @property
    def checkpoints(self) -> list[Any]:
        """The newest complete step alone.

        MaxText looks, before each save, whether the step is there already; to list all
        tiers would hold up the training.
        """
        latest = self.latest
        return [] if latest is None else [latest]

    def should_save(self, step: int) -> bool:
        """Whether a tier is due at `step`."""
        if self._is_ending:
            return True
        with self._guard():
            return self._checkpointer.should_save(step)

    def save_checkpointables_async(
        self, step: int, checkpointables: Mapping[str, Any], **options: Any
    ) -> Any:
        """As `Checkpointer.save_checkpointables_async`."""
        if self._is_ending:
            self._is_ending, self._last_step = False, step
            latest = self._checkpointer.latest
            options["overwrite"] = latest is not None and latest.step == step
        self._has_ended = step == self._last_step
        is_last = self._has_ended or self._checkpointer.is_left
        options["force"] = options.get("force", False) or is_last
        with self._guard():
            is_due = options["force"] or self._checkpointer.should_save(step)
            if self._validation and is_due:
                trees, _ = component_io.split(checkpointables)
                self._validation.run(step, trees)
            return self._checkpointer.save_checkpointables_async(
                step, checkpointables, **options
            )

    def save_checkpointables(
        self, step: int, checkpointables: Mapping[str, Any], **options: Any
    ) -> bool:
        """As `Checkpointer.save_checkpointables`."""
        response = self.save_checkpointables_async(step, checkpointables, **options)
        with self._guard():
            return response is not None and response.result()

    def load_checkpointables(
        self,
        step: Any = None,
        abstract_checkpointables: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Restores what MaxText names, and the data state, which it looks for on disk.

        A step may be in RAM alone, where MaxText finds no `iter`, and would begin the
        data anew.
        """
        wanted = {**(abstract_checkpointables or {}), ITERATOR: self._data()}
        with self._guard():
            # MaxText's own context asks Orbax for partial loads, too.
            return self._checkpointer.load_checkpointables(step, wanted, partial=True)

    def distrust(self, step: int, *, within: int, why: str) -> bool:
        """Whether the run goes back to storage; see `Checkpointer.distrust`."""
        with self._guard():
            older = self._checkpointer.distrust(step, within=within, why=why)
        return older is not None

    def wait(self) -> None:
        """Returns when all that was begun is done, in every tier.

        If the run goes on in another world, `close` waits for RAM alone.
        """
        with self._guard():
            if not self._checkpointer.is_left:
                self._checkpointer.wait()

    def close(self) -> None:
        """Waits for all tiers, and releases the hosts.

        Raises:
          CheckpointError: if the step that ends the run is not in persistent storage.
        """
        last_step = self._last_step if self._has_ended else None
        run_saver.close(self._checkpointer, last_step=last_step)

    def abandon(self, error: BaseException) -> None:
        """Releases the hosts without a wait for them, for some may be gone."""
        self._checkpointer.__exit__(type(error), error, error.__traceback__)
