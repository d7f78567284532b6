"""A parsed rule: which names are coordinates of which tensors, and which parts pair up.

Each tensor of a rule has elements with named coordinates. A coordinate is a *factor* of
its dims, or a *point*: the value of a capture, of a rank axis or of an index table. A
part of a tensor (one addend of every sum) belongs to the part of the other side that
has the same coordinates.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Sequence

import numpy as np

from elastic_ckpt.universal.rules import dims, name_pattern, size_expression
from elastic_ckpt.universal.rules.layout_error import LayoutError
from elastic_ckpt.universal.rules.rule import Rule, TensorPattern


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """A part of the tensors of a pattern.

    Attributes:
      tensor: the number of the pattern on its side.
      factors: the coordinates that are dims.
      points: the coordinates that are captures, rank axes and entries of tables.
    """

    tensor: int
    factors: frozenset[str]
    points: frozenset[str]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Parts of both sides with the same coordinates."""

    source: Term
    target: Term


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ParsedTensor:
    """A tensor pattern, parsed.

    Attributes:
      pattern: as it was written.
      name: its name pattern.
      dims: its dims expression.
      points: the coordinates that captures and tables give.
      tables: the captures and rank axes of index tables, and the points that
        they give, by dim.
      place: for messages.
    """

    pattern: TensorPattern
    name: name_pattern.NamePattern
    dims: dims.Dims
    points: frozenset[str]
    tables: dict[str, tuple[tuple[str, ...], dict[tuple[int, ...], int]]]
    place: str


class Relation:
    """A rule, parsed and checked.

    Attributes:
      rule: as it was written.
      sources: the tensors of the checkpoint.
      targets: the tensors of the target.
      numbers: the captures that are numbers.
      kept: the captures that all names have; each of their values is independent.
      pairs: the parts that belong together.
      padding: the parts of target tensors that have no source.
    """

    def __init__(self, rule: Rule, axes: Collection[str] | None) -> None:
        """Parses `rule`.

        Args:
          rule: with the sizes, widths and tables of its layout.
          axes: the rank axes of the checkpoint; None if they are not known yet.

        Raises:
          LayoutError: if it cannot fit any checkpoint.
        """
        sides = [list(_parsed(rule, key)) for key in ("from", "to")]
        self.rule = rule = _with_used_tables(rule, sides)
        written = [*sides[0], *sides[1]]
        self.numbers = _numbers(rule, written)
        self.kept = _kept(rule, written, self.numbers)
        self.numbers |= _always_numbers(written)
        self.sources, self.targets = (
            # The names of targets alone have coordinates: they have no ranks.
            [_with_points(each, self, sides[1 - at], ranks) for each in sides[at]]
            for at, ranks in ((0, axes), (1, ()))
        )
        self.pairs, self.padding = self._paired(axes)

    def named(self, kept: Sequence[int | str]) -> dict[tuple[str, ...], int | str]:
        """The values of kept captures, by their names."""
        return {(name,): value for name, value in zip(self.kept, kept, strict=True)}

    def _paired(self, axes: Collection[str] | None) -> tuple[list[Pair], list[Term]]:
        sources, targets = list(_terms(self.sources)), list(_terms(self.targets))
        pad = self.rule.pad.keys()
        pairs = []
        for source in sources:
            fitting = [each for each in targets if self._fits(source, each, axes)]
            padded = (source.factors | source.points) & pad
            if bool(fitting) == bool(padded):
                raise self._misfit(source, self.sources, self.targets, fitting)
            if axes is not None and fitting:
                if len(fitting) > 1:
                    raise self._misfit(source, self.sources, self.targets, fitting)
                points = (fitting[0].factors | fitting[0].points) - source.factors
                source = dataclasses.replace(source, points=points)
                pairs.append(Pair(source=source, target=fitting[0]))
        padding = []
        for target in targets:
            fitting = [each for each in sources if self._fits(each, target, axes)]
            if not fitting and (target.factors | target.points) & pad:
                padding.append(target)
            elif not fitting or (axes is not None and len(fitting) > 1):
                raise self._misfit(target, self.targets, self.sources, fitting)
        return pairs, padding

    def _fits(self, source: Term, target: Term, axes: Collection[str] | None) -> bool:
        # The source's rank may be a coordinate of the target.
        names = source.factors | source.points
        missing = (target.factors | target.points) - names
        tensor = self.sources[source.tensor]
        return (
            names <= target.factors | target.points
            and not missing & (tensor.dims.axes | set(tensor.pattern.reduced))
            and (axes is None or missing <= set(axes))
        )

    def _misfit(
        self,
        term: Term,
        tensors: Sequence[ParsedTensor],
        others: Sequence[ParsedTensor],
        fitting: Sequence[Term],
    ) -> LayoutError:
        place = tensors[term.tensor].place
        coordinates = term.factors | term.points
        padded = coordinates & self.rule.pad.keys()
        if fitting and padded:
            return LayoutError(
                f"{place}: {min(padded)} is listed in `pad`, but both sides have it; "
                f"remove it from `pad`"
            )
        if fitting:
            names = {others[each.tensor].name.text for each in fitting}
            return LayoutError(
                f"{place}: several parts of {', '.join(map(repr, sorted(names)))} have "
                f"the coordinates {_text(coordinates)}; name them differently"
            )
        listed = "; ".join(
            f"{_text(each.factors | each.points)} in {others[each.tensor].name.text!r}"
            for each in _terms(others)
        )
        return LayoutError(
            f"{place}: the other side has no tensor with the coordinates "
            f"{_text(coordinates)}, but {listed or 'none'}; list captures and rank "
            f"axes that it lacks in `replicated`, `unchecked`, `mean` or `sum`, dims "
            f"that it lacks in `pad`"
        )


