"""Solves the sizes of named dims from tensor shapes, and computes with sizes.

Each shape is an equation. Equations are solved one unknown size at a time. Sizes and
scales can be arithmetic on other sizes, such as `d ** 0.5` or `heads / kv`.
`bfloat16(x)` rounds x to bfloat16.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any

import ml_dtypes  # noqa: F401  NumPy knows bfloat16 by its import
import numpy as np

from elastic_ckpt.universal.rules import dims
from elastic_ckpt.universal.rules.dims import Scope
from elastic_ckpt.universal.rules.layout import LayoutError, Rule

_OPERATORS: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Pow: math.pow,
}
_ROUNDED = ("bfloat16", "float16", "float32")
_MOST_CHARACTERS = 200


@functools.lru_cache(maxsize=2**10)
def _parsed(expression: str) -> tuple[ast.expr, frozenset[str]]:
    # The syntax tree and the names of the sizes in it.
    try:
        if len(expression) > _MOST_CHARACTERS:
            raise SyntaxError("it is too long")
        tree = ast.parse(expression.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        shown = expression[:_MOST_CHARACTERS]
        raise LayoutError(f"{shown!r} is not valid arithmetic: {error}") from None
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    used -= {*_ROUNDED}
    with contextlib.suppress(ArithmeticError, ValueError):
        _value(tree, dict.fromkeys(used, 1))
    return tree, frozenset(used)


def _value(node: ast.expr, sizes: Mapping[str, Any]) -> float:
    match node:
        case ast.Constant(value=int() | float() as number) if number is not True:
            return float(number)
        case ast.Name(id=name) if name in sizes:
            return float(sizes[name])
        case ast.Call(func=ast.Name(id=dtype), args=[number]) if dtype in _ROUNDED:
            return float(np.dtype(dtype).type(_value(number, sizes)))
        case ast.UnaryOp(op=ast.USub(), operand=number):
            return -_value(number, sizes)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_value(left, sizes), _value(right, sizes))
    raise LayoutError(
        f"{ast.unparse(node)!r} is not allowed in a size or scale; use only numbers, "
        "sizes, + - * / // ** and bfloat16(...)"
    )


def names(expression: object) -> frozenset[str]:
    """The names of the sizes that an expression uses; none if it is a number.

    Raises:
      LayoutError: if the expression is not arithmetic on numbers and names.
    """
    return _parsed(expression)[1] if isinstance(expression, str) else frozenset()


def value(expression: float | str, sizes: Mapping[str, Any]) -> float:
    """Computes an expression; `sizes` must have all the names in it.

    Raises:
      LayoutError: if the expression has no finite value.
    """
    if not isinstance(expression, str):
        return expression
    try:
        number = _value(_parsed(expression)[0], sizes)
    except (ArithmeticError, ValueError) as error:
        raise LayoutError(f"{expression!r} cannot be computed: {error}") from None
    if not math.isfinite(number):
        raise LayoutError(f"{expression!r} is {number}, but must be finite")
    return number


@dataclasses.dataclass(frozen=True)
class Equation:
    """The length of a dim on one rank.

    Attributes:
      ranks: the rank and the number of ranks, by axis, as in `dims.Scope`.
      origin: a description of the dim, used in error messages.
      is_least: whether `length` is only a lower bound because a capture need not have
        all values.
    """

    node: dims.Node
    length: int
    ranks: Mapping[str, tuple[int, int]]
    origin: str
    is_least: bool = False

    @property
    def names(self) -> frozenset[str]:
        """The names in the dim."""
        return dims.names((self.node,))


def solve(
    rule: Rule, equations: Sequence[Equation], shared: Mapping[str, int]
) -> dict[str, Fraction]:
    """Solves a rule's sizes from equations and the sizes that the rule sets.

    `shared` has sizes from other rules, which are used if the equations do not
    determine a size.

    Raises:
      LayoutError: if no sizes satisfy the equations.
    """
    known = {
        name: Fraction(size)
        for name, size in rule.sizes.items()
        if isinstance(size, int | float)
    }
    for name, by_axis in rule.widths.items():
        known[name] = Fraction(sum(next(iter(by_axis.values()))))
    while True:
        known = _computed(rule, known)
        solved = (_solved(each, rule, known) for each in equations)
        name, size = next(filter(None, solved), (None, Fraction()))
        if name is None:
            lent = sorted(shared.keys() - known.keys())
            if not lent:
                break
            name, size = lent[0], Fraction(shared[lent[0]])
        known[name] = size
    for each in equations:
        if each.names <= known.keys():
            made = dims.length(each.node, Scope(known, each.ranks, rule.widths))
            if made < each.length or (made > each.length and not each.is_least):
                raise _misfit(each, known, f"not {made}")
    return known


def _computed(rule: Rule, known: dict[str, Fraction]) -> dict[str, Fraction]:
    # Adds the sizes that the rule's arithmetic yields from known sizes.
    more: dict[str, Fraction] | None = None
    while more is None or more:
        more = {
            name: Fraction(value(size, known))
            for name, size in rule.sizes.items()
            if isinstance(size, str)
            and name not in known
            and names(size) <= known.keys()
        }
        known = {**known, **more}
    return known


def unknown(
    used: frozenset[str], rule: Rule, known: Mapping[str, object]
) -> frozenset[str]:
    """The unknown sizes among `used`, or the unknown sizes that they depend on."""
    found = used - known.keys()
    for _ in rule.sizes:
        found = frozenset(
            base
            for name in found
            for base in names(rule.sizes.get(name)) - known.keys() or {name}
        )
    return found


def _solved(
    equation: Equation, rule: Rule, known: dict[str, Fraction]
) -> tuple[str, Fraction] | None:
    # Solves an equation if it has exactly one unknown size and is linear.
    found = unknown(equation.names, rule, known)
    if len(found) != 1:
        return None
    (name,) = found
    lengths = []
    for number in (1, 2, 3):
        try:
            sizes = _computed(rule, {**known, name: Fraction(number)})
            scope = Scope(sizes, equation.ranks, rule.widths)
            lengths.append(dims.length(equation.node, scope))
        except (LayoutError, KeyError):
            return None
    step = lengths[1] - lengths[0]
    if not step or lengths[2] - lengths[1] != step:
        return None
    size = 1 + Fraction(equation.length - lengths[0]) / step
    size = Fraction(math.ceil(size)) if equation.is_least else size
    if size.denominator != 1 or size < 0:
        raise _misfit(equation, known, f"which no size of {name} yields")
    return name, size


def _misfit(
    equation: Equation, known: Mapping[str, Fraction], expected: str
) -> LayoutError:
    made = (f"{name}={known[name]}" for name in sorted(equation.names & known.keys()))
    return LayoutError(
        f"{equation.origin} is {equation.length}, {expected}, given "
        f"{', '.join(made) or 'no sizes'}"
    )
