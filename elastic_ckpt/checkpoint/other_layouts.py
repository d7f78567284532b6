"""Restores steps of another layout than the requested trees have, through rules.

The rules lie above this room, and come as `Layouts`. A tree that the step has as it is
requested is restored as ever, without them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import jax
from etils import epath

from elastic_ckpt.checkpoint import components, metadata, restore, validation
from elastic_ckpt.checkpoint.hosts import Hosts
from elastic_ckpt.core import errors, events
from elastic_ckpt.host import backup_requests
from elastic_ckpt.host.answers import (
    CheckpointMetadata,
    ComponentsLoaded,
    HostsFailedError,
)


class Layouts(Protocol):
    """Reads trees through layouts, as `elastic_ckpt.universal` does."""

    def load(self, path: epath.Path, abstract: Any, *, layout: Any) -> Any:
        """Reads a tree into the shardings of an abstract one.

        Args:
          path: of the saved tree.
          abstract: the requested tree.
          layout: as users give it.
        """
        ...

    def fitting(self, path: epath.Path) -> Sequence[str]:
        """The names of layouts that fit the tree saved at `path`, for a message."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepRestorer:
    """Restores steps; see `restore.restore`.

    Attributes:
      hosts: of the world.
      layouts: None if there are none.
      emit: called with the sources of the values, and with problems.
    """

    hosts: Hosts
    layouts: Layouts | None
    emit: events.Emit

    def load(
        self,
        step: int | CheckpointMetadata | None,
        wanted: Mapping[str, Any],
        *,
        partial: bool,
        layout: Any,
    ) -> tuple[restore.Search, dict[str, Any]]:
        """Restores a step; returns its search, and the requested parts.

        Args:
          step: None takes the newest complete one.
          wanted: by name, abstract trees and components.
          partial: whether trees may lack leaves that were saved.
          layout: relates the leaves of saved trees with those of requested ones that
            differ from them; None if no tree may differ.

        Raises:
          CheckpointError: as `restore.restore`, or if a step of another layout is not
            in persistent storage.
          ConfigError: if the layout does not fit.
        """
        if layout is not None:
            return self._through(step, wanted, partial, layout)
        try:
            return restore.restore(
                self.hosts, step, wanted, partial=partial, emit=self.emit
            )
        except errors.OtherModelError as error:
            names = self._fitting(step, wanted)
            if not names:
                raise
            raise errors.OtherModelError(
                f"{error}. Layouts that ship and fit the names in it:"
                f" {errors.first_of(names)}; give one as `layout`"
            ) from None

    def _through(
        self,
        step: int | CheckpointMetadata | None,
        wanted: Mapping[str, Any],
        partial: bool,
        layout: Any,
    ) -> tuple[restore.Search, dict[str, Any]]:
        checkpoint = restore.find(self.hosts, step, emit=self.emit).checkpoint
        if checkpoint is None:
            return restore.restore(
                self.hosts, step, wanted, partial=partial, emit=self.emit
            )
        saved = metadata.of_step(self.hosts, checkpoint).metadata
        trees, _ = components.split(wanted)
        others = {
            name: tree
            for name, tree in trees.items()
            if tree is not None and not _is_same(saved.get(name), tree)
        }
        loaded = self._load(checkpoint, others, layout)
        num_bytes = sum(getattr(leaf, "nbytes", 0) for leaf in jax.tree.leaves(loaded))

        def emit(name: str, **fields: Any) -> None:
            if name == "restored_from":
                fields["persistent_bytes"] += num_bytes
            self.emit(name, **fields)

        rest = {name: each for name, each in wanted.items() if name not in others}
        search, restored = restore.restore(
            self.hosts, checkpoint, rest, partial=partial, emit=emit
        )
        parts = {**restored, **loaded}
        return search, {name: parts[name] for name in wanted}

    def _load(
        self, checkpoint: CheckpointMetadata, trees: Mapping[str, Any], layout: Any
    ) -> dict[str, Any]:
        # No host waits for one that has failed.
        loaded: dict[str, Any] = {}
        if not trees:
            return loaded
        path = self._path(checkpoint)
        own: Exception | None = None
        try:
            assert self.layouts is not None
            for name, tree in trees.items():
                loaded[name] = self.layouts.load(path / name, tree, layout=layout)
        except Exception as error:
            own = error
        outcomes = self.hosts.share(
            ComponentsLoaded(problem=None if own is None else str(own))
        )
        failed = {n: each.problem for n, each in enumerate(outcomes) if each.problem}
        if own is not None or failed:
            raise own or HostsFailedError(failed)
        return loaded

    def _path(self, checkpoint: CheckpointMetadata) -> epath.Path:
        step, path = checkpoint.step, checkpoint.path
        if self.layouts is None:
            raise errors.CheckpointError(
                f"step {step} is of another layout, and this checkpointer reads none;"
                " make it with `elastic_ckpt.Checkpointer`"
            )
        if path is not None and (
            not checkpoint.save
            or self.hosts.first(
                backup_requests.HasBackup(step=step, save=checkpoint.save)
            )
        ):
            return path
        raise errors.CheckpointError(
            f"step {step} is of another layout, and in RAM alone; a layout reads steps"
            " from persistent storage. Restore it as it was saved, and save it with"
            " force=True"
        )

    def _fitting(
        self, step: int | CheckpointMetadata | None, wanted: Mapping[str, Any]
    ) -> list[str]:
        checkpoint = restore.find(self.hosts, step, emit=events.nobody).checkpoint
        if self.layouts is None or checkpoint is None or checkpoint.path is None:
            return []
        trees, _ = components.split(wanted)
        names = {
            each
            for tree in trees
            for each in self.layouts.fitting(checkpoint.path / tree)
        }
        return sorted(names)


def _is_same(saved: Any, wanted: Any) -> bool:
    try:
        validation.check_same_tree("the step", saved, wanted)
    except errors.OtherModelError:
        return False
    return True
