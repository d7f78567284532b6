"""The stages of a save: background threads that each process one step at a time.

* commit: hosts write the step to their RAM disks; it exists once all have written it
* replicate: hosts copy parts from each other and remove steps that are not needed
* back up: hosts write their shares of a checkpoint to persistent storage

Without a local tier, there is one stage: hosts write their shares to persistent storage
from the captured memory, and the step exists once all have written their shares.

A save waits until the previous one is committed. Late copies and backups never delay
training; they skip steps instead. The newest waiting step replaces earlier ones and is
processed when another step is saved or the run ends. After a failure, which is
reported, a step is retried at the same times. A step that is due to be saved to storage
but does not fit into RAM is uploaded from the captured memory; until that is done, no
other step is committed.

After a restore, the stages first make the copies and the backup of the restored step,
unless earlier worlds already did.

Every process of a world runs the same stages in the same order. When a save begins,
hosts exchange all facts that depend on time, such as whether a stage is idle.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import threading
import time
from collections.abc import Callable, Sequence
from concurrent import futures
from typing import Any, TypeVar

from absl import logging

from elastic_ckpt.checkpoint.host.answers import CheckpointMetadata
from elastic_ckpt.checkpoint.host.backup import HostBackup
from elastic_ckpt.checkpoint.host.copies import HostCopies
from elastic_ckpt.checkpoint.host.reader import HostReader
from elastic_ckpt.checkpoint.host.saver import HostSaver, Written, lacking_room
from elastic_ckpt.checkpoint.host.world import HostWorld
from elastic_ckpt.checkpoint.hosts import Hosts
from elastic_ckpt.checkpoint.run_world import RunWorld
from elastic_ckpt.checkpoint.saving import CapturedStep
from elastic_ckpt.checkpoint.schedule import BackupClock
from elastic_ckpt.checkpoint.structure import StepDescription
from elastic_ckpt.core import (
    background,
    clock,
    digest,
    errors,
    events,
    metrics,
    storage_cause,
)
from elastic_ckpt.steps.manifest import Contents
from elastic_ckpt.steps.step import Line, StepId
from elastic_ckpt.tiers.choices import Chosen
from elastic_ckpt.tiers.persistent.claims import WriteClaim

T = TypeVar("T")
_NOT_REMOVED = "older steps were not removed"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Readiness:
    """A process's report to the other processes when a save begins.

    Attributes:
      metrics: the step's metrics, as JSON; None if there are none. Host 0's are saved.
      custom_metadata: the user's metadata, as JSON; None if there is none. Host 0's is
        saved.
      kinds_digest: the digest of `CapturedStep.kinds`, which must be the same on all
        hosts.
      can_copy: whether the process can begin to make copies, because none are being
        made; a stage begins when all processes can begin it.
      can_back_up: whether the process can begin a backup, because none is being made.
      is_time: whether a backup is due by the clock; host 0 decides.
      is_behind: whether storage lacks a step that was due; host 0 decides.
    """

    metrics: str | None
    custom_metadata: str | None
    kinds_digest: str
    can_copy: bool
    can_back_up: bool
    is_time: bool
    is_behind: bool


class Stage:
    """Runs one piece of work at a time, in a thread.

    The thread is a daemon, so that a process does not wait for lost hosts when it
    exits.

    Attributes:
      doing: the future of the last work; empty after `wait`.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self.doing: list[futures.Future[Any]] = []

    @property
    def idle(self) -> bool:
        """Whether the stage has finished all of its work."""
        return all(each.done() for each in self.doing)

    def start(self, work: Callable[[], T]) -> futures.Future[T]:
        """Starts `work` once the previous work has finished or failed."""
        before = self.doing

        def next_work() -> T:
            background.wait(before)
            return work()

        doing = background.in_thread(next_work, name=self._name)
        self.doing = [doing]
        return doing

    def wait(self) -> None:
        """Waits until the work has finished or failed."""
        background.wait(self.doing)
        # Drops the results, unless the wait was interrupted (Ctrl-C).
        self.doing = []


