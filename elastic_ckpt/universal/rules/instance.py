"""The copies of one instance of a rule: its tensors with the same kept captures.

Every element has coordinates: the names of its factors, and of what its tensor's name
captures. A tensor is cut into *pieces*, boxes of coordinates, each of which advances
along dims of the tensor or is one index of a capture. The copies are the intersections
of the pieces of both sides; they have each element once if there are no gaps and their
volumes add up.

Instances whose tensors have the same shapes, ranks and numbers have the same copies, so
that each such class is planned once.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from elastic_ckpt.core import box_cover, box_join, boxes, errors
from elastic_ckpt.core.boxes import Boxes
from elastic_ckpt.universal.moves import Arithmetic, Reduction, Side
from elastic_ckpt.universal.rules import dims, dtypes, size_expression, sizes
from elastic_ckpt.universal.rules.dims import Clip, Scope
from elastic_ckpt.universal.rules.layout_error import LayoutError
from elastic_ckpt.universal.rules.name_pattern import NamePattern
from elastic_ckpt.universal.rules.relation import (
    Kept,
    Pair,
    ParsedTensor,
    Relation,
    Row,
    Term,
)
from elastic_ckpt.universal.rules.rule import POWERS, SHIFTED

# An empty tensor may have dims of any size, and cost no bytes.
MOST_NAMES = 1 << 17
_MOST_VOLUME = 1 << 62
_MOST_INDICES = 1 << 16


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """The tensors of one instance.

    Attributes:
      relation: the rule, without `...`.
      state: the kind of state.
      sources: the tensors of the checkpoint.
      targets: those of the target; None if they are derived.
      counts: the number of ranks, by axis.
      names: the whole names of the targets, by the number of the pattern.
      kept: the values of the captures that all names have.
      absent: the errors about targets that are not there, by the number of the pattern;
        an instance may lack the sources of a target, where names have sums.
    """

    relation: Relation
    state: str
    sources: Sequence[Row]
    targets: Sequence[Row] | None
    counts: Mapping[str, int]
    names: Sequence[NamePattern]
    kept: Kept
    absent: Mapping[int, str]


# A move between rows, by their numbers: the target, sizes, its side, and the sources
# with their sides; see `moves.Move`.
Copied = tuple[
    int,
    tuple[int, ...],
    Side,
    tuple[tuple[int, Side], ...],
    Arithmetic | None,
]
# The number of the target, start, stop, value: see `moves.Fill`.
Filled = tuple[int, tuple[int, ...], tuple[int, ...], float]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The copies of an instance.

    Attributes:
      copies: all of them.
      fills: the padding of targets.
      targets: as given, or derived; with dtypes.
      sizes: of all names.
    """

    copies: list[Copied]
    fills: list[Filled]
    targets: list[Row]
    sizes: Mapping[str, int]


# By coordinate: the first index, their number, the dim along which an index advances
# (-1 for none), and by how many elements.
_Ranges = dict[str, tuple[int, int, int, int]]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Piece:
    # A box of coordinates in one or several tensors that have the same elements.
    members: tuple[tuple[int, tuple[int, ...]], ...]  # rows, with the first index
    ranges: _Ranges
    name: str
    reduction: Reduction = Reduction.NONE

    @property
    def volume(self) -> int:
        return math.prod(count for _, count, _, _ in self.ranges.values())


def plan(instance: Instance, shared: Mapping[str, int] | None = None) -> Plan:
    """The copies of an instance.

    Args:
      instance: of a rule.
      shared: sizes that other rules have.

    Raises:
      LayoutError: if shapes do not fit, or elements are not filled exactly once;
        UnknownSizeError if shapes do not determine a size.
    """
    return _Planner(instance, shared).plan()


