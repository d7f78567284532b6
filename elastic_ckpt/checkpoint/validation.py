"""Checks that a saved step fits this run, before anything of it is loaded."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from elastic_ckpt.checkpoint.host import trees
from elastic_ckpt.core import errors


def leaves(tree: Any, *, with_none: bool = False) -> dict[str, Any]:
    """The leaves of a pytree by their paths, such as `opt_state/1/0/mu/embedding`.

    Args:
      tree: the tree.
      with_none: whether None is a leaf.
    """
    is_leaf = (lambda node: node is None) if with_none else None
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_leaf)
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
      wanted: the requested tree. Its leaves with a `shape` are compared, and texts are
        requested for texts alone; `...` and None skip a leaf.
    """
    before = {path: _form(leaf) for path, leaf in leaves(saved).items()}
    now: dict[str, str] = {}
    for path, leaf in leaves(wanted, with_none=True).items():
        if leaf is None or leaf is ...:
            before.pop(path, None)
            continue
        now[path] = _form(leaf)
        if now[path] == _NUMBER and before.get(path) != _TEXT:
            # Orbax decides which arrays and numbers it makes a number of.
            now[path] = before.get(path, "a leaf")
        elif before.get(path) == _NUMBER:
            before[path] = _form(np.zeros(()))
    trees.check_same_model(step_path, before, now)


_NUMBER, _TEXT = "a number", "a text"


def _form(leaf: Any) -> str:
    if leaf is str or isinstance(leaf, str):
        return _TEXT
    if isinstance(leaf, type) or not hasattr(leaf, "shape"):
        return _NUMBER
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        # Typed random keys are saved as the numbers that they consist of.
        leaf = jax.eval_shape(jax.random.key_data, leaf)
    return str(list(leaf.shape))
