"""The elements of a tensor, or of one rank's part of it, as strided pieces.

A dims expression with sizes and the coordinates of a rank is cut into pieces. A piece
is a box of factors; each of them advances along one dim of the tensor.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction

from elastic_ckpt.core.boxes import Box
from elastic_ckpt.universal.rules import dims
from elastic_ckpt.universal.rules.layout_error import LayoutError


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """The numbers that a dims expression refers to.

    Attributes:
      sizes: by name.
      ranks: the number of the rank and of all ranks, by axis. A tensor is whole over
        an axis that is absent.
      widths: the sizes on each rank, by name and axis.
    """

    sizes: Mapping[str, int | Fraction]
    ranks: Mapping[str, tuple[int, int]]
    widths: Mapping[str, Mapping[str, Sequence[int]]]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """The indices of a factor that a piece contains.

    Attributes:
      dim: the dim of the tensor along which it advances.
      start: the first index.
      length: the number of indices.
      step: by how many elements of the dim it advances.
    """

    dim: int
    start: int
    length: int
    step: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A box of factors in a tensor.

    Attributes:
      start: the index of its first element in the tensor, by dim.
      ranges: by name of the factor.
    """

    start: tuple[int, ...]
    ranges: Mapping[str, Range]

    @property
    def volume(self) -> int:
        """The number of elements."""
        return math.prod(each.length for each in self.ranges.values())


@dataclasses.dataclass(frozen=True, slots=True)
class _Strip:
    # A piece along one dim: the position of its first element, and (start, length,
    # step) by factor.
    at: int
    ranges: dict[str, tuple[int, int, int]]


def length(node: dims.Node, scope: Scope) -> Fraction:
    """The length of a dim, on one rank.

    Returns:
      A fraction if a sharded size is not a multiple of the number of ranks.

    Raises:
      KeyError: if a size is missing.
      LayoutError: if widths do not fit the ranks.
    """
    if isinstance(node, dims.Name):
        return Fraction(scope.sizes[node.name])
    if isinstance(node, dims.Product):
        return Fraction(math.prod(length(factor, scope) for factor in node.factors))
    if isinstance(node, dims.Sum):
        return Fraction(sum(length(addend, scope) for addend in node.addends))
    widths = widths_of(node, scope)
    number, count = rank_of(node.axes, scope)
    if widths is not None:
        return Fraction(widths[number])
    return length(node.node, scope) / count


def widths_of(shard: dims.Shard, scope: Scope) -> Sequence[int] | None:
    """The given sizes of a sharded dim on each rank; None if it is sharded evenly.

    Raises:
      LayoutError: if their number is not that of the ranks.
    """
    if not isinstance(shard.node, dims.Name) or len(shard.axes) > 1:
        return None
    (axis,) = shard.axes
    widths = scope.widths.get(shard.node.name, {}).get(axis)
    count = scope.ranks.get(axis, (0, 1))[1]
    if widths is None or count == 1:
        return None
    if len(widths) != count:
        raise LayoutError(
            f"`widths` has {len(widths)} sizes of {shard.node.name} for {axis}, which "
            f"has {count} ranks"
        )
    return widths


def rank_of(axes: Sequence[str], scope: Scope) -> tuple[int, int]:
    """The number of a rank over several axes in row-major order, and of all ranks."""
    number, count = 0, 1
    for axis in axes:
        at, ranks = scope.ranks.get(axis, (0, 1))
        number, count = number * ranks + at, count * ranks
    return number, count


def pieces(nodes: Sequence[dims.Node], scope: Scope) -> list[Piece]:
    """The pieces of a tensor; together they have each of its elements once.

    Raises:
      LayoutError: if a size is not a multiple of the number of its ranks.
    """
    strips = [_cut(node, 0, _whole(node, scope), scope) for node in nodes]
    return [
        Piece(
            start=tuple(strip.at for strip in chosen),
            ranges={
                name: Range(dim=dim, start=first, length=count, step=step)
                for dim, strip in enumerate(chosen)
                for name, (first, count, step) in strip.ranges.items()
            },
        )
        for chosen in itertools.product(*strips)
    ]


def boxes(piece: Piece) -> Iterator[Box]:
    """The boxes of a piece in its tensor."""
    by_dim: list[list[tuple[int, int]]] = []
    for dim, first in enumerate(piece.start):
        run, starts = 1, [first]
        factors = [each for each in piece.ranges.values() if each.dim == dim]
        for factor in sorted(factors, key=lambda each: each.step):
            if factor.step == run and len(starts) == 1:
                run *= factor.length
            else:
                starts = [
                    start + factor.step * at
                    for at in range(factor.length)
                    for start in starts
                ]
        by_dim.append([(start, start + run) for start in starts])
    for chosen in itertools.product(*by_dim):
        yield Box(
            start=tuple(start for start, _ in chosen),
            stop=tuple(stop for _, stop in chosen),
        )


def _whole(node: dims.Node, scope: Scope) -> int:
    size = length(node, scope)
    if size.denominator != 1:
        raise LayoutError(
            f"a dim of {size.numerator} elements cannot be cut into {size.denominator} "
            f"equal parts; give `widths`"
        )
    return int(size)


def _cut(node: dims.Node, first: int, last: int, scope: Scope) -> list[_Strip]:
    # The elements `first` to `last` of a node, whose positions count from `first`.
    if first == last:
        return []
    if isinstance(node, dims.Name):
        return [_Strip(0, {node.name: (first, last - first, 1)})]
    if isinstance(node, dims.Product):
        return _cut_product(node.factors, first, last, scope)
    strips: list[_Strip] = []
    if isinstance(node, dims.Sum):
        before = 0
        for addend in node.addends:
            after = before + _whole(addend, scope)
            start, stop = max(first, before), min(last, after)
            if start < stop:
                strips += [
                    _Strip(strip.at + start - first, strip.ranges)
                    for strip in _cut(addend, start - before, stop - before, scope)
                ]
            before = after
        return strips
    before = _shard_start(node, scope)
    return _cut(node.node, before + first, before + last, scope)


def _cut_product(
    factors: Sequence[dims.Node], first: int, last: int, scope: Scope
) -> list[_Strip]:
    if not factors:
        return [_Strip(0, {})]
    row = math.prod(_whole(factor, scope) for factor in factors[1:])
    strips = []
    # As in `flat_ranges.boxes_of_range`: a partial row, whole rows, a partial row.
    head, start = divmod(first, row)
    end, stop = divmod(last, row)
    parts = [(head, head + 1, start, stop)]
    if head != end:
        parts = [(head, head + 1, start, row)] if start else []
        parts.append((head + bool(start), end, 0, row))
        parts.append((end, end + 1, 0, stop))
    for head, end, start, stop in parts:
        if start == stop or head == end:
            continue
        rest = _cut_product(factors[1:], start, stop, scope)
        for outer in _cut(factors[0], head, end, scope):
            at = (head + outer.at) * row + start - first
            ranges = {
                name: (index, count, step * row)
                for name, (index, count, step) in outer.ranges.items()
            }
            strips += [_Strip(at + inner.at, ranges | inner.ranges) for inner in rest]
    return strips


def _shard_start(shard: dims.Shard, scope: Scope) -> int:
    number, count = rank_of(shard.axes, scope)
    widths = widths_of(shard, scope)
    if widths is not None:
        return sum(widths[:number])
    whole = _whole(shard.node, scope)
    if whole % count:
        raise LayoutError(
            f"a dim of {whole} elements cannot be cut into {count} equal parts; give "
            f"`widths`"
        )
    return whole // count * number