class _Planner:
    def __init__(self, instance: Instance, shared: Mapping[str, int] | None) -> None:
        self._instance = instance
        self._relation = relation = instance.relation
        self._rule = rule = relation.rule
        sides = [list(instance.sources), list(instance.targets or ())]
        self._counts = _axis_counts(relation, sides, instance.counts)
        system = list(sizes.equations(relation, sides, self._counts))
        self.sizes = sizes.solve(rule, system, shared)
        self._add_clips()
        for tensor in relation.sources:
            if self._has_rows(tensor.number):
                sizes.require(rule, tensor.dims.names, self.sizes)
            elif any(each.has_sum for each in relation.targets):
                for name in tensor.dims.names:
                    self.sizes.setdefault(name, 0)
        for tensor in relation.targets:
            sizes.require(rule, tensor.dims.names, self.sizes)
        self._strips: dict[object, list[tuple[tuple[int, ...], _Ranges]]] = {}
        if instance.targets is None:
            self._rows = list(self._derived())
        else:
            self._rows = list(instance.targets)

    def plan(self) -> Plan:
        relation = self._relation
        copied: list[Copied] = []
        problems: dict[str, list[str]] = {}
        try:
            for pair in self._pairs():
                join = _Join(self, pair)
                copied += join.copied()
                for text, names in join.problems.items():
                    problems.setdefault(text, []).extend(names)
            fills = list(self._fills())
        except LayoutError as error:
            if str(error).startswith(self._rule.text):
                raise
            raise LayoutError(f"{self._rule.text}: {error}") from None
        if problems:
            listed = "; ".join(
                f"{text}: {errors.first_of(names)}" for text, names in problems.items()
            )
            raise LayoutError(f"{self._rule.text}: {listed}")
        rows = dtypes.with_dtypes(relation, self._instance.sources, self._rows)
        return Plan(copies=copied, fills=fills, targets=list(rows), sizes=self.sizes)

    def _pairs(self) -> list[Pair]:
        # Without those of an addend of a capture that this instance does not have on
        # one side, nor on the other.
        relation, instance = self._relation, self._instance
        pairs = []
        for pair in relation.pairs:
            source = relation.sources[pair.source.tensor]
            target = relation.targets[pair.target.tensor]
            if source.has_sum and not self.pieces(pair.source, is_target=False):
                continue
            if target.number in instance.absent:
                raise LayoutError(instance.absent[target.number])
            if not target.has_sum or self._has_rows(source.number):
                pairs.append(pair)
            elif instance.targets is not None and self.pieces(
                pair.target, is_target=True
            ):
                raise LayoutError(
                    f"{target.place}: nothing makes it: no tensor matches "
                    f"{source.place}"
                )
        if instance.targets is None:
            terms = [*(pair.target for pair in pairs), *relation.padding]
            self._rows = [row for row in self._rows if self._is_in(row, terms)]
        return pairs

    def _is_in(self, row: Row, terms: Sequence[Term]) -> bool:
        tensor = self._relation.targets[row.tensor]
        points = self._points(tensor, dict(row.captured)).keys()
        return any(term.tensor == row.tensor and points <= term.names for term in terms)

    def pieces(self, term: Term, *, is_target: bool) -> list[_Piece]:
        """The pieces of a part of the tensors of a side."""
        relation = self._relation
        tensor = (relation.targets if is_target else relation.sources)[term.tensor]
        rows = self._rows if is_target else self._instance.sources
        groups: dict[object, list[tuple[int, Row, dict[str, Any]]]] = {}
        reduced = tensor.reduced
        for number, row in enumerate(rows):
            if row.tensor != term.tensor:
                continue
            values: dict[str, Any] = {**dict(row.ranks), **dict(row.captured)}
            key = self._place(tensor, term, values)
            groups.setdefault(key, []).append((number, row, values))
        if tensor.pattern.mean or tensor.pattern.sum:
            _check_complete(tensor, list(groups.values()), self._counts)
        pieces: list[_Piece] = []
        for members in groups.values():
            chosen = _members(tensor, term, members, self._counts)
            _, row, values = chosen[0]
            reduction = _reduction(tensor, len(chosen))
            for start, ranges in self._cut(tensor, term, row, values):
                piece = _Piece(
                    members=tuple((number, start) for number, _, _ in chosen),
                    ranges=ranges,
                    name=row.name,
                    reduction=reduction,
                )
                if is_target or not reduced & ranges.keys():
                    pieces.append(piece)
                else:
                    pieces += _exploded(tensor, piece)
        return pieces

    def _has_rows(self, number: int) -> bool:
        return any(row.tensor == number for row in self._instance.sources)

    def _place(
        self, tensor: ParsedTensor, term: Term, values: Mapping[str, Any]
    ) -> object:
        # Rows of one key have the same elements.
        keys = [
            capture.key
            for capture in tensor.coordinates
            if capture.key not in tensor.reduced
        ]
        by = {name for names, _ in tensor.tables.values() for name in names}
        names = (tensor.dims.axes | term.coordinates | by) - tensor.reduced
        ranks = [(axis, at) for axis, at in values.items() if axis in names]
        return tuple(values[key] for key in keys), tuple(sorted(ranks))

    def _cut(
        self, tensor: ParsedTensor, term: Term, row: Row, values: Mapping[str, Any]
    ) -> Iterator[tuple[tuple[int, ...], _Ranges]]:
        # The pieces of a row that have the names of the term.
        points = self._points(tensor, values)
        if points.keys() - term.names:
            return
        for axis in term.coordinates - term.names:
            if axis in values and axis not in tensor.tables:
                points[axis] = (int(values[axis]), 1, -1, 0)
        by = [name for names, _ in tensor.tables.values() for name in names]
        for name in by:
            if name in values and name not in points and name not in term.names:
                points[name] = (int(values[name]), 1, -1, 0)
        for start, ranges in self._in_dims(tensor, values):
            held = {**points, **ranges}
            if not term.names <= held.keys() or ranges.keys() - term.names:
                continue
            parts = [(start, held)]
            for key, table in tensor.tables.items():
                if key in term.coordinates:
                    parts = [
                        each
                        for part in parts
                        for each in _by_table(tensor, row, key, table, *part)
                    ]
            wanted = term.coordinates | (term.names & tensor.reduced)
            if tensor.role:
                wanted = wanted | term.names
            for at, found in parts:
                yield at, {name: found[name] for name in found if name in wanted}

    def _points(self, tensor: ParsedTensor, values: Mapping[str, Any]) -> _Ranges:
        # The coordinates that captures have.
        points: _Ranges = {}
        scope = self._scope({})
        for capture in tensor.coordinates:
            at = int(values[capture.key])
            if isinstance(capture.node, dims.Name):
                points[capture.node.name] = (at, 1, -1, 0)
                continue
            (strip,) = dims.cut(capture.node, at, at + 1, scope)
            for name, (first, count, _) in strip.ranges.items():
                points[name] = (first, count, -1, 0)
        return points

    def _in_dims(
        self, tensor: ParsedTensor, values: Mapping[str, Any]
    ) -> list[tuple[tuple[int, ...], _Ranges]]:
        ranks = self._ranks(tensor, values)
        key = (id(tensor), tuple(sorted(ranks.items())))
        found = self._strips.get(key)
        if found is None:
            scope = self._scope(ranks)
            strips = [dims.strips(node, scope) for node in tensor.dims.nodes]
            found = self._strips[key] = [
                (
                    tuple(strip.at for strip in chosen),
                    {
                        name: (first, count, dim, step)
                        for dim, strip in enumerate(chosen)
                        for name, (first, count, step) in strip.ranges.items()
                    },
                )
                for chosen in itertools.product(*strips)
            ]
        return found

    def _scope(self, ranks: Mapping[str, tuple[int, int]]) -> Scope:
        return Scope(sizes=self.sizes, ranks=ranks, widths=self._rule.widths)

    def _ranks(
        self, tensor: ParsedTensor, values: Mapping[str, Any]
    ) -> dict[str, tuple[int, int]]:
        ranks = {}
        for axis in tensor.dims.axes & values.keys():
            number, count = int(values[axis]), self._counts[axis]
            if number >= count:
                raise LayoutError(
                    f"{tensor.place}: a tensor is of rank {number} of {axis}, which "
                    f"has {count} ranks"
                )
            ranks[axis] = (number, count)
        return ranks

    def _add_clips(self) -> None:
        # The lengths of clipped products of derived targets: as many as sources have.
        sources = [
            each
            for tensor in self._relation.sources
            for node in (*tensor.dims.nodes, *(c.node for c in tensor.coordinates))
            for each in dims.walk(node)
            if isinstance(each, Clip) and str(each) in self.sizes
        ]
        for tensor in self._relation.targets:
            for node in (*tensor.dims.nodes, *(c.node for c in tensor.coordinates)):
                for clip in dims.walk(node):
                    if isinstance(clip, Clip) and str(clip) not in self.sizes:
                        names = dims.names_of(clip.node)
                        for each in sources:
                            if names <= dims.names_of(each.node):
                                count = self._num_of(each, names)
                                self.sizes[str(clip)] = count
                                break

    def _num_of(self, clip: Clip, names: frozenset[str]) -> int:
        # The elements of the clipped product that have these coordinates.
        scope = self._scope({})
        strips = dims.cut(clip.node, 0, self.sizes[str(clip)], scope)
        return sum(
            math.prod(count for _, count, _ in strip.ranges.values())
            for strip in strips
            if strip.ranges.keys() == names
        )

    def _derived(self) -> Iterator[Row]:
        # The targets that the sources make, without dtypes.
        known = {**self._counts, **self.sizes}
        instance, relation = self._instance, self._relation
        named = relation.named(instance.kept)
        for tensor in relation.targets:
            axes = [
                capture
                for capture in tensor.name.captures
                if capture.key in tensor.dims.axes
            ]
            captures = [*tensor.coordinates, *axes]
            counts = [self._num_values(tensor, each, known) for each in captures]
            if math.prod(counts) > MOST_NAMES:
                raise LayoutError(
                    f"{tensor.place}: {math.prod(counts)} tensors would be made of the "
                    f"values of {', '.join(each.key for each in captures)}, and at "
                    f"most {MOST_NAMES} are; use the right checkpoint, or another "
                    "layout"
                )
            for chosen in itertools.product(*map(range, counts)):
                captured = tuple(
                    (each.key, at) for each, at in zip(captures, chosen, strict=True)
                )
                values = dict(captured)
                if not self._is_in_tables(tensor, values):
                    continue
                scope = self._scope(self._ranks(tensor, values))
                lengths = [dims.length(node, scope) for node in tensor.dims.nodes]
                yield Row(
                    tensor=tensor.number,
                    name=instance.names[tensor.number].format({**named, **values}),
                    captured=captured,
                    ranks=(),
                    shape=tuple(map(int, lengths)),
                    dtype=None,
                )

    def _num_values(
        self, tensor: ParsedTensor, capture: Any, known: Mapping[str, int]
    ) -> int:
        for by, table in tensor.tables.values():
            if capture.key in by:
                return 1 + max(at[by.index(capture.key)] for at in table)
        try:
            return int(dims.length(capture.node, Scope(sizes=known)))
        except KeyError:
            raise sizes.UnknownSizeError(
                f"{tensor.place}: the number of values of {{{capture.key}}} is not "
                f"known; give it in `sizes`"
            ) from None

    def _is_in_tables(self, tensor: ParsedTensor, values: Mapping[str, int]) -> bool:
        return all(
            tuple(values[name] for name in by) in table
            for by, table in tensor.tables.values()
            if all(name in values for name in by)
        )

    def arithmetic(
        self, pair: Pair, reduction: Reduction, operands: Sequence[Term]
    ) -> Arithmetic | None:
        """The arithmetic of a pair.

        On both sides, a value is that of the other, times `scale`, plus `shift`.
        """
        relation = self._relation
        source = relation.sources[pair.source.tensor]
        target = relation.targets[pair.target.tensor]
        numbers = [
            self._number(expression)
            for tensor in (source, target)
            for expression in (tensor.pattern.scale, tensor.pattern.shift)
        ]
        source_scale, source_shift, target_scale, target_shift = numbers
        for tensor, scale in ((source, source_scale), (target, target_scale)):
            if scale == 0:
                raise LayoutError(f"{tensor.place}: a scale cannot be 0")
        state = self._instance.state
        scale = target_scale / source_scale
        shift = target_shift - source_shift * scale
        factor = 1.0
        for each in operands:
            factor *= self._number(relation.sources[each.tensor].pattern.scale)
        if state not in POWERS and (scale != 1 or shift):
            raise LayoutError(
                f"{target.place}: it is not known how {state!r} follows a parameter "
                f"that is scaled; list the other `states` in this rule"
            )
        scale = scale ** POWERS.get(state, 1)
        shift = shift if state in SHIFTED else 0.0
        if reduction is Reduction.NONE and (scale, shift, factor) == (1, 0, 1):
            return None
        return Arithmetic(reduction=reduction, factor=factor, scale=scale, shift=shift)

    def _number(self, expression: float | str) -> float:
        sizes.require(self._rule, size_expression.names(expression), self.sizes)
        return size_expression.result(expression, self.sizes)

    def _fills(self) -> Iterator[Filled]:
        pad = self._rule.pad
        for term in self._relation.padding:
            value = pad[min(term.coordinates & pad.keys())]
            value = value if self._instance.state in SHIFTED else 0.0
            for piece in self.pieces(term, is_target=True):
                for number, first in piece.members:
                    for start, stop in _boxes_of(first, piece.ranges):
                        yield number, start, stop, value


