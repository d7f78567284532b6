"""A checkpointer over tiers, with the verbs of Orbax's `training.Checkpointer`."""

from __future__ import annotations

import dataclasses
import os
import queue
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from orbax.checkpoint import multihost

from elastic_ckpt.checkpoint import components, restore
from elastic_ckpt.checkpoint import metadata as metadata_of
from elastic_ckpt.checkpoint.described import Described
from elastic_ckpt.checkpoint.hosts import Hosts
from elastic_ckpt.checkpoint.response import Response
from elastic_ckpt.checkpoint.save_stages import SaveStages, Saving
from elastic_ckpt.checkpoint.step_errors import StepAlreadyExistsError
from elastic_ckpt.core import errors, events, storage
from elastic_ckpt.host import (
    backup_requests,
    read_requests,
    save_requests,
    world_requests,
)
from elastic_ckpt.host.answers import SearchOutcome
from elastic_ckpt.manifests.line import Line
from elastic_ckpt.tiers.choices import Local, Persistent

Json = storage.Json


class TieredCheckpointer:
    """Saves and restores steps in tiers; every process makes one, alike.

    A save blocks its caller while host memory takes what the devices hold. All else
    happens beside the training (`save_stages`). Not to be called from several threads.

    Args:
      hosts: that hold the local tier.
      local: how often to save there.
      persistent: how often to back up; None never does.
      emit: hears what happens, in the caller's thread.
    """

    def __init__(
        self,
        hosts: Hosts,
        *,
        local: Local,
        persistent: Persistent | None,
        emit: events.Emit = events.nobody,
    ) -> None:
        self._hosts = hosts
        self._local = local
        self._persistent = persistent
        self._emit = emit
        self._told: queue.SimpleQueue[tuple[str, dict[str, Json]]] = queue.SimpleQueue()
        minutes = None if persistent is None else persistent.every_minutes
        self._stages = SaveStages(
            hosts,
            back_up_every_secs=None if minutes is None else 60 * minutes,
            tell=self._tell,
        )
        # The line that was saved to last, by this process.
        self._own_line: Line | None = None
        self._go_on_from(restore.find(hosts, None, emit=emit))
        if persistent is not None:
            step = 0 if self._found is None else self._found.step
            self._stages.clean(step, self._save)

    @property
    def latest(self) -> restore.Found | None:
        """The newest step that is complete, in all tiers together."""
        return self._stages.committed or self._found

    @property
    def checkpoints(self) -> list[restore.Found]:
        """The steps that are complete, ascending, by a look at all tiers."""
        self.wait()
        return list(self._hosts.first(read_requests.ListSteps()))

    def should_save(self, step: int) -> bool:
        """Whether a tier is due at `step`, or the job is about to be preempted."""
        self._flush()
        if self.latest is not None and step <= self.latest.step:
            return False
        return step % self._local.every == 0 or self._is_backup_due(step)

    def save_checkpointables_async(
        self,
        step: int,
        checkpointables: Mapping[str, Any],
        *,
        force: bool = False,
        overwrite: bool = False,
        metrics: Mapping[str, Any] | None = None,
        custom_metadata: Mapping[str, Any] | None = None,
    ) -> Response | None:
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
        self._stages.wait_for_commit()
        line = self._line_for(step, overwrite=overwrite)
        if line is None or not (force or overwrite or self.should_save(step)):
            return None
        self._flush()
        self._emit("save_started", step=step)
        began_secs = time.monotonic()
        trees, stateful = components.split(checkpointables)
        described = Described.of(
            trees, stateful, metrics=metrics, custom_metadata=custom_metadata
        )
        directory = self._hosts.capture(step, line.save, trees)
        write_components, problem = components.try_to_save(
            stateful, lambda name: storage.make_directory(f"{directory}/{name}")
        )
        committed = self._stages.begin(
            Saving(
                step=step,
                save=line.save,
                write_components=write_components,
                back_up=self._is_backup_due(step, force=force or overwrite),
                overwrite=overwrite,
                described=described,
                parents=line.parents,
                began_secs=began_secs,
            )
        )
        if problem is not None:
            raise problem
        return Response(committed)

    def save_checkpointables(
        self, step: int, checkpointables: Mapping[str, Any], **options: Any
    ) -> bool:
        """As `save_checkpointables_async`; waits, and says whether it was committed."""
        response = self.save_checkpointables_async(step, checkpointables, **options)
        return response is not None and response.result()

    def save_async(
        self,
        step: int,
        state: Any,
        *,
        checkpointable_name: str = "state",
        **options: Any,
    ) -> Response | None:
        """Saves one pytree; otherwise as `save_checkpointables_async`."""
        return self.save_checkpointables_async(
            step, {checkpointable_name: state}, **options
        )

    def save(self, step: int, state: Any, **options: Any) -> bool:
        """As `save_async`; waits, and says whether it was committed."""
        response = self.save_async(step, state, **options)
        return response is not None and response.result()

    def checkpointables_metadata(
        self, step: int | restore.Found | None = None
    ) -> metadata_of.CheckpointMetadata:
        """What a step holds, by the names of its checkpointables; nothing is loaded.

        Args:
          step: None takes the newest complete one.

        Raises:
          CheckpointError: if there is no such step.
        """
        self.wait()
        found = restore.find(self._hosts, step, emit=self._emit).found
        if found is None:
            raise errors.CheckpointError("no step is complete in any tier; save one")
        return metadata_of.of_step(self._hosts, found, self._storage_directory)

    def metadata(
        self,
        step: int | restore.Found | None = None,
        *,
        checkpointable_name: str = "state",
    ) -> metadata_of.CheckpointMetadata:
        """What one pytree of a step holds; otherwise as `checkpointables_metadata`."""
        held = self.checkpointables_metadata(step)
        if checkpointable_name not in held.metadata:
            raise errors.CheckpointError(
                f"step {held.step} has no {checkpointable_name!r}; it has"
                f" {sorted(held.metadata)}"
            )
        return dataclasses.replace(held, metadata=held.metadata[checkpointable_name])

    def load_checkpointables(
        self,
        step: int | restore.Found | None = None,
        abstract_checkpointables: Mapping[str, Any] | None = None,
        *,
        partial: bool = False,
    ) -> dict[str, Any]:
        """Restores pytrees and components, from the nearest good copies.

        Args:
          step: None takes the newest complete one; if it proves to be unreadable, the
            one before.
          abstract_checkpointables: by name, trees of what is wanted (`asked_trees`) and
            components, which move there. What was saved under other names is left
            alone. None in the place of a tree takes it as it was saved; None for all
            takes all trees so. Then an array is under the sharding that it had, if its
            devices are there, otherwise whole on a device of each host.
          partial: whether trees may lack leaves that were saved.

        Raises:
          CheckpointError: if there is no such step, it is of another model, or no good
            copy of a part of it is left.
        """
        self.wait()
        if isinstance(abstract_checkpointables, metadata_of.CheckpointMetadata):
            abstract_checkpointables = abstract_checkpointables.metadata
        if not abstract_checkpointables:
            held = self.checkpointables_metadata(step).metadata
            abstract_checkpointables = {
                name: None for name, tree in held.items() if tree is not None
            }
        self._own_line = None
        search, restored = restore.restore(
            self._hosts,
            step,
            abstract_checkpointables,
            partial=partial,
            directory=self._storage_directory,
            emit=self._emit,
        )
        self._go_on_from(search)
        return restored

    def load(
        self,
        step: int | restore.Found | None = None,
        abstract_state: Any = None,
        *,
        checkpointable_name: str = "state",
        partial: bool = False,
    ) -> Any:
        """Restores one pytree; otherwise as `load_checkpointables`."""
        wanted = {checkpointable_name: abstract_state}
        restored = self.load_checkpointables(step, wanted, partial=partial)
        return restored[checkpointable_name]

    def reload(self) -> None:
        """Looks again for the newest complete step: others may have written one."""
        self.wait()
        if self._stages.committed is not None:
            self._own_line = self._line
        self._go_on_from(
            restore.find(self._hosts, None, emit=self._emit, own_line=self._own_line)
        )

    def delete(self, step: int | restore.Found, *, missing_ok: bool = False) -> bool:
        """Removes a step from the RAM of all hosts and from persistent storage.

        Args:
          step: the training step, in every save of it.
          missing_ok: whether there may be no such step.

        Returns:
          Whether there was one.

        Raises:
          CheckpointError: if there was none.
        """
        self.wait()
        number = step.step if isinstance(step, restore.Found) else step
        was_there = any(self._hosts.all(save_requests.RemoveStep(step=number)))
        if self._persistent is not None:
            was_there |= self._hosts.first(backup_requests.RemoveBackup(step=number))
        if not (was_there or missing_ok):
            raise errors.CheckpointError(
                f"step {number} is in no tier; `checkpoints` lists those that are there"
            )
        self.reload()
        return was_there

    def is_durable(self, step: int) -> bool:
        """Whether `step` is the newest and in persistent storage; waits for backups."""
        self.wait()
        latest = self.latest
        if latest is None or latest.step != step or self._persistent is None:
            return False
        return self._hosts.first(backup_requests.HasBackup(step=step, save=latest.save))

    def is_saving_in_progress(self) -> bool:
        """Whether a step is being committed."""
        return self._stages.is_committing

    def wait(self) -> None:
        """Returns when all that was begun is done, in every tier."""
        self._stages.wait()
        self._flush()

    def close(self) -> None:
        """Waits, and lets go of the hosts; what they hold stays."""
        try:
            self.wait()
        finally:
            self._hosts.close()

    def __enter__(self) -> TieredCheckpointer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
        else:
            # Other hosts may be gone, and would be waited for.
            self._hosts.close()

    @property
    def _storage_directory(self) -> str | None:
        if self._persistent is None:
            return None
        return os.fspath(storage.absolute(self._persistent.directory))

    def _is_backup_due(self, step: int, *, force: bool = False) -> bool:
        if self._persistent is None:
            return False
        if force:
            return True
        # What is in RAM goes with the machines.
        preempted = multihost.reached_preemption(step)
        every = self._persistent.every
        return preempted or (every is not None and step % every == 0)

    @property
    def _line(self) -> Line:
        # That the next step is saved to.
        committed = self._stages.committed
        if committed is not None:
            return Line(save=committed.save, parents=committed.line[:-1])
        parents = () if self._found is None else self._found.line
        return Line(save=self._save, parents=parents)

    def _line_for(self, step: int, *, overwrite: bool) -> Line | None:
        # That a step is saved to; None if it is behind the latest.
        latest = self.latest
        if latest is None or step > latest.step:
            return self._line
        if not overwrite:
            if step == latest.step or step in [each.step for each in self.checkpoints]:
                raise StepAlreadyExistsError(
                    f"step {step} exists already; save it with overwrite=True, or save"
                    " a later step"
                )
            return None
        if step < latest.step:
            raise errors.CheckpointError(
                f"step {step} is not the newest, {latest.step} is, and only the newest"
                " is overwritten; load an earlier step to go on from there"
            )
        # Until the step is complete under the new line, nothing abandons the old save.
        after = max(self._save, latest.line[-1][1])
        save = self._hosts.first(world_requests.NewSave(after=after))
        return Line(save=save, parents=latest.before())

    def _go_on_from(self, search: SearchOutcome) -> None:
        self._found = search.found
        self._stages.go_on_from(0 if self._found is None else self._found.step)
        # What is saved from here on is not to be mixed with what was saved before.
        self._save = self._hosts.first(world_requests.NewSave(after=search.newest_save))

    def _tell(self, name: str, **fields: Json) -> None:
        self._told.put((name, fields))

    def _flush(self) -> None:
        # Listeners are called in the caller's thread alone.
        while not self._told.empty():
            name, fields = self._told.get()
            self._emit(name, **fields)
