"""Random small mistakes: where one can be made in a module, and the module with it."""

import ast
import collections
import dataclasses
from collections.abc import Iterator
from typing import Any

_PAIRS = (
    *((ast.Lt, ast.LtE), (ast.Gt, ast.GtE), (ast.Eq, ast.NotEq), (ast.In, ast.NotIn)),
    *((ast.Is, ast.IsNot), (ast.Add, ast.Sub), (ast.And, ast.Or)),
)
_SWAPPED = {
    **{one: other for pair in _PAIRS for one, other in (pair, pair[::-1])},
    **{ast.Mult: ast.Add, ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv},
}
_SWAPPED_CALLS = {
    "min": "max",
    "max": "min",
    "sorted": "list",
    "all": "any",
    "any": "all",
}


@dataclasses.dataclass(frozen=True)
class Mutant:
    """One mistake; its name outlives edits elsewhere in the module.

    Attributes:
      path: The module's, from the project's root.
      function: Its qualified name.
      kind: What is changed, one of those of `_mistakes`.
      text: The code that is changed.
      number: Of the places in the function with this kind and text, which one.
    """

    path: str
    function: str
    kind: str
    text: str
    number: int


def mutants(path: str, source: str) -> list[tuple[Mutant, range]]:
    """All of a module, each with the lines whose execution reaches it."""
    return [(mutant, lines) for mutant, lines, _ in _places(path, ast.parse(source))]


def mutated(source: str, mutant: Mutant) -> ast.Module | None:
    """The module with the mistake, or None if the code is no longer there."""
    tree = ast.parse(source)
    for found, _, change in _places(mutant.path, tree):
        if found == mutant:
            setattr(*change)
            return ast.fix_missing_locations(tree)
    return None


def _places(path: str, tree: ast.Module) -> Iterator[tuple[Mutant, range, tuple]]:
    numbers: collections.Counter = collections.Counter()
    for function, node in _nodes(tree, ""):
        for kind, field, mistake in _mistakes(node):
            end = node.test if kind == "if" else node
            text = ast.unparse(end)[:200]
            key = function, kind, text
            lines = range(node.lineno, end.end_lineno + 1)
            yield Mutant(path, *key, numbers[key]), lines, (node, field, mistake)
            numbers[key] += 1


def _nodes(node: ast.AST, function: str) -> Iterator[tuple[str, ast.AST]]:
    """Nodes of function bodies, but not the texts of errors and of messages."""
    if isinstance(node, ast.Raise | ast.JoinedStr):
        return
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        for child in node.body:
            yield from _nodes(child, f"{function}.{node.name}".lstrip("."))
        return
    if isinstance(node, ast.ClassDef):
        for child in node.body:
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                yield from _nodes(child, f"{function}.{node.name}".lstrip("."))
        return
    if function:
        yield function, node
    for child in ast.iter_child_nodes(node):
        yield from _nodes(child, function)


def _mistakes(node: ast.AST) -> Iterator[tuple[str, str, Any]]:
    """The kinds of mistakes in a node, and what each has in the place of a field."""
    match node:
        case ast.Compare(ops=[op]):
            yield "comparison", "ops", [_SWAPPED[type(op)]()]
        case ast.BinOp(
            op=ast.Add() | ast.Sub() | ast.Mult() | ast.FloorDiv() | ast.Mod() as op
        ):
            yield "arithmetic", "op", _SWAPPED[type(op)]()
        case ast.Constant(value=bool() as value):
            yield "truth", "value", not value
        case ast.Constant(value=int() as value):
            yield "number", "value", value + 1
        case ast.If(test=test) | ast.IfExp(test=test):
            yield "if", "test", ast.UnaryOp(op=ast.Not(), operand=test)
        case ast.BoolOp(op=op):
            yield "and_or", "op", _SWAPPED[type(op)]()
        case ast.Expr(value=ast.Call() | ast.Await()):
            yield "call_left_out", "value", ast.Constant(value=None)
        case ast.Call(func=ast.Name(id=name)) if name in _SWAPPED_CALLS:
            yield "function", "func", ast.Name(id=_SWAPPED_CALLS[name], ctx=ast.Load())
        case ast.AugAssign(op=op):
            yield "added", "op", _SWAPPED.get(type(op), ast.Sub)()
