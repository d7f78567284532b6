"""The description of a step that is saved: structure and metadata, without values."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from elastic_ckpt.checkpoint import orbax_format, saveable, tree_structure
from elastic_ckpt.checkpoint.host.step_notes import StepNotes
from elastic_ckpt.checkpoint.host.trees import AbstractArray, leaf_path
from elastic_ckpt.core import digest, errors, storage
from elastic_ckpt.steps.manifest import Contents
from elastic_ckpt.steps.step_id import StepId
from elastic_ckpt.tiers.persistent import ocdbt

Chunks = Mapping[str, Sequence[int]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostNotes:
    """Notes that hosts may have made differently; those of host 0 count.

    Attributes:
      metrics: that the step is saved with, as JSON text; None if there are none.
      custom_metadata: that a user added, as JSON text; None if there is nothing.
      texts: the leaves of the trees that are texts.
      parts_digest: of `StepDescription.kinds`, which may not differ.
    """

    metrics: str | None
    custom_metadata: str | None
    texts: tuple[str, ...]
    parts_digest: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepDescription:
    """A step without its values.

    Attributes:
      trees: pytrees by name, with abstract arrays, and any number for a number.
      components: the names of other parts, ordered.
      metrics_json: the metrics that it was saved with, as text.
      custom_json: the metadata that a user added, as text.
      init_timestamp_nsecs: when its save began, since 1970.
    """

    trees: Mapping[str, Any]
    components: Sequence[str]
    metrics_json: str | None
    custom_json: str | None
    init_timestamp_nsecs: int

    @classmethod
    def from_trees(
        cls,
        trees: Mapping[str, Any],
        components: Mapping[str, Any],
        *,
        metrics: Mapping[str, Any] | None,
        custom_metadata: Mapping[str, Any] | None,
    ) -> StepDescription:
        """Describes the trees and components; holds no reference to an array.

        Raises:
          CheckpointError: if a leaf cannot be saved, or metrics or custom metadata are
            not JSON.
        """
        saveable.check(trees, components)
        return cls(
            trees={name: jax.tree.map(_abstract, tree) for name, tree in trees.items()},
            components=sorted(components),
            metrics_json=_text("metrics", metrics),
            custom_json=_text("custom metadata", custom_metadata),
            init_timestamp_nsecs=time.time_ns(),
        )

    @classmethod
    def from_contents(cls, contents: Contents) -> StepDescription:
        """Describes a step that was saved, by its manifests.

        Raises:
          CheckpointError: if they describe its trees in an unsupported way.
        """
        return cls(
            trees=tree_structure.described_trees(contents),
            components=sorted(contents.components),
            metrics_json=contents.metrics,
            custom_json=contents.custom_metadata,
            init_timestamp_nsecs=1_000_000 * contents.time_ms,
        )

    @property
    def metrics(self) -> Any:
        """The metrics that it was saved with; None if there are none."""
        return _parsed(self.metrics_json)

    @property
    def custom_metadata(self) -> Any:
        """The metadata that a user added; None if there is nothing."""
        return _parsed(self.custom_json)

    def host_notes(self, kinds: Mapping[str, str]) -> HostNotes:
        """The notes that hosts compare, or that those of host 0 replace.

        Args:
          kinds: of what this host saves.
        """
        leaves = jax.tree.leaves(self.trees)
        return HostNotes(
            metrics=self.metrics_json,
            custom_metadata=self.custom_json,
            texts=tuple(leaf for leaf in leaves if isinstance(leaf, str)),
            parts_digest=digest.json_digest(dict(kinds)),
        )

    def kinds(self, components: Mapping[str, str]) -> dict[str, str]:
        """By the path of a leaf or the name of a component, what this host saves.

        Args:
          components: by name, what they are.
        """
        kinds = {
            leaf_path(name, keys): _kind(leaf)
            for name, tree in self.trees.items()
            for keys, leaf in jax.tree_util.tree_flatten_with_path(
                tree, is_leaf=lambda each: each is None
            )[0]
        }
        return kinds | dict(components)

    def agreed(self, notes: HostNotes) -> StepDescription:
        """This step with the notes of host 0, which are those of the step."""
        texts = iter(notes.texts)
        return dataclasses.replace(
            self,
            trees=jax.tree.map(
                lambda leaf: next(texts) if isinstance(leaf, str) else leaf, self.trees
            ),
            metrics_json=notes.metrics,
            custom_json=notes.custom_metadata,
        )

    def without(self, components: Collection[str]) -> StepDescription:
        """This step without some components."""
        left = [name for name in self.components if name not in components]
        return dataclasses.replace(self, components=left)

    def notes(self, parents: Sequence[StepId]) -> StepNotes:
        """The notes that manifests have of it, as a save with these parents."""
        return StepNotes(
            metrics=self.metrics_json,
            custom_metadata=self.custom_json,
            trees=tree_structure.to_json(self.trees),
            parents=tuple(parents),
        )

    def arrays(self, chunks: Chunks) -> dict[str, ocdbt.StoredArray]:
        """By the path of a leaf, where Orbax looks for it.

        Args:
          chunks: by the path of a leaf, the shape of its chunks.
        """
        return orbax_format.stored_arrays(self.trees, chunks)

    def names(self, chunks: Chunks) -> dict[str, tuple[str, str]]:
        """By the path of a leaf, the checkpointable and the name that Orbax uses."""
        return {
            path: (array.checkpointable, array.name)
            for path, array in self.arrays(chunks).items()
        }

    def files(self, chunks: Chunks) -> dict[str, str]:
        """The files that Orbax adds to the values, by path, as of now.

        Args:
          chunks: by the path of a leaf, the shape of its chunks.
        """
        files = orbax_format.metadata_files(
            self.trees,
            self.components,
            chunks=chunks,
            step=orbax_format.StepMetadata(
                init_timestamp_nsecs=self.init_timestamp_nsecs,
                commit_timestamp_nsecs=time.time_ns(),
                metrics=self.metrics,
                custom=self.custom_metadata,
            ),
        )
        return {path: content.decode() for path, content in files.items()}


def _kind(leaf: Any) -> str:
    if hasattr(leaf, "shape") and hasattr(leaf, "dtype"):
        return f"{leaf.dtype}{list(leaf.shape)}"
    return type(leaf).__name__


def json_of_user(what: str, value: Mapping[str, Any]) -> str:
    """The JSON of metrics or metadata that a user gives.

    Raises:
      CheckpointError: if it is not JSON; the message begins with `what`.
    """
    try:
        text = storage.canonical_json(dict(value)).decode()
        json.loads(text)
    except (TypeError, ValueError, RecursionError) as error:
        raise errors.CheckpointError(
            f"the {what} {str(value)[:200]} are not JSON ({error}); give plain numbers,"
            " such as float(loss), texts, lists and dicts"
        ) from None
    return text


def _text(what: str, value: Mapping[str, Any] | None) -> str | None:
    return None if value is None else json_of_user(what, value)


def _parsed(text: str | None) -> Any:
    return None if text is None else json.loads(text)


# What describes an array, by its shape, its dtype, and the identity of its sharding,
# which is kept with it. From step to step an array mostly has the same one, and a
# comparison of shardings takes longer than all the rest.
_structs: dict[tuple[Any, ...], jax.ShapeDtypeStruct] = {}
_MOST_STRUCTS = 2**17


def _struct(array: jax.Array) -> jax.ShapeDtypeStruct:
    key = array.shape, array.dtype, id(array.sharding)
    known = _structs.get(key)
    if known is None:
        if len(_structs) >= _MOST_STRUCTS:
            _structs.clear()
        known = jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)
        _structs[key] = known
    return known


def _abstract(leaf: Any) -> Any:
    if isinstance(leaf, jax.Array):
        return _struct(leaf)
    if isinstance(leaf, np.ndarray):
        return AbstractArray(shape=leaf.shape, dtype=leaf.dtype)
    for kind in (bool, int, float):
        if isinstance(leaf, kind):
            return kind(0)
    return leaf
