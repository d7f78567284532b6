"""Parses a rule and plans its instances.

A rule's tensors are cut into slabs: boxes of named coordinates, which come from
captures, rank axes and factors of dims. Slabs from both sides whose coordinates have
the same names are joined: each overlap is a copy. Anything but a copy is a derived
tensor: compared replicas, means, sums, or weights times scales.
"""

from __future__ import annotations

import collections
import dataclasses
import difflib
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import ml_dtypes
import numpy as np

from elastic_ckpt.core import box_cover, box_join
from elastic_ckpt.core.boxes import Boxes
from elastic_ckpt.universal.moves import (
    Derived,
    Operand,
    Side,
    TargetTensor,
)
from elastic_ckpt.universal.rules import dims, names, sizes
from elastic_ckpt.universal.rules.layout import (
    CheckpointValue,
    LayoutError,
    Rule,
    TensorPattern,
)
from elastic_ckpt.universal.rules.names import Value

# Limits the number of targets because empty tensors may have dims of any size.
MOST_TARGETS = 1 << 20
DTYPES = (
    "bool",
    *(f"{sign}int{bits}" for sign in ("", "u") for bits in (4, 8, 16, 32, 64)),
    *("bfloat16", "float16", "float32", "float64", "complex64", "complex128"),
    *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"),
    *("float8_e4m3", "float8_e3m4", "float8_e4m3b11fnuz", "float8_e8m0fnu"),
    "float4_e2m1fn",
)
# The power of a parameter's scale by which a state is multiplied. Gradients are divided
# by the scale; the second moment averages squared gradients.
_POWERS = {
    **{"parameter": 1, "master": 1, "first_moment": -1, "second_moment": -2},
    # Muon's and SGD's.
    "momentum_buffer": -1,
}
# The kinds of states that the rule's shift and padding values apply to.
_SHIFTED = ("parameter", "master")
# The dtype of the product of quantized weights and their scales.
_DEQUANTIZED = np.dtype(ml_dtypes.bfloat16)
_LIST_IT = "list it in `replicated`, `unchecked`, `mean` or `sum`"

# Pairs of a key and a capture's value, or of an axis and a rank.
Items = tuple[tuple[str, Any], ...]
# For each axis, the rank and the number of ranks.
Ranks = tuple[tuple[str, tuple[int, int]], ...]
# A pattern and values, which identify a tensor of an instance.
Key = tuple[int, Items]
# The first coordinate, the number of coordinates, the dim along which they advance, and
# their step.
Range = tuple[int, int, int, int]
# A move of an instance: target index, sizes, position in the target, source index,
# position in the source, scale, shift.
InstanceMove = tuple[int, tuple[int, ...], Side, int, Side, float, float]
# The range of a coordinate that no dim supplies.
_POINT = (0, 1, -1, 0)
How = Literal["equal", "mean", "sum", "times", "plus"]


class UnknownSizeError(LayoutError):
    """A rule's shapes do not determine a size; another rule's shapes may."""


@dataclasses.dataclass(frozen=True, eq=False)
class Tensor:
    """A parsed tensor pattern.

    Attributes:
      dims: the node of each dim.
      blocks: for each dim of an operand, the number of indices of the main tensor that
        share one index of the operand.
      main: for an operand, the index of the source that it multiplies or is added to;
        None for all other tensors.
    """

    pattern: TensorPattern
    name: names.NamePattern
    dims: tuple[dims.Node, ...]
    blocks: tuple[str, ...]
    place: str
    main: int | None = None

    @functools.cached_property
    def reduced(self) -> frozenset[str]:
        """The names that the other side lacks."""
        return frozenset(self.pattern.reduced)

    @functools.cached_property
    def view(self) -> np.dtype | None:
        """The dtype to read the bytes as; None for the stored dtype."""
        return np.dtype(self.pattern.viewed_as) if self.pattern.viewed_as else None

    @functools.cached_property
    def nodes(self) -> tuple[dims.Node, ...]:
        """The nodes of the captures, followed by the nodes of the dims."""
        return (*(each.node for each in self.name.captures), *self.dims)

    @functools.cached_property
    def names(self) -> frozenset[str]:
        """The names of the captures and dims."""
        return dims.names(self.nodes)

    @functools.cached_property
    def axes(self) -> frozenset[str]:
        """The rank axes that shard the tensor."""
        return dims.axes(self.nodes)

    @functools.cached_property
    def keys(self) -> frozenset[str]:
        """The keys of the captures."""
        return frozenset(each.key for each in self.name.captures)

    @property
    def is_original(self) -> bool:
        """Whether the tensor is neither an operand nor a copy."""
        return self.main is None and not self.pattern.copy

    @functools.cached_property
    def has_sum(self) -> bool:
        """Whether a capture is the index of a sum."""
        nodes = dims.walk([each.node for each in self.name.captures])
        return any(isinstance(node, dims.Sum) for node in nodes)

    def with_rest(self, count: int) -> Tensor:
        """The tensor with `count` named dims in place of `...`."""
        if dims.Name(dims.REST) not in self.dims:
            return self
        at = self.dims.index(dims.Name(dims.REST))
        rest = tuple(dims.Name(f"{dims.REST}{n}") for n in range(count))
        return dataclasses.replace(
            self,
            dims=(*self.dims[:at], *rest, *self.dims[at + 1 :]),
            blocks=(*self.blocks[:at], *["1"] * count, *self.blocks[at + 1 :]),
        )


