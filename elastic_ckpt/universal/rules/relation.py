"""A parsed rule: which names are coordinates of which tensors, and which parts pair up.

Each tensor of a rule has elements with named coordinates: the factors of its dims, and
the names in its captures. All tensors of a pattern are slabs of one array whose first
dims are the captures. Rank axes give coordinates, too. A part of a
tensor (one addend of every sum) belongs to the part of the other side that has the same
coordinates.
"""

from __future__ import annotations

import copy
import dataclasses
import difflib
import functools
from collections.abc import Collection, Iterable, Iterator, Sequence

import numpy as np

from elastic_ckpt.universal.rules import dims, name_pattern, size_expression
from elastic_ckpt.universal.rules.dims import Dims
from elastic_ckpt.universal.rules.layout import LayoutError, Rule, TensorPattern
from elastic_ckpt.universal.rules.name_pattern import Capture, NamePattern

_OPERANDS = ("times", "plus")
# What elements can be of.
DTYPES = (
    "bool",
    *(f"{sign}int{bits}" for sign in ("", "u") for bits in (4, 8, 16, 32, 64)),
    *("bfloat16", "float16", "float32", "float64", "complex64", "complex128"),
    *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"),
    *("float8_e4m3", "float8_e3m4", "float8_e4m3b11fnuz", "float8_e8m0fnu"),
    "float4_e2m1fn",
)
# The values of the captures that all names of a rule have.
Kept = tuple[int | str, ...]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ParsedTensor:
    """A tensor pattern, parsed.

    Attributes:
      pattern: as it was written.
      number: of the pattern on its side.
      name: its name pattern.
      dims: its dims expression.
      place: for messages.
      is_target: whether it is a tensor of the target.
      main: the number of the tensor whose values it changes; None if it is no operand.
      role: the option of the tensor `main` that lists it.
      coordinates: the captures that are coordinates, as they occur in the name.
      name_sets: the names of each part: captures and factors.
    """

    pattern: TensorPattern
    number: int
    name: NamePattern
    dims: Dims
    place: str
    is_target: bool = False
    main: int | None = None
    role: str = ""
    coordinates: tuple[Capture, ...] = ()
    name_sets: tuple[frozenset[str], ...] = ()

    @property
    def has_sum(self) -> bool:
        """Whether a capture is the index of a sum."""
        return any(
            isinstance(node, dims.Sum)
            for capture in self.coordinates
            for node in dims.walk(capture.node)
        )

    def clips(self) -> list[dims.Clip]:
        """The clipped products of its dims and captures."""
        nodes = (*self.dims.nodes, *(each.node for each in self.coordinates))
        return [
            each
            for node in nodes
            for each in dims.walk(node)
            if isinstance(each, dims.Clip)
        ]

    @functools.cached_property
    def reduced(self) -> frozenset[str]:
        """The names that the other side lacks."""
        return frozenset(self.pattern.reduced)


@dataclasses.dataclass(frozen=True, slots=True)
class Term:
    """A part of the tensors of a pattern.

    Attributes:
      tensor: the number of the pattern on its side.
      names: the names of captures and factors of the part, which identify it.
      coordinates: those that it shares with the other side.
    """

    tensor: int
    names: frozenset[str]
    coordinates: frozenset[str]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Parts of both sides with the same coordinates.

    Attributes:
      source: the part that is copied.
      target: the part that is filled.
      compared: parts of further sources that have to be equal to it.
      operands: parts of the sources that change its values.
    """

    source: Term
    target: Term
    compared: tuple[Term, ...] = ()
    operands: tuple[Term, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A tensor that matches a pattern.

    Attributes:
      tensor: the number of the pattern on its side of the rule.
      name: of the tensor.
      captured: the values of captures by key, without those that all names have.
      ranks: the coordinates of the rank that saved it, by axis.
      shape: in elements.
      dtype: of its elements; None if the source decides it.
    """

    tensor: int
    name: str
    captured: tuple[tuple[str, int | str], ...]
    ranks: tuple[tuple[str, int], ...]
    shape: tuple[int, ...]
    dtype: np.dtype | None


