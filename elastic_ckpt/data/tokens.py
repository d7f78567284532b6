"""Byte-level tokens: a byte's token is its value plus 3; special tokens are below 3.

The numbering is that of ByT5 (Xue et al. 2022): 0 is padding, 1 ends a text. In
addition, 2 begins a text.
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


def narrowed(values: np.ndarray, *, place: str) -> np.ndarray:
    """Integers of any type as tokens, int32 of the same shape.

    Raises:
      DataError: if int32 cannot hold a number; names `place` and the number.
    """
    if values.dtype == np.int32:
        return values
    narrow = values.astype(np.int32)
    if values.dtype.itemsize >= narrow.itemsize and (narrow != values).any():
        wrong = values[narrow != values][0]
        raise errors.DataError(
            f"{place} has the token {wrong}, which does not fit into 32 bits; write the"
            " data again with tokens below the size of the vocabulary"
        )
    return narrow


def of_element(element: dict[str, Any], column: str) -> np.ndarray:
    """The tokens in a column of a record, int32 `[tokens]`; none for a null value.

    Raises:
      DataError: if the column is missing or has other values.
    """
    value = in_column(element, column)
    if value is None or (isinstance(value, list) and not value):
        return np.zeros(0, np.int32)
    numbers = np.asarray(value)
    if numbers.ndim != 1 or not np.issubdtype(numbers.dtype, np.integer):
        raise errors.DataError(
            f"column {column!r} has {numbers.dtype}{list(numbers.shape)}, not a list of"
            " tokens; give a tokenizer if it is text (tokenize_train_data=true in a"
            " configuration)"
        )
    return narrowed(numbers, place=f"column {column!r}").copy()


def in_column(element: dict[str, Any], column: str) -> Any:
    """The value of a column of a record.

    Raises:
      DataError: if it is missing.
    """
    if column not in element:
        raise errors.DataError(
            f"a record has no column {column!r}, only {sorted(element)}; name the"
            " column (train_data_columns in a configuration)"
        )
    return element[column]


def encode(text: bytes, length: int) -> np.ndarray:
    """BEGIN, the bytes of `text`, END; truncated or padded to `length` tokens.

    Returns:
      int32 of shape `[length]`.
    """
    tokens = np.full(length, PAD, np.int32)
    tokens[0] = BEGIN
    kept = np.frombuffer(text[: length - 1], np.uint8)
    tokens[1 : 1 + len(kept)] = kept.astype(np.int32) + _NUM_SPECIAL
    if len(kept) + 1 < length:
        tokens[1 + len(kept)] = END
    return tokens
