"""Arithmetic on named sizes, for scales and sizes: `d ** 0.5`, `2 * half`."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping

from elastic_ckpt.universal.rules.layout_error import LayoutError

_OPERATORS: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Pow: lambda base, exponent: math.pow(base, exponent),
}
_MAX_LENGTH = 200


def names(expression: str | float) -> frozenset[str]:
    """The sizes that `expression` uses.

    Raises:
      LayoutError: if it is no arithmetic on numbers and names.
    """
    if not isinstance(expression, str):
        return frozenset()
    tree = _parse(expression)
    return frozenset(node.id for node in ast.walk(tree) if isinstance(node, ast.Name))


def result(expression: str | float, sizes: Mapping[str, float]) -> float:
    """The value of `expression`.

    Args:
      expression: a number, or arithmetic on numbers and names.
      sizes: of all names in it.

    Raises:
      LayoutError: if it is malformed or has no finite value.
    """
    if not isinstance(expression, str):
        return expression
    try:
        number = _result(_parse(expression), sizes)
    except (ArithmeticError, ValueError) as error:
        raise LayoutError(f"{expression!r} has no value: {error}") from None
    if isinstance(number, complex) or not math.isfinite(number):
        raise LayoutError(f"{expression!r} has no value: {number}")
    return number


def _parse(expression: str) -> ast.expr:
    if len(expression) > _MAX_LENGTH:
        raise LayoutError(f"{expression[:40]!r}... is too long for a size or scale")
    try:
        tree = ast.parse(expression.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise LayoutError(f"{expression!r} is no arithmetic: {error}") from None
    for node in ast.walk(tree):
        allowed = (
            isinstance(node, ast.Name | ast.Load | ast.UnaryOp | ast.USub)
            or (isinstance(node, ast.Constant) and type(node.value) in (int, float))
            or (isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS)
            or type(node) in _OPERATORS
        )
        if not allowed:
            raise LayoutError(
                f"{expression!r} is no arithmetic on numbers and sizes: "
                f"{type(node).__name__} is not allowed"
            )
    return tree


def _result(node: ast.expr, sizes: Mapping[str, float]) -> float:
    if isinstance(node, ast.Constant):
        assert isinstance(node.value, int | float)
        return node.value
    if isinstance(node, ast.Name):
        return sizes[node.id]
    if isinstance(node, ast.UnaryOp):
        return -_result(node.operand, sizes)
    assert isinstance(node, ast.BinOp)
    combine = _OPERATORS[type(node.op)]
    return combine(_result(node.left, sizes), _result(node.right, sizes))
