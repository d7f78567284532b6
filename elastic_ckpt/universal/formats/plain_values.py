"""The numbers and texts of a decoded pickle, by path."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np

_PLAIN = (str, bytes, int, float, bool, type(None))


def flatten(value: Any, *, without: Collection[str] = ()) -> dict[str, Any]:
    """Numbers and texts by path, `args/lr`; lists of them are one value.

    Args:
      value: dicts and lists, with anything in them; tensors are left out.
      without: keys of the outermost dict that are left out.
    """
    kept = value
    if isinstance(value, dict):
        kept = {key: each for key, each in value.items() if key not in without}
    flat: dict[str, Any] = {}
    _add(kept, "", flat)
    return flat


def plain(value: Any) -> Any:
    """The value with lists for tuples and dicts for records; no tensors."""
    if isinstance(value, dict):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if isinstance(value, np.dtype):
        return value.name
    return value if isinstance(value, _PLAIN) else None


def _add(value: Any, path: str, flat: dict[str, Any]) -> None:
    if isinstance(value, np.dtype):
        flat[path] = value.name
    elif isinstance(value, _PLAIN):
        flat[path] = value
    elif isinstance(value, dict):
        for key, each in value.items():
            _add(each, f"{path}/{key}" if path else str(key), flat)
    elif isinstance(value, list | tuple):
        if all(isinstance(each, _PLAIN) for each in value):
            flat[path] = list(value)
        else:
            for number, each in enumerate(value):
                _add(each, f"{path}/{number}" if path else str(number), flat)
