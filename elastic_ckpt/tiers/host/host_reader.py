"""A host's part in a restore: what it finds, reads, verifies and puts right.

A restore goes through `find`, `open_step`, `check`, `read`, `materialise`, `repair`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from etils import epath

from elastic_ckpt.core import errors, storage
from elastic_ckpt.tiers import find, read_plan, trees, verified_read
from elastic_ckpt.tiers.host import recovery
from elastic_ckpt.tiers.host.host_world import Answer, HostWorld
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

    def find(self, step: int | None, without: Sequence[Sequence[Any]]) -> Answer:
        """The newest complete step, or a certain one, but for some saves.

        Returns:
          What is `found`, a step and save, or None; what was `passed_over`, pairs of a
          step and why; and why storage is `out_of_reach`, or None.

        Raises:
          CheckpointError: if a certain step is not complete.
        """
        excluded = {(number, save) for number, save in without}
        tiers, foreign, out_of_reach = self._within_reach()
        if step is not None:
            place: Answer = {"step": step, "save": ""}
            if step not in foreign:
                place = _place(find.of_step(tiers, step, without=excluded))
            return {"found": place, "passed_over": [], "out_of_reach": out_of_reach}
        found = _newest(tiers, excluded, foreign)
        return {**found, "out_of_reach": out_of_reach}

    def complete_steps(self) -> list[Answer]:
        """The steps that are complete, ascending."""
        tiers, _, _ = self._within_reach()
        steps = sorted({step for tier in tiers for step in tier.steps()})
        found = [find.of_step_or_none(tiers, step) for step in steps]
        return [_place(each) for each in found if each is not None]

    def contents(self, step: int, save: str) -> Answer:
        """What a step holds: `leaves`, of each path, shape and dtype, and `components`.

        Raises:
          CheckpointError: if it is not complete.
        """
        contents = find.of_save(self._world.tiers, step, save).step.holdings.contents
        return {
            "leaves": [[of.path, list(of.shape), of.dtype] for of in contents.leaves],
            "components": sorted(contents.components),
        }

    def open_step(self, step: int, save: str) -> None:
        """Turns to a step that is to be read.

        Raises:
          CheckpointError: if it is not complete by what this host can reach.
        """
        found = find.of_save(self._world.tiers, step, save)
        reader = verified_read.VerifiedReader(found.sources)
        self.forget()
        self._restoring = _Restoring(found=found, reader=reader)

    def check(
        self, of_trees: Mapping[str, Any], components: Sequence[str], partial: bool
    ) -> None:
        """Turns to what is wanted of the step, for the devices of this process.

        Args:
          of_trees: that are wanted.
          components: that are wanted.
          partial: whether trees may lack leaves that were saved.

        Raises:
          CheckpointError: if the step has it not.
        """
        whole = () if partial else tuple(of_trees)
        self.want(trees.wanted(of_trees), components, whole)

    def want(
        self,
        wanted: Sequence[trees.WantedLeaf],
        components: Sequence[str],
        whole: Sequence[str],
    ) -> dict[str, str]:
        """As `check`; the dtypes of the leaves, as they were saved.

        Args:
          wanted: the leaves.
          components: that are wanted.
          whole: the names of trees of which no leaf may be lacking.
        """
        restoring = self._opened()
        held = restoring.found.step
        contents = held.holdings.contents
        missing = sorted(set(components) - contents.components.keys())
        if missing:
            raise errors.CheckpointError(
                f"step {held.step} has no parts {missing}; it has"
                f" {sorted(contents.components)}: restore what it has"
            )
        trees.check(wanted, contents, step=held.step, whole=whole)
        restoring.wanted = wanted
        saved = {leaf.path: leaf.dtype for leaf in contents.leaves}
        return {leaf.path: saved[leaf.path] for leaf in wanted}

    def read(self) -> Answer:
        """Reads and verifies what this host's devices need of the step.

        Returns:
          `read_bytes`, by how near their holders were.

        Raises:
          CheckpointError: if no good copy of a part is left.
        """
        restoring = self._opened()
        restoring.values = recovery.read_leaves(
            restoring.found,
            restoring.wanted,
            restoring.reader,
            host=self._world.own.host,
            domain=self._world.peers.domain,
        )
        return {
            "read_bytes": recovery.by_nearness(
                restoring.reader.read_bytes,
                self._world.own.host,
                domain=self._world.peers.domain,
            )
        }

    def materialise(self, component: str) -> str:
        """Writes the files of a component of the step, verified; the directory."""
        restoring = self._opened()
        files = read_plan.files(
            restoring.found.step,
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
        """The trees, made of what was read."""
        made = self.made()
        return {
            name: trees.rebuilt(tree, name, made) for name, tree in of_trees.items()
        }

    def made(self) -> dict[str, Any]:
        """What each leaf makes of what was read for it, by path."""
        restoring = self._opened()
        return {
            leaf.path: leaf.make(restoring.values[leaf.path])
            for leaf in restoring.wanted
        }

    def bad_copies(self) -> list[Answer]:
        """The bad copies that this host met while it read."""
        return [recovery.describe(bad) for bad in self._opened().reader.bad]

    def repair(self, bad: Sequence[Answer]) -> list[str]:
        """Puts right what is bad of the step that was read, on this host.

        Args:
          bad: copies that any host met.

        Returns:
          The names of what was put right.
        """
        restoring = self._opened()
        files = {
            each["file"]
            for each in bad
            if each["tier"] == "local" and each["host"] == self._world.own.host.id
        }
        if not files:
            return []
        return recovery.put_right(
            restoring.found.step.holdings, restoring.reader, self._world.own, files
        )

    def forget(self) -> None:
        """Lets go of what was read."""
        self._restoring = None
        storage.remove(self._files())

    def _within_reach(self) -> tuple[list[Tier], list[int], str | None]:
        # What can be searched, the steps of Orbax alone, and why storage cannot be.
        storage_tier = self._world.persistent
        if storage_tier is None:
            return self._world.tiers, [], None
        try:
            return self._world.tiers, storage_tier.foreign_steps(), None
        except errors.CheckpointError as error:
            in_ram = [tier for tier in self._world.tiers if tier is not storage_tier]
            return in_ram, [], str(error)

    def _files(self) -> epath.Path:
        # Under one controller all machines have to name it alike.
        slot = self._world.disk.host_directory(self._world.own.slot)
        return slot / ram_disk.RESTORED

    def _opened(self) -> _Restoring:
        assert self._restoring is not None
        return self._restoring


@dataclasses.dataclass(kw_only=True, eq=False)
class _Restoring:
    found: find.FoundStep
    reader: verified_read.VerifiedReader
    wanted: Sequence[trees.WantedLeaf] = ()
    values: dict[str, list[np.ndarray]] = dataclasses.field(default_factory=dict)


def _newest(
    tiers: Sequence[Tier], without: set[tuple[int, str]], foreign: Sequence[int]
) -> Answer:
    outcome = find.newest(tiers, without=without)
    place = None if outcome.found is None else _place(outcome.found)
    if foreign and (place is None or foreign[-1] > place["step"]):
        place = {"step": foreign[-1], "save": ""}
    passed_over = [list(each) for each in outcome.passed_over.items()]
    return {"found": place, "passed_over": passed_over}


def _place(found: find.FoundStep) -> Answer:
    return {"step": found.step.step, "save": found.step.save}
