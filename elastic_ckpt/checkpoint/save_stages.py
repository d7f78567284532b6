"""The stages of a save: background threads that process one step at a time each.

* commit: hosts write the step to their RAM disks; it exists when all have written it
* replicate: hosts copy parts from each other, and remove steps that are not needed
* back up: hosts write their shares of a checkpoint in persistent storage

Without a local tier there is one stage: hosts write their shares to persistent storage
from the captured memory, and the step exists when all have written theirs.

After a restore, these stages first make the copies of the step, and the newest backup,
that the worlds before could not.

A save waits until the one before is committed. Copies and backups that are late skip
steps, and never delay the training. Failures are reported and retried with the next
step. A step that is due in storage and does not fit into RAM is uploaded from the
captured memory; no other step is committed until that is done.

Every process of a world runs the same stages in the same order. Hosts first exchange
whatever depends on time, such as whether a stage is idle.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from typing import Any, TypeVar

from absl import logging

from elastic_ckpt.checkpoint.due_steps import DueSteps
from elastic_ckpt.checkpoint.host.answers import CheckpointMetadata, Readiness
from elastic_ckpt.checkpoint.host.backup import HostBackup
from elastic_ckpt.checkpoint.host.copies import HostCopies
from elastic_ckpt.checkpoint.host.reader import HostReader
from elastic_ckpt.checkpoint.host.saver import HostSaver
from elastic_ckpt.checkpoint.host.step_notes import StepNotes, WrittenStep
from elastic_ckpt.checkpoint.host.world import HostWorld
from elastic_ckpt.checkpoint.hosts import Hosts
from elastic_ckpt.checkpoint.run_world import ALONE, RunWorld
from elastic_ckpt.checkpoint.saving import Saving
from elastic_ckpt.checkpoint.schedule import BackupClock
from elastic_ckpt.checkpoint.writing import Writing
from elastic_ckpt.core import (
    background,
    clock,
    errors,
    events,
    metrics,
    storage_cause,
)
from elastic_ckpt.steps.step import Line, StepId
from elastic_ckpt.tiers.choices import Peers

T = TypeVar("T")

_NOT_REMOVED = "older steps were not removed"
_NOT_FINISHED = "what earlier worlds have left is not done"


class Stage:
    """Runs one piece of work at a time, in a thread.

    The thread is a daemon: at exit a program must not wait for hosts that are gone.

    Args:
      name: of the thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._doing: futures.Future[Any] | None = None

    @property
    def idle(self) -> bool:
        """Whether it has no work."""
        return self._doing is None or self._doing.done()

    def start(self, work: Callable[[], T]) -> futures.Future[T]:
        """Begins `work` once the work before has ended, also if that failed."""
        before = [] if self._doing is None else [self._doing]

        def next_work() -> T:
            background.wait(before)
            return work()

        doing = background.in_thread(next_work, name=self._name)
        self._doing = doing
        return doing

    def wait(self) -> None:
        """Returns when its work has ended, also if it failed."""
        doing = self._doing
        if doing is not None:
            # After an interruption here (Ctrl-C) it still has its work.
            background.wait([doing])
        if self._doing is doing:
            self._doing = None


