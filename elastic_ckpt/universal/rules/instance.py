"""The copies of one instance of a rule: its tensors with the same kept captures.

Instances whose tensors have the same shapes, ranks and numbers have the same copies, so
that each such class is planned once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from elastic_ckpt.core import errors
from elastic_ckpt.universal.moves import Arithmetic, Reduction, Side
from elastic_ckpt.universal.rules import (
    copies,
    cover,
    derivation,
    dtypes,
    equations,
    geometry,
    rows,
    size_expression,
    sizes,
)
from elastic_ckpt.universal.rules.geometry import Piece
from elastic_ckpt.universal.rules.layout_error import LayoutError
from elastic_ckpt.universal.rules.name_pattern import NamePattern
from elastic_ckpt.universal.rules.relation import Pair, ParsedTensor, Relation, Term
from elastic_ckpt.universal.rules.rows import Kept, Placed, Row
from elastic_ckpt.universal.rules.rule import POWERS, SHIFTED


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """The tensors of one instance.

    Attributes:
      relation: the rule.
      state: the kind of state.
      sources: the tensors of the checkpoint.
      targets: those of the target; None if they are derived.
      counts: the number of ranks, by axis.
      names: the whole names of the targets, by the number of the pattern.
      kept: the values of the captures that all names have.
    """

    relation: Relation
    state: str
    sources: Sequence[Row]
    targets: Sequence[Row] | None
    counts: Mapping[str, int]
    names: Sequence[NamePattern]
    kept: Kept


# The numbers of source and target, sizes, sides, arithmetic: see `moves.Move`.
Copied = tuple[int, int, tuple[int, ...], Side, Side, Arithmetic | None]
# The number of the target, start, stop, value: see `moves.Fill`.
Filled = tuple[int, tuple[int, ...], tuple[int, ...], float]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The copies of an instance.

    Attributes:
      copies: all of them.
      fills: the padding of targets.
      targets: as given, or derived; with dtypes.
    """

    copies: list[Copied]
    fills: list[Filled]
    targets: list[Row]


def plan(instance: Instance) -> Plan:
    """The copies of an instance.

    Raises:
      LayoutError: if shapes do not fit, or elements are not filled exactly once.
    """
    return _Planner(instance).plan()


