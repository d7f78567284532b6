"""What a step holds, by its manifests alone: trees to ask for, and components."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from orbax.checkpoint import v1 as ocp

from elastic_ckpt.checkpoint import summary, tree_structure
from elastic_ckpt.checkpoint.hosts import Hosts
from elastic_ckpt.checkpoint.restore import Found
from elastic_ckpt.checkpoint.tree_structure import Text
from elastic_ckpt.host import read_requests
from elastic_ckpt.manifests.manifest import Contents


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointMetadata(Found):
    """A step, and what it holds.

    Attributes:
      metadata: of a pytree, the same tree with abstract leaves, or by the name of each
        checkpointable such a tree, and None of a component. A text is `"string"`. Of a
        step that Orbax alone saved, what Orbax has.
      init_timestamp_nsecs: when its save began, since 1970, if that is known.
    """

    metadata: Any
    init_timestamp_nsecs: int | None = None


def of_step(hosts: Hosts, found: Found, directory: str | None) -> CheckpointMetadata:
    """What a step holds, by the names of its checkpointables.

    Args:
      hosts: of the world.
      found: the step.
      directory: of the persistent tier; None if there is none.

    Raises:
      HostsFailed: if it is not complete any more.
    """
    if not found.save:
        return _of_orbax(found, f"{directory}/{found.step}")
    hosts.all(read_requests.OpenStep(step=found.step, save=found.save))
    contents = hosts.opened()
    hosts.all(read_requests.CloseStep())
    return of_contents(found, contents)


def of_contents(found: Found, contents: Contents) -> CheckpointMetadata:
    """What a step with some contents holds."""
    trees = tree_structure.saved_trees(contents)
    return CheckpointMetadata(
        **vars(found),
        metadata=dict.fromkeys(contents.components) | jax.tree.map(_described, trees),
    )


def _of_orbax(found: Found, path: str) -> CheckpointMetadata:
    told = ocp.checkpointables_metadata(path)
    return CheckpointMetadata(
        **vars(found),
        init_timestamp_nsecs=told.init_timestamp_nsecs,
        metadata=summary.read_parts(path),
    )


def _described(leaf: Any) -> Any:
    # As Orbax describes texts.
    return "string" if isinstance(leaf, Text) else leaf
