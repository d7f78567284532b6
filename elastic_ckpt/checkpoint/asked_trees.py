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

# In the place of a leaf that hosts read.
_READ = object()


@dataclasses.dataclass(frozen=True, kw_only=True)
class AskedTrees:
    """Requested trees.

    Attributes:
      read: by name, the trees that hosts read; None in the place of other leaves.
      given: by name, the same trees with the leaves that are not read.
    """

    read: Mapping[str, Any]
    given: Mapping[str, Any]

    def filled(self, read: Mapping[str, Any]) -> dict[str, Any]:
        """The requested trees, with the values that hosts read for `self.read`."""
        return {
            name: jax.tree.map(
                lambda given, leaf: leaf if given is _READ else given,
                tree,
                read[name],
                is_leaf=_is_none,
            )
            for name, tree in self.given.items()
        }


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
    given: dict[str, Any] = {}
    read: dict[str, Any] = {}
    skipped: list[str] = []
    for name, tree in asked.items():
        abstract = saved[name] if tree is None else tree
        leaves = _leaves(name, saved[name])
        paths = _leaves(name, abstract)
        resolved_leaves = {
            path: _resolved(path, leaf, leaves, may_add=partial and may_add)
            for path, leaf in paths.items()
        }
        skipped += [
            path for path, (stays, _) in resolved_leaves.items() if stays is not _READ
        ]
        structure = jax.tree.structure(abstract, is_leaf=_is_none)
        stays, needed = (
            zip(*resolved_leaves.values(), strict=True) if resolved_leaves else ((), ())
        )
        given[name] = jax.tree.unflatten(structure, stays)
        read[name] = jax.tree.unflatten(structure, needed)
        if not partial:
            _check_texts(leaves, paths, step=step)
    trees.check(
        trees.asked(read),
        contents,
        step=step,
        whole=() if partial else tuple(asked),
        skipped=skipped,
    )
    return AskedTrees(read=read, given=given)


def _is_none(node: Any) -> bool:
    return node is None


def _leaves(name: str, tree: Any) -> dict[str, Any]:
    # None counts as a leaf.
    return {
        trees.leaf_path(name, path): leaf
        for path, leaf in jax.tree.leaves_with_path(tree, is_leaf=_is_none)
    }


def _resolved(
    path: str,
    leaf: Any,
    saved: Mapping[str, Any],
    *,
    may_add: bool,
) -> tuple[Any, Any]:
    # The placeholder of a leaf until the hosts have read, and what they read for it.
    if leaf is None or leaf is ...:
        return leaf, None
    was = saved.get(path)
    if was is None:
        # `check` names it where that is an error.
        return (leaf, None) if may_add else (_READ, leaf)
    if isinstance(was, str) != (leaf is str or isinstance(leaf, str)):
        raise errors.CheckpointError(
            f"{path} was saved as {was!r} and cannot be restored as {leaf!r}; request"
            " `str` for texts, and only for texts"
        )
    if isinstance(was, str):
        return was, None
    if not isinstance(leaf, type):
        return _READ, _placed(path, leaf, was)
    if issubclass(leaf, bool | int | float):
        return _READ, leaf(0)
    return _READ, _of_type(path, leaf, was)


def _placed(path: str, leaf: Any, was: Any) -> Any:
    # Without a requested sharding an array keeps the saved one.
    if trees.is_key(leaf) and trees.is_key(was) and leaf.dtype != was.dtype:
        raise errors.CheckpointError(
            f"{path} is a random key that was saved as {was.dtype}, and was requested"
            f" as {leaf.dtype}, which gives other numbers; make it with the"
            " implementation that was saved (jax_default_prng_impl)"
        )
    if isinstance(leaf, jax.ShapeDtypeStruct) and leaf.sharding is None:
        sharding = getattr(was, "sharding", None)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
    return leaf


def _of_type(path: str, kind: type, was: Any) -> Any:
    # An array in the form of a type, of what was saved as an array or number.
    shape = getattr(was, "shape", ())
    dtype = was.dtype if hasattr(was, "dtype") else np.asarray(was).dtype
    if issubclass(kind, np.ndarray) and not trees.is_key(was):
        return trees.AbstractArray(shape=shape, dtype=dtype)
    if issubclass(kind, jax.Array | jax.ShapeDtypeStruct):
        sharding = getattr(was, "sharding", None)
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
    raise errors.CheckpointError(
        f"{path} cannot be restored as {kind.__name__}; give jax.Array, np.ndarray,"
        " bool, int, float or str, or an abstract array"
    )


def _check_texts(
    saved: Mapping[str, Any], asked: Mapping[str, Any], *, step: int
) -> None:
    texts = {path: "text" for path, leaf in saved.items() if isinstance(leaf, str)}
    trees.check_same_model(
        f"step {step}", texts, dict.fromkeys(texts.keys() & asked.keys(), "text")
    )
