"""Describes and loads steps that stock Orbax saved.

Their values have no digests, and Orbax loads them. Orbax reports any error as an
incompatible handler; this module raises the cause and names the unreadable
checkpointable.
"""

from __future__ import annotations

import contextvars
import dataclasses
import math
import operator
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as v0
from absl import logging
from etils import epath
from jax.sharding import Sharding
from orbax.checkpoint import v1 as ocp

from elastic_ckpt.checkpoint import component_io, structure
from elastic_ckpt.checkpoint.host import trees
from elastic_ckpt.core import errors, storage
from elastic_ckpt.tiers.persistent import persistent_root, records

_REFUSED = (
    "array.loading.enable_padding_and_truncation",
    "array.loading.raise_array_data_missing_error",
    "array.saving.scoped_storage_options_creator",
    "array.saving.storage_options",
    "array.saving.use_compression",
    "array.saving.use_ocdbt",
    "array.saving.use_zarr3",
    "asynchronous.post_finalization_callback",
    "atomicity",
    "checkpoint_layout",
    "deletion",
    "file.path_class",
    "file.path_permission_mode",
    "multiprocessing.active_processes",
    "multiprocessing.primary_host",
    "pytree.saving",
)
_REMEDY = (
    "restore the step from a good copy, or move it out of its directory to continue"
    " from the step before it"
)


@dataclasses.dataclass(frozen=True)
class ShardedArray:
    """A saved JAX array, as Orbax describes it; `shape` is global."""

    shape: tuple[int, ...]
    dtype: np.dtype
    sharding_metadata: v0.metadata.ShardingMetadata

    @property
    def sharding(self) -> Sharding:
        """The saved sharding; raises an error if its devices do not exist."""
        return self.sharding_metadata.to_jax_sharding()


