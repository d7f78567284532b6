"""Dims expressions: `(kv@tp (q + k + v) d) embed` names the factors of dims.

An expression has a node for each dim. Named sizes and the number of ranks determine a
node's length; `cut` finds where along the dim the indices of each name lie.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction

from elastic_ckpt.universal.rules.layout import LayoutError

# Unnamed dims of a tensor, the same on both sides.
REST = "..."

# For each name, the first index, the number of indices, and the step along the dim.
Ranges = dict[str, tuple[int, int, int]]


@dataclasses.dataclass(frozen=True)
class Name:
    """A named dim."""

    name: str


@dataclasses.dataclass(frozen=True)
class Product:
    """`(a b)`, in row-major order; `1` has no parts."""

    parts: tuple[Node, ...]


@dataclasses.dataclass(frozen=True)
class Sum:
    """`(a + b)`, a concatenation."""

    parts: tuple[Node, ...]


@dataclasses.dataclass(frozen=True)
class Shard:
    """`a@tp`, one rank's part of a node; multiple axes are in row-major order."""

    parts: tuple[Node]
    axes: tuple[str, ...]


Node = Name | Product | Sum | Shard


@dataclasses.dataclass(frozen=True)
class Scope:
    """The sizes and ranks that determine an expression's length.

    Attributes:
      ranks: the rank and the number of ranks, by axis.
      widths: the size on each rank, by name and axis, for sizes that differ.
    """

    sizes: Mapping[str, int | Fraction]
    ranks: Mapping[str, tuple[int, int]] = dataclasses.field(default_factory=dict)
    widths: Mapping[str, Mapping[str, Sequence[int]]] = dataclasses.field(
        default_factory=dict
    )


def parse(
    text: str, *, has_blocks: bool = False
) -> tuple[tuple[Node, ...], tuple[str, ...]]:
    """Parses the node and the block of each dim.

    The blocks of `out/128 in` are "128" and "1". `...` is parsed as a `Name`.

    Raises:
      LayoutError: if the expression is malformed, or has blocks without `has_blocks`.
    """
    parser = _Parser(text)
    nodes, blocks = [], []
    while parser.tokens:
        is_rest = parser.tokens[-1] == REST
        nodes.append(Name(parser.take()) if is_rest else parser.factor())
        has_block = has_blocks and parser.at("/")
        blocks.append(parser.take().strip("/ ") if has_block else "1")
    return tuple(nodes), tuple(blocks)


class _Parser:
    def __init__(self, text: str) -> None:
        self._text = text
        axes = r"@(?:\w+|\(\s*\w[\w\s]*\))"
        blocks = r"/\s*(?:[1-9]\d*|[^\W\d]\w*)"
        self.tokens = re.findall(rf"{axes}|{blocks}|\w+|\.\.\.|\S", text)[::-1]

    def at(self, start: str) -> bool:
        return bool(self.tokens) and self.tokens[-1].startswith(start)

    def take(self) -> str:
        return self.tokens.pop() if self.tokens else "the end"

    def factor(self) -> Node:
        token = self.take()
        node: Node = Name(token)
        if token == "(":
            node = self._addends()
        elif token == "1":
            node = Product(())
        elif not token.isidentifier():
            raise LayoutError(
                f"{self._text!r}: expected a name, `1` or `(`, not {token}"
            )
        while self.at("@"):
            axes = re.findall(r"\w+", self.take())
            if not axes:
                raise LayoutError(f"{self._text!r}: expected a rank axis after @")
            node = Shard((node,), tuple(axes))
        return node

    def _addends(self) -> Node:
        # Parses the content of parentheses: addends that consist of factors.
        addends: list[list[Node]] = [[self.factor()]]
        while not self.at(")"):
            if self.at("+"):
                self.take()
                addends.append([])
            addends[-1].append(self.factor())
        self.take()
        nodes = [
            each[0] if len(each) == 1 else Product(tuple(each)) for each in addends
        ]
        return nodes[0] if len(nodes) == 1 else Sum(tuple(nodes))


def check_names(nodes: Sequence[Node]) -> None:
    """Checks that different dims have different names.

    Raises:
      LayoutError: if a name occurs twice in a product.
    """
    for node in walk([Product(tuple(nodes))]):
        if isinstance(node, Product):
            listed = [name for each in node.parts for name in sorted(names((each,)))]
            for name in listed:
                if listed.count(name) > 1:
                    raise LayoutError(f"{name!r} occurs twice; use two different names")


