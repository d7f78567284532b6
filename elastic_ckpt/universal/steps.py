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
from elastic_ckpt.universal.reading import sources, tree
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
    matched = (
        matching.moves(
            # A step has no values.
            shipped.resolve(layout).with_values({}),
            sources.tensors_of(contents, name),
            {},
            tree.targets(abstract),
        )
        if contents is not None
        else None
    )

    def read(saved: VerifiedReader | epath.Path) -> Any:
        if not isinstance(saved, VerifiedReader):
            return loading.load(saved, abstract, layout=layout)
        assert matched is not None
        stored, files = sources.saved_boxes(saved, name)
        checkpoint = Checkpoint(format="elastic_ckpt", tensors=stored)
        return tree.load(checkpoint, matched, abstract, files=files)

    return read
