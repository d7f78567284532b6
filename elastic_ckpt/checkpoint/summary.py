"""The contents of a checkpoint directory, read without loading an array."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as v0
from absl import logging
from etils import epath
from jax.sharding import Sharding
from orbax.checkpoint import v1 as ocp

from elastic_ckpt.checkpoint import validation
from elastic_ckpt.checkpoint.host import trees
from elastic_ckpt.core import checked_json, storage
from elastic_ckpt.steps import manifest_file
from elastic_ckpt.tiers.persistent import persistent_root


@dataclasses.dataclass(frozen=True)
class ShardedArray:
    """An array of JAX as Orbax describes a saved one.

    Attributes:
      shape: global shape.
      dtype: its dtype.
      sharding_metadata: the sharding that it was saved under.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    sharding_metadata: v0.metadata.ShardingMetadata

    @property
    def sharding(self) -> Sharding:
        """The sharding; an error if its devices do not exist."""
        return self.sharding_metadata.to_jax_sharding()


@dataclasses.dataclass(frozen=True, kw_only=True)
class LeafSummary:
    """One array of a step.

    Attributes:
      path: its path in the tree.
      shape: global shape.
      dtype: its dtype.
      sharding: the partition spec and mesh that it was saved under, in words.
      num_bytes: bytes of its values.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    sharding: str
    num_bytes: int


def read_parts(step_path: epath.PathLike) -> dict[str, Any]:
    """The checkpointables of a step by name; of arrays, their metadata.

    A part is described as Orbax v1 does. Its own function does not describe trees with
    a bool, so that of v0 reads all trees. JSON is its own description. Other parts,
    and those that cannot be read, have None.
    """
    path = storage.absolute(step_path)
    handlers = v0.metadata.get_step_metadata(path).item_handlers
    kinds = handlers if isinstance(handlers, dict) else {}
    return {
        part.name: _read_part(part, str(kinds.get(part.name)))
        for part in sorted(path.iterdir())
        if part.is_dir() and part.name != "metrics"
    }


def _read_part(path: epath.Path, kind: str) -> Any:
    # Orbax warns, through absl, about parts that it cannot read.
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
    # As Orbax v1 describes it.
    if isinstance(leaf, v0.metadata.StringMetadata):
        return "string"
    if isinstance(leaf, v0.metadata.ScalarMetadata):
        return np.zeros((), leaf.dtype).item()
    if leaf.sharding is None:
        return trees.AbstractArray(shape=leaf.shape, dtype=leaf.dtype)
    return ShardedArray(leaf.shape, leaf.dtype, leaf.sharding)


def arrays(step_path: epath.PathLike, name: str) -> list[LeafSummary]:
    """A line for each leaf of the checkpointable `name` of a step.

    Orbax reads them. It cannot read S3-compatible stores other than Amazon's: there the
    step's manifests list them, without shardings.
    """
    leaves = summarize(read_parts(step_path).get(name) or {})
    return leaves or _by_manifest(storage.absolute(step_path), name)


def steps(directory: epath.PathLike) -> dict[int, epath.Path]:
    """The complete steps below `directory`, in order."""
    root = storage.absolute(directory)
    if not root.exists():
        return {}
    complete = {
        int(path.name): path
        for path in root.iterdir()
        if path.name.isdigit() and ocp.is_orbax_checkpoint(path)
    }
    return dict(sorted(complete.items()))


def summarize(tree: Any) -> list[LeafSummary]:
    """A line for each leaf of a tree of array metadata."""
    return [_summary(path, leaf) for path, leaf in validation.leaves(tree).items()]


def _by_manifest(step_path: epath.Path, name: str) -> list[LeafSummary]:
    for manifest in persistent_root.manifest_names(step_path):
        try:
            manifest = manifest_file.parse((step_path / manifest).read_bytes())
        except (OSError, checked_json.UnreadableError):
            continue
        return [
            _line(leaf.path.removeprefix(f"{name}/"), leaf, "sharding not read")
            for leaf in manifest.contents.leaves
            if leaf.path.startswith(f"{name}/")
        ]
    return []


def _summary(path: str, leaf: Any) -> LeafSummary:
    # The metadata of numbers and texts are the values themselves.
    array = np.asarray(leaf) if isinstance(leaf, int | float | str) else leaf
    return _line(path, array, _sharding(leaf))


def _line(path: str, array: Any, sharding: str) -> LeafSummary:
    num_elements = int(np.prod(array.shape, dtype=np.int64))
    return LeafSummary(
        path=path,
        shape=tuple(array.shape),
        dtype=str(array.dtype),
        sharding=sharding,
        num_bytes=num_elements * np.dtype(array.dtype).itemsize,
    )


def _sharding(leaf: Any) -> str:
    metadata = getattr(leaf, "sharding_metadata", None)
    spec = getattr(metadata, "partition_spec", None)
    if metadata is None or spec is None:
        return "one device"
    mesh = dict(
        zip(metadata.axis_names, np.ravel(metadata.shape).tolist(), strict=True)
    )
    over = ", ".join(f"{axis}={size}" for axis, size in mesh.items())
    dims = ", ".join(_axes(axes) for axes in spec) or "whole"
    return f"[{dims}] over {over}"


def _axes(axes: str | list[str] | tuple[str, ...] | None) -> str:
    # The mesh axes of one dim, as people write them in a PartitionSpec.
    if axes is None or isinstance(axes, str):
        return axes or "-"
    return "+".join(axes)
