"""Solves the sizes of named dims from the shapes of tensors.

Each dim of each tensor is an equation, linear in every name, as is the number of values
of each capture. Sizes that are given or counted come first; then each equation with one
unknown gives it, until nothing changes. All equations have to hold at the end.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from fractions import Fraction

from elastic_ckpt.universal.rules import dims, size_expression
from elastic_ckpt.universal.rules.dims import Clip, Scope
from elastic_ckpt.universal.rules.layout import CheckpointValue, LayoutError, Rule
from elastic_ckpt.universal.rules.relation import ParsedTensor, Relation, Row


class UnknownSizeError(LayoutError):
    """Shapes do not determine a size; those of another rule may."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Equation:
    """A length that an expression has.

    Attributes:
      node: the expression.
      length: its value.
      ranks: the number of the rank and of all ranks, by axis.
      origin: for messages, `dim 0 of 'embed' ('vocab embed')`.
      is_least: whether the length may be more: an instance may lack the last addends of
        a sum.
    """

    node: dims.Node
    length: int
    ranks: Mapping[str, tuple[int, int]]
    origin: str
    is_least: bool = False

    @property
    def variables(self) -> frozenset[str]:
        """What its length depends on: names, and the texts of clipped products."""
        return _variables(self.node)


def equations(
    relation: Relation, sides: Sequence[Sequence[Row]], counts: Mapping[str, int]
) -> Iterator[Equation]:
    """The equations of shapes, then those of captures and rank axes.

    Args:
      relation: the rule.
      sides: the tensors of both sides.
      counts: the number of ranks, by axis.

    Raises:
      LayoutError: if a tensor has another number of dims.
    """
    seen = set()
    for tensors, side in zip((relation.sources, relation.targets), sides, strict=True):
        for row in side:
            tensor = tensors[row.tensor]
            axes = tensor.dims.axes
            captured = row.captured if axes & tensor.name.names else ()
            key = (id(tensor), row.shape, row.ranks if axes else (), captured)
            if key in seen:
                continue
            seen.add(key)
            ranks = {
                axis: (int(number), counts[axis])
                for axis, number in (*row.ranks, *captured)
                if axis in axes
            }
            yield from _shape_equations(tensor, row, ranks)
    for tensors, side in zip((relation.sources, relation.targets), sides, strict=True):
        for tensor in tensors:
            captured = [row.captured for row in side if row.tensor == tensor.number]
            yield from _capture_equations(tensor, captured)
    for pair in relation.pairs:
        for axis in sorted(pair.source.coordinates & counts.keys()):
            if axis not in pair.source.names:
                yield Equation(
                    node=dims.Name(axis),
                    length=counts[axis],
                    ranks={},
                    origin=f"the number of ranks of {axis}",
                )


def _capture_equations(
    tensor: ParsedTensor, captured: Sequence[tuple[tuple[str, int | str], ...]]
) -> Iterator[Equation]:
    if not captured:
        return
    places = {key: at for at, (key, _) in enumerate(captured[0])}
    for capture in tensor.coordinates:
        at = places[capture.key]
        most = max(int(values[at][1]) for values in captured)
        yield Equation(
            node=capture.node,
            length=len(capture.choices) or most + 1,
            ranks={},
            origin=f"the number of values of {{{capture.key}}} in {tensor.place}",
            is_least=any(isinstance(n, dims.Sum) for n in dims.walk(capture.node)),
        )


def _shape_equations(
    tensor: ParsedTensor, row: Row, ranks: Mapping[str, tuple[int, int]]
) -> Iterator[Equation]:
    nodes = tensor.dims.nodes
    if len(nodes) != len(row.shape):
        raise LayoutError(
            f"{tensor.place}: {row.name!r} has shape {list(row.shape)}, the rule "
            f"describes {len(nodes)} dims: {tensor.dims.text!r}"
        )
    for dim, (node, length) in enumerate(zip(nodes, row.shape, strict=True)):
        origin = f"dim {dim} of {row.name!r} ({tensor.dims.text!r})"
        yield Equation(node=node, length=length, ranks=ranks, origin=origin)


def solve(
    rule: Rule,
    system: Sequence[Equation],
    shared: Mapping[str, int] | None = None,
    clips: Iterable[Clip] = (),
) -> dict[str, int]:
    """The sizes of the names in equations.

    Args:
      rule: with the sizes and widths that are given.
      system: equations, of which earlier ones are solved first; an error names the
        later one that disagrees.
      shared: sizes that other rules have, for names that remain unknown.
      clips: the clipped products of all tensors.

    Raises:
      LayoutError: names the dims whose sizes do not fit or remain unknown;
        UnknownSizeError if they remain unknown.
    """
    return _Solver(rule, system, clips).solve(shared or {})