class Relation:
    """A rule, parsed and checked.

    Attributes:
      rule: as it was written.
      sources: the tensors of the checkpoint; operands of others are last.
      targets: the tensors of the target.
      forms: the forms of captures that are texts, which hold in all names.
      numbers: the captures that are numbers.
      kept: the captures that all names have; each of their values is independent.
      pairs: the parts that belong together.
      padding: the parts of target tensors that have no source.
      absent: parts that no tensor may have, and whether they are of targets: addends of
        a name that the other side lacks.
      has_rest: whether it has dims that are not named, and `with_rest` is called first.
    """

    def __init__(self, rule: Rule, axes: Collection[str] | None) -> None:
        """Parses `rule`.

        Args:
          rule: with the sizes and widths of its layout.
          axes: the rank axes of the checkpoint; None if they are not known yet.

        Raises:
          LayoutError: if it cannot fit any checkpoint.
        """
        self._axes = axes
        sides = [list(_parsed(rule, key)) for key in ("from", "to")]
        self.forms = _forms(each.name for side in sides for each in side)
        sides = [
            [
                dataclasses.replace(each, name=each.name.with_forms(self.forms))
                for each in side
            ]
            for side in sides
        ]
        written = [*sides[0], *sides[1]]
        self.rule = rule
        self.numbers = _numbers(rule, written)
        self.kept = _kept(rule, written, self.numbers)
        self.numbers |= _always_numbers(written)
        self.has_rest = any(each.dims.has_rest for each in written)
        self._resolve(sides)
        self._by_rank: dict[int, Relation] = {}

    def with_rest(self, num_dims: int, tensor: int) -> Relation:
        """The relation with names for the dims of `...`.

        Args:
          num_dims: of a tensor of the source.
          tensor: the number of its pattern.

        Raises:
          LayoutError: if it has fewer dims than are named.
        """
        if not self.has_rest:
            return self
        count = num_dims - len(self.sources[tensor].dims.nodes) + 1
        if count not in self._by_rank:
            if count < 0:
                raise LayoutError(
                    f"{self.sources[tensor].place}: a tensor of {num_dims} dims has"
                    f" fewer than {self.sources[tensor].dims.text!r} names"
                )
            made = copy.copy(self)
            made.has_rest = False
            sides = [
                [
                    dataclasses.replace(
                        each,
                        dims=each.dims.with_rest(len(each.dims.nodes) - 1 + count),
                    )
                    for each in side
                ]
                for side in (self.sources, self.targets)
            ]
            made._resolve(sides)
            self._by_rank[count] = made
        return self._by_rank[count]

    def named(self, kept: Kept) -> dict[str, int | str]:
        """The values of kept captures, by their names."""
        return dict(zip(self.kept, kept, strict=True))

    def _resolve(self, sides: Sequence[list[ParsedTensor]]) -> None:
        self.sources, self.targets = (
            [self._with_coordinates(each) for each in side] for side in sides
        )
        if self.has_rest:
            self.pairs, self.padding, self.absent = [], [], []
        else:
            self.pairs, self.padding = self._paired()

    def _with_coordinates(self, tensor: ParsedTensor) -> ParsedTensor:
        captures = tuple(
            capture
            for capture in tensor.name.captures
            if not capture.names & {*self.kept, *tensor.dims.axes}
            and not (capture.key in tensor.reduced and capture.key not in self.numbers)
        )
        try:
            slab = Dims(
                tensor.pattern.dims,
                [*(capture.node for capture in captures), *tensor.dims.nodes],
            )
        except LayoutError as error:
            raise LayoutError(f"{tensor.place}: {error}") from None
        return dataclasses.replace(
            tensor,
            coordinates=captures,
            name_sets=tuple(slab.name_sets),
        )

    @staticmethod
    def _terms(tensors: Sequence[ParsedTensor]) -> Iterator[Term]:
        for tensor in tensors:
            for names in tensor.name_sets:
                yield Term(tensor.number, names, names - tensor.reduced)

    def _paired(self) -> tuple[list[Pair], list[Term]]:
        axes = self._axes
        self.absent: list[tuple[Term, bool]] = []
        sources = list(self._terms(self.sources))
        targets = list(self._terms(self.targets))
        operands = [each for each in sources if self.sources[each.tensor].role]
        sources = [each for each in sources if not self.sources[each.tensor].role]
        pad = self.rule.pad.keys()
        pairs = []
        for source in sources:
            fitting = [each for each in targets if self._fits(source, each)]
            if not fitting and self._is_absent(source, sources, targets):
                self.absent.append((source, False))
                continue
            if bool(fitting) == bool(source.coordinates & pad):
                raise self._misfit(source, self.sources, self.targets, fitting)
            if axes is not None and len(self._originals(fitting, self.targets)) > 1:
                raise self._misfit(source, self.sources, self.targets, fitting)
        padding = []
        for target in targets:
            fitting = [each for each in sources if self._fits(each, target)]
            originals = self._originals(fitting, self.sources)
            is_absent = self._is_absent(target, targets, sources, is_target=True)
            if not fitting and is_absent:
                self.absent.append((target, True))
            elif not fitting and target.coordinates & pad:
                padding.append(target)
            elif not fitting or (axes is not None and len(originals) > 1):
                raise self._misfit(target, self.targets, self.sources, fitting)
            elif axes is not None:
                ranks = target.coordinates - originals[0].coordinates
                source = dataclasses.replace(
                    originals[0], coordinates=target.coordinates
                )
                compared = [
                    dataclasses.replace(each, coordinates=target.coordinates)
                    for each in fitting
                    if each != originals[0]
                    and self.sources[each.tensor].pattern.copy == "checked"
                ]
                for each in compared:
                    self._check_comparable(source, each)
                of_source = (
                    dataclasses.replace(each, coordinates=each.coordinates | ranks)
                    for each in self._operands(source, operands)
                )
                pairs.append(
                    Pair(
                        source=source,
                        target=target,
                        compared=tuple(compared),
                        operands=tuple(of_source),
                    )
                )
        return pairs, padding

    def _is_absent(
        self,
        term: Term,
        of_side: Sequence[Term],
        others: Sequence[Term],
        *,
        is_target: bool = False,
    ) -> bool:
        # Whether a part is an addend of a name that no tensor has on this side, since
        # the other side has another addend alone.
        tensors = self.targets if is_target else self.sources
        if not tensors[term.tensor].has_sum or term.coordinates & self.rule.pad.keys():
            return False
        same = [each for each in of_side if each.tensor == term.tensor]
        return any(
            self._fits(other, each) if is_target else self._fits(each, other)
            for each in same
            for other in others
        )

    def _originals(
        self, terms: Sequence[Term], tensors: Sequence[ParsedTensor]
    ) -> Sequence[Term]:
        # Those that are no copies; all if there is nothing else.
        return [each for each in terms if not tensors[each.tensor].pattern.copy] or (
            terms[:1]
        )

    def _check_comparable(self, source: Term, copy: Term) -> None:
        tensor, other = self.sources[copy.tensor], self.sources[source.tensor]
        for option in ("scale", "shift", "viewed_as"):
            if getattr(tensor.pattern, option) != getattr(other.pattern, option):
                named = {"viewed_as": "as"}.get(option, option)
                raise LayoutError(
                    f"{tensor.place}: it has another `{named}` than "
                    f"{other.name.text!r}, with which it is compared in this "
                    "direction; write `copy: unchecked`"
                )

    def _operands(self, source: Term, operands: Sequence[Term]) -> Iterator[Term]:
        place = self.sources[source.tensor].place
        held = [t for t in operands if self.sources[t.tensor].main == source.tensor]
        for role in _OPERANDS:
            of_role = [each for each in held if self.sources[each.tensor].role == role]
            if role == "times":
                tensors = {each.tensor: each for each in of_role}
                of_role = [each for each in of_role if each.names <= source.names]
                for number in tensors.keys() - {each.tensor for each in of_role}:
                    lacking = tensors[number].names - source.names
                    raise LayoutError(
                        f"{self.sources[number].place}: it has the dims "
                        f"{_text(lacking)}, which {place} lacks; where a dim has both "
                        "blocks of scales and heads or parts, multiply in a layout of "
                        "its own, and lead `through` both"
                    )
            elif of_role:
                shared = [each.names - source.names for each in of_role]
                if len(of_role) != 2 or shared[0] != shared[1] or len(shared[0]) > 1:
                    raise LayoutError(
                        f"{place}: `plus` has two matrices, such as "
                        '{"B": "out r", "A": "r in"}, with one dim that the sum lacks'
                    )
            yield from of_role

    def _fits(self, source: Term, target: Term) -> bool:
        # The source's rank may be a coordinate of the target.
        missing = target.coordinates - source.coordinates
        tensor = self.sources[source.tensor]
        return (
            source.coordinates <= target.coordinates
            and not missing & (tensor.dims.axes | tensor.reduced)
            and (self._axes is None or missing <= set(self._axes))
        )

    def _misfit(
        self,
        term: Term,
        tensors: Sequence[ParsedTensor],
        others: Sequence[ParsedTensor],
        fitting: Sequence[Term],
    ) -> LayoutError:
        place = tensors[term.tensor].place
        padded = term.coordinates & self.rule.pad.keys()
        if fitting and padded:
            return LayoutError(
                f"{place}: {min(padded)} is listed in `pad`, but both sides have it; "
                f"remove it from `pad`"
            )
        if fitting:
            names = {others[each.tensor].name.text for each in fitting}
            return LayoutError(
                f"{place}: several parts of {', '.join(map(repr, sorted(names)))} have "
                f"the coordinates {_text(term.coordinates)}; name them differently, or "
                f"write `copy: checked` for all but one of them"
            )
        listed = "; ".join(
            f"{_text(each.coordinates)} in {others[each.tensor].name.text!r}"
            for each in self._terms(others)
            if not others[each.tensor].role
        )
        return LayoutError(
            f"{place}: the other side has no tensor with the coordinates "
            f"{_text(term.coordinates)}, but {listed or 'none'}; list captures, rank "
            f"axes and dims that it lacks in `replicated`, `unchecked`, `mean` or "
            f"`sum`, dims that are padding in `pad`"
        )


