"""Restores steps of another layout than the requested trees have, through rules.

The rules lie above this room, and come as `Layouts`. A tree that the step has as it is
requested is restored as ever, without them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from etils import epath

from elastic_ckpt.checkpoint import (
    component_io,
    foreign_steps,
    metadata,
    restore,
    validation,
)
from elastic_ckpt.checkpoint.host.answers import (
    CheckpointMetadata,
    HostsFailedError,
)
from elastic_ckpt.checkpoint.host.backup import HostBackup
from elastic_ckpt.checkpoint.host.step_boxes import StepBoxes
from elastic_ckpt.checkpoint.hosts import Hosts
from elastic_ckpt.core import errors, events
from elastic_ckpt.steps.manifest import Contents

ValueT = TypeVar("ValueT")


class Layouts(Protocol):
    """Reads trees through layouts, as `elastic_ckpt.universal` does."""

    def match(
        self, contents: Contents, name: str, abstract: Any, *, layout: Any
    ) -> Callable[[StepBoxes], Any]:
        """Matches a layout with a saved tree, before a value is read.

        Args:
          contents: of a step.
          name: of the saved tree.
          abstract: the requested tree.
          layout: as users give it.

        Returns:
          A function that reads the tree into its shardings from the step's boxes.

        Raises:
          ConfigError: if the layout does not fit.
        """
        ...

    def load(self, path: epath.Path, abstract: Any, *, layout: Any) -> Any:
        """Reads a tree into the shardings of an abstract one.

        Args:
          path: of the saved tree, in persistent storage.
          abstract: the requested tree.
          layout: as users give it.
        """
        ...

    def fitting(self, tree: epath.Path | tuple[Contents, str]) -> Sequence[str]:
        """The names of layouts that fit a saved tree, for a message.

        Args:
          tree: its path, or the contents of its step and its name.
        """
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepRestorer:
    """Restores steps; see `restore.restore`.

    Attributes:
      hosts: of the world.
      layouts: read the trees that differ.
      emit: called with the sources of the values, and with problems.
    """

    hosts: Hosts
    layouts: Layouts
    emit: events.Emit

    def load(
        self,
        step: int | CheckpointMetadata | None,
        wanted: Mapping[str, Any],
        *,
        partial: bool,
        layout: Any,
    ) -> restore.Restored:
        """Restores a step.

        Args:
          step: None takes the newest complete one.
          wanted: by name, abstract trees and components.
          partial: whether trees may lack leaves that were saved.
          layout: relates the leaves of saved trees with those of requested ones that
            differ from them; None if no tree may differ.

        Raises:
          CheckpointError: as `restore.restore`.
          ConfigError: if the layout does not fit.
        """
        rules = None
        if layout is not None:
            rules = _Rules(hosts=self.hosts, layouts=self.layouts, layout=layout)
        try:
            return restore.restore(
                self.hosts, step, wanted, partial=partial, emit=self.emit, rules=rules
            )
        except errors.OtherModelError as error:
            names = [] if layout is not None else self._fitting(step, wanted)
            if not names:
                raise
            raise errors.OtherModelError(
                f"{error}. Layouts that ship and fit the names in it:"
                f" {errors.first_of(names)}; give one as `layout`"
            ) from None

    def _fitting(
        self, step: int | CheckpointMetadata | None, wanted: Mapping[str, Any]
    ) -> list[str]:
        checkpoint = restore.find(self.hosts, step, emit=events.nobody).checkpoint
        if checkpoint is None:
            return []
        trees, _ = component_io.split(wanted)
        names: set[str] = set()
        for name in trees:
            # The step that was refused is open, unless Orbax alone saved it.
            if checkpoint.save:
                names.update(self.layouts.fitting((self.hosts.opened(), name)))
            elif checkpoint.path is not None:
                names.update(self.layouts.fitting(checkpoint.path / name))
        return sorted(names)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Rules:
    # See `restore.Rules`.
    hosts: Hosts
    layouts: Layouts
    layout: Any

    def readings(
        self,
        checkpoint: CheckpointMetadata,
        contents: Contents,
        trees: Mapping[str, Any],
    ) -> dict[str, _Reading]:
        saved = metadata.of_contents(checkpoint, contents).metadata
        return self._on_all(
            lambda: {
                name: _Reading(
                    rules=self,
                    checkpoint=checkpoint,
                    name=name,
                    abstract=tree,
                    read=self.layouts.match(contents, name, tree, layout=self.layout),
                )
                for name, tree in _differing(saved, trees).items()
            }
        )

    def of_orbax(
        self, checkpoint: CheckpointMetadata, trees: Mapping[str, Any]
    ) -> dict[str, Any]:
        path = checkpoint.path
        assert path is not None
        return self._on_all(
            lambda: {
                name: self.load(path / name, tree)
                for name, tree in _differing(
                    foreign_steps.read_parts(path), trees
                ).items()
            }
        )

    def load(self, path: epath.Path, abstract: Any) -> Any:
        return self.layouts.load(path, abstract, layout=self.layout)

    def _on_all(self, work: Callable[[], ValueT]) -> ValueT:
        # No host waits for one that has failed.
        try:
            result = work()
        except Exception as error:
            self.hosts.share("layout", str(error))
            raise
        problems: list[str | None] = self.hosts.share("layout", None)
        failed = {n: each for n, each in enumerate(problems) if each is not None}
        if failed:
            # An older step is no remedy, unlike for a step that cannot be read.
            raise errors.CheckpointError(str(HostsFailedError(failed)))
        return result


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Reading:
    # See `step_boxes.TreeReading`.
    rules: _Rules
    checkpoint: CheckpointMetadata
    name: str
    abstract: Any
    read: Callable[[StepBoxes], Any]

    def of_boxes(self, saved: StepBoxes) -> Any:
        return self.read(saved)

    def of_storage(self) -> Any:
        step, path = self.checkpoint.step, self.checkpoint.path
        if path is None or not self.rules.hosts.first(
            HostBackup.holds, self.checkpoint.step_id
        ):
            raise errors.CheckpointError(
                f"step {step} was saved in another layout and is only in the RAM of"
                " other processes; under one controller a layout can read only steps"
                " in persistent storage. Restore it as it was saved, and save it with"
                " force=True"
            )
        return self.rules.load(path / self.name, self.abstract)


def _differing(saved: Mapping[str, Any], trees: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: tree
        for name, tree in trees.items()
        if tree is not None and name in saved and not _is_same(saved[name], tree)
    }


def _is_same(saved: Any, wanted: Any) -> bool:
    try:
        validation.check_same_tree("the step", saved, wanted)
    except errors.OtherModelError:
        return False
    return True
