"""A rule, parsed, and the plan of its instances.

All tensors of a rule are cut into slabs: boxes of named coordinates, which captures,
rank axes and the factors of dims give. Slabs of both sides with the same names are
joined: where two of them meet, there is a copy. What is no copy is a derived tensor:
replicas that are compared, means, sums, weights and their scales.
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

from elastic_ckpt.core import box_join, errors
from elastic_ckpt.core.boxes import Boxes
from elastic_ckpt.universal.new_moves import Derived, Operand, Side, TargetTensor
from elastic_ckpt.universal.new_rules import dims, names, sizes
from elastic_ckpt.universal.new_rules.names import Value
from elastic_ckpt.universal.rules.checkpoint_value import CheckpointValue
from elastic_ckpt.universal.rules.layout_error import LayoutError
from elastic_ckpt.universal.rules.rule import (
    COPIES,
    POWERS,
    SHIFTED,
    Rule,
    TensorPattern,
)

# Empty tensors may have dims of any size, of which targets are made.
MOST_TARGETS = 1 << 20
# What elements can be of.
DTYPES = (
    "bool",
    *(f"{sign}int{bits}" for sign in ("", "u") for bits in (4, 8, 16, 32, 64)),
    *("bfloat16", "float16", "float32", "float64", "complex64", "complex128"),
    *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"),
    *("float8_e4m3", "float8_e3m4", "float8_e4m3b11fnuz", "float8_e8m0fnu"),
    "float4_e2m1fn",
)
# Of a quantized weight that is multiplied by its scales.
_DEQUANTIZED = np.dtype(ml_dtypes.bfloat16)
_LIST_IT = "list it in `replicated`, `unchecked`, `mean` or `sum`"

# Values of captures, or numbers of ranks, by their keys.
Items = tuple[tuple[str, Any], ...]
# What identifies a tensor of an instance: its pattern, captures, and ranks.
Key = tuple[int, Items, Items]
# Boxes of a tensor: where each begins, and the ranges of its names, as of `Slab`.
Strips = list[tuple[tuple[int, ...], dict[str, tuple[int, int, int, int]]]]
How = Literal["equal", "mean", "sum", "times", "plus"]


class UnknownSizeError(LayoutError):
    """Shapes do not determine a size; those of another rule may."""


@dataclasses.dataclass(frozen=True, eq=False)
class Tensor:
    """A tensor pattern, parsed.

    Attributes:
      pattern: as it was written.
      name: its name pattern.
      dims: the node of each dim.
      blocks: of each dim, how many indices of the tensor that it multiplies share one.
      place: for messages.
      main: the number of the source that it multiplies, or is added to; None if it is
        no such operand.
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
        """The dtype that its bytes are read as; None for its own."""
        dtype = self.pattern.viewed_as
        return None if dtype is None else np.dtype(dtype)

    @functools.cached_property
    def nodes(self) -> tuple[dims.Node, ...]:
        """Those of its captures, then those of its dims."""
        return (*(each.node for each in self.name.captures), *self.dims)

    @functools.cached_property
    def names(self) -> frozenset[str]:
        """The names of its captures and dims."""
        return dims.names(self.nodes)

    @functools.cached_property
    def axes(self) -> frozenset[str]:
        """The rank axes that shard it."""
        return dims.axes(self.nodes)

    @functools.cached_property
    def numbered(self) -> frozenset[str]:
        """The rank axes whose number is in its name."""
        return self.axes & {each.key for each in self.name.captures}

    @functools.cached_property
    def has_sum(self) -> bool:
        """Whether a capture is the index of a sum."""
        nodes = [each.node for each in self.name.captures]
        return any(isinstance(node, dims.Sum) for node in dims.walk(nodes))

    def with_rest(self, count: int) -> Tensor:
        """It with as many named dims in place of `...`."""
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
    """A rule, parsed and checked.

    Attributes:
      rule: as it was written, with the sizes and widths of its layout.
      text: its place, for people.
      sources: the tensors of the checkpoint; operands of others are last.
      targets: the tensors that are made.
      numbers: the captures whose values are numbers.
      kept: the captures that all names have; the rule holds for each of their values.
      forms: of captures that are texts, which hold in all names.
      wanted: the sources that an instance has.
      needed: those of them without which it makes nothing.
      has_operands: whether some sources change others.
    """

    def __init__(self, rule: Rule) -> None:
        """Parses a rule.

        Raises:
          LayoutError: if it cannot fit any checkpoint.
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
        self.has_operands = any(each.main is not None for each in every)
        coordinates = frozenset().union(
            *(dims.names(each.dims) | each.axes for each in every),
            *(each.reduced for each in self.targets),
            *(dims.names((each.node,)) for each in captures if each.is_index),
        )
        always = {each.key for each in captures if each.is_number(())}
        self.numbers = coordinates | always
        self.kept = tuple(
            dict.fromkeys(
                capture.key
                for each in every
                for capture in each.name.captures
                if not dims.names((capture.node,)) & (coordinates | each.reduced)
            )
        )
        for key, each in itertools.product(self.kept, every):
            if key not in each.name.names or key in each.reduced:
                raise LayoutError(
                    f"{self.text}: {{{key}}} is in some names, and not in "
                    f"{each.name.text!r}; capture it in all, make it a dim, or "
                    f"{_LIST_IT}"
                )
        has_sum = any(each.has_sum for each in self.targets)
        self.wanted = set() if has_sum else set(range(len(self.sources)))
        self.needed = {
            number
            for number in self.wanted
            if self.sources[number].main is None
            if not self.sources[number].pattern.copy
        }


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
        for each in (pattern.scale, pattern.shift):
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
            "`mean` and `sum` cannot be combined with `times`, `plus` and `copy`; "
            "convert twice, with a layout for each",
        ),
        (
            inexact & dims.names(tensor.dims),
            "`mean` and `sum` are over captures and rank axes, and not over dims",
        ),
        (
            is_target and {*pattern.sum} & tensor.names,
            "a sum cannot be undone; write `only: forward`",
        ),
        (
            tensor.main is not None and any(others),
            "a tensor of `times` or `plus` has none of the options `shift`, `copy`, "
            "`mean`, `sum`, `times` and `plus`",
        ),
        (len({*reduced}) < len(reduced), "a name is listed twice"),
        (
            tensor.reduced & (tensor.axes | dims.names(tuple(indices))),
            "what shards a dim, or is in an index, cannot be reduced too",
        ),
    ):
        if is_wrong:
            raise LayoutError(problem)
    dims.parts(tensor.nodes)
    for dtype in (pattern.dtype, pattern.viewed_as):
        if dtype not in (None, *DTYPES):
            near = difflib.get_close_matches(dtype, DTYPES, n=1, cutoff=0.0)[0]
            raise LayoutError(
                f"{dtype!r} is no dtype of elements; the nearest is {near!r}"
            )


class Row(NamedTuple):
    """A tensor of an instance, without its name.

    Attributes:
      pattern: the number of its pattern among the sources.
      captured: the values of captures that are not kept.
      ranks: of the rank that saved it, by axis.
      shape: in elements.
      dtype: of its elements.
    """

    pattern: int
    captured: Items
    ranks: Items
    shape: tuple[int, ...]
    dtype: np.dtype


class Slab(NamedTuple):
    """A box of coordinates in a tensor.

    Attributes:
      pattern: of the tensor.
      tensor: its number: of the target, or of the row or derived tensor.
      start: the index of its first element.
      ranges: by name, the first coordinate, their number, the dim that it advances
        along (-1 if it is in the name), and by how much.
    """

    pattern: Tensor
    tensor: int
    start: tuple[int, ...]
    ranges: dict[str, tuple[int, int, int, int]]


class Made(NamedTuple):
    """A target that an instance makes.

    Attributes:
      pattern: the number of its pattern.
      captured: the values of captures that are not kept.
      shape: in elements.
      sources: the dtypes of its sources, and whether scales are missing.
    """

    pattern: int
    captured: dict[str, Value]
    shape: tuple[int, ...]
    sources: frozenset[tuple[np.dtype, bool]]


class Copy(NamedTuple):
    """A move between numbers: of the target, and of the row or derived tensor."""

    target: int
    sizes: tuple[int, ...]
    target_side: Side
    source: int
    source_side: Side
    scale: float
    shift: float


@dataclasses.dataclass(frozen=True)
class Plan:
    """What an instance makes; those that differ in kept captures share one.

    Attributes:
      targets: the tensors that it makes.
      derived: the tensors that it derives, of rows; their numbers follow those.
      copies: into the targets.
      fills: by target, a box of padding, and its value.
      sizes: of the names.
    """

    targets: list[Made]
    derived: list[Derived]
    copies: list[Copy]
    fills: list[tuple[int, tuple[int, ...], tuple[int, ...], float]]
    sizes: Mapping[str, int]


class Tree(NamedTuple):
    """The targets that exist, for one instance.

    Attributes:
      first: of each target pattern, the tensor whose captures are 0; None if it is not
        there.
      search: the captures of the tensors that match a target pattern, by its number.
    """

    first: Sequence[TargetTensor | None]
    search: Callable[[int], Sequence[Mapping[str, Value]]]


class Planner:
    """Plans an instance of a rule.

    Attributes:
      sizes: of the names.
    """

    def __init__(
        self,
        rule: ParsedRule,
        state: str,
        rows: Sequence[Row],
        counts: Mapping[str, int],
        tree: Tree | None,
        shared: Mapping[str, int],
    ) -> None:
        """Solves the sizes of an instance.

        Args:
          rule: the rule.
          state: the kind of its tensors.
          rows: its tensors, at least one.
          counts: the number of ranks by axis.
          tree: the targets that exist; None if they are those that the rule makes.
          shared: sizes that other rules know.

        Raises:
          LayoutError: if shapes do not fit.
        """
        self._rule, self._state, self._rows, self._tree = rule, state, rows, tree
        rest = len(rows[0].shape) - len(rule.sources[rows[0].pattern].dims) + 1
        self._sources = [each.with_rest(rest) for each in rule.sources]
        self._targets = [each.with_rest(rest) for each in rule.targets]
        self._listed = {
            number: tree.search(number)
            for number, each in enumerate(self._targets)
            if tree and any(self._is_unknown(each, c) for c in each.name.captures)
        }
        self._counts = dict(counts)
        for axis, count in self._numbered_ranks():
            self._counts[axis] = max(self._counts.get(axis, 1), count)
        of_targets = frozenset().union(*(e.names - e.axes for e in self._targets))
        of_sources = frozenset().union(*(each.names for each in self._sources))
        # Rank axes that are coordinates of targets.
        self._coordinates = (of_targets - of_sources) & counts.keys()
        self._ranks = functools.cache(self._ranks_of)
        self._strips = functools.cache(self._strips_of)
        self._points = functools.cache(self._points_of)
        self._shape = functools.cache(self._shape_of)
        self._arithmetic = functools.cache(self._arithmetic_of)
        self._along = functools.cache(self._along_of)
        self._used_ranks = functools.cache(self._used_ranks_of)
        self._expected = functools.cache(self._expected_of)
        solved = sizes.solve(rule.rule, list(self._equations()), shared)
        self.sizes = {n: int(s) for n, s in solved.items() if s.denominator == 1}
        self._numbers = {n: float(s) for n, s in solved.items()}
        self._derived: list[Derived] = []
        # Of rows and derived tensors: the dtype of targets, and whether scales miss.
        self._dtypes: dict[int, tuple[np.dtype, bool]] = {}

    def plan(self) -> Plan:
        """The copies of the instance, and what it makes.

        Raises:
          LayoutError: if the sides do not fit: an element is filled twice or never.
        """
        by_names: dict[frozenset[str], tuple[list[Slab], list[Slab]]]
        by_names = collections.defaultdict(lambda: ([], []))
        for slab in self._source_slabs():
            by_names[frozenset(slab.ranges)][0].append(slab)
        held = set(by_names)
        has_sum = any(each.has_sum for each in (*self._sources, *self._targets))
        made: list[tuple[int, dict[str, Value], tuple[int, ...]]] = []
        for number, tensor in enumerate(self._targets):
            for captured in self._captured(number):
                items = tuple(captured.items())
                shape = self._shape(tensor, self._ranks(tensor, (), items))
                slabs = self._slabs(tensor, len(made), items, shape, ())
                keys = [frozenset(each.ranges) - tensor.reduced for each in slabs]
                # An instance may lack what only one addend of a name has.
                if has_sum and not held.intersection(keys):
                    continue
                made.append((number, captured, shape))
                for key, slab in zip(keys, slabs, strict=True):
                    by_names[key][1].append(slab)
        copies: list[Copy] = []
        fills = []
        pad = self._rule.rule.pad
        for key, (froms, tos) in by_names.items():
            padding = min(key & pad.keys(), default=None)
            if padding is not None and not (froms and tos):
                value = pad[padding] if self._state in SHIFTED else 0.0
                for slab in tos:
                    factors = ((dim, by, n) for _, n, dim, by in slab.ranges.values())
                    boxes = boxes_of(slab.start, factors)
                    fills += [(slab.tensor, *box, value) for box in boxes]
            elif padding is None and froms and tos:
                copies += self._copies(sorted(key), froms, tos)
            else:
                self._check_empty(froms or tos, padding, by_names)
        found: dict[int, set[tuple[np.dtype, bool]]] = collections.defaultdict(set)
        for each in copies:
            found[each.target].add(self._dtypes[each.source])
        targets = [Made(*each, frozenset(found[n])) for n, each in enumerate(made)]
        return Plan(targets, self._derived, copies, fills, self.sizes)

    def _is_unknown(self, tensor: Tensor, capture: names.Capture) -> bool:
        # Whether only targets that exist tell the values of a capture.
        is_sized = capture.key in self._rule.rule.sizes or bool(capture.choices)
        is_repeated = capture.key in tensor.reduced and not is_sized
        return capture.key in tensor.axes or is_repeated

    def _numbered_ranks(self) -> Iterator[tuple[str, int]]:
        # Rank axes that are numbers in names, and how many there are at least.
        for row in self._rows:
            numbered = self._sources[row.pattern].numbered
            yield from ((k, v + 1) for k, v in row.captured if k in numbered)
        for number, found in self._listed.items():
            numbered = self._targets[number].numbered
            for captured in found:
                yield from ((k, v + 1) for k, v in captured.items() if k in numbered)

    def _equations(self) -> Iterator[sizes.Equation]:
        shapes: set[tuple[int, tuple[int, ...], Items]] = set()
        most: dict[tuple[int, str, Items], int] = {}
        for row in self._rows:
            tensor = self._sources[row.pattern]
            ranks = self._row_ranks(tensor, row)
            shapes.add((row.pattern, row.shape, ranks))
            for key, value in row.captured:
                if key not in tensor.reduced:
                    at = (row.pattern, key, ranks if "@" in key else ())
                    most[at] = max(most.get(at, 0), value + 1)
        for number, shape, ranks in sorted(shapes):
            yield from _of_shape(self._sources[number], shape, dict(ranks))
        for (number, key, ranks), count in most.items():
            tensor = self._sources[number]
            (capture,) = (each for each in tensor.name.captures if each.key == key)
            count = len(capture.choices) or count
            origin = f"the number of values of {{{key}}} in {tensor.place}"
            # An addend may have no tensors.
            has_sum = any(isinstance(n, dims.Sum) for n in dims.walk([capture.node]))
            yield sizes.Equation(capture.node, count, dict(ranks), origin, has_sum)
        for number, given in enumerate(self._tree.first if self._tree else ()):
            tensor = self._targets[number]
            ranks = self._ranks(
                tensor, (), tuple((axis, 0) for axis in tensor.numbered)
            )
            if given is not None:
                yield from _of_shape(tensor, given.shape, dict(ranks))
        for axis in self._coordinates:
            count, origin = self._counts[axis], f"the number of ranks of {axis}"
            yield sizes.Equation(dims.Name(axis), count, {}, origin)

    def _ranks_of(self, tensor: Tensor, ranks: Items, captured: Items) -> Items:
        # By axis that shards a tensor: the number of its rank, and of all.
        values = {**dict(ranks), **dict(captured)}
        return tuple(
            (axis, (values[axis], self._counts.get(axis, 1)))
            for axis in sorted(tensor.axes & values.keys())
        )

    def _row_ranks(self, tensor: Tensor, row: Row) -> Items:
        return self._ranks(tensor, row.ranks, row.captured if tensor.numbered else ())

    def _scope(
        self, tensor: Tensor, nodes: Sequence[dims.Node], ranks: Items
    ) -> dims.Scope:
        self._need(tensor, dims.names(tuple(nodes)), self.sizes)
        return dims.Scope(self.sizes, dict(ranks), self._rule.rule.widths)

    def _need(
        self, tensor: Tensor, used: frozenset[str], known: Mapping[str, float]
    ) -> None:
        if missing := sorted(used - known.keys()):
            given = [self._rule.rule.sizes.get(name) for name in missing]
            absent = [
                each.missing for each in given if isinstance(each, CheckpointValue)
            ]
            raise UnknownSizeError(
                f"{tensor.place}: the sizes of {', '.join(missing)} are not determined; "
                f"give them in `sizes`, or by `--size {missing[0]}=...`"
                + "".join(f"; {each}" for each in absent)
            )

    def _captured(self, number: int) -> list[dict[str, Value]]:
        # The captures of each target of a pattern.
        tensor = self._targets[number]
        found: list[dict[str, Value]] = [{}]
        # The number of layers may depend on the stage.
        for capture in sorted(tensor.name.captures, key=lambda each: "@" in each.key):
            if capture.key not in self._rule.kept:
                found = [
                    {**each, capture.key: value}
                    for each in found
                    for value in self._values(number, capture, each)
                ]
            if len(found) > MOST_TARGETS:
                raise LayoutError(
                    f"{tensor.place}: it makes over {MOST_TARGETS} tensors"
                )
        return found

    def _values(
        self, number: int, capture: names.Capture, captured: dict[str, Value]
    ) -> Iterable[Value]:
        # The values of a capture; `captured` are those of captures before it.
        tensor, key = self._targets[number], capture.key
        if key in tensor.axes and key in self._counts:
            return range(self._counts[key])
        if self._is_unknown(tensor, capture):
            if not self._listed.get(number):
                raise LayoutError(
                    f"{tensor.place}: nothing tells the values of {{{key}}}; give "
                    "`sizes` or `ranks`, or write `only: forward`"
                )
            return dict.fromkeys(each[key] for each in self._listed[number])
        if capture.choices:
            return range(len(capture.choices))
        ranks = self._ranks(tensor, (), tuple(captured.items()))
        scope = self._scope(tensor, [capture.node], ranks)
        return range(dims.whole(dims.length(capture.node, scope)))

    def _shape_of(self, tensor: Tensor, ranks: Items) -> tuple[int, ...]:
        scope = self._scope(tensor, tensor.dims, ranks)
        return tuple(dims.whole(dims.length(node, scope)) for node in tensor.dims)

    def _slabs(
        self,
        tensor: Tensor,
        number: int,
        captured: Items,
        shape: tuple[int, ...],
        ranks: Items,
    ) -> list[Slab]:
        held = self._ranks(tensor, ranks, captured if tensor.numbered else ())
        points: dict[str, tuple[int, int, int, int]] = {}
        for key, value in captured:
            points |= self._points(tensor, key, value, held)
        for axis, rank in ranks if self._coordinates else ():
            if axis in self._coordinates:
                points[axis] = (rank, 1, -1, 0)
        return [
            Slab(tensor, number, start, {**points, **ranges})
            for start, ranges in self._strips(tensor, shape, held)
        ]

    def _points_of(
        self, tensor: Tensor, key: str, value: Value, ranks: Items
    ) -> dict[str, tuple[int, int, int, int]]:
        # The coordinates that a captured value has.
        if key in tensor.axes | tensor.reduced:
            return {}
        assert isinstance(value, int)
        (node,) = (each.node for each in tensor.name.captures if each.key == key)
        strips = dims.cut(node, value, value + 1, self._scope(tensor, [node], ranks))
        return {
            name: (first, count, -1, 0)
            for _, ranges in strips
            for name, (first, count, _) in ranges.items()
        }

    def _strips_of(
        self, tensor: Tensor, shape: tuple[int, ...], ranks: Items
    ) -> Strips:
        scope = self._scope(tensor, tensor.dims, ranks)
        by_dim = [
            dims.cut(node, 0, length, scope)
            for node, length in zip(tensor.dims, shape, strict=True)
        ]
        return [
            (
                tuple(at for at, _ in strips),
                {
                    name: (first, count, dim, step)
                    for dim, (_, ranges) in enumerate(strips)
                    for name, (first, count, step) in ranges.items()
                },
            )
            for strips in itertools.product(*by_dim)
        ]

    def _source_slabs(self) -> Iterator[Slab]:
        groups: dict[Key, list[int]] = {}
        for number, row in enumerate(self._rows):
            groups.setdefault(self._key(row.pattern, row), []).append(number)
        others = self._others()
        used: set[Key] = set()
        for key, members in groups.items():
            tensor = self._sources[key[0]]
            if tensor.main is not None or tensor.pattern.copy:
                continue
            chosen = self._chosen(tensor, members)
            row = self._rows[chosen[0]]
            partners = {n: self._key(n, row) for n in others[key[0]]}
            used.update(partners.values())
            rows = {n: self._chosen(self._sources[n], groups[each])
                    for n, each in partners.items() if each in groups}  # fmt: skip
            made = self._made_of(key[0], chosen, rows)
            for slab in self._slabs(tensor, made, row.captured, row.shape, row.ranks):
                # Of a dim that the other side lacks, the first index is read.
                left_out = tensor.reduced & slab.ranges.keys()
                if all(slab.ranges[name][0] == 0 for name in left_out):
                    ranges = {n: r for n, r in slab.ranges.items() if n not in left_out}
                    yield slab._replace(ranges=ranges)
        for key in groups.keys() - used:
            tensor = self._sources[key[0]]
            if tensor.main is not None or tensor.pattern.copy == COPIES[0]:
                raise LayoutError(
                    f"{tensor.place}: a tensor matches it, but none matches what it "
                    "belongs to; use the whole checkpoint"
                )

    def _key(self, number: int, row: Row) -> Key:
        # What identifies the tensor of a pattern with the coordinates of a row.
        tensor, values = self._sources[number], dict(row.captured)
        left_out = {*tensor.reduced, *self._rule.kept}
        captured = tuple(
            (each.key, values.get(each.key))
            for each in tensor.name.captures
            if each.key not in left_out
        )
        return number, captured, self._used_ranks(tensor, row.ranks)

    def _used_ranks_of(self, tensor: Tensor, ranks: Items) -> Items:
        used = (tensor.axes | self._coordinates) - tensor.reduced
        return tuple(sorted(each for each in ranks if each[0] in used))

    def _chosen(self, tensor: Tensor, members: Sequence[int]) -> Sequence[int]:
        # Those of a group of rows that are read.
        if len(members) == 1:
            return members
        rows = [self._rows[number] for number in members]
        values = [{**dict(row.ranks), **dict(row.captured)} for row in rows]
        first = values[0]
        differing = {k for each in values for k in each if each[k] != first.get(k)}
        if unused := sorted(differing - tensor.reduced) or ([] if differing else ["?"]):
            raise LayoutError(
                f"{tensor.place}: it is there for several {', '.join(unused)}, which the"
                f" rule does not use; {_LIST_IT}, or shard a dim with @{unused[0]}"
            )
        return [
            number
            for number, each in zip(members, values, strict=True)
            if all(each.get(k) == first.get(k) for k in tensor.pattern.unchecked)
        ]

    def _others(self) -> dict[int, list[int]]:
        # By source, those that change it, or that it is compared with.
        found: dict[int, list[int]] = collections.defaultdict(list)
        present = {row.pattern for row in self._rows}
        for number, tensor in enumerate(self._sources):
            if tensor.main is not None:
                found[tensor.main].append(number)
            elif tensor.pattern.copy == COPIES[0] and number in present:
                alike = (n for n in present if _are_alike(tensor, self._sources[n]))
                original = min(alike, default=None)
                if original is None:
                    raise LayoutError(
                        f"{tensor.place}: no other tensor has the same dims, captures "
                        "and options, so that it could be compared; write `copy: "
                        "unchecked`"
                    )
                found[original].append(number)
        return found

    def _made_of(
        self, number: int, chosen: Sequence[int], others: Mapping[int, Sequence[int]]
    ) -> int:
        # The number of a row, or of what is derived of several.
        tensor, row = self._sources[number], self._rows[chosen[0]]
        pattern, made, dtype = tensor.pattern, chosen[0], row.dtype
        needs_scales = is_quantized if pattern.times else _is_small_float
        lacks_scales = needs_scales(dtype)
        how: How = "mean" if pattern.mean else "sum" if pattern.sum else "equal"
        if how != "equal" and len(chosen) != self._expected(number):
            raise LayoutError(
                f"{tensor.place}: it is there {len(chosen)} times of "
                f"{self._expected(number)} over {', '.join(sorted(tensor.reduced))}; a "
                "mean or sum needs all"
            )
        along = tuple(range(len(row.shape))), (1,) * len(row.shape)
        operands = [Operand(each, *along, tensor.view) for each in chosen]
        factor = 1.0
        changing = [n for n in others if self._sources[n].main is not None]
        for other, rows in others.items():
            each = self._sources[other]
            place = self._along(number, other, row.shape, self._rows[rows[0]].shape)
            operands += [Operand(n, *place, each.view) for n in rows]
            if other in changing:
                factor *= self._number(each, each.pattern.scale)
                _check_factor(each, self._rows[rows[0]].dtype)
        if changing:
            how = "plus" if pattern.plus else "times"
            self._check_changed(number, changing, len(operands))
            if is_quantized(dtype):
                dtype, lacks_scales = _DEQUANTIZED, how == "plus"
        if len(operands) > 1 or pattern.viewed_as:
            wide = row.dtype
            if how != "equal":
                wide = _wide(how, [self._rows[each.tensor].dtype for each in operands])
            self._derived.append(
                Derived(
                    how=how,
                    operands=tuple(operands),
                    shape=row.shape,
                    dtype=wide,
                    factor=factor,
                )
            )
            made = len(self._rows) + len(self._derived) - 1
        self._dtypes[made] = dtype, lacks_scales
        return made

    def _expected_of(self, number: int) -> int:
        # How many tensors a mean or sum has.
        rows = [row for row in self._rows if row.pattern == number]
        count = 1
        for name in {
            *self._sources[number].pattern.mean,
            *self._sources[number].pattern.sum,
        }:
            values = {
                {**dict(row.ranks), **dict(row.captured)}.get(name) for row in rows
            }
            count *= max(len(values), self._counts.get(name, 1))
        return count

    def _check_changed(self, number: int, changing: Sequence[int], count: int) -> None:
        # That no operand is missing, or there several times.
        tensor = self._sources[number]
        for other, each in enumerate(self._sources):
            if each.main == number and other not in changing:
                raise LayoutError(
                    f"{each.place}: no tensor matches it, but {tensor.name.text!r} has "
                    "other operands; use the whole checkpoint"
                )
        if count != 1 + len(changing):
            raise LayoutError(
                f"{tensor.place}: several tensors are there, which are not compared "
                "where `times` or `plus` changes them; list what they differ in under "
                "`unchecked`, or write `copy: unchecked`"
            )
        if tensor.pattern.plus and len(changing) != 2:
            raise LayoutError(f"{tensor.place}: `plus` has two matrices")

    def _along_of(
        self,
        number: int,
        other: int,
        shape: tuple[int, ...],
        other_shape: tuple[int, ...],
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        # Which dims of a tensor those of another one run along, and in which blocks.
        main, tensor = self._sources[number], self._sources[other]
        found: dict[int, tuple[int, int]] = {}
        free = dict(enumerate(main.dims))
        # `1` runs along what the others leave.
        order = sorted(enumerate(tensor.dims), key=lambda e: -len(_factors(e[1])))
        for dim, node in order:
            if main.pattern.plus and not dims.names((node,)) & main.names:
                found[dim] = -1, 1
                continue
            rests = {at: _rest(each, node) for at, each in free.items()}
            fitting = {at: rest for at, rest in rests.items() if rest is not None}
            if tensor.main is None:
                fitting = {at: rest for at, rest in fitting.items() if not rest}
            if not fitting:
                remedy = "write `copy: unchecked`"
                if tensor.main is not None:
                    remedy = "multiply in a layout of its own, and lead `through` both"
                raise LayoutError(
                    f"{tensor.place}: dim {dim} is no dim of {main.name.text!r}, and no "
                    f"block of one, such as `out/128`; {remedy}"
                )
            at = min(fitting, key=lambda each: len(fitting[each]))
            del free[at]
            rest, block = dims.Product(fitting[at]), tensor.blocks[dim]
            self._need(
                tensor, frozenset({block} - {*filter(str.isdigit, [block])}), self.sizes
            )
            size = int(block) if block.isdigit() else self.sizes[block]
            size *= dims.whole(dims.length(rest, self._scope(tensor, [rest], ())))
            if other_shape[dim] != -(-shape[at] // max(1, size)):
                raise LayoutError(
                    f"{tensor.place}: dim {dim} is {other_shape[dim]}, and blocks of "
                    f"{size} make {-(-shape[at] // max(1, size))} of {shape[at]}"
                )
            found[dim] = at, max(1, size)
        places = [found[dim] for dim in range(len(tensor.dims))]
        return tuple(at for at, _ in places), tuple(size for _, size in places)

    def _copies(
        self, held: Sequence[str], froms: Sequence[Slab], tos: Sequence[Slab]
    ) -> Iterator[Copy]:
        # The copies of parts that have the same coordinates.
        sources, targets = _as_boxes(held, froms), _as_boxes(held, tos)
        into, of = box_join.overlaps(targets, sources)
        start = np.maximum(targets.start[into], sources.start[of])
        stop = np.minimum(targets.stop[into], sources.stop[of])
        volumes = (stop - start).prod(axis=1)
        filled, read = (np.zeros(len(each), np.int64) for each in (targets, sources))
        np.add.at(filled, into, volumes)
        np.add.at(read, of, volumes)
        missing = [
            *(("filled", tos[n]) for n in np.flatnonzero(filled < targets.volumes)),
            *(("used", froms[n]) for n in np.flatnonzero(read < sources.volumes)),
        ]
        for what, slab in missing:
            raise LayoutError(
                f"{slab.pattern.place}: not all elements are {what}: some of "
                + ", ".join(
                    f"{n} {a}:{a + c}" for n, (a, c, _, _) in slab.ranges.items()
                )
            )
        is_doubled = (
            len(box_join.overlaps(sources, sources)[0]) > (sources.volumes > 0).sum()
        )
        originals = [each for each in tos if not each.pattern.pattern.copy]
        if (
            is_doubled
            or len({e.pattern for e in originals if not e.pattern.reduced}) > 1
        ):
            raise LayoutError(
                f"{(froms if is_doubled else originals)[0].pattern.place}: elements with"
                f" the coordinates {' '.join(held) or '(none)'} are there twice; name "
                "them differently, or write `copy: checked` for one of them"
            )
        for t, s, low, high in zip(
            into.tolist(), of.tolist(), start.tolist(), stop.tolist(), strict=True
        ):
            yield self._copy(held, tos[t], froms[s], low, high)

    def _copy(
        self,
        held: Sequence[str],
        target: Slab,
        source: Slab,
        low: Sequence[int],
        high: Sequence[int],
    ) -> Copy:
        bounds = [*zip(held, low, high, strict=True)]
        # Of a dim that the source lacks, all indices are filled.
        for name in target.pattern.reduced & target.ranges.keys():
            first, count, _, _ = target.ranges[name]
            bounds.append((name, first, first + count))
        factors, starts = [], (list(target.start), list(source.start))
        for name, first, last in bounds:
            places = []
            for slab, begin in zip((target, source), starts, strict=True):
                origin, _, dim, step = slab.ranges.get(name, (first, 0, -1, 0))
                if dim >= 0:
                    begin[dim] += (first - origin) * step
                places.append((dim, step))
            if last - first > 1:
                factors.append((last - first, *places))
        lengths, target_dims, target_steps, source_dims, source_steps = _merged(factors)
        into, of = map(tuple, starts)
        return Copy(
            target.tensor,
            lengths,
            Side(start=into, dims=target_dims, steps=target_steps),
            source.tensor,
            Side(start=of, dims=source_dims, steps=source_steps),
            *self._arithmetic(source.pattern, target.pattern),
        )

    def _number(self, tensor: Tensor, expression: float | str) -> float:
        given = self._rule.rule.sizes.items()
        known = {name: n for name, n in given if isinstance(n, int | float)}
        known |= self._numbers
        self._need(tensor, sizes.names(expression), known)
        return sizes.value(expression, known)

    def _arithmetic_of(self, source: Tensor, target: Tensor) -> tuple[float, float]:
        # The scale and the shift of a copy.
        (of_source, minus), (of_target, plus) = (
            [self._number(each, e) for e in (each.pattern.scale, each.pattern.shift)]
            for each in (source, target)
        )
        if not of_source or not of_target:
            raise LayoutError(f"{target.place}: a scale cannot be 0")
        scale = of_target / of_source
        shift = plus - minus * scale
        if self._state not in POWERS and (scale, shift) != (1, 0):
            raise LayoutError(
                f"{target.place}: it is not known how {self._state!r} follows a "
                "parameter that is scaled; list the other `states` in this rule"
            )
        return scale ** POWERS.get(
            self._state, 1
        ), shift if self._state in SHIFTED else 0.0

    def _check_empty(
        self,
        slabs: Sequence[Slab],
        padding: str | None,
        by_names: Mapping[frozenset[str], tuple[list[Slab], list[Slab]]],
    ) -> None:
        # That parts which only one side has, or both sides list as padding, are empty.
        tensor, of_part = slabs[0].pattern, frozenset(slabs[0].ranges)
        if padding is not None:
            raise LayoutError(
                f"{tensor.place}: both sides have {padding}; remove it from `pad`"
            )
        if any(math.prod(c for _, c, _, _ in each.ranges.values()) for each in slabs):
            others = [" ".join(sorted(each)) or "(none)" for each in by_names]
            raise LayoutError(
                f"{tensor.place}: the other side has no part with the coordinates "
                f"{' '.join(sorted(of_part)) or '(none)'}, of {'; '.join(others)}; if it"
                f" lacks {{..}}, {_LIST_IT}, or if it is padding, in `pad`"
            )


def _of_shape(
    tensor: Tensor, shape: Sequence[int], ranks: Mapping[str, tuple[int, int]]
) -> Iterator[sizes.Equation]:
    if len(shape) != len(tensor.dims):
        raise LayoutError(
            f"{tensor.place}: a tensor has shape {list(shape)}, and the rule "
            f"{len(tensor.dims)} dims, {tensor.pattern.dims!r}"
        )
    for dim, (node, length) in enumerate(zip(tensor.dims, shape, strict=True)):
        if tensor.blocks[dim] == "1":
            origin = f"dim {dim} of {tensor.place}"
            yield sizes.Equation(node, length, ranks, origin)


def _are_alike(copy: Tensor, original: Tensor) -> bool:
    # Whether a copy has the coordinates and options of another tensor.
    keys = [
        (
            each.names - each.reduced,
            {c.key for c in each.name.captures} - each.reduced,
            (each.pattern.scale, each.pattern.shift, each.pattern.viewed_as),
        )
        for each in (copy, original)
    ]
    return original.main is None and not original.pattern.copy and keys[0] == keys[1]


def _factors(node: dims.Node) -> tuple[dims.Node, ...]:
    return node.parts if isinstance(node, dims.Product) else (node,)


def _rest(node: dims.Node, leading: dims.Node) -> tuple[dims.Node, ...] | None:
    # The factors of a node after those of another one; None if it does not begin so.
    factors, first = _factors(node), _factors(leading)
    return factors[len(first) :] if factors[: len(first)] == first else None


def _as_boxes(held: Sequence[str], slabs: Sequence[Slab]) -> Boxes:
    ranges = [[each.ranges[name][:2] for name in held] for each in slabs]
    table = np.array(ranges, np.int64).reshape(len(slabs), len(held), 2)
    return Boxes(start=table[..., 0], stop=table.sum(axis=-1))


def _merged(
    factors: Sequence[tuple[int, tuple[int, int], tuple[int, int]]],
) -> tuple[tuple[int, ...], ...]:
    """Sizes, dims and steps of factors; those adjacent in both tensors become one."""
    joined: list[tuple[int, tuple[int, int], tuple[int, int]]] = []
    for size, into, of in sorted(factors, key=lambda each: (each[2][0], -each[2][1])):
        if joined:
            before, *places = joined[-1]
            if places == [(dim, step * size) for dim, step in (into, of)]:
                joined[-1] = before * size, into, of
                continue
        joined.append((size, into, of))
    columns = zip(*((n, *into, *of) for n, into, of in joined), strict=True)
    return tuple(columns) or ((),) * 5


def boxes_of(
    start: Sequence[int], factors: Iterable[tuple[int, int, int]]
) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The start and stop of the boxes that factored dims fill.

    Args:
      start: of the first element.
      factors: of each, the dim that it advances along, its step, and its length.
    """
    by_dim: list[list[tuple[int, int]]] = [[(at, at + 1)] for at in start]
    for dim, step, count in sorted(factors, key=lambda each: each[1]):
        if dim >= 0:
            first, last = by_dim[dim][0]
            if len(by_dim[dim]) == 1 and step == last - first:
                by_dim[dim] = [(first, first + step * count)]
            else:
                by_dim[dim] = [
                    (a + step * n, b + step * n)
                    for n in range(count)
                    for a, b in by_dim[dim]
                ]
    return [
        (tuple(a for a, _ in chosen), tuple(b for _, b in chosen))
        for chosen in itertools.product(*by_dim)
    ]


