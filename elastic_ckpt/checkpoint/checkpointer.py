"""The checkpointer for any set of tiers, with the methods of Orbax's `Checkpointer`.

It tracks the newest step and determines which tiers are due, which line a step is saved
to, and whether training continues from a loaded step. `stages` takes each step through
its tiers in the background, and `restore` reads a step.

Events from any thread are queued and passed to the user's `emit` in the caller's
thread.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import sys
from collections.abc import Callable, Mapping
from concurrent import futures
from typing import Any, Self, TypeVar

from absl import logging
from etils import epath
from orbax.checkpoint import v1 as ocp

from elastic_ckpt.checkpoint import (
    component_io,
    foreign_steps,
    restore,
)
from elastic_ckpt.checkpoint.host import component_files, endpoint
from elastic_ckpt.checkpoint.host.answers import (
    CheckpointMetadata,
)
from elastic_ckpt.checkpoint.host.backup import HostBackup
from elastic_ckpt.checkpoint.host.reader import HostReader
from elastic_ckpt.checkpoint.host.saver import HostSaver
from elastic_ckpt.checkpoint.host.world import HostWorld
from elastic_ckpt.checkpoint.hosts import Hosts
from elastic_ckpt.checkpoint.response import Response, SaveResponse
from elastic_ckpt.checkpoint.restore import Relayout, step_number
from elastic_ckpt.checkpoint.run_world import RunWorld
from elastic_ckpt.checkpoint.saving import CapturedStep
from elastic_ckpt.checkpoint.schedule import BackupClock, Schedule
from elastic_ckpt.checkpoint.stages import SaveStages, Stage
from elastic_ckpt.checkpoint.structure import StepDescription, json_of_user
from elastic_ckpt.core import (
    background,
    clock,
    errors,
    events,
    storage,
    storage_cause,
)
from elastic_ckpt.core import metrics as recorded_metrics
from elastic_ckpt.steps import retention
from elastic_ckpt.steps.step import FROM_SCRATCH, Line, StepId
from elastic_ckpt.tiers.choices import Chosen
from elastic_ckpt.tiers.persistent.claims import WriteClaim
from elastic_ckpt.tiers.persistent.persistent_root import PersistentRoot, read_json

Json = storage.Json
T = TypeVar("T")

# After an error in training: how long to wait for saves in flight, and after how long
# to report the wait.
_FINISH_SECS = 600.0
_SILENT_SECS = 2.0


class HostsCheckpointer:
    """Saves steps to tiers and restores them, on any `Hosts`; see `ec.Checkpointer`.

    A save blocks its caller only while the state is copied from the devices into host
    memory; the rest happens in the background. All processes must call the same methods
    with the same arguments, each from one thread.
    """

    def __init__(
        self,
        hosts: Hosts,
        chosen: Chosen,
        *,
        run: str,
        found: str | None,
        relayout: Relayout,
        world: RunWorld,
        emit: events.Emit,
        context: ocp.Context | None,
    ) -> None:
        """Joins the hosts to a world.

        Args:
          hosts: the hosts, which `close` releases.
          chosen: the tiers.
          run: the run name.
          found: the name of the run whose steps are in the tiers
            (`run_files.find_run`); None if there are no steps.
          relayout: a function that reads trees of different layouts; see `Relayout`.
          world: this world's place in the run.
          emit: a function called with each event, in the caller's thread.
          context: the Orbax context for calls that are not inside the `with` block of
            a different context.

        Raises:
          HostsFailedError: if a host cannot join; the message has the reason.
          RunError: if another process is writing to the storage directory, or a tier
            contains steps of another run.
        """
        self._hosts = hosts
        self._context = None if context is None else ocp.Context(context)
        self._chosen, self._relayout = chosen, relayout
        self._world = world
        self._events = events.EventQueue(emit)
        # Runs loads and deletions in the background.
        self._background = Stage("background")
        self._is_closed = False
        with contextlib.ExitStack() as resources:
            resources.callback(hosts.close)
            self._write_claim = None
            if chosen.persistent is not None and not chosen.is_read_only:
                self._write_claim = WriteClaim(
                    chosen.persistent.directory,
                    run=run,
                    claimant=world.claimant,
                    gather=hosts.gather,
                    acts=hosts.own == 0,
                )
            resources.callback(self._note_closed)
            endpoint.join(hosts, write_claim=self._write_claim)
            if found not in (None, run):
                raise _named_otherwise(chosen, run, found)
            self._open_steps()
            self._events.flush()
            if not chosen.is_read_only:
                resources.callback(background.before_exit(self._finish_unclosed))
            self._resources = resources.pop_all()

    def _open_steps(self) -> None:
        # Finds the newest step and creates the stages of later saves.
        hosts, chosen, world = self._hosts, self._chosen, self._world
        self._root: PersistentRoot | None = None
        backups = BackupClock()
        if chosen.persistent is not None:
            self._root = PersistentRoot.from_path(chosen.persistent.directory)
            minutes = chosen.persistent.every_minutes
            if minutes is not None:
                # Starts at an earlier world's backup, because a world may end before
                # the period.
                since_secs = hosts.first(HostBackup.secs_since_backup)
                backups = BackupClock(minutes, since_secs=since_secs)
        self._stages = SaveStages(
            hosts,
            chosen,
            # Without a local tier, a period begins when a save begins, not when its
            # upload ends.
            clock=BackupClock() if chosen.local is None else backups,
            world=world,
            emit=self._emit,
            write_claim=self._write_claim,
        )
        self._schedule = Schedule(
            chosen=chosen,
            clock=backups,
            agree=lambda is_time, skipped: hosts.gather("due", (is_time, skipped))[0],
        )
        # The line that this process last saved to.
        self._own_line: Line | None = None
        # The saves that have begun since the newest step was committed.
        self._begun: set[StepId] = set()
        # Whether this process has a state to continue with, loaded or saved.
        self._is_placed = False
        # The step that was loaded even though newer steps are complete.
        self._older: CheckpointMetadata | None = None
        # The components that were not loaded from the step that this process resumed
        # from.
        self._unloaded: frozenset[str] = frozenset()
        self._claimed = 0
        self._claims = self._root is not None and world.claimant is not None
        # The last search, which a load of the newest step reuses; None after a save,
        # load or deletion.
        self._search: restore.SearchOutcome | None = None
        self._search_again()
        if self._write_claim is not None:
            step = 0 if self._restored is None else self._restored.step
            self._stages.clean(StepId(step, self._save))

    @property
    def directory(self) -> epath.Path:
        """The steps directory in storage or, if there is no storage, in RAM."""
        if self._root is not None:
            return self._root.path
        return storage.absolute(self._chosen.read_ram or self._chosen.ram_directory())

    @property
    def latest(self) -> CheckpointMetadata | None:
        """The newest complete step in any tier; None if there is none."""
        self._background.wait()
        return self._newest

    def claim_world(self) -> int:
        """Claims storage for this world, as a save does; returns the world number."""
        self._check_writable()
        self._background.wait()
        with self._events.flushing():
            return self._claim()

    @property
    def checkpoints(self) -> list[CheckpointMetadata]:
        """The complete steps in all tiers, in ascending order.

        A step that is still being saved is not included.
        """
        self._background.wait()
        return self._complete()

    def should_save(self, step: int) -> bool:
        """Whether a tier is due at this step or the job is about to be preempted."""
        if self._chosen.is_read_only:
            return False
        number = step_number(step)
        self._background.wait()
        self._events.flush()
        return self._is_new(number) and self._schedule.is_due(
            self._current(number), is_saving=self.is_saving_in_progress()
        )

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
        """Saves pytrees and components in the background, to the tiers that are due.

        First waits until the previous save is committed, then returns as soon as the
        state is in host memory, after which arrays may be donated.

        Args:
          step: the number of the training step.
          checkpointables: pytrees, components and `ec.batches` iterators, keyed by
            name.
          force: whether to save to every tier, due or not.
          overwrite: whether to save the newest step again, to every tier.
          metrics: JSON metrics by which a preservation policy may rank the step.
          custom_metadata: JSON to store with the step in persistent storage.

        Returns:
          The save in progress; None if no tier is due, or there is a later step.

        Raises:
          StepAlreadyExistsError: if the step exists and `overwrite` is not set.
          CheckpointError: if a leaf or the metrics cannot be saved, or `overwrite`
            is set for a step that is not the newest.
          ReplacedError: if another process has begun to write to the same storage.
          Exception: the error of a component that cannot be saved. An OSError is not
            raised: it only abandons this save, whose result is then False.
        """
        self._check_writable()
        number = step_number(step)
        foreign_steps.checked_context(self._context)
        self._background.wait()
        with self._events.flushing():
            return self._begin_save(
                number,
                checkpointables,
                force=force,
                overwrite=overwrite,
                metrics=metrics,
                custom_metadata=custom_metadata,
            )

    def save_checkpointables(
        self,
        step: int,
        checkpointables: Mapping[str, Any],
        *,
        force: bool = False,
        overwrite: bool = False,
        metrics: Mapping[str, Any] | None = None,
        custom_metadata: Mapping[str, Any] | None = None,
    ) -> bool:
        """Like `save_checkpointables_async`, but waits until the step is committed.

        Returns:
          Whether the step was committed; False if no tier was due.
        """
        response = self.save_checkpointables_async(
            step,
            checkpointables,
            force=force,
            overwrite=overwrite,
            metrics=metrics,
            custom_metadata=custom_metadata,
        )
        return response is not None and response.result()

    def save_async(
        self,
        step: int,
        state: Any,
        *,
        checkpointable_name: str = "state",
        force: bool = False,
        overwrite: bool = False,
        metrics: Mapping[str, Any] | None = None,
        custom_metadata: Mapping[str, Any] | None = None,
    ) -> SaveResponse | None:
        """Like `save_checkpointables_async`, for a single pytree."""
        return self.save_checkpointables_async(
            step,
            {checkpointable_name: state},
            force=force,
            overwrite=overwrite,
            metrics=metrics,
            custom_metadata=custom_metadata,
        )

    def save(
        self,
        step: int,
        state: Any,
        *,
        checkpointable_name: str = "state",
        force: bool = False,
        overwrite: bool = False,
        metrics: Mapping[str, Any] | None = None,
        custom_metadata: Mapping[str, Any] | None = None,
    ) -> bool:
        """Like `save_checkpointables`, for a single pytree."""
        return self.save_checkpointables(
            step,
            {checkpointable_name: state},
            force=force,
            overwrite=overwrite,
            metrics=metrics,
            custom_metadata=custom_metadata,
        )

    # Orbax's earlier names.
    save_pytree = save
    save_pytree_async = save_async

    def record_metrics(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Records a training step's metrics, by which retention ranks it (`ec.BestN`).

        Args:
          step: the step number. If that step was not saved, the metrics apply to the
            newest saved step before it.
          metrics: numbers, keyed by metric name.

        Raises:
          CheckpointError: if the metrics are not JSON, or there is no persistent tier.
        """
        self._check_writable()
        number = step_number(step)
        self._background.wait()
        with self._events.flushing():
            text = json_of_user("metrics", metrics)
            if self._root is None:
                raise errors.CheckpointError(
                    "evaluation metrics are recorded in persistent storage, but"
                    " this checkpointer has none; add Persistent(directory), or pass"
                    " metrics= when you save"
                )
            try:
                evaluated = StepId(number, self._save_of(number))
                self._hosts.first(HostBackup.record_metrics, evaluated, text)
            except errors.HostsFailedError as error:
                why = f"its metrics were not recorded: {error}"
                storage_cause.report(self._emit, "persistent", number, why)

    def evaluations(self) -> dict[int, dict[str, Any]]:
        """The metrics recorded for retained steps and steps not yet saved, by step."""
        self._background.wait()
        with self._events.flushing():
            return self._evaluations()

    def cancel(self, step: int | CheckpointMetadata | None = None) -> None:
        """Removes a step when its save is done; does not interrupt the save.

        Args:
          step: the step number; None means the step being saved, if any.
        """
        if step is None:
            begun = self._hosts.gather("is_saving", self.is_saving_in_progress())
            self.wait()
            step = self.latest if any(begun) else None
        if step is not None:
            self.delete(step, missing_ok=True)

    def root_metadata(self) -> ocp.training.RootMetadata:
        """The steps directory, and the metadata that Orbax stores for it."""
        noted = read_json(self.directory / "metadata" / "_ROOT_METADATA") or {}
        return ocp.training.RootMetadata(
            directory=self.directory, custom_metadata=noted.get("custom_metadata")
        )

    def checkpointables_metadata(
        self, step: int | CheckpointMetadata | None = None
    ) -> CheckpointMetadata:
        """Describes a step's contents without reading values.

        Args:
          step: the step number; None means the newest complete step.

        Returns:
          The step; its `metadata` contains an abstract tree for each pytree and None
          for each component, keyed by name.

        Raises:
          StepNotFoundError: if there is no such step.
        """
        self._check_open()
        self.wait()
        with self._events.flushing():
            return self._described(step)

    def metadata(
        self,
        step: int | CheckpointMetadata | None = None,
        *,
        checkpointable_name: str | None = None,
    ) -> CheckpointMetadata:
        """Describes one of a step's pytrees without reading values.

        Args:
          step: the step number; None means the newest complete step.
          checkpointable_name: the name of the pytree; None means `state` or, if there
            is no `state`, the alphabetically first pytree, as in Orbax.

        Returns:
          The step; its `metadata` is the abstract tree.

        Raises:
          StepNotFoundError: if there is no such step.
          CheckpointError: if the step has no checkpointable of that name.
        """
        held = self.checkpointables_metadata(step)
        if checkpointable_name is None:
            trees = [name for name, tree in held.metadata.items() if tree is not None]
            first = min(trees, default="state")
            checkpointable_name = "state" if "state" in trees else first
        if checkpointable_name not in held.metadata:
            raise errors.CheckpointError(
                f"step {held.step} does not contain {checkpointable_name!r}; it"
                f" contains {sorted(held.metadata)}"
            )
        return dataclasses.replace(held, metadata=held.metadata[checkpointable_name])

    def load_checkpointables(
        self,
        step: int | CheckpointMetadata | None = None,
        abstract_checkpointables: Mapping[str, Any] | None = None,
        *,
        partial: bool = False,
        layout: Any = None,
        roll_back: bool = False,
    ) -> dict[str, Any]:
        """Restores and verifies pytrees and components from the nearest good copies.

        Args:
          step: the step number; None means the newest complete step or, if that step
            turns out to be unreadable, the step before it.
          abstract_checkpointables: the checkpointables to restore, keyed by name;
            nothing else is read:

            * for a pytree, the tree with abstract leaves (`jax.ShapeDtypeStruct`s with
              the shardings to restore to), or None for the tree as it was saved
            * for a component or an iterator, the object to load the state into

            Passing None instead of a dict restores all pytrees as they were saved.
            Each array then gets its saved sharding if those devices exist; otherwise,
            each host gets the whole array, on one device.
          partial: whether the requested trees may omit saved leaves.
          layout: an `ec.universal.Layout`, or a layout name, for reading trees that
            were saved with different leaves.
          roll_back: whether to continue training from this step even though newer steps
            are complete. The newer steps are abandoned, and storage records this before
            the call returns. Without `roll_back`, the run does not continue from an
            older step: if components are loaded, or nothing was loaded or saved before,
            the next save raises an error.

        Returns:
          The restored pytrees and loaded objects, keyed by name.

        Raises:
          StepNotFoundError: if there is no such step.
          CheckpointError: if the step is incomplete or belongs to a different model, or
            no good copy of one of its parts is left.
          HostsFailedError: if `roll_back` is set and storage is unreachable.
          ReplacedError: if `roll_back` is set and a later launch has continued the run.
        """
        load = self._load_later(
            step,
            abstract_checkpointables,
            partial=partial,
            layout=layout,
            roll_back=roll_back,
        )
        self.wait()
        # In this thread, so that its JAX contexts apply.
        with self._events.flushing():
            return load()

    def load_checkpointables_async(
        self,
        step: int | CheckpointMetadata | None = None,
        abstract_checkpointables: Mapping[str, Any] | None = None,
        *,
        partial: bool = False,
        layout: Any = None,
        roll_back: bool = False,
    ) -> Response[dict[str, Any]]:
        """Like `load_checkpointables`, in the background; other calls wait for it."""
        return self._in_background(
            self._load_later(
                step,
                abstract_checkpointables,
                partial=partial,
                layout=layout,
                roll_back=roll_back,
            )
        )

    def load(
        self,
        step: int | CheckpointMetadata | None = None,
        abstract_state: Any = None,
        *,
        checkpointable_name: str = "state",
        partial: bool = False,
        layout: Any = None,
        roll_back: bool = False,
    ) -> Any:
        """Like `load_checkpointables`, for a single pytree, which is returned."""
        wanted = {checkpointable_name: abstract_state}
        return self.load_checkpointables(
            step, wanted, partial=partial, layout=layout, roll_back=roll_back
        )[checkpointable_name]

    def load_async(
        self,
        step: int | CheckpointMetadata | None = None,
        abstract_state: Any = None,
        *,
        checkpointable_name: str = "state",
        partial: bool = False,
        layout: Any = None,
        roll_back: bool = False,
    ) -> Response[Any]:
        """Like `load`, in the background; other calls wait for it."""
        load = self._load_later(
            step,
            {checkpointable_name: abstract_state},
            partial=partial,
            layout=layout,
            roll_back=roll_back,
        )
        return self._in_background(lambda: load()[checkpointable_name])

    # Orbax's earlier names.
    load_pytree = load
    load_pytree_async = load_async
    pytree_metadata = metadata

    def reload(self) -> None:
        """Searches again for the newest step, which another process may have saved."""
        self.wait()
        with self._events.flushing():
            self._search_again()

    def start_over(self) -> None:
        """Starts the run over; the next save abandons all existing steps."""
        self.wait()
        with self._events.flushing():
            self._end_search()
            newest = self._line.save
            self._own_line = None
            self._unloaded = frozenset()
            self._is_placed = True
            self._go_on_from(None, newest)

    def delete(
        self,
        step: int | CheckpointMetadata,
        *,
        checkpointable_name: str | None = None,
        missing_ok: bool = False,
    ) -> bool:
        """Removes a step from the RAM of all hosts and from persistent storage.

        If the step is still complete on machines outside this world, a `degraded` event
        reports that.

        Args:
          step: the step number.
          checkpointable_name: must be None, because a step can only be deleted as a
            whole. The argument is part of Orbax's signature.
          missing_ok: whether to return False, instead of raising an error, if there is
            no such step.

        Returns:
          Whether the step existed.

        Raises:
          StepNotFoundError: if the step does not exist and `missing_ok` is not set.
          CheckpointError: if a process has a lease on the step (`ec.lease`), or
            `checkpointable_name` is not None.
        """
        response = self.delete_async(
            step, checkpointable_name=checkpointable_name, missing_ok=missing_ok
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
        """Like `delete`, in the background; other calls wait for it."""
        self._check_writable()
        number = step_number(step)
        if checkpointable_name is not None:
            raise errors.CheckpointError(
                f"{checkpointable_name!r} of step {number} cannot be deleted on its"
                " own, because a step can only be deleted as a whole; omit"
                " checkpointable_name to delete the step"
            )
        foreign_steps.checked_context(self._context)
        return self._in_background(lambda: self._remove(number, missing_ok=missing_ok))

    def is_durable(self, step: int) -> bool:
        """Waits for backups; returns whether `step` is the newest and is in storage."""
        number = step_number(step)
        self.wait()
        latest = self.latest
        if latest is None or latest.step != number or self._root is None:
            return False
        return self._hosts.first(HostBackup.holds, latest.step_id)

    def is_saving_in_progress(self) -> bool:
        """Whether a save has begun but is not yet committed."""
        return not self._stages.committing.idle

    def wait(self) -> None:
        """Waits for all pending work, in every tier."""
        self._background.wait()
        self._stages.wait()
        self._events.flush()

    @property
    def is_leaving_world(self) -> bool:
        """Whether the remaining backups are left to the run's next world.

        They cannot be left to it if any host's RAM is lost without a copy on a peer.
        """
        chosen, world = self._chosen, self._world
        if chosen.local is None or not world.is_leaving_world():
            return False
        peers = chosen.peers
        have_copies = peers and (peers.copies or peers.assume_data_parallelism)
        return bool(have_copies) or not world.loses_memory()

    def close(self) -> None:
        """Waits for all saves and backups, then releases the hosts.

        If the run continues in another world, that world backs up the steps, and this
        waits only for the last commit.

        Raises:
          CheckpointError: if a step that was due is not in persistent storage.
        """
        with self._resources, self._events.flushing():
            self._finish()

    def abandon(self) -> None:
        """Releases the hosts without waiting for saves, because hosts may be gone."""
        self._resources.close()

    def leave(self, error: BaseException) -> None:
        """Releases the hosts after Ctrl-C or an error in training.

        If this is the only process, or if all processes leave at the same time, waits
        at most ten minutes for saves in flight to finish. A second Ctrl-C ends the
        wait.
        A `with` block calls this when an exception escapes the block.

        Args:
          error: the error; if a save could not be finished, a note is added to it.
        """
        with self._resources:
            if not self._hosts.are_leaving(error):
                return
            finishing = background.in_thread(self._finish, name="finish")
            if not futures.wait([finishing], timeout=_SILENT_SECS).done:
                logging.warning(
                    "finishing saves in flight before this process exits, for at most"
                    " %d s; press Ctrl-C to exit now",
                    _FINISH_SECS,
                )
            try:
                finishing.result(_FINISH_SECS)
            except Exception as problem:
                late = isinstance(problem, futures.TimeoutError)
                why = f"not done after {_FINISH_SECS:g} s" if late else str(problem)
                error.add_note(f"saves in flight were not finished: {why}")
                logging.warning("saves in flight were not finished: %s", why)
        self._events.flush()

    def _finish_unclosed(self) -> None:
        logging.warning(
            "the checkpointer of %s was not closed; finishing its saves now. Use"
            " `with ec.Checkpointer(...)`, or call close()",
            self.directory,
        )
        # The error that terminates the process, if any.
        self.leave(getattr(sys, "last_value", None) or errors.RunError("not closed"))

    def _finish(self) -> None:
        self._background.wait()
        stages = self._stages
        stages.committing.wait() if self.is_leaving_world else stages.end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is None:
            self.close()
        else:
            self.leave(error)

    def _load_later(
        self,
        step: int | CheckpointMetadata | None,
        wanted: Mapping[str, Any] | None,
        *,
        partial: bool,
        layout: Any,
        roll_back: bool,
    ) -> Callable[[], dict[str, Any]]:
        # Checks the arguments and returns a function that loads in any thread.
        self._check_open()
        if roll_back:
            self._check_writable()
        if step is not None:
            step_number(step)
        context = foreign_steps.checked_context(self._context)
        partial = partial or context.pytree.loading.partial_load

        def load() -> dict[str, Any]:
            with context:
                return self._load(
                    step, wanted, partial=partial, layout=layout, roll_back=roll_back
                )

        return load

    def let_others_write(self) -> None:
        """Stops writing to storage, so that another process may write there."""
        if self._write_claim is not None:
            self._write_claim.close()

    def _note_closed(self) -> None:
        self._is_closed = True
        self.let_others_write()

    def _check_open(self) -> None:
        if self._is_closed:
            raise errors.CheckpointError(
                f"this checkpointer of {self.directory} was closed; save and load"
                " inside its `with` block, or open a new one"
            )

    def _check_writable(self) -> None:
        self._check_open()
        if self._chosen.is_read_only:
            raise errors.CheckpointError(
                "this checkpointer was opened with read_only=True and cannot save,"
                " delete or change steps; when no other process writes to"
                f" {self.directory}, open a checkpointer without read_only"
            )

    def _in_background(self, work: Callable[[], T]) -> Response[T]:
        self.wait()
        return Response(self._background.start(work))

    def _emit(self, name: str, **fields: Json) -> None:
        self._events.put(name, **fields)
        if name == "save_started":
            # This is the caller's thread. The previous save's events come first.
            self._events.flush()

    def _claim(self) -> int:
        if self._claims and not self._claimed:
            line = self._line
            self._claimed = self._stages.claim(line)
            step = line.parents[-1][0]
            recorded_metrics.TRAIN_CLAIM.record(self._claimed)
            self._emit("world_claimed", world=self._claimed, step=step)
        return self._claimed

    # The methods below also run in the background, so they must not wait for it.

    @property
    def _newest(self) -> CheckpointMetadata | None:
        return self._stages.committed or self._restored

    def _complete(self) -> list[CheckpointMetadata]:
        self._end_search()
        listed = list(self._hosts.first(HostReader.complete_steps))
        try:
            evaluated = self._evaluations()
        except errors.HostsFailedError as error:
            logging.warning("evaluation metrics cannot be read: %s", error)
            return listed
        return retention.with_evaluations(listed, evaluated)

    def _evaluations(self) -> dict[int, dict[str, Any]]:
        if self._root is None:
            return {}
        recorded = self._hosts.first(HostBackup.evaluations, self._line)
        return {step: json.loads(text) for step, text in recorded}

    def _begin_save(
        self,
        step: int,
        checkpointables: Mapping[str, Any],
        *,
        force: bool,
        overwrite: bool,
        metrics: Mapping[str, Any] | None,
        custom_metadata: Mapping[str, Any] | None,
    ) -> SaveResponse | None:
        self._world.await_check()
        is_saving = not self._stages.committing.idle
        self._stages.committing.wait()
        self._stages.check()
        self._end_search()
        self._claim()
        forced = force or overwrite
        line = self._line_for(step, overwrite=overwrite)
        current = dataclasses.replace(self._current(step), metrics=metrics)
        is_last_of_world = self.is_leaving_world
        is_backup_due = self._schedule.is_backup_due(
            current, is_saving=is_saving, is_leaving_world=is_last_of_world
        )
        is_due = self._schedule.is_due(current, is_saving=is_saving)
        if not (forced or is_due or is_backup_due):
            return None
        self._is_placed = True
        self._emit("save_started", step=step)
        began_secs = clock.monotonic()
        step_id = StepId(step, line.save)
        self._begun.add(step_id)
        trees, stateful = component_io.split(checkpointables)
        self._report_unloaded(stateful)
        description = StepDescription.from_trees(
            trees,
            stateful,
            metrics=metrics,
            custom_metadata=custom_metadata,
            parents=line.parents,
        )
        back_up = is_backup_due or (
            forced and self._root is not None and not is_last_of_world
        )
        is_lent = False

        def begin() -> Callable[[], None]:
            nonlocal is_lent
            directory, is_lent, notice = self._hosts.capture(step_id, trees)
            if notice:
                tier = "persistent" if self._chosen.local is None else "local"
                storage_cause.report(self._emit, tier, step, notice)
            storage.make_private_directory(directory)
            is_sent = bool(stateful) and self._hosts.is_apart
            try:
                write = component_io.begin_save(
                    stateful, lambda name: storage.make_directory(f"{directory}/{name}")
                )
            except BaseException:
                storage.remove(directory)
                raise
            if not is_sent:
                return write
            return functools.partial(self._send, write, step_id, directory)

        write_components, problem = component_io.fail_later(begin)
        saving = CapturedStep(
            step_id=step_id,
            write_components=write_components,
            back_up=back_up,
            overwrite=overwrite,
            is_last_of_world=is_last_of_world,
            is_copied_at_once=is_last_of_world and self._world.loses_memory(),
            description=description,
            stateful=stateful,
            path=current.path,
            began_secs=began_secs,
        )
        committed = self._stages.begin(saving)
        if is_lent:
            # The caller may donate its arrays from now on.
            background.wait([committed])
        self._schedule.note_save(current, back_up=back_up)
        if problem is not None:
            raise problem
        return SaveResponse(committed, functools.partial(self._is_stored, saving))

    def _send(self, write: Callable[[], None], step_id: StepId, directory: str) -> None:
        # The components write their files here, and host 0 stores them.
        try:
            write()
            files = component_files.read(directory)
        finally:
            storage.remove(directory)
        self._hosts.first(HostSaver.put, step_id, files)

    def _load(
        self,
        step: int | CheckpointMetadata | None,
        abstract_checkpointables: Mapping[str, Any] | None,
        *,
        partial: bool = False,
        layout: Any = None,
        roll_back: bool = False,
    ) -> dict[str, Any]:
        if isinstance(abstract_checkpointables, CheckpointMetadata):
            abstract_checkpointables = abstract_checkpointables.metadata
        _, stateful = component_io.split(
            {} if abstract_checkpointables is None else abstract_checkpointables
        )
        if not abstract_checkpointables:
            abstract_checkpointables = {
                name: None
                for name, tree in self._described(step).metadata.items()
                if tree is not None
            }
        search, self._search = self._search, None
        restored = restore.Restorer(
            self._hosts,
            self._relayout,
            self._emit,
            abstract_checkpointables,
            partial=partial,
            layout=layout,
        ).restore(step, search)
        checkpoint = restored.search.required
        left = self._newest if self._is_older(checkpoint) else None
        # If step is None, training continues from the newest readable step.
        rolls_back = roll_back or step is None
        if left and self._is_placed and not (rolls_back or stateful):
            # The run does not continue from the loaded step.
            return restored.checkpointables
        # A step may be loaded in more than one call. A process that already has a state
        # may roll back only its weights.
        unloaded = self._unloaded if self._is_placed else restored.components
        self._unloaded = unloaded - abstract_checkpointables.keys()
        if left and not rolls_back:
            self._is_placed, self._older = True, checkpoint
            return restored.checkpointables
        newest_save = restored.search.newest_save
        if left and roll_back:
            newest_save = self._abandoning(checkpoint, newest_save)
        # Training continues from the loaded step.
        self._is_placed, self._own_line = True, None
        if restored.search is not search:
            self._go_on_from(checkpoint, newest_save)
        self._stages.catch_up(checkpoint)
        if left:
            self._emit("went_back", step=left.step, to_step=checkpoint.step)
        return restored.checkpointables

    def _report_unloaded(self, stateful: Mapping[str, Any]) -> None:
        # For example, if a load omitted the data, it would start from the beginning.
        unloaded = sorted(self._unloaded.intersection(stateful))
        self._unloaded -= frozenset(unloaded)
        step = self._restored.step if self._restored else 0
        for name in unloaded:
            why = (
                f"step {step} contains {name!r}, which was not loaded, so the {name!r}"
                " being saved now does not continue from it; unless it should start"
                f" over, load it with the state: load_checkpointables({step}, {{...,"
                f" {name!r}:"
                " ...})"
            )
            logging.warning("%s", why)
            self._emit("component_not_loaded", step=step, component=name, why=why)

    def _is_older(self, checkpoint: CheckpointMetadata) -> bool:
        # Whether newer steps continue from this one.
        latest = self._newest
        if latest is None or checkpoint.step >= latest.step:
            return False
        line = Line(save=latest.line[-1][1], parents=latest.line[:-1])
        return not line.abandons(StepId(checkpoint.step, checkpoint.line[-1][1]))

    def _abandoning(self, older: CheckpointMetadata, newest_save: str) -> str:
        # Records that the run continues from an older step, so that the next world
        # abandons the newer steps even if this world never saves.
        self._claim()
        save = self._hosts.first(HostWorld.new_save, newest_save)
        try:
            self._stages.claim(Line(save=save, parents=older.line))
        except errors.HostsFailedError:
            # The line may have been recorded even though the answer was lost, so later
            # saves need a later line.
            self._go_on_from(self._newest, save)
            raise
        return save

    def _described(self, step: int | CheckpointMetadata | None) -> CheckpointMetadata:
        search = self._search
        if search is None or step is not None:
            self._end_search()
            search = restore.find(self._hosts, step, emit=self._emit)
        return restore.describe(self._hosts, search.required)

    def _search_again(self) -> None:
        # The newest line in the tiers may belong to another process.
        if self._stages.committed is not None:
            self._own_line = self._line
        search = restore.find(
            self._hosts, None, emit=self._emit, own_line=self._own_line
        )
        self._go_on_from(search.checkpoint, search.newest_save)
        self._search = search
        # If this checkpointer is read-only, others may save in the meantime.
        if search.checkpoint is None or self._chosen.is_read_only:
            self._end_search()

    def _end_search(self) -> None:
        # Lets hosts discard the search messages.
        if self._search is not None and self._hosts.num_hosts > 1:
            self._hosts.all(HostReader.close_step)
        self._search = None

    def _remove(self, step: int, *, missing_ok: bool) -> bool:
        was_there = False
        if self._root is not None:
            # Storage comes first, because a leased step cannot be removed from it.
            was_there = self._hosts.first(HostBackup.remove, step, self._line)
        was_there |= any(self._hosts.all(HostSaver.remove, step))
        if not (was_there or missing_ok):
            raise restore.StepNotFoundError(
                f"step {step} is not in any tier; `checkpoints` lists the existing"
                " steps"
            )
        self._search_again()
        if step in [each.step for each in self._complete()]:
            why = (
                "it was deleted, but is still complete in the RAM of machines outside"
                " this world. Backup hosts remove it when they get newer steps; on idle"
                " machines, remove it from the RAM disk yourself"
            )
            storage_cause.report(self._emit, "peer", step, why)
        return was_there

    def _is_stored(self, saving: CapturedStep) -> bool:
        if not saving.stored.is_set():
            self._stages.wait()
        return saving.stored.is_set()

    def _current(self, step: int) -> CheckpointMetadata:
        # An unsaved step in the form that policies expect.
        return CheckpointMetadata(
            step=step,
            save=self._save,
            path=None if self._root is None else self._root.final(step),
            commit_timestamp_nsecs=clock.time_ns(),
        )

    @property
    def _line(self) -> Line:
        # The line that the next step is saved to.
        committed = self._stages.committed
        if committed is not None:
            return Line(save=committed.save, parents=committed.line[:-1])
        if self._restored is not None:
            return Line(save=self._save, parents=self._restored.line)
        # A run that starts over abandons anything that others may still save.
        return Line(save=self._save, parents=FROM_SCRATCH)

    def _is_new(self, step: int) -> bool:
        # Whether the step is later than all others. Raises an error if the step can
        # never be saved.
        newest = self._newest
        is_behind = newest is not None and step <= newest.step
        if newest is None or not (is_behind or self._older):
            return True
        there = [newest.step, *(each.step for each in self._complete())]
        if self._older is None and step in there:
            return False
        loaded = (
            "" if self._older is None else f" than the loaded step {self._older.step}"
        )
        raise errors.CheckpointError(
            f"step {step} cannot be saved: {self.directory} has step {newest.step},"
            f" which is later{loaded}. To continue the run, load that step first; to"
            " retrain from an earlier step, load that step with roll_back=True; for a"
            " new run, pass a different directory"
        )

    def _save_of(self, step: int) -> str:
        # The save of a step on the line. A step that is not saved yet belongs to the
        # next save.
        line = () if self._newest is None else self._newest.line
        later = [each for each in line if each.save and each.step >= step]
        # A step that was saved again is listed twice; earlier steps belong to its first
        # save.
        saves = [each.save for each in later if each.step == step]
        if saves or not later:
            return max(saves, default=self._line.save)
        return later[0].save

    def _line_for(self, step: int, *, overwrite: bool) -> Line:
        # The line that a step is saved to.
        latest, line = self._newest, self._line
        parents = line.parents if latest is None else latest.line
        if overwrite and latest is not None and step < latest.step:
            raise errors.CheckpointError(
                f"step {step} cannot be overwritten: only the newest step,"
                f" {latest.step}, can be; to continue from an earlier step, load it"
                " with roll_back=True"
            )
        if self._is_new(step):
            newest_step = -1 if latest is None else latest.step
            self._begun = {each for each in self._begun if each.step > newest_step}
            if StepId(step, line.save) not in self._begun:
                return line
            # An earlier save of this step was abandoned, but some hosts may have it, so
            # the new save needs a different name.
            after = max(each.save for each in self._begun)
        elif not overwrite:
            raise restore.StepAlreadyExistsError(
                f"step {step} already exists; save it with overwrite=True, or save a"
                " later step"
            )
        else:
            # The old save stays on the line and is used if the new one is interrupted.
            after = max(self._save, parents[-1].save)
        return Line(save=self._hosts.first(HostWorld.new_save, after), parents=parents)

    def _go_on_from(
        self, checkpoint: CheckpointMetadata | None, newest_save: str
    ) -> None:
        self._restored, self._older = checkpoint, None
        self._stages.go_on_from(None if checkpoint is None else checkpoint.step_id)
        # Distinguishes later saves from earlier ones.
        self._save = self._hosts.first(HostWorld.new_save, newest_save)
        self._schedule.stored = [] if checkpoint is None else [checkpoint]


def _named_otherwise(chosen: Chosen, run: str, found: str | None) -> errors.RunError:
    tiers = [tier for tier in (chosen.local, chosen.persistent) if tier]
    where = " or ".join(os.fspath(tier.directory) for tier in tiers)
    return errors.RunError(
        f"{where} contains the steps of another run, {found!r}, but this run is named"
        f" {run!r}; to continue that run, use its name (if the directory was renamed,"
        " rename it back); otherwise, save to a different directory"
    )
