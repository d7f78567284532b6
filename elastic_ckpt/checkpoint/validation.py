"""Whether a saved step belongs to this run: checked before anything of it is loaded."""

from __future__ import annotations

from typing import Any

import jax

from elastic_ckpt.core import errors


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
      saved: a pytree whose leaves have a `shape` and a `dtype`, as saved.
      wanted: likewise, as this run computes it.
    """
    before, now = leaves(saved), leaves(wanted)
    differing = [
        f"{path}: saved {_shape(before.get(path))}, now {_shape(now.get(path))}"
        for path in sorted(before.keys() | now.keys())
        if _shape(before.get(path)) != _shape(now.get(path))
    ]
    if differing:
        shown = "; ".join(differing[:3])
        more = f"; and {len(differing) - 3} more" if len(differing) > 3 else ""
        raise errors.CheckpointError(
            f"{step_path} is a checkpoint of another model ({shown}{more}); set the"
            " model's keys back, or start a new run_name"
        )


def _shape(leaf: Any) -> str:
    if leaf is None:
        return "nothing"
    return f"{leaf.dtype}{list(leaf.shape)}"
