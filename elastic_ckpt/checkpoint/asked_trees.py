"""Requested trees of a restore, matched with the saved ones.

A requested tree has, in the place of each leaf, the form to restore it in: an abstract
array, a number or its type, or `str`; `...` or None, for which nothing is read and
which stay; or an array type, for an array as it was saved. `resolve` derives the trees
that hosts read, and `AskedTrees.filled` puts the values into the requested trees.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from elastic_ckpt.checkpoint.host import trees
from elastic_ckpt.checkpoint.structure import saved_trees
from elastic_ckpt.core import errors
from elastic_ckpt.steps.manifest import Contents


@dataclasses.dataclass(frozen=True, kw_only=True)
class AskedTrees:
    """Requested trees.

    Attributes:
      read: by name, the trees that hosts read; None in the place of other leaves.
      given: by name, the same trees with the leaves that are not read.
    """

    read: Mapping[str, Any]
    given: Mapping[str, Any]

    def filled(self, made: Mapping[str, Any]) -> dict[str, Any]:
        """The requested trees, with the values that hosts read for `self.read`."""
        return jax.tree.map(
            lambda given, read, value: given if read is None else value,
            dict(self.given),
            dict(self.read),
            {name: made[name] for name in self.given},
            is_leaf=_is_none,
        )


def resolve(
    asked: Mapping[str, Any],
    contents: Contents,
    *,
    step: int,
    partial: bool,
    may_add: bool = True,
) -> AskedTrees:
    """Determines what hosts read for the requested trees.

    Args:
      asked: trees by name; None takes a whole tree as it was saved.
      contents: of the step.
      step: its number.
      partial: whether saved leaves may be left out.
      may_add: whether leaves that were not saved then stay as they are given.

    Raises:
      CheckpointError: if the step lacks a leaf, or has it in another form; it names the
        leaf.
    """
    saved = saved_trees(contents)
    missing = sorted(asked.keys() - saved.keys())
    if missing:
        there = sorted({*saved, *contents.components})
        raise errors.CheckpointError(
            f"step {step} contains no pytrees named {missing}; it contains {there}."
            " Restore those, and each component with an object that can load it"
        )
    abstract = {n: saved[n] if tree is None else tree for n, tree in asked.items()}
    leaves = _leaves(saved)
    resolved = {
        path: _resolved(path, leaf, leaves.get(path), may_add=partial and may_add)
        for path, leaf in _leaves(abstract).items()
    }
    structure = jax.tree.structure(abstract, is_leaf=_is_none)
    given = structure.unflatten([stays for stays, _ in resolved.values()])
    read = structure.unflatten([form for _, form in resolved.values()])
    # By path, the shapes of leaves, and texts as such.
    texts = {path: "text" for path, leaf in leaves.items() if isinstance(leaf, str)}
    there = texts | {leaf.path: str(list(leaf.shape)) for leaf in contents.arrays}
    now = dict.fromkeys(texts.keys() & resolved.keys(), "text")
    now |= {leaf.path: str(list(leaf.shape)) for leaf in trees.asked(read)}
    left_out = {path for path, (_, form) in resolved.items() if form is None}
    if partial:
        left_out |= there.keys()
    kept = {
        path: shape
        for path, shape in there.items()
        if path in now or (path.partition("/")[0] in asked and path not in left_out)
    }
    trees.check_same_model(f"step {step}", kept, now)
    return AskedTrees(read=read, given=given)


def _is_none(node: Any) -> bool:
    return node is None


def _leaves(named: Mapping[str, Any]) -> dict[str, Any]:
    # By path; None counts as a leaf.
    leaves = jax.tree.leaves_with_path(dict(named), is_leaf=_is_none)
    return {trees.leaf_path(keys[0].key, keys[1:]): leaf for keys, leaf in leaves}


def _resolved(
    path: str,
    leaf: Any,
    was: Any,
    *,
    may_add: bool,
) -> tuple[Any, Any]:
    # The placeholder of a leaf until the hosts have read, and what they read for it.
    if leaf is None or leaf is ...:
        return leaf, None
    if was is None:
        # It is named where that is an error.
        return leaf, None if may_add else leaf
    if isinstance(was, str) != (leaf is str or isinstance(leaf, str)):
        raise errors.CheckpointError(
            f"{path} was saved as {was!r} and cannot be restored as {leaf!r}; request"
            " `str` for texts, and only for texts"
        )
    if isinstance(was, str):
        return was, None
    return leaf, _form(path, leaf, was)


def _form(path: str, leaf: Any, was: Any) -> Any:
    # What is requested of an array or number that was saved.
    if isinstance(leaf, type):
        if issubclass(leaf, bool | int | float):
            return leaf(0)
        shape = getattr(was, "shape", ())
        dtype = was.dtype if hasattr(was, "dtype") else np.asarray(was).dtype
        if issubclass(leaf, np.ndarray) and not trees.is_key(was):
            return trees.AbstractArray(shape=shape, dtype=dtype)
        if not issubclass(leaf, jax.Array | jax.ShapeDtypeStruct):
            raise errors.CheckpointError(
                f"{path} cannot be restored as {leaf.__name__}; give jax.Array,"
                " np.ndarray, bool, int, float or str, or an abstract array"
            )
        leaf = jax.ShapeDtypeStruct(shape, dtype)
    if trees.is_key(leaf) and trees.is_key(was) and leaf.dtype != was.dtype:
        raise errors.CheckpointError(
            f"{path} is a random key that was saved as {was.dtype}, and was requested"
            f" as {leaf.dtype}, which gives other numbers; make it with the"
            " implementation that was saved (jax_default_prng_impl)"
        )
    if isinstance(leaf, jax.ShapeDtypeStruct) and leaf.sharding is None:
        # Without a requested sharding an array keeps the saved one.
        sharding = getattr(was, "sharding", None)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
    return leaf