class ParsedRule:
    """A parsed and checked rule.

    Attributes:
      rule: the rule as written, with its layout's sizes and widths.
      text: the rule's position in the layout, used in error messages.
      sources: the tensors of the checkpoint, with operands last.
      numbers: the keys of captures whose values are numbers.
      kept: the keys of captures in all names; the rule has an instance for each
        combination of their values.
      forms: the forms of captures that are strings, which apply to all names.
      listed: the indices of targets with captures whose values only existing targets
        determine.
      names: the names of captures, dims and rank axes.
      wanted: the indices of the sources that a complete instance has.
      needed: the indices of the sources without which an instance produces nothing.
    """

    def __init__(self, rule: Rule) -> None:
        """Parses a rule.

        Raises:
          LayoutError: if the rule cannot match any checkpoint.
        """
        self.rule, self.text = rule, rule.text
        written: list[tuple[str, TensorPattern, int | None]] = [
            *(("from", each, None) for each in rule.source),
            *(
                ("from", operand, number)
                for number, each in enumerate(rule.source)
                for operand in (*each.times, *each.plus)
            ),
            *(("to", each, None) for each in rule.target),
        ]
        forms = self.forms = dict[str, str]()
        parsed = [_parsed(rule, *each, forms) for each in written]
        captures = [each for tensor in parsed for each in tensor.name.captures]
        forms |= {c.key: c.form for c in captures if c.form and not c.form.isdigit()}
        every = [_parsed(rule, *each, forms) for each in written]
        count = sum(key == "from" for key, _, _ in written)
        self.sources, self.targets = every[:count], every[count:]
        coordinates = frozenset().union(
            *(dims.names(each.dims) | each.axes for each in every),
            *(each.reduced for each in self.targets),
            *(dims.names((each.node,)) for each in captures if each.is_index),
        )
        self.numbers = coordinates | {c.key for c in captures if c.is_number(())}
        self.kept = tuple(
            dict.fromkeys(
                capture.key
                for each in every
                for capture in each.name.captures
                if not dims.names((capture.node,)) & (coordinates | each.reduced)
            )
        )
        for key, each in itertools.product(self.kept, every):
            if key not in each.keys - each.reduced:
                raise LayoutError(
                    f"{self.text}: {{{key}}} is in some names, but not in "
                    f"{each.name.text!r}; capture it in all names, make it a dim, or "
                    f"{_LIST_IT}"
                )
        self.listed = [
            number
            for number, each in enumerate(self.targets)
            if each.keys & (each.axes | (each.reduced - rule.sizes.keys()))
        ]
        self.names = frozenset().union(*(each.names | each.axes for each in every))
        self.wanted = {
            number
            for number in range(len(self.sources))
            if not any(target.has_sum for target in self.targets)
        }
        self.needed = {n for n in self.wanted if self.sources[n].main is None}


def _parsed(
    rule: Rule,
    key: str,
    pattern: TensorPattern,
    main: int | None,
    forms: Mapping[str, str],
) -> Tensor:
    place = f"{rule.text}.{key}[{pattern.name!r}]"
    try:
        nodes, blocks = dims.parse(pattern.dims, has_blocks=main is not None)
        name = names.parse(pattern.name, forms)
        made = Tensor(pattern, name, nodes, blocks, place, main)
        for each in (pattern.scale, pattern.shift, *blocks):
            sizes.names(each)
        _check_options(made, is_target=key == "to")
    except LayoutError as error:
        raise LayoutError(f"{place}: {error}") from None
    return made


def _check_options(tensor: Tensor, *, is_target: bool) -> None:
    pattern, reduced = tensor.pattern, tensor.pattern.reduced
    inexact = {*pattern.mean, *pattern.sum}
    indices = [each.node for each in tensor.name.captures if each.is_index]
    ways = [each for each in (pattern.replicated, pattern.mean, pattern.sum) if each]
    operands = (*pattern.times, *pattern.plus)
    others = (pattern.shift, pattern.copy, inexact, operands)
    for is_wrong, problem in (
        (len(ways) > 1, "choose one of `replicated`, `mean` and `sum`"),
        (
            inexact and (pattern.copy or operands),
            "`mean` and `sum` cannot be combined with `times`, `plus` or `copy`; "
            "convert twice, with a layout for each conversion",
        ),
        (
            inexact & dims.names(tensor.dims),
            "`mean` and `sum` reduce over captures and rank axes, not over dims",
        ),
        (
            is_target and {*pattern.sum} & tensor.names,
            "a sum cannot be inverted; set `only: forward`",
        ),
        (
            tensor.main is not None and any(others),
            "a tensor in `times` or `plus` cannot have the options `shift`, `copy`, "
            "`mean`, `sum`, `times` or `plus`",
        ),
        (
            len({*reduced}) < len(reduced),
            "a name is listed twice in `replicated`, `unchecked`, `mean` and `sum`",
        ),
        (
            tensor.reduced & (tensor.axes | dims.names(tuple(indices))),
            "a name that shards a dim or is in an index cannot also be reduced by "
            "`replicated`, `unchecked`, `mean` or `sum`",
        ),
    ):
        if is_wrong:
            raise LayoutError(problem)
    dims.check_names(tensor.nodes)
    for dtype in (pattern.dtype, pattern.viewed_as):
        if dtype is not None and dtype not in DTYPES:
            near = difflib.get_close_matches(dtype, DTYPES, n=1, cutoff=0.0)[0]
            raise LayoutError(
                f"{dtype!r} is not a supported dtype; the nearest is {near!r}"
            )


class Row(NamedTuple):
    """A tensor of an instance.

    Attributes:
      pattern: the index of its pattern among the sources.
      values: its rank on each axis, and the values of captures that are not kept.
    """

    pattern: int
    values: Items
    shape: tuple[int, ...]
    dtype: np.dtype
    name: str


