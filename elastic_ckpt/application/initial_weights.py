"""The weights of a new run, from a checkpoint of any format: the key `init_from`.

Weights alone: the new run has its own data, optimizer and steps. Each host reads what
its devices need. A step that was saved by a run of the same model needs no layout;
every other checkpoint is read through one.
"""

from __future__ import annotations

import time
from typing import Any

import jax

from elastic_ckpt.checkpoint import run_saver
from elastic_ckpt.config import schema
from elastic_ckpt.core import bucket_clients, errors, events, storage
from elastic_ckpt.tiers.persistent import leases
from elastic_ckpt.universal import (
    equal_leaves,
    loading,
    opening,
    shipped_layouts,
)
from elastic_ckpt.universal.reading import restored_tree

PARAMS = "params"


def load(model: schema.ModelSection, abstract_params: Any, emit: events.Emit) -> Any:
    """Reads the weights that `init_from` names.

    Args:
      model: with the keys `init_from` and `init_from_layout`.
      abstract_params: their shapes, dtypes and shardings.
      emit: called once they are there.

    Returns:
      A tree like `abstract_params`.

    Raises:
      ConfigError: if a layout is missing, malformed, or does not fit.
      CheckpointError: if the checkpoint cannot be read, or is of another model.
    """
    began_secs = time.monotonic()
    wanted = {PARAMS: abstract_params}
    bucket_clients.prepare(model.init_from)
    # Another run may be saving there, and removes its old steps.
    with leases.leased_if_ours(model.init_from):
        if model.init_from_layout:
            layout = shipped_layouts.resolve(model.init_from_layout).weights()
            state = loading.load(model.init_from, wanted, layout=layout)
        else:
            state = _of_same_leaves(model.init_from, wanted)
    emit(
        "weights_loaded",
        path=model.init_from,
        bytes=sum(leaf.nbytes for leaf in jax.tree.leaves(state)),
        secs=time.monotonic() - began_secs,
    )
    return state[PARAMS]


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
