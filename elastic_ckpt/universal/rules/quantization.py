"""Quantized weights, whose values have a meaning only together with their scales.

A weight is stored in 8 bits or fewer, `X.weight`, and beside it what it has to be
multiplied by, `X.weight_scale_inv`, `X.weight_scale`, `X.SCB`, `X.scales`. Nothing here
multiplies them, so that a layout that uses the one and drops the other is refused.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence

import numpy as np

# What stands after the last dot, or after the name of the weight.
_SCALE = re.compile(
    r"(?P<weight>.*?)[._](?:scales?|scales?_inv|scb|absmax|zero_points?|q?zeros)",
    re.IGNORECASE | re.DOTALL,
)
_PACKED = (np.dtype(np.int32), np.dtype(np.uint32))
_WEIGHTS = (".weight", ".qweight", "_blocks", "_packed", "")


def may_be_quantized(dtype: np.dtype) -> bool:
    """Whether weights of this dtype may need scales: one byte each, or packed."""
    return (dtype.itemsize == 1 and dtype != np.bool_) or dtype in _PACKED


def without_scales(used: Sequence[str], dropped: Collection[str]) -> Iterator[str]:
    """Quantized tensors whose scales are left out, each with those scales.

    Args:
      used: the names of tensors that may be quantized.
      dropped: the names of tensors that the layout drops.
    """
    scales: dict[str, list[str]] = {}
    for name in dropped:
        if match := _SCALE.fullmatch(name):
            scales.setdefault(match["weight"], []).append(name)
    if not scales:
        return
    for name in used:
        stems = (name.removesuffix(each) for each in _WEIGHTS if name.endswith(each))
        held = sorted({scale for stem in stems for scale in scales.get(stem, ())})
        if held:
            yield f"{name} ({', '.join(held)})"
