"""Arithmetic on named sizes, for scales and sizes: `d ** 0.5`, `2 * half`.

`bfloat16(d ** 0.5)` is the number as that dtype has it.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping

import ml_dtypes  # noqa: F401  NumPy knows bfloat16 by its import
import numpy as np

from elastic_ckpt.universal.rules.layout import LayoutError

_OPERATORS: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Pow: math.pow,
}
_ROUNDED = ("bfloat16", "float16", "float32")
_MAX_LENGTH = 200


class NoValueError(LayoutError):
    """Arithmetic has no value for these sizes."""


def names(expression: str | float) -> frozenset[str]:
    """The sizes that `expression` uses.

    Raises:
      LayoutError: if it is no arithmetic on numbers and names.
    """
    if not isinstance(expression, str):
        return frozenset()
    tree = _parse(expression)
    return frozenset(
        node.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Name) and node.id not in _ROUNDED
    )


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
        raise NoValueError(f"{expression!r} has no value: {error}") from None
    if not math.isfinite(number):
        raise NoValueError(f"{expression!r} has no value: {number}")
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
            or (isinstance(node, ast.Call) and _rounds(node))
        )
        if not allowed:
            raise LayoutError(
                f"{expression!r} is no arithmetic on numbers and sizes: "
                f"{type(node).__name__} is not allowed"
            )
    return tree


def _rounds(call: ast.Call) -> bool:
    is_named = isinstance(call.func, ast.Name) and call.func.id in _ROUNDED
    return is_named and len(call.args) == 1 and not call.keywords


def _result(node: ast.expr, sizes: Mapping[str, float]) -> float:
    if isinstance(node, ast.Constant):
        assert isinstance(node.value, int | float)
        return node.value
    if isinstance(node, ast.Name):
        if node.id in _ROUNDED and node.id not in sizes:
            raise ValueError(f"{node.id} rounds a number: write {node.id}(...)")
        return sizes[node.id]
    if isinstance(node, ast.Call):
        assert isinstance(node.func, ast.Name)
        return float(np.dtype(node.func.id).type(_result(node.args[0], sizes)))
    if isinstance(node, ast.UnaryOp):
        return -_result(node.operand, sizes)
    assert isinstance(node, ast.BinOp)
    combine = _OPERATORS[type(node.op)]
    return combine(_result(node.left, sizes), _result(node.right, sizes))