class _Join:
    """The copies of one pair of parts.

    Attributes:
      problems: names of elements that are not copied once, by what is wrong.
    """

    def __init__(self, planner: _Planner, pair: Pair) -> None:
        self._planner = planner
        self._pair = pair
        self.problems: dict[str, list[str]] = {}
        relation = planner._relation
        target = relation.targets[pair.target.tensor]
        self._repeated = target.reduced & pair.target.names
        self._names = sorted(pair.target.coordinates - self._repeated)
        self._targets = planner.pieces(pair.target, is_target=True)
        self._sides: list[list[_Piece]] = []
        for term in (pair.source, *pair.compared):
            self._sides.append(planner.pieces(term, is_target=False))
        operands = []
        for term in pair.operands:
            pieces = planner.pieces(term, is_target=False)
            if pieces:
                operands.append(term)
                self._sides.append(pieces)
            else:
                _check_unscaled(planner, pair, term)
        self._operands = operands
        roles = {relation.sources[each.tensor].role for each in operands}
        if len(roles) > 1 or (roles and pair.compared):
            raise LayoutError(
                f"{target.place}: `times`, `plus` and copies that are compared cannot "
                "be combined"
            )
        self._reduction = Reduction.EQUAL if pair.compared else Reduction.NONE
        if roles:
            is_product = roles == {"times"}
            self._reduction = Reduction.PRODUCT if is_product else Reduction.LOW_RANK
        contracted = [each.names - pair.source.names for each in operands]
        self._contracted = sorted(frozenset().union(*contracted))

    def copied(self) -> list[Copied]:
        """The copies, while `problems` is empty."""
        cells = _boxes(self._targets, self._names)
        if not len(cells):
            return []
        of_target = np.arange(len(self._targets))
        chosen: list[np.ndarray] = []
        for number, side in enumerate(self._sides):
            is_operand = number > len(self._pair.compared)
            held = _boxes(side, self._names, cells)
            first, second = box_join.overlaps(cells, held)
            parts = Boxes(
                start=np.maximum(cells.start[first], held.start[second]),
                stop=np.minimum(cells.stop[first], held.stop[second]),
            )
            self._check(side, held, cells, first, second, parts, is_operand, of_target)
            if self.problems:
                return []
            cells, of_target = parts, of_target[first]
            chosen = [*(each[first] for each in chosen), second]
        copied: list[Copied] = []
        arithmetic: dict[Reduction, Arithmetic | None] = {}
        starts, stops = cells.start.tolist(), cells.stop.tolist()
        for cell, target in enumerate(of_target.tolist()):
            pieces = [
                side[numbers[cell]]
                for side, numbers in zip(self._sides, chosen, strict=True)
            ]
            reduction = self._reduction
            if reduction is Reduction.NONE:
                reduction = pieces[0].reduction
            elif any(len(piece.members) > 1 for piece in pieces):
                pieces = self._flattened(pieces)
            if reduction not in arithmetic:
                arithmetic[reduction] = self._planner.arithmetic(
                    self._pair, reduction, self._operands
                )
            copied += self._copies(
                self._targets[target],
                pieces,
                starts[cell],
                stops[cell],
                arithmetic[reduction],
            )
        return copied

    def _flattened(self, pieces: Sequence[_Piece]) -> list[_Piece]:
        # Replicas of a compared tensor are compared, too; those of operands are not.
        if self._reduction is Reduction.EQUAL:
            return list(pieces)
        return [
            dataclasses.replace(piece, members=piece.members[:1]) for piece in pieces
        ]

    def _check(
        self,
        side: Sequence[_Piece],
        held: Boxes,
        cells: Boxes,
        first: np.ndarray,
        second: np.ndarray,
        parts: Boxes,
        is_operand: bool,
        of_target: np.ndarray,
    ) -> None:
        # That the pieces of a side have each element of the cells once.
        volumes = parts.volumes
        filled = np.zeros(len(cells), np.int64)
        np.add.at(filled, first, volumes)
        missing = np.flatnonzero(filled < cells.volumes)
        for number in missing[: errors.MOST_NAMED + 1]:
            gap = self._gap(cells[int(number)], parts.take(first == number))
            name = self._targets[int(of_target[number])].name
            self._note("elements that no tensor fills", f"{name} ({gap})")
        twice = np.flatnonzero(filled > cells.volumes)
        if not len(twice) and not len(missing) and len(held) > 1:
            one, other = box_join.overlaps(held, held)
            overlapping = np.unique(one[one != other])
            twice = first[np.isin(second, overlapping)]
        for number in twice[: errors.MOST_NAMED + 1]:
            name = self._targets[int(of_target[number])].name
            text = f"{name} ({filled[number]} for {cells.volumes[number]} elements)"
            self._note("elements that several tensors fill", text)
        if is_operand or self.problems:
            return
        used = np.zeros(len(side), np.int64)
        np.add.at(used, second, volumes)
        for number in np.flatnonzero(used < held.volumes).tolist():
            volume = int(held.volumes[number])
            name = side[number].name
            text = f"{name} ({volume - used[number]} of {volume} elements)"
            self._note("elements that are not used", text)

    def _gap(self, cell: boxes.Box, parts: Boxes) -> str:
        start = np.array(cell.start, np.int64)
        relative = Boxes(start=parts.start - start, stop=parts.stop - start)
        cut = [
            dim
            for dim in range(len(self._names))
            if not len(parts)
            or (relative.start[:, dim] != 0).any()
            or (relative.stop[:, dim] != cell.shape[dim]).any()
        ]
        if not cut:
            return "all"
        chosen = Boxes(start=relative.start[:, cut], stop=relative.stop[:, cut])
        gaps = box_cover.gaps([cell.shape[dim] for dim in cut], chosen)
        gap = gaps[0]
        return ", ".join(
            f"{self._names[dim]} {at + cell.start[dim]}:{end + cell.start[dim]}"
            for dim, at, end in zip(cut, gap.start, gap.stop, strict=True)
        )

    def _note(self, text: str, name: str) -> None:
        self.problems.setdefault(text, []).append(name)

    def _copies(
        self,
        target: _Piece,
        sources: Sequence[_Piece],
        start: Sequence[int],
        stop: Sequence[int],
        arithmetic: Arithmetic | None,
    ) -> Iterator[Copied]:
        # A factor has a size, and a dim and a step in the target and in each source.
        pieces = (target, *sources)
        firsts = [list(piece.members[0][1]) for piece in pieces]
        factors: list[tuple[int, list[tuple[int, int]]]] = []
        for name, at, end in zip(self._names, start, stop, strict=True):
            places = []
            for first, piece in zip(firsts, pieces, strict=True):
                low, _, dim, step = piece.ranges.get(name, (at, 0, -1, 0))
                if dim >= 0:
                    first[dim] += (at - low) * step
                places.append((dim, step))
            if end - at > 1:
                factors.append((end - at, places))
        nowhere = [(-1, 0)] * len(sources)
        for name in sorted(self._repeated):
            _, count, dim, step = target.ranges[name]
            if count > 1:
                factors.append((count, [(dim, step), *nowhere]))
        for name in self._contracted:
            places = [(-1, 0)]
            count = 1
            for piece in sources:
                _, held, dim, step = piece.ranges.get(name, (0, 0, -1, 0))
                places.append((dim, step))
                count = max(count, held)
            factors.append((count, places))
        merged = _merged(factors)
        factor_sizes = tuple(size for size, _ in merged)
        moved = [
            tuple(
                now - was for now, was in zip(first, piece.members[0][1], strict=True)
            )
            for first, piece in zip(firsts, pieces, strict=True)
        ]

        def side(number: int, member: tuple[int, ...]) -> Side:
            offset = moved[number]
            return Side(
                start=tuple(a + b for a, b in zip(member, offset, strict=True)),
                dims=tuple(places[number][0] for _, places in merged),
                steps=tuple(places[number][1] for _, places in merged),
            )

        read = tuple(
            (row, side(number, member))
            for number, piece in enumerate(sources, start=1)
            for row, member in piece.members
        )
        for row, member in target.members:
            yield row, factor_sizes, side(0, member), read, arithmetic


