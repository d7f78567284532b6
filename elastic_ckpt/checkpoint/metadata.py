"""The contents of a step, from its manifests: abstract trees, and components."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import orbax.checkpoint as v0

from elastic_ckpt.checkpoint import foreign_steps, tree_structure
from elastic_ckpt.checkpoint.host.answers import CheckpointMetadata
from elastic_ckpt.checkpoint.host.reader import HostReader
from elastic_ckpt.checkpoint.hosts import Hosts
from elastic_ckpt.checkpoint.tree_structure import Text
from elastic_ckpt.steps.manifest import Contents


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
    hosts.all(HostReader.open_step, checkpoint_found.step_id)
    contents = hosts.opened()
    hosts.all(HostReader.close_step)
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
        init_timestamp_nsecs=v0.metadata.get_step_metadata(
            checkpoint_found.path
        ).init_timestamp_nsecs,
        metadata=foreign_steps.read_parts(checkpoint_found.path),
    )


def _described(leaf: Any) -> Any:
    # Orbax's description of texts.
    return "string" if isinstance(leaf, Text) else leaf