def walk(nodes: Sequence[Node]) -> Iterator[Node]:
    """Yields all nodes, including nested ones."""
    for node in nodes:
        yield node
        if not isinstance(node, Name):
            yield from walk(node.parts)


@functools.lru_cache(maxsize=2**14)
def names(nodes: tuple[Node, ...]) -> frozenset[str]:
    """The names of the dims in `nodes`."""
    return frozenset(each.name for each in walk(nodes) if isinstance(each, Name))


@functools.lru_cache(maxsize=2**14)
def axes(nodes: tuple[Node, ...]) -> frozenset[str]:
    """The rank axes that shard `nodes`."""
    shards = (each.axes for each in walk(nodes) if isinstance(each, Shard))
    return frozenset(axis for each in shards for axis in each)


def length(node: Node, scope: Scope) -> int | Fraction:
    """The length of a dim on one rank.

    Raises:
      KeyError: if `scope` lacks a size.
      LayoutError: if the `widths` of a name do not list one size for each rank.
    """
    if isinstance(node, Name):
        return scope.sizes[node.name]
    if isinstance(node, Shard):
        start, stop = _shard(node, scope)
        return stop - start
    lengths = [length(each, scope) for each in node.parts]
    return sum(lengths) if isinstance(node, Sum) else math.prod(lengths)


def _shard(shard: Shard, scope: Scope) -> tuple[int | Fraction, int | Fraction]:
    number, count = 0, 1
    for axis in shard.axes:
        at, ranks = scope.ranks.get(axis, (0, 1))
        number, count = number * ranks + at, count * ranks
    (node,) = shard.parts
    if isinstance(node, Name) and count > 1:
        widths = scope.widths.get(node.name, {}).get(shard.axes[0])
        if widths is not None:
            if len(widths) != count:
                raise LayoutError(
                    f"`widths` of {node.name} has {len(widths)} entries for "
                    f"{shard.axes[0]}, but there are {count} ranks; list one size for "
                    "each rank"
                )
            return sum(widths[:number]), sum(widths[: number + 1])
    width = Fraction(length(node, scope)) / count
    return width * number, width * (number + 1)


def cut(node: Node, first: int, last: int, scope: Scope) -> list[tuple[int, Ranges]]:
    """Cuts the indices from `first` up to but excluding `last` into strips.

    Returns:
      For each strip, its start relative to `first` and the ranges of its names.
    """
    if first >= last:
        return []
    if isinstance(node, Name):
        return [(0, {node.name: (first, last - first, 1)})]
    if isinstance(node, Shard):
        start = whole(_shard(node, scope)[0])
        return cut(node.parts[0], start + first, start + last, scope)
    if isinstance(node, Product):
        return _cut_product(node.parts, first, last, scope)
    found, before = [], 0
    for addend in node.parts:
        after = before + whole(length(addend, scope))
        start = max(first, before)
        strips = cut(addend, start - before, min(last, after) - before, scope)
        found += [(at + start - first, ranges) for at, ranges in strips]
        before = after
    return found


def _cut_product(
    factors: Sequence[Node], first: int, last: int, scope: Scope
) -> list[tuple[int, Ranges]]:
    if not factors:
        return [(0, {})]
    row = math.prod(whole(length(factor, scope)) for factor in factors[1:])
    found, at = [], first
    while at < last:
        # A partial row, all whole rows, or a last partial row.
        head, start = divmod(at, row)
        rows = 0 if start else (last - at) // row
        end, stop = head + max(1, rows), row if rows else min(row, last - head * row)
        for outer_at, ranges in cut(factors[0], head, end, scope):
            outer = {each: (n, num, by * row) for each, (n, num, by) in ranges.items()}
            for inner_at, inner in _cut_product(factors[1:], start, stop, scope):
                place = (head + outer_at) * row + start - first + inner_at
                found.append((place, outer | inner))
        at = end * row if rows else head * row + stop
    return found


def whole(size: int | Fraction) -> int:
    """Converts a length to an integer.

    Raises:
      LayoutError: if the length is a fraction: a dim does not divide equally among the
        ranks.
    """
    if size.denominator != 1:
        raise LayoutError(
            f"{size.numerator} elements cannot be split into {size.denominator} equal "
            "parts; set `widths` to the size on each rank"
        )
    return int(size)