def _wide(how: str, dtypes: Iterable[np.dtype]) -> np.dtype:
    # What values are computed in: float32 or wider; sums of integers are exact.
    wide = np.dtype(np.float32)
    for dtype in dtypes:
        if how == "sum" and is_integer(dtype):
            return np.dtype(np.int64)
        wide = np.promote_types(wide, np.result_type(dtype, np.float32))
    return wide


def _check_factor(tensor: Tensor, dtype: np.dtype) -> None:
    # Scales of integers are mostly exponents.
    if _category(dtype) is not np.floating and tensor.pattern.dtype is None:
        raise LayoutError(
            f"{tensor.place}: it is of {dtype}; write `as: float8_e8m0fnu` if its bytes "
            "are exponents, as those of MXFP4 are, or `dtype: float32` if its integers "
            "are factors"
        )


def target_dtype(
    tensor: Tensor, sources: frozenset[tuple[np.dtype, bool]], given: np.dtype | None
) -> np.dtype:
    """The dtype of a target.

    Args:
      tensor: its pattern.
      sources: the dtypes of its sources, and whether they mean nothing without scales.
      given: of the target that exists; None if it is made.

    Raises:
      LayoutError: if the rule makes another one, or needs a cast that it does not have.
    """
    written = tensor.pattern.dtype
    held = sorted({dtype for dtype, _ in sources}, key=str)
    made = given
    if written is not None:
        made = np.dtype(written)
        if given not in (None, made):
            raise LayoutError(
                f"{tensor.place}: the target is of {given}, the rule makes it {written};"
                " change one of them"
            )
    elif given is not None:
        for dtype in held:
            if dtype != given and _category(dtype) is not _category(given):
                raise LayoutError(
                    f"{tensor.place}: the target is of {given}, its source of {dtype}; "
                    f"write `dtype: {given}` to cast it"
                )
    elif len(held) == 1:
        (made,) = held
    if made is None:
        raise LayoutError(
            f"{tensor.place}: it has sources of {', '.join(map(str, held)) or 'no dtype'}"
            "; write `dtype:`"
        )
    for dtype, lacks_scales in sources:
        if lacks_scales and dtype != made:
            raise LayoutError(
                f"{tensor.place}: it is {made} in the target, and made of {dtype} "
                "without scales; multiply by them with `times`, and use the whole "
                "checkpoint"
            )
    return made


def is_quantized(dtype: np.dtype) -> bool:
    """Whether weights of this dtype may need scales: one byte each, or packed."""
    return (dtype.itemsize == 1 and dtype != np.bool_) or dtype.name in (
        "int32",
        "uint32",
    )


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


def _category(dtype: np.dtype) -> type:
    # A cast from one to another needs to be written.
    for category in (np.bool_, np.integer, np.complexfloating):
        if np.issubdtype(dtype, category):
            return category
    # NumPy has no category for int4, bfloat16 and others.
    return np.integer if "int" in dtype.name else np.floating
