"""Reads trees of steps of a run through layouts, for `checkpoint.restore`."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from etils import epath

from elastic_ckpt.checkpoint.host.verified_read import VerifiedReader
from elastic_ckpt.steps.manifest import Contents
from elastic_ckpt.universal import loading, shipped
from elastic_ckpt.universal.formats.checkpoint import Checkpoint
from elastic_ckpt.universal.reading import restored_tree, saved_boxes
from elastic_ckpt.universal.reading.saved_boxes import SavedBoxes
from elastic_ckpt.universal.rules import matching
from elastic_ckpt.universal.rules.layout import Layout


def relayout(
    contents: Contents | None,
    name: str,
    abstract: Any,
    layout: Layout | str | os.PathLike[str],
) -> Callable[[VerifiedReader | epath.Path], Any]:
    """Matches a layout with a tree of a step; see `checkpoint.restore.Relayout`.

    Raises:
      LayoutError: if the layout does not fit.
    """
    leaves = restored_tree.target_leaves(abstract)
    matched = (
        matching.moves(
            # A step has no values.
            shipped.resolve(layout).with_values({}),
            saved_boxes.tensors_of(contents, name),
            {},
            {leaf.tensor.name: leaf.tensor for leaf in leaves},
        )
        if contents is not None
        else None
    )

    def read(saved: VerifiedReader | epath.Path) -> Any:
        if not isinstance(saved, VerifiedReader):
            return loading.load(saved, abstract, layout=layout)
        assert matched is not None
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
