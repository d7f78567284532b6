"""Packs examples into rows by concatenating them and cutting every L tokens.

Rows equal those of Grain's `ConcatThenSplitIterDataset`, token by token, but cost less:
an example is copied into its row directly, and the state is computed only when it is
requested.
"""

from __future__ import annotations

from typing import Any

import grain
import numpy as np

from elastic_ckpt.core import errors, storage
from elastic_ckpt.data import shard_steps

Example = dict[str, np.ndarray]

# The suffixes of the features that a row has in addition to each packed one.
_ADDED = ("_segment_ids", "_positions")


class ConcatThenSplit(shard_steps.Step[Example]):
    """Concatenates examples, and splits them into rows of `length` tokens.

    Only the last row of finite data has padding. For each feature, a row also has
    `{feature}_segment_ids`, which number the examples of the row from 1 and are 0 for
    padding, and `{feature}_positions`, which number the tokens of an example, or of its
    part in this row, from 0; both int32 `[length]`.

    Args:
      parent: examples, dicts of arrays `[tokens, ...]`, those of an example of the same
        length.
      features: the features to pack; others are dropped.
      length: tokens of a row.
    """

    def __init__(
        self, parent: grain.IterDataset, *, features: tuple[str, ...], length: int
    ) -> None:
        super().__init__(parent)
        if isinstance(features, str) or not features or length < 1:
            raise errors.ConfigError(
                f"ConcatThenSplit: features={features!r}, length={length}; give a tuple"
                " of names, and a length of 1 or more tokens"
            )
        clashing = {f"{name}{end}" for name in features for end in _ADDED} & {*features}
        if clashing:
            raise errors.ConfigError(
                f"the features {sorted(clashing)} have names of features that packing"
                " adds; rename them before they are packed"
            )
        self._features = features
        self._length = length

    def __iter__(self) -> grain.DatasetIterator[Example]:
        return _ConcatThenSplitIterator(self, iter(self._parent))

    def settings(self) -> dict[str, storage.Json]:
        """The features that are packed, and the length of a row."""
        return {"features": list(self._features), "length": self._length}


class _ConcatThenSplitIterator(grain.DatasetIterator[Example]):
    def __init__(self, dataset: ConcatThenSplit, parent: grain.DatasetIterator) -> None:
        super().__init__(parent)
        self._source = parent
        self._features, self._length = dataset._features, dataset._length
        self._indices = np.arange(self._length, dtype=np.int32)
        # The example in which the next row begins, the parent's state before it, and
        # how many of its tokens are already in rows.
        self._columns: list[np.ndarray] = []
        self._before: Any = None
        self._size, self._taken = 0, 0

    def __next__(self) -> Example:
        length, indices = self._length, self._indices
        rows: list[np.ndarray] = []
        segments, positions = np.zeros((2, length), np.int32)
        filled, segment = 0, 0
        while filled < length:
            if self._taken == self._size:
                try:
                    self._open()
                except StopIteration:
                    if not filled:
                        raise
                    break
                continue
            rows = rows or [
                np.zeros((length, *column.shape[1:]), column.dtype)
                for column in self._columns
            ]
            first = self._taken
            count = min(length - filled, self._size - first)
            end, segment = filled + count, segment + 1
            for row, column in zip(rows, self._columns, strict=True):
                row[filled:end] = column[first : first + count]
            segments[filled:end] = segment
            positions[filled:end] = indices[:count]
            self._taken, filled = first + count, end
        packed = dict(zip(self._features, rows, strict=True))
        for feature in self._features:
            for end, added in zip(_ADDED, (segments, positions), strict=True):
                packed[f"{feature}{end}"] = added
        return packed

    def get_state(self) -> dict[str, Any]:
        if self._taken == self._size:
            return {"parent": self._source.get_state(), "taken": 0}
        return {"parent": self._before, "taken": self._taken}

    def set_state(self, state: dict[str, Any]) -> None:
        self._source.set_state(state["parent"])
        self._size = self._taken = 0
        if state["taken"]:
            self._open()
            self._taken = state["taken"]

    def _open(self) -> None:
        before = self._source.get_state()
        example = next(self._source)
        columns = [example[feature] for feature in self._features]
        sizes = {len(column) for column in columns}
        if len(sizes) != 1:
            raise errors.DataError(
                f"an example has {self._features} of {sorted(sizes)} tokens; to be"
                " packed together they must have the same length"
            )
        self._columns, self._before = columns, before
        self._size, self._taken = sizes.pop(), 0
