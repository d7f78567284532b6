"""A host's part in a restore: it reads, verifies and repairs.

A restore goes through `StepSearch.find`, then `open_step`, `check`, `read`,
`materialise` and `repair`.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from absl import logging
from etils import epath

from elastic_ckpt.checkpoint.host import (
    component_files,
    recovery,
    repairs,
    step_search,
    trees,
    verified_read,
)
from elastic_ckpt.checkpoint.host.part_exchange import Letter
from elastic_ckpt.checkpoint.host.step_boxes import StepBoxes, TreeReading
from elastic_ckpt.checkpoint.host.verified_read import BadCopy
from elastic_ckpt.checkpoint.host.world import HostWorld
from elastic_ckpt.core import calls, errors, storage
from elastic_ckpt.steps import read_plan
from elastic_ckpt.steps.manifest import Contents
from elastic_ckpt.steps.part_table import SavedStep
from elastic_ckpt.steps.step_id import StepId
from elastic_ckpt.tiers import find
from elastic_ckpt.tiers.find import FoundStep
from elastic_ckpt.tiers.ram import ram_disk


class HostReader:
    """Reads what one host needs.

    Args:
      world: the host among the others.

    Attributes:
      sharing: of steps with the other hosts, and the search for them.
    """

    def __init__(self, world: HostWorld) -> None:
        self._world = world
        self._restoring: _Restoring | None = None
        self.sharing = step_search.StepSearch(world)

    @calls.call()
    def open_step(self, step_id: StepId, *, is_dealt: bool = False) -> None:
        """Opens a step for reading.

        Args:
          step_id: the step.
          is_dealt: whether host 0 has passed its contents down.

        Raises:
          CheckpointError: if it is not complete in the tiers that this host can reach.
        """
        self._release()
        whole: FoundStep | None = None
        try:
            contents = self.sharing.contents(step_id) if is_dealt else None
        except errors.CheckpointError as error:
            logging.warning("%s; this host reads the manifests of all", error)
            contents = None
        if contents is None:
            whole = find.of_save(self._world.tiers, step_id)
            contents = whole.step.holdings.contents
        saved = SavedStep(self._world.run, step_id, contents)
        self._restoring = _Restoring(saved=saved, whole=whole)

    @calls.call(order="up")
    def offer_wanted(self) -> tuple[Letter, ...]:
        """Offers a list of the boxes that this host needs of the step that is open."""
        restoring = self._opened()
        wanted = None
        if restoring.whole is None and not restoring.others:
            wanted = recovery.wanted_boxes(restoring.wanted, restoring.saved.contents)
        return self.sharing.offer_wanted(restoring.saved, wanted)

    @calls.call()
    def opened(self) -> Contents:
        """The contents of the step that was opened."""
        return self._opened().saved.contents

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
        contents = restoring.saved.contents
        missing = sorted(set(components) - contents.components.keys())
        if missing:
            trees = {leaf.path.partition("/")[0] for leaf in contents.leaves}
            raise errors.CheckpointError(
                f"step {restoring.saved.step_id.step} contains no {missing}; it"
                f" contains {sorted(trees.union(contents.components))}. Request only"
                " those"
            )
        restoring.wanted = wanted
        saved = {leaf.path: leaf.dtype for leaf in contents.leaves}
        return {leaf.path: saved[leaf.path] for leaf in wanted}

    @calls.call(limit_secs=calls.LONG_SECS)
    def read(self) -> dict[str, int]:
        """Reads and verifies the selected parts of the step.

        Returns:
          The bytes that were read, by nearness of their holders.

        Raises:
          CheckpointError: if no good copy of a part is left.
        """
        return self.read_some(None)

    def read_some(self, paths: Collection[str] | None) -> dict[str, int]:
        """As `read`, of the leaves with these paths; None for all that is selected."""
        restoring = self._opened()
        is_dealt = restoring.whole is None and not restoring.others
        try:
            if restoring.step_read is None and is_dealt:
                # What host 0 has passed down of the open step.
                step_id = restoring.saved.step_id
                restoring.step_read = self.sharing.parts(step_id)
            if restoring.step_read is not None:
                return self._read(restoring, restoring.step_read, paths)
        except errors.CheckpointError as error:
            if restoring.step_read and restoring.step_read is restoring.whole:
                raise
            logging.warning("%s; this host reads the manifests of all", error)
        restoring.step_read = self._whole(restoring)
        return self._read(restoring, restoring.step_read, paths)

    def _whole(self, restoring: _Restoring) -> FoundStep:
        # The open step with all of its holders, which most hosts do not need.
        if restoring.whole is None:
            restoring.whole = find.of_save(self._world.tiers, restoring.saved.step_id)
        return restoring.whole

    def _read(
        self,
        restoring: _Restoring,
        step_found: FoundStep,
        paths: Collection[str] | None,
    ) -> dict[str, int]:
        host, domain = self._world.own.host, self._world.peers.domain
        reader = verified_read.VerifiedReader(step_found.sources)
        restoring.readers.append(reader)
        wanted = restoring.wanted
        if paths is not None:
            wanted = [leaf for leaf in wanted if leaf.path in paths]
        # What was read before is on the devices.
        restoring.placed = {}
        restoring.placed = recovery.read_leaves(
            step_found, wanted, reader, host=host, domain=domain
        )
        if restoring.others:
            saved = StepBoxes(step_found, reader, host=host, domain=domain)
            restoring.others_made = {
                name: each.of_boxes(saved) for name, each in restoring.others.items()
            }
        near = read_plan.nearness(step_found.step.holdings, host, domain=domain)
        total: collections.Counter[str] = collections.Counter()
        for offer, num_bytes in reader.read_bytes.items():
            total[near[offer]] += num_bytes
        return dict(total)

    @calls.call(limit_secs=calls.LONG_SECS)
    def materialise(self, component: str) -> str:
        """Writes the verified files of a component; returns the directory."""
        restoring = self._opened()
        if restoring.step_read is None:
            return self._materialise(restoring, self._whole(restoring), component)
        try:
            return self._materialise(restoring, restoring.step_read, component)
        except errors.CheckpointError as error:
            # Its parts may be at the nearest holders alone.
            whole = self._whole(restoring)
            if whole is restoring.step_read:
                raise
            directory = self._materialise(restoring, whole, component)
            logging.warning("%s; this host has read the manifests of all", error)
            return directory

    def _materialise(
        self, restoring: _Restoring, step_found: FoundStep, component: str
    ) -> str:
        reader = verified_read.VerifiedReader(step_found.sources)
        restoring.readers.append(reader)
        files = read_plan.files(
            step_found.step,
            self._world.own.host,
            component,
            domain=self._world.peers.domain,
        )
        directory = str(storage.make_directory(self._files() / component))
        for file, offers in files:
            _, _, name = file.path.partition("/")
            storage.write_atomic(f"{directory}/{name}", reader.content(file, offers))
        return directory

    @calls.call()
    def files(self, component: str) -> dict[str, bytes]:
        """The content of the files that were materialised of a component, by path."""
        return component_files.read(self._files() / component)

    def arrays(self, of_trees: Mapping[str, Any]) -> dict[str, Any]:
        """Makes the trees of the values that were read; those of other layouts, too."""
        made = self.made()
        rebuilt = {
            name: trees.rebuilt(tree, name, made) for name, tree in of_trees.items()
        }
        return {**rebuilt, **self._opened().others_made}

    def made(self, paths: Collection[str] | None = None) -> dict[str, Any]:
        """Makes leaves of their placed boxes, by path; all, or some that were read."""
        restoring = self._opened()
        return {
            leaf.path: leaf.join(restoring.placed[leaf.path])
            for leaf in restoring.wanted
            if paths is None or leaf.path in paths
        }

    @calls.call()
    def bad_copies(self) -> tuple[BadCopy, ...]:
        """The bad copies that this host detected while it read."""
        bad = [each for reader in self._opened().readers for each in reader.bad]
        return tuple(dict.fromkeys(bad))

    @calls.call(limit_secs=calls.LONG_SECS)
    def repair(self, bad: tuple[BadCopy, ...]) -> tuple[str, ...]:
        """Repairs bad copies of the step that was read: this host's, and idle ones.

        Each bad copy of no host of the world is repaired by one host of it.

        Args:
          bad: copies that any host detected.

        Returns:
          The names of the repaired parts.
        """
        world = self._world
        dealt = repairs.dealt(bad, world.hosts, world.number)
        if world.is_read_only or not dealt:
            return ()
        try:
            whole = self._whole(self._opened())
        except errors.CheckpointError as error:
            # The step was read; it is not given up for copies that stay bad.
            logging.warning("bad copies are not repaired: %s", error)
            return ()
        return tuple(
            repairs.put_right(whole.step.holdings, whole.sources, world.own, dealt)
        )

    @calls.call()
    def close_step(self) -> None:
        """Releases the step that is open, its values and messages."""
        self._release()
        self.sharing.end()

    def _release(self) -> None:
        self._restoring = None
        storage.remove(self._files())

    def _files(self) -> epath.Path:
        # Under one controller the path has to be the same on all machines.
        slot = self._world.disk.host_directory(self._world.own.slot)
        return slot / ram_disk.RESTORED

    def _opened(self) -> _Restoring:
        assert self._restoring is not None
        return self._restoring


@dataclasses.dataclass(kw_only=True, eq=False)
class _Restoring:
    saved: SavedStep
    # With all holders, once they were asked for; and as it was read.
    whole: FoundStep | None
    step_read: FoundStep | None = None
    readers: list[verified_read.VerifiedReader] = dataclasses.field(
        default_factory=list
    )
    wanted: Sequence[trees.WantedLeaf] = ()
    placed: dict[str, list[Any]] = dataclasses.field(default_factory=dict)
    others: Mapping[str, TreeReading] = dataclasses.field(default_factory=dict)
    others_made: Mapping[str, Any] = dataclasses.field(default_factory=dict)
