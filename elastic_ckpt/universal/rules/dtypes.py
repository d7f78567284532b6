"""The dtypes of targets: those of their sources, or those that a rule gives."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence

import ml_dtypes
import numpy as np

from elastic_ckpt.universal.rules.layout_error import LayoutError
from elastic_ckpt.universal.rules.relation import Relation
from elastic_ckpt.universal.rules.rows import Row

# A cast from one to another needs to be written.
_CATEGORIES = (np.bool_, np.integer, np.floating, np.complexfloating)
_LIMITS_OF = {np.integer: ml_dtypes.iinfo, np.floating: ml_dtypes.finfo}


def with_dtypes(
    relation: Relation, sources: Sequence[Row], targets: Sequence[Row]
) -> Iterator[Row]:
    """The targets of an instance with their dtypes.

    Args:
      relation: the rule.
      sources: of the instance.
      targets: with dtypes, or without if they are derived.

    Raises:
      LayoutError: if a dtype is not that of the rule, needs a cast that the rule does
        not have, or cannot be derived.
    """
    by_pattern: list[set[np.dtype]] = [set() for _ in relation.targets]
    for pair in relation.pairs:
        by_pattern[pair.target.tensor].update(
            row.dtype
            for row in sources
            if row.tensor == pair.source.tensor and row.dtype is not None
        )
    for row in targets:
        dtype = _dtype(relation, row, by_pattern[row.tensor])
        yield dataclasses.replace(row, dtype=dtype)


def _dtype(relation: Relation, row: Row, sources: set[np.dtype]) -> np.dtype:
    tensor = relation.targets[row.tensor]
    written = tensor.pattern.dtype
    if written is not None:
        if row.dtype not in (None, np.dtype(written)):
            raise LayoutError(
                f"{tensor.place}: {row.name!r} is of {row.dtype} in the target, the "
                f"rule makes it {written}; change one of them"
            )
        return np.dtype(written)
    if row.dtype is None:
        if len(sources) != 1:
            listed = ", ".join(sorted(map(str, sources))) or "no dtype"
            raise LayoutError(
                f"{tensor.place}: {row.name!r} has sources of {listed}; write `dtype:`"
            )
        return next(iter(sources))
    for source in sources:
        if not _same_category(source, row.dtype):
            raise LayoutError(
                f"{tensor.place}: {row.name!r} is of {row.dtype}, its source of "
                f"{source}; write `dtype: {row.dtype}` to cast it"
            )
    return row.dtype


def _same_category(one: np.dtype, other: np.dtype) -> bool:
    category = _category(one)
    return one == other or (category is not None and category == _category(other))


def _category(dtype: np.dtype) -> type | None:
    for category in _CATEGORIES:
        if np.issubdtype(dtype, category):
            return category
    # NumPy has no category for bfloat16 and others.
    for category, limits_of in _LIMITS_OF.items():
        with contextlib.suppress(ValueError):
            limits_of(dtype)
            return category
    return None