def _axis_counts(
    relation: Relation, sides: Sequence[Sequence[Row]], counts: Mapping[str, int]
) -> dict[str, int]:
    # The number of ranks by axis, counted where a capture gives the rank.
    counted = dict(counts)
    for tensors, side in zip((relation.sources, relation.targets), sides, strict=True):
        for row in side:
            for axis, value in row.captured:
                is_axis = axis in tensors[row.tensor].dims.axes
                if is_axis and counts.get(axis, 1) == 1:
                    counted[axis] = max(counted.get(axis, 0), int(value) + 1)
    return counted


_Member = tuple[int, Row, dict[str, Any]]


def _members(
    tensor: ParsedTensor,
    term: Term,
    members: list[_Member],
    counts: Mapping[str, int],
) -> list[_Member]:
    # The rows of several with the same elements that are read, the first one first.
    del counts
    if len(members) == 1:
        return members
    pattern = tensor.pattern
    used = tensor.dims.axes | term.coordinates | term.names | tensor.reduced
    used |= {name for by, _ in tensor.tables.values() for name in by}
    _check_distinct(tensor, members, used)
    members.sort(key=lambda each: [each[2].get(n, -1) for n in pattern.reduced])
    first = members[0]
    kept = [first]
    for other in members[1:]:
        if all(other[2].get(n) == first[2].get(n) for n in pattern.unchecked):
            kept.append(other)
    if len(kept) > 1 and not pattern.reduced:
        raise LayoutError(
            f"{tensor.place}: {first[1].name!r} and {members[1][1].name!r} have the "
            f"same coordinates"
        )
    if len(kept) > 1 and len({row.dtype for _, row, _ in members}) > 1:
        raise LayoutError(
            f"{tensor.place}: {first[1].name!r} has several dtypes over "
            f"{', '.join(pattern.reduced)}; only tensors of one dtype are compared"
        )
    return kept


