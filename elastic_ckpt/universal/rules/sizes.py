"""Solves the sizes of named dims from the shapes of tensors.

Each dim of each tensor is an equation, linear in every name. Sizes that are given or
counted (captures, ranks) come first; then each equation with one unknown gives it,
until nothing changes. All equations have to hold at the end.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction

from elastic_ckpt.universal.rules import dims, geometry, size_expression
from elastic_ckpt.universal.rules.checkpoint_value import CheckpointValue
from elastic_ckpt.universal.rules.geometry import Scope
from elastic_ckpt.universal.rules.layout_error import LayoutError
from elastic_ckpt.universal.rules.rule import Rule


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Equation:
    """A length that an expression has.

    Attributes:
      node: the expression.
      length: its value.
      ranks: the number of the rank and of all ranks, by axis.
      origin: for messages, `dim 0 of 'embed' ('vocab embed')`.
    """

    node: dims.Node
    length: int
    ranks: Mapping[str, tuple[int, int]]
    origin: str


def solve(rule: Rule, equations: Sequence[Equation]) -> dict[str, int]:
    """The sizes of the names in `equations`.

    Args:
      rule: with the sizes and widths that are given.
      equations: in the order in which they are preferred; messages name the others.

    Raises:
      LayoutError: names the dims whose sizes do not fit or remain unknown.
    """
    known: dict[str, Fraction] = {}
    for name, size in rule.sizes.items():
        if isinstance(size, int | float):
            known[name] = Fraction(size)
    for name, by_axis in rule.widths.items():
        for widths in by_axis.values():
            known.setdefault(name, Fraction(sum(widths)))
    pending = list(equations)
    while _expressions(rule, known) or _step(rule, pending, known):
        pass
    for equation in equations:
        _check(rule, equation, known)
    unknown = {name for equation in equations for name in _unknown(equation, known)}
    if unknown:
        origins = [
            f"{each.origin} is {each.length}"
            for each in equations
            if _unknown(each, known)
        ]
        raise LayoutError(
            f"{rule.text}: the sizes of {', '.join(sorted(unknown))} are not "
            f"determined ({origins[0]}); give all of them but one in `sizes`"
            f"{_missing(rule, unknown)}"
        )
    for name, size in known.items():
        if size.denominator != 1 or size < 0:
            raise LayoutError(f"{rule.text}: the size of {name} cannot be {size}")
    return {name: int(size) for name, size in known.items()}


def require(rule: Rule, names: Iterable[str], sizes: Mapping[str, int]) -> None:
    """Checks that all `names` have sizes.

    Raises:
      LayoutError: names those that have none.
    """
    missing = sorted(name for name in names if name not in sizes)
    if missing:
        raise LayoutError(
            f"{rule.text}: no tensor gives the sizes of {', '.join(missing)}; give "
            f"them in `sizes`{_missing(rule, missing)}"
        )


def _missing(rule: Rule, unknown: Iterable[str]) -> str:
    # The values of the checkpoint on which unknown sizes depend, and which it lacks.
    pending, sentences = list(unknown), dict[str, None]()
    seen = set(pending)
    while pending:
        size = rule.sizes.get(pending.pop())
        if isinstance(size, CheckpointValue):
            sentences[size.missing] = None
        elif isinstance(size, str):
            needed = size_expression.names(size) - seen
            seen |= needed
            pending += sorted(needed)
    return "".join(f"; {each}" for each in sentences)


def _expressions(rule: Rule, known: dict[str, Fraction]) -> bool:
    solved = False
    for name, size in rule.sizes.items():
        if isinstance(size, str) and name not in known:
            needed = size_expression.names(size)
            if all(each in known for each in needed):
                numbers = {each: float(known[each]) for each in needed}
                known[name] = Fraction(size_expression.result(size, numbers))
                solved = True
    return solved


def _step(rule: Rule, pending: list[Equation], known: dict[str, Fraction]) -> bool:
    # Solves the equations that have one unknown, and takes them out.
    solved = False
    for equation in list(pending):
        unknown = _unknown(equation, known)
        if len(unknown) > 1:
            continue
        pending.remove(equation)
        for name in unknown:
            at_0, at_1 = (
                _length(rule, equation, {**known, name: Fraction(number)})
                for number in (0, 1)
            )
            if at_0 != at_1:
                known[name] = (equation.length - at_0) / (at_1 - at_0)
                solved = True
                if known[name].denominator != 1 or known[name] < 0:
                    raise _misfit(rule, equation, known, without=name)
    return solved


def _check(rule: Rule, equation: Equation, known: Mapping[str, Fraction]) -> None:
    if not _unknown(equation, known):
        size = _length(rule, equation, known)
        if size != equation.length:
            raise _misfit(rule, equation, known)


def _misfit(
    rule: Rule,
    equation: Equation,
    known: Mapping[str, Fraction],
    *,
    without: str | None = None,
) -> LayoutError:
    names = sorted(dims.names_of(equation.node) - {without})
    sizes = ", ".join(f"{name}={known[name]}" for name in names if name in known)
    if without is None:
        expected = f"not {_length(rule, equation, known)}, which {sizes or '1'} make"
    else:
        expected = f"which no size of {without} makes" + f" with {sizes}" * bool(sizes)
    return LayoutError(
        f"{rule.text}: {equation.origin} is {equation.length}, {expected}"
    )


def _length(rule: Rule, equation: Equation, sizes: Mapping[str, Fraction]) -> Fraction:
    scope = Scope(sizes=sizes, ranks=equation.ranks, widths=rule.widths)
    try:
        return geometry.length(equation.node, scope)
    except LayoutError as error:
        raise LayoutError(f"{rule.text}: {equation.origin}: {error}") from None


def _unknown(equation: Equation, known: Mapping[str, Fraction]) -> set[str]:
    return {name for name in dims.names_of(equation.node) if name not in known}
