"""Byte-level tokens: a byte's token is its value plus 3, below are the special ones.

The numbering is ByT5's (Xue et al. 2022): 0 pads, 1 ends a text; 2 begins one here.
"""

from __future__ import annotations

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
      DataError: naming `place` and the number, if there is one that int32 cannot hold.
    """
    if values.dtype == np.int32:
        return values
    found = values.astype(np.int32)
    if values.dtype.itemsize >= found.itemsize and (found != values).any():
        wrong = values[found != values][0]
        raise errors.DataError(
            f"{place} has the token {wrong}, which is no number of 32 bits; write the"
            " data again with tokens below the size of the vocabulary"
        )
    return found


def encode(text: bytes, length: int) -> np.ndarray:
    """Begin, the bytes of `text`, end; trimmed or padded to `length` tokens.

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
