"""Random small mistakes: where one can be made in a module, and the module with it."""

import ast
import collections
import dataclasses
from collections.abc import Iterator

_SWAPPED = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.And: ast.Or,
    ast.Or: ast.And,
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
      kind: What is changed, one of those of `_kinds`.
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
    for found, _, node in _places(mutant.path, tree):
        if found == mutant:
            _change(node, mutant.kind)
            return ast.fix_missing_locations(tree)
    return None


def _places(path: str, tree: ast.Module) -> Iterator[tuple[Mutant, range, ast.AST]]:
    numbers: collections.Counter = collections.Counter()
    for function, node in _nodes(tree, ""):
        for kind in _kinds(node):
            end = node.test if kind == "if" else node
            text = ast.unparse(end)[:200]
            key = function, kind, text
            lines = range(node.lineno, end.end_lineno + 1)
            yield Mutant(path, *key, numbers[key]), lines, node
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


def _kinds(node: ast.AST) -> Iterator[str]:
    match node:
        case ast.Compare(ops=[_]):
            yield "comparison"
        case ast.BinOp(
            op=ast.Add() | ast.Sub() | ast.Mult() | ast.FloorDiv() | ast.Mod()
        ):
            yield "arithmetic"
        case ast.Constant(value=bool()):
            yield "truth"
        case ast.Constant(value=int()):
            yield "number"
        case ast.If() | ast.IfExp():
            yield "if"
        case ast.BoolOp():
            yield "and_or"
        case ast.Expr(value=ast.Call() | ast.Await()):
            yield "call_left_out"
        case ast.Call(func=ast.Name(id=name)) if name in _SWAPPED_CALLS:
            yield "function"
        case ast.AugAssign():
            yield "added"


def _change(node: ast.AST, kind: str) -> None:
    match kind:
        case "comparison":
            node.ops[0] = _SWAPPED[type(node.ops[0])]()
        case "arithmetic" | "and_or":
            node.op = _SWAPPED[type(node.op)]()
        case "truth":
            node.value = not node.value
        case "number":
            node.value += 1
        case "if":
            node.test = ast.UnaryOp(op=ast.Not(), operand=node.test)
        case "call_left_out":
            node.value = ast.Constant(value=None)
        case "function":
            node.func.id = _SWAPPED_CALLS[node.func.id]
        case "added":
            node.op = _SWAPPED.get(type(node.op), ast.Sub)()
