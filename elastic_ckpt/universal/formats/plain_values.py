"""The numbers and texts of a decoded pickle, by path."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np

from elastic_ckpt.universal.formats.source_budget import SourceBudget

# Shared parts are repeated, and each value has the keys that lead to it. It takes so
# many beside its path.
_VALUE_BYTES = 150

_PLAIN = (str, bytes, int, float, bool, type(None))


def flatten(
    value: Any,
    *,
    file: str,
    without: Collection[str] = (),
    budget: SourceBudget | None = None,
) -> dict[str, Any]:
    """Numbers and texts by path, `args/lr`; lists of them are one value.

    Args:
      value: dicts and lists, with anything in them; tensors are left out.
      file: that holds them, for messages.
      without: keys of the outermost dict that are left out.
      budget: of the checkpoint; None if these are all values.

    Raises:
      FormatError: if they take too much memory.
    """
    kept = value
    if isinstance(value, dict):
        kept = {key: each for key, each in value.items() if key not in without}
    flat = _Flat(file, budget or SourceBudget())
    flat.add(kept, "")
    return flat.values


def plain(value: Any) -> Any:
    """The value with lists for tuples and dicts for records; no tensors."""
    if isinstance(value, dict):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if isinstance(value, np.dtype):
        return value.name
    return value if isinstance(value, _PLAIN) else None


class _Flat:
    """Values by path, while they are collected."""

    def __init__(self, file: str, budget: SourceBudget) -> None:
        self.values: dict[str, Any] = {}
        self._file = file
        self._budget = budget

    def add(self, value: Any, path: str) -> None:
        # Making it took time, even if nothing gets it.
        self._take(len(path))
        if isinstance(value, np.dtype):
            self._put(path, value.name)
        elif isinstance(value, _PLAIN):
            self._put(path, value)
        elif isinstance(value, dict):
            for key, each in value.items():
                self.add(each, f"{path}/{key}" if path else str(key))
        elif isinstance(value, list | tuple):
            if all(isinstance(each, _PLAIN) for each in value):
                self._take(8 * len(value))
                self._put(path, list(value))
            else:
                for number, each in enumerate(value):
                    self.add(each, f"{path}/{number}" if path else str(number))

    def _put(self, path: str, value: Any) -> None:
        self._take(_VALUE_BYTES)
        self.values[path] = value

    def _take(self, num_bytes: int) -> None:
        self._budget.take(num_bytes, self._file)
