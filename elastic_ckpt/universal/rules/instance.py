"""The copies of one instance of a rule: its tensors with the same kept captures.

Every element has coordinates: the names of its factors, and of what its tensor's name
captures. A tensor is cut into *slabs*, boxes of coordinates, each of which advances
along dims of the tensor or is one index of a capture. The copies are the intersections
of the slabs of both sides; they have each element once if there are no gaps and their
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

from elastic_ckpt.core import box_cover, box_join, boxes, columns, errors
from elastic_ckpt.core.boxes import Boxes
from elastic_ckpt.universal.moves import Arithmetic, Reduction, Side
from elastic_ckpt.universal.rules import dims, dtypes, size_expression, sizes
from elastic_ckpt.universal.rules.dims import Clip, Scope
from elastic_ckpt.universal.rules.layout import LayoutError
from elastic_ckpt.universal.rules.name_pattern import NamePattern
from elastic_ckpt.universal.rules.relation import (
    Kept,
    Pair,
    ParsedTensor,
    Relation,
    Row,
    Term,
)

# The powers of a parameter's scale, by the kind of state. A gradient is divided by the
# scale; the second moment is that of a squared gradient.
POWERS = {
    **{"parameter": 1, "master": 1, "first_moment": -1, "second_moment": -2},
    # Of Muon, and of SGD.
    "momentum_buffer": -1,
}
# The kinds of state that are shifted, and padded with the values of the rule.
SHIFTED = ("parameter", "master")
# An empty tensor costs nothing, but targets may be derived from a dim of any size.
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


@dataclasses.dataclass(frozen=True, slots=True)
class _Slab:
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
    return _Planner(instance, shared or {}).plan()


class _Planner:
    def __init__(self, instance: Instance, shared: Mapping[str, int]) -> None:
        self._instance = instance
        self._relation = relation = instance.relation
        self._rule = rule = relation.rule
        sides = [list(instance.sources), list(instance.targets or ())]
        self._counts = _axis_counts(relation, sides, instance.counts)
        system = list(sizes.equations(relation, sides, self._counts))
        clips = [
            clip
            for tensor in (*relation.sources, *relation.targets)
            for clip in tensor.clips()
        ]
        self.sizes = sizes.solve(rule, system, shared, clips)
        for tensor in (*relation.sources, *relation.targets):
            named = {name for each in tensor.coordinates for name in each.names}
            for name in named | tensor.dims.names:
                if name not in self.sizes and name in shared:
                    self.sizes[name] = shared[name]
        self._add_clips()
        for tensor in relation.sources:
            if self.has_rows(tensor.number):
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
        for term, is_target in relation.absent:
            tensor = (relation.targets if is_target else relation.sources)[term.tensor]
            if (instance.targets is not None or not is_target) and (
                slabs := self.slabs(term, is_target=is_target)
            ):
                named = " ".join(sorted(term.names & tensor.name.names))
                raise LayoutError(
                    f"{tensor.place}: {slabs[0].name!r} has {named}, which the other "
                    "side lacks"
                )
        pairs = []
        for pair in relation.pairs:
            source = relation.sources[pair.source.tensor]
            target = relation.targets[pair.target.tensor]
            if source.has_sum and not self.slabs(pair.source, is_target=False):
                self._check_empty(pair)
                continue
            if target.number in instance.absent:
                raise LayoutError(instance.absent[target.number])
            if not target.has_sum or self.has_rows(source.number):
                pairs.append(pair)
            else:
                self._check_empty(pair)
        if instance.targets is None:
            terms = [*(pair.target for pair in pairs), *relation.padding]
            self._rows = [row for row in self._rows if self._is_in(row, terms)]
        return pairs

    def _check_empty(self, pair: Pair) -> None:
        # That the target has nothing of a pair without sources.
        if self._instance.targets is None:
            return
        for slab in self.slabs(pair.target, is_target=True):
            if slab.volume:
                place = self._relation.sources[pair.source.tensor].place
                raise LayoutError(
                    f"{self._relation.targets[pair.target.tensor].place}: nothing "
                    f"makes {slab.name!r}: no tensor matches {place}"
                )

    def _is_in(self, row: Row, terms: Sequence[Term]) -> bool:
        tensor = self._relation.targets[row.tensor]
        points = self._points(tensor, dict(row.captured)).keys()
        return any(term.tensor == row.tensor and points <= term.names for term in terms)

    def slabs(self, term: Term, *, is_target: bool) -> list[_Slab]:
        """The slabs of a part of the tensors of a side."""
        relation = self._relation
        tensor = (relation.targets if is_target else relation.sources)[term.tensor]
        listed = self._rows if is_target else self._instance.sources
        rows = [each for each in enumerate(listed) if each[1].tensor == term.tensor]
        plain = self._plain_slabs(tensor, term, rows)
        if plain is not None:
            return plain
        groups: dict[object, list[_Member]] = {}
        reduced = tensor.reduced
        for number, row in rows:
            values: dict[str, Any] = {**dict(row.ranks), **dict(row.captured)}
            key = self._place(tensor, term, values)
            groups.setdefault(key, []).append((number, row, values))
        read = [
            _members(tensor, term, members, is_target=is_target)
            for members in groups.values()
        ]
        if tensor.pattern.mean or tensor.pattern.sum:
            _check_complete(tensor, read, {**self.sizes, **self._counts})
        slabs: list[_Slab] = []
        for chosen in read:
            _, row, values = chosen[0]
            reduction = _reduction(tensor, len(chosen))
            for start, ranges in self._cut(tensor, term, values):
                slab = _Slab(
                    members=tuple((number, start) for number, _, _ in chosen),
                    ranges=ranges,
                    name=row.name,
                    reduction=reduction,
                )
                if is_target or not reduced & ranges.keys():
                    slabs.append(slab)
                else:
                    slabs += _exploded(tensor, slab)
        dims_of = reduced & tensor.dims.names & term.names
        if is_target or not dims_of:
            return slabs
        united = _united(tensor, slabs)
        count = math.prod(self.sizes[name] for name in dims_of)
        for slab in united if tensor.pattern.mean or tensor.pattern.sum else ():
            if len(slab.members) % count:
                raise _incomplete(tensor, slab.name, len(slab.members), count, dims_of)
        return united

    def _plain_slabs(
        self, tensor: ParsedTensor, term: Term, rows: Sequence[tuple[int, Row]]
    ) -> list[_Slab] | None:
        # The slabs of many rows of different elements, fast; None if they need more.
        if tensor.reduced or tensor.dims.axes & tensor.name.names:
            return None
        used = tensor.dims.axes | (term.coordinates - term.names)
        # By all ranks of a row: those that are used, and the slabs without captures.
        of_ranks: dict[object, tuple[object, list[tuple[Any, _Ranges]]]] = {}
        slabs: list[_Slab] = []
        seen = set()
        for number, row in rows:
            held = of_ranks.get(row.ranks)
            if held is None:
                ranks = {axis: at for axis, at in row.ranks if axis in used}
                points = {
                    axis: (at, 1, -1, 0)
                    for axis, at in ranks.items()
                    if axis not in tensor.dims.axes
                }
                strips = [
                    (start, points | ranges)
                    for start, ranges in self._in_dims(tensor, dict(row.ranks))
                    if ranges.keys() <= term.names
                ]
                held = of_ranks[row.ranks] = tuple(sorted(ranks.items())), strips
            key = row.captured, held[0]
            if key in seen:
                return None
            seen.add(key)
            captured = self._points(tensor, dict(row.captured))
            if captured.keys() - term.names:
                continue
            for start, ranges in held[1]:
                if term.names <= captured.keys() | ranges.keys():
                    slabs.append(_Slab(((number, start),), captured | ranges, row.name))
        return slabs

    def has_rows(self, number: int) -> bool:
        """Whether the instance has sources of a pattern."""
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
        names = (tensor.dims.axes | term.coordinates) - tensor.reduced
        ranks = [(axis, at) for axis, at in values.items() if axis in names]
        return tuple(values[key] for key in keys), tuple(sorted(ranks))

    def _cut(
        self, tensor: ParsedTensor, term: Term, values: Mapping[str, Any]
    ) -> Iterator[tuple[tuple[int, ...], _Ranges]]:
        # The slabs of a row that have the names of the term.
        points = self._points(tensor, values)
        if points.keys() - term.names:
            return
        for axis in term.coordinates - term.names:
            if axis in values:
                points[axis] = (int(values[axis]), 1, -1, 0)
        for start, ranges in self._in_dims(tensor, values):
            held = {**points, **ranges}
            if not term.names <= held.keys() or ranges.keys() - term.names:
                continue
            wanted = term.coordinates | (term.names & tensor.reduced)
            if tensor.role:
                wanted = wanted | term.names
            yield start, {name: held[name] for name in held if name in wanted}

    def _points(self, tensor: ParsedTensor, values: Mapping[str, Any]) -> _Ranges:
        # The coordinates that captures have.
        points: _Ranges = {}
        for capture in tensor.coordinates:
            at = int(values[capture.key])
            if isinstance(capture.node, dims.Name):
                points[capture.node.name] = (at, 1, -1, 0)
                continue
            (strip,) = dims.cut(capture.node, at, at + 1, self._scope({}))
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
        held: dict[frozenset[str], int] = {}
        for tensor in self._relation.sources:
            for clip in tensor.clips():
                if str(clip) in self.sizes:
                    for names in dims.name_sets(clip.node):
                        held.setdefault(names, self._num_of(clip, names))
        for tensor in self._relation.targets:
            for clip in tensor.clips():
                counts = [held.get(names) for names in dims.name_sets(clip.node)]
                if str(clip) not in self.sizes and any(n is not None for n in counts):
                    self.sizes[str(clip)] = sum(n or 0 for n in counts)

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
            texts = tensor.name.names - tensor.dims.axes - {*relation.kept}
            texts -= {name for each in captures for name in each.names}
            if texts:
                raise LayoutError(
                    f"{tensor.place}: nothing tells the texts of {{{min(texts)}}}; "
                    "write `only: forward`, and another rule with `only: inverse`"
                )
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
                scope = self._scope(self._ranks(tensor, values))
                try:
                    lengths = [dims.length(node, scope) for node in tensor.dims.nodes]
                except KeyError as error:
                    raise sizes.UnknownSizeError(
                        f"{tensor.place}: nothing tells the length of {error.args[0]}; "
                        "write the product without `~`, or give the shapes of targets"
                    ) from None
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
        try:
            return int(dims.length(capture.node, Scope(sizes=known)))
        except KeyError:
            names = ", ".join(sorted(capture.names - known.keys()))
            raise sizes.UnknownSizeError(
                f"{tensor.place}: the number of values of {{{capture.key}}} is not "
                f"known; give {names or 'its rows'} in `sizes`"
            ) from None

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
        given = self._rule.sizes.items()
        numbers = {name: each for name, each in given if isinstance(each, int | float)}
        numbers.update(self.sizes)
        sizes.require(self._rule, size_expression.names(expression), numbers)
        return size_expression.result(expression, numbers)

    def _fills(self) -> Iterator[Filled]:
        pad = self._rule.pad
        for term in self._relation.padding:
            value = pad[min(term.coordinates & pad.keys())]
            value = value if self._instance.state in SHIFTED else 0.0
            for slab in self.slabs(term, is_target=True):
                for number, first in slab.members:
                    for start, stop in _boxes_of(first, slab.ranges):
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
        self._targets = planner.slabs(pair.target, is_target=True)
        self._sides: list[list[_Slab]] = []
        compared = [t for t in pair.compared if planner.has_rows(t.tensor)]
        for term in (pair.source, *compared):
            self._sides.append(planner.slabs(term, is_target=False))
        self._num_compared = len(compared)
        operands = []
        for term in pair.operands:
            slabs = planner.slabs(term, is_target=False)
            if slabs:
                operands.append(term)
                self._sides.append(slabs)
        self._operands = operands
        roles = {relation.sources[each.tensor].role for each in operands}
        if len(roles) > 1 or (roles and compared):
            raise LayoutError(
                f"{target.place}: `times`, `plus` and copies that are compared cannot "
                "be combined"
            )
        self._reduction = Reduction.EQUAL if compared else Reduction.NONE
        if roles:
            is_product = roles == {"times"}
            self._reduction = Reduction.PRODUCT if is_product else Reduction.LOW_RANK
        if roles == {"plus"} and len(operands) != len(pair.operands):
            (lacking,) = (each for each in pair.operands if each not in operands)
            raise LayoutError(
                f"{relation.sources[lacking.tensor].place}: no tensor matches it, but "
                "the other matrix of `plus` is there; use the whole checkpoint"
            )
        if self._reduction is not Reduction.NONE:
            for slabs in self._sides:
                self._check_alone(slabs, is_compared=not roles)
        contracted = [each.names - pair.source.names for each in operands]
        self._contracted = sorted(frozenset().union(*contracted))

    def _check_alone(self, slabs: Sequence[_Slab], *, is_compared: bool) -> None:
        # Replicas are compared with copies, but not before they are multiplied.
        for slab in slabs:
            if slab.reduction is not Reduction.NONE and not (
                is_compared and slab.reduction is Reduction.EQUAL
            ):
                raise LayoutError(
                    f"{slab.name!r} is there {len(slab.members)} times, which are "
                    "not compared where `times` or `plus` change it; list what they "
                    "differ in under `unchecked`"
                )

    def copied(self) -> list[Copied]:
        """The copies, while `problems` is empty."""
        extra = [*sorted(self._repeated), *self._contracted]
        held_in = [
            _Columns(slabs, self._names, extra)
            for slabs in (self._targets, *self._sides)
        ]
        cells = held_in[0].boxes(None)
        if not len(cells):
            for slab in itertools.chain(*self._sides[: 1 + self._num_compared]):
                if slab.volume:
                    self._note("tensors that the target lacks", slab.name)
            return []
        of_target = np.arange(len(self._targets))
        chosen: list[np.ndarray] = []
        for number, side in enumerate(self._sides):
            is_operand = number > self._num_compared
            held = held_in[1 + number].boxes(cells)
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
        return list(self._copies(held_in, cells, [of_target, *chosen]))

    def _check(
        self,
        side: Sequence[_Slab],
        held: Boxes,
        cells: Boxes,
        first: np.ndarray,
        second: np.ndarray,
        parts: Boxes,
        is_operand: bool,
        of_target: np.ndarray,
    ) -> None:
        # That the slabs of a side have each element of the cells once.
        volumes = parts.volumes
        filled = np.zeros(len(cells), np.int64)
        np.add.at(filled, first, volumes)
        missing = np.flatnonzero(filled < cells.volumes)
        for number in missing[: errors.MOST_NAMED + 1]:
            gap = self._gap(cells[int(number)], parts.take(first == number))
            name = self._targets[int(of_target[number])].name
            self._note("elements that no tensor fills", f"{name} ({gap})")
        twice = np.flatnonzero(filled > cells.volumes)
        if not len(twice) and not len(missing) and not _are_apart(held):
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
        if self._repeated:
            # The same elements may be in several targets.
            every = np.column_stack([second, parts.start, parts.stop])
            distinct, _ = columns.distinct_rows(every)
            second, volumes = second[distinct], volumes[distinct]
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
        gaps = box_cover.gaps(boxes.whole([cell.shape[dim] for dim in cut]), chosen)
        gap = gaps[0]
        return ", ".join(
            f"{self._names[dim]} {at + cell.start[dim]}:{end + cell.start[dim]}"
            for dim, at, end in zip(cut, gap.start, gap.stop, strict=True)
        )

    def _note(self, text: str, name: str) -> None:
        self.problems.setdefault(text, []).append(name)

    def _copies(
        self, sides: Sequence[_Columns], cells: Boxes, numbers: Sequence[np.ndarray]
    ) -> Iterator[Copied]:
        # The copies of cells, of which each has a slab of the target and of each side.
        # Cells of the same places and sizes have the same factors.
        places = [each.place[n] for each, n in zip(sides, numbers, strict=True)]
        key = np.column_stack([*places, cells.stop - cells.start])
        firsts, group = columns.distinct_rows(key)
        factors = [
            self._factors(
                key[first, len(sides) :].tolist(),
                [side.places[key[first, n]] for n, side in enumerate(sides)],
            )
            for first in firsts.tolist()
        ]
        starts = [
            each.starts(n, cells.start) for each, n in zip(sides, numbers, strict=True)
        ]
        arithmetic: dict[Reduction, Arithmetic | None] = {}
        made: dict[object, Side] = {}

        def side(of_group: int, number: int, start: tuple[int, ...]) -> Side:
            key = of_group, number, start
            if key not in made:
                _, dims_of, steps_of = factors[of_group]
                made[key] = Side(
                    start=start, dims=dims_of[number], steps=steps_of[number]
                )
            return made[key]

        listed = zip(
            group.reshape(-1).tolist(),
            *(each.tolist() for each in numbers),
            *starts,
            strict=True,
        )
        for of_group, *rest in listed:
            chosen, at = rest[: len(sides)], rest[len(sides) :]
            slabs = [each.slabs[n] for each, n in zip(sides, chosen, strict=True)]
            reduction = self._reduction
            if reduction is Reduction.NONE:
                reduction = slabs[1].reduction
            if reduction not in arithmetic:
                arithmetic[reduction] = self._planner.arithmetic(
                    self._pair, reduction, self._operands
                )
            read = []
            for number, slab in enumerate(slabs[1:], start=1):
                start = tuple(at[number])
                read.append((slab.members[0][0], side(of_group, number, start)))
                first = slab.members[0][1]
                for row, other in slab.members[1:]:
                    moved = tuple(
                        a - b + c for a, b, c in zip(start, first, other, strict=True)
                    )
                    read.append((row, side(of_group, number, moved)))
            into = side(of_group, 0, tuple(at[0]))
            for row, _ in slabs[0].members:
                yield (
                    row,
                    factors[of_group][0],
                    into,
                    tuple(read),
                    arithmetic[reduction],
                )

    def _factors(
        self, lengths: Sequence[int], places: Sequence[Sequence[tuple[int, int, int]]]
    ) -> tuple[
        tuple[int, ...], tuple[tuple[int, ...], ...], tuple[tuple[int, ...], ...]
    ]:
        # The sizes of the factors, and by side their dims and steps.
        factors = []
        for number, of_name in enumerate(zip(*places, strict=True)):
            length = max(count for _, _, count in of_name)
            if number < len(lengths):
                length = lengths[number]
            is_contracted = number >= len(lengths) + len(self._repeated)
            if length > 1 or is_contracted:
                factors.append((length, [(dim, step) for dim, step, _ in of_name]))
        merged = _merged(factors)
        return (
            tuple(size for size, _ in merged),
            tuple(
                tuple(held[number][0] for _, held in merged)
                for number in range(len(places))
            ),
            tuple(
                tuple(held[number][1] for _, held in merged)
                for number in range(len(places))
            ),
        )


class _Columns:
    """The slabs of a side, in columns.

    Attributes:
      slabs: the p slabs.
      places: the distinct places of factors: by name the dim, the step, and the length
        of names that are not those of the cells.
      place: of each slab, by number, int64 `[p]`.
    """

    def __init__(
        self, slabs: Sequence[_Slab], names: Sequence[str], extra: Sequence[str]
    ) -> None:
        self.slabs = slabs
        for slab in slabs:
            if slab.volume > _MOST_VOLUME:
                raise LayoutError(f"{slab.name!r} has more elements than are counted")
        every, nowhere = [*names, *extra], (0, -1, -1, 0)
        held = np.array(
            [[slab.ranges.get(name, nowhere) for name in every] for slab in slabs],
            np.int64,
        ).reshape(len(slabs), len(every), 4)
        self._low, self._count = held[:, : len(names), 0], held[:, : len(names), 1]
        places = held[:, :, [2, 3, 1]]
        places[:, : len(names), 2] = 0
        self.place = np.zeros(len(slabs), np.int64)
        self.places = [()] if slabs else []
        if slabs and every:
            flat = places.reshape(len(slabs), -1)
            firsts, self.place = columns.distinct_rows(flat)
            rows = flat[firsts].reshape(len(firsts), len(every), 3).tolist()
            self.places = [tuple(map(tuple, row)) for row in rows]
        first = [slab.members[0][1] for slab in slabs]
        self._first = np.array(first, np.int64).reshape(
            len(slabs), len(first[0]) if first else 0
        )

    def boxes(self, cells: Boxes | None) -> Boxes:
        """The slabs as boxes; those without a coordinate have all of it of `cells`."""
        stop = self._low + self._count
        if cells is not None and len(cells):
            everywhere = self._count < 0
            stop = np.where(everywhere, cells.stop.max(axis=0), stop)
        return Boxes(start=self._low, stop=stop)

    def starts(self, numbers: np.ndarray, at: np.ndarray) -> list[list[int]]:
        """The first index in the tensor of cells that begin `at` these coordinates."""
        start = self._first[numbers]
        place = self.place[numbers]
        moved = at - self._low[numbers]
        for number, places in enumerate(self.places):
            chosen = place == number
            for name, (dim, step, _) in enumerate(places[: at.shape[1]]):
                if dim >= 0:
                    start[chosen, dim] += moved[chosen, name] * step
        return start.tolist()


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
    *,
    is_target: bool,
) -> list[_Member]:
    # The rows of several with the same elements that are read, the first one first; or
    # all that are written.
    if len(members) == 1:
        return members
    pattern = tensor.pattern
    used = tensor.dims.axes | term.coordinates | term.names | tensor.reduced
    _check_distinct(tensor, members, used)
    members.sort(key=lambda each: [each[2].get(n, -1) for n in pattern.reduced])
    first = members[0]
    kept = [first]
    for other in members[1:]:
        if is_target or all(
            other[2].get(n) == first[2].get(n) for n in pattern.unchecked
        ):
            kept.append(other)
    if len(kept) > 1 and not pattern.reduced:
        raise LayoutError(
            f"{tensor.place}: {first[1].name!r} and {members[1][1].name!r} have the "
            f"same coordinates"
        )
    if not is_target and len(kept) > 1 and len({r.dtype for _, r, _ in members}) > 1:
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
        counts[name] if name in counts else _num_values(each[at] for each in union)
        for at, name in enumerate(names)
        if any(each[at] is not None for each in union)
    )
    for members, present in zip(groups, vectors, strict=True):
        if len(present) != expected:
            name = members[0][1].name
            raise _incomplete(tensor, name, len(present), expected, names)


def _incomplete(
    tensor: ParsedTensor, name: str, held: int, expected: int, over: Iterable[str]
) -> LayoutError:
    return LayoutError(
        f"{tensor.place}: {name!r} is there {held} times of {expected} over "
        f"{', '.join(sorted(over))}; a mean or sum needs all"
    )


def _num_values(values: Iterable[int | str | None]) -> int:
    # Of a capture: numbers count from 0.
    distinct = set(values)
    numbers = [int(text) for text in map(str, distinct) if text.isdecimal()]
    return max(numbers) + 1 if len(numbers) == len(distinct) else len(distinct)


def _exploded(tensor: ParsedTensor, slab: _Slab) -> list[_Slab]:
    # A slab whose averaged or added dims become members. Of other reduced dims, the
    # first index is read.
    names = sorted(tensor.reduced & slab.ranges.keys())
    added = {*tensor.pattern.mean, *tensor.pattern.sum}
    if any(slab.ranges[name][0] for name in names if name not in added):
        return []
    kept = {name: each for name, each in slab.ranges.items() if name not in names}
    members = []
    ranges = [range(slab.ranges[n][1] if n in added else 1) for n in names]
    if math.prod(map(len, ranges)) > _MOST_INDICES:
        raise LayoutError(
            f"{tensor.place}: {', '.join(names)} repeat {math.prod(map(len, ranges))} "
            f"times, and at most {_MOST_INDICES} are reduced; list captures or small "
            "dims"
        )
    for numbers in itertools.product(*ranges):
        for row, start in slab.members:
            moved = list(start)
            for name, number in zip(names, numbers, strict=True):
                _, _, dim, step = slab.ranges[name]
                if dim >= 0:
                    moved[dim] += number * step
            members.append((row, tuple(moved)))
    return [dataclasses.replace(slab, members=tuple(members), ranges=kept)]


def _united(tensor: ParsedTensor, slabs: Iterable[_Slab]) -> list[_Slab]:
    # Ranks of a dim that is sharded and reduced have the same elements.
    of_elements: dict[object, list[_Slab]] = {}
    for slab in slabs:
        of_elements.setdefault(tuple(slab.ranges.items()), []).append(slab)
    united = []
    for same in of_elements.values():
        members = tuple(itertools.chain(*(slab.members for slab in same)))
        reduction = _reduction(tensor, len(members))
        united.append(
            dataclasses.replace(same[0], members=members, reduction=reduction)
        )
    return united


def _are_apart(held: Boxes) -> bool:
    # Whether boxes are the cells of a grid, and no two are the same one. Others may be
    # apart, too.
    numbers = []
    for dim in range(held.rank):
        ends = np.column_stack([held.start[:, dim], held.stop[:, dim]])
        firsts, number = columns.distinct_rows(ends)
        distinct = ends[firsts]
        distinct = distinct[np.argsort(distinct[:, 0])]
        if (distinct[1:, 0] < distinct[:-1, 1]).any():
            return False
        numbers.append(number)
    if not numbers:
        return len(held) < 2
    return len(columns.distinct_rows(np.column_stack(numbers))[0]) == len(held)


def _boxes_of(
    first: tuple[int, ...], ranges: _Ranges
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    # The boxes of a slab in its tensor.
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
