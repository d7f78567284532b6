"""The layouts that ship with this package, by name: `hf_llama_to_maxtext`.

They are the files of `configs/layouts`; its README lists them.
"""

from __future__ import annotations

import functools
import os
import pathlib

from elastic_ckpt.universal.rules.layout import Layout, LayoutError

_INSTALLED = pathlib.Path(__file__).parent / "layouts"
_IN_CHECKOUT = pathlib.Path(__file__).parents[2] / "configs" / "layouts"


def directory() -> pathlib.Path:
    """Where the files are."""
    return _INSTALLED if _INSTALLED.exists() else _IN_CHECKOUT


def names() -> list[str]:
    """The names of all layouts that ship."""
    return sorted(path.stem for path in directory().glob("*.yml"))


@functools.cache
def load(name: str) -> Layout:
    """The layout of this name.

    Raises:
      LayoutError: if none has this name.
    """
    if name not in names():
        raise LayoutError(
            f"no layout that ships is named {name!r}; choose one of "
            f"{', '.join(names())}, or give the path of a file"
        )
    return Layout.load(directory() / f"{name}.yml")


def resolve(layout: Layout | str | os.PathLike[str]) -> Layout:
    """The layout that a user gives: a layout, the path of a file, or a name.

    A text without a suffix or a directory is a name.

    Raises:
      LayoutError: as `load`, and `Layout.load`.
    """
    if isinstance(layout, Layout):
        return layout
    text = os.fspath(layout)
    is_path = os.path.splitext(text)[1] or os.path.dirname(text)
    return Layout.load(text) if is_path else load(text)