class Made(NamedTuple):
    """A target that an instance makes.

    Attributes:
      pattern: the index of its pattern among the targets.
      captured: the values of captures that are not kept.
      sources: the dtype of each source and whether the source lacks scales.
    """

    pattern: int
    captured: Mapping[str, Value]
    shape: tuple[int, ...]
    sources: frozenset[tuple[np.dtype, bool]]


class Plan(NamedTuple):
    """The plan of an instance; instances that differ only in kept captures share it.

    Attributes:
      derived: the tensors derived from rows, which are indexed after the rows.
      moves: the moves from rows and derived tensors to targets.
      fills: boxes of padding, each as the target's index, the box's start and stop, and
        the value.
    """

    targets: list[Made]
    derived: list[Derived]
    moves: list[InstanceMove]
    fills: list[tuple[int, tuple[int, ...], tuple[int, ...], float]]
    sizes: Mapping[str, int]


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Strip:
    """A box of the coordinates that dims supply, beginning at index `start`."""

    start: tuple[int, ...]
    ranges: Mapping[str, Range]


class Slab(NamedTuple):
    """A box of coordinates in a tensor.

    Attributes:
      tensor: the index of the target, row or derived tensor.
      strip: the coordinates that dims supply.
      ranges: the ranges of all coordinates; those from the name advance along dim -1.
    """

    pattern: Tensor
    tensor: int
    strip: Strip
    ranges: Mapping[str, Range]


