"""What a step holds, by its manifests alone: trees to ask for, and components."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as orbax

from elastic_ckpt.checkpoint import summary
from elastic_ckpt.checkpoint.hosts import Hosts
from elastic_ckpt.checkpoint.restore import Found


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointMetadata(Found):
    """A step, and what it holds.

    Attributes:
      metadata: of a pytree, nested dicts of `jax.ShapeDtypeStruct`, or by the name of
        each checkpointable such a tree, and None of a component. Of a step that Orbax
        alone saved, what Orbax tells.
    """

    metadata: Any


def of_step(hosts: Hosts, found: Found, directory: str | None) -> CheckpointMetadata:
    """What a step holds, by the names of its checkpointables.

    Args:
      hosts: of the world.
      found: the step.
      directory: of the persistent tier; None if there is none.

    Raises:
      HostsFailed: if it is not complete any more.
    """
    if found.save:
        told = hosts.first("reader.contents", found.step, found.save)
        held = dict.fromkeys(told["components"]) | _trees(told["leaves"])
    else:
        held = summary.read_parts(f"{directory}/{found.step}")
    return CheckpointMetadata(
        step=found.step, save=found.save, line=found.line, metadata=held
    )


def _trees(leaves: list[Any]) -> dict[str, Any]:
    # Sequences have become dicts, whose leaves have the same paths.
    flat = {
        path: jax.ShapeDtypeStruct(tuple(shape), np.dtype(dtype))
        for path, shape, dtype in leaves
    }
    return orbax.tree.from_flat_dict(flat, sep="/")
