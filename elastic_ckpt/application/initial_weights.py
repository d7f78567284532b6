"""The weights of a new run, from a checkpoint of any format: the key `init_from`.

Weights alone: the new run has its own data, optimizer and steps. Each host reads what
its devices need. A step that was saved by a run of the same model needs no layout, and
its digests are compared; every other checkpoint is read through one.
"""

from __future__ import annotations

import time
from typing import Any

import jax
from etils import epath
from jax.sharding import Mesh

from elastic_ckpt.checkpoint import run_saver
from elastic_ckpt.config import schema
from elastic_ckpt.core import errors, events, storage
from elastic_ckpt.frontend.checkpointer import Checkpointer
from elastic_ckpt.tiers.choices import Persistent
from elastic_ckpt.universal import loading, shipped_layouts, step_layouts

PARAMS = "params"


def load(
    model: schema.ModelSection, abstract_params: Any, mesh: Mesh, emit: events.Emit
) -> Any:
    """Reads the weights that `init_from` names.

    Args:
      model: with the keys `init_from` and `init_from_layout`.
      abstract_params: their shapes, dtypes and shardings.
      mesh: that they are sharded over.
      emit: called once they are there.

    Returns:
      A tree like `abstract_params`.

    Raises:
      ConfigError: if a layout is missing, malformed, or does not fit.
      CheckpointError: if the checkpoint cannot be read, or is of another model.
    """
    began_secs = time.monotonic()
    wanted = {PARAMS: abstract_params}
    if model.init_from_layout:
        layout = shipped_layouts.resolve(model.init_from_layout).weights()
        state = loading.load(model.init_from, wanted, layout=layout)
    else:
        state = _of_a_step(storage.absolute(model.init_from), wanted, mesh)
    emit(
        "weights_loaded",
        path=model.init_from,
        bytes=sum(leaf.nbytes for leaf in jax.tree.leaves(state)),
        secs=time.monotonic() - began_secs,
    )
    return state[PARAMS]


def _of_a_step(path: epath.Path, wanted: Any, mesh: Mesh) -> Any:
    if not path.name.isdigit():
        names = errors.first_of(step_layouts.fitting(path))
        raise errors.ConfigError(
            f"init_from={path} is not a step that a run has saved, and init_from_layout"
            " is empty; set it to the layout of that checkpoint"
            f"{f' (layouts that ship and fit its names: {names})' if names else ''}"
        )
    with Checkpointer([Persistent(path.parent, every=1)], mesh=mesh) as checkpointer:
        state = checkpointer.load(
            int(path.name), wanted, checkpointable_name=run_saver.STATE, partial=True
        )
    missing = [
        jax.tree_util.keystr(keys, simple=True, separator="/")
        for keys, leaf in jax.tree_util.tree_leaves_with_path(state)
        if not isinstance(leaf, jax.Array)
    ]
    if missing:
        raise errors.CheckpointError(
            f"init_from={path} is a checkpoint of another model: it lacks"
            f" {errors.first_of(missing)}; set the model's keys to its values, or"
            " init_from_layout to its layout"
        )
    return state