def _parsed(rule: Rule, key: str) -> Iterator[ParsedTensor]:
    number = 0
    later: list[tuple[TensorPattern, int, str]] = []
    for pattern in rule.source if key == "from" else rule.target:
        yield _parsed_tensor(rule, key, pattern, number)
        if key == "from":
            for role in _OPERANDS:
                later += [(each, number, role) for each in getattr(pattern, role)]
        number += 1
    for pattern, main, role in later:
        parsed = _parsed_tensor(rule, key, pattern, number)
        for option in ("shift", "mean", "sum", "copy", "times", "plus"):
            if getattr(pattern, option):
                raise LayoutError(
                    f"{parsed.place}: a tensor of `{role}` has no `{option}`"
                )
        yield dataclasses.replace(parsed, main=main, role=role)
        number += 1


def _parsed_tensor(
    rule: Rule, key: str, pattern: TensorPattern, number: int
) -> ParsedTensor:
    place = f"{rule.text}.{key}[{pattern.name!r}]"
    try:
        parsed = ParsedTensor(
            pattern=pattern,
            number=number,
            name=name_pattern.parse(pattern.name),
            dims=dims.parse(pattern.dims),
            place=place,
            is_target=key == "to",
        )
        size_expression.names(pattern.scale)
        size_expression.names(pattern.shift)
    except LayoutError as error:
        raise LayoutError(f"{place}: {error}") from None
    _check_options(parsed)
    inexact = set(pattern.sum) & (parsed.name.names | parsed.dims.names)
    if key == "to" and inexact:
        raise LayoutError(
            f"{place}: a sum over {min(inexact)} cannot be undone; use another "
            f"layout for this direction"
        )
    return parsed


