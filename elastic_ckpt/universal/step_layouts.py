"""Layouts for the checkpointer, which lies below and has them as a protocol."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from etils import epath

from elastic_ckpt.checkpoint.host.verified_read import VerifiedReader
from elastic_ckpt.steps.manifest import Contents
from elastic_ckpt.universal import loading, shipped_layouts
from elastic_ckpt.universal.formats.checkpoint import Checkpoint
from elastic_ckpt.universal.reading import restored_tree, saved_boxes
from elastic_ckpt.universal.reading.saved_boxes import SavedBoxes
from elastic_ckpt.universal.rules import matching
from elastic_ckpt.universal.rules.layout import Layout


class StepLayouts:
    """Reads trees of steps; see `checkpoint.restore.Layouts`."""

    def match(
        self,
        contents: Contents,
        name: str,
        abstract: Any,
        *,
        layout: Layout | str | os.PathLike[str],
    ) -> Callable[[VerifiedReader], Any]:
        """Matches a layout with a tree of a step; returns a function that reads it.

        Raises:
          LayoutError: if the layout does not fit.
        """
        leaves = restored_tree.target_leaves(abstract)
        matched = matching.moves(
            # A step has no values.
            shipped_layouts.resolve(layout).with_values({}),
            saved_boxes.tensors_of(contents, name),
            {},
            {leaf.tensor.name: leaf.tensor for leaf in leaves},
        )

        def read(saved: VerifiedReader) -> Any:
            source = SavedBoxes(saved, name)
            made = restored_tree.read_leaves(
                Checkpoint(format="elastic_ckpt", tensors=source.tensors),
                matched.moves,
                matched.fills,
                leaves,
                source=source,
            )
            return restored_tree.rebuilt(abstract, made)

        return read

    def load(
        self,
        path: epath.Path,
        abstract: Any,
        layout: Layout | str | os.PathLike[str],
    ) -> Any:
        """Reads the tree at `path`, as `loading.load`."""
        return loading.load(path, abstract, layout=layout)


LAYOUTS = StepLayouts()
