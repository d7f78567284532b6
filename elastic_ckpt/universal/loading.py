"""Loads a checkpoint of another layout into a tree, without a converted copy."""

from __future__ import annotations

import os
from typing import Any

from etils import epath

from elastic_ckpt.host import trees
from elastic_ckpt.universal import opening, shipped_layouts
from elastic_ckpt.universal.deepspeed_layout import described_layout
from elastic_ckpt.universal.reading import restored_tree
from elastic_ckpt.universal.rules import matching
from elastic_ckpt.universal.rules.layout import Layout


def load(
    path: epath.PathLike,
    abstract_state: Any,
    *,
    layout: Layout | str | os.PathLike[str] | None = None,
    budget_bytes: int = restored_tree.BUDGET_BYTES,
) -> Any:
    """Reads a checkpoint of any format into the arrays of a tree.

        state = universal.load("gs://bucket/llama", abstract_state, layout="llama.yml")

    In a world of several hosts each calls it, and reads what its devices need, once.

    Args:
      path: of the checkpoint, local or in a bucket.
      abstract_state: a tree of `jax.ShapeDtypeStruct`s with shardings, arrays or
        numbers. The keys to a leaf, joined by "/", are its name in the layout.
      layout: relates the tensors of the checkpoint (`from`) with those leaves (`to`);
        a text is the path of a YAML file, or the name of a layout that ships. If it is
        None, the checkpoint is DeepSpeed's, and its description of itself is the
        layout, see `deepspeed_layout.described_layout`.
      budget_bytes: the most bytes in flight, whatever the size of the model.

    Returns:
      A tree like `abstract_state`, of arrays in its shardings and dtypes.

    Raises:
      FormatError: if `path` is of no format that is read, or damaged.
      LayoutError: if the layout does not fit the checkpoint or the tree.
      CheckpointError: if a file cannot be read, or sources that should be equal differ.
    """
    rules = None if layout is None else shipped_layouts.resolve(layout)
    checkpoint = opening.open_checkpoint(path)
    leaves = restored_tree.target_leaves(abstract_state)
    targets = {leaf.tensor.name: leaf.tensor for leaf in leaves}
    if rules is None:
        rules = described_layout.layout(checkpoint, targets)
    rules = rules.with_values(checkpoint.values)
    matched = matching.moves(rules, checkpoint.tensors, checkpoint.axes, targets)
    made = restored_tree.read_leaves(
        checkpoint, matched.moves, matched.fills, leaves, budget_bytes=budget_bytes
    )
    return trees.rebuilt(abstract_state, "", made)
