"""The steps of a run in all tiers: begun, found, restored and removed, by all hosts."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Mapping
from concurrent import futures
from typing import Any

from absl import logging

from elastic_ckpt.checkpoint import (
    component_io,
    replicated_components,
    restore,
    step_errors,
)
from elastic_ckpt.checkpoint import metadata as metadata_of
from elastic_ckpt.checkpoint.host.answers import (
    CheckpointMetadata,
    HostsFailedError,
    SearchOutcome,
)
from elastic_ckpt.checkpoint.host.backup import HostBackup
from elastic_ckpt.checkpoint.host.saver import HostSaver
from elastic_ckpt.checkpoint.host.step_search import StepSearch
from elastic_ckpt.checkpoint.host.world import HostWorld
from elastic_ckpt.checkpoint.hosts import Hosts
from elastic_ckpt.checkpoint.other_layouts import Layouts, StepRestorer
from elastic_ckpt.checkpoint.response import SaveResponse
from elastic_ckpt.checkpoint.run_world import ALONE, RunWorld
from elastic_ckpt.checkpoint.save_stages import SaveStages, Saving
from elastic_ckpt.checkpoint.schedule import BackupClock, Schedule
from elastic_ckpt.checkpoint.step_description import StepDescription
from elastic_ckpt.core import (
    clock,
    errors,
    events,
    metrics,
    storage,
    storage_cause,
    user_json,
)
from elastic_ckpt.steps import best_steps
from elastic_ckpt.steps.line import FROM_SCRATCH, Line
from elastic_ckpt.steps.step_id import StepId
from elastic_ckpt.tiers.choices import Chosen
from elastic_ckpt.tiers.persistent.persistent_root import PersistentRoot


class SavedSteps:
    """The steps of a run; one thread at a time calls it, in all processes alike.

    Args:
      hosts: of the world.
      chosen: the tiers.
      world: among those of the run.
      emit: called for each event, from any thread.
      layouts: read trees of other layouts.
      check_writer: raises an error if another program writes to storage.

    Attributes:
      stages: of the saves that were begun.
      root: of persistent storage; None if there is none.
    """

    def __init__(
        self,
        hosts: Hosts,
        chosen: Chosen,
        *,
        world: RunWorld = ALONE,
        emit: events.Emit,
        layouts: Layouts,
        check_writer: Callable[[], None] = lambda: None,
    ) -> None:
        self._hosts = hosts
        self._restorer = StepRestorer(hosts=hosts, layouts=layouts, emit=emit)
        # Without RAM there is nothing that another world could back up.
        self._is_left = world.is_left if chosen.local is not None else _never
        self._loses_memory = world.loses_memory
        self._emit = emit
        self.root: PersistentRoot | None = None
        clock = BackupClock()
        if chosen.persistent is not None:
            self.root = PersistentRoot.from_path(chosen.persistent.directory)
            clock = _clock(hosts, chosen.persistent.every_minutes)
        self.stages = SaveStages(
            hosts,
            in_ram=chosen.local is not None,
            peers=chosen.peers,
            # Without RAM a save begins the period, not the end of its upload.
            clock=None if chosen.local is None else clock,
            world=world,
            emit=emit,
            check_writer=check_writer,
        )
        self._schedule = Schedule(chosen, clock, agree=functools.partial(_agree, hosts))
        # The line that was saved to last, by this process.
        self._own_line: Line | None = None
        # Whether this process has a state to go on with: it has loaded or saved one.
        self._is_placed = False
        # An older step that was loaded since then; the next save shows whether the
        # training goes on from it. And the newest step, once it does.
        self._looked_at: SearchOutcome | None = None
        self._left_step: int | None = None
        # Components of the step that this process began with which were not loaded.
        self._unloaded: frozenset[str] = frozenset()
        self._claimed = 0
        self._is_anew = False
        self._claims = self.root is not None and world.claimant is not None
        self._go_on_from(restore.find(hosts, None, emit=emit))
        if self.root is not None and not chosen.is_read_only:
            step = 0 if self._restored is None else self._restored.step
            self.stages.clean(StepId(step, self._save))

    @property
    def latest(self) -> CheckpointMetadata | None:
        """The newest step that is complete, in all tiers together."""
        return self.stages.committed or self._restored

    def complete(self) -> list[CheckpointMetadata]:
        """The steps that are complete now, ascending, by a look at all tiers."""
        listed = list(self._hosts.first(StepSearch.complete_steps))
        if self.root is None:
            return listed
        try:
            evaluated = self.evaluations()
        except HostsFailedError as error:
            logging.warning("metrics of evaluations cannot be read: %s", error)
            return listed
        return best_steps.with_evaluations(listed, evaluated)

    def claim(self) -> int:
        """Claims the world; see `Checkpointer.claim_world`."""
        if self._claims and not self._claimed:
            line = self._line
            self._claimed = self.stages.claim(line)
            step = line.parents[-1][0]
            metrics.TRAIN_CLAIM.record(self._claimed)
            self._emit("world_claimed", world=self._claimed, step=step)
        return self._claimed

    def record_metrics(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Records an evaluation; see `Checkpointer.record_metrics`."""
        text = user_json.text_of("metrics", metrics)
        self._check_storage()
        try:
            self._hosts.first(
                HostBackup.record_metrics, StepId(step, self._line.save), text
            )
        except HostsFailedError as error:
            why = f"its metrics were not recorded: {error}"
            cause = storage_cause.of_message(why).name
            self._emit("degraded", tier="persistent", step=step, cause=cause, why=why)

    def evaluations(self) -> dict[int, dict[str, Any]]:
        """The metrics that were recorded; see `Checkpointer.evaluations`."""
        self._check_storage()
        recorded = self._hosts.first(HostBackup.evaluations, self._line)
        return {step: json.loads(text) for step, text in recorded}

    def is_due(self, step: int, *, is_saving: bool) -> bool:
        """Whether a tier is due at `step`, and it is newer than all others.

        Args:
          step: the training step.
          is_saving: whether a save is under way.
        """
        is_behind = self.latest is not None and step <= self.latest.step
        if is_behind and not self._goes_back(step):
            return False
        return self._schedule.is_due(self._current(step), is_saving=is_saving)

    def _is_wanted(self, step: int, *, is_saving: bool) -> bool:
        return self.is_due(step, is_saving=is_saving) or self._is_overdue(
            step, is_saving=is_saving
        )

    def _is_overdue(self, step: int, *, is_saving: bool) -> bool:
        if self.latest is not None and step <= self.latest.step:
            return False
        current = self._current(step)
        return self._schedule.is_backup_due(
            current, is_saving=is_saving, is_left=self._is_left()
        )

    def begin_save(
        self,
        step: int,
        checkpointables: Mapping[str, Any],
        *,
        force: bool,
        overwrite: bool,
        metrics: Mapping[str, Any] | None,
        custom_metadata: Mapping[str, Any] | None,
    ) -> SaveResponse | None:
        """Begins to save a step; see `Checkpointer.save_checkpointables_async`."""
        is_saving = self.stages.is_committing
        self.stages.wait_for_commit()
        self.stages.check()
        self.claim()
        forced = force or overwrite
        goes_back = self._goes_back(step, overwrite=overwrite)
        if goes_back and (forced or self._is_wanted(step, is_saving=is_saving)):
            assert self._looked_at is not None
            self._go_on(self._looked_at)
        line = self._line_for(step, overwrite=overwrite)
        if line is None or not (forced or self._is_wanted(step, is_saving=is_saving)):
            return None
        self._is_placed, self._looked_at = True, None
        if self._left_step is not None and self._restored is not None:
            self._emit("went_back", step=self._left_step, to_step=self._restored.step)
        self._left_step = None
        self._emit("save_started", step=step)
        began_secs = clock.monotonic()
        step_id = StepId(step, line.save)
        trees, stateful = component_io.split(checkpointables)
        self._report_unloaded(stateful)
        description = StepDescription.from_trees(
            trees, stateful, metrics=metrics, custom_metadata=custom_metadata
        )
        current = dataclasses.replace(self._current(step), metrics=description.metrics)
        is_last_of_world = self._is_left()
        back_up = self.root is not None and (
            (forced and not is_last_of_world)
            or self._schedule.is_backup_due(
                current, is_saving=is_saving, is_left=is_last_of_world
            )
        )

        is_shared = False

        def begin() -> Callable[[], None]:
            nonlocal is_shared
            directory, is_shared = self._hosts.capture(step_id, trees)
            return component_io.begin_save(
                stateful, lambda name: storage.make_directory(f"{directory}/{name}")
            )

        write_components, problem = component_io.fail_later(begin)
        comparison = replicated_components.Comparison(step, stateful, emit=self._emit)
        saving = Saving(
            step_id=step_id,
            write_components=write_components,
            back_up=back_up,
            overwrite=overwrite,
            is_last_of_world=is_last_of_world,
            is_copied_at_once=is_last_of_world and self._loses_memory(),
            description=description,
            component_kinds=component_io.kinds(stateful),
            compare=comparison.run,
            optional=component_io.optional(stateful),
            parents=line.parents,
            path=current.path,
            began_secs=began_secs,
        )
        committed = self.stages.begin(saving)
        if is_shared:
            # The caller may donate its arrays from now on.
            futures.wait([committed])
        self._schedule.note_save(current, back_up=back_up)
        if problem is not None:
            raise problem
        return SaveResponse(committed, functools.partial(self._is_stored, saving))

    def load(
        self,
        step: int | CheckpointMetadata | None,
        abstract_checkpointables: Mapping[str, Any] | None,
        *,
        partial: bool = False,
        layout: Any = None,
        go_back: bool | None = None,
    ) -> dict[str, Any]:
        """Restores a step; see `Checkpointer.load_checkpointables`."""
        if isinstance(abstract_checkpointables, CheckpointMetadata):
            abstract_checkpointables = abstract_checkpointables.metadata
        if abstract_checkpointables is not None:
            component_io.check_named(
                abstract_checkpointables,
                "load_checkpointables",
                "load(step, tree) loads",
            )
        if not abstract_checkpointables:
            abstract_checkpointables = {
                name: None
                for name, tree in self.held(step).metadata.items()
                if tree is not None
            }
        search, held, restored = self._restorer.load(
            step, abstract_checkpointables, partial=partial, layout=layout
        )
        if go_back is None:
            # Components were set to the step, and a process without a state has this.
            _, stateful = component_io.split(abstract_checkpointables)
            go_back = True if stateful or not self._is_placed else None
        if go_back or step is None or not self._is_older(search.checkpoint):
            # A step may be loaded in several calls. A process that has a state already
            # may go back with its weights alone.
            unloaded = self._unloaded if self._is_placed else held
            self._unloaded = unloaded - abstract_checkpointables.keys()
            self._go_on(search)
        else:
            self._looked_at = search if go_back is None else None
        return restored

    def _report_unloaded(self, stateful: Mapping[str, Any]) -> None:
        # Data that was forgotten at the load begins anew.
        unloaded = sorted(self._unloaded.intersection(stateful))
        self._unloaded -= frozenset(unloaded)
        step = self._restored.step if self._restored else 0
        for name in unloaded:
            why = (
                f"step {step} has {name!r}, which was not loaded, so the {name!r} that"
                " is saved now does not continue it; unless it is to begin anew, load"
                f" it with the state: load_checkpointables({step}, {{..., {name!r}:"
                " ...})"
            )
            logging.warning("%s", why)
            self._emit("component_not_loaded", step=step, component=name, why=why)

    def _is_older(self, checkpoint: CheckpointMetadata | None) -> bool:
        # Whether newer steps went on from this one.
        latest = self.latest
        if checkpoint is None or latest is None or checkpoint.step >= latest.step:
            return False
        line = Line(save=latest.line[-1][1], parents=latest.line[:-1])
        return not line.abandons(StepId(checkpoint.step, checkpoint.line[-1][1]))

    def _goes_back(self, step: int, *, overwrite: bool = False) -> bool:
        # Whether to save a step shows that training goes on from one that was looked
        # at: newer ones are there, which only then are abandoned.
        if self._looked_at is None or self.latest is None:
            return False
        checkpoint, newest = self._looked_at.checkpoint, self.latest.step
        assert checkpoint is not None
        if overwrite:
            return checkpoint.step <= step < newest
        return checkpoint.step < step <= newest

    def _go_on(self, search: SearchOutcome) -> None:
        # The training goes on from the step that was loaded.
        left = self.latest if self._is_older(search.checkpoint) else None
        self._left_step = None if left is None else left.step
        self._is_placed, self._looked_at, self._own_line = True, None, None
        self._go_on_from(search)
        if self._restored is not None:
            self.stages.catch_up(self._restored, line=self._line)

    def held(self, step: int | CheckpointMetadata | None) -> CheckpointMetadata:
        """The contents of a step; see `Checkpointer.checkpointables_metadata`."""
        search = restore.find(self._hosts, step, emit=self._emit)
        checkpoint = search.checkpoint
        if checkpoint is None:
            raise step_errors.StepNotFoundError(
                search.missing or "no step is complete in any tier; save one"
            )
        return metadata_of.of_step(self._hosts, checkpoint)

    def begin_anew(self) -> None:
        """See `Checkpointer.begin_anew`."""
        newest = self._line.save
        self._own_line, self._looked_at = None, None
        self._unloaded = frozenset()
        self._is_placed = self._is_anew = True
        self._go_on_from(SearchOutcome(newest_save=newest))

    def reload(self) -> None:
        """Searches again for the newest complete step: other programs may write too."""
        if self.stages.committed is not None:
            self._own_line = self._line
        self._looked_at = self._left_step = None
        self._go_on_from(
            restore.find(self._hosts, None, emit=self._emit, own_line=self._own_line)
        )

    def delete(self, step: int, *, missing_ok: bool) -> bool:
        """Removes a step; see `Checkpointer.delete`."""
        was_there = any(self._hosts.all(HostSaver.remove, step))
        if self.root is not None:
            was_there |= self._hosts.first(HostBackup.remove, step)
        if not (was_there or missing_ok):
            raise step_errors.StepNotFoundError(
                f"step {step} is not in any tier; `checkpoints` lists the steps that"
                " are"
            )
        self.reload()
        return was_there

    def is_durable(self, step: int) -> bool:
        """Whether `step` is the newest and in persistent storage."""
        latest = self.latest
        if latest is None or latest.step != step or self.root is None:
            return False
        return self._hosts.first(HostBackup.holds, latest.step_id)

    def _check_storage(self) -> None:
        if self.root is None:
            raise errors.CheckpointError(
                "metrics of evaluations are recorded in persistent storage, and this"
                " checkpointer has none; add Persistent(directory), or pass metrics="
                " when you save"
            )

    def _is_stored(self, saving: Saving) -> bool:
        if not saving.stored.is_set():
            self.stages.wait()
        return saving.stored.is_set()

    def _current(self, step: int) -> CheckpointMetadata:
        # A step as policies see it before it is saved.
        return CheckpointMetadata(
            step=step,
            save=self._save,
            path=None if self.root is None else self.root.final(step),
            commit_timestamp_nsecs=clock.time_ns(),
        )

    @property
    def _line(self) -> Line:
        # The line that the next step is saved to.
        committed = self.stages.committed
        if committed is not None:
            return Line(save=committed.save, parents=committed.line[:-1])
        if self._restored is not None:
            return Line(save=self._save, parents=self._restored.line)
        # A run that is begun again abandons what others may still save to it.
        parents = FROM_SCRATCH if self._claims or self._is_anew else ()
        return Line(save=self._save, parents=parents)

    def _line_for(self, step: int, *, overwrite: bool) -> Line | None:
        # The line that a step is saved to; None if it is behind the latest.
        latest = self.latest
        if latest is None or step > latest.step:
            return self._line
        if not overwrite:
            if step == latest.step or step in [each.step for each in self.complete()]:
                raise step_errors.StepAlreadyExistsError(
                    f"step {step} already exists; save it with overwrite=True, or save"
                    " a later step"
                )
            return None
        if step < latest.step:
            raise errors.CheckpointError(
                f"step {step} cannot be overwritten: only the newest step can, which"
                f" is {latest.step}; to continue from an earlier step, load it with"
                " go_back=True"
            )
        # The old save is of the line: it counts if the new one is cut short.
        after = max(self._save, latest.line[-1][1])
        save = self._hosts.first(HostWorld.new_save, after)
        return Line(save=save, parents=latest.line)

    def _go_on_from(self, search: SearchOutcome) -> None:
        self._restored = search.checkpoint
        self.stages.go_on_from(0 if self._restored is None else self._restored.step)
        # Later saves must not be mixed with earlier ones.
        self._save = self._hosts.first(HostWorld.new_save, search.newest_save)
        self._schedule.go_on_from([] if self._restored is None else [self._restored])


def _clock(hosts: Hosts, every_minutes: float | None) -> BackupClock:
    # Goes on from the backup of another world: worlds may be shorter than the period.
    if every_minutes is None:
        return BackupClock()
    since_secs = hosts.first(HostBackup.secs_since_backup)
    return BackupClock(every_minutes, since_secs=since_secs)


def _never() -> bool:
    return False


def _agree(hosts: Hosts, is_time: bool, skipped: int) -> tuple[bool, int]:
    is_due, num_skipped = hosts.share("due", [is_time, skipped])[0]
    return bool(is_due), int(num_skipped)
