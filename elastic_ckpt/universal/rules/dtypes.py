"""The dtypes of targets: those of their sources, or those that a rule gives.

Floats of 8 bits mean nothing without their scales: they keep their dtype unless a rule
multiplies them by `times`. So do integers whose rule has `times`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator, Sequence

import ml_dtypes
import numpy as np

from elastic_ckpt.universal.rules.layout import LayoutError
from elastic_ckpt.universal.rules.relation import ParsedTensor, Relation, Row

# A cast from one to another needs to be written.
_CATEGORIES = (np.bool_, np.integer, np.floating, np.complexfloating)
_LIMITS_OF = {np.integer: ml_dtypes.iinfo, np.floating: ml_dtypes.finfo}
# Of a quantized weight that is multiplied by its scales.
_DEQUANTIZED = np.dtype(ml_dtypes.bfloat16)
_PACKED = (np.dtype(np.int32), np.dtype(np.uint32))


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
    held: list[set[np.dtype]] = [set() for _ in relation.targets]
    unscaled: list[set[np.dtype]] = [set() for _ in relation.targets]
    for pair in relation.pairs:
        tensor = pair.source.tensor
        viewed_as = relation.sources[tensor].pattern.viewed_as
        found: set[np.dtype] = {
            row.dtype
            for row in sources
            if row.tensor == tensor and row.dtype is not None
        }
        if viewed_as is not None:
            found = {np.dtype(viewed_as)}
        operands = {each.tensor for each in pair.operands}
        held_operands = [row for row in sources if row.tensor in operands]
        for row in held_operands:
            _check_operand(relation.sources[row.tensor], row)
        roles = {relation.sources[row.tensor].role for row in held_operands}
        if "plus" in roles and any(map(may_be_quantized, found)):
            raise LayoutError(
                f"{relation.sources[tensor].place}: weights of "
                f"{', '.join(map(str, found))} mean nothing without their scales, by "
                "which `plus` does not multiply; convert the checkpoint to bfloat16 "
                "first"
            )
        if held_operands:
            found = {_DEQUANTIZED if may_be_quantized(d) else d for d in found}
        held[pair.target.tensor].update(found)
        if "times" not in roles:
            has_times = any(relation.sources[n].role == "times" for n in operands)
            needs_scales = may_be_quantized if has_times else _is_small_float
            unscaled[pair.target.tensor].update(filter(needs_scales, found))
    for row in targets:
        dtype = _dtype(relation, row, held[row.tensor])
        if cast := unscaled[row.tensor] - {dtype}:
            raise LayoutError(
                f"{relation.targets[row.tensor].place}: {row.name!r} is {dtype} in the "
                f"target, and made of {', '.join(map(str, cast))} without scales; "
                "multiply by them with `times`, and use the whole checkpoint"
            )
        yield dataclasses.replace(row, dtype=dtype)


def _check_operand(tensor: ParsedTensor, row: Row) -> None:
    # Scales of integers are mostly exponents.
    pattern = tensor.pattern
    dtype = np.dtype(pattern.viewed_as) if pattern.viewed_as else row.dtype
    is_cast = pattern.dtype is not None
    if dtype is not None and _category(dtype) is not np.floating and not is_cast:
        raise LayoutError(
            f"{tensor.place}: {row.name!r} is of {dtype}; write `as: float8_e8m0fnu` "
            "if its bytes are exponents, as those of MXFP4 are, or `dtype: float32` if "
            "its integers are factors"
        )


def may_be_quantized(dtype: np.dtype) -> bool:
    """Whether weights of this dtype may need scales: one byte each, or packed."""
    return (dtype.itemsize == 1 and dtype != np.bool_) or dtype in _PACKED


def _is_small_float(dtype: np.dtype) -> bool:
    return dtype.itemsize == 1 and _category(dtype) is np.floating


def is_integer(dtype: np.dtype) -> bool:
    """Whether the elements of a dtype are integers, of any number of bits."""
    return _category(dtype) is np.integer


def can_be(number: float, dtype: np.dtype) -> bool:
    """Whether an element of a dtype can have the value of a number, rounded at most."""
    if dtype.kind == "b":
        return number in (0, 1)
    if not is_integer(dtype):
        return True
    limits = ml_dtypes.iinfo(dtype)
    is_whole = math.isfinite(number) and float(number).is_integer()
    return is_whole and int(limits.min) <= number <= int(limits.max)


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