def _reduction(tensor: ParsedTensor, count: int) -> Reduction:
    if count == 1:
        return Reduction.NONE
    if tensor.pattern.mean or tensor.pattern.sum:
        return Reduction.MEAN if tensor.pattern.mean else Reduction.SUM
    return Reduction.EQUAL


def _check_distinct(
    tensor: ParsedTensor, members: Sequence[_Member], mentioned: Iterable[str]
) -> None:
    # Rows with the same elements differ in reduced coordinates alone.
    _, row, first = members[0]
    named = set(mentioned)
    for _, _, other in members[1:]:
        differing = sorted(
            name
            for name in first.keys() | other.keys()
            if name not in named and first.get(name) != other.get(name)
        )
        if differing:
            raise LayoutError(
                f"{tensor.place}: {row.name!r} is there for several "
                f"{', '.join(differing)}, which the rule does not use; list "
                f"{differing[0]} in `replicated`, `unchecked`, `mean` or `sum`, or "
                f"shard a dim over it with @{differing[0]}"
            )


def _check_complete(
    tensor: ParsedTensor,
    groups: Sequence[Sequence[_Member]],
    counts: Mapping[str, int],
) -> None:
    names = [
        name
        for name in (*tensor.pattern.mean, *tensor.pattern.sum)
        if name not in tensor.dims.names
    ]
    vectors = [
        {tuple(values.get(name) for name in names) for _, _, values in members}
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
                f"{tensor.place}: {members[0][1].name!r} is there {len(present)} "
                f"times of {expected} over {', '.join(names)}; a mean or sum needs all"
            )


