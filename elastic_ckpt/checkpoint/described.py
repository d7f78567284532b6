"""What is noted of a step when it is saved, for a checkpoint that Orbax can load."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax

from elastic_ckpt.checkpoint import orbax_format
from elastic_ckpt.core import errors, storage

Chunks = Mapping[str, Sequence[int]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Described:
    """A step without its values.

    Attributes:
      trees: pytrees by name, with abstract arrays.
      components: the names of other parts.
      metrics_json: the metrics that it was saved with, as text.
      custom_metadata: that it was saved with.
      init_timestamp_nsecs: when its save began, since 1970.
    """

    trees: Mapping[str, Any]
    components: Collection[str]
    metrics_json: str | None
    custom_metadata: Mapping[str, Any] | None
    init_timestamp_nsecs: int

    @classmethod
    def of(
        cls,
        trees: Mapping[str, Any],
        components: Collection[str],
        *,
        metrics: Mapping[str, Any] | None,
        custom_metadata: Mapping[str, Any] | None,
    ) -> Described:
        """Describes what is saved now; refers to no array of it.

        Raises:
          CheckpointError: if the metrics are not JSON.
        """
        return cls(
            trees={name: jax.tree.map(_abstract, tree) for name, tree in trees.items()},
            components=sorted(components),
            metrics_json=None if metrics is None else _json(metrics),
            custom_metadata=custom_metadata,
            init_timestamp_nsecs=time.time_ns(),
        )

    def names(self, chunks: Chunks) -> dict[str, list[str]]:
        """By the path of a leaf, the checkpointable and the name that Orbax uses."""
        return {
            path: [array.checkpointable, array.name]
            for path, array in orbax_format.stored_arrays(self.trees, chunks).items()
        }

    def files(self, chunks: Chunks) -> dict[str, str]:
        """What Orbax adds to the values, by path, as if it were committed now.

        Args:
          chunks: by the path of a leaf, the shape of its chunks.
        """
        text = self.metrics_json
        files = orbax_format.metadata_files(
            self.trees,
            self.components,
            chunks=chunks,
            step=orbax_format.StepMetadata(
                init_timestamp_nsecs=self.init_timestamp_nsecs,
                commit_timestamp_nsecs=time.time_ns(),
                metrics=None if text is None else json.loads(text),
                custom=self.custom_metadata,
            ),
        )
        return {path: content.decode() for path, content in files.items()}


def _json(metrics: Mapping[str, Any]) -> str:
    try:
        return storage.canonical_json(dict(metrics)).decode()
    except (TypeError, ValueError) as error:
        raise errors.CheckpointError(
            f"the metrics {dict(metrics)} are not JSON ({error}); give plain numbers,"
            " such as float(loss)"
        ) from None


def _abstract(leaf: Any) -> Any:
    if not isinstance(leaf, jax.Array):
        return leaf
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
