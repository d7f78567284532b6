"""Checks that a saved step fits this run, before anything of it is loaded."""

from __future__ import annotations

from typing import Any

import jax

from elastic_ckpt.core import errors
from elastic_ckpt.host import trees


def leaves(tree: Any) -> dict[str, Any]:
    """The leaves of a pytree by their paths, such as `opt_state/1/0/mu/embedding`."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def check_parts(step_path: str, saved: set[str], wanted: set[str]) -> None:
    """Raises a CheckpointError if a step lacks a part that this run needs."""
    missing = sorted(wanted - saved)
    if missing:
        raise errors.CheckpointError(
            f"{step_path} lacks {missing} of its parts {sorted(wanted)}; restore them"
            " from a copy, or move this step out of its directory to continue from the"
            " one before"
        )


def check_same_tree(step_path: str, saved: Any, wanted: Any) -> None:
    """Raises a CheckpointError naming the first leaves in which two trees differ.

    Args:
      step_path: where `saved` is from, for the message.
      saved: a pytree whose leaves have a `shape`, as saved, or are numbers or texts.
      wanted: the requested tree; its leaves with a `shape` are compared.
    """
    before = {path: _shape(leaf) for path, leaf in leaves(saved).items()}
    now = {
        path: _shape(leaf) if hasattr(leaf, "shape") else before.get(path, "a leaf")
        for path, leaf in leaves(wanted).items()
    }
    trees.check_same_model(step_path, before, now)


def _shape(leaf: Any) -> str:
    return str(list(getattr(leaf, "shape", ())))