def _check_options(tensor: ParsedTensor) -> None:
    pattern, place = tensor.pattern, tensor.place
    if bool(pattern.replicated) + bool(pattern.mean) + bool(pattern.sum) > 1:
        raise LayoutError(
            f"{place}: choose one of `replicated`, `mean` and `sum`; list the other "
            f"captures and rank axes in `unchecked`"
        )
    for option in ("mean", "sum"):
        if getattr(pattern, option) and (pattern.copy or pattern.times or pattern.plus):
            raise LayoutError(
                f"{place}: `{option}` cannot be combined with `times`, `plus` and "
                "`copy`; convert the checkpoint twice, with a layout for each"
            )
    for name in pattern.reduced:
        if pattern.reduced.count(name) > 1:
            raise LayoutError(f"{place}: {name} is listed twice")
        if name in tensor.dims.axes:
            raise LayoutError(
                f"{place}: {name} shards the dims {tensor.dims.text!r}, and cannot be "
                f"reduced too"
            )
    for capture in tensor.name.captures:
        if capture.is_index and capture.names & tensor.reduced:
            raise LayoutError(f"{place}: an index of captures cannot be reduced")
    both = tensor.dims.names & tensor.name.names
    if both:
        raise LayoutError(f"{place}: {min(both)} is both a capture and a dim")
    for dtype in (pattern.dtype, pattern.viewed_as):
        if dtype is not None and dtype not in DTYPES:
            near = difflib.get_close_matches(dtype, DTYPES, n=1, cutoff=0.0)[0]
            raise LayoutError(
                f"{place}: {dtype!r} is no dtype of elements; the nearest is {near!r}"
            )