def require(rule: Rule, names: Iterable[str], sizes: Mapping[str, float]) -> None:
    """Checks that all `names` have sizes.

    Raises:
      UnknownSizeError: names those that have none.
    """
    missing = sorted(name for name in names if name not in sizes)
    if missing:
        raise UnknownSizeError(
            f"{rule.text}: no tensor gives the sizes of {', '.join(missing)}; give "
            f"them in `sizes`, or by `--size {missing[0]}=...` of elastic-ckpt convert"
            f"{_missing(rule, missing)}"
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


class _Solver:
    def __init__(
        self, rule: Rule, system: Sequence[Equation], clips: Iterable[Clip]
    ) -> None:
        self._wide = [dims.names_of(clip.node) for clip in clips]
        self._rule = rule
        self._system = system
        self._pending = list(system)
        self._clips = {
            str(each): each
            for equation in system
            for each in dims.walk(equation.node)
            if isinstance(each, Clip)
        }
        self._known: dict[str, Fraction] = {}
        for name, size in rule.sizes.items():
            if isinstance(size, int | float):
                self._known[name] = Fraction(size)
        for name, by_axis in rule.widths.items():
            for widths in by_axis.values():
                self._known.setdefault(name, Fraction(sum(widths)))

    def solve(self, shared: Mapping[str, int]) -> dict[str, int]:
        self._run()
        for name in sorted(shared.keys() & self._wanted()):
            if name in self._wanted():
                self._known[name] = Fraction(shared[name])
                self._run()
        for equation in self._system:
            self._check(equation)
        self._check_expressions()
        unknown = self._unknown()
        if unknown:
            origins = [
                f"{each.origin} is {each.length}"
                for each in self._system
                if each.variables & unknown
            ]
            name = min(unknown)
            raise UnknownSizeError(
                f"{self._rule.text}: the sizes of {', '.join(sorted(unknown))} are not "
                f"determined ({(*origins, '')[0]}); give all of them but one in "
                f"`sizes`, or by `--size {name}=...` of elastic-ckpt convert"
                f"{_missing(self._rule, unknown)}"
            )
        lengths = {n for each in self._system for n in dims.names_of(each.node)}
        made = {}
        for name, size in self._known.items():
            if size.denominator == 1 and size >= 0:
                made[name] = int(size)
            # A number that is given may be for scales alone.
            elif name in lengths or isinstance(self._rule.sizes.get(name), str):
                raise LayoutError(
                    f"{self._rule.text}: the size of {name} cannot be {size}"
                )
        return made

    def _run(self) -> None:
        while (
            self._expressions()
            or self._step()
            or self._clipped()
            or self._step(is_computed=True)
        ):
            pass

    def _unknown(self) -> set[str]:
        found = {name for each in self._system for name in each.variables}
        for clip in self._clips.values():
            found |= _variables(clip.node)
        return found - self._known.keys()

    def _wanted(self) -> set[str]:
        # What is unknown, and the unknown sizes that it is computed from.
        found = pending = self._unknown()
        while pending:
            exprs = (self._rule.sizes.get(name) for name in pending)
            needed = [size_expression.names(e) for e in exprs if isinstance(e, str)]
            pending = set().union(*needed) - self._known.keys() - found
            found = found | pending
        return found

    def _expressions(self) -> bool:
        computed = self._computed({})
        self._known |= computed
        return bool(computed)

    def _check_expressions(self) -> None:
        for name, size in self._rule.sizes.items():
            if isinstance(size, str) and size_expression.names(size) <= (
                self._known.keys()
            ):
                numbers = {each: float(n) for each, n in self._known.items()}
                number = size_expression.result(size, numbers)
                if Fraction(number) != self._known.get(name, number):
                    raise LayoutError(
                        f"{self._rule.text}: `sizes` has {name}: {size}, which is "
                        f"{number:g}, but the shapes make it {self._known[name]}"
                    )

    def _step(self, *, is_computed: bool = False) -> bool:
        # Solves the equations that have one unknown, or also several that are computed
        # of one, and takes them out.
        solved = False
        for equation in list(self._pending):
            unknown = equation.variables - self._known.keys()
            bases = self._bases(unknown) if is_computed else unknown
            if len(bases) > 1 or (unknown and not bases):
                continue
            self._pending.remove(equation)
            for name in bases:
                size = self._solved(equation, name, num_lengths=2 + is_computed)
                if size is not None:
                    self._known[name] = size
                    solved = True
                    if size.denominator != 1 or size < 0:
                        raise self._misfit(equation, without=name)
        return solved

    def _bases(self, unknown: Set[str]) -> set[str]:
        # What unknown sizes are computed from, where the rule computes them.
        bases: set[str] = set()
        pending, seen = list(unknown), set(unknown)
        while pending:
            name = pending.pop()
            size = self._rule.sizes.get(name)
            if not isinstance(size, str):
                bases.add(name)
                continue
            needed = size_expression.names(size) - self._known.keys() - seen
            seen |= needed
            pending += needed
        return bases

    def _solved(
        self, equation: Equation, name: str, *, num_lengths: int
    ) -> Fraction | None:
        # The size of a name with which the equation holds; None if it does not tell.
        try:
            lengths = [
                self._length(equation, self._computed({name: Fraction(n)}))
                for n in range(1, num_lengths + 1)
            ]
        except (KeyError, size_expression.NoValueError):
            return None
        steps = {after - before for before, after in itertools.pairwise(lengths)}
        step = steps.pop()
        if steps or not step:
            return None
        size = 1 + (equation.length - lengths[0]) / step
        return Fraction(math.ceil(size)) if equation.is_least else size

    def _computed(self, sizes: dict[str, Fraction]) -> dict[str, Fraction]:
        # With the sizes that the rule computes from these and from known ones.
        is_more = True
        while is_more:
            is_more = False
            known = {**self._known, **sizes}
            for name, size in self._rule.sizes.items():
                if isinstance(size, str) and name not in known:
                    needed = size_expression.names(size)
                    if needed <= known.keys():
                        numbers = {each: float(known[each]) for each in needed}
                        number = size_expression.result(size, numbers)
                        sizes = {**sizes, name: Fraction(number)}
                        is_more = True
        return sizes

    def _clipped(self) -> bool:
        # The number of rows of a clipped product, of which the last may be cut short.
        for key, clip in self._clips.items():
            unknown = _variables(clip.node) - self._known.keys()
            if key in self._known and len(unknown) == 1:
                (name,) = unknown
                at_0, at_1 = (
                    dims.length(clip.node, Scope(sizes={**self._known, name: n}))
                    for n in (0, 1)
                )
                if at_0 != at_1:
                    rows = (self._known[key] - at_0) / (at_1 - at_0)
                    self._known[name] = Fraction(math.ceil(rows))
                    return True
        return False

    def _check(self, equation: Equation) -> None:
        known = self._known
        if equation.variables <= known.keys():
            length = self._length(equation)
            if length < equation.length or (
                length > equation.length and not equation.is_least
            ):
                raise self._misfit(equation)
        for each in dims.walk(equation.node):
            key = str(each)
            if isinstance(each, Clip) and _variables(each.node) <= known.keys():
                most = dims.length(each.node, Scope(sizes=known))
                row = dims.length(dims.last_row(each.node), Scope(sizes=known))
                # A part of a clipped sum can lack its part of the last row.
                is_part = any(dims.names_of(each.node) < wide for wide in self._wide)
                least = most - row + (not is_part) if most else most
                held = known.get(key, most)
                if not least <= held <= most:
                    names = sorted(dims.names_of(each.node))
                    made = ", ".join(f"{name}={known[name]}" for name in names)
                    raise LayoutError(
                        f"{self._rule.text}: {equation.origin}: {key} is {held}, and "
                        f"{made} make {least} to {most}"
                    )

    def _misfit(self, equation: Equation, *, without: str | None = None) -> LayoutError:
        known = self._known
        names = sorted(equation.variables - {without})
        sizes = ", ".join(f"{name}={known[name]}" for name in names if name in known)
        if without is None:
            expected = f"not {self._length(equation)}, which {sizes or '1'} make"
        else:
            expected = f"which no size of {without} makes"
            expected += f" with {sizes}" * bool(sizes)
        return LayoutError(
            f"{self._rule.text}: {equation.origin} is {equation.length}, {expected}"
        )

    def _length(
        self, equation: Equation, given: Mapping[str, Fraction] | None = None
    ) -> Fraction:
        scope = Scope(
            sizes={**self._known, **(given or {})},
            ranks=equation.ranks,
            widths=self._rule.widths,
        )
        try:
            return dims.length(equation.node, scope)
        except LayoutError as error:
            raise LayoutError(
                f"{self._rule.text}: {equation.origin}: {error}"
            ) from None


def _variables(node: dims.Node) -> frozenset[str]:
    if isinstance(node, Clip):
        return frozenset({str(node)})
    if isinstance(node, dims.Name):
        return frozenset({node.name})
    return frozenset().union(*map(_variables, dims.children(node)))
