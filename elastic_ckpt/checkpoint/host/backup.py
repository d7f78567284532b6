"""A host's share of a checkpoint in persistent storage, from what is in memory.

A backup goes through `begin`, `back_up`, `commit` and `collect`, which removes the
steps that are no longer kept there. Before the first one of a world comes `clean`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from elastic_ckpt.checkpoint.host import repairs
from elastic_ckpt.checkpoint.host.answers import BackedUp
from elastic_ckpt.checkpoint.host.verified_read import VerifiedReader
from elastic_ckpt.checkpoint.host.world import HeldStep, HostWorld
from elastic_ckpt.core import (
    background,
    bucket_clients,
    calls,
    checked_json,
    clock,
    digest,
    errors,
    storage,
)
from elastic_ckpt.steps import layout, owners, retention
from elastic_ckpt.steps.manifest import Contents, Manifest
from elastic_ckpt.steps.step import Line, StepId
from elastic_ckpt.tiers import find, preserved
from elastic_ckpt.tiers.find import FoundStep
from elastic_ckpt.tiers.peers import run_agents
from elastic_ckpt.tiers.persistent import (
    claims,
    evaluations,
    leases,
    persistent_root,
    upload,
)
from elastic_ckpt.tiers.persistent.persistent_root import PersistentRoot
from elastic_ckpt.tiers.persistent.persistent_tier import PersistentTier
from elastic_ckpt.tiers.persistent.retries import PATIENT
from elastic_ckpt.tiers.source import Leftover, ReadError

# The saves of our worlds (`HostWorld.new_save`); programs with Orbax alone use others.
_SAVE = re.compile(r"\d{15}")
# Each thread has one batch in memory, and what TensorStore makes of it: with them a
# backup takes at most 2 * _THREADS * _BATCH_BYTES = 512 MiB, whatever it backs up.
_THREADS = 4
_BATCH_BYTES = layout.CHUNK_BYTES
# Small parts are written together, but all threads have some of them.
_BATCH_ITEMS = 2048
# A message that goes with those of copies.
_OWED = "copies-owed"


class HostBackup:
    """Backs up what one host has.

    Args:
      world: the host among the others; with persistent storage.
    """

    def __init__(self, world: HostWorld) -> None:
        self._world = world
        self._arranged: StepId | None = None
        self._leases = leases.Watch()
        # On host 0, the step that a world before could not back up.
        self._owed: FoundStep | None = None

    @calls.call(limit_secs=calls.LONG_SECS)
    def clean(self, save: str) -> tuple[tuple[int, str], ...]:
        """Removes leftovers of crashed uploads; host 0 of a world that has claimed it.

        No other world commits any more, so those of older saves are dead. Those of
        steps that are whole in RAM stay: their uploads are continued.

        Args:
          save: of this world.

        Returns:
          The steps whose saves were interrupted, with the paths that were removed.
        """
        removed = []
        for each in self._root().leftovers():
            of_save = each.save or ""
            is_dead = _SAVE.fullmatch(of_save) and of_save < save
            if of_save == persistent_root.REMOVED:
                storage.remove(each.path)
            elif is_dead and not self._is_held(each):
                storage.remove(each.path)
                removed.append((each.step, str(each.path)))
        return tuple(removed)

    @calls.call()
    def record_agents(self) -> None:
        """Records the agents of this world in storage; host 0 does it.

        Raises:
          CheckpointError: if storage is out of reach.
        """
        world = self._world
        machines = {host.machine for host in world.hosts} & world.agents.keys()
        agents = {machine: world.agents[machine] for machine in machines}
        record = run_agents.RunAgents(world.run, agents)
        run_agents.write(self._root().path, record)

    @calls.call()
    def contents(self, step_id: StepId) -> Contents:
        """The contents of a step that this host holds.

        Raises:
          CheckpointError: if it holds nothing of it.
        """
        return self._world.holding(step_id).found.table.contents

    @calls.call(limit_secs=calls.LONG_SECS)
    def begin(self, step_id: StepId, claim: claims.Claim) -> dict[str, tuple[int, ...]]:
        """The shapes of the chunks of each array of a step, by its path.

        Host 0 runs this first.

        Args:
          step_id: the step.
          claim: of this world.
        """
        contents = self.contents(step_id)
        self._check(claim)
        if self._root().in_place:
            # The upload would overwrite the present files.
            PATIENT.call(
                f"setting aside what step {step_id.step} replaces",
                lambda: self._arrange(contents, step_id),
            )
        return {leaf.path: leaf.chunk for leaf in contents.arrays}

    @calls.call(limit_secs=calls.LONG_SECS)
    def back_up(self, step_id: StepId) -> BackedUp:
        """Writes this host's share of a step to persistent storage.

        Everything is verified before: a bad copy of this host is read from another
        holder, and repaired. What an upload that was cut short has written stays.

        Raises:
          CheckpointError: if no good copy of a part is left, or storage fails.
        """
        world, held = self._world, self._world.holding(step_id)
        # All hosts know what is owed by now.
        world.mail.remove(_OWED)
        uploading = upload.Upload(
            self._root(), self._saved_step(step_id), world.own.host
        )
        uploading.begin()
        reader = VerifiedReader(held.found)
        num_bytes = _upload_share(world, held, uploading, reader)
        own = world.own.host.id
        bad = {(each.host, each.name) for each in reader.bad if each.host == own}
        repairs.put_right(held.found, world.own, bad)
        return BackedUp(num_bytes=num_bytes, bad=tuple(map(str, reader.bad)))

    @calls.call(limit_secs=calls.LONG_SECS)
    def commit(
        self, step_id: StepId, orbax_files: Mapping[str, str], claim: claims.Claim
    ) -> None:
        """Makes a checkpoint of what all hosts have uploaded; one host does it.

        Args:
          step_id: the step.
          orbax_files: the texts of the files that Orbax adds to the values, by path.
          claim: of this world.

        Raises:
          CheckpointError: if it cannot be committed.
          ReplacedError: if another start has continued the run.
        """
        contents = self.contents(step_id)
        self._check(claim)

        def make_way() -> None:
            self._check(claim)
            self._arrange(contents, step_id)

        upload.commit(
            self._root(),
            self._saved_step(step_id),
            hosts=[host.id for host in self._world.hosts],
            orbax_files={path: text.encode() for path, text in orbax_files.items()},
            make_way=make_way,
        )

    @calls.call(limit_secs=calls.LONG_SECS)
    def collect(self, line: Line, step: int) -> None:
        """Removes steps that are no longer kept, after a commit; host 0 does it.

        Also finishes the removals of worlds that were killed meanwhile. Keeps the
        newest complete step, those that are preserved by hand or leased, and those that
        plain Orbax or another run saved. Steps that were set aside go once the line has
        passed them.

        Args:
          line: of the save that was committed.
          step: the training step.
        """
        root = self._root()
        for each in root.leftovers():
            # Of uploads of this world that failed.
            if each.step < step and each.save == line.save:
                storage.remove(each.path)
        passed = [
            each
            for each in root.set_aside_steps()
            if each.step <= step
            and each.save < line.save
            and not preserved.is_preserved(root.aside(each))
        ]
        gone = self._not_kept(line)
        if not (passed or gone):
            return
        numbers = {*gone, *(each.step for each in passed)}
        with leases.removing(root, numbers, line, watch=self._leases) as leased:
            for each in passed:
                if each.step not in leased:
                    root.discard_aside(each)
            evaluations.forget(root, set(gone) - leased, line)
            for number in set(gone) - leased:
                self._tier().remove(number)

    @calls.call()
    def holds(self, step_id: StepId) -> bool:
        """Whether that save of a step is committed to persistent storage.

        Args:
          step_id: the step.

        Raises:
          CheckpointError: if storage cannot be reached.
        """
        root = self._root()
        if not root.is_committed(step_id.step):
            return False
        return (
            not step_id.save
            or root.save_of(step_id.step, run=self._world.run) == step_id.save
        )

    @calls.call(limit_secs=calls.LONG_SECS)
    def remove(self, step: int, line: Line) -> bool:
        """Removes all saves of a step from persistent storage; whether there were any.

        A step that Orbax alone saved stays.

        Args:
          step: the training step.
          line: of the world that removes it.

        Raises:
          CheckpointError: if a program reads it under a lease.
        """
        root = self._root()
        with leases.removing(root, {step}, line, watch=self._leases) as leased:
            if step in leased:
                raise leases.leased_error(root, step)
            evaluations.forget(root, {step}, line)
            return self._tier().remove_all(step)

    @calls.call()
    def record_metrics(self, step_id: StepId, metrics: str) -> None:
        """Records the metrics of an evaluation; see `evaluations`.

        Args:
          step_id: the step.
          metrics: JSON text.
        """
        evaluation = evaluations.Evaluation(
            run=self._world.run,
            step=step_id.step,
            save=step_id.save,
            metrics=metrics,
        )
        evaluations.record(self._root(), evaluation)

    @calls.call()
    def evaluations(self, line: Line) -> tuple[tuple[int, str], ...]:
        """The training steps of a line with metrics; see `evaluations.counted`."""
        return tuple(evaluations.counted(self._root(), line, run=self._world.run))

    @calls.call(limit_secs=calls.LONG_SECS)
    def find_owed(self, line: Line, before: int) -> StepId | None:
        """The newest step in RAM that storage is to have and does not; host 0 finds it.

        Its world could not back it up. It stands for all that were due before.

        Args:
          line: newer than all others; steps that it abandons do not count.
          before: only steps with lower numbers count.
        """
        self._owed = None
        if self._world.root is None:
            return None
        looking = find.search(self._world.ram_tiers, lines=[line])
        whole = looking.complete_steps()
        try:
            # A newer step in storage ends the wait of all before it.
            stored = [each for each in self._stored() if not line.abandons(each)]
            after = max((each.step for each in stored), default=-1)
            owed = [
                each
                for each in whole
                if after <= each.step_id.step < before and self._is_owed(each, line)
            ]
        except (errors.CheckpointError, *bucket_clients.failures()):
            # The search of the restore has reported it.
            return None
        self._owed = max(owed, key=lambda each: each.step_id, default=None)
        return None if self._owed is None else self._owed.step_id

    @calls.call(order="down", limit_secs=calls.LONG_SECS)
    def hold_owed(self, step_id: StepId) -> bool:
        """Has all hosts know where the parts of the step are that host 0 has found.

        Raises:
          CheckpointError: if this host does not learn it.
        """
        world, found = self._world, self._owed
        if world.number:
            try:
                given = Manifest.parse(world.exchange.take(_OWED))
                found = world.found([given])
            except (ReadError, checked_json.UnreadableError) as error:
                raise errors.CheckpointError(
                    f"the table of step {step_id.step} {error}; the next world backs"
                    " it up"
                ) from None
        elif world.passes and found is not None:
            world.exchange.give(_OWED, found.table.manifest.to_bytes())
        self._owed = None
        return found is not None and found.step_id == step_id and world.hold(found)

    def _stored(self) -> list[StepId]:
        root, run = self._root(), self._world.run
        return [
            StepId(step, root.save_of(step, run=run) or "") for step in root.steps()
        ]

    def _is_owed(self, found: FoundStep, line: Line) -> bool:
        step_id, contents = found.step_id, found.table.contents
        root, is_due = self._root(), contents.is_due
        late = retention.HeldStep.from_contents(step_id, contents, complete=True)
        if root.is_committed(step_id.step):
            there = root.save_of(step_id.step, run=self._world.run)
            # A later save of the step may not have fitted into RAM.
            is_due &= there is None or there < step_id.save
        elif step_id in root.set_aside_steps():
            is_due = False
        else:
            # One that was due by the clock alone has no mark.
            is_due |= root.unfinished(step_id).exists()
        return is_due and step_id.step not in self._not_kept(line, late)

    @calls.call()
    def secs_since_backup(self) -> float:
        """The time since the newest step was committed in storage, in seconds.

        Before the first one it is that since the first world of the run was claimed; 0
        if neither is known, or storage is out of reach.
        """
        root, tier = self._world.root, self._world.persistent
        if root is None or tier is None:
            return 0.0
        try:
            steps = root.steps()
            if steps:
                noted = tier.notes(steps[-1])["commit_timestamp_nsecs"]
                nsecs = noted or clock.time_ns()
            else:
                first = claims.newest(root.path)
                nsecs = clock.time_ns() if first is None else first.begun_ms * 10**6
        except (errors.CheckpointError, *bucket_clients.failures()):
            return 0.0
        return max(0.0, (clock.time_ns() - nsecs) / 10**9)

    def _is_held(self, leftover: Leftover) -> bool:
        # Whether the step of an upload that was cut short is whole in RAM, and no later
        # save of it is.
        there = find.looked(find.offered(self._world.ram_tiers, leftover.step))
        whole = {each.step_id for each in there.saves if each.problem is None}
        return StepId(leftover.step, leftover.save or "") == max(whole, default=None)

    def _not_kept(self, line: Line, *late: retention.HeldStep) -> Sequence[int]:
        # The steps that the policy gives up, also of those that would come late.
        keep, tier = self._keep(), self._tier()
        if keep is None:
            return []
        held = {each.step: each for each in (*tier.held(line), *late)}
        return retention.steps_to_delete(
            list(held.values()),
            keep,
            newest_complete=max(
                (step for step, each in held.items() if each.complete), default=None
            ),
            # Uploads lie elsewhere until they are committed.
            in_flight=(),
            preserved=tier.preserved(),
        )

    def _check(self, claim: claims.Claim) -> None:
        PATIENT.call(
            "looking for the claim of another world",
            lambda: claims.check(self._root().path, claim),
        )

    def _arrange(self, contents: Contents, step_id: StepId) -> None:
        if self._arranged != step_id:
            leases.arrange(
                self._root(),
                Line(save=step_id.save, parents=contents.parents),
                run=self._world.run,
                step=step_id.step,
                watch=self._leases,
            )
            self._arranged = step_id

    def _root(self) -> PersistentRoot:
        assert self._world.root is not None
        return self._world.root

    def _tier(self) -> PersistentTier:
        assert self._world.persistent is not None
        return self._world.persistent

    def _keep(self) -> retention.PreservationPolicy | None:
        return (
            None
            if self._world.chosen.persistent is None
            else self._world.chosen.persistent.keep
        )

    def _saved_step(self, step_id: StepId) -> upload.UploadedStep:
        return upload.UploadedStep(
            run=self._world.run, step_id=step_id, contents=self.contents(step_id)
        )


def _upload_share(
    world: HostWorld,
    held: HeldStep,
    uploading: upload.Upload,
    reader: VerifiedReader,
) -> int:
    # The bytes that this host has uploaded.
    table, captured = held.found.table, held.captured
    everyone = tuple(range(len(world.hosts)))
    # After a change of hosts, parts may be in the memory of idle machines alone.
    sets = [of_item or everyone for of_item in held.holders]
    owner = np.array(owners.shares(sets, table.num_bytes))
    parts = {
        item: upload.Part(
            int(table.items.leaf[item]), table.box(item), table.digest(item)
        )
        for item in np.flatnonzero(owner == world.number).tolist()
    }
    parts = {item: part for item, part in parts.items() if not uploading.has(part)}

    def values(item: int) -> np.ndarray:
        if captured is None:
            return reader.values(item)
        here = captured.values(table.leaf(item), table.box(item))
        if digest.values_digest(here) != table.digest(item):
            raise errors.CheckpointError(
                f"{table.name(item)} changed in this host's memory after it was"
                " captured; save another step, and have the memory of the machine"
                " checked"
            )
        return here

    def write(batch: Sequence[int]) -> int:
        uploading.write([parts[item] for item in batch], list(map(values, batch)))
        return int(table.num_bytes[list(batch)].sum())

    with background.pool(_THREADS, "upload") as pool:
        num_bytes = sum(pool.map(write, _batches(list(parts), table.num_bytes)))
    uploading.finish()
    return num_bytes


def _batches(items: Sequence[int], sizes: np.ndarray) -> Iterator[list[int]]:
    # Runs of items that are written together.
    batch: list[int] = []
    num_bytes = 0
    for item in items:
        is_full = num_bytes + sizes[item] > _BATCH_BYTES or len(batch) == _BATCH_ITEMS
        if batch and is_full:
            yield batch
            batch, num_bytes = [], 0
        batch.append(item)
        num_bytes += int(sizes[item])
    if batch:
        yield batch
