"""Layouts for the checkpointer, which lies below and has them as a protocol."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from etils import epath

from elastic_ckpt.universal import loading, opening, shipped_layouts
from elastic_ckpt.universal.formats.format_error import FormatError
from elastic_ckpt.universal.rules.layout import Layout


class StepLayouts:
    """Reads trees of steps; see `checkpoint.other_layouts.Layouts`."""

    def load(
        self,
        path: epath.Path,
        abstract: Any,
        *,
        layout: Layout | str | os.PathLike[str],
    ) -> Any:
        """Reads the tree at `path`, as `loading.load`."""
        return loading.load(path, abstract, layout=layout)

    def fitting(self, path: epath.Path) -> Sequence[str]:
        """The names of layouts that ship and fit the tensors at `path`.

        Returns:
          An empty list, too, if the checkpoint cannot be opened.
        """
        try:
            return shipped_layouts.fitting(opening.open_checkpoint(path).tensors)
        except FormatError:
            return []


LAYOUTS = StepLayouts()
