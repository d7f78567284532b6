"""The numbers and texts of a decoded pickle or of JSON, by path."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import numpy as np

_PLAIN = (str, bytes, int, float, bool, type(None))


def flatten(value: Any, *, without: Collection[str] = ()) -> dict[str, Any]:
    """Numbers and texts by path, `args/lr`; lists of them are one value.

    Args:
      value: dicts and lists, with anything in them; tensors are left out.
      without: keys of the outermost dict that are left out.
    """
    if isinstance(value, dict):
        value = {key: each for key, each in value.items() if key not in without}
    return dict(_flat(value, ""))


def _flat(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    is_list = isinstance(value, list | tuple)
    if isinstance(value, np.dtype):
        yield path, value.name
    elif isinstance(value, _PLAIN):
        yield path, value
    elif is_list and all(isinstance(each, _PLAIN) for each in value):
        yield path, list(value)
    elif is_list or isinstance(value, dict):
        for key, each in enumerate(value) if is_list else value.items():
            yield from _flat(each, f"{path}/{key}" if path else str(key))


def plain(value: Any) -> Any:
    """The value with lists for tuples, and texts as keys; no tensors."""
    if isinstance(value, dict):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if isinstance(value, np.dtype):
        return value.name
    return value if isinstance(value, _PLAIN) else None