class _Planner:
    def __init__(self, instance: Instance) -> None:
        self._instance = instance
        self._relation = relation = instance.relation
        rule = relation.rule
        listed = [list(instance.sources), list(instance.targets or ())]
        self._counts = rows.axis_counts(relation, listed, instance.counts)
        system = list(equations.equations(relation, listed, self._counts))
        self._sizes = sizes.solve(rule, system)
        for tensor in (*relation.sources, *relation.targets):
            sizes.require(rule, tensor.dims.names, self._sizes)
        self._pieces = copies.Pieces(self._sizes, rule.widths)
        self._sources = self._placed(relation.sources, instance.sources)
        if instance.targets is None:
            self._rows = list(
                derivation.derived(
                    relation,
                    instance.kept,
                    instance.names,
                    sizes=self._sizes,
                    counts=self._counts,
                )
            )
        else:
            self._rows = list(instance.targets)
        self._targets = self._placed(relation.targets, self._rows)

    def plan(self) -> Plan:
        relation, rule = self._relation, self._relation.rule
        joins = []
        try:
            for pair in relation.pairs:
                sources = self._parts(relation.sources, self._sources, pair.source)
                targets = self._parts(relation.targets, self._targets, pair.target)
                joins.append(copies.Join(pair, sources, targets))
            fills = list(self._fills())
        except LayoutError as error:
            raise LayoutError(f"{rule.text}: {error}") from None
        _check_cover(rule.text, joins)
        copied = [each for join in joins for each in self._copied(join)]
        return Plan(
            copies=copied,
            fills=fills,
            targets=list(
                dtypes.with_dtypes(self._relation, self._instance.sources, self._rows)
            ),
        )

    def _placed(
        self, tensors: Sequence[ParsedTensor], listed: Sequence[Row]
    ) -> list[list[Placed]]:
        by_tensor: list[list[tuple[int, Row]]] = [[] for _ in tensors]
        for number, row in enumerate(listed):
            by_tensor[row.tensor].append((number, row))
        points = [set(tensor.points) for tensor in tensors]
        if tensors is self._relation.sources:
            for pair in self._relation.pairs:
                points[pair.source.tensor] |= pair.source.points
        return [
            rows.placed(
                tensor,
                by_tensor[number],
                points=frozenset(points[number]),
                sizes=self._sizes,
                counts=self._counts,
            )
            for number, tensor in enumerate(tensors)
        ]

    def _parts(
        self,
        tensors: Sequence[ParsedTensor],
        listed: Sequence[Sequence[Placed]],
        term: Term,
    ) -> list[tuple[Placed, list[Piece]]]:
        tensor = tensors[term.tensor]
        return [
            (each, self._pieces.parts(tensor, each).get(term.factors, []))
            for each in listed[term.tensor]
        ]

    def _copied(self, join: copies.Join) -> Iterator[Copied]:
        by_reduction: dict[Reduction, Arithmetic | None] = {}
        for copy in join.copies:
            reduction = copy.source.reduction
            if reduction not in by_reduction:
                by_reduction[reduction] = self._arithmetic(copy.pair, reduction)
            arithmetic = by_reduction[reduction]
            for source in (copy.source.number, *copy.source.others):
                for target in (copy.target.number, *copy.target.others):
                    yield (
                        source,
                        target,
                        copy.sizes,
                        copy.source_side,
                        copy.target_side,
                        arithmetic,
                    )

    def _arithmetic(self, pair: Pair, reduction: Reduction) -> Arithmetic | None:
        # A value is (that of the other side) * scale + shift, on both sides.
        numbers = []
        source = self._relation.sources[pair.source.tensor]
        target = self._relation.targets[pair.target.tensor]
        for tensor in (source, target):
            for expression in (tensor.pattern.scale, tensor.pattern.shift):
                names = size_expression.names(expression)
                sizes.require(self._relation.rule, names, self._sizes)
                numbers.append(size_expression.result(expression, self._sizes))
            if numbers[-2] == 0:
                raise LayoutError(f"{tensor.place}: a scale cannot be 0")
        source_scale, source_shift, target_scale, target_shift = numbers
        state = self._instance.state
        scale = target_scale / source_scale
        shift = target_shift - source_shift * scale
        if state not in POWERS and (scale != 1 or shift):
            raise LayoutError(
                f"{target.place}: it is not known how {state!r} follows a parameter "
                f"that is scaled; list the other `states` in this rule"
            )
        scale = scale ** POWERS.get(state, 1)
        shift = shift if state in SHIFTED else 0.0
        if reduction is Reduction.NONE and scale == 1 and shift == 0:
            return None
        return Arithmetic(reduction=reduction, scale=scale, shift=shift)

    def _fills(self) -> Iterator[Filled]:
        pad = self._relation.rule.pad
        for term in self._relation.padding:
            value = pad[min((term.factors | term.points) & pad.keys())]
            value = value if self._instance.state in SHIFTED else 0.0
            for placed, pieces in self._parts(
                self._relation.targets, self._targets, term
            ):
                for piece in pieces:
                    for box in geometry.boxes(piece):
                        for number in (placed.number, *placed.others):
                            yield number, box.start, box.stop, value


def _check_cover(place: str, joins: Sequence[copies.Join]) -> None:
    targets = [part for join in joins for part in join.targets]
    sources = [part for join in joins for part in join.sources]
    checks = (
        ("elements that no tensor fills", cover.missing, targets),
        ("elements that several tensors fill", cover.repeated, targets),
        ("elements that are not used", cover.unused, sources),
    )
    problems = []
    for text, check, parts in checks:
        names = filter(None, map(check, parts))
        listed = errors.first_of(names)
        if listed:
            problems.append(f"{text}: {listed}")
    if problems:
        raise LayoutError(f"{place}: {'; '.join(problems)}")
