"""The layouts that ship with this package, by name: `hf_llama_to_maxtext`.

They are the files of `configs/layouts`; its README lists them.
"""

from __future__ import annotations

import functools
import os
import pathlib
from collections.abc import Mapping

from elastic_ckpt.universal.rules.layout import Layout, LayoutError

_INSTALLED = pathlib.Path(__file__).parent / "layouts"
_IN_CHECKOUT = pathlib.Path(__file__).parents[2] / "configs" / "layouts"
# After the name of a layout.
_INVERSE = " (inverse)"


def shipped() -> list[str]:
    """The names of all layouts that ship."""
    return sorted(path.stem for path in _directory().glob("*.yml"))


def load(name: str, *, sizes: Mapping[str, int] | None = None) -> Layout:
    """The layout of this name.

    Args:
      name: one of `shipped()`.
      sizes: of dims that shapes do not determine, beside those in its file.

    Raises:
      LayoutError: if none has this name.
    """
    if name not in shipped():
        raise LayoutError(
            f"no layout that ships is named {name!r}; choose one of "
            f"{', '.join(shipped())}, or give the path of a file"
        )
    return _read(_directory() / f"{name}.yml").with_sizes(sizes or {})


def resolve(layout: Layout | str | os.PathLike[str]) -> Layout:
    """The layout that a user gives: a layout, the path of a file, or a name.

    Args:
      layout: a text without a suffix or directory is a name, as in `fitting`.

    Raises:
      LayoutError: as `load`, and `Layout.load`.
    """
    if isinstance(layout, Layout):
        return layout
    text = os.fspath(layout)
    if os.path.splitext(text)[1] or os.path.dirname(text):
        return Layout.load(text)
    named = load(text.removesuffix(_INVERSE))
    return named.inverse() if text.endswith(_INVERSE) else named


@functools.cache
def _read(path: pathlib.Path) -> Layout:
    return Layout.load(path)


def _directory() -> pathlib.Path:
    return _INSTALLED if _INSTALLED.exists() else _IN_CHECKOUT
