"""A checkpointer over tiers, with the verbs of Orbax's `training.Checkpointer`.

A save blocks its caller while host memory takes what the devices hold. All else happens
beside the training, in three stages that each do one step at a time:

* commit: hosts write the step to their RAM disks; it exists when all have
* replicate: hosts take copies from each other; then what is not needed any more goes
* back up: hosts write their shares of a checkpoint in persistent storage

A stage that is behind skips steps, and never holds up the training. What fails there is
told as an event and tried again with the next step; the run goes on.
"""

from __future__ import annotations

import dataclasses
import functools
import queue
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

from absl import logging
from orbax.checkpoint import multihost

from elastic_ckpt.checkpoint import components
from elastic_ckpt.checkpoint.described import Described
from elastic_ckpt.checkpoint.hosts import Hosts, HostsFailed
from elastic_ckpt.checkpoint.stage import Stage
from elastic_ckpt.core import errors, events, metrics, storage
from elastic_ckpt.tiers import recovery
from elastic_ckpt.tiers.choices import Local, Persistent

Json = storage.Json


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A step that can be restored.

    Attributes:
      step: the training step.
      save: which save of it.
      metrics: that it was saved with.
    """

    step: int
    save: str
    metrics: Mapping[str, Any] | None = None


class Response:
    """A save under way, as Orbax's `AsyncResponse`."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self.committed = False

    def result(self, timeout: float | None = None) -> bool:
        """Whether the step was committed; waits for that."""
        del timeout
        self._stage.wait()
        return self.committed


