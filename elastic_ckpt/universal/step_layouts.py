"""Layouts for the checkpointer, which lies below and has them as a protocol."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from etils import epath

from elastic_ckpt.checkpoint.host.verified_read import VerifiedReader
from elastic_ckpt.steps.manifest import Contents
from elastic_ckpt.universal import loading, shipped_layouts
from elastic_ckpt.universal.adapter import adapted, to_old
from elastic_ckpt.universal.formats.opened import OpenedCheckpoint
from elastic_ckpt.universal.reading import sources, tree
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
        tensors = sources.tensors_of(contents, name)
        matched = matching.moves(
            # A step has no values.
            shipped_layouts.resolve(layout).with_values({}),
            tensors,
            {},
            to_old(tree.targets(abstract)),
        )
        made_of = adapted(matched, tensors)

        def read(saved: VerifiedReader) -> Any:
            stored, files = sources.saved_boxes(saved, name)
            checkpoint = OpenedCheckpoint(format="elastic_ckpt", tensors=stored)
            return tree.load(checkpoint, made_of, abstract, files=files)

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