def _numbers(rule: Rule, written: Sequence[ParsedTensor]) -> frozenset[str]:
    reduced = {name for tensor in written for name in tensor.reduced}
    numbers = reduced & rule.sizes.keys()
    # The values of a text that only names of targets have are not known.
    numbers |= {
        capture.key
        for tensor in written
        if tensor.is_target
        for capture in tensor.name.captures
        if capture.key in tensor.reduced and capture.form != "path"
    }
    for tensor in written:
        numbers |= tensor.dims.names | tensor.dims.axes
        for capture in tensor.name.captures:
            if capture.is_index:
                numbers |= capture.names
    return frozenset(numbers)


def _forms(names: Iterable[NamePattern]) -> dict[str, str]:
    captures = [capture for name in names for capture in name.captures]
    return {
        each.key: each.form for each in captures if each.form == "path" or each.choices
    }


def _always_numbers(written: Sequence[ParsedTensor]) -> frozenset[str]:
    # A capture with leading zeros or an offset in one name is a number in all.
    captures = [capture for tensor in written for capture in tensor.name.captures]
    return frozenset(each.key for each in captures if each.is_always_number)


def _kept(
    rule: Rule, written: Sequence[ParsedTensor], numbers: Collection[str]
) -> tuple[str, ...]:
    kept: dict[str, None] = {}
    for tensor in written:
        for capture in tensor.name.captures:
            if not capture.names & {*numbers, *tensor.reduced}:
                kept[capture.key] = None
    for name in kept:
        for tensor in written:
            if name not in tensor.name.names or name in tensor.reduced:
                raise LayoutError(
                    f"{rule.text}: {{{name}}} is in some names, and not in "
                    f"{tensor.name.text!r}; capture it in all, or make it a dim, or "
                    f"list it in `replicated`, `unchecked`, `mean` or `sum`"
                )
    return tuple(kept)


def _text(names: Collection[str]) -> str:
    return " ".join(sorted(names)) or "(none)"