def _parsed(rule: Rule, key: str) -> Iterator[ParsedTensor]:
    for pattern in rule.source if key == "from" else rule.target:
        place = f"{rule.text}.{key}[{pattern.name!r}]"
        try:
            parsed = ParsedTensor(
                pattern=pattern,
                name=name_pattern.parse(pattern.name),
                dims=dims.parse(pattern.dims),
                points=frozenset(),
                tables={},
                place=place,
            )
            size_expression.names(pattern.scale)
            size_expression.names(pattern.shift)
        except LayoutError as error:
            raise LayoutError(f"{place}: {error}") from None
        _check_options(parsed)
        inexact = set(pattern.sum) & set(parsed.name.names)
        if key == "to" and inexact:
            raise LayoutError(
                f"{place}: a sum over {min(inexact)} cannot be undone; use another "
                f"layout for this direction"
            )
        yield parsed


def _check_options(tensor: ParsedTensor) -> None:
    pattern, place = tensor.pattern, tensor.place
    if bool(pattern.replicated) + bool(pattern.mean) + bool(pattern.sum) > 1:
        raise LayoutError(
            f"{place}: choose one of `replicated`, `mean` and `sum`; list the other "
            f"captures and rank axes in `unchecked`"
        )
    for name in pattern.reduced:
        if pattern.reduced.count(name) > 1:
            raise LayoutError(f"{place}: {name} is listed twice")
        if name in tensor.dims.names or name in tensor.dims.axes:
            raise LayoutError(
                f"{place}: {name} is in the dims {tensor.dims.text!r}, and cannot be "
                f"reduced too"
            )
    for capture in tensor.name.captures:
        if len(capture.names) > 1 and set(capture.names) & set(pattern.reduced):
            raise LayoutError(f"{place}: a product of captures cannot be reduced")
    both = tensor.dims.names & set(tensor.name.names)
    if both:
        raise LayoutError(f"{place}: {min(both)} is both a capture and a dim")
    if pattern.dtype is not None:
        try:
            np.dtype(pattern.dtype)
        except TypeError:
            raise LayoutError(
                f"{place}: {pattern.dtype!r} is no dtype; write float32, bfloat16, ..."
            ) from None


def _with_used_tables(rule: Rule, sides: Sequence[Sequence[ParsedTensor]]) -> Rule:
    # Tables of the layout serve rules that have their dim on one side alone.
    names = [
        {name for each in side for name in (*each.dims.names, *each.name.names)}
        for side in sides
    ]
    used = {
        key: index
        for key, index in rule.index.items()
        if (key in names[0]) != (key in names[1])
    }
    return dataclasses.replace(rule, index=used)


def _numbers(rule: Rule, written: Sequence[ParsedTensor]) -> frozenset[str]:
    numbers = set(rule.index)
    for index in rule.index.values():
        numbers.update(index.by)
    for tensor in written:
        numbers |= tensor.dims.names | tensor.dims.axes
        for capture in tensor.name.captures:
            if len(capture.names) > 1:
                numbers.update(capture.names)
    return frozenset(numbers)


def _always_numbers(written: Sequence[ParsedTensor]) -> frozenset[str]:
    # A capture with leading zeros or an offset in one name is a number in all.
    captures = [capture for tensor in written for capture in tensor.name.captures]
    return frozenset(each.names[0] for each in captures if each.is_always_number)


def _kept(
    rule: Rule, written: Sequence[ParsedTensor], numbers: Collection[str]
) -> tuple[str, ...]:
    kept: dict[str, None] = {}
    for tensor in written:
        for name in tensor.name.names:
            if name not in numbers and name not in tensor.pattern.reduced:
                kept[name] = None
    for name in kept:
        for tensor in written:
            if name not in tensor.name.names or name in tensor.pattern.reduced:
                raise LayoutError(
                    f"{rule.text}: {{{name}}} is in some names, and not in "
                    f"{tensor.name.text!r}; capture it in all, or make it a dim, or "
                    f"list it in `replicated`, `unchecked`, `mean` or `sum`"
                )
    return tuple(kept)


def _with_points(
    tensor: ParsedTensor,
    relation: Relation,
    others: Sequence[ParsedTensor],
    axes: Collection[str] | None,
) -> ParsedTensor:
    reduced = set(tensor.pattern.reduced)
    captured = {name for name in tensor.name.names if name not in reduced}
    points = captured - set(relation.kept) - tensor.dims.axes
    elsewhere = frozenset(
        name for other in others for name in (*other.dims.names, *other.name.names)
    )
    tables = {}
    for key, index in relation.rule.index.items():
        if key not in elsewhere or key in captured | tensor.dims.names:
            continue
        ranks = set(index.by) - captured
        if ranks == set(index.by) and axes is None:
            continue
        if _all_axes(ranks, axes):
            tables[key] = index.by, index.table()
            points = points - (set(index.by) - elsewhere) | {key}
    return dataclasses.replace(tensor, points=frozenset(points), tables=tables)


def _terms(tensors: Sequence[ParsedTensor]) -> Iterator[Term]:
    for number, tensor in enumerate(tensors):
        for names in tensor.dims.name_sets:
            yield Term(tensor=number, factors=names, points=tensor.points)


def _all_axes(names: Collection[str], axes: Collection[str] | None) -> bool:
    return axes is None or all(name in axes for name in names)


def _text(names: Collection[str]) -> str:
    return " ".join(sorted(names)) or "(none)"
