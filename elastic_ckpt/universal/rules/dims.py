"""Dims expressions: `(kv@tp (q + k + v) d) embed` describes the dims of a tensor.

A name is a factor of a dim, `(a b)` the product of factors in row-major order,
`(a + b)` a concatenation, and `1` a dim of length 1. `x@tp` is sharded over the ranks
of an axis, `x@(dp tp)` over those of several axes in row-major order.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterator, Sequence

from elastic_ckpt.universal.rules.layout_error import LayoutError

_TOKEN = re.compile(r"\s*(?:(?P<name>[A-Za-z_]\w*)|(?P<one>1\b)|(?P<sign>[()+@]))")
# Deeper nesting is a mistake, and would exhaust Python's stack.
_MAX_DEPTH = 32


@dataclasses.dataclass(frozen=True, slots=True)
class Name:
    """A factor with a size."""

    name: str


@dataclasses.dataclass(frozen=True, slots=True)
class Product:
    """Factors in row-major order; of length 1 without factors."""

    factors: tuple[Node, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Sum:
    """A concatenation of addends."""

    addends: tuple[Node, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Shard:
    """The part of a node on one rank; the ranks of `axes` count in row-major order."""

    node: Node
    axes: tuple[str, ...]


Node = Name | Product | Sum | Shard


class Dims:
    """A parsed expression.

    Attributes:
      text: as it was written.
      nodes: one for each dim of the tensor.
      name_sets: the names of each part: one addend of every sum is chosen.
      names: the names of all factors.
      axes: the rank axes after `@`.
    """

    def __init__(self, text: str, nodes: tuple[Node, ...]) -> None:
        self.text = text
        self.nodes = nodes
        self.name_sets = [
            frozenset(itertools.chain(*names))
            for names in itertools.product(*(_name_lists(node) for node in nodes))
        ]
        self.names = frozenset(itertools.chain(*self.name_sets))
        self.axes = frozenset(axis for node in nodes for axis in _axes(node))


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
    parsed = Dims(text, tuple(nodes))
    for names in itertools.product(*(_name_lists(node) for node in nodes)):
        listed = list(itertools.chain(*names))
        for name in listed:
            if listed.count(name) > 1:
                raise LayoutError(
                    f"{name!r} occurs twice in the product {text!r}; use another name"
                )
    sets = parsed.name_sets
    for names in sets:
        if sets.count(names) > 1:
            raise LayoutError(
                f"the parts of a sum in {text!r} have the same names, "
                f"{' '.join(sorted(names)) or '1'}; name them differently"
            )
    return parsed


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
        elif token in ")+@":
            raise self._error(column, f"expected a name, 1 or (, not {token}")
        else:
            node = Name(token)
        while self.peek() == "@":
            self._expect("@")
            node = Shard(node, self._axes())
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
                f"of names, 1, ( ), + and @"
            )
        token = match.group(match.lastgroup or 0)
        yield token, match.end() - len(token)
        at = match.end()


def _name_lists(node: Node) -> Sequence[tuple[str, ...]]:
    # The names of each choice of addends, as often as they occur.
    if isinstance(node, Name):
        return [(node.name,)]
    if isinstance(node, Shard):
        return _name_lists(node.node)
    if isinstance(node, Sum):
        return [names for addend in node.addends for names in _name_lists(addend)]
    choices = itertools.product(*(_name_lists(factor) for factor in node.factors))
    return [tuple(itertools.chain(*names)) for names in choices]


def _axes(node: Node) -> Iterator[str]:
    if isinstance(node, Shard):
        yield from node.axes
        yield from _axes(node.node)
    elif isinstance(node, Product):
        for factor in node.factors:
            yield from _axes(factor)
    elif isinstance(node, Sum):
        for addend in node.addends:
            yield from _axes(addend)


def names_of(node: Node) -> frozenset[str]:
    """The names of all factors in `node`."""
    return frozenset(itertools.chain(*_name_lists(node)))