def _exploded(tensor: ParsedTensor, piece: _Piece) -> list[_Piece]:
    # A piece whose reduced dims become members, which have the same elements.
    names = sorted(tensor.reduced & piece.ranges.keys())
    kept = {name: each for name, each in piece.ranges.items() if name not in names}
    members = []
    ranges = [range(piece.ranges[name][1]) for name in names]
    if math.prod(map(len, ranges)) > _MOST_INDICES:
        raise LayoutError(
            f"{tensor.place}: {', '.join(names)} repeat {math.prod(map(len, ranges))} "
            f"times, and at most {_MOST_INDICES} are reduced; list captures or small "
            "dims"
        )
    for numbers in itertools.product(*ranges):
        if any(
            number and name in tensor.pattern.unchecked
            for name, number in zip(names, numbers, strict=True)
        ):
            continue
        for row, start in piece.members:
            moved = list(start)
            for name, number in zip(names, numbers, strict=True):
                _, _, dim, step = piece.ranges[name]
                if dim >= 0:
                    moved[dim] += number * step
            members.append((row, tuple(moved)))
    return [
        dataclasses.replace(
            piece,
            members=tuple(members),
            ranges=kept,
            reduction=_reduction(tensor, len(members)),
        )
    ]


def _by_table(
    tensor: ParsedTensor,
    row: Row,
    key: str,
    table: tuple[tuple[str, ...], dict[tuple[int, ...], int]],
    start: tuple[int, ...],
    ranges: _Ranges,
) -> Iterator[tuple[tuple[int, ...], _Ranges]]:
    # Replaces the coordinates of a table by the one that it gives, run by run.
    by, entries = table
    kept = {name: each for name, each in ranges.items() if name not in by}
    *outer, last = [ranges[name] for name in by]

    def entry(at: tuple[int, ...]) -> int:
        number = entries.get(at)
        if number is None:
            raise LayoutError(
                f"{tensor.place}: the index of {key} has no entry {list(at)} for "
                f"{row.name!r}"
            )
        return number

    for numbers in itertools.product(*(range(a, a + n) for a, n, _, _ in outer)):
        moved = list(start)
        for number, (first, _, dim, step) in zip(numbers, outer, strict=True):
            if dim >= 0:
                moved[dim] += (number - first) * step
        first, count, dim, step = last
        at = first
        while at < first + count:
            value = entry((*numbers, at))
            end = at + 1
            while end < first + count and entry((*numbers, end)) == value + end - at:
                end += 1
            place = list(moved)
            if dim >= 0:
                place[dim] += (at - first) * step
            yield tuple(place), {**kept, key: (value, end - at, dim, step)}
            at = end


