"""The weights of a new run, from a checkpoint of any format: the key `init_from`.

The new run has its own data. It has its own optimizer and steps, too, unless it reads
the whole state: then the run goes on from the checkpoint. Each host reads
what its devices need. A step that was saved by a run of the same model needs no layout;
every other checkpoint is read through one.
"""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import jax
import numpy as np

from elastic_ckpt.checkpoint import run_saver
from elastic_ckpt.checkpoint.host import trees
from elastic_ckpt.core import bucket_clients, errors, events, storage
from elastic_ckpt.tiers.persistent import leases
from elastic_ckpt.universal import (
    equal_leaves,
    loading,
    opening,
    shipped_layouts,
)
from elastic_ckpt.universal.reading import restored_tree
from elastic_ckpt.universal.rules import name_pattern
from elastic_ckpt.universal.rules.layout import Layout

PARAMS = "params"
STEP = "step"


@dataclasses.dataclass(frozen=True, kw_only=True)
class InitialWeights:
    """Where the weights of a new run are.

    Attributes:
      path: of the checkpoint.
      layout: of its tensors, a file or the name of one that ships; empty if they are
        those of the same model.
      is_whole_state: whether the optimizer's state and the step are read, too.
    """

    path: str
    layout: str = ""
    is_whole_state: bool = False


def load(initial: InitialWeights, wanted: Any, emit: events.Emit) -> Any:
    """Reads the weights, or the whole state, of a new run.

    Args:
      initial: where they are.
      wanted: shapes, dtypes and shardings of a state, or of its weights alone.
      emit: called once they are there.

    Returns:
      A tree like `wanted`.

    Raises:
      ConfigError: if a layout is missing, malformed, or does not fit.
      CheckpointError: if the checkpoint cannot be read, or is of another model.
    """
    began_secs = time.monotonic()
    path = str(opening.resolved(initial.path))
    bucket_clients.prepare(path)
    # Another run may be saving there, and removes its old steps.
    with leases.leased_if_ours(path):
        if not initial.layout:
            state = _of_same_leaves(path, wanted)
        elif initial.is_whole_state:
            layout = shipped_layouts.resolve(initial.layout)
            state = _with_counts(path, wanted, layout)
        else:
            layout = shipped_layouts.resolve(initial.layout).weights()
            state = loading.load(path, wanted, layout=layout)
    emit(
        "weights_loaded",
        path=initial.path,
        bytes=sum(leaf.nbytes for leaf in jax.tree.leaves(state)),
        step=int(state[STEP]) if STEP in state else 0,
        secs=time.monotonic() - began_secs,
    )
    return state


def _with_counts(path: str, wanted: Any, layout: Layout) -> Any:
    # The optimizer counts the steps, too: counts that the layout lacks are equal to
    # `step`.
    keyed, structure = jax.tree.flatten_with_path(wanted)
    named = [(trees.leaf_path("", keys)[1:], leaf) for keys, leaf in keyed]
    asked = [
        leaf if leaf.shape or name == STEP or _fills(layout, name) else None
        for name, leaf in named
    ]
    state = loading.load(path, structure.unflatten(asked), layout=layout)
    step = np.asarray(state[STEP])
    loaded = iter(jax.tree.leaves(state))
    return structure.unflatten(
        _replicated(step, like=leaf) if each is None else next(loaded)
        for each, (_, leaf) in zip(asked, named, strict=True)
    )


def _fills(layout: Layout, name: str) -> bool:
    patterns = (each.name for rule in layout.rules for each in rule.target)
    return name in layout.fill or any(
        name_pattern.parse(text).expression(()).fullmatch(name) for text in patterns
    )


def _replicated(value: np.ndarray, *, like: jax.ShapeDtypeStruct) -> jax.Array:
    cast = value.astype(like.dtype)
    return jax.make_array_from_callback((), like.sharding, lambda _: cast)


def _of_same_leaves(path: str, wanted: Any) -> Any:
    tree = storage.absolute(path) / run_saver.STATE
    source = str(tree) if tree.exists() else path
    stored = opening.open_checkpoint(source).tensors
    leaves = restored_tree.target_leaves(wanted)
    targets = {leaf.tensor.name: leaf.tensor for leaf in leaves}
    try:
        layout = equal_leaves.layout_of(path, stored, targets)
    except errors.OtherModelError as error:
        names = errors.first_of(shipped_layouts.fitting(stored))
        raise errors.OtherModelError(
            f"{error}; or set init_from_layout to the layout of that checkpoint"
            f"{f' (layouts that ship and fit its names: {names})' if names else ''}"
        ) from None
    return loading.load(source, wanted, layout=layout)