class SaveStages:
    """Takes captured steps through their stages.

    Args:
      hosts: of the world.
      in_ram: whether there is a local tier.
      peers: the peer tier; None if there is none.
      clock: of backups.
      world: among those of the run.
      emit: called for each event, in the threads of the stages.
      writing: whether this program may write to storage.
      has_storage: whether there is any.

    Attributes:
      committed: the newest step that was committed here; None before the first, and
        after a restore.
    """

    def __init__(
        self,
        hosts: Hosts,
        *,
        in_ram: bool = True,
        peers: Peers | None = None,
        clock: BackupClock | None = None,
        world: RunWorld = ALONE,
        emit: events.Emit,
        writing: Writing | None = None,
        has_storage: bool = False,
    ) -> None:
        self.committed: CheckpointMetadata | None = None
        self._hosts = hosts
        self._emit = emit
        self._writing = writing
        self._world = world
        # Set once another start of the run has continued it.
        self._replaced: errors.ReplacedError | None = None
        self._in_ram = in_ram
        self._peers = peers
        # How many saves have to get copies until those that get none are reported.
        self._num_uncopied = 0
        self._clock = clock or BackupClock()
        self._commit_stage = Stage("commit")
        self._copy_stage = Stage("replicate")
        self._backup_stage = Stage("back-up")
        # A separate stage: the first save does not wait for it.
        self._clean_stage = Stage("clean")
        self._cleaned: list[futures.Future[None]] = []
        # Looks for a step that a world before owes to storage.
        self._looking: list[futures.Future[None]] = []
        self._due = DueSteps(emit, is_first=hosts.own == 0)
        # What copies lacked, as it was reported.
        self._lacking: set[str] = set()
        # The last step that copies were started for, and the newest that has them.
        self._copied: CheckpointMetadata | None = None
        self._covered: StepId | None = None
        self._preserved: Sequence[int] | None = None
        # Whether a stage failed otherwise than hosts report it, and no save since.
        self._is_broken = False
        # Whether the next step that is committed is the first of a line.
        self._begins_line = False
        # Whether storage is still to have the addresses of this world's agents.
        self._records_agents = in_ram and has_storage

    def go_on_from(self, restored: StepId | None) -> None:
        """Notes that a step was restored: it is kept until a newer one has copies."""
        self.committed, self._covered = None, restored
        self._begins_line = True
        self._due.drop_after(0 if restored is None else restored.step)

    def claim(self, line: Line) -> int:
        """Records the line that is saved to; returns the number of the world."""
        claim = None if self._writing is None else self._writing.claim(line)
        self._begins_line = False
        return 0 if claim is None else claim.number

    def check(self) -> None:
        """Raises a ReplacedError if a stage found that another start continues."""
        if self._replaced is not None:
            raise self._replaced

    @property
    def is_committing(self) -> bool:
        """Whether a step is being committed."""
        return not self._commit_stage.idle

    def begin(self, saving: Saving) -> futures.Future[bool]:
        """Begins to commit a step, when the one before is done.

        Returns:
          A future of True if the step was committed, and False if it was given up.
        """

        def work() -> bool:
            try:
                return self._commit(saving)
            except Exception:
                if saving.back_up:
                    newest = None if self.committed is None else self.committed.step
                    in_ram = self._in_ram and newest == saving.step
                    self._due.add(saving.step_id, in_ram=in_ram)
                raise

        tier = "local" if self._in_ram else "persistent"
        return self._start(self._commit_stage, tier, saving.step, work)

    def clean(self, step_id: StepId) -> None:
        """Begins to remove leftovers of crashed worlds from persistent storage.

        Args:
          step_id: the step.
        """
        step = step_id.step

        def clean() -> None:
            with self._surviving("persistent", step, "leftovers were not removed"):
                for number, path in self._hosts.first(HostBackup.clean, step_id.save):
                    self._emit(
                        "step_interrupted", step=number, path=path, resume_step=step
                    )

        self._cleaned = [self._start(self._clean_stage, "persistent", step, clean)]

    def catch_up(self, restored: CheckpointMetadata, *, line: Line) -> None:
        """Begins to finish what worlds before could not.

        A world that was left or killed may leave the step that is restored with fewer
        copies than it should have, and steps that were due in storage without their
        backup. This world makes the copies, and then the backup of the newest that was
        due.

        Args:
          restored: the step from which this world goes on.
          line: of this world; only steps of it are backed up.
        """
        if not (self._in_ram and restored.save):
            return
        step, self._copied = restored.step, None

        def copy() -> None:
            with self._surviving("peer", step, _NOT_FINISHED):
                # Hosts that have no part of a step learn where the others are.
                if all(self._hosts.all(HostReader.hold, restored.step_id)):
                    self._make_copies(restored, is_late=True)

        owed: list[Saving] = []

        def look() -> None:
            with self._surviving("persistent", step, _NOT_FINISHED):
                owed.extend(self._find_owed(line, before=step + 1))

        def back_up() -> None:
            background.wait(self._looking)
            for saving in owed:
                self._back_up(saving, after=[*self._cleaned, copying])

        copying = self._start(self._copy_stage, "peer", step, copy)
        self._looking = [self._start(Stage("look"), "persistent", step, look)]
        self._start(self._backup_stage, "persistent", step, back_up)

    def wait_for_commit(self) -> None:
        """Returns when the step is committed, or was given up."""
        self._commit_stage.wait()

    def end(self) -> None:
        """Waits; raises a CheckpointError if storage lacks a step that was due."""
        self.wait()
        self._due.check()

    def wait(self) -> None:
        """Returns when all stages are done, with late copies and a late backup too."""
        self._commit_stage.wait()
        self._clean_stage.wait()
        self._backup_stage.wait()
        self._copy_stage.wait()
        self.check()
        if self._is_broken:  # Hosts may be gone.
            return
        late = self._due.take()
        if late is not None:
            logging.warning("the backup of step %d is made now", late.step)
            # It may lack what only a peer has that hosts leave alone for a while.
            clock.sleep(max(self._hosts.all(HostWorld.secs_until_peers_are_asked)))
            work = functools.partial(self._back_up, late)
            self._start(self._backup_stage, "persistent", late.step, work)
            self._backup_stage.wait()
        self._copy_newest()

    def _copy_newest(self) -> None:
        # Returns when the newest step has its copies.
        self._copy_stage.wait()
        if self.committed is not None and self.committed != self._copied:
            background.wait([self._copy()])
            self.check()

    def _copy(self) -> futures.Future[None]:
        assert self.committed is not None
        self._copied = self.committed
        copy = functools.partial(self._replicate, self.committed)
        return self._start(self._copy_stage, "peer", self.committed.step, copy)

    def _start(
        self, stage: Stage, tier: str, step: int, work: Callable[[], T]
    ) -> futures.Future[T]:
        # The training gets the error of a stage only as an event, and through the
        # response of the save.
        def guarded() -> T:
            try:
                return work()
            except errors.ReplacedError as error:
                self._is_broken = True
                self._replaced = error
                raise
            except Exception as error:
                logging.exception("step %d, %s tier", step, tier)
                self._is_broken = True
                named = isinstance(error, errors.ElasticCkptError)
                why = str(error) if named else f"{error!r}; see this host's log"
                self._due.blame(step, why)
                self._degraded(tier, step, why)
                raise

        return stage.start(guarded)

    def _commit(self, saving: Saving) -> bool:
        # Hosts that share a machine leave its cores to those that still capture.
        saving, difference = self._agreed(saving)
        notes, problem = saving.prepare()
        # Of all hosts alike, it is reported by one.
        problem = problem or (difference if self._hosts.own == 0 else None)
        if not self._in_ram:
            self._due.add(saving.step_id, in_ram=False)
        abandon = functools.partial(self._hosts.all, HostSaver.abandon, saving.step_id)
        try:
            names = tuple(saving.description.components)
            written = self._hosts.all(HostSaver.write, saving.step_id, names, problem)
            complete = saving.written(written, notes)
            differing = saving.diverged(self._hosts, written)
            if not self._in_ram:
                stored = self._store(saving, complete, differing)
                abandon()
                return stored
            if differing is not None:
                self._degraded("local", saving.step, differing)
                abandon()
                return False
            self._hosts.all(HostSaver.commit, complete)
        except errors.HostsFailedError as error:
            stored = self._in_ram and self._store_captured(saving, notes, str(error))
            abandon()
            if not stored:
                why = f"it was not saved: {error}"
                if not self._in_ram:
                    self._due.blame(saving.step, why)
                tier = "local" if self._in_ram else "persistent"
                self._degraded(tier, saving.step, why)
            if self._in_ram:
                self._make_room()
            return stored
        self._note_committed(saving, complete.notes)
        self._begin_line(saving)
        if saving.is_copied_at_once:
            self._copy_newest()
        elif not saving.is_last_of_world:
            self._begin_others(saving)
        self._record_agents(saving.step)
        return True

    def _agreed(self, saving: Saving) -> tuple[Saving, str | None]:
        # The step as all hosts save it, with one set of notes and of components; and
        # how hosts differ, if they save different things.
        agreed, difference = saving.agreed(self._hosts)
        if difference is not None:
            return agreed, difference
        saving.compare()
        agreed, left_out = agreed.complete(self._hosts)
        tier = "persistent" if saving.back_up else "local"
        for name, why in left_out.items():
            why = f"it is saved without the optional component {name!r}: {why}"
            self._degraded(tier, saving.step, why)
        return agreed, None

    def _begin_line(self, saving: Saving) -> None:
        # Then storage has the new line even if all memory is lost before its first
        # backup. An overwritten step stays valid until its own backup, due at once.
        if self._begins_line and not saving.overwrite:
            with self._surviving("persistent", saving.step, "old steps may count"):
                self.claim(saving.line)

    def _record_agents(self, step: int) -> None:
        # Once: who follows the run finds its steps in storage meanwhile.
        if self._records_agents:
            self._records_agents = False
            with self._surviving("persistent", step):
                self._hosts.first(HostBackup.record_agents)

    def _note_committed(self, saving: Saving, notes: StepNotes) -> None:
        self.committed = saving.committed(notes.time_ms)
        self._is_broken = False
        secs = clock.monotonic() - saving.began_secs
        metrics.CHECKPOINT_SAVE.record(secs)
        self._emit("saved", step=saving.step, secs=secs)

    def _store_captured(
        self, saving: Saving, notes: StepNotes | None, why: str
    ) -> bool:
        # Backs up a due step without RAM; whether that was done.
        is_time = self._share_readiness()[0].is_time
        is_due = saving.back_up or saving.is_last_of_world
        if not (is_due or is_time or self._due.is_owed):
            return False
        self._due.is_owed = True
        self._due.add(saving.step_id, in_ram=False)
        try:
            written = self._hosts.all(HostSaver.files, saving.step_id)
        except errors.HostsFailedError:
            # A component could not be saved, as `why` reports: storage does not help.
            self._due.blame(saving.step, f"it was not saved: {why}")
            return False
        why += "; it goes to storage without RAM"
        self._degraded("local", saving.step, why)
        differing = saving.diverged(self._hosts, written)
        return self._store(saving, saving.written(written, notes), differing)

    def _store(self, saving: Saving, written: WrittenStep, problem: str | None) -> bool:
        # Uploads a step from the memory that it was captured in.
        # Hosts upload one step at a time.
        self._backup_stage.wait()
        background.wait(self._cleaned)
        if problem is None:
            try:
                self._hosts.all(HostSaver.hold, written)
            except errors.HostsFailedError as error:
                problem = str(error)
        if problem is not None:
            self._not_taken(saving.step, f"it was not backed up: {problem}")
            return False
        if not self._upload(saving):
            return False
        self._due.begin(saving.step_id)
        self._due.end()
        self._clock.begin_again()
        self._note_committed(saving, written.notes)
        # RAM holds nothing of it that could be copied.
        self._copied = self.committed
        self._begin_line(saving)
        self._collect_backups(saving)
        return True

    def _begin_others(self, saving: Saving) -> None:
        readiness = self._share_readiness()
        can_copy = all(each.can_copy for each in readiness)
        can_back_up = all(each.can_back_up for each in readiness)
        # Clocks differ: the clock of host 0 decides.
        is_due = saving.back_up or readiness[0].is_time or self._due.is_owed
        copying = [self._copy()] if can_copy else []
        peers = self._peers
        if peers and (peers.backups or (peers.copies and self._hosts.num_hosts > 1)):
            self._report_uncopied(saving.step, is_copied=can_copy)
        # When their stages are idle, all hosts have the same late step.
        if is_due:
            self._due.add(saving.step_id)
        if can_back_up and (is_due or self._due.is_late):
            self._due.begin(saving.step_id)
            self._clock.begin_again()
            after = [*self._cleaned, *copying]
            back_up = functools.partial(self._back_up, saving, after=after)
            self._start(self._backup_stage, "persistent", saving.step, back_up)
        elif is_due:
            self._due.keep(saving)
            why = "the backup of an earlier step is not done; it comes next"
            why += f"; {storage_cause.advice(why)}"
            self._not_taken(saving.step, why)

    def _report_uncopied(self, step: int, *, is_copied: bool) -> None:
        # Copies that are slower than saves are reported once until they keep up, for
        # two saves.
        if not (is_copied or self._num_uncopied):
            why = "copies of an earlier step are not done; it gets none yet"
            self._degraded("peer", step, why)
        self._num_uncopied = max(self._num_uncopied - 1, 0) if is_copied else 2

    def _make_room(self) -> None:
        # Removes an older step that was kept because newer ones lack copies.
        can_copy = all(each.can_copy for each in self._share_readiness())
        if self.committed is not None and can_copy:
            self._covered = None
            collect = functools.partial(self._collect, self.committed)
            self._start(self._copy_stage, "local", self.committed.step, collect)

    def _share_readiness(self) -> list[Readiness]:
        background.wait(self._looking)
        readiness = Readiness(
            # The first copies wait for those of the step that was restored.
            can_copy=self._copy_stage.idle or self._copied is None,
            can_back_up=not self._due.is_backing_up,
            is_time=self._clock.left_secs() <= 0,
        )
        return self._hosts.share("readiness", readiness)

    def _replicate(self, committed: CheckpointMetadata) -> None:
        if self._make_copies(committed):
            self._covered = committed.step_id
        self._collect(committed)

    def _make_copies(
        self, committed: CheckpointMetadata, *, is_late: bool = False
    ) -> bool:
        # Copies parts of a step between hosts; whether none failed. If a world before
        # has made copies, what the step lacks is not reported, and no copies are no
        # event.
        step, began_secs = committed.step, clock.monotonic()
        self._preserved = None
        try:
            offered = self._hosts.all(HostCopies.offer, committed.step_id)
            senders: list[list[int]] = [[] for _ in offered]
            for number, each in enumerate(offered):
                for target in each.targets:
                    senders[target].append(number)
            answers = self._hosts.all(
                HostCopies.take, committed.step_id, tuple(map(tuple, senders))
            )
            self._hosts.all(HostCopies.end)
        except errors.HostsFailedError as error:
            self._degraded("peer", step, str(error))
            return False
        self._preserved = sorted({n for each in answers for n in each.preserved})
        is_whole = not any(each.failed for each in answers)
        if not is_late:
            shortfalls = [why for each in offered for why in each.shortfalls]
            problems = [why for each in answers for why in each.problems]
            self._report_lacking(step, [*shortfalls, *problems])
        num_copies = sum(each.copies for each in answers)
        if num_copies or not is_late:
            num_bytes = sum(each.num_bytes for each in answers)
            secs = clock.monotonic() - began_secs
            self._record(metrics.CHECKPOINT_COPY, num_bytes)
            self._record(metrics.CHECKPOINT_COPY_SECS, secs)
            # No event says that a step is safe which lacks copies.
            if is_whole and min(each.num_machines for each in offered) >= 2:
                self._emit(
                    "replicated",
                    step=step,
                    copies=num_copies,
                    bytes=num_bytes,
                    secs=secs,
                )
        return is_whole

    def _report_lacking(self, step: int, reasons: Sequence[str]) -> None:
        # A lack that persists is reported once.
        fresh = [why for why in dict.fromkeys(reasons) if why not in self._lacking]
        for why in fresh[: errors.MOST_NAMED]:
            self._degraded("peer", step, why)
        if fresh[errors.MOST_NAMED :]:
            more = len(fresh) - errors.MOST_NAMED
            self._degraded("peer", step, f"and {more} more, in the logs of hosts")
            logging.warning("step %d: %s", step, "; ".join(fresh[errors.MOST_NAMED :]))
        self._lacking = set(reasons)

    def _collect(self, committed: CheckpointMetadata) -> None:
        # Removes older steps if this one has its copies; otherwise keeps the newest of
        # them that has.
        in_flight = self._due.in_flight()
        if self._covered is not None:
            in_flight.append(self._covered)
        with self._surviving("local", committed.step, _NOT_REMOVED):
            if self._preserved is None:
                of_hosts = self._hosts.all(HostSaver.preserved)
                self._preserved = sorted({n for each in of_hosts for n in each})
            self._hosts.all(
                HostSaver.collect,
                committed.step_id,
                tuple(in_flight),
                tuple(self._preserved),
                committed.line[:-1],
            )

    def _back_up(
        self, saving: Saving, *, after: Sequence[futures.Future[None]] = ()
    ) -> None:
        # Hosts divide the work by holdings, which copies under way would change.
        background.wait(after)
        try:
            if self._upload(saving):
                self._collect_backups(saving)
            else:
                # The next step that is committed is backed up in its place.
                self._due.keep(saving)
        finally:
            self._due.end()

    def _upload(self, saving: Saving) -> bool:
        # Uploads a step; whether it was committed to storage.
        step, began_secs = saving.step, clock.monotonic()
        try:
            assert self._writing is not None
            num_bytes, bad = saving.upload(self._hosts, self._writing.check)
        except errors.HostsFailedError as error:
            self._not_taken(step, f"it was not backed up: {error}")
            return False
        saving.stored.set()
        self._due.store(saving.step_id)
        secs = clock.monotonic() - began_secs
        self._record(metrics.CHECKPOINT_BACKUP, num_bytes)
        self._record(metrics.CHECKPOINT_BACKUP_SECS, secs)
        self._emit(
            "backed_up", step=step, bytes=num_bytes, secs=secs, world=self._world.number
        )
        if bad:
            more = f", like {len(bad) - 1} more copies" if bad[1:] else ""
            why = f"{bad[0]}; it was backed up from elsewhere{more}"
            self._degraded("local", step, why)
        return True

    def _collect_backups(self, saving: Saving) -> None:
        # Removes what storage does not keep now that the step is there.
        with self._surviving("persistent", saving.step, _NOT_REMOVED):
            self._hosts.first(HostBackup.collect, saving.line, saving.step)

    def _find_owed(self, line: Line, *, before: int) -> list[Saving]:
        # The newest step that storage is to have and does not, held by all hosts.
        hosts = self._hosts
        step_id = hosts.first(HostBackup.find_owed, line, before)
        if step_id is None or not all(hosts.all(HostBackup.hold_owed, step_id)):
            return []
        contents = hosts.first(HostBackup.contents, step_id)
        self._due.add(step_id)
        self._due.begin(step_id)
        return [Saving.from_contents(step_id, contents)]

    def _not_taken(self, step: int, why: str) -> None:
        # Storage has not taken a step that is due there.
        self._due.fail(step, why)
        self._degraded("persistent", step, why)

    @contextlib.contextmanager
    def _surviving(self, tier: str, step: int, what: str = "") -> Iterator[None]:
        # Goes on if hosts fail, and reports it.
        try:
            yield
        except errors.HostsFailedError as error:
            self._degraded(tier, step, f"{what}: {error}" if what else str(error))

    def _degraded(self, tier: str, step: int, why: str) -> None:
        # Reports a failure that the run survives.
        logging.warning("step %d, %s tier: %s", step, tier, why)
        self._record(metrics.CHECKPOINT_FAILURES, 1)
        storage_cause.report(self._emit, tier, step, why)

    def _record(self, metric: metrics.Metric, value: float) -> None:
        # Values of all hosts are recorded once.
        if self._hosts.own == 0:
            metric.record(value)
