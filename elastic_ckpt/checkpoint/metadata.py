"""The contents of a step, from its manifests: abstract trees, and components."""

from __future__ import annotations

import dataclasses
import datetime
from typing import Any

import jax
from etils import epath
from orbax.checkpoint import v1 as ocp

from elastic_ckpt.checkpoint import foreign_steps, tree_structure
from elastic_ckpt.checkpoint.hosts import Hosts
from elastic_ckpt.checkpoint.tree_structure import Text
from elastic_ckpt.host import read_requests
from elastic_ckpt.host.answers import CompleteStep
from elastic_ckpt.manifests.manifest import Contents


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointMetadata:
    """A complete step, with the attributes of Orbax's class of this name.

    Attributes:
      step: the training step.
      save: which save of it; empty if Orbax alone saved it.
      line: the steps, with their saves, from which later saves of its line went on,
        oldest first, and last this one.
      path: its directory in persistent storage, once it is backed up; None if there is
        no persistent tier.
      metrics: that it was saved with; None if there are none.
      custom_metadata: added by the user; None if there is none.
      commit_timestamp_nsecs: when it was committed, since 1970.
      init_timestamp_nsecs: when its save began, since 1970, if that is known.
      metadata: by the name of each checkpointable, the tree with abstract leaves, or
        None for a component; or the tree of the one that was asked for. A text is
        `"string"`. If Orbax alone saved the step, Orbax's metadata. None where only
        steps are listed.
    """

    step: int
    save: str
    line: tuple[tuple[int, str], ...] = ()
    path: epath.Path | None = dataclasses.field(default=None, compare=False)
    metrics: Any = dataclasses.field(default=None, compare=False)
    custom_metadata: Any = dataclasses.field(default=None, compare=False)
    commit_timestamp_nsecs: int | None = dataclasses.field(default=None, compare=False)
    init_timestamp_nsecs: int | None = dataclasses.field(default=None, compare=False)
    metadata: Any = None

    @classmethod
    def from_step(cls, checkpoint_found: CompleteStep) -> CheckpointMetadata:
        """Returns the step that a host found."""
        path = (
            None if checkpoint_found.path is None else epath.Path(checkpoint_found.path)
        )
        fields: dict[str, Any] = {**vars(checkpoint_found), "path": path}
        return cls(**fields)

    @property
    def time(self) -> datetime.datetime:
        """When it was committed."""
        return _time(self.commit_timestamp_nsecs or 0)

    @property
    def commit_timestamp(self) -> datetime.datetime | None:
        """When it was committed, if that is known."""
        nsecs = self.commit_timestamp_nsecs
        return None if nsecs is None else _time(nsecs)

    @property
    def init_timestamp(self) -> datetime.datetime | None:
        """When its save began, if that is known."""
        nsecs = self.init_timestamp_nsecs
        return None if nsecs is None else _time(nsecs)

    def before(self) -> tuple[tuple[int, str], ...]:
        """The parents of a save that replaces this step: the line without it."""
        *parents, (step, save) = self.line
        return (*parents, (step - 1, save)) if step else tuple(parents)


def of_step(hosts: Hosts, checkpoint_found: CheckpointMetadata) -> CheckpointMetadata:
    """The contents of a step, by the names of its checkpointables.

    Args:
      hosts: of the world.
      checkpoint_found: the step.

    Raises:
      HostsFailedError: if it is not complete any more.
    """
    if not checkpoint_found.save:
        return _of_orbax(checkpoint_found)
    hosts.all(
        read_requests.OpenStep(step=checkpoint_found.step, save=checkpoint_found.save)
    )
    contents = hosts.opened()
    hosts.all(read_requests.CloseStep())
    return of_contents(checkpoint_found, contents)


def of_contents(
    checkpoint_found: CheckpointMetadata, contents: Contents
) -> CheckpointMetadata:
    """The metadata of a step with these contents."""
    trees = tree_structure.saved_trees(contents)
    held = dict.fromkeys(contents.components) | jax.tree.map(_described, trees)
    return dataclasses.replace(checkpoint_found, metadata=held)


def _of_orbax(checkpoint_found: CheckpointMetadata) -> CheckpointMetadata:
    assert checkpoint_found.path is not None
    return dataclasses.replace(
        checkpoint_found,
        init_timestamp_nsecs=ocp.checkpointables_metadata(
            checkpoint_found.path
        ).init_timestamp_nsecs,
        metadata=foreign_steps.read_parts(checkpoint_found.path),
    )


def _time(nsecs: int) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(nsecs / 1e9, tz=datetime.UTC)


def _described(leaf: Any) -> Any:
    # Orbax's description of texts.
    return "string" if isinstance(leaf, Text) else leaf
