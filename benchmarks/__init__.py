"""Measurements: each suite runs all sides in one call and reports the machine."""

from __future__ import annotations

import os
from typing import TypeVar

# Set for a suite and for the processes that it starts.
SMALL = "ELASTIC_CKPT_BENCHMARK_SMALL"
_T = TypeVar("_T")


def sized(full: _T, small: _T) -> _T:
    """The amount to measure; `small` only shows that the suite runs."""
    return small if SMALL in os.environ else full
