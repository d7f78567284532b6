"""Name patterns: `layers.{layer}.{part}.weight` matches the names of tensors.

A capture is `{layer}`: a number if the layout uses it as one (as a dim or in a
product), otherwise a text without `.` and `/`. `{name:path}` is any text,
`{part:q|k|v}` one of these texts (their position, where the layout uses it as a
number), `{layer:03}` a number of at least three digits. `{(stage local)}` is the index
of a dims expression: here of two dims in row-major order. `{layer+1}` is a number that
is more by 1 than the layer, in names that count from 1. `{{` and `}}` are braces of the
name.

Names that differ in numbers alone have one skeleton. `NameIndex` searches the patterns
that may match once for each skeleton; each name is then compared with these.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import itertools
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from elastic_ckpt.universal.rules import dims
from elastic_ckpt.universal.rules.layout import LayoutError

# The kind of all tensors of formats that have no kinds; it fits any state.
ANY_KIND = "parameter"

_BRACES = ("{{", "}}")
_CAPTURE = re.compile(r"\{\{|\}\}|\{([^{}]*)\}")
_STAR = re.compile(r"(\[\*\]|\*)")
_INSIDE = re.compile(
    r"(?P<node>[A-Za-z_]\w*|\(.*\)~?)"
    r"(?:\s*\+\s*(?P<offset>[1-9][0-9]{0,8}))?"
    r"(?::(?P<form>path|0[1-9]|[^:{}|]+(?:\|[^:{}|]+)+))?"
)
# The form of a capture that may be empty.
_ANY = "any"
_NUMBER = re.compile(r"[0-9]+")
# The only key of the objects in which Flax wraps an array.
BOX = "/value"
# A number in a name: without leading zeros, and of 18 digits at most.
_DIGITS = r"(0|[1-9][0-9]{0,17})"


@dataclasses.dataclass(frozen=True)
class Capture:
    """A variable part of a name.

    Attributes:
      node: a name, or the dims expression that the number is an index of.
      form: "", "path", the texts that it can be, as in "q|k|v", or the width of a
        number with leading zeros, as in "03".
      offset: by which the number in the name is more than the value.
    """

    node: dims.Node
    form: str = ""
    offset: int = 0

    @functools.cached_property
    def key(self) -> str:
        """What its values are listed under: the text of its node."""
        return str(self.node)

    @functools.cached_property
    def names(self) -> frozenset[str]:
        """The names in its node."""
        return dims.names_of(self.node)

    @functools.cached_property
    def choices(self) -> tuple[str, ...]:
        """The texts that it can be; none if it is not limited to some."""
        return tuple(self.form.split("|")) if "|" in self.form else ()

    @property
    def is_index(self) -> bool:
        """Whether it is the index of an expression, not a name."""
        return not isinstance(self.node, dims.Name)

    @property
    def is_always_number(self) -> bool:
        """Whether its form is that of a number, whatever the layout uses it as."""
        return self.is_index or self.form.isdigit() or self.offset > 0

    def is_number(self, numbers: Collection[str]) -> bool:
        """Whether its value is a number, if the captures `numbers` are."""
        if self.is_always_number:
            return True
        return self.form != "path" and self.key in numbers

    def text(self, value: int | str) -> str:
        """The text of a value in a name."""
        if isinstance(value, str):
            return value
        if self.choices:
            return self.choices[value]
        width = int(self.form) if self.form.isdigit() else 0
        return str(value + self.offset).zfill(width)

    def value(self, text: str, *, is_number: bool) -> int | str | None:
        """The value of a text that its expression matches; None if it has none."""
        if not is_number:
            return text
        if self.choices:
            return self.choices.index(text)
        number = int(text) - self.offset
        return None if number < 0 else number

    def samples(self, is_number: bool) -> Sequence[str]:
        """Some of its texts, which only captures at least as wide match."""
        if self.choices:
            return self.choices
        if is_number:
            return ("7" * max(1, int(self.form)) if self.form.isdigit() else "7",)
        return ("\0/\0.\0" if self.form in ("path", _ANY) else "\0",)

    def group(self, *, is_number: bool) -> str:
        """The group of a regular expression that matches its texts."""
        if self.form == _ANY:
            return "(.*)"
        if self.choices:
            return f"({'|'.join(map(re.escape, self.choices))})"
        if self.form.isdigit():
            width = int(self.form)
            # Leading zeros only up to the width.
            return rf"([0-9]{{{width}}}|[1-9][0-9]{{{width},17}})"
        if is_number:
            return _DIGITS
        return "(.+)" if self.form == "path" else "([^./]+)"


@dataclasses.dataclass(frozen=True, kw_only=True)
class NamePattern:
    """A parsed pattern.

    Attributes:
      text: as it was written.
      parts: literal texts and captures, in their order.
    """

    text: str
    parts: tuple[str | Capture, ...]

    @functools.cached_property
    def captures(self) -> tuple[Capture, ...]:
        """The captures, in their order."""
        return tuple(part for part in self.parts if isinstance(part, Capture))

    @functools.cached_property
    def names(self) -> frozenset[str]:
        """The names in all captures."""
        return frozenset().union(*(capture.names for capture in self.captures))

    @property
    def literal(self) -> str:
        """The name that a pattern without captures matches."""
        return "".join(part for part in self.parts if isinstance(part, str))

    @property
    def globbed(self) -> str:
        """A text for `glob` that has `*` in place of each capture."""
        return "".join(
            glob_of(part) if isinstance(part, str) else "*" for part in self.parts
        )

    def with_forms(self, forms: Mapping[str, str]) -> NamePattern:
        """The pattern whose captures without a form have these, by their keys."""
        parts = tuple(
            dataclasses.replace(part, form=forms[part.key])
            if isinstance(part, Capture) and not part.form and part.key in forms
            else part
            for part in self.parts
        )
        return NamePattern(text=self.text, parts=parts)

    def samples(self, numbers: Collection[str]) -> Iterator[str]:
        """Names that match, with texts in captures that no layout writes.

        A pattern that matches them all matches all names of this one.
        """
        texts = [
            (part,) if isinstance(part, str) else part.samples(part.is_number(numbers))
            for part in self.parts
        ]
        return map("".join, itertools.product(*texts))

    def expression(self, numbers: Collection[str]) -> re.Pattern[str]:
        """A regular expression with a group for each capture.

        Args:
          numbers: the captures that are numbers.
        """
        return re.compile(
            "".join(
                re.escape(part)
                if isinstance(part, str)
                else part.group(is_number=part.is_number(numbers))
                for part in self.parts
            ),
            re.DOTALL,
        )

    def skeleton(self, numbers: Collection[str]) -> re.Pattern[str]:
        """An expression that matches `skeleton(name)` of every name that matches.

        It may match skeletons of others too.
        """
        joined = "".join(
            part
            if isinstance(part, str)
            else "0"
            if part.is_number(numbers) and not part.choices
            else "{}"
            for part in self.parts
        )
        text = re.escape(skeleton(joined)).replace(r"\{\}", ".*")
        return re.compile(text, re.DOTALL)

    def format(self, values: Mapping[str, int | str]) -> str:
        """The name with `values` of the captures, by their keys.

        Captures without a value remain: `layers.{layer}.weight`.
        """
        texts = []
        for part in self.parts:
            if isinstance(part, str):
                texts.append(part)
            elif part.key in values:
                texts.append(part.text(values[part.key]))
            else:
                texts.append(f"{{{part.key}}}")
        return "".join(texts)

    def filled(self, values: Mapping[str, int | str]) -> NamePattern:
        """The pattern with texts in place of the captures that have `values`."""
        parts = tuple(
            part.text(values[part.key])
            if isinstance(part, Capture) and part.key in values
            else part
            for part in self.parts
        )
        return NamePattern(text=self.text, parts=parts)


def skeleton(name: str) -> str:
    """`name` with 0 in place of each number."""
    return _NUMBER.sub("0", name)


def glob(text: str) -> NamePattern:
    """The pattern of names that match `text`: `*` is any text, and `[*]` a star."""
    parts: list[str | Capture] = []
    for number, part in enumerate(_STAR.split(text)):
        star = Capture(dims.Name(f"star{number}"), _ANY)
        parts.append(star if part == "*" else part.replace("[*]", "*"))
    return NamePattern(text=text, parts=tuple(part for part in parts if part))


def pattern_of(name: str) -> str:
    """The text of the pattern that matches `name` alone."""
    return name.replace("{", "{{").replace("}", "}}")


def glob_of(name: str) -> str:
    """The text for `glob` that matches `name` alone."""
    return name.replace("*", "[*]")


def unboxed(names: Iterable[str]) -> dict[str, str]:
    """The shorter names of the leaves that their users know by these.

    Flax wraps arrays: `Param` of NNX and `Partitioned` of Linen are nodes with the one
    key `value`. A checkpoint of such a tree has this key too, and no other trace of
    them. So the name of any leaf `kernel/value` is also `kernel`, if nothing else lies
    below `kernel`.

    Args:
      names: of all leaves of a tree.

    Returns:
      The shorter names by the whole ones; others are not listed.
    """
    all_names = set(names)
    boxes = {name.removesuffix(BOX) for name in all_names if name.endswith(BOX)}
    if not boxes:
        return {}
    in_order = sorted(all_names)
    found = {}
    for box in sorted(boxes - all_names):
        # Names that begin alike are neighbors.
        first = bisect.bisect_left(in_order, f"{box}/")
        below = in_order[first : first + 2]
        if not below[1:] or not below[1].startswith(f"{box}/"):
            found[box + BOX] = box
    return found


def parse(text: str) -> NamePattern:
    """The pattern in `text`.

    Raises:
      LayoutError: if a brace is not closed, a capture is malformed or occurs twice.
    """
    parts: list[str | Capture] = []
    at, literal = 0, ""
    for match in _CAPTURE.finditer(text):
        literal += _literal(text, at, match.start())
        at = match.end()
        if match[0] in _BRACES:
            literal += match[0][0]
            continue
        parts += [literal, _capture(text, match)]
        literal = ""
    parts.append(literal + _literal(text, at, len(text)))
    pattern = NamePattern(text=text, parts=tuple(part for part in parts if part))
    for first, second in zip(pattern.parts, pattern.parts[1:], strict=False):
        if isinstance(first, Capture) and isinstance(second, Capture):
            raise LayoutError(f"{text!r}: put a text between two captures")
    for name in pattern.names:
        if sum(name in capture.names for capture in pattern.captures) > 1:
            raise LayoutError(f"{text!r}: the capture {name!r} occurs twice")
    return pattern


def _capture(text: str, match: re.Match[str]) -> Capture:
    inside = _INSIDE.fullmatch(match[1])
    form = "" if inside is None else inside["form"] or ""
    if inside is None or (inside["offset"] and not (form.isdigit() or not form)):
        raise LayoutError(
            f"column {match.start() + 1} of {text!r}: {match[0]} is no capture; write "
            "{layer}, {name:path}, {part:q|k|v}, {layer:03}, {layer+1} or "
            "{(stage local)}"
        )
    try:
        (node,) = dims.parse(inside["node"]).nodes
    except LayoutError as error:
        raise LayoutError(f"the capture {match[0]} of {text!r}: {error}") from None
    if any(isinstance(each, dims.Shard | dims.Rest) for each in dims.walk(node)):
        raise LayoutError(f"the capture {match[0]} of {text!r} is an index: without @")
    capture = Capture(node, form, int(inside["offset"] or 0))
    if capture.is_index and form and not form.isdigit():
        raise LayoutError(f"the capture {match[0]} of {text!r} is an index, no text")
    return capture


def _literal(text: str, start: int, stop: int) -> str:
    literal = text[start:stop]
    if "{" in literal or "}" in literal:
        raise LayoutError(
            f"{text!r}: a brace is not closed, or not opened; write {{{{ and }}}} for "
            f"braces of a name"
        )
    return literal


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Entry:
    """A pattern of an index.

    Attributes:
      name: the pattern.
      numbers: the captures that are numbers.
      kept: the captures whose values all names of its rule have.
      kind: of the tensors; None for any.
      is_of_any_kind: whether tensors of formats without kinds match, too.
      owner: the number of the rule, for the caller.
      tensor: the number of the pattern in its rule, for the caller.
    """

    name: NamePattern
    numbers: Collection[str] = ()
    kept: Sequence[str] = ()
    kind: str | None = None
    is_of_any_kind: bool = True
    owner: int = 0
    tensor: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Match:
    """A pattern that matches a name.

    Attributes:
      entry: the pattern.
      kept: the values of the kept captures.
      captured: the values of the others, by their keys.
    """

    entry: Entry
    kept: tuple[int | str, ...]
    captured: tuple[tuple[str, int | str], ...]


class _Reader:
    """An entry, and how its captures are read from a match."""

    def __init__(self, entry: Entry) -> None:
        self.entry = entry
        self.skeleton = entry.name.skeleton(entry.numbers)
        self._expression = entry.name.expression(entry.numbers)
        captures = entry.name.captures
        are_numbers = [capture.is_number(entry.numbers) for capture in captures]
        # Mostly a number is that of the name.
        self._plain = [
            number and not capture.choices and not capture.offset
            for capture, number in zip(captures, are_numbers, strict=True)
        ]
        self._captures = list(zip(captures, are_numbers, strict=True))
        places = {capture.key: at for at, capture in enumerate(captures)}
        self._kept = [places[name] for name in entry.kept]
        self._others = [
            (capture.key, at)
            for at, capture in enumerate(captures)
            if capture.key not in entry.kept
        ]

    def match(self, name: str) -> Match | None:
        match = self._expression.fullmatch(name)
        if match is None:
            return None
        values: list[int | str] = []
        for text, plain, (capture, is_number) in zip(
            match.groups(), self._plain, self._captures, strict=True
        ):
            if plain:
                values.append(int(text))
                continue
            value = capture.value(text, is_number=is_number)
            if value is None:
                return None
            values.append(value)
        return Match(
            self.entry,
            tuple([values[at] for at in self._kept]),
            tuple([(key, values[at]) for key, at in self._others]),
        )


class NameIndex:
    """Patterns, indexed by skeleton."""

    def __init__(self, entries: Iterable[Entry]) -> None:
        self._literal: dict[str, list[_Reader]] = {}
        self._patterns: list[_Reader] = []
        for entry in entries:
            reader = _Reader(entry)
            if entry.name.captures:
                self._patterns.append(reader)
            else:
                self._literal.setdefault(entry.name.literal, []).append(reader)
        self._by_skeleton: dict[tuple[str, str | None], list[list[_Reader]]] = {}

    def matches(self, name: str, kind: str | None = None) -> list[Match]:
        """The patterns that match a name.

        Args:
          name: of the tensor.
          kind: of the tensor; None if patterns of all kinds match it. If the kind is
            that of formats without kinds, and no pattern of it matches, all match.
        """
        key = skeleton(name), kind
        candidates = self._by_skeleton.get(key)
        if candidates is None:
            possible = [
                each for each in self._patterns if each.skeleton.fullmatch(key[0])
            ]
            candidates = self._by_skeleton[key] = _by_kind(possible, kind)
        if name in self._literal:
            literal = _by_kind(self._literal[name], kind)
            candidates = [a + b for a, b in zip(candidates, literal, strict=True)]
        exact, others, untyped = candidates
        matches = [match for each in exact if (match := each.match(name))]
        if others and not matches:
            matches = [match for each in others if (match := each.match(name))]
        if untyped:
            matches += [match for each in untyped if (match := each.match(name))]
        return matches


def most_specific(matches: Sequence[Match]) -> list[Match]:
    """The matches whose patterns are not strictly wider than another's."""
    return [
        match
        for match in matches
        if not any(
            _has(match.entry, other.entry) and not _has(other.entry, match.entry)
            for other in matches
        )
    ]


@functools.lru_cache(maxsize=2**12)
def _has(wide: Entry, narrow: Entry) -> bool:
    # Whether a pattern matches all names of another one.
    matches = wide.name.expression(wide.numbers).fullmatch
    return all(map(matches, narrow.name.samples(narrow.numbers)))


def _by_kind(readers: Sequence[_Reader], kind: str | None) -> list[list[_Reader]]:
    # Those of the kind, others that may match instead, those of no kind.
    exact, others, untyped = [], [], []
    for reader in readers:
        if reader.entry.kind is None:
            untyped.append(reader)
        elif kind is None or reader.entry.kind == kind:
            exact.append(reader)
        elif kind == ANY_KIND and reader.entry.is_of_any_kind:
            others.append(reader)
    return [exact, others, untyped]
