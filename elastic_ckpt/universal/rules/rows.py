"""Tensors that match a pattern, with the values of all their coordinates."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from elastic_ckpt.universal.moves import Reduction
from elastic_ckpt.universal.rules.layout_error import LayoutError
from elastic_ckpt.universal.rules.relation import ParsedTensor, Relation

# The value of a capture, by its names.
Captured = tuple[tuple[tuple[str, ...], int | str], ...]

# The values of the captures that all names of a rule have.
Kept = tuple[int | str, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A tensor that matches a pattern.

    Attributes:
      tensor: the number of the pattern on its side of the rule.
      name: of the tensor.
      captured: the values of captures, without those that all names have.
      ranks: the coordinates of the rank that saved it, by axis.
      shape: in elements.
      dtype: of its elements; None if the source decides it.
    """

    tensor: int
    name: str
    captured: Captured
    ranks: tuple[tuple[str, int], ...]
    shape: tuple[int, ...]
    dtype: np.dtype | None


@dataclasses.dataclass(slots=True, kw_only=True)
class Placed:
    """A row and its coordinates; others with the same elements follow it.

    Attributes:
      number: of the row on its side.
      row: the tensor.
      values: of captures, rank axes and dims with tables, by name.
      ranks: the number of the rank and of all ranks, by axis of the dims expression.
      others: the numbers of the rows that have the same elements.
      reduction: of the row and `others`.
    """

    number: int
    row: Row
    values: dict[str, Any]
    ranks: dict[str, tuple[int, int]]
    others: list[int]
    reduction: Reduction = Reduction.NONE


def placed(
    tensor: ParsedTensor,
    rows: Iterable[tuple[int, Row]],
    *,
    points: frozenset[str],
    sizes: Mapping[str, int],
    counts: Mapping[str, int],
) -> list[Placed]:
    """The rows of one pattern, by their elements.

    Args:
      tensor: the pattern.
      rows: with their numbers.
      points: the coordinates that are no dims.
      sizes: of named dims.
      counts: the number of ranks, by axis.

    Raises:
      LayoutError: if rows have the same elements, and the rule does not reduce them.
    """
    reduced = frozenset(tensor.pattern.reduced)
    used = points | tensor.dims.axes
    names = sorted(used - reduced)
    groups: dict[tuple[object, ...], list[Placed]] = {}
    for number, row in rows:
        values = _values(tensor, row, sizes)
        ranks = _ranks(tensor, row, values, counts) if tensor.dims.axes else {}
        each = Placed(number=number, row=row, values=values, ranks=ranks, others=[])
        key = tuple([values.get(name, -1) for name in names])
        groups.setdefault(key, []).append(each)
    if tensor.pattern.mean or tensor.pattern.sum:
        _check_complete(tensor, list(groups.values()), counts)
    return [
        members[0] if len(members) == 1 else _first(tensor, members, reduced | used)
        for members in groups.values()
    ]


def axis_counts(
    relation: Relation, rows: Sequence[Sequence[Row]], counts: Mapping[str, int]
) -> dict[str, int]:
    """The number of ranks by axis, counted where a capture gives the rank."""
    counted = dict(counts)
    for tensors, side in zip((relation.sources, relation.targets), rows, strict=True):
        for row in side:
            for names, value in row.captured:
                (axis, *_) = names
                is_axis = axis in tensors[row.tensor].dims.axes
                if is_axis and counts.get(axis, 1) == 1:
                    counted[axis] = max(counted.get(axis, 0), int(value) + 1)
    return counted


def _values(tensor: ParsedTensor, row: Row, sizes: Mapping[str, int]) -> dict[str, Any]:
    values: dict[str, Any] = dict(row.ranks)
    for names, value in row.captured:
        if len(names) == 1:
            values[names[0]] = value
        else:
            rest = int(value)
            for name in reversed(names):
                rest, values[name] = divmod(rest, sizes[name])
    for key, (by, table) in tensor.tables.items():
        at = tuple(values.get(name, -1) for name in by)
        number = table.get(at)
        if number is None:
            raise LayoutError(
                f"{tensor.place}: the index of {key} has no entry {list(at)} for "
                f"{row.name!r}"
            )
        values[key] = number
    return values


def _ranks(
    tensor: ParsedTensor,
    row: Row,
    values: Mapping[str, Any],
    counts: Mapping[str, int],
) -> dict[str, tuple[int, int]]:
    ranks = {}
    for axis in tensor.dims.axes & values.keys():
        number, count = int(values[axis]), counts[axis]
        if number >= count:
            raise LayoutError(
                f"{tensor.place}: {row.name!r} is of rank {number} of {axis}, which "
                f"has {count} ranks"
            )
        ranks[axis] = (number, count)
    return ranks


def _check_distinct(
    tensor: ParsedTensor, members: Sequence[Placed], mentioned: frozenset[str]
) -> None:
    # Rows with the same elements differ in reduced coordinates alone.
    first = members[0]
    for other in members[1:]:
        differing = sorted(
            name
            for name in first.values.keys() | other.values.keys()
            if name not in mentioned
            and first.values.get(name) != other.values.get(name)
        )
        if differing:
            raise LayoutError(
                f"{tensor.place}: {first.row.name!r} is there for several "
                f"{', '.join(differing)}, which the rule does not use; list "
                f"{differing[0]} in `replicated`, `unchecked`, `mean` or `sum`, or "
                f"shard a dim over it with @{differing[0]}"
            )


def _check_complete(
    tensor: ParsedTensor, groups: Sequence[Sequence[Placed]], counts: Mapping[str, int]
) -> None:
    names = (*tensor.pattern.mean, *tensor.pattern.sum)
    vectors = [
        {tuple(each.values.get(name) for name in names) for each in members}
        for members in groups
    ]
    union = set(itertools.chain(*vectors))
    expected = math.prod(
        counts.get(name, 1) if name in counts else len({each[at] for each in union})
        for at, name in enumerate(names)
        if any(each[at] is not None for each in union)
    )
    for members, present in zip(groups, vectors, strict=True):
        if len(present) != expected:
            raise LayoutError(
                f"{tensor.place}: {members[0].row.name!r} is there {len(present)} "
                f"times of {expected} over {', '.join(names)}; a mean or sum needs all"
            )


def _first(
    tensor: ParsedTensor, members: list[Placed], mentioned: frozenset[str]
) -> Placed:
    # The first of several rows with the same elements.
    pattern = tensor.pattern
    _check_distinct(tensor, members, mentioned)
    members.sort(key=lambda each: [each.values.get(n, -1) for n in pattern.reduced])
    first = members[0]
    for other in members[1:]:
        if all(
            other.values.get(name) == first.values.get(name)
            for name in pattern.unchecked
        ):
            first.others.append(other.number)
    if first.others and not pattern.reduced:
        raise LayoutError(
            f"{tensor.place}: {first.row.name!r} and {members[1].row.name!r} have the "
            f"same coordinates"
        )
    if len({each.row.dtype for each in members}) > 1 and first.others:
        raise LayoutError(
            f"{tensor.place}: {first.row.name!r} has several dtypes over "
            f"{', '.join(pattern.reduced)}; only tensors of one dtype are compared"
        )
    if first.others:
        first.reduction = Reduction.EQUAL
        if pattern.mean or pattern.sum:
            first.reduction = Reduction.MEAN if pattern.mean else Reduction.SUM
    return first