class SaveStages:
    """Takes captured steps through their stages.

    Args:
      hosts: the hosts of the world.
      chosen: the tiers.
      clock: the clock for backups that are due by time.
      world: this world's place in the run.
      emit: a function called for each event, in the stages' threads.
      write_claim: the run's write claim; None if this process does not write to
        storage.

    Attributes:
      committed: the newest step that these stages have committed; None before the first
        commit and after a restore.
    """

    def __init__(
        self,
        hosts: Hosts,
        chosen: Chosen,
        *,
        clock: BackupClock,
        world: RunWorld,
        emit: events.Emit,
        write_claim: WriteClaim | None,
    ) -> None:
        self.committed: CheckpointMetadata | None = None
        self._hosts, self._emit, self._write_claim = hosts, emit, write_claim
        self._clock, self._world = clock, world
        self._in_ram = chosen.local is not None
        self._tier = "local" if self._in_ram else "persistent"
        self._has_storage = chosen.persistent is not None
        peers = chosen.peers
        self._makes_copies = hosts.num_hosts > 1 and bool(peers and peers.copies)
        self.committing = Stage("commit")
        self._copy_stage, self._backup_stage = Stage("replicate"), Stage("back-up")
        # The first save does not wait for the removal of leftovers, but it does wait
        # until it is known whether earlier worlds left copies or a backup undone.
        self._cleaning, self._looking = Stage("clean"), Stage("look")
        # The steps that are due to be saved to storage but are not there. RAM keeps
        # only the newest: once it or a later step is backed up, no earlier one is due.
        self._lock = threading.Lock()
        self._due: set[StepId] = set()
        self._newest: CapturedStep | None = None
        # Why each step is not in storage; the newest failure of storage itself; and
        # when storage began to fail.
        self._why: dict[int, str] = {}
        self._failure = ""
        self._failing_secs: float | None = None
        self._uploading: StepId | None = None
        # The newest step, if copying it has not begun; and the newest step with copies.
        self._uncopied: CheckpointMetadata | None = None
        self._covered: StepId | None = None
        # The steps that are pinned or being read on any machine.
        self._preserved: tuple[int, ...] = ()
        # The copy shortfalls that were last reported; and a countdown by saves: a save
        # without copies is reported only while it is 0.
        self._lacking: set[str] = set()
        self._num_uncopied = 0
        # Removes leftovers of crashed worlds; None once done.
        self._clean: Callable[[], None] | None = None
        # Set once a later launch has continued the run.
        self._replaced: errors.ReplacedError | None = None
        # Whether a stage failed with an error that did not come from a host's report,
        # and no save has succeeded since.
        self._is_broken = False
        # Whether the next committed step is the first of a line.
        self._begins_line = False

    def go_on_from(self, restored: StepId | None) -> None:
        """Records that a step was restored; retains it until a newer one has copies."""
        self.committed = self._uncopied = None
        self._covered, self._begins_line = restored, True
        step = 0 if restored is None else restored.step
        with self._lock:
            self._due = {each for each in self._due if each.step <= step}
        if self._newest is not None and self._newest.step > step:
            self._newest = None

    def claim(self, line: Line) -> int:
        """Records the line for later saves; returns the world number."""
        number = 0 if self._write_claim is None else self._write_claim.claim(line)
        self._begins_line = False
        return number

    def check(self) -> None:
        """Raises a ReplacedError if a later launch has continued the run."""
        if self._replaced is not None:
            raise self._replaced

    def begin(self, saving: CapturedStep) -> futures.Future[bool]:
        """Starts to commit a step once the previous one is done.

        Returns:
          A future whose result is True if the step was committed and False if the save
          was abandoned.
        """
        return self._start(
            self.committing,
            self._tier,
            saving.step,
            functools.partial(self._commit, saving),
        )

    def clean(self, step_id: StepId) -> None:
        """Starts to remove leftovers of crashed worlds from persistent storage.

        If storage is unreachable, the next backup does this.

        Args:
          step_id: the number of the step that the world resumes from, with the name of
            the save to which the world saves its own steps.
        """
        step, restored = step_id.step, self._covered

        def clean() -> None:
            removed = self._hosts.first(HostBackup.clean, step_id.save, restored)
            self._clean = None
            for number, path in removed:
                self._emit("step_interrupted", step=number, path=path, resume_step=step)

        self._clean = clean
        if self._write_claim is not None and self._write_claim.number:
            what = "leftovers were not removed: "
            self._start(self._cleaning, "persistent", step, clean, what)

    def catch_up(self, restored: CheckpointMetadata) -> None:
        """Starts the work that earlier worlds left unfinished.

        The restored step may lack copies, and steps that were due to be saved to
        storage may not have been backed up, because an earlier world ended or was
        killed. This world makes the restored step's copies, then its backup.
        """
        step_id = restored.step_id

        def look() -> None:
            # Hosts that lack a part of the step learn which hosts have it.
            if not all(self._hosts.all(HostReader.hold, step_id)):
                return
            self._start(
                self._copy_stage,
                "peer",
                restored.step,
                functools.partial(self._make_copies, restored),
            )
            if self._has_storage:
                owed = self._hosts.first(HostBackup.owed, step_id)
                if owed is not None:
                    self._add_due(step_id)
                    self._begin_backup(
                        CapturedStep(
                            step_id=step_id,
                            description=StepDescription.from_contents(owed),
                            began_secs=clock.monotonic(),
                        )
                    )

        if self._in_ram and step_id.save:
            self._start(
                self._looking,
                "peer",
                restored.step,
                look,
                "work that earlier worlds left undone was not finished: ",
            )

    def end(self) -> None:
        """Waits for all stages.

        Raises:
          NotStoredError: if storage lacks a step that was due.
        """
        self.wait()
        # Clears the due steps, so that a second call does not raise an error.
        late, due, self._due = self._newest, sorted(self._due), set()
        if not due:
            return
        newest, several = due[-1], ""
        if due[1:]:
            several = f" (like {len(due) - 1} before it, from step {due[0].step} on)"
        remedy = "restart the run while the step is still in the hosts' RAM"
        if late is None or late.step_id < newest:
            remedy = (
                "save the step again, because no tier has it, and a restarted run would"
                " resume from the newest saved step"
            )
        why = self._why.get(newest.step, self._failure) or "its backup was not made"
        advice = storage_cause.advice(why)
        if advice not in why:
            remedy = f"{advice}, and {remedy}"
        raise errors.NotStoredError(
            f"step {newest.step} was due in persistent storage but is not there"
            f"{several}: {why}; {remedy}"
        )

    def wait(self) -> None:
        """Waits until all stages are done, including late copies and a late backup."""
        for stage in (
            self.committing,
            self._cleaning,
            self._looking,
            self._backup_stage,
            self._copy_stage,
        ):
            stage.wait()
        self.check()
        if self._is_broken:  # Hosts may be gone.
            return
        late = self._late
        if late is not None:
            logging.warning("making the late backup of step %d now", late.step)
            # Its parts may be only on peers that hosts still skip after a failure.
            clock.sleep(max(self._hosts.all(HostWorld.secs_until_peers_are_asked)))
            self._begin_backup(late)
            self._backup_stage.wait()
        self._copy()
        self._copy_stage.wait()
        self.check()

    @property
    def _late(self) -> CapturedStep | None:
        # The step in RAM that is waiting for its backup or is being uploaded.
        late = self._newest
        if late is None or not any(each <= late.step_id for each in [*self._due]):
            return None
        return late

    def _add_due(self, step_id: StepId) -> None:
        with self._lock:
            self._due.add(step_id)
        self._record(metrics.CHECKPOINT_BACKLOG, len(self._due))

    def _copy(self) -> None:
        # Starts to copy the newest step, unless that was started before.
        committed, self._uncopied = self._uncopied, None
        if committed is None:
            return

        def replicate() -> None:
            if self._make_copies(committed):
                self._covered = committed.step_id
            self._collect(committed)

        self._start(self._copy_stage, "peer", committed.step, replicate)

    def _start(
        self, stage: Stage, tier: str, step: int, work: Callable[[], T], what: str = ""
    ) -> futures.Future[T]:
        # Reports a stage's error in an event and in the save's response; training does
        # not get it.
        def guarded() -> T:
            try:
                return work()
            except errors.ReplacedError as error:
                self._is_broken, self._replaced = True, error
                raise
            except Exception as error:
                self._is_broken |= not isinstance(error, errors.HostsFailedError)
                why = str(error)
                if not isinstance(error, errors.ElasticCkptError):
                    logging.exception("step %d, %s tier", step, tier)
                    why = f"{error!r}; see this host's log"
                self._why[step] = why
                self._degraded(tier, step, what + why)
                raise

        return stage.start(guarded)

    def _commit(self, saving: CapturedStep) -> bool:
        self._looking.wait()
        hosts = self._hosts
        # Also serves as a barrier: while a host is capturing, others on its machine
        # wait.
        of_hosts = hosts.gather(
            "ready",
            Readiness(
                metrics=saving.description.contents.metrics,
                custom_metadata=saving.description.contents.custom_metadata,
                kinds_digest=digest.json_digest({**saving.kinds}),
                can_copy=self._copy_stage.idle,
                can_back_up=self._backup_stage.idle,
                is_time=self._clock.is_due(),
                is_behind=bool(self._due),
            ),
        )
        ready = dataclasses.replace(
            of_hosts[0],
            can_copy=all(each.can_copy for each in of_hosts),
            can_back_up=all(each.can_back_up for each in of_hosts),
        )
        saving = dataclasses.replace(
            saving,
            description=saving.description.changed(
                metrics=ready.metrics, custom_metadata=ready.custom_metadata
            ),
            back_up=saving.back_up or (ready.is_time and self._has_storage),
        )
        if saving.back_up:
            self._add_due(saving.step_id)
        difference = saving.difference(hosts, [each.kinds_digest for each in of_hosts])
        if difference is None:
            saving.compare_components(self._emit)
            saving, left_out = saving.complete(hosts)
            for name, why in left_out.items():
                why = f"it is saved without the optional component {name!r}: {why}"
                self._degraded(self._tier, saving.step, why)
        # All hosts find the same difference, so only one host reports it.
        problem = saving.write_files() or (None if hosts.own else difference)
        try:
            components = tuple(saving.description.contents.components)
            written = hosts.all(HostSaver.write, saving.step_id, components, problem)
            return self._keep(saving, written, ready)
        except errors.HostsFailedError as error:
            return self._give_up(saving, f"it was not saved: {error}")

    def _keep(
        self, saving: CapturedStep, written: Sequence[Written], ready: Readiness
    ) -> bool:
        # Commits the parts that hosts have written; returns whether the step is
        # committed.
        self._preserved = tuple({n for each in written for n in each.preserved})
        contents = saving.contents(written, is_due=saving.back_up or ready.is_behind)
        differing = saving.diverged(self._hosts, written)
        if differing is not None:
            return self._give_up(saving, differing)
        files: dict[str, tuple[int, ...]] = {}
        for number, each in enumerate(written):
            files |= {path: (*files.get(path, ()), number) for path in each.files}
        commit = functools.partial(
            self._hosts.all, HostSaver.commit, saving.step_id, contents, files
        )
        full = {n: each.problem for n, each in enumerate(written) if each.problem}
        full = full or lacking_room(written)
        if full:
            if self.committed is not None and ready.can_copy:
                # Older steps may be kept only because newer ones lack copies.
                self._covered = None
                self._collect(self.committed)
            why = errors.HostsFailedError(full)
            is_last = saving.is_last_of_world and self._has_storage
            # The step replaces earlier due steps, unless one of them is being uploaded.
            is_late = ready.is_behind and ready.can_back_up
            if not (saving.back_up or is_last or is_late):
                return self._give_up(saving, f"it was not saved: {why}")
            self._degraded("local", saving.step, f"{why}; it goes straight to storage")
        if full or not self._in_ram:
            return self._store(saving, contents, functools.partial(commit, False))
        commit(True)
        self._note_committed(saving, contents)
        self._uncopied = self.committed
        if saving.is_copied_at_once:
            self._copy()
            self._copy_stage.wait()
        elif not saving.is_last_of_world:
            self._begin_others(saving, ready)
        return True

    def _give_up(self, saving: CapturedStep, why: str) -> bool:
        self._why[saving.step] = why
        self._degraded(self._tier, saving.step, why)
        self._hosts.all(HostSaver.abandon, saving.step_id)
        return False

    def _store(
        self, saving: CapturedStep, contents: Contents, hold: Callable[[], object]
    ) -> bool:
        # Uploads one step at a time from the captured memory, which `hold` retains.
        self._backup_stage.wait()
        self._cleaning.wait()
        self._add_due(saving.step_id)
        is_stored = self._upload(saving, hold)
        if is_stored:
            self._clock.begin_again()
            self._note_committed(saving, contents)
        self._hosts.all(HostSaver.abandon, saving.step_id)
        return is_stored

    def _note_committed(self, saving: CapturedStep, contents: Contents) -> None:
        self.committed = CheckpointMetadata(
            step=saving.step,
            save=saving.step_id.save,
            line=saving.step_id.after(saving.line.parents),
            path=saving.path,
            metrics=saving.description.metrics,
            custom_metadata=saving.description.custom_metadata,
            commit_timestamp_nsecs=1_000_000 * contents.time_ms,
        )
        # If the step is not in RAM, there is nothing to copy.
        self._uncopied, self._is_broken = None, False
        secs = clock.monotonic() - saving.began_secs
        metrics.CHECKPOINT_SAVE.record(secs)
        self._emit("saved", step=saving.step, secs=secs)
        # Records the new line, in case all memory is lost before the line's first
        # backup. An overwritten step stays valid until its own backup, which is due
        # immediately.
        if self._begins_line and not saving.overwrite:
            self._attempt(
                "persistent",
                saving.step,
                "steps that the run abandoned may still be used",
                functools.partial(self.claim, saving.line),
            )

    def _begin_others(self, saving: CapturedStep, ready: Readiness) -> None:
        # Slow copies are reported once, and then again only after copies of two
        # successive saves were started in time.
        self._num_uncopied = max(self._num_uncopied - 1, 0)
        if ready.can_copy:
            self._copy()
        elif self._makes_copies:
            if not self._num_uncopied:
                why = (
                    "copies of an earlier step are not done, so this step is not copied"
                    " yet"
                )
                self._degraded("peer", saving.step, why)
            self._num_uncopied = 3
        if ready.can_back_up and (saving.back_up or ready.is_behind):
            self._begin_backup(saving)
        elif saving.back_up:
            self._newest = saving
            self._not_taken(
                saving.step,
                "the backup of an earlier step is not done; this step is backed up"
                " next. Save less often, or use faster storage",
            )

    def _make_copies(self, committed: CheckpointMetadata) -> bool:
        # Copies parts of a step between hosts; returns whether all succeeded.
        step, began_secs = committed.step, clock.monotonic()
        try:
            offered = self._hosts.all(HostCopies.offer, committed.step_id)
            targets, shortfalls, num_machines = zip(*offered, strict=True)
            taken = self._hosts.all(HostCopies.take, committed.step_id, targets)
        except errors.HostsFailedError as error:
            self._degraded("peer", step, str(error))
            return False
        problems = [why for each in taken for why in each.problems]
        # A lasting shortfall is reported only once.
        reasons = dict.fromkeys([*itertools.chain(*shortfalls), *problems])
        fresh = [why for why in reasons if why not in self._lacking]
        for why in fresh[: errors.MOST_NAMED]:
            self._degraded("peer", step, why)
        for why in fresh[errors.MOST_NAMED :]:
            logging.warning("step %d, peer tier: %s", step, why)
        self._lacking = set(reasons)
        num_bytes = sum(each.num_bytes for each in taken)
        secs = clock.monotonic() - began_secs
        self._record(metrics.CHECKPOINT_COPY, num_bytes)
        self._record(metrics.CHECKPOINT_COPY_SECS, secs)
        copies = sum(each.copies for each in taken)
        # Does not emit `replicated` for a step without copies, or for copies that a
        # restored step already had.
        is_safe = not problems and min(num_machines) >= 2
        if is_safe and (copies or self.committed is not None):
            self._emit(
                "replicated", step=step, copies=copies, bytes=num_bytes, secs=secs
            )
        return not problems

    def _collect(self, committed: CheckpointMetadata) -> None:
        # Removes older steps; if this step has no copies, keeps the newest step that
        # has.
        late = self._late
        needed = (self._covered, self._uploading, late.step_id if late else None)
        in_flight = tuple(each for each in needed if each is not None)
        self._attempt(
            "local",
            committed.step,
            _NOT_REMOVED,
            lambda: self._hosts.all(
                HostSaver.collect,
                committed.step_id,
                in_flight,
                self._preserved,
                committed.line[:-1],
            ),
        )

    def _begin_backup(self, saving: CapturedStep) -> None:
        # Backs up a step from RAM, once its copies are made.
        self._newest = saving
        self._clock.begin_again()
        self._uploading = saving.step_id
        after = [*self._cleaning.doing, *self._copy_stage.doing]

        def back_up() -> None:
            background.wait(after)
            self._upload(saving)

        self._start(self._backup_stage, "persistent", saving.step, back_up)

    def _upload(
        self, saving: CapturedStep, hold: Callable[[], object] = lambda: None
    ) -> bool:
        # Uploads a step from RAM or from captured memory; returns whether it is stored.
        hosts, step_id, step = self._hosts, saving.step_id, saving.step
        began_secs = clock.monotonic()
        try:
            hold()
            assert self._write_claim is not None
            claim = self._write_claim.check()
            if self._clean is not None:
                self._clean()
            chunks = hosts.first(HostBackup.begin, step_id, claim)
            answers = hosts.all(HostBackup.back_up, step_id, claim)
            files = saving.description.files(chunks)
            why = hosts.first(HostBackup.commit, step_id, files, claim)
        except errors.HostsFailedError as error:
            self._not_taken(step, f"it was not backed up: {error}")
            return False
        finally:
            self._uploading = None
        saving.stored.set()
        self._note_stored(step_id)
        num_bytes = sum(of_host for of_host, _ in answers)
        secs = clock.monotonic() - began_secs
        self._record(metrics.CHECKPOINT_BACKUP, num_bytes)
        self._record(metrics.CHECKPOINT_BACKUP_SECS, secs)
        self._emit(
            "backed_up", step=step, bytes=num_bytes, secs=secs, world=self._world.number
        )
        if why:
            self._degraded("persistent", step, f"{_NOT_REMOVED}: {why}")
        bad = list(dict.fromkeys(why for _, of_host in answers for why in of_host))
        if bad:
            why = f"{errors.first_of(bad)}; it was backed up from other copies"
            self._degraded("local", step, why)
        return True

    def _note_stored(self, step_id: StepId) -> None:
        # Storage has recovered, unless newer steps could not be stored.
        with self._lock:
            stored = {each for each in self._due if each <= step_id}
            self._due -= stored
            self._why = {n: why for n, why in self._why.items() if n > step_id.step}
        self._record(metrics.CHECKPOINT_BACKLOG, len(self._due))
        refused = [each for each in [*self._due] if each.step in self._why]
        if self._failing_secs and not refused:
            secs, self._failing_secs = time.monotonic() - self._failing_secs, None
            self._emit(
                "storage_recovered",
                step=step_id.step,
                cause=storage_cause.of_message(self._failure),
                steps=len(stored),
                secs=secs,
            )

    def _not_taken(self, step: int, why: str) -> None:
        # Storage lacks a step that is due there.
        self._failure = self._why[step] = why
        self._failing_secs = self._failing_secs or time.monotonic()
        self._degraded("persistent", step, why)

    def _attempt(
        self, tier: str, step: int, what: str, call: Callable[[], object]
    ) -> None:
        # Makes a call; if hosts fail, reports the failure and continues.
        try:
            call()
        except errors.HostsFailedError as error:
            self._degraded(tier, step, f"{what}: {error}")

    def _degraded(self, tier: str, step: int, why: str) -> None:
        logging.warning("step %d, %s tier: %s", step, tier, why)
        self._record(metrics.CHECKPOINT_FAILURES, 1)
        storage_cause.report(self._emit, tier, step, why)

    def _record(self, metric: metrics.Metric, value: float) -> None:
        # Only one host records a value that is the same on all hosts.
        if self._hosts.own == 0:
            metric.record(value)
