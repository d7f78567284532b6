"""Writes a host's share of a checkpoint from memory to persistent storage.

A backup calls `begin`, `back_up` and then `commit`, which also removes steps that
storage no longer has to keep. Before the first backup, a world calls `clean`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from elastic_ckpt.checkpoint.host.verified_read import VerifiedReader
from elastic_ckpt.checkpoint.host.world import HostWorld
from elastic_ckpt.core import (
    allgather,
    background,
    bucket_clients,
    calls,
    clock,
    errors,
    storage,
)
from elastic_ckpt.steps import layout, owners, retention
from elastic_ckpt.steps.manifest import Contents
from elastic_ckpt.steps.step import Line, StepId
from elastic_ckpt.tiers import preserved
from elastic_ckpt.tiers.persistent import (
    claims,
    leases,
    persistent_root,
    persistent_tier,
    retries,
    run_files,
    upload,
)

# This library's saves (`HostWorld.new_save`); stock Orbax uses different names.
_SAVE = re.compile(r"\d{15}")
# Each thread has one batch and TensorStore's copy of it in memory, so a backup takes at
# most 2 * _THREADS * _BATCH_BYTES = 512 MiB.
_THREADS = 4
_BATCH_BYTES = layout.CHUNK_BYTES
# Small parts are written together, in batches small enough to keep all threads busy.
_BATCH_ITEMS = 2048


class HostBackup:
    """Backs up one host's share in a world with persistent storage."""

    def __init__(self, world: HostWorld) -> None:
        assert world.root is not None
        self._world, self._root = world, world.root
        self._leases: leases.Watch = {}
        assert world.chosen.persistent is not None
        self._keep = world.chosen.persistent.keep

    @property
    def _tier(self) -> persistent_tier.PersistentTier:
        return persistent_tier.PersistentTier(self._root, run=self._world.run)

    @calls.call(limit_secs=calls.LONG_SECS)
    def clean(self, save: str, restored: StepId | None) -> tuple[tuple[int, str], ...]:
        """Removes leftovers of crashed uploads; called on host 0 after the claim.

        Earlier worlds can no longer commit, so uploads of older saves are dead. The
        exception is an upload of the step that the world resumes from: it is continued.
        Also records this world's agents, through which other programs find its steps in
        RAM.

        Returns:
          Pairs of a step whose save was interrupted and the path that was removed.
        """
        removed = []
        self._record_agents()
        for each in self._root.leftovers():
            of_save = each.save or ""
            is_dead = _SAVE.fullmatch(of_save) and of_save < save
            if is_dead and StepId(each.step, of_save) != restored:
                removed.append((each.step, str(each.path)))
            elif of_save != persistent_root.REMOVED:
                continue
            storage.remove(each.path)
        return tuple(removed)

    def _record_agents(self) -> None:
        world = self._world
        if world.chosen.local is not None:
            there = {host.machine for host in world.hosts}
            agents = {m: each for m, each in world.agents.items() if m in there}
            run_files.write_agents(
                self._root.path, run_files.RunAgents(world.run, agents)
            )

    @calls.call(limit_secs=calls.LONG_SECS)
    def owed(self, step_id: StepId) -> Contents | None:
        """The contents of a step in memory that was due to be saved to storage.

        None if storage has the step, or the step was not due there.

        Raises:
          CheckpointError: if the step is not in this host's memory.
        """
        contents = self._world.holding(step_id).found.table.contents
        is_there = self.holds(step_id) or step_id in self._root.set_aside_steps()
        return contents if contents.is_due and not is_there else None

    @calls.call(limit_secs=calls.LONG_SECS)
    def begin(self, step_id: StepId, claim: int) -> dict[str, tuple[int, ...]]:
        """Prepares a backup; called on host 0 before the other hosts begin.

        Returns:
          The chunk shapes, keyed by array path.
        """
        contents = self._saved_step(step_id).contents
        self._check(claim)
        if self._root.in_place:
            # Otherwise the upload would overwrite the current files.
            retries.call(
                f"setting aside the steps that step {step_id.step} replaces",
                lambda: self._arrange(contents, step_id),
            )
        return {leaf.path: leaf.chunk for leaf in contents.arrays}

    @calls.call(limit_secs=calls.LONG_SECS)
    def back_up(self, step_id: StepId, claim: int) -> tuple[int, tuple[str, ...]]:
        """Writes this host's share of a step to persistent storage.

        Verifies all parts first. Instead of a bad copy, uploads another holder's copy;
        also repairs the bad copy if it is on this host. Keeps parts that an interrupted
        upload has already written.

        Returns:
          The number of bytes in the share, and a message for each bad copy.

        Raises:
          CheckpointError: if no good copy of a part is left, or storage fails.
        """
        world, held = self._world, self._world.holding(step_id)
        table, own = held.found.table, world.own.host
        saved = self._saved_step(step_id)
        uploading = upload.Upload(self._root, saved, own, claim=claim)
        uploading.begin()
        reader = VerifiedReader(held.found)
        everyone = tuple(range(len(world.hosts)))
        # After hosts have changed, parts may exist only on idle machines.
        sets = [of_item or everyone for of_item in held.holders]
        parts: dict[int, upload.PartRow] = {}
        for item, owner in enumerate(owners.assign_holders(sets, table.num_bytes)):
            leaf = int(table.items.leaf[item])
            part = leaf, table.box(item), table.digest(item)
            if owner == world.number and part not in uploading.there:
                parts[item] = part

        def write(batch: Sequence[int]) -> int:
            values = [reader.values(item) for item in batch]
            uploading.write([parts[item] for item in batch], values)
            return sum(each.nbytes for each in values)

        with background.pool(_THREADS, "upload") as pool:
            num_bytes = sum(pool.map(write, _batches(list(parts), table.num_bytes)))
        uploading.finish()
        bad = tuple(reader.bad)
        here = {(each.host, each.name) for each in bad if each.host == own.id}
        reader.repair(here)
        return num_bytes, tuple(map(str, bad))

    @calls.call(limit_secs=calls.LONG_SECS)
    def commit(
        self, step_id: StepId, orbax_files: Mapping[str, str], claim: int
    ) -> str:
        """Commits the parts that all hosts have uploaded; called on host 0.

        Returns:
          Why older steps could not be removed; empty if there was no problem.

        Raises:
          CheckpointError: if the step cannot be committed.
          ReplacedError: if another launch has continued the run.
        """
        saved = self._saved_step(step_id)
        self._check(claim)

        def make_way() -> None:
            self._check(claim)
            self._arrange(saved.contents, step_id)

        upload.commit(
            self._root,
            saved,
            hosts=[host.id for host in self._world.hosts],
            orbax_files={path: text.encode() for path, text in orbax_files.items()},
            make_way=make_way,
        )
        line = Line(save=step_id.save, parents=saved.contents.parents)
        # The step stays committed even if this fails.
        collected = allgather.outcome(lambda: self.collect(line, step_id.step))
        return collected.get("failed", "")

    def collect(self, line: Line, step: int) -> None:
        """Removes steps that the policy no longer keeps, after a commit.

        Also finishes removals that killed worlds began. Keeps the newest complete step,
        pinned and leased steps, and steps that stock Orbax or another run saved.
        Removes set-aside steps once the line has passed them. Records this world's
        agents again if their record is gone.
        """
        root, tier, keep = self._root, self._tier, self._keep
        if not storage.has_file(root.path / run_files.AGENTS):
            self._record_agents()
        for each in root.leftovers():
            # Failed uploads of this world.
            if each.step < step and each.save == line.save:
                storage.remove(each.path)
        passed = [
            each
            for each in root.set_aside_steps()
            if each.step <= step
            and each.save < line.save
            and not preserved.is_preserved(root.aside(each))
        ]
        held = [] if keep is None else tier.held(line)
        whole = [each.step for each in held if each.complete]
        gone = {
            *retention.steps_to_delete(
                held,
                keep or retention.BestN(0),
                newest_complete=max(whole, default=None),
                # Uploads are in other directories until they are committed.
                in_flight=(),
                preserved=tier.preserved() if held else (),
            )
        }
        numbers = gone | {each.step for each in passed}
        with leases.removing(root, numbers, line, watch=self._leases) as leased:
            for each in passed:
                if each.step not in leased:
                    root.remove(root.aside(each))
            run_files.forget_evaluations(root, gone - leased, line)
            for number in gone - leased:
                root.remove(root.final(number))

    @calls.call()
    def holds(self, step_id: StepId) -> bool:
        """Whether persistent storage has this save of a step.

        Raises:
          CheckpointError: if storage is unreachable.
        """
        step, save = step_id
        return self._root.is_committed(step) and (
            not save or self._root.save_of(step, run=self._world.run) == save
        )

    @calls.call(limit_secs=calls.LONG_SECS)
    def remove(self, step: int, line: Line) -> bool:
        """Removes all saves of a step from storage; returns whether there were any.

        Does not remove a step that stock Orbax saved.

        Raises:
          CheckpointError: if a program is reading the step under a lease.
        """
        root = self._root
        with leases.removing(root, {step}, line, watch=self._leases, replaced=step):
            run_files.forget_evaluations(root, {step}, line)
            return self._tier.remove_all(step)

    @calls.call()
    def record_metrics(self, step_id: StepId, metrics: str) -> None:
        """Records an evaluation's metrics; see `run_files`.

        Args:
          step_id: the step and the oldest save that it can belong to; the line does not
            show whether the step was saved again under the next save.
          metrics: the metrics, as a JSON object.
        """
        _, there = persistent_root.committed(self._root.final(step_id.step))
        evaluation = run_files.Evaluation(
            run=self._world.run,
            step=step_id.step,
            save=max(step_id.save, there),
            metrics=metrics,
        )
        run_files.record_evaluation(self._root, evaluation)

    @calls.call()
    def evaluations(self, line: Line) -> tuple[tuple[int, str], ...]:
        """The evaluated training steps of a line; see `run_files.evaluations`."""
        return tuple(run_files.evaluations(self._root, line, run=self._world.run))

    @calls.call()
    def secs_since_backup(self) -> float:
        """The time since the newest step was stored, in seconds.

        Before the first step is stored, the time since the run's first world was
        claimed. 0 if neither time is known, or if storage is unreachable.
        """
        now_nsecs = clock.time_ns()
        try:
            steps = self._root.steps()
            if steps:
                nsecs = persistent_root.commit_nsecs(self._root.final(steps[-1]))
            else:
                first = claims.newest(self._root.path)
                nsecs = 0 if first is None else first.begun_ms * 10**6
        except (errors.CheckpointError, *bucket_clients.failures()):
            return 0.0
        return max(0, now_nsecs - (nsecs or now_nsecs)) / 10**9

    def _check(self, claim: int) -> None:
        retries.call(
            "looking for another world's claim",
            lambda: claims.check(self._root.path, claim),
        )

    def _arrange(self, contents: Contents, step_id: StepId) -> None:
        leases.arrange(
            self._root,
            Line(save=step_id.save, parents=contents.parents),
            run=self._world.run,
            step=step_id.step,
            watch=self._leases,
        )

    def _saved_step(self, step_id: StepId) -> upload.UploadedStep:
        contents = self._world.holding(step_id).found.table.contents
        return upload.UploadedStep(
            run=self._world.run, step_id=step_id, contents=contents
        )


def _batches(items: Sequence[int], sizes: np.ndarray) -> Iterator[Sequence[int]]:
    # Slices of items to write together.
    begin = num_bytes = 0
    for end, item in enumerate(items):
        is_full = num_bytes + sizes[item] > _BATCH_BYTES or end - begin == _BATCH_ITEMS
        if begin < end and is_full:
            yield items[begin:end]
            begin, num_bytes = end, 0
        num_bytes += int(sizes[item])
    if items:
        yield items[begin:]
