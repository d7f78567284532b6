"""Byte-level tokens: a byte's token is its value plus 3, below are the special ones.

The numbering is ByT5's (Xue et al. 2022): 0 pads, 1 ends a text; 2 begins one here.
"""

from __future__ import annotations

import numpy as np

PAD = 0
END = 1
BEGIN = 2
_NUM_SPECIAL = 3
VOCAB_SIZE = 256 + _NUM_SPECIAL


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