class Planner:
    """Plans an instance of a rule."""

    def __init__(
        self,
        rule: ParsedRule,
        state: str,
        rows: Sequence[Row],
        counts: Mapping[str, int],
        given: Sequence[TargetTensor | None],
        listed: Mapping[int, Sequence[dict[str, Value]]],
        shared: Mapping[str, int],
        name_of: Callable[[int, Mapping[str, Value]], str],
    ) -> None:
        """Solves the sizes of an instance, which has at least one row.

        `given` has, for each pattern, the existing target whose captures are 0.
        `listed` has the captures of existing targets for each pattern in
        `ParsedRule.listed`. `shared` has sizes from other rules. `name_of` returns a
        source's name from its index and capture values.

        Raises:
          LayoutError: if shapes do not match.
        """
        self._rule, self._state, self._rows = rule, state, rows
        self._given, self._listed, self._name_of = given, listed, name_of
        rest = len(rows[0].shape) - len(rule.sources[rows[0].pattern].dims) + 1
        self._sources = [each.with_rest(rest) for each in rule.sources]
        self._targets = [each.with_rest(rest) for each in rule.targets]
        self._counts = self._counted(counts)
        of_sources = frozenset().union(*(each.names for each in self._sources))
        of_targets = frozenset().union(
            *(each.names - each.axes - each.reduced for each in self._targets)
        )
        # Rank axes that are coordinates in the targets.
        self._coordinates = (of_targets - of_sources) & {
            key for row in rows for key, _ in row.values
        }
        self._strips = functools.cache(self._strips_of)
        self._points = functools.cache(self._points_of)
        self._along = functools.cache(self._along_of)
        self._expected = functools.cache(self._expected_of)
        self._places = functools.cache(self._places_of)
        self._arithmetic = functools.cache(self._arithmetic_of)
        solved = sizes.solve(rule.rule, list(self._equations()), shared)
        self._sizes = {n: int(s) for n, s in solved.items() if s.denominator == 1}
        self._numbers = {n: float(s) for n, s in solved.items()}
        self._derived: list[Derived] = []
        # For each row or derived tensor, the dtype for targets and whether scales are
        # missing.
        self._dtypes: dict[int, tuple[np.dtype, bool]] = {}

    def plan(self) -> Plan:
        """Plans the targets that the instance makes.

        Raises:
          LayoutError: if the sides do not match, so that an element would be filled
            twice or not at all.
        """
        by_names: dict[frozenset[str], tuple[list[Slab], list[Slab]]]
        by_names = collections.defaultdict(lambda: ([], []))
        for slab in self._source_slabs():
            by_names[frozenset(slab.ranges)][0].append(slab)
        held = set(by_names)
        has_sum = any(each.has_sum for each in (*self._sources, *self._targets))
        made: list[tuple[int, Mapping[str, Value], tuple[int, ...]]] = []
        for number, tensor in enumerate(self._targets):
            for captured in self._captured(number):
                items = tuple(captured.items())
                scope = self._scope(tensor, tensor.dims, self._ranks(tensor, items))
                shape = tuple(dims.whole(dims.length(n, scope)) for n in tensor.dims)
                slabs = list(self._slabs(tensor, len(made), items, shape))
                keys = [frozenset(each.ranges) - tensor.reduced for each in slabs]
                # An instance may lack all tensors of one addend in a name.
                if has_sum and not held.intersection(keys):
                    continue
                made.append((number, captured, shape))
                for key, slab in zip(keys, slabs, strict=True):
                    by_names[key][1].append(slab)
        moves: list[InstanceMove] = []
        fills = []
        pad = self._rule.rule.pad
        for key, (froms, tos) in by_names.items():
            padding = min(key & pad.keys(), default=None)
            if padding is not None and not (froms and tos):
                value = pad[padding] if self._state in _SHIFTED else 0.0
                for slab in tos:
                    factors = ((dim, by, n) for _, n, dim, by in slab.ranges.values())
                    boxes = boxes_of(slab.strip.start, factors)
                    fills += [(slab.tensor, *box, value) for box in boxes]
            elif padding is None and froms and tos:
                moves += self._moves(sorted(key), froms, tos)
            else:
                slab = (froms or tos)[0]
                near = min(
                    (each for two in by_names.values() for each in two[bool(froms)]),
                    key=lambda each: len(key ^ each.ranges.keys()),
                    default=slab,
                )
                shown = ", and ".join(
                    f"{e.pattern.name.text!r} has the coordinates ("
                    f"{' '.join(sorted(e.ranges.keys() - e.pattern.reduced))})"
                    for e in (slab, near)
                )
                raise LayoutError(
                    f"{slab.pattern.place}: {shown}; add the missing coordinate as a "
                    f"dim or capture, or {_LIST_IT}, or in `pad` if it is padding on "
                    "one side"
                )
        found: dict[int, set[tuple[np.dtype, bool]]] = collections.defaultdict(set)
        for target, _, _, source, _, _, _ in moves:
            found[target].add(self._dtypes[source])
        every = frozenset(self._dtypes.values())
        targets = [Made(*e, frozenset(found[n]) or every) for n, e in enumerate(made)]
        return Plan(targets, self._derived, moves, fills, self._sizes)

    def _counted(self, counts: Mapping[str, int]) -> dict[str, int]:
        # The number of ranks by axis, including axes from names or `widths`.
        every: list[tuple[Tensor, Iterable[tuple[str, Any]]]] = [
            *((self._sources[each.pattern], each.values) for each in self._rows),
            *(
                (self._targets[n], e.items())
                for n, es in self._listed.items()
                for e in es
            ),
        ]
        numbers = {
            each
            for tensor, values in every
            for each in (values if tensor.axes else ())
            if each[0] in tensor.axes
        }
        found = {axis: number + 1 for axis, number in sorted(numbers)}
        for axis, count in found.items():
            if count > counts.get(axis, count):
                raise LayoutError(
                    f"{self._rule.text}: names have {count} ranks of {axis}, but "
                    f"`ranks` or the checkpoint has {counts[axis]}; correct `ranks` or "
                    "the names"
                )
        listed = {
            axis: len(widths)
            for by_axis in self._rule.rule.widths.values()
            for axis, widths in by_axis.items()
        }
        return {**listed, **found, **counts}

    def _equations(self) -> Iterator[sizes.Equation]:
        shapes: dict[tuple[int, tuple[int, ...], Ranks], str] = {}
        most: dict[tuple[int, str, Ranks], int] = {}
        for row in self._rows:
            tensor = self._sources[row.pattern]
            ranks = self._ranks(tensor, row.values)
            shapes.setdefault((row.pattern, row.shape, ranks), row.name)
            for key, value in row.values:
                if key in tensor.keys - tensor.reduced:
                    at = (row.pattern, key, ranks if "@" in key else ())
                    most[at] = max(most.get(at, 0), value + 1)
        for (number, shape, ranks), name in sorted(shapes.items()):
            yield from _of_shape(self._sources[number], name, shape, dict(ranks))
        for (number, key, ranks), count in most.items():
            tensor = self._sources[number]
            (capture,) = (each for each in tensor.name.captures if each.key == key)
            count = len(capture.choices) or count
            origin = f"the number of values of {{{key}}} in {tensor.place}"
            # An addend may have no tensors.
            has_sum = any(isinstance(n, dims.Sum) for n in dims.walk([capture.node]))
            yield sizes.Equation(capture.node, count, dict(ranks), origin, has_sum)
        for tensor, given in zip(self._targets, self._given, strict=False):
            ranks = self._ranks(tensor, tuple((key, 0) for key in tensor.keys))
            if given is not None:
                yield from _of_shape(tensor, given.name, given.shape, dict(ranks))
        for axis in self._coordinates:
            origin = f"{self._rule.text}: the number of ranks of {axis}"
            yield sizes.Equation(dims.Name(axis), self._counts.get(axis, 1), {}, origin)

    def _ranks(self, tensor: Tensor, values: Items) -> Ranks:
        # For each axis that shards a tensor, its rank and the number of ranks.
        counts, axes = self._counts, tensor.axes
        return tuple([(a, (n, counts.get(a, 1))) for a, n in values if a in axes])

    def _scope(
        self, tensor: Tensor, nodes: Sequence[dims.Node], ranks: Ranks
    ) -> dims.Scope:
        self._need(tensor, dims.names(tuple(nodes)), self._sizes)
        return dims.Scope(self._sizes, dict(ranks), self._rule.rule.widths)

    def _need(
        self, tensor: Tensor, used: frozenset[str], known: Mapping[str, object]
    ) -> None:
        if missing := sorted(sizes.unknown(used, self._rule.rule, known)):
            given = map(self._rule.rule.sizes.get, missing)
            absent = [e.missing for e in given if isinstance(e, CheckpointValue)]
            first, *_ = missing
            told = (
                f"the number of ranks of {first}; set `ranks: {{{first}: N}}`"
                if first in tensor.axes
                else f"the sizes of {', '.join(missing)}; set them in `sizes`, or with "
                f"`--size {first}=...`"
            )
            raise UnknownSizeError(
                f"{tensor.place}: nothing determines {'; '.join([told, *absent])}"
            )

    def _captured(self, number: int) -> Sequence[dict[str, Value]]:
        # The captures of each target of a pattern.
        if number in self._listed:
            return self._listed[number]
        tensor = self._targets[number]
        widths, known = self._rule.rule.widths, {**self._counts, **self._sizes}
        captures = [e for e in tensor.name.captures if e.key not in self._rule.kept]
        found: list[dict[str, Value]] = [{}]
        # Ranks come first because each may have its own number of other captures.
        for each in sorted(captures, key=lambda each: each.key not in tensor.axes):
            self._need(tensor, dims.names((each.node,)), known)
            scopes = (
                dims.Scope(known, dict(self._ranks(tensor, (*v.items(),))), widths)
                for v in found
            )
            counts = [dims.whole(dims.length(each.node, scope)) for scope in scopes]
            if sum(counts) > MOST_TARGETS:
                raise LayoutError(
                    f"{tensor.place}: this pattern would make {sum(counts)} tensors, "
                    "which is too many; correct the sizes"
                )
            found = [
                {**values, each.key: value}
                for values, count in zip(found, counts, strict=True)
                for value in range(count)
            ]
        return found

    def _slabs(
        self, tensor: Tensor, number: int, values: Items, shape: tuple[int, ...]
    ) -> Iterator[Slab]:
        ranks = self._ranks(tensor, values)
        points: dict[str, Range] = {}
        for key, value in values:
            points |= self._points(tensor, key, value, ranks)
        for strip in self._strips(tensor, shape, ranks):
            yield Slab(tensor, number, strip, {**points, **strip.ranges})

    def _points_of(
        self, tensor: Tensor, key: str, value: Value, ranks: Ranks
    ) -> dict[str, Range]:
        # The coordinates that a captured value or a rank supplies.
        if key in tensor.axes | tensor.reduced or isinstance(value, str):
            return {}
        nodes = [each.node for each in tensor.name.captures if each.key == key]
        (node,) = nodes or [dims.Name(key)]
        strips = dims.cut(node, value, value + 1, self._scope(tensor, [node], ranks))
        return {
            name: (first, count, -1, 0)
            for _, ranges in strips
            for name, (first, count, _) in ranges.items()
        }

    def _strips_of(
        self, tensor: Tensor, shape: tuple[int, ...], ranks: Ranks
    ) -> list[Strip]:
        scope = self._scope(tensor, tensor.dims, ranks)
        by_dim = [
            dims.cut(node, 0, length, scope)
            for node, length in zip(tensor.dims, shape, strict=True)
        ]
        found = []
        for chosen in itertools.product(*by_dim):
            ranges = {
                name: (first, count, dim, step)
                for dim, (_, of_dim) in enumerate(chosen)
                for name, (first, count, step) in of_dim.items()
            }
            if tensor in self._sources:
                # Only the first index of a dim that the other side lacks is read.
                left_out = tensor.reduced & ranges.keys()
                if any(ranges[name][0] for name in left_out):
                    continue
                ranges = {n: each for n, each in ranges.items() if n not in left_out}
            found.append(Strip(tuple(at for at, _ in chosen), ranges))
        return found

    def _source_slabs(self) -> Iterator[Slab]:
        groups: dict[Key, list[int]] = {}
        used = [
            (each.axes | each.keys | self._coordinates) - each.reduced
            for each in self._sources
        ]
        for number, row in enumerate(self._rows):
            key = (row.pattern, _only(used[row.pattern], row.values))
            groups.setdefault(key, []).append(number)
        others = self._others()
        unused = set(groups)
        for (number, values), members in groups.items():
            tensor = self._sources[number]
            if not tensor.is_original:
                continue
            chosen = self._chosen(tensor, members)
            row = self._rows[chosen[0]]
            beside = {}
            for other in others[number]:
                key = other, _only(used[other], row.values)
                if key in groups:
                    beside[other] = self._chosen(self._sources[other], groups[key])
                    unused.discard(key)
            made = self._made_of(number, chosen, beside)
            yield from self._slabs(tensor, made, values, row.shape)
        for number, _ in unused:
            tensor = self._sources[number]
            if tensor.main is not None or tensor.pattern.copy == "checked":
                raise LayoutError(
                    f"{tensor.place}: a tensor matches, but its main tensor, with the "
                    "same dims, captures and options, is missing; use the whole "
                    "checkpoint or, if the tensor is a copy, set `copy: unchecked`"
                )

    def _chosen(self, tensor: Tensor, members: Sequence[int]) -> Sequence[int]:
        # The rows of a tensor that must be read.
        if len(members) == 1:
            return members
        values = [dict(self._rows[number].values) for number in members]
        first = values[0]
        differing = {k for each in values for k in each if each[k] != first.get(k)}
        unused = sorted(differing - tensor.reduced)
        if unused or not differing:
            raise LayoutError(
                f"{tensor.place}: the tensor occurs for multiple values of "
                f"{', '.join(unused)}, which the rule does not use; {_LIST_IT}, or "
                "shard a dim over it with @"
            )
        unchecked = tensor.pattern.unchecked
        return [
            number
            for number, each in zip(members, values, strict=True)
            if all(each.get(key) == first.get(key) for key in unchecked)
        ]

    def _others(self) -> dict[int, list[int]]:
        # For each source, the tensors that change it or are compared with it.
        found: dict[int, list[int]] = collections.defaultdict(list)
        present = sorted({row.pattern for row in self._rows})
        for number, tensor in enumerate(self._sources):
            if tensor.main is not None:
                found[tensor.main].append(number)
            elif tensor.pattern.copy == "checked":
                alike = (n for n in present if _are_alike(tensor, self._sources[n]))
                found[next(alike, -1)].append(number)
        return found

    def _made_of(
        self, number: int, chosen: Sequence[int], beside: Mapping[int, Sequence[int]]
    ) -> int:
        # The index of the row, or of the tensor derived from multiple rows.
        tensor, row = self._sources[number], self._rows[chosen[0]]
        pattern, made, dtype = tensor.pattern, chosen[0], row.dtype
        # 8-bit floats always need scales; integers need them only if the rule has any.
        needs_scales = bool(pattern.times) or _category(dtype) is np.floating
        lacks_scales = needs_scales and _is_quantized(dtype)
        is_alone = len(chosen) == 1 and not beside and not pattern.viewed_as
        if is_alone and not pattern.mean and not pattern.sum:
            self._dtypes[made] = dtype, lacks_scales
            return made
        how: How = "mean" if pattern.mean else "sum" if pattern.sum else "equal"
        if how != "equal" and len(chosen) != self._expected(number):
            raise LayoutError(
                f"{tensor.place}: the checkpoint has only {len(chosen)} of "
                f"{self._expected(number)} over {', '.join(sorted(tensor.reduced))}, "
                "but a mean or sum needs all of them; use the whole checkpoint"
            )
        rank = len(row.shape)
        operands = [
            Operand(n, (*range(rank),), (1,) * rank, tensor.view) for n in chosen
        ]
        factor = 1.0
        changing = [n for n in beside if self._sources[n].main is not None]
        for other, rows in beside.items():
            each, shape = self._sources[other], self._rows[rows[0]].shape
            places = self._along(number, other, row.shape, shape)
            operands += [Operand(n, *places, each.view) for n in rows]
            if other in changing:
                factor *= self._number(each, each.pattern.scale)
                is_real = _category(self._rows[rows[0]].dtype) is np.floating
                if not is_real and each.pattern.dtype is None:
                    raise LayoutError(
                        f"{each.place}: the tensor is not floating-point; set "
                        "`as: float8_e8m0fnu` if its bytes are exponents, as in MXFP4, "
                        "or `dtype: float32` if its integers are factors"
                    )
        if changing:
            how = "plus" if pattern.plus else "times"
            needed = [n for n, each in enumerate(self._sources) if each.main == number]
            if changing != needed or len(operands) != 1 + len(needed):
                raise LayoutError(
                    f"{tensor.place}: this tensor and all tensors in `times` or `plus` "
                    "must occur exactly once because they are not compared; use the "
                    "whole checkpoint, and list in `unchecked` the coordinates in "
                    "which they differ"
                )
            if _is_quantized(dtype) and how == "plus":
                raise LayoutError(
                    f"{tensor.place}: {dtype} weights are meaningless without scales, "
                    "which `plus` does not apply; convert them to bfloat16 first"
                )
            dtype = _DEQUANTIZED if _is_quantized(dtype) else dtype
            lacks_scales = False
        if len(operands) > 1 or tensor.view is not None:
            self._derived.append(
                Derived(
                    how=how,
                    operands=tuple(operands),
                    shape=row.shape,
                    dtype=_wide(how, [self._rows[e.tensor].dtype for e in operands]),
                    factor=factor,
                )
            )
            made = len(self._rows) + len(self._derived) - 1
        self._dtypes[made] = dtype, lacks_scales
        return made

    def _expected_of(self, number: int) -> int:
        # The number of tensors that a mean or sum needs.
        pattern = self._sources[number].pattern
        values = [dict(row.values) for row in self._rows if row.pattern == number]
        return math.prod(
            max(len({each.get(name) for each in values}), self._counts.get(name, 1))
            for name in {*pattern.mean, *pattern.sum}
        )

    def _along_of(
        self,
        number: int,
        other: int,
        shape: tuple[int, ...],
        other_shape: tuple[int, ...],
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        # For each dim of `other`, the corresponding dim of `number` and the block.
        main, tensor = self._sources[number], self._sources[other]
        found: dict[int, tuple[int, int]] = {}
        free = dict(enumerate(main.dims))
        # Dims `1` come last and are matched with the remaining dims.
        order = sorted(enumerate(tensor.dims), key=lambda e: -len(_factors(e[1])))
        for dim, node in order:
            if main.pattern.plus and not dims.names((node,)) & main.names:
                found[dim] = -1, 1
                continue
            rests = {at: _rest(each, node) for at, each in free.items()}
            fitting = {at: rest for at, rest in rests.items() if rest is not None}
            if not fitting:
                break
            at = min(fitting, key=lambda each: len(fitting[each]))
            del free[at]
            block, rest = tensor.blocks[dim], dims.Product(fitting[at])
            size = self._number(tensor, block)
            size *= dims.length(rest, self._scope(tensor, [rest], ()))
            found[dim] = at, max(1, int(size))
        is_copy = tensor.main is None
        if len(found) < len(other_shape) or (is_copy and free):
            remedy = "multiply in a separate layout, and chain both with `through`"
            raise LayoutError(
                f"{tensor.place}: its dims {list(other_shape)} are neither the dims of "
                f"{main.name.text!r}, {list(shape)}, nor blocks of them, such as "
                f"`out/128`; {'set `copy: unchecked`' if is_copy else remedy}"
            )
        places = [found[dim] for dim in sorted(found)]
        for dim, (at, size) in enumerate(places):
            if at >= 0 and other_shape[dim] != (count := -(-shape[at] // size)):
                raise LayoutError(
                    f"{tensor.place}: dim {at} of {main.name.text!r} is {shape[at]}, "
                    f"which is {count} blocks of {size}, but dim {dim} of "
                    f"{tensor.name.text!r} is {other_shape[dim]}; correct the block "
                    "size"
                )
        return tuple(at for at, _ in places), tuple(size for _, size in places)

    def _moves(
        self, held: Sequence[str], froms: Sequence[Slab], tos: Sequence[Slab]
    ) -> Iterator[InstanceMove]:
        # The moves between elements with the same coordinates.
        sources, targets = _as_boxes(held, froms), _as_boxes(held, tos)
        into, of = box_join.overlaps(targets, sources)
        start = np.maximum(targets.start[into], sources.start[of])
        stop = np.minimum(targets.stop[into], sources.stop[of])
        for problem, slabs, whole, number in (
            ("no tensor fills the elements", tos, targets, into),
            ("no target includes the elements", froms, sources, of),
        ):
            covered = np.zeros(len(slabs), np.int64)
            np.add.at(covered, number, (stop - start).prod(axis=1))
            for at in np.flatnonzero(covered < whole.volumes)[:1]:
                found = Boxes(start=start[number == at], stop=stop[number == at])
                gap = box_cover.gaps(whole[at], found)[0]
                shown = ", ".join(
                    f"{name} {first}:{last}"
                    for name, first, last in zip(held, gap.start, gap.stop, strict=True)
                )
                name = self._name_of(
                    self._sources.index(froms[0].pattern),
                    dict(zip(held, gap.start, strict=True)),
                )
                if slabs is tos and "{" not in name:
                    shown += f"; {name!r} is missing or lacks them"
                raise LayoutError(f"{slabs[at].pattern.place}: {problem} {shown}")
        originals = {e.pattern for e in tos if not e.pattern.pattern.copy}
        is_doubled = len(box_join.overlaps(sources, sources)[0]) > len(sources)
        if is_doubled or len(originals) > 1:
            raise LayoutError(
                f"{(froms if is_doubled else tos)[0].pattern.place}: two elements have "
                f"the same coordinates ({' '.join(held)}); give each tensor or term "
                "of a sum its own dim name (with `sizes: {e: d}` if the sizes are "
                "equal), or set `copy: checked` if the tensor is a copy"
            )
        lengths, low = map(tuple, (stop - start).tolist()), start.tolist()
        pairs = zip(into.tolist(), of.tolist(), low, lengths, strict=True)
        for t, s, first, counts in pairs:
            target, source = tos[t], froms[s]
            places = self._places(
                target.pattern, target.strip, source.strip, tuple(held), counts
            )
            factors, target_dims, target_steps, source_dims, source_steps = places
            yield (
                target.tensor,
                factors,
                Side(
                    start=_start(target, held, first),
                    dims=target_dims,
                    steps=target_steps,
                ),
                source.tensor,
                Side(
                    start=_start(source, held, first),
                    dims=source_dims,
                    steps=source_steps,
                ),
                *self._arithmetic(source.pattern, target.pattern),
            )

    def _places_of(
        self,
        tensor: Tensor,
        into: Strip,
        of: Strip,
        held: Sequence[str],
        lengths: Sequence[int],
    ) -> tuple[tuple[int, ...], ...]:
        # The sizes of a move's factors, and the dims and steps on both sides. Factors
        # that are adjacent in both tensors are joined. A dim that the source lacks is
        # filled at all of its indices.
        counts = dict(zip(held, lengths, strict=True))
        repeated = tensor.reduced & into.ranges.keys()
        counts |= {name: into.ranges[name][1] for name in repeated}
        factors = [
            (count, into.ranges.get(name, _POINT)[2:], of.ranges.get(name, _POINT)[2:])
            for name, count in counts.items()
            if count > 1
        ]
        joined: list[tuple[int, Sequence[int], Sequence[int]]] = []
        for size, *sides in sorted(factors, key=lambda each: (each[2][0], -each[2][1])):
            if joined:
                before, *outer = joined[-1]
                if outer == [(dim, step * size) for dim, step in sides]:
                    size *= before
                    joined.pop()
            joined.append((size, sides[0], sides[1]))
        columns = zip(*((size, *a, *b) for size, a, b in joined), strict=True)
        return tuple(columns) or ((),) * 5

    def _number(self, tensor: Tensor, expression: float | str) -> float:
        self._need(tensor, sizes.names(expression), self._numbers)
        return sizes.value(expression, self._numbers)

    def _arithmetic_of(self, source: Tensor, target: Tensor) -> tuple[float, float]:
        # The scale and the shift of a move.
        numbers = [
            self._number(each, expression)
            for each in (source, target)
            for expression in (each.pattern.scale, each.pattern.shift)
        ]
        if not (numbers[0] and numbers[2]):
            raise LayoutError(f"{target.place}: a scale is 0; use a nonzero scale")
        scale = numbers[2] / numbers[0]
        shift = numbers[3] - numbers[1] * scale
        if self._state not in _POWERS and (scale, shift) != (1, 0):
            raise LayoutError(
                f"{target.place}: it is unknown how the state {self._state!r} changes "
                "when its parameter is scaled or shifted; in this rule, list only "
                "other states in `states`"
            )
        scale **= _POWERS.get(self._state, 1)
        return scale, shift if self._state in _SHIFTED else 0.0


def _of_shape(
    tensor: Tensor,
    name: str,
    shape: Sequence[int],
    ranks: Mapping[str, tuple[int, int]],
) -> Iterator[sizes.Equation]:
    if len(shape) != len(tensor.dims):
        raise LayoutError(
            f"{tensor.place}: {name!r} has shape {list(shape)}, but the rule has dims "
            f"{tensor.pattern.dims!r}; put rules for special tensors before this one"
        )
    for dim, (node, length) in enumerate(zip(tensor.dims, shape, strict=True)):
        if tensor.blocks[dim] == "1":
            origin = f"dim {dim} of {name!r} ({tensor.place})"
            yield sizes.Equation(node, length, ranks, origin)


def _only(keys: frozenset[str], values: Items) -> Items:
    return tuple(sorted([each for each in values if each[0] in keys]))


def _start(slab: Slab, held: Sequence[str], first: Sequence[int]) -> tuple[int, ...]:
    # The index of the element whose held coordinates are `first`.
    start = list(slab.strip.start)
    for name, at in zip(held, first, strict=True):
        origin, _, dim, step = slab.ranges[name]
        if at != origin:
            start[dim] += (at - origin) * step
    return tuple(start)


def _are_alike(copy: Tensor, original: Tensor) -> bool:
    # Whether a copy has the same coordinates and options as another tensor.
    keys = [
        (
            each.names - each.reduced,
            {c.key for c in each.name.captures} - each.reduced,
            (each.pattern.scale, each.pattern.shift, each.pattern.viewed_as),
        )
        for each in (copy, original)
    ]
    return original.is_original and keys[0] == keys[1]


def _factors(node: dims.Node) -> tuple[dims.Node, ...]:
    return node.parts if isinstance(node, dims.Product) else (node,)


def _rest(node: dims.Node, leading: dims.Node) -> tuple[dims.Node, ...] | None:
    # A node's factors after the factors of `leading`; None if the node does not begin
    # with them.
    factors, first = _factors(node), _factors(leading)
    return factors[len(first) :] if factors[: len(first)] == first else None


def _as_boxes(held: Sequence[str], slabs: Sequence[Slab]) -> Boxes:
    ranges = [[each.ranges[name][:2] for name in held] for each in slabs]
    table = np.array(ranges, np.int64).reshape(len(slabs), len(held), 2)
    return Boxes(start=table[..., 0], stop=table.sum(axis=-1))


def boxes_of(
    start: Sequence[int], factors: Iterable[tuple[int, int, int]]
) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The start and stop of each box that factored dims fill.

    Args:
      start: the index of the first element.
      factors: for each factor, the dim that it advances along, its step and its length.
    """
    by_dim: list[list[tuple[int, int]]] = [[(at, at + 1)] for at in start]
    held = (each for each in factors if each[0] >= 0)
    for dim, step, count in sorted(held, key=lambda each: each[1]):
        (first, last), *others = by_dim[dim]
        if not others and step == last - first:
            by_dim[dim] = [(first, first + step * count)]
        else:
            starts = itertools.product(range(count), by_dim[dim])
            by_dim[dim] = [(a + step * n, b + step * n) for n, (a, b) in starts]
    return [
        (tuple(a for a, _ in chosen), tuple(b for _, b in chosen))
        for chosen in itertools.product(*by_dim)
    ]


def _wide(how: str, dtypes: Sequence[np.dtype]) -> np.dtype:
    # The dtype to compute in: float32 or wider, except that sums of integers are exact.
    if how == "equal":
        return dtypes[0]
    if how == "sum" and _category(dtypes[0]) is np.integer:
        return np.dtype(np.int64)
    wide = (np.result_type(dtype, np.float32) for dtype in dtypes)
    return functools.reduce(np.promote_types, wide)


@functools.lru_cache(maxsize=2**12)
def target_dtype(
    tensor: Tensor, sources: frozenset[tuple[np.dtype, bool]], given: np.dtype | None
) -> np.dtype:
    """Determines the dtype of a target.

    Args:
      tensor: the target's pattern.
      sources: the dtype of each source and whether the source lacks scales that it
        needs.
      given: the existing target's dtype; None if there is no existing target.

    Raises:
      LayoutError: if the rule produces a different dtype, or needs a cast but has no
        `dtype`. The caller adds the target's name to the message.
    """
    written = tensor.pattern.dtype
    held = sorted({dtype for dtype, _ in sources}, key=str)
    made = np.dtype(written) if written else given or (held[0] if held else None)
    listed = ", ".join(map(str, held)) or "no dtype"
    is_unlike = any(made is None or _category(e) is not _category(made) for e in held)
    for is_wrong, problem in (
        (
            given not in (None, made),
            f"is {given} in the target but {written} in the rule; make them equal",
        ),
        (
            not (written or given) and len(held) != 1,
            f"has sources with dtypes {listed}; set `dtype` in the rule",
        ),
        (
            not written and is_unlike,
            f"is {made} in the target but {listed} in the source; set"
            f" `dtype: {made}` in the rule",
        ),
        (
            any(lacks_scales and dtype != made for dtype, lacks_scales in sources),
            f"is {made} in the target, but made from {listed} without scales; apply"
            " the scales with `times`, and use the whole checkpoint",
        ),
    ):
        if is_wrong:
            raise LayoutError(problem)
    assert made is not None
    return made


@functools.cache
def _is_quantized(dtype: np.dtype) -> bool:
    # Whether weights of this dtype may need scales: one byte each, or packed.
    return (dtype.itemsize == 1 and dtype != np.bool_) or dtype.name in (
        "int32",
        "uint32",
    )


def can_be(number: float, dtype: np.dtype) -> bool:
    """Whether a dtype can represent a number, possibly rounded."""
    with np.errstate(invalid="ignore"):
        cast = np.asarray(number, np.float64).astype(dtype)
    return _category(dtype) in (np.floating, np.complexfloating) or cast == number


@functools.cache
def _category(dtype: np.dtype) -> type:
    # A cast from one category to another needs `dtype` in the rule.
    for category in (np.bool_, np.integer, np.complexfloating):
        if np.issubdtype(dtype, category):
            return category
    # NumPy has no category for int4, bfloat16 and others.
    return np.integer if "int" in dtype.name else np.floating
