"""The weights of a new run, from a checkpoint of any format: the key `init_from`.

The data, the optimizer and the steps of the run are new. Each host reads what its
devices need. A step that was saved by a run of the same model needs no layout;
every other checkpoint is read through one.
"""

from __future__ import annotations

import time
from typing import Any

import jax

from elastic_ckpt.checkpoint import run_saver
from elastic_ckpt.core import bucket_clients, errors, events, storage
from elastic_ckpt.tiers.persistent import leases
from elastic_ckpt.training import schema
from elastic_ckpt.universal import loading, shipped
from elastic_ckpt.universal.formats import files

_PARAMS = "params"


def load(section: schema.ModelSection, params: Any, emit: events.Emit) -> Any:
    """Reads the weights of a new run.

    Args:
      section: says where they are; without a layout they are those of the same model.
      params: shapes, dtypes and shardings of the weights.
      emit: called once they are there.

    Returns:
      A tree like `params`.

    Raises:
      ConfigError: if a layout is missing, malformed, or does not fit.
      CheckpointError: if the checkpoint cannot be read, or is of another model.
    """
    began_secs = time.monotonic()
    wanted = {_PARAMS: params}
    path = str(files.resolved(section.init_from))
    bucket_clients.prepare(path)
    # Another run may be saving there, and removes its old steps.
    with leases.leased_if_ours(path):
        if not section.init_from_layout:
            state = _of_same_leaves(path, wanted)
        else:
            layout = shipped.resolve(section.init_from_layout).weights()
            state = loading.load(path, wanted, layout=layout)
    emit(
        "weights_loaded",
        path=section.init_from,
        bytes=sum(leaf.nbytes for leaf in jax.tree.leaves(state)),
        secs=time.monotonic() - began_secs,
    )
    return state[_PARAMS]


def _of_same_leaves(path: str, wanted: Any) -> Any:
    tree = storage.absolute(path) / run_saver.STATE
    source = str(tree) if tree.exists() else path
    try:
        return loading.load_leaves(source, wanted)
    except errors.OtherModelError as error:
        raise errors.OtherModelError(
            f"{error}; or set init_from_layout to the layout of that checkpoint"
        ) from None
