"""Loads a checkpoint of another layout into a tree, without a converted copy.

If no layout is given, a DeepSpeed checkpoint describes how its ranks share parameters,
and an adapter is merged into its base by a layout that ships. Tensors of other formats
keep their names, if they are whole. If there are several kinds of tensors, the kind
comes first, as in `described_layout`: `first_moment/1.mlp.weight`.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from etils import epath

from elastic_ckpt.checkpoint.host import trees
from elastic_ckpt.universal import described_layout, opening, shipped
from elastic_ckpt.universal.formats import peft_adapter
from elastic_ckpt.universal.moves import TargetTensor
from elastic_ckpt.universal.reading import restored_tree
from elastic_ckpt.universal.rules import matching, name_pattern
from elastic_ckpt.universal.rules.layout import (
    PARAMETER,
    Layout,
    LayoutError,
    Rule,
    State,
    TensorPattern,
)
from elastic_ckpt.universal.stored import Checkpoint, StoredTensor

_ANY = TensorPattern(name="{name:path}", dims="...")
# Each tensor becomes that of its name.
_SAME_NAMES = Rule(source=(_ANY,), target=(_ANY,), place="the layout of the same names")


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
    rules = given or default_layout(checkpoint, targets)
    rules = rules.with_values(checkpoint.values)
    matched = matching.moves(rules, checkpoint.tensors, checkpoint.axes, targets)
    made = restored_tree.read_leaves(
        checkpoint, matched.moves, matched.fills, leaves, budget_bytes=budget_bytes
    )
    return restored_tree.rebuilt(abstract_state, made)


def default_layout(
    checkpoint: Checkpoint, targets: Collection[str] | None = None
) -> Layout:
    """The layout from the tensors of a checkpoint to whole tensors of their names.

    Args:
      checkpoint: that is open.
      targets: the names of the target's tensors; None if they are those that the layout
        makes.

    Raises:
      FormatError: if the description of a DeepSpeed checkpoint is missing or wrong.
      LayoutError: if the tensors of another format are those of ranks, or there are no
        tensors.
    """
    if checkpoint.format.startswith(peft_adapter.FORMAT):
        return shipped.load("lora")
    if checkpoint.format.startswith(described_layout.FORMAT):
        return described_layout.layout(checkpoint, targets)
    tensors = checkpoint.tensors
    if not tensors or any(tensor.ranks for tensor in tensors):
        raise LayoutError(
            f"the checkpoint of the format {checkpoint.format} has"
            f" {'shards of ranks' if tensors else 'no tensors'}, which only rules"
            " relate with whole tensors; give the layout of that model"
        )
    kinds = sorted({tensor.kind for tensor in tensors})
    is_plain = kinds == ["parameter"]
    return Layout(
        rules=(_SAME_NAMES,),
        states={
            kind: State(
                source=PARAMETER,
                target=PARAMETER if is_plain else f"{kind}/{PARAMETER}",
            )
            for kind in kinds
        },
        place="the layout of the same names",
    )


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
    drop = [name_pattern.glob_of(name) for name in shapes.keys() - targets.keys()]
    return Layout(rules=(_SAME_NAMES,), drop=tuple(drop), place=path)
