"""A host's part in a restore: it finds, reads, verifies and repairs.

A restore goes through `find`, `open_step`, `check`, `read`, `materialise`, `repair`.
"""

from __future__ import annotations

import collections
import dataclasses
import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from etils import epath

from elastic_ckpt.core import errors, storage
from elastic_ckpt.host import recovery, trees, verified_read
from elastic_ckpt.host.answers import BadCopyReport, CheckpointMetadata, SearchOutcome
from elastic_ckpt.host.step_boxes import StepBoxes, TreeReading
from elastic_ckpt.host.world import HostWorld
from elastic_ckpt.manifests import line, read_plan
from elastic_ckpt.manifests.manifest import Contents
from elastic_ckpt.tiers import find
from elastic_ckpt.tiers.find import FoundStep
from elastic_ckpt.tiers.peers import peer, secret
from elastic_ckpt.tiers.ram import ram_disk
from elastic_ckpt.tiers.source import Tier


class HostReader:
    """Reads what one host needs.

    Args:
      world: the host among the others.
    """

    def __init__(self, world: HostWorld) -> None:
        self._world = world
        self._restoring: _Restoring | None = None

    def find(
        self,
        step: int | None,
        without: Collection[tuple[int, str]],
        save: str,
        own_line: line.Line | None,
    ) -> SearchOutcome:
        """Finds the newest complete step, or a certain one, without some saves.

        Args:
          step: None for the newest.
          without: steps and saves that proved to be unreadable.
          save: which save of the step; empty for the newest.
          own_line: the line of the caller, if it has saved something.

        Raises:
          CheckpointError: if a certain step is not complete.
        """
        tiers, foreign, recorded, out_of_reach = self._within_reach()
        own = [] if own_line is None else [own_line]
        looking = find.Search(tiers, lines=[*own, *recorded], without=set(without))
        passed_over: Mapping[int, str] = {}
        refusal: str | None = None
        if step is None:
            outcome = looking.newest()
            passed_over = outcome.passed_over
            newest = (
                None
                if outcome.found_step is None
                else self._complete(outcome.found_step)
            )
            counted = _counted(looking, foreign)
            if counted and (newest is None or counted[-1] > newest.step):
                newest = self._foreign_step(counted[-1], foreign)
            refusal = outcome.refusal(None if newest is None else newest.step)
        elif step in foreign:
            newest = self._foreign_step(step, foreign)
        elif save:
            newest = self._complete(find.of_save(tiers, step, save))
        else:
            newest = self._complete(looking.of_step(step))
        return SearchOutcome(
            complete_step=newest,
            newest_save=looking.line.save,
            passed_over=tuple(passed_over.items()),
            out_of_reach=out_of_reach,
            refusing=tuple(self._refusing(tiers)),
            refusal=refusal,
        )

    def complete_steps(self) -> list[CheckpointMetadata]:
        """The steps that are complete, ascending, without those that are abandoned.

        Those that Orbax alone saved are among them.
        """
        tiers, foreign, recorded, _ = self._within_reach()
        looking = find.Search(tiers, lines=recorded)
        complete = [self._complete(each) for each in looking.complete_steps()]
        others = {each.step for each in complete}
        complete += [
            self._foreign_step(step, foreign)
            for step in _counted(looking, foreign)
            if step not in others
        ]
        return sorted(complete, key=lambda each: each.step)

    def open_step(self, step: int, save: str) -> None:
        """Opens a step for reading.

        Raises:
          CheckpointError: if it is not complete in the tiers that this host can reach.
        """
        step_found = find.of_save(self._world.tiers, step, save)
        reader = verified_read.VerifiedReader(step_found.sources)
        self.close_step()
        self._restoring = _Restoring(step_found=step_found, reader=reader)

    def opened(self) -> Contents:
        """The contents of the step that was opened."""
        return self._opened().step_found.step.holdings.contents

    def check(
        self,
        of_trees: Mapping[str, Any],
        components: Sequence[str],
        others: Mapping[str, TreeReading],
    ) -> None:
        """Selects the parts of the step to read, for the devices of this process.

        Args:
          of_trees: the requested trees; the step has all of their leaves, in their
            shapes.
          components: that are wanted.
          others: by name, trees of another layout.

        Raises:
          CheckpointError: if the step has no such component.
        """
        self.select(trees.wanted(of_trees), components)
        self._opened().others = others

    def select(
        self, wanted: Sequence[trees.WantedLeaf], components: Sequence[str]
    ) -> dict[str, str]:
        """As `check`; returns the saved dtypes of the leaves.

        Args:
          wanted: the leaves.
          components: that are wanted.
        """
        restoring = self._opened()
        held = restoring.step_found.step
        contents = held.holdings.contents
        missing = sorted(set(components) - contents.components.keys())
        if missing:
            raise errors.CheckpointError(
                f"step {held.step} has no parts {missing}; it has"
                f" {sorted(contents.components)}: restore what it has"
            )
        restoring.wanted = wanted
        saved = {leaf.path: leaf.dtype for leaf in contents.leaves}
        return {leaf.path: saved[contents.listed_path(leaf.path)] for leaf in wanted}

    def read(self) -> dict[str, int]:
        """Reads and verifies the selected parts of the step.

        Returns:
          The bytes that were read, by nearness of their holders.

        Raises:
          CheckpointError: if no good copy of a part is left.
        """
        restoring = self._opened()
        restoring.values = recovery.read_leaves(
            restoring.step_found,
            restoring.wanted,
            restoring.reader,
            host=self._world.own.host,
            domain=self._world.peers.domain,
        )
        if restoring.others:
            saved = StepBoxes(
                restoring.step_found,
                restoring.reader,
                host=self._world.own.host,
                domain=self._world.peers.domain,
            )
            restoring.others_made = {
                name: each.of_boxes(saved) for name, each in restoring.others.items()
            }
        near = read_plan.nearness(
            restoring.step_found.step.holdings,
            self._world.own.host,
            domain=self._world.peers.domain,
        )
        total: collections.Counter[str] = collections.Counter()
        for offer, num_bytes in restoring.reader.read_bytes.items():
            total[near[offer]] += num_bytes
        return dict(total)

    def materialise(self, component: str) -> str:
        """Writes the verified files of a component; returns the directory."""
        restoring = self._opened()
        files = read_plan.files(
            restoring.step_found.step,
            self._world.own.host,
            component,
            domain=self._world.peers.domain,
        )
        directory = str(storage.make_directory(self._files() / component))
        for file, offers in files:
            _, _, name = file.path.partition("/")
            storage.write_atomic(
                f"{directory}/{name}", restoring.reader.file(file, offers)
            )
        return directory

    def arrays(self, of_trees: Mapping[str, Any]) -> dict[str, Any]:
        """Makes the trees of the values that were read; those of other layouts, too."""
        made = self.made()
        rebuilt = {
            name: trees.rebuilt(tree, name, made) for name, tree in of_trees.items()
        }
        return {**rebuilt, **self._opened().others_made}

    def made(self) -> dict[str, Any]:
        """Makes each leaf of its values, by path."""
        restoring = self._opened()
        return {
            leaf.path: leaf.make(restoring.values[leaf.path])
            for leaf in restoring.wanted
        }

    def bad_copies(self) -> list[BadCopyReport]:
        """The bad copies that this host detected while it read."""
        return [recovery.report(bad) for bad in self._opened().reader.bad]

    def repair(self, bad: Sequence[BadCopyReport]) -> list[str]:
        """Repairs this host's bad copies of the step that was read.

        Args:
          bad: copies that any host detected.

        Returns:
          The names of the repaired parts.
        """
        restoring = self._opened()
        return recovery.put_right(
            restoring.step_found.step.holdings, restoring.reader, self._world.own, bad
        )

    def close_step(self) -> None:
        """Releases the step that is open, and its values."""
        self._restoring = None
        storage.remove(self._files())

    def _within_reach(self) -> _Reach:
        storage_tier = self._world.persistent
        if storage_tier is None:
            return _Reach(self._world.tiers, {}, [], None)
        try:
            foreign = storage_tier.foreign_saves()
        except errors.CheckpointError as error:
            in_ram = [tier for tier in self._world.tiers if tier is not storage_tier]
            return _Reach(in_ram, {}, [], str(error))
        recorded = storage_tier.recorded_lines()
        return _Reach(self._world.tiers, foreign, recorded, None)

    def _refusing(self, tiers: Sequence[Tier]) -> list[str]:
        known = secret.path(self._world.disk.root)
        return [
            f"{url} does not take the secret in {known}, so nothing that it may hold of"
            " this run is restored; copy that file from a machine of the run, for"
            " example the agent's, and start again"
            for tier in tiers
            if isinstance(tier, peer.Peers)
            for url in tier.refusing()
        ]

    def _foreign_step(
        self, step: int, foreign: Mapping[int, str]
    ) -> CheckpointMetadata:
        assert self._world.persistent is not None
        return CheckpointMetadata(
            step=step,
            save="",
            line=line.after(step, foreign[step], ()),
            path=self._path(step),
            **self._world.persistent.notes(step),
        )

    def _complete(self, step_found: FoundStep) -> CheckpointMetadata:
        step = step_found.step
        contents = step.holdings.contents
        return CheckpointMetadata(
            step=step.step,
            save=step.save,
            line=line.after(step.step, step.save, contents.parents),
            path=self._path(step.step),
            metrics=json.loads(contents.metrics or "null"),
            custom_metadata=json.loads(contents.custom_metadata or "null"),
            commit_timestamp_nsecs=1_000_000 * contents.time_ms,
        )

    def _path(self, step: int) -> epath.Path | None:
        root = self._world.root
        return None if root is None else root.final(step)

    def _files(self) -> epath.Path:
        # Under one controller the path has to be the same on all machines.
        slot = self._world.disk.host_directory(self._world.own.slot)
        return slot / ram_disk.RESTORED

    def _opened(self) -> _Restoring:
        assert self._restoring is not None
        return self._restoring


class _Reach(NamedTuple):
    """The tiers and steps that can be searched.

    Attributes:
      tiers: those that answer.
      foreign: the steps that Orbax alone saved, with the saves that they count as.
      recorded: lines that are recorded in storage.
      out_of_reach: why storage does not answer; None if it does, or there is none.
    """

    tiers: list[Tier]
    foreign: dict[int, str]
    recorded: list[line.Line]
    out_of_reach: str | None


@dataclasses.dataclass(kw_only=True, eq=False)
class _Restoring:
    step_found: find.FoundStep
    reader: verified_read.VerifiedReader
    wanted: Sequence[trees.WantedLeaf] = ()
    values: dict[str, list[np.ndarray]] = dataclasses.field(default_factory=dict)
    others: Mapping[str, TreeReading] = dataclasses.field(default_factory=dict)
    others_made: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def _counted(looking: find.Search, foreign: Mapping[int, str]) -> list[int]:
    # The steps of Orbax alone that are not abandoned, ascending.
    return sorted(
        step for step, save in foreign.items() if not looking.line.abandons(step, save)
    )
