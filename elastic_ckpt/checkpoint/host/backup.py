"""A host's share of a checkpoint in persistent storage, from what is in RAM.

A backup goes through `offer`, `chunk_shapes`, `back_up`, `commit` and `collect`, which
removes the steps that are no longer kept there. Before the first one of a world comes
`clean`; `steps_in_ram` names the steps that earlier worlds could not back up.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence, Set

from elastic_ckpt.checkpoint.host import (
    part_offers,
    repairs,
    upload_share,
    verified_read,
)
from elastic_ckpt.checkpoint.host.answers import BackedUp, StepInRam
from elastic_ckpt.checkpoint.host.part_exchange import Letter
from elastic_ckpt.checkpoint.host.world import HostWorld, not_in_ram
from elastic_ckpt.core import bucket_clients, calls, clock, errors, storage
from elastic_ckpt.steps import part_choices, retention, search
from elastic_ckpt.steps.holdings import Holdings, Offer
from elastic_ckpt.steps.line import Line
from elastic_ckpt.steps.manifest import Contents
from elastic_ckpt.steps.step_id import StepId
from elastic_ckpt.tiers import find, preserved
from elastic_ckpt.tiers.peers import run_agents
from elastic_ckpt.tiers.persistent import (
    claims,
    evaluations,
    leases,
    ocdbt,
    persistent_root,
    upload,
)
from elastic_ckpt.tiers.persistent.persistent_root import PersistentRoot
from elastic_ckpt.tiers.persistent.persistent_tier import PersistentTier
from elastic_ckpt.tiers.persistent.retries import PATIENT
from elastic_ckpt.tiers.source import Leftover, Source

# The saves of our worlds (`HostWorld.new_save`); programs with Orbax alone use others.
_SAVE = re.compile(r"\d{15}")
# By the path of a leaf, the checkpointable and name that Orbax uses.
Names = Mapping[str, tuple[str, str]]


class HostBackup:
    """Backs up what one host has.

    Args:
      world: the host among the others; with persistent storage.
    """

    def __init__(self, world: HostWorld) -> None:
        self._world = world
        self._part_exchange = world.exchanges["backup"]
        self._arranged: StepId | None = None
        # On host 0, the holdings of the step that is being backed up.
        self._holdings: Holdings | None = None
        self._leases = leases.Watch()

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

    @calls.call(order="up")
    def offer(self, step_id: StepId) -> tuple[Letter, ...]:
        """Offers what this host has of a step in RAM; see `PartExchange.offer`."""
        return self._part_exchange.offer(part_offers.of_save(self._world, step_id))

    @calls.call(limit_secs=calls.LONG_SECS)
    def contents(self, step_id: StepId) -> Contents:
        """The contents of a step in RAM.

        Raises:
          CheckpointError: if nothing of it can be read.
        """
        return self._read(step_id)[1].contents

    @calls.call(limit_secs=calls.LONG_SECS)
    def chunk_shapes(
        self, step_id: StepId, claim: claims.Claim
    ) -> dict[str, tuple[int, ...]]:
        """The shapes of the chunks of each leaf of a step, by its path.

        Host 0 runs this first.

        Args:
          step_id: the step.
          claim: of this world.
        """
        self._check(claim)
        self._holdings = holdings = self._dealt(step_id)
        if self._root().in_place:
            # The upload would overwrite the present files.
            PATIENT.call(
                f"setting aside what step {step_id.step} replaces",
                lambda: self._arrange(holdings.contents, step_id),
            )
        return self._chunks(holdings, step_id)

    @calls.call(limit_secs=calls.LONG_SECS)
    def back_up(self, step_id: StepId, names: Names) -> BackedUp:
        """Writes this host's share of a step to persistent storage.

        The host's bad copies are read from another holder, and repaired.

        Args:
          step_id: the step.
          names: by the path of a leaf, the checkpointable and name that Orbax uses.

        Raises:
          CheckpointError: if this host's share is unknown, or storage fails.
        """
        sources, holdings = self._share(step_id)
        uploading = upload.Upload(
            self._root(),
            self._saved_step(holdings, step_id, names),
            self._world.own.host,
        )
        reader = verified_read.VerifiedReader(sources)
        own = self._world.own
        num_bytes = upload_share.upload_share(
            holdings,
            uploading,
            reader,
            host=own.host,
            captured=self._world.captured.get(step_id),
        )
        bad = {
            (each.host, each.file)
            for each in reader.bad
            if (each.tier, each.host) == ("local", own.host.id)
        }
        repairs.put_right(holdings, sources, own, bad)
        return BackedUp(num_bytes=num_bytes, bad=tuple(map(str, reader.bad)))

    @calls.call(limit_secs=calls.LONG_SECS)
    def commit(
        self,
        step_id: StepId,
        names: Names,
        orbax_files: Mapping[str, str],
        claim: claims.Claim,
    ) -> None:
        """Makes a checkpoint of what all hosts have uploaded; one host does it.

        Args:
          step_id: the step.
          names: see `back_up`.
          orbax_files: the texts of the files that Orbax adds to the values, by path.
          claim: of this world.

        Raises:
          CheckpointError: if it cannot be committed.
          ReplacedError: if another start has continued the run.
        """
        holdings = self._holdings or self._read(step_id)[1]
        self._holdings = None
        self._check(claim)

        def make_way() -> None:
            self._check(claim)
            self._arrange(holdings.contents, step_id)

        upload.commit(
            self._root(),
            self._saved_step(holdings, step_id, names),
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
    def steps_in_ram(self, line: Line) -> tuple[StepInRam, ...]:
        """The steps of a line that are whole in RAM, ascending.

        Args:
          line: newer than all others; steps that it abandons are left out.
        """
        looking = find.Search(self._world.ram_tiers, lines=[line])
        held = [each.step for each in looking.complete_steps()]
        owed = self._owed(held, line)
        return tuple(
            StepInRam(step_id=each.step_id, is_owed=each.step_id in owed)
            for each in held
        )

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

    def _read(self, step_id: StepId) -> tuple[dict[Offer, Source], Holdings]:
        sources = self._world.in_ram(step_id)
        return sources, Holdings.from_offers(list(sources))

    def _dealt(self, step_id: StepId) -> Holdings:
        # The holdings of a step, whose parts host 0 deals to all hosts.
        if step_id in self._world.captured:
            return self._read(step_id)[1]
        message = self._part_exchange.merged()
        table = message.of_save(step_id)
        if table is None:
            raise errors.CheckpointError(not_in_ram(step_id.step, message.problems))
        held = search.Step.from_offers(table.offers())
        holdings = held.holdings
        if len(holdings.diverged):
            # A later reader could not detect the wrong one.
            raise errors.CheckpointError(
                f"step {step_id.step} has different values at different hosts, such as"
                f" {holdings.name(int(holdings.diverged[0]))}; a later one is backed up"
            )
        if not held.complete:
            # Storage would not take it, after an upload of all the rest.
            why = "; ".join(message.problems) or "no host has them"
            raise errors.CheckpointError(f"{held.problem()} ({why})")
        hosts = self._world.hosts
        self._part_exchange.deal(part_choices.of_uploads(table, holdings, hosts))
        return holdings

    def _share(self, step_id: StepId) -> tuple[Mapping[Offer, Source], Holdings]:
        # What this host uploads.
        own = self._world.own.host
        if step_id in self._world.captured:
            # Each host uploads what it has captured itself.
            return self._read(step_id)
        tables = part_offers.received(self._part_exchange, step_id)
        sources = part_offers.sources(self._world, tables)
        offers = list(sources) or [part_offers.nothing(own, tables)]
        return sources, Holdings.from_offers(offers)

    def _is_held(self, leftover: Leftover) -> bool:
        # Whether the step of an upload that was cut short is whole in RAM.
        if leftover.save is None:
            return False
        try:
            sources = self._world.in_ram(StepId(leftover.step, leftover.save))
            return search.Step.from_offers(list(sources)).complete
        except errors.CheckpointError:
            return False

    def _owed(self, held: Sequence[search.Step], line: Line) -> set[StepId]:
        # Those of the steps in RAM that are to be backed up; none if storage is out of
        # reach, as the search of the restore has reported.
        root = self._world.root
        if root is None:
            return set()
        try:
            stored = set(root.steps())
            owed = [each for each in held if self._is_owed(each, stored)]
        except (errors.CheckpointError, *bucket_clients.failures()):
            return set()
        late = {
            each.step: retention.HeldStep.from_contents(
                each.step_id, each.holdings.contents, complete=True
            )
            for each in owed
        }
        gone = self._gone_at_once(late, line)
        return {each.step_id for step, each in late.items() if step not in gone}

    def _is_owed(self, held: search.Step, stored: Set[int]) -> bool:
        is_due = held.holdings.contents.is_due
        if held.step in stored:
            run = self._world.run
            there = self._root().save_of(held.step, run=run)
            # A later save of the step may not have fitted into RAM.
            return is_due and (there is None or there < held.save)
        if self._root().is_aside(held.step_id):
            return False
        # One that was due by the clock alone has no mark.
        return is_due or self._root().unfinished(held.step_id).exists()

    def _gone_at_once(
        self, late: Mapping[int, retention.HeldStep], line: Line
    ) -> Sequence[int]:
        # The steps that retention would remove from storage as soon as they are there,
        # which has mostly been done before.
        keep = self._keep()
        if keep is None or not late:
            return ()
        try:
            stored = {each.step: each for each in self._tier().held(line)}
        except (errors.CheckpointError, *bucket_clients.failures()):
            return ()
        together = {**stored, **late}
        return retention.steps_to_delete(
            list(together.values()),
            keep,
            newest_complete=max(together),
            in_flight=(),
            preserved=self._tier().preserved(),
        )

    def _not_kept(self, line: Line) -> list[int]:
        # The steps that the policy gives up.
        keep, tier = self._keep(), self._tier()
        if keep is None:
            return []
        held = tier.held(line)
        return retention.steps_to_delete(
            held,
            keep,
            newest_complete=max(
                (each.step for each in held if each.complete), default=None
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
        return None if self._world.storage is None else self._world.storage.keep

    def _chunks(
        self, holdings: Holdings, step_id: StepId
    ) -> dict[str, tuple[int, ...]]:
        captured = self._world.captured.get(step_id)
        return (
            upload_share.chunk_shapes(holdings)
            if captured is None
            else captured.chunk_shapes
        )

    def _saved_step(
        self, holdings: Holdings, step_id: StepId, names: Names
    ) -> upload.UploadedStep:
        chunks = self._chunks(holdings, step_id)
        return upload.UploadedStep(
            run=self._world.run,
            step_id=step_id,
            contents=holdings.contents,
            arrays={
                path: ocdbt.StoredArray(
                    checkpointable=checkpointable, name=name, chunk=chunks[path]
                )
                for path, (checkpointable, name) in names.items()
            },
        )