class TieredCheckpointer:
    """Saves and restores steps in tiers; every process makes one, alike.

    Not to be called from several threads.

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
        self._commit_stage = Stage("commit")
        self._copy_stage = Stage("replicate")
        self._backup_stage = Stage("back-up")
        self._late: _Saving | None = None
        self._in_backup: int | None = None
        self._copied: int | None = None
        self._latest = self._find(None, [])
        self._save = hosts.first("new_save")

    @property
    def latest(self) -> Checkpoint | None:
        """The newest step that is complete in all tiers together."""
        return self._latest

    @property
    def checkpoints(self) -> list[Checkpoint]:
        """The steps that are complete, ascending, by a look at all tiers."""
        self.wait()
        return [Checkpoint(**each) for each in self._hosts.first("complete_steps")]

    def should_save(self, step: int) -> bool:
        """Whether a tier is due at `step`, or the job is about to be preempted."""
        self._flush()
        if self._latest is not None and step <= self._latest.step:
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
          overwrite: saves a step anew that is there.
          metrics: by which retention may rank it.
          custom_metadata: goes into the persistent checkpoint.

        Returns:
          None if no tier is due, or the step is there.

        Raises:
          CheckpointError: if a leaf cannot be saved.
        """
        if self._latest is not None and step <= self._latest.step and not overwrite:
            return None
        if not (force or overwrite or self.should_save(step)):
            return None
        self._commit_stage.wait()
        self._flush()
        self._emit("save_started", step=step)
        trees, stateful = components.split(checkpointables)
        directory = self._hosts.capture(step, self._save, trees)
        saving = _Saving(
            step=step,
            save=self._save,
            began_secs=time.monotonic(),
            components=sorted(stateful),
            write_components=components.begin_save(
                stateful, lambda name: storage.make_directory(f"{directory}/{name}")
            ),
            back_up=self._persistent is not None
            and (force or self._is_backup_due(step)),
            response=Response(self._commit_stage),
            described=None
            if self._persistent is None
            else Described.of(
                trees, stateful, metrics=metrics, custom_metadata=custom_metadata
            ),
        )
        self._commit_stage.start(functools.partial(self._commit, saving))
        return saving.response

    def save_checkpointables(
        self, step: int, checkpointables: Mapping[str, Any], **options: Any
    ) -> bool:
        """As `save_checkpointables_async`, and waits until the step is committed."""
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
        """As `save_async`, and waits until the step is committed."""
        response = self.save_async(step, state, **options)
        return response is not None and response.result()

    def load_checkpointables(
        self, step: int | None, abstract_checkpointables: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Restores pytrees and components, from the nearest good copies.

        Args:
          step: None takes the newest complete one; if it proves to be unreadable, the
            one before.
          abstract_checkpointables: by name, trees of what is wanted (see
            `tiers.trees.wanted`) and components, which go there. What was saved besides
            is left alone.

        Raises:
          CheckpointError: if there is no such step, or no good copy of a part of it.
        """
        self.wait()
        began_secs = time.monotonic()
        trees, stateful = components.split(abstract_checkpointables)
        without: list[list[Any]] = []
        while True:
            found = self._find(step, without)
            if found is None:
                raise errors.CheckpointError(
                    "no step is complete in any tier; the events step_passed_over say"
                    " what is missing, or start anew"
                )
            place = (found.step, found.save)
            try:
                self._hosts.all("open_step", *place)
                self._check(trees, stateful)
                said = self._hosts.all("read")
                directories = {
                    name: self._hosts.all("materialise", name)[self._hosts.own]
                    for name in stateful
                }
            except HostsFailed as error:
                if step is not None:
                    raise
                without.append(list(place))
                self._emit("step_passed_over", step=found.step, why=str(error))
                continue
            break
        bad = [each for of in self._hosts.all("bad_copies") for each in of]
        repaired = [each for of in self._hosts.all("repair", bad) for each in of]
        for name, component in stateful.items():
            components.load(component, directories[name])
        restored = {**self._hosts.arrays(trees), **stateful}
        self._hosts.all("forget_read")
        for each in bad:
            where = f"host {each['host']}, {each['tier']} tier"
            logging.warning("%s: %s %s", where, each["name"], each["why"])
        self._tell_restored(found.step, said, num_bad=len(bad), repaired=len(repaired))
        metrics.CHECKPOINT_LOAD.record(time.monotonic() - began_secs)
        self._save = self._hosts.first("new_save")
        self._latest = found
        # Hosts have come and gone: what they hold is shared out anew.
        self._copy_stage.start(functools.partial(self._replicate, *place))
        return restored

    def load(
        self,
        step: int | None,
        abstract_state: Any,
        *,
        checkpointable_name: str = "state",
    ) -> Any:
        """Restores one pytree; otherwise as `load_checkpointables`."""
        wanted = {checkpointable_name: abstract_state}
        return self.load_checkpointables(step, wanted)[checkpointable_name]

    def is_saving_in_progress(self) -> bool:
        """Whether a step is being committed."""
        return not self._commit_stage.idle

    def wait(self) -> None:
        """Returns when all stages are done, with a late backup too."""
        self._commit_stage.wait()
        self._backup_stage.wait()
        late, self._late = self._late, None
        if late is not None:
            self._back_up(late)
        self._copy_stage.wait()
        self._flush()

    def close(self) -> None:
        """Waits for all stages, and lets go of the hosts; what they hold stays."""
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

    def _is_backup_due(self, step: int) -> bool:
        if self._persistent is None:
            return False
        # What is in RAM goes with the machines.
        preempted = multihost.reached_preemption(step)
        return step % self._persistent.every == 0 or preempted

    def _check(self, trees: Mapping[str, Any], names: Mapping[str, Any]) -> None:
        try:
            self._hosts.check(trees, sorted(names))
        except HostsFailed as error:
            # An older step would not have it either: it is asked for the wrong thing.
            raise errors.CheckpointError(next(iter(error.of_host.values()))) from None

    def _find(self, step: int | None, without: list[list[Any]]) -> Checkpoint | None:
        outcome = self._hosts.first("find", step, without)
        for passed_over, why in outcome["passed_over"]:
            self._emit("step_passed_over", step=passed_over, why=why)
        found = outcome["found"]
        return None if found is None else Checkpoint(**found)

    def _commit(self, saving: _Saving) -> None:
        place = (saving.step, saving.save)
        problem = None
        try:
            saving.write_components()
        except (errors.ElasticCkptError, OSError) as error:
            problem = str(error)
        try:
            said = self._hosts.all("write", *place, saving.components, problem)
            parts = components.numbered([each["files"] for each in said])
            self._hosts.all("commit", *place, parts)
        except HostsFailed as error:
            self._hosts.all("abandon", *place)
            self._tell_degraded("local", saving.step, f"it was not saved: {error}")
            return
        self._latest = Checkpoint(step=saving.step, save=saving.save)
        saving.response.committed = True
        secs = time.monotonic() - saving.began_secs
        metrics.CHECKPOINT_SAVE.record(secs)
        self._tell("saved", step=saving.step, secs=secs)
        self._begin_stages(saving)

    def _begin_stages(self, saving: _Saving) -> None:
        # What one process begins, all have to: they agree on it.
        said = self._hosts.all("say", [self._copy_stage.idle, self._backup_stage.idle])
        can_copy, can_back_up = (all(of) for of in zip(*said, strict=True))
        place = (saving.step, saving.save)
        if saving.back_up or self._late is not None:
            if can_back_up:
                self._late, self._in_backup = None, saving.step
                self._backup_stage.start(functools.partial(self._back_up, saving))
            else:
                self._late = saving
                why = f"the backup of step {self._in_backup} is not done; it comes next"
                self._tell_degraded("persistent", saving.step, why)
        if can_copy:
            self._copy_stage.start(functools.partial(self._replicate, *place))
        else:
            self._tell_degraded("peer", saving.step, "copying is behind; it is skipped")

    def _replicate(self, step: int, save: str) -> None:
        began_secs = time.monotonic()
        try:
            said = self._hosts.all("replicate", step, save)
        except HostsFailed as error:
            self._tell_degraded("peer", step, str(error))
            return
        problems = list(dict.fromkeys(why for each in said for why in each["problems"]))
        for why in problems:
            self._tell_degraded("peer", step, why)
        self._tell(
            "replicated",
            step=step,
            copies=sum(each["copies"] for each in said),
            bytes=sum(each["bytes"] for each in said),
            secs=time.monotonic() - began_secs,
        )
        if not any(each["diverged"] for each in said):
            self._copied = step
            late = None if self._late is None else self._late.step
            in_flight = [each for each in (self._in_backup, late) if each is not None]
            self._hosts.all("collect", step, save, in_flight)

    def _back_up(self, saving: _Saving) -> None:
        step, place = saving.step, (saving.step, saving.save)
        described = saving.described
        assert described is not None
        began_secs = time.monotonic()
        try:
            chunks = self._hosts.first("chunk_shapes", *place)
            names = described.names(chunks)
            said = self._hosts.all("back_up", *place, names)
            files = described.files(chunks)
            self._hosts.first("commit_backup", *place, names, files)
        except HostsFailed as error:
            # The next step that is committed is backed up in its place.
            self._late = saving
            self._tell_degraded("persistent", step, f"not backed up: {error}")
        else:
            self._tell(
                "backed_up",
                step=step,
                bytes=sum(each["bytes"] for each in said),
                secs=time.monotonic() - began_secs,
            )
        finally:
            self._in_backup = None

    def _tell_restored(
        self, step: int, said: list[Any], *, num_bad: int, repaired: int
    ) -> None:
        total = {
            f"{near}_bytes": sum(each["read_bytes"].get(near, 0) for each in said)
            for near in recovery.NEARNESS
        }
        self._emit(
            "restored_from", step=step, **total, bad_copies=num_bad, repaired=repaired
        )

    def _tell_degraded(self, tier: str, step: int, why: str) -> None:
        logging.warning("step %d, %s tier: %s", step, tier, why)
        self._tell("degraded", tier=tier, step=step, why=why)

    def _tell(self, name: str, **fields: Json) -> None:
        self._told.put((name, fields))

    def _flush(self) -> None:
        # Listeners are called in the caller's thread alone.
        while not self._told.empty():
            name, fields = self._told.get()
            self._emit(name, **fields)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Saving:
    step: int
    save: str
    began_secs: float
    components: list[str]
    write_components: Callable[[], None]
    back_up: bool
    response: Response
    described: Described | None
