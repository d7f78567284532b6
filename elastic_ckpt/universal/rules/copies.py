"""Joins the tensors of both sides of a rule: the strided copies between them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

from elastic_ckpt.universal.moves import Side
from elastic_ckpt.universal.rules import geometry
from elastic_ckpt.universal.rules.geometry import Piece, Range, Scope
from elastic_ckpt.universal.rules.relation import Pair, ParsedTensor
from elastic_ckpt.universal.rules.rows import Placed


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """A strided copy between two tensors of an instance; see `moves.Move`.

    Attributes:
      source: the first of the rows that have these elements.
      target: the first of the rows that have these elements.
      sizes: lengths of the factored dims.
      source_side: their place in the source.
      target_side: their place in the target.
      pair: the parts that are joined.
    """

    source: Placed
    target: Placed
    sizes: tuple[int, ...]
    source_side: Side
    target_side: Side
    pair: Pair


@dataclasses.dataclass(slots=True, kw_only=True)
class Part:
    """A piece of a tensor, and the elements of it that copies have.

    Attributes:
      placed: the tensor.
      piece: in it.
      names: of its factors, in the order of `starts` and `stops`.
      starts: the first index of each copy, by factor.
      stops: the index after the last of each copy, by factor.
      others: the tensors on the other side.
      volume: the elements of all copies.
    """

    placed: Placed
    piece: Piece
    names: tuple[str, ...]
    starts: list[tuple[int, ...]]
    stops: list[tuple[int, ...]]
    others: list[Placed]
    volume: int = 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Overlap:
    # The common factors of two pieces; starts and stops by name.
    sizes: tuple[int, ...]
    source: Side
    target: Side
    starts: tuple[int, ...]
    stops: tuple[int, ...]


class Pieces:
    """The pieces of tensors by their factors; tensors of the same rank share them."""

    def __init__(
        self,
        sizes: Mapping[str, int],
        widths: Mapping[str, Mapping[str, Sequence[int]]],
    ) -> None:
        self._sizes = sizes
        self._widths = widths
        self._cut: dict[object, dict[frozenset[str], list[Piece]]] = {}

    def parts(
        self, tensor: ParsedTensor, placed: Placed
    ) -> dict[frozenset[str], list[Piece]]:
        """The pieces of a tensor, by the names of their factors."""
        key = (id(tensor), tuple(sorted(placed.ranks.items())))
        parts = self._cut.get(key)
        if parts is None:
            scope = Scope(sizes=self._sizes, ranks=placed.ranks, widths=self._widths)
            parts = self._cut[key] = {}
            for piece in geometry.pieces(tensor.dims.nodes, scope):
                parts.setdefault(frozenset(piece.ranges), []).append(piece)
        return parts


class Join:
    """The copies of one pair of parts.

    Attributes:
      copies: all of them.
      sources: the pieces of the sources, with the elements that are copied.
      targets: the pieces of the targets, with the elements that are filled.
    """

    def __init__(
        self,
        pair: Pair,
        sources: Sequence[tuple[Placed, list[Piece]]],
        targets: Sequence[tuple[Placed, list[Piece]]],
    ) -> None:
        self.copies: list[Copy] = []
        self._pair = pair
        source, target = pair.source, pair.target
        self._common = tuple(sorted(source.factors & target.factors))
        self._stacked = tuple(sorted(source.points & target.factors))
        self._unstacked = tuple(sorted(source.factors & target.points))
        self._shared = tuple(sorted(source.points & target.points))
        self._overlaps: dict[tuple[int, int], _Overlap | None] = {}
        self._sides: dict[tuple[int, tuple[int, ...]], Side] = {}
        names = self._common + self._stacked
        self.targets = [
            _part(placed, piece, names)
            for placed, pieces in targets
            for piece in pieces
        ]
        self.sources: list[Part] = []
        by_shared: dict[tuple[int | str, ...], list[Part]] = {}
        for part in self.targets:
            by_shared.setdefault(self._key(part.placed), []).append(part)
        for placed, pieces in sources:
            for piece in pieces:
                part = _part(placed, piece, ())
                self.sources.append(part)
                for other in by_shared.get(self._key(placed), ()):
                    self._join(part, other)

    def _key(self, placed: Placed) -> tuple[int | str, ...]:
        return tuple(placed.values[name] for name in self._shared)

    def _join(self, source: Part, target: Part) -> None:
        key = id(source.piece), id(target.piece)
        if key not in self._overlaps:
            self._overlaps[key] = _overlap(source.piece, target.piece, self._common)
        overlap = self._overlaps[key]
        if overlap is None:
            return
        values = source.placed.values
        target_side = self._at(overlap.target, target.piece, self._stacked, values)
        values = target.placed.values
        source_side = self._at(overlap.source, source.piece, self._unstacked, values)
        if source_side is None or target_side is None:
            return
        at = tuple(int(source.placed.values[name]) for name in self._stacked)
        target.starts.append(overlap.starts + at)
        target.stops.append(overlap.stops + tuple(number + 1 for number in at))
        target.others.append(source.placed)
        volume = math.prod(overlap.sizes)
        target.volume += volume
        source.volume += volume
        self.copies.append(
            Copy(
                source=source.placed,
                target=target.placed,
                sizes=overlap.sizes,
                source_side=source_side,
                target_side=target_side,
                pair=self._pair,
            )
        )

    def _at(
        self,
        side: Side,
        piece: Piece,
        names: tuple[str, ...],
        values: Mapping[str, int | str],
    ) -> Side | None:
        # `side`, moved along the factors `names` that are points of the other tensor.
        if not names:
            return side
        start = list(side.start)
        for name in names:
            factor, at = piece.ranges[name], int(values[name])
            if not factor.start <= at < factor.start + factor.length:
                return None
            start[factor.dim] += (at - factor.start) * factor.step
        key = id(side), tuple(start)
        if key not in self._sides:
            self._sides[key] = dataclasses.replace(side, start=key[1])
        return self._sides[key]


def _part(placed: Placed, piece: Piece, names: tuple[str, ...]) -> Part:
    return Part(placed=placed, piece=piece, names=names, starts=[], stops=[], others=[])


def _overlap(source: Piece, target: Piece, names: tuple[str, ...]) -> _Overlap | None:
    starts, stops = [], []
    source_start, target_start = list(source.start), list(target.start)
    factors: list[tuple[int, Range, Range]] = []
    for name in names:
        a, b = source.ranges[name], target.ranges[name]
        start = max(a.start, b.start)
        stop = min(a.start + a.length, b.start + b.length)
        if start >= stop:
            return None
        starts.append(start)
        stops.append(stop)
        source_start[a.dim] += (start - a.start) * a.step
        target_start[b.dim] += (start - b.start) * b.step
        if stop - start > 1:
            factors.append((stop - start, a, b))
    merged = _merged(factors)
    return _Overlap(
        sizes=tuple(size for size, _, _ in merged),
        source=Side(
            start=tuple(source_start),
            dims=tuple(a.dim for _, a, _ in merged),
            steps=tuple(a.step for _, a, _ in merged),
        ),
        target=Side(
            start=tuple(target_start),
            dims=tuple(b.dim for _, _, b in merged),
            steps=tuple(b.step for _, _, b in merged),
        ),
        starts=tuple(starts),
        stops=tuple(stops),
    )


def _merged(
    factors: list[tuple[int, Range, Range]],
) -> list[tuple[int, Range, Range]]:
    # Adjacent factors that are adjacent in both tensors become one.
    merged: list[tuple[int, Range, Range]] = []
    for size, a, b in sorted(factors, key=lambda each: (each[1].dim, -each[1].step)):
        if merged:
            before, outer_a, outer_b = merged[-1]
            if (outer_a.dim, outer_b.dim) == (a.dim, b.dim) and (
                outer_a.step == size * a.step and outer_b.step == size * b.step
            ):
                merged[-1] = (before * size, a, b)
                continue
        merged.append((size, a, b))
    return merged