def _check_unscaled(planner: _Planner, pair: Pair, term: Term) -> None:
    # A weight of few bits needs its scales; others may have none.
    tensor = planner._relation.sources[term.tensor]
    for row in planner._instance.sources:
        if row.tensor == pair.source.tensor and tensor.role == "times":
            dtype = row.dtype
            if dtype is not None and dtypes.may_be_quantized(dtype):
                name = tensor.name.format(
                    planner._relation.named(planner._instance.kept)
                )
                raise LayoutError(
                    f"{tensor.place}: {row.name!r} is {dtype}, and its scales {name!r} "
                    "are missing; use the whole checkpoint"
                )


def _boxes(
    pieces: Sequence[_Piece], names: Sequence[str], cells: Boxes | None = None
) -> Boxes:
    # A piece without a coordinate is the same along it, and has all that `cells` have.
    most = np.zeros(len(names), np.int64) if cells is None else cells.stop.max(axis=0)
    everywhere = [
        (name, (0, int(end), -1, 0)) for name, end in zip(names, most, strict=True)
    ]
    listed = [
        [piece.ranges.get(name, whole) for name, whole in everywhere]
        for piece in pieces
    ]
    shape = (len(pieces), len(names))
    for piece in pieces:
        if piece.volume > _MOST_VOLUME:
            raise LayoutError(f"{piece.name!r} has more elements than can be counted")
    start = np.array([[at for at, _, _, _ in each] for each in listed], np.int64)
    count = np.array([[n for _, n, _, _ in each] for each in listed], np.int64)
    start, count = start.reshape(shape), count.reshape(shape)
    return Boxes(start=start, stop=start + count)


