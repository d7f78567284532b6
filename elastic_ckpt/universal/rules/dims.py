"""Dims expressions: `(kv@tp (q + k + v) d) embed` describes the dims of a tensor.

A name is a factor of a dim, `(a b)` the product of factors in row-major order,
`(a + b)` a concatenation, and `1` a dim of length 1. `x@tp` is sharded over the ranks
of an axis, `x@(dp tp)` over those of several axes in row-major order. `(a b)~` is the
beginning of a product, whose last row may be cut short, and `...` any number of dims.

With sizes and the coordinates of a rank, an expression is cut into *strips*: boxes of
factors, each of which advances along the dim by a step. Captures of names are written
in the same grammar: a tensor is the strip of one index of its capture.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction

from elastic_ckpt.universal.rules.layout import LayoutError

_TOKEN = re.compile(
    r"\s*(?:(?P<name>[A-Za-z_]\w*)|(?P<one>1\b)|(?P<rest>\.\.\.)|(?P<sign>[()+@~]))"
)
# Deeper nesting is a mistake, and would exhaust Python's stack.
_MAX_DEPTH = 32
# Of the choices of an addend of each sum.
_MOST_PARTS = 256


@dataclasses.dataclass(frozen=True, slots=True)
class Name:
    """A factor with a size."""

    name: str

    def __str__(self) -> str:
        return self.name


@dataclasses.dataclass(frozen=True, slots=True)
class Product:
    """Factors in row-major order; of length 1 without factors."""

    factors: tuple[Node, ...]

    def __str__(self) -> str:
        return f"({' '.join(map(str, self.factors))})" if self.factors else "1"


@dataclasses.dataclass(frozen=True, slots=True)
class Sum:
    """A concatenation of addends."""

    addends: tuple[Node, ...]

    def __str__(self) -> str:
        texts = (
            str(each)[1:-1] if isinstance(each, Product) and each.factors else str(each)
            for each in self.addends
        )
        return f"({' + '.join(texts)})"


@dataclasses.dataclass(frozen=True, slots=True)
class Shard:
    """The part of a node on one rank; the ranks of `axes` count in row-major order."""

    node: Node
    axes: tuple[str, ...]

    def __str__(self) -> str:
        axes = f"({' '.join(self.axes)})" if len(self.axes) > 1 else self.axes[0]
        return f"{self.node}@{axes}"


@dataclasses.dataclass(frozen=True, slots=True)
class Clip:
    """The beginning of a node; its length is the size of its text, `(a b)~`."""

    node: Node

    def __str__(self) -> str:
        return f"{self.node}~"


@dataclasses.dataclass(frozen=True, slots=True)
class Rest:
    """Any number of dims."""

    def __str__(self) -> str:
        return "..."


Node = Name | Product | Sum | Shard | Clip | Rest


class Dims:
    """A parsed expression.

    Attributes:
      text: as it was written.
      nodes: one for each dim of the tensor, or for a capture.
      name_sets: the names of each part: one addend of every sum is chosen.
      names: the names of all factors.
      axes: the rank axes after `@`.
    """

    def __init__(self, text: str, nodes: Sequence[Node]) -> None:
        self.text = text
        self.nodes = tuple(nodes)
        lists = _chosen(self.nodes)
        for names in lists:
            for name in names:
                if names.count(name) > 1:
                    raise LayoutError(
                        f"{name!r} occurs twice in the product {text!r}; use another"
                        " name"
                    )
        self.name_sets = list(map(frozenset, lists))
        for names, count in collections.Counter(self.name_sets).items():
            if count > 1:
                raise LayoutError(
                    f"the parts of a sum in {text!r} have the same names, "
                    f"{' '.join(sorted(names)) or '1'}; name them differently, or put "
                    "a name of size 1 before each, as in (k kv + v kv) with "
                    "`sizes: {k: 1, v: 1}`, and in the dims of the other side, (k kv)"
                )
        self.names = frozenset(itertools.chain(*lists))
        self.axes = frozenset(axis for node in self.nodes for axis in _axes(node))

    @property
    def has_rest(self) -> bool:
        """Whether it has `...`."""
        return Rest() in self.nodes

    def with_rest(self, num_dims: int) -> Dims:
        """The expression with names for the dims of `...`, so many in all."""
        if not self.has_rest:
            return self
        at = self.nodes.index(Rest())
        # No name that can be written.
        rest = [Name(f"...{n}") for n in range(num_dims - len(self.nodes) + 1)]
        return Dims(self.text, [*self.nodes[:at], *rest, *self.nodes[at + 1 :]])


def parse(text: str) -> Dims:
    """The expression in `text`; an empty one is that of a scalar.

    Raises:
      LayoutError: names the column of the first invalid character, or a name that
        occurs twice in a product.
    """
    parser = _Parser(text)
    nodes = []
    while parser.peek() is not None:
        nodes.append(parser.factor(depth=0))
    if nodes.count(Rest()) > 1:
        raise LayoutError(f"{text!r} has `...` twice; name the other dims")
    return Dims(text, nodes)


class _Parser:
    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens = list(_tokens(text))
        self._at = 0

    def peek(self) -> str | None:
        return self._tokens[self._at][0] if self._at < len(self._tokens) else None

    def factor(self, depth: int) -> Node:
        token, column = self._next("a name, 1 or (")
        if depth > _MAX_DEPTH:
            raise self._error(column, "parentheses are nested too deeply")
        node: Node
        if token == "(":
            node = self._sum(depth + 1)
            self._expect(")")
        elif token == "1":
            node = Product(())
        elif token == "...":
            if depth:
                raise self._error(column, "`...` stands for whole dims")
            return Rest()
        elif token in ")+@~":
            raise self._error(column, f"expected a name, 1 or (, not {token}")
        else:
            node = Name(token)
        while self.peek() in ("@", "~"):
            sign, column = self._next("")
            depth += 1
            if depth > _MAX_DEPTH:
                raise self._error(column, "signs are nested too deeply")
            if sign == "@":
                node = Shard(node, self._axes())
            elif isinstance(node, Product) and node.factors:
                node = Clip(node)
            else:
                raise self._error(column, "`~` follows a product, such as (a b)~")
        return node

    def _sum(self, depth: int) -> Node:
        addends = [self._product(depth)]
        while self.peek() == "+":
            self._expect("+")
            addends.append(self._product(depth))
        return addends[0] if len(addends) == 1 else Sum(tuple(addends))

    def _product(self, depth: int) -> Node:
        factors = [self.factor(depth)]
        while self.peek() not in (")", "+", None):
            factors.append(self.factor(depth))
        return factors[0] if len(factors) == 1 else Product(tuple(factors))

    def _axes(self) -> tuple[str, ...]:
        several = self.peek() == "("
        if several:
            self._expect("(")
        axes: list[str] = []
        while not axes or several:
            token, column = self._next("a rank axis")
            if token == ")" and axes:
                break
            if not token.isidentifier():
                raise self._error(column, f"expected a rank axis, not {token}")
            axes.append(token)
        return tuple(axes)

    def _expect(self, sign: str) -> None:
        token, column = self._next(sign)
        if token != sign:
            raise self._error(column, f"expected {sign}, not {token}")

    def _next(self, expected: str) -> tuple[str, int]:
        if self._at == len(self._tokens):
            raise self._error(len(self._text), f"expected {expected}")
        self._at += 1
        return self._tokens[self._at - 1]

    def _error(self, column: int, problem: str) -> LayoutError:
        return LayoutError(f"column {column + 1} of {self._text!r}: {problem}")


def _tokens(text: str) -> Iterator[tuple[str, int]]:
    at, end = 0, len(text.rstrip())
    while at < end:
        match = _TOKEN.match(text, at)
        if match is None:
            at += len(text[at:]) - len(text[at:].lstrip())
            raise LayoutError(
                f"column {at + 1} of {text!r}: unexpected {text[at]!r}; dims are made "
                f"of names, 1, ( ), +, @, ~ and ..."
            )
        token = match.group(match.lastgroup or 0)
        yield token, match.end() - len(token)
        at = match.end()


def children(node: Node) -> tuple[Node, ...]:
    """The nodes directly inside of one."""
    if isinstance(node, Product):
        return node.factors
    if isinstance(node, Sum):
        return node.addends
    return (node.node,) if isinstance(node, Shard | Clip) else ()


def walk(node: Node) -> Iterator[Node]:
    """A node and all nodes inside of it."""
    yield node
    for each in children(node):
        yield from walk(each)


def names_of(node: Node) -> frozenset[str]:
    """The names of all factors in `node`."""
    return frozenset(each.name for each in walk(node) if isinstance(each, Name))


def last_row(node: Node) -> Node:
    """What a clipped product can lack the most elements of: an index of its first."""
    return Product(node.factors[1:]) if isinstance(node, Product) else node


def name_sets(node: Node) -> list[frozenset[str]]:
    """The names of each choice of addends in `node`."""
    return list(map(frozenset, _name_lists(node)))


def _name_lists(node: Node) -> Sequence[tuple[str, ...]]:
    # The names of each choice of addends, as often as they occur.
    if isinstance(node, Name):
        return [(node.name,)]
    if isinstance(node, Sum):
        return [names for addend in node.addends for names in _name_lists(addend)]
    return _chosen(children(node))


def _chosen(nodes: Sequence[Node]) -> list[tuple[str, ...]]:
    # The names of each choice of addends in all of these.
    lists = list(map(_name_lists, nodes))
    if math.prod(map(len, lists)) > _MOST_PARTS:
        text = " ".join(map(str, nodes))
        raise LayoutError(f"{text!r} has sums of over {_MOST_PARTS} parts in all")
    return [tuple(itertools.chain(*names)) for names in itertools.product(*lists)]


def _axes(node: Node) -> Iterator[str]:
    for each in walk(node):
        if isinstance(each, Shard):
            yield from each.axes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """The numbers that an expression refers to.

    Attributes:
      sizes: by name, and by the text of a clipped product.
      ranks: the number of the rank and of all ranks, by axis. A tensor is whole over
        an axis that is absent.
      widths: the sizes on each rank, by name and axis.
    """

    sizes: Mapping[str, int | Fraction]
    ranks: Mapping[str, tuple[int, int]] = dataclasses.field(default_factory=dict)
    widths: Mapping[str, Mapping[str, Sequence[int]]] = dataclasses.field(
        default_factory=dict
    )


@dataclasses.dataclass(frozen=True, slots=True)
class Strip:
    """A box of factors along one dim.

    Attributes:
      at: the index of its first element.
      ranges: by factor, its first index, their number, and the step of an index.
    """

    at: int
    ranges: dict[str, tuple[int, int, int]]


def length(node: Node, scope: Scope) -> Fraction:
    """The length of a dim, on one rank.

    Returns:
      A fraction if a sharded size is not a multiple of the number of ranks.

    Raises:
      KeyError: if a size is missing.
      LayoutError: if widths do not fit the ranks.
    """
    if isinstance(node, Name):
        return Fraction(scope.sizes[node.name])
    if isinstance(node, Clip):
        return Fraction(scope.sizes[str(node)])
    if isinstance(node, Shard):
        widths = _widths(node, scope)
        number, count = _rank(node.axes, scope)
        if widths is not None:
            return Fraction(widths[number])
        return length(node.node, scope) / count
    lengths = [length(each, scope) for each in children(node)]
    return Fraction(sum(lengths) if isinstance(node, Sum) else math.prod(lengths))


def strips(node: Node, scope: Scope) -> list[Strip]:
    """The strips of a dim; together they have each of its indices once.

    Raises:
      LayoutError: if a size is not a multiple of the number of its ranks.
    """
    return cut(node, 0, _whole(node, scope), scope)


def cut(node: Node, first: int, last: int, scope: Scope) -> list[Strip]:
    """The strips of the indices `first` to `last`; `at` counts from `first`.

    Raises:
      LayoutError: if a size is not a multiple of the number of its ranks.
    """
    if first == last:
        return []
    if isinstance(node, Name):
        return [Strip(0, {node.name: (first, last - first, 1)})]
    if isinstance(node, Product):
        return _cut_product(node.factors, first, last, scope)
    if isinstance(node, Clip):
        return cut(node.node, first, last, scope)
    if isinstance(node, Shard):
        before = _shard_start(node, scope)
        return cut(node.node, before + first, before + last, scope)
    assert isinstance(node, Sum)
    found: list[Strip] = []
    before = 0
    for addend in node.addends:
        after = before + _whole(addend, scope)
        start, stop = max(first, before), min(last, after)
        if start < stop:
            found += [
                Strip(strip.at + start - first, strip.ranges)
                for strip in cut(addend, start - before, stop - before, scope)
            ]
        before = after
    return found


def _cut_product(
    factors: Sequence[Node], first: int, last: int, scope: Scope
) -> list[Strip]:
    if not factors:
        return [Strip(0, {})]
    row = math.prod(_whole(factor, scope) for factor in factors[1:])
    found = []
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
        for outer in cut(factors[0], head, end, scope):
            at = (head + outer.at) * row + start - first
            ranges = {
                name: (index, count, step * row)
                for name, (index, count, step) in outer.ranges.items()
            }
            found += [Strip(at + inner.at, ranges | inner.ranges) for inner in rest]
    return found


def _whole(node: Node, scope: Scope) -> int:
    size = length(node, scope)
    if size.denominator != 1:
        raise _uneven(size.numerator, size.denominator)
    return int(size)


def _uneven(size: int, parts: int) -> LayoutError:
    return LayoutError(
        f"a dim of {size} elements cannot be cut into {parts} equal parts; give"
        " `widths`"
    )


def _widths(shard: Shard, scope: Scope) -> Sequence[int] | None:
    # The given sizes on each rank; None if the dim is sharded evenly.
    if not isinstance(shard.node, Name) or len(shard.axes) > 1:
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


def _rank(axes: Sequence[str], scope: Scope) -> tuple[int, int]:
    # The number of a rank over several axes in row-major order, and of all ranks.
    number, count = 0, 1
    for axis in axes:
        at, ranks = scope.ranks.get(axis, (0, 1))
        number, count = number * ranks + at, count * ranks
    return number, count


def _shard_start(shard: Shard, scope: Scope) -> int:
    number, count = _rank(shard.axes, scope)
    widths = _widths(shard, scope)
    if widths is not None:
        return sum(widths[:number])
    whole = _whole(shard.node, scope)
    if whole % count:
        raise _uneven(whole, count)
    return whole // count * number
