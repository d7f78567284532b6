"""Foreign steps: those that Orbax saved without us, without digests of values.

Orbax loads them. It reports any error of a part as that of an incompatible handler:
here the cause is raised, and a part that cannot be read is named.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
from etils import epath
from orbax.checkpoint import v1 as ocp

from elastic_ckpt.checkpoint import component_io, orbax_context, summary, validation
from elastic_ckpt.core import errors

_REMEDY = (
    "restore it from a copy, or move this step out of its directory to continue from"
    " the one before"
)


def load(
    path: epath.Path, wanted: Mapping[str, Any], *, partial: bool
) -> dict[str, Any]:
    """Loads the requested parts of a step.

    Args:
      path: of the step.
      wanted: by name, abstract trees and components, which move there.
      partial: whether trees may lack leaves that were saved.

    Raises:
      CheckpointError: if the step is of another model, lacks a part, or a part cannot
        be read.
      ElasticCkptError: as `load` of a component.
    """
    parts = read_parts(path)
    validation.check_parts(str(path), set(parts), set(wanted))
    trees, stateful = component_io.split(wanted)
    for name, tree in trees.items():
        if parts[name] is None and not _is_message(tree):
            raise _unreadable(path, name, "what it holds is unknown")
        if tree is not None and not partial and parts[name] is not None:
            validation.check_same_tree(str(path), parts[name], tree)
    context = ocp.Context(orbax_context.active())
    context.pytree.loading.partial_load = partial
    # Components first: they are small, and an error leaves nothing half loaded.
    with context:
        loaded = {name: _load(path, name, wanted[name]) for name in [*stateful, *trees]}
    return {name: loaded[name] for name in wanted}


def read_parts(path: epath.Path) -> dict[str, Any]:
    """The checkpointables of a step by name; of arrays, their metadata.

    Raises:
      CheckpointError: if Orbax cannot read them.
    """
    try:
        return summary.read_parts(path)
    except Exception as error:
        raise _own_cause(path, "_CHECKPOINT_METADATA", error) from error


def _is_message(wanted: Any) -> bool:
    # The class of a protocol buffer, or one to load into: Orbax describes none.
    return hasattr(wanted, "DESCRIPTOR")


def _load(path: epath.Path, name: str, wanted: Any) -> Any:
    try:
        return ocp.load_checkpointables(path, {name: wanted})[name]
    except Exception as error:
        raise _own_cause(path, name, error, wanted) from error


def _own_cause(
    path: epath.Path, name: str, error: Exception, wanted: Any = None
) -> Exception:
    cause: BaseException = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    if isinstance(cause, errors.ElasticCkptError):
        return cause
    reason = f"{type(cause).__name__}: {str(cause).partition(chr(10))[0]}"
    return _unreadable(path, name, reason, wanted)


def _unreadable(
    path: epath.Path, name: str, why: str, wanted: Any = None
) -> errors.CheckpointError:
    if jax.tree.leaves(wanted):
        # Who is wrong, the step or the request, is not known.
        return errors.CheckpointError(
            f"{path}: its part {name!r} cannot be read as it is requested ({why});"
            f" compare the request with `metadata()`; if it fits, {_REMEDY}"
        )
    return errors.CheckpointError(
        f"{path}: its part {name!r} cannot be read ({why}); {_REMEDY}"
    )