@dataclasses.dataclass(frozen=True, kw_only=True)
class LeafSummary:
    """A leaf of a saved tree.

    Attributes:
      path: the leaf's path in the tree.
      shape: the global shape.
      dtype: the dtype name.
      sharding: a description of the saved partition spec and mesh.
      num_bytes: the size of the values, in bytes.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    sharding: str
    num_bytes: int


def load(
    path: epath.Path, wanted: Mapping[str, Any], *, partial: bool
) -> dict[str, Any]:
    """Loads the requested checkpointables of a step.

    Args:
      path: the step directory.
      wanted: abstract trees and components to load, keyed by name.
      partial: whether the requested trees may omit saved leaves.

    Raises:
      CheckpointError: if the step belongs to a different model or lacks a
        checkpointable, or a checkpointable cannot be read.
      ElasticCkptError: the error of a component's `load`.
    """
    saved = read_checkpointables(path)
    missing = sorted(wanted.keys() - saved.keys())
    if missing:
        raise errors.CheckpointError(
            f"{path} lacks {missing} of the requested checkpointables"
            f" {sorted(wanted)}; {_REMEDY}"
        )
    asked, stateful = component_io.split(wanted)
    for name, tree in asked.items():
        # Orbax does not describe protocol buffers; a class or an object requests one.
        if saved[name] is None and not hasattr(tree, "DESCRIPTOR"):
            raise _unreadable(path, name, "Orbax does not describe its content")
        if tree is not None and not partial and saved[name] is not None:
            structure.resolve({name: tree}, saved, what=str(path), partial=False)
    context = checked_context()
    context.pytree.loading.partial_load = partial
    # Components first: they are small, and an error leaves nothing half loaded.
    with context:
        loaded = {name: _load(path, name, wanted[name]) for name in [*stateful, *asked]}
    # Orbax neither stores weak types nor takes them from the request.
    weak = {path for path, leaf in trees.leaves(asked).items() if trees.is_weak(leaf)}
    for name in {path.partition("/")[0] for path in weak}:
        made = {
            path: trees.weakly_typed(leaf) if path in weak else leaf
            for path, leaf in trees.leaves({name: loaded[name]}).items()
        }
        loaded[name] = trees.rebuilt(loaded[name], name, made)
    return loaded


def checked_context(own: ocp.Context | None = None) -> ocp.Context:
    """Returns the Orbax context for a call, to be entered in the calling thread.

    Only `pytree.loading.partial_load` is applied; options that tune Orbax's I/O have no
    effect. Steps that stock Orbax saved are loaded under the same context.

    Args:
      own: the checkpointer's context; a `with` block's context takes precedence, as in
        Orbax.

    Raises:
      CheckpointError: if an option would change what is saved, loaded or deleted.
    """
    values = contextvars.copy_context().values()
    active = next((each for each in values if isinstance(each, ocp.Context)), own)
    context, default = ocp.Context(active), ocp.Context()
    for name in _REFUSED:
        value = operator.attrgetter(name)(context)
        if value != operator.attrgetter(name)(default):
            raise errors.CheckpointError(
                f"ocp.Context has {name}={value!r}, which this checkpointer does not"
                " support; leave it at its default, or use Orbax's own Checkpointer"
            )
    return context


def _load(path: epath.Path, name: str, wanted: Any) -> Any:
    try:
        return ocp.load_checkpointables(path, {name: wanted})[name]
    except Exception as error:
        raise _own_cause(path, name, error) from error


def _own_cause(path: epath.Path, name: str, error: Exception) -> Exception:
    cause: BaseException = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    if isinstance(cause, errors.ElasticCkptError):
        return cause
    reason = f"{type(cause).__name__}: {str(cause).partition(chr(10))[0]}"
    return _unreadable(path, name, reason)


def _unreadable(path: epath.Path, name: str, why: str) -> errors.CheckpointError:
    # The fault may be in the step or in the request.
    return errors.CheckpointError(
        f"{path}: its checkpointable {name!r} cannot be read ({why}); {_REMEDY}. If"
        " `metadata()` shows it in a different form, request it in that form"
    )


def _leaves(tree: Any) -> dict[str, Any]:
    # The leaves, keyed by paths such as `opt_state/1/0/mu/embedding`.
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf
        for path, leaf in jax.tree.leaves_with_path(tree)
    }


def read_checkpointables(path: epath.Path) -> dict[str, Any]:
    """Describes a step's checkpointables as Orbax v1 does, in a dict keyed by name.

    Trees are read with Orbax v0, because v1's metadata reader fails on bool leaves. A
    JSON checkpointable is described by its value. Checkpointables of other kinds, and
    unreadable ones, map to None.

    Raises:
      CheckpointError: if Orbax cannot read the step.
    """
    try:
        handlers = v0.metadata.get_step_metadata(path).item_handlers
    except Exception as error:
        raise _own_cause(path, "_CHECKPOINT_METADATA", error) from error
    kinds = handlers if isinstance(handlers, dict) else {}
    return {
        below.name: _read_checkpointable(below, str(kinds.get(below.name)))
        for below in sorted(path.iterdir())
        if below.is_dir() and below.name != "metrics"
    }


def _read_checkpointable(path: epath.Path, kind: str) -> Any:
    # Orbax warns, through absl, about checkpointables that it cannot read.
    before = logging.get_verbosity()
    logging.set_verbosity(logging.ERROR)
    try:
        if "Json" in kind:
            return ocp.load_checkpointables(path.parent, {path.name: None})[path.name]
        tree = v0.PyTreeCheckpointHandler().metadata(path).tree
    except Exception:
        return None
    finally:
        logging.set_verbosity(before)
    return jax.tree.map(_described, tree)


def _described(leaf: Any) -> Any:
    # Describes a leaf as Orbax v1 does.
    if isinstance(leaf, v0.metadata.StringMetadata):
        return "string"
    if isinstance(leaf, v0.metadata.ScalarMetadata):
        return np.zeros((), leaf.dtype).item()
    if leaf.sharding is None:
        return trees.AbstractArray(shape=leaf.shape, dtype=leaf.dtype)
    return ShardedArray(leaf.shape, leaf.dtype, leaf.sharding)


def arrays(step_path: epath.PathLike, name: str) -> list[LeafSummary]:
    """Summarizes each leaf of a step's checkpointable `name`.

    Orbax reads the leaves. It cannot read S3-compatible stores other than Amazon's; for
    those, the leaves come from the step's manifests, without shardings.
    """
    path, below = storage.absolute(step_path), f"{name}/"
    tree = read_checkpointables(path).get(name) or {}
    found = [_summary(at, leaf, _sharding(leaf)) for at, leaf in _leaves(tree).items()]
    if found:
        return found
    listed = [each.contents.leaves for each in persistent_root.readable(path)]
    return [
        _summary(leaf.path.removeprefix(below), leaf, "sharding not read")
        for leaf in (listed[0] if listed else ())
        if leaf.path.startswith(below)
    ]


def steps(directory: epath.PathLike) -> dict[int, epath.Path]:
    """The paths of the complete steps, keyed by step number, in ascending order."""
    root = storage.absolute(directory)
    numbers = sorted(filter(str.isdigit, records.names(root)), key=int)
    paths = (root / number for number in numbers)
    return {int(path.name): path for path in paths if ocp.is_orbax_checkpoint(path)}


def _summary(path: str, leaf: Any, sharding: str) -> LeafSummary:
    # For a number or string, the leaf is the value itself.
    array = np.asarray(leaf) if isinstance(leaf, int | float | str) else leaf
    return LeafSummary(
        path=path,
        shape=tuple(array.shape),
        dtype=str(array.dtype),
        sharding=sharding,
        num_bytes=math.prod(array.shape) * np.dtype(array.dtype).itemsize,
    )


def _sharding(leaf: Any) -> str:
    metadata = getattr(leaf, "sharding_metadata", None)
    spec = getattr(metadata, "partition_spec", None)
    if metadata is None or spec is None:
        return "one device"
    sizes = zip(metadata.axis_names, np.ravel(metadata.shape).tolist(), strict=True)
    # The mesh axes of each dim, as in a PartitionSpec.
    dims = [axes if isinstance(axes, str) else "+".join(axes or "-") for axes in spec]
    over = ", ".join(f"{axis}={size}" for axis, size in sizes)
    return f"[{', '.join(dims) or 'whole'}] over {over}"
