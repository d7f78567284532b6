"""The checkpointer over any choice of tiers: the verbs of Orbax's `Checkpointer`."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent import futures
from typing import Any, Self, TypeVar

from absl import logging
from etils import epath
from orbax.checkpoint import v1 as ocp

from elastic_ckpt.checkpoint import orbax_context, rendezvous
from elastic_ckpt.checkpoint.host.answers import CheckpointMetadata
from elastic_ckpt.checkpoint.hosts import Hosts
from elastic_ckpt.checkpoint.other_layouts import Layouts
from elastic_ckpt.checkpoint.response import Response, SaveResponse
from elastic_ckpt.checkpoint.run_world import RunWorld
from elastic_ckpt.checkpoint.saved_steps import SavedSteps
from elastic_ckpt.checkpoint.stage import Stage
from elastic_ckpt.checkpoint.step_errors import step_number
from elastic_ckpt.checkpoint.writing import Writing
from elastic_ckpt.core import background, errors, events, storage
from elastic_ckpt.tiers.choices import Chosen
from elastic_ckpt.tiers.persistent.persistent_root import read_json

Json = storage.Json
T = TypeVar("T")

# After an error in the training: how long saves in flight are waited for, and after
# which time that is said.
_FINISH_SECS = 600.0
_SILENT_SECS = 2.0


class HostsCheckpointer:
    """Saves and restores steps in tiers, over hosts of any kind; see `ec.Checkpointer`.

    A save blocks its caller only while the state is copied from the devices into host
    memory; the rest happens beside the training. Every process calls the methods alike,
    and from one thread.
    """

    def __init__(
        self,
        hosts: Hosts,
        chosen: Chosen,
        *,
        run: str,
        found: str | None,
        layouts: Layouts,
        world: RunWorld,
        emit: events.Emit,
        context: ocp.Context | None,
    ) -> None:
        """Joins the hosts to a world.

        Args:
          hosts: of the world, which `close` closes.
          chosen: the tiers.
          run: the name of the run.
          found: the run whose steps are in the tiers (`run_identity.find_run`); None if
            there are none.
          layouts: read trees of other layouts.
          world: the place of this checkpointer among those of the run.
          emit: called with each event, in the caller's thread.
          context: Orbax's context for all calls outside of a `with` block of another
            one.

        Raises:
          HostsFailedError: if a host cannot take part, with the reason.
          RunError: if another program writes to storage, or a tier has steps of another
            run.
        """
        self._hosts = hosts
        self._context = None if context is None else ocp.Context(context)
        self._chosen = chosen
        self._world = world
        self._events = events.EventQueue(emit)
        # Loads and removals in the background.
        self._background = Stage("background")
        with contextlib.ExitStack() as on_error:
            on_error.callback(hosts.close)
            self._of_storage = Writing(hosts, chosen, world)
            on_error.callback(self._of_storage.close)
            rendezvous.join(hosts, begin_writing=self._of_storage.begin)
            if found not in (None, run):
                raise _named_otherwise(chosen, run, found)
            self._steps = SavedSteps(
                hosts,
                chosen,
                world=world,
                emit=self._put_event,
                layouts=layouts,
                check_writer=self._of_storage.check,
            )
            self._events.flush()
            on_error.pop_all()
        self._is_closed = False
        self._forget: Callable[[], None] = lambda: None
        if not chosen.is_read_only:
            self._forget = background.before_exit(self, self._finish_unclosed)

    @property
    def directory(self) -> epath.Path:
        """The directory of the steps in storage; without storage, that in RAM."""
        if self._steps.root is not None:
            return self._steps.root.path
        ram_directory = self._chosen.read_ram or self._chosen.ram_directory()
        return storage.absolute(ram_directory)

    @property
    def latest(self) -> CheckpointMetadata | None:
        """The newest complete step, in whichever tier; None if there is none."""
        self._background.wait()
        return self._steps.latest

    def claim_world(self) -> int:
        """Claims the storage for this world, as a save does; returns its number."""
        self._check_writable()
        self._background.wait()
        with self._events.flushing():
            return self._steps.claim()

    @property
    def checkpoints(self) -> list[CheckpointMetadata]:
        """The complete steps, in ascending order; all tiers are searched.

        A step whose save is not done is not among them.
        """
        self._background.wait()
        return self._steps.complete()

    def should_save(self, step: int) -> bool:
        """Whether a tier is due at this step, or the job is about to be preempted."""
        if self._chosen.is_read_only:
            return False
        number = step_number(step)
        self._background.wait()
        self._events.flush()
        return self._steps.is_due(number, is_saving=self.is_saving_in_progress())

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
        """Saves pytrees and components in the background, into the tiers that are due.

        It returns when the state is in host memory: arrays may then be donated. It
        first waits until the save before this one is committed.

        Args:
          step: the number of the training step.
          checkpointables: pytrees, components, and iterators of `ec.batches`, by name.
          force: saves to every tier, whether it is due or not.
          overwrite: saves the newest step again, to every tier.
          metrics: JSON, by which a preservation policy may rank the step.
          custom_metadata: JSON to keep with the step in persistent storage.

        Returns:
          The save; None if no tier is due, or there is a later step.

        Raises:
          StepAlreadyExistsError: if the step exists, and `overwrite` is not set.
          CheckpointError: if a leaf or the metrics cannot be saved, or `overwrite`
            names a step that is not the newest.
          ReplacedError: if another program has begun to write to the same storage.
          Exception: the error of a component that cannot be saved. After an OSError
            only this save is given up, and its result is False.
        """
        self._check_writable()
        number = step_number(step)
        orbax_context.of_save(self._context)
        self._background.wait()
        with self._events.flushing():
            return self._steps.begin_save(
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
        """As `save_checkpointables_async`, and waits until the step is committed.

        Returns:
          Whether it was committed; False also if no tier was due.
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
        """As `save_checkpointables_async`, for a single pytree."""
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
        """As `save_checkpointables`, for a single pytree."""
        response = self.save_async(
            step,
            state,
            checkpointable_name=checkpointable_name,
            force=force,
            overwrite=overwrite,
            metrics=metrics,
            custom_metadata=custom_metadata,
        )
        return response is not None and response.result()

    # What Orbax called them before.
    save_pytree = save
    save_pytree_async = save_async

    def record_metrics(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Records metrics of a training step, by which retention ranks it (`ec.BestN`).

        Args:
          step: the number of the step. If it is not saved, the metrics count for the
            newest saved step before it.
          metrics: numbers by name.

        Raises:
          CheckpointError: if the metrics are not JSON, or there is no persistent tier.
        """
        self._check_writable()
        number = step_number(step)
        self._background.wait()
        with self._events.flushing():
            self._steps.record_metrics(number, metrics)

    def evaluations(self) -> dict[int, dict[str, Any]]:
        """The recorded metrics by step, of steps that are kept or not saved yet."""
        self._background.wait()
        with self._events.flushing():
            return self._steps.evaluations()

    def cancel(self, step: int | CheckpointMetadata | None = None) -> None:
        """Removes a step when its save is done; the save itself is not interrupted.

        Args:
          step: the number of the step; None takes the one that is being saved, if any.
        """
        if step is None:
            begun = self.is_saving_in_progress()
            is_saving = any(self._hosts.share("is_saving", begun))
            self.wait()
            step = self.latest if is_saving else None
        if step is not None:
            self.delete(step, missing_ok=True)

    def root_metadata(self) -> ocp.training.RootMetadata:
        """The directory of the steps, and Orbax's metadata of the directory."""
        noted = read_json(self.directory / "metadata" / "_ROOT_METADATA")
        return ocp.training.RootMetadata(
            directory=self.directory, custom_metadata=noted.get("custom_metadata")
        )

    def checkpointables_metadata(
        self, step: int | CheckpointMetadata | None = None
    ) -> CheckpointMetadata:
        """Describes the contents of a step; no values are read.

        Args:
          step: the number of the step; None takes the newest complete one.

        Returns:
          The step, whose `metadata` has an abstract tree for each pytree by name, and
          None for each component.

        Raises:
          StepNotFoundError: if there is no such step.
        """
        self._check_open()
        self.wait()
        with self._events.flushing():
            return self._steps.held(step)

    def metadata(
        self,
        step: int | CheckpointMetadata | None = None,
        *,
        checkpointable_name: str | None = None,
    ) -> CheckpointMetadata:
        """Describes one pytree of a step; no values are read.

        Args:
          step: the number of the step; None takes the newest complete one.
          checkpointable_name: the name of the pytree; None takes `state` or, if there
            is none of that name, the first by name, as Orbax does.

        Returns:
          The step, whose `metadata` is the abstract tree.

        Raises:
          StepNotFoundError: if there is no such step.
          CheckpointError: if the step has nothing of this name.
        """
        held = self.checkpointables_metadata(step)
        if checkpointable_name is None:
            contents = held.metadata.items()
            trees = sorted(name for name, tree in contents if tree is not None)
            named = [name for name in trees if name == "state"] or trees
            checkpointable_name = named[0] if named else "state"
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
        go_back: bool | None = None,
    ) -> dict[str, Any]:
        """Restores pytrees and components from the nearest good copies, verified.

        Args:
          step: the number of the step; None takes the newest complete one or, if that
            proves to be unreadable, the one before it.
          abstract_checkpointables: what to restore, by name; nothing else is read:

            * for a pytree, the tree with abstract leaves, `jax.ShapeDtypeStruct`s with
              the shardings to restore to, or None for the tree as it was saved
            * for a component or an iterator, the object, into which the state is loaded

            None in place of the dict restores all pytrees as they were saved. Such an
            array has the sharding that it was saved with if those devices exist, and
            otherwise is whole on one device of each host.
          partial: whether trees may lack leaves that were saved.
          layout: an `ec.universal.Layout`, or the name of one, by which trees are read
            that were saved with other leaves.
          go_back: whether the training continues from this older step, so that the next
            save abandons the newer ones. By default it does if components are loaded,
            if nothing was loaded or saved before, or if the next save is of a step that
            exists; otherwise the step was only looked at.

        Returns:
          The pytrees and objects by name.

        Raises:
          StepNotFoundError: if there is no such step.
          CheckpointError: if the step is not complete, or of another model, or if no
            good copy of a part of it is left.
        """
        load = self._load_later(
            step,
            abstract_checkpointables,
            partial=partial,
            layout=layout,
            go_back=go_back,
        )
        self.wait()
        with self._events.flushing():
            return load()

    def load_checkpointables_async(
        self,
        step: int | CheckpointMetadata | None = None,
        abstract_checkpointables: Mapping[str, Any] | None = None,
        *,
        partial: bool = False,
        layout: Any = None,
        go_back: bool | None = None,
    ) -> Response[dict[str, Any]]:
        """As `load_checkpointables`, in the background; other calls wait for it."""
        return self._in_background(
            self._load_later(
                step,
                abstract_checkpointables,
                partial=partial,
                layout=layout,
                go_back=go_back,
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
        go_back: bool | None = None,
    ) -> Any:
        """As `load_checkpointables`, for a single pytree, which is returned."""
        wanted = {checkpointable_name: abstract_state}
        restored = self.load_checkpointables(
            step, wanted, partial=partial, layout=layout, go_back=go_back
        )
        return restored[checkpointable_name]

    def load_async(
        self,
        step: int | CheckpointMetadata | None = None,
        abstract_state: Any = None,
        *,
        checkpointable_name: str = "state",
        partial: bool = False,
        layout: Any = None,
        go_back: bool | None = None,
    ) -> Response[Any]:
        """As `load`, in the background; other calls wait for it."""
        wanted = {checkpointable_name: abstract_state}
        load = self._load_later(
            step, wanted, partial=partial, layout=layout, go_back=go_back
        )
        return self._in_background(lambda: load()[checkpointable_name])

    # What Orbax called them before.
    load_pytree = load
    load_pytree_async = load_async
    pytree_metadata = metadata

    def reload(self) -> None:
        """Searches for the newest step again, as another program may have saved it."""
        self.wait()
        with self._events.flushing():
            self._steps.reload()

    def begin_anew(self) -> None:
        """Continues from before the first step: the next save abandons all steps."""
        self.wait()
        with self._events.flushing():
            self._steps.begin_anew()

    def delete(
        self,
        step: int | CheckpointMetadata,
        *,
        checkpointable_name: str | None = None,
        missing_ok: bool = False,
    ) -> bool:
        """Removes a step from the RAM of all hosts and from persistent storage.

        Args:
          step: the number of the step.
          checkpointable_name: only None, as a step can only be removed as a whole; for
            the signature of Orbax.
          missing_ok: whether it is no error if there is no such step.

        Returns:
          Whether there was such a step.

        Raises:
          StepNotFoundError: if there was none, and `missing_ok` is not set.
          CheckpointError: if `checkpointable_name` is not None.
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
        self._check_writable()
        number = step_number(step)
        if checkpointable_name is not None:
            raise errors.CheckpointError(
                f"{checkpointable_name!r} of step {number} cannot be deleted on its"
                " own: a step can only be deleted as a whole; delete the step"
            )
        orbax_context.of_deletion(self._context)
        return self._in_background(
            lambda: self._steps.delete(number, missing_ok=missing_ok)
        )

    def is_durable(self, step: int) -> bool:
        """Whether `step` is the newest step and in storage; waits for its backup."""
        number = step_number(step)
        self.wait()
        return self._steps.is_durable(number)

    def is_saving_in_progress(self) -> bool:
        """Whether a save is not committed yet."""
        return self._steps.stages.is_committing

    def wait(self) -> None:
        """Waits until all work that was begun is done, in every tier."""
        self._background.wait()
        self._steps.stages.wait()
        self._events.flush()

    @property
    def is_left(self) -> bool:
        """Whether the next world of the run makes the backups that are left to do."""
        return self._chosen.local is not None and self._world.is_left()

    def close(self) -> None:
        """Waits for all saves and backups, and releases the hosts.

        If the run continues in another world, that one makes the backups, and only the
        last commit is waited for.

        Raises:
          CheckpointError: if a step that was due is not in persistent storage.
        """
        with contextlib.closing(self._hosts), self._closing(), self._events.flushing():
            self._finish()

    def abandon(self) -> None:
        """Releases the hosts without waiting for saves, as some hosts may be gone."""
        with self._closing():
            self._hosts.close()

    def leave(self, error: BaseException) -> None:
        """Releases the hosts after an error in the training, or Ctrl-C.

        Saves that have begun are finished, within ten minutes, if this is the only
        process, or if all processes leave at once. Another Ctrl-C ends the wait. A
        `with` block calls this if it is left by an exception.

        Args:
          error: the error, which gets a note if a save could not be finished.
        """
        with contextlib.closing(self._hosts), self._closing():
            if not self._hosts.are_leaving(error):
                return
            finishing = background.in_thread(self._finish, name="finish")
            if not futures.wait([finishing], timeout=_SILENT_SECS).done:
                logging.warning(
                    "saves in flight are finished before this program ends, for at"
                    " most %d s; Ctrl-C ends it now",
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
            "the checkpointer of %s was not closed, and its saves are finished now; use"
            " `with ec.Checkpointer(...)`, or call close()",
            self.directory,
        )
        # An error that ends the program, if one does.
        self.leave(getattr(sys, "last_value", None) or errors.RunError("not closed"))

    def _finish(self) -> None:
        self._background.wait()
        stages = self._steps.stages
        stages.wait_for_commit() if self.is_left else stages.end()

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
        go_back: bool | None,
    ) -> Callable[[], dict[str, Any]]:
        # Checks the call, and returns the load, which any thread may do.
        self._check_open()
        if step is not None:
            step_number(step)
        context = orbax_context.of_load(self._context)
        partial = partial or context.pytree.loading.partial_load

        def load() -> dict[str, Any]:
            with context:
                return self._steps.load(
                    step, wanted, partial=partial, layout=layout, go_back=go_back
                )

        return load

    def let_others_write(self) -> None:
        """Commits nothing more to storage, so that another program may write there."""
        self._of_storage.close()

    @contextlib.contextmanager
    def _closing(self) -> Iterator[None]:
        try:
            yield
        finally:
            self._is_closed = True
            self._forget()
            self.let_others_write()

    def _check_open(self) -> None:
        if self._is_closed:
            raise errors.CheckpointError(
                f"this checkpointer of {self.directory} was closed; save and load"
                " inside of its `with` block, or open another one"
            )

    def _check_writable(self) -> None:
        self._check_open()
        if self._chosen.is_read_only:
            raise errors.CheckpointError(
                "this checkpointer was opened with read_only=True and cannot save,"
                " delete or change steps; when no other program writes to"
                f" {self.directory}, open one without read_only"
            )

    def _in_background(self, work: Callable[[], T]) -> Response[T]:
        self.wait()
        return Response(self._background.start(work))

    def _put_event(self, name: str, **fields: Json) -> None:
        self._events.put(name, **fields)
        if name == "save_started":
            # In the caller's thread: the save before is reported before the next one.
            self._events.flush()


def _named_otherwise(chosen: Chosen, run: str, found: str | None) -> errors.RunError:
    tiers = [tier for tier in (chosen.local, chosen.persistent) if tier]
    where = " or ".join(os.fspath(tier.directory) for tier in tiers)
    return errors.RunError(
        f"{where} contains the steps of another run, {found!r}, and this run is"
        f" {run!r}; to continue that run, use its name (if the directory was renamed,"
        " rename it back), otherwise save to another directory"
    )
