"""Loads a checkpoint of another layout into a tree, without a converted copy."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping, Sequence
from typing import Any

from etils import epath

from elastic_ckpt.checkpoint.host import trees
from elastic_ckpt.core import allgather, calls
from elastic_ckpt.universal import opening, shipped
from elastic_ckpt.universal.formats.checkpoint import Checkpoint, StoredTensor
from elastic_ckpt.universal.moves import Matched, TargetTensor
from elastic_ckpt.universal.reading import engine, tree
from elastic_ckpt.universal.rules import matching, names
from elastic_ckpt.universal.rules.layout import Layout


def load(
    path: epath.PathLike,
    abstract_state: Any,
    *,
    layout: Layout | str | os.PathLike[str] | None = None,
    budget_bytes: int = engine.BUDGET_BYTES,
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
      RunError: if it cannot be loaded on another host, which is named with its error.
    """
    # A host that fails leaves none waiting in the collectives that follow.
    everywhere = functools.partial(
        allgather.shared().agreed, timeout_secs=calls.LONG_SECS
    )
    found: list[tuple[Checkpoint, Matched]] = []
    made: list[Any] = []
    everywhere(
        "load_opens", lambda: found.append(_matched(path, abstract_state, layout))
    )
    everywhere(
        "load_reads",
        lambda: made.append(
            tree.load(*found[0], abstract_state, budget_bytes=budget_bytes)
        ),
    )
    return made[0]


def _matched(
    path: epath.PathLike, abstract_state: Any, layout: Layout | str | os.PathLike | None
) -> tuple[Checkpoint, Matched]:
    given = None if layout is None else shipped.resolve(layout)
    checkpoint = opening.open_checkpoint(path)
    targets = tree.targets(abstract_state)
    rules = given or shipped.default_layout(checkpoint, targets)
    rules = rules.with_values(checkpoint.values)
    matched = matching.moves(rules, checkpoint.tensors, checkpoint.axes, targets)
    return checkpoint, matched


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
