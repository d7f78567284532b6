"""Loads a checkpoint of another layout into a tree, without a converted copy."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from etils import epath

from elastic_ckpt.checkpoint.host import trees
from elastic_ckpt.universal import opening, shipped
from elastic_ckpt.universal.formats.checkpoint import StoredTensor
from elastic_ckpt.universal.moves import TargetTensor
from elastic_ckpt.universal.reading import restored_tree
from elastic_ckpt.universal.rules import matching, names
from elastic_ckpt.universal.rules.layout import (
    Layout,
)


def load(
    path: epath.PathLike,
    abstract_state: Any,
    *,
    layout: Layout | str | os.PathLike[str] | None = None,
    budget_bytes: int = restored_tree.BUDGET_BYTES,
) -> Any:
    """Loads a checkpoint of another program into the arrays of a tree.

        path = "gs://bucket/llama"
        state = ec.universal.load(path, abstract_state, layout="llama.yml")

    Every process calls it, and reads only what its own devices need.

    Args:
      path: the directory or file of the checkpoint, local or in a bucket.
      abstract_state: a pytree of `jax.ShapeDtypeStruct`s with shardings, of arrays or
        of numbers: a dict, or a state of Flax or Equinox. The keys to a leaf, joined by
        "/", are its name in the layout; the `value` of Flax's `Param` and `Partitioned`
        may be left out.
      layout: how the tensors of the checkpoint (`from`) relate to these leaves (`to`):
        a `Layout`, the path of a YAML file, or the name of a layout that comes with the
        package. None is for checkpoints of DeepSpeed, which describe their own layout,
        and for those whose tensors have the names of the leaves, once an adapter is
        merged into its base.
      budget_bytes: the most bytes of requests in flight, and as many of leaves that are
        not yet complete.

    Returns:
      A pytree like `abstract_state`, of arrays in its shardings and dtypes. Functions
      stay as they are.

    Raises:
      FormatError: if the checkpoint is damaged, or in no format that can be read.
      LayoutError: if the layout does not fit the checkpoint or the tree.
      CheckpointError: if a file cannot be read, or copies of a tensor that should be
        equal differ.
    """
    given = None if layout is None else shipped.resolve(layout)
    checkpoint = opening.open_checkpoint(path)
    leaves = restored_tree.target_leaves(abstract_state)
    targets = {leaf.tensor.name: leaf.tensor for leaf in leaves}
    rules = given or shipped.default_layout(checkpoint, targets)
    rules = rules.with_values(checkpoint.values)
    matched = matching.moves(rules, checkpoint.tensors, checkpoint.axes, targets)
    made = restored_tree.read_leaves(
        checkpoint, matched.moves, matched.fills, leaves, budget_bytes=budget_bytes
    )
    return restored_tree.rebuilt(abstract_state, made)


def layout_of_leaves(
    path: str, stored: Sequence[StoredTensor], targets: Mapping[str, TargetTensor]
) -> Layout:
    """The layout that takes each target from the tensor of its name, and drops others.

    Args:
      path: of the checkpoint, for messages.
      stored: its tensors.
      targets: by name.

    Raises:
      OtherModelError: if a tensor is missing, or has another shape.
    """
    shapes = {each.name: str(list(each.shape)) for each in stored}
    wanted = {name: str(list(each.shape)) for name, each in targets.items()}
    present = {name: shapes[name] for name in wanted.keys() & shapes.keys()}
    trees.check_same_model(path, present, wanted)
    drop = [names.glob_of(name) for name in shapes.keys() - targets.keys()]
    return Layout(rules=(shipped.SAME_NAMES,), drop=tuple(drop), place=path)
