"""The weights of a new run, from a checkpoint of any format: the key `init_from`.

The data, the optimizer and the steps of the run are new. Each host reads what its
devices need. A step that was saved by a run of the same model needs no layout;
every other checkpoint is read through one.
"""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import jax

from elastic_ckpt.checkpoint import run_saver
from elastic_ckpt.core import bucket_clients, errors, events, storage
from elastic_ckpt.tiers.persistent import leases
from elastic_ckpt.universal import loading, shipped
from elastic_ckpt.universal.formats import files

PARAMS = "params"


@dataclasses.dataclass(frozen=True, kw_only=True)
class InitialWeights:
    """Where the weights of a new run are.

    Attributes:
      path: of the checkpoint.
      layout: of its tensors, a file or the name of one that ships; empty if they are
        those of the same model.
    """

    path: str
    layout: str = ""


def load(initial: InitialWeights, wanted: Any, emit: events.Emit) -> Any:
    """Reads the weights of a new run.

    Args:
      initial: where they are.
      wanted: shapes, dtypes and shardings of the weights.
      emit: called once they are there.

    Returns:
      A tree like `wanted`.

    Raises:
      ConfigError: if a layout is missing, malformed, or does not fit.
      CheckpointError: if the checkpoint cannot be read, or is of another model.
    """
    began_secs = time.monotonic()
    path = str(files.resolved(initial.path))
    bucket_clients.prepare(path)
    # Another run may be saving there, and removes its old steps.
    with leases.leased_if_ours(path):
        if not initial.layout:
            state = _of_same_leaves(path, wanted)
        else:
            layout = shipped.resolve(initial.layout).weights()
            state = loading.load(path, wanted, layout=layout)
    emit(
        "weights_loaded",
        path=initial.path,
        bytes=sum(leaf.nbytes for leaf in jax.tree.leaves(state)),
        secs=time.monotonic() - began_secs,
    )
    return state


def _of_same_leaves(path: str, wanted: Any) -> Any:
    tree = storage.absolute(path) / run_saver.STATE
    source = str(tree) if tree.exists() else path
    try:
        return loading.load_leaves(source, wanted)
    except errors.OtherModelError as error:
        raise errors.OtherModelError(
            f"{error}; or set init_from_layout to the layout of that checkpoint"
        ) from None
