"""The description of a step that is made of the targets of a layout."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from elastic_ckpt.checkpoint import tree_structure
from elastic_ckpt.checkpoint.host.trees import AbstractArray
from elastic_ckpt.checkpoint.step_description import StepDescription
from elastic_ckpt.core import errors
from elastic_ckpt.steps.manifest import Contents, Leaf
from elastic_ckpt.steps.step_id import StepId
from elastic_ckpt.tiers.persistent import upload
from elastic_ckpt.universal.moves import TargetTensor

# An index of a list.
_NUMBER = re.compile(r"0|[1-9][0-9]{0,3}")


def saved_step(
    targets: Sequence[TargetTensor],
    chunk_of: Mapping[str, tuple[int, ...]],
    *,
    tree: str,
    lists: Sequence[str],
    run: str,
    step_id: StepId,
) -> upload.UploadedStep:
    """The step that has the targets as leaves of one tree.

    Args:
      targets: in any order.
      chunk_of: the shape of their chunks, by name.
      tree: the name of the checkpointable that has all of them.
      lists: the paths of trees that are lists.
      run: the identity of the run.
      step_id: the step.

    Raises:
      CheckpointError: if one target's name is that of a tree with another, or a list
        has keys that are no numbers.
    """
    contents = Contents(
        leaves=tuple(
            Leaf(
                path=leaf_path(tree, target.name),
                shape=target.shape,
                dtype=target.dtype.name,
            )
            for target in sorted(targets, key=lambda each: leaf_path(tree, each.name))
        ),
        components={},
        time_ms=int(step_id.save),
        trees=tree_structure.to_json({tree: _with_lists(_tree(targets), "", lists)}),
    )
    chunks = _chunks(tree, chunk_of)
    return upload.UploadedStep(
        run=run,
        step_id=step_id,
        contents=contents,
        arrays=StepDescription.from_contents(contents).arrays(chunks),
    )


def leaf_path(tree: str, name: str) -> str:
    """The path of a target in manifests."""
    return f"{tree}/{name}" if name else tree


def orbax_files(
    saved: upload.UploadedStep, tree: str, chunk_of: Mapping[str, tuple[int, ...]]
) -> dict[str, bytes]:
    """The files that Orbax adds to the values, by path in the step."""
    chunks = _chunks(tree, chunk_of)
    files = StepDescription.from_contents(saved.contents).files(chunks)
    return {path: text.encode() for path, text in files.items()}


def _chunks(
    tree: str, chunk_of: Mapping[str, tuple[int, ...]]
) -> dict[str, tuple[int, ...]]:
    return {leaf_path(tree, name): chunk for name, chunk in chunk_of.items()}


def _tree(targets: Sequence[TargetTensor]) -> Any:
    root: dict[str, Any] = {}
    for target in targets:
        *above, last = ("", *target.name.split("/"))[bool(target.name) :]
        node: Any = root
        for key in above:
            node = node.setdefault(_key(key), {})
            if not isinstance(node, dict):
                break
        if not isinstance(node, dict) or _key(last) in node:
            raise errors.CheckpointError(
                f"{target.name} lies below, or above, another target, which is an array"
                " and has no parts; rename one of them in the layout"
            )
        node[_key(last)] = _leaf(target)
    return root


def _with_lists(tree: Any, path: str, lists: Sequence[str]) -> Any:
    # Trees of Orbax have None for elements without leaves.
    if not isinstance(tree, dict):
        return tree
    made = {
        key: _with_lists(node, f"{path}/{key}" if path else key, lists)
        for key, node in tree.items()
    }
    if path not in lists:
        return made
    for key in made:
        if not _NUMBER.fullmatch(key):
            raise errors.CheckpointError(
                f"{path} is listed in `lists` of the layout, but has the key {key!r},"
                " which is no number below 10000; remove it from `lists`"
            )
    return [made.get(str(at)) for at in range(1 + max(map(int, made)))]


def _key(part: str) -> str:
    return part.replace("~1", "/").replace("~0", "~")


def _leaf(target: TargetTensor) -> Any:
    # One of NumPy if JAX would narrow it.
    if jax.dtypes.canonicalize_dtype(target.dtype) != target.dtype:
        return AbstractArray(shape=target.shape, dtype=target.dtype)
    return jax.ShapeDtypeStruct(target.shape, target.dtype)