def _boxes_of(
    first: tuple[int, ...], ranges: _Ranges
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    # The boxes of a piece in its tensor.
    by_dim: list[list[tuple[int, int]]] = []
    for dim, at in enumerate(first):
        run, starts = 1, [at]
        factors = [(step, n) for _, n, of_dim, step in ranges.values() if of_dim == dim]
        for step, count in sorted(factors):
            if step == run and len(starts) == 1:
                run *= count
            else:
                starts = [start + step * n for n in range(count) for start in starts]
        by_dim.append([(start, start + run) for start in starts])
    for chosen in itertools.product(*by_dim):
        yield tuple(start for start, _ in chosen), tuple(stop for _, stop in chosen)


def _merged(
    factors: Sequence[tuple[int, list[tuple[int, int]]]],
) -> list[tuple[int, list[tuple[int, int]]]]:
    # Adjacent factors that are adjacent in all tensors become one.
    merged: list[tuple[int, list[tuple[int, int]]]] = []
    for size, places in sorted(
        factors, key=lambda each: (each[1][1][0], -each[1][1][1])
    ):
        if merged:
            before, outer = merged[-1]
            if all(
                dim == of_outer and step_outer == size * step
                for (dim, step), (of_outer, step_outer) in zip(
                    places, outer, strict=True
                )
            ):
                merged[-1] = (before * size, places)
                continue
        merged.append((size, places))
    return merged
