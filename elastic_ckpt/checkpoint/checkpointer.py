"""The checkpointer over any choice of tiers: the verbs of Orbax's `Checkpointer`."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from etils import epath
from orbax.checkpoint import v1 as ocp

from elastic_ckpt.checkpoint.hosts import Hosts
from elastic_ckpt.checkpoint.other_layouts import Layouts
from elastic_ckpt.checkpoint.response import Response, SaveResponse
from elastic_ckpt.checkpoint.run_world import ALONE, RunWorld
from elastic_ckpt.checkpoint.saved_steps import SavedSteps
from elastic_ckpt.checkpoint.stage import Stage
from elastic_ckpt.core import errors, events, storage
from elastic_ckpt.host.answers import CheckpointMetadata
from elastic_ckpt.tiers.choices import Chosen
from elastic_ckpt.tiers.persistent.persistent_root import read_json

Json = storage.Json
T = TypeVar("T")


class Checkpointer:
    """Saves and restores steps in tiers; every process makes one, alike.

    A save blocks its caller while host memory takes what the devices hold. The rest
    happens beside the training (`save_stages`). Not to be called from several threads.

    Args:
      hosts: of the world.
      chosen: the tiers.
      world: among those of the run.
      emit: called for each event, in the caller's thread.
      layouts: read trees of other layouts; None if there are none.
    """

    def __init__(
        self,
        hosts: Hosts,
        chosen: Chosen,
        *,
        world: RunWorld = ALONE,
        emit: events.Emit = events.nobody,
        layouts: Layouts | None = None,
    ) -> None:
        self._hosts = hosts
        self._chosen = chosen
        self._world = world
        self._events = events.EventQueue(emit)
        # Loads and removals in the background.
        self._background = Stage("background")
        self._steps = SavedSteps(
            hosts, chosen, world=world, emit=self._put_event, layouts=layouts
        )
        self._events.flush()

    @property
    def directory(self) -> epath.Path:
        """The directory of the steps in storage, or in RAM if that is the only tier."""
        if self._steps.root is not None:
            return self._steps.root.path
        return storage.absolute(self._chosen.ram_directory())

    @property
    def latest(self) -> CheckpointMetadata | None:
        """The newest step that is complete, in all tiers together."""
        return self._steps.latest

    def claim_world(self) -> int:
        """Claims the world, as a save does (see `RunWorld`); returns its number."""
        with self._events.flushing():
            return self._steps.claim()

    @property
    def checkpoints(self) -> list[CheckpointMetadata]:
        """The steps that are complete now, ascending, by a look at all tiers.

        Saves under way are not waited for, and are not among them.
        """
        return self._steps.complete()

    def should_save(self, step: int) -> bool:
        """Whether a tier is due at `step`, or the job is about to be preempted."""
        self._events.flush()
        return self._steps.is_due(step, is_saving=self.is_saving_in_progress())

    def save_checkpointables_async(
        self,
        step: int,
        checkpointables: Mapping[str, Any],
        *,
        force: bool = False,
        overwrite: bool = False,
        metrics: Mapping[str, Any] | None = None,
        custom_metadata: Mapping[str, Any] | None = None,
    ) -> SaveResponse | None:
        """Saves pytrees and components as `step`, in the background.

        Waits until the save before is committed.

        Args:
          step: the training step.
          checkpointables: by name.
          force: saves to every tier, due or not.
          overwrite: saves the newest step anew, to every tier.
          metrics: by which retention may rank it: JSON.
          custom_metadata: goes into the checkpoint in persistent storage.

        Returns:
          None if no tier is due, or a later step is there.

        Raises:
          StepAlreadyExistsError: if the step is there, and not to be overwritten.
          CheckpointError: of a leaf, of metrics, of an older step to be overwritten.
          Exception: as `save` of a component; an OSError fails the step alone.
        """
        self._background.wait()
        with self._events.flushing():
            return self._steps.begin_save(
                step,
                checkpointables,
                force=force,
                overwrite=overwrite,
                metrics=metrics,
                custom_metadata=custom_metadata,
            )

    def save_checkpointables(
        self, step: int, checkpointables: Mapping[str, Any], **options: Any
    ) -> bool:
        """Saves, waits, and returns whether the step was committed."""
        response = self.save_checkpointables_async(step, checkpointables, **options)
        return response is not None and response.result()

    def save_async(
        self,
        step: int,
        state: Any,
        *,
        checkpointable_name: str = "state",
        **options: Any,
    ) -> SaveResponse | None:
        """Saves one pytree; otherwise as `save_checkpointables_async`."""
        return self.save_checkpointables_async(
            step, {checkpointable_name: state}, **options
        )

    def save(self, step: int, state: Any, **options: Any) -> bool:
        """Saves one pytree, waits, and returns whether the step was committed."""
        response = self.save_async(step, state, **options)
        return response is not None and response.result()

    def record_metrics(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Records metrics of training step `step` in storage, saved or not.

        They rank it, or the newest saved one before (`tiers.persistent.evaluations`).

        Raises:
          CheckpointError: if they are not JSON, or there is no persistent tier.
        """
        with self._events.flushing():
            self._steps.record_metrics(step, metrics)

    def evaluations(self) -> dict[int, dict[str, Any]]:
        """The recorded metrics of steps that are kept, or not saved yet, by step."""
        with self._events.flushing():
            return self._steps.evaluations()

    def cancel(self, step: int | CheckpointMetadata | None = None) -> None:
        """Removes a step once its save is done: a save is not interrupted.

        Args:
          step: None takes the one that is being saved, if any.
        """
        if step is None:
            begun = self.is_saving_in_progress()
            is_saving = any(self._hosts.share(begun))
            self.wait()
            step = self.latest if is_saving else None
        if step is not None:
            self.delete(step, missing_ok=True)

    def root_metadata(self) -> ocp.training.RootMetadata:
        """The directory of the steps, and Orbax's metadata of all of them together."""
        noted = read_json(self.directory / "metadata" / "_ROOT_METADATA")
        return ocp.training.RootMetadata(
            directory=self.directory, custom_metadata=noted.get("custom_metadata")
        )

    def checkpointables_metadata(
        self, step: int | CheckpointMetadata | None = None
    ) -> CheckpointMetadata:
        """The contents of a step, by checkpointable; loads nothing.

        Args:
          step: None takes the newest complete one.

        Raises:
          CheckpointError: if there is no such step.
        """
        self.wait()
        with self._events.flushing():
            return self._steps.held(step)

    def metadata(
        self,
        step: int | CheckpointMetadata | None = None,
        *,
        checkpointable_name: str = "state",
    ) -> CheckpointMetadata:
        """The contents of one pytree; otherwise as `checkpointables_metadata`."""
        held = self.checkpointables_metadata(step)
        if checkpointable_name not in held.metadata:
            raise errors.CheckpointError(
                f"step {held.step} has no {checkpointable_name!r}; it has"
                f" {sorted(held.metadata)}"
            )
        return dataclasses.replace(held, metadata=held.metadata[checkpointable_name])

    def load_checkpointables(
        self,
        step: int | CheckpointMetadata | None = None,
        abstract_checkpointables: Mapping[str, Any] | None = None,
        *,
        partial: bool = False,
        layout: Any = None,
    ) -> dict[str, Any]:
        """Restores pytrees and components, from the nearest good copies.

        Args:
          step: None takes the newest complete one; if it proves to be unreadable, the
            one before.
          abstract_checkpointables: by name, requested trees (`asked_trees`) and
            components, which are set to the saved state. Other saved checkpointables
            are not read. None in the place of a tree takes it as it was saved; None
            for all takes all trees so. Such an array has the sharding that it was
            saved under if those devices exist, otherwise it is whole on a device of
            each host.
          partial: whether trees may lack leaves that were saved.
          layout: of `elastic_ckpt.universal`, through which trees are read that were
            saved with other leaves.

        Raises:
          CheckpointError: if there is no such step, it is of another model, or no good
            copy of a part of it is left.
        """
        wanted = abstract_checkpointables
        self.wait()
        with self._events.flushing():
            return self._steps.load(step, wanted, partial=partial, layout=layout)

    def load_checkpointables_async(
        self,
        step: int | CheckpointMetadata | None = None,
        abstract_checkpointables: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> Response[dict[str, Any]]:
        """As `load_checkpointables`, in the background; other calls wait for it."""
        return self._in_background(
            lambda: self._steps.load(step, abstract_checkpointables, **options)
        )

    def load(
        self,
        step: int | CheckpointMetadata | None = None,
        abstract_state: Any = None,
        *,
        checkpointable_name: str = "state",
        **options: Any,
    ) -> Any:
        """Restores one pytree; otherwise as `load_checkpointables`."""
        wanted = {checkpointable_name: abstract_state}
        restored = self.load_checkpointables(step, wanted, **options)
        return restored[checkpointable_name]

    def load_async(
        self,
        step: int | CheckpointMetadata | None = None,
        abstract_state: Any = None,
        *,
        checkpointable_name: str = "state",
        **options: Any,
    ) -> Response[Any]:
        """As `load`, in the background; other calls wait for it."""
        wanted = {checkpointable_name: abstract_state}
        return self._in_background(
            lambda: self._steps.load(step, wanted, **options)[checkpointable_name]
        )

    def reload(self) -> None:
        """Searches again for the newest complete step: other programs may write too."""
        self.wait()
        with self._events.flushing():
            self._steps.reload()

    def delete(
        self,
        step: int | CheckpointMetadata,
        *,
        checkpointable_name: str | None = None,
        missing_ok: bool = False,
    ) -> bool:
        """Removes a step from the RAM of all hosts and from persistent storage.

        Args:
          step: the training step, in every save of it.
          checkpointable_name: None; a step is complete with all of its parts alone.
          missing_ok: whether there may be no such step.

        Returns:
          Whether there was one.

        Raises:
          StepNotFoundError: if there was none.
          CheckpointError: if a checkpointable is named.
        """
        name = checkpointable_name
        response = self.delete_async(
            step, checkpointable_name=name, missing_ok=missing_ok
        )
        with self._events.flushing():
            return response.result()

    def delete_async(
        self,
        step: int | CheckpointMetadata,
        *,
        checkpointable_name: str | None = None,
        missing_ok: bool = False,
    ) -> Response[bool]:
        """As `delete`, in the background; other calls wait for it."""
        number = step if isinstance(step, int) else step.step
        if checkpointable_name is not None:
            raise errors.CheckpointError(
                f"{checkpointable_name!r} of step {number} cannot be deleted alone: a"
                " step is complete with all of its parts; delete the step"
            )
        return self._in_background(
            lambda: self._steps.delete(number, missing_ok=missing_ok)
        )

    def is_durable(self, step: int) -> bool:
        """Whether `step` is the newest and in persistent storage; waits for backups."""
        self.wait()
        return self._steps.is_durable(step)

    def is_saving_in_progress(self) -> bool:
        """Whether a step is being committed."""
        return self._steps.stages.is_committing

    def wait(self) -> None:
        """Returns when all started work is done, in every tier."""
        self._background.wait()
        self._steps.stages.wait()
        self._events.flush()

    @property
    def is_left(self) -> bool:
        """Whether the next world of the run makes the backups that are not done."""
        return self._chosen.local is not None and self._world.is_left()

    def close(self) -> None:
        """Waits, or if it is left for the last save alone, and releases the hosts.

        Raises:
          CheckpointError: if a step that was due is not in persistent storage.
        """
        with contextlib.closing(self._hosts), self._events.flushing():
            self._background.wait()
            stages = self._steps.stages
            stages.wait_for_commit() if self.is_left else stages.end()

    def abandon(self) -> None:
        """Releases the hosts, some of which may be gone: waits for no save."""
        self._hosts.close()

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is None:
            self.close()
        else:
            self.abandon()

    def _in_background(self, work: Callable[[], T]) -> Response[T]:
        self.wait()
        return Response(self._background.start(work))

    def _put_event(self, name: str, **fields: Json) -> None:
        self._events.put(name, **fields)
        if name == "save_started":
            # In the caller's thread: the save before is reported before the next one.
            self._events.flush()
