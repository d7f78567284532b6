"""Byte-level tokens: a byte's token is its value plus 3; special tokens are below 3.

The numbering is ByT5's (Xue et al. 2022): 0 is padding, 1 ends a document. In addition,
2 begins a document.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from elastic_ckpt.core import errors

PAD = 0
END = 1
BEGIN = 2
_NUM_SPECIAL = 3
VOCAB_SIZE = 256 + _NUM_SPECIAL


def narrowed(values: Any, *, place: str) -> np.ndarray:
    """Converts an array or list of integers of any type to int32 `[tokens]`.

    Raises:
      DataError: if `values` are not integers, or one of them exceeds int32. The message
        names `place`.
    """
    numbers = np.asarray(values)
    is_integer = not numbers.size or np.issubdtype(numbers.dtype, np.integer)
    if numbers.ndim != 1 or not is_integer:
        raise errors.DataError(
            f"{place} contains {numbers.dtype}{list(numbers.shape)}, not a list of"
            " tokens; if it contains text, use a tokenizer (tokenize_train_data=true in"
            " a configuration)"
        )
    narrow = numbers.astype(np.int32, copy=False)
    if narrow is not numbers and (is_wrong := narrow != numbers).any():
        raise errors.DataError(
            f"{place} contains token {numbers[is_wrong][0]}, which does not fit into 32"
            " bits; rewrite the data with tokens below the vocabulary size"
        )
    return narrow


def of_element(element: dict[str, Any], column: str) -> np.ndarray:
    """The tokens in a column of a record, int32 `[tokens]`; empty for a null value.

    Raises:
      DataError: if the column is missing or does not contain tokens.
    """
    value = in_column(element, column)
    numbers = narrowed([] if value is None else value, place=f"column {column!r}")
    if (least := numbers.min(initial=0)) < 0:
        raise errors.DataError(
            f"column {column!r} contains token {least}, but stored tokens are 0 or"
            " greater; read the column of inputs (train_data_columns in a"
            " configuration), not that of labels, in which -100 masks tokens"
        )
    return numbers.copy()


def in_column(element: dict[str, Any], column: str) -> Any:
    """The value of a column of a record.

    Raises:
      DataError: if the column is missing.
    """
    if column not in element:
        raise errors.DataError(
            f"a record has no column {column!r}; its columns are {sorted(element)}, so"
            " choose one of these (train_data_columns in a configuration)"
        )
    return element[column]


def of_bytes(content: bytes) -> np.ndarray:
    """The token of each byte, int32."""
    return np.frombuffer(content, np.uint8) + np.int32(_NUM_SPECIAL)
