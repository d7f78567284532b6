"""Name patterns: `layers.{layer}.{part}.weight` matches the names of tensors.

A capture is `{layer}`: a number if the layout uses it as one (as a dim, in a product,
in an index table), otherwise a text without `.` and `/`. `{name:path}` is any text,
`{layer:03}` a number of at least three digits. `{(stage local)}` is a number that is
the row-major index of several dims. `{layer+1}` is a number that is more by 1 than the
layer, in names that count from 1. `{{` and `}}` are braces of the name.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Mapping

from elastic_ckpt.universal.rules.layout_error import LayoutError

_BRACES = ("{{", "}}")
_CAPTURE = re.compile(r"\{\{|\}\}|\{([^{}]*)\}")
_STAR = re.compile(r"(\[\*\]|\*)")
_INSIDE = re.compile(
    r"(?:(?P<name>[A-Za-z_]\w*)|\((?P<product>\s*[A-Za-z_]\w*(?:\s+[A-Za-z_]\w*)*)\s*\))"
    r"(?:\s*\+\s*(?P<offset>[1-9][0-9]{0,8}))?(?::(?P<form>path|0[1-9]))?"
)
# The form of a capture that may be empty.
_ANY = "any"
_NUMBER = re.compile(r"[0-9]+")
# A number in a name: without leading zeros, and of 18 digits at most.
_DIGITS = r"(0|[1-9][0-9]{0,17})"


@dataclasses.dataclass(frozen=True, slots=True)
class Capture:
    """A variable part of a name.

    Attributes:
      names: one name, or the names of a product.
      form: "", "path", or the width of a number with leading zeros, as in "03".
      offset: by which the number in the name is more than the value.
    """

    names: tuple[str, ...]
    form: str
    offset: int = 0

    @property
    def is_always_number(self) -> bool:
        """Whether its form is that of a number, whatever the layout uses it as."""
        return len(self.names) > 1 or self.form.isdigit() or self.offset > 0

    def is_number(self, numbers: Collection[str]) -> bool:
        """Whether its value is a number, if the captures `numbers` are."""
        if self.is_always_number:
            return True
        return not self.form and self.names[0] in numbers

    def text(self, value: int | str) -> str:
        """The text of a value in a name."""
        number = int(value) + self.offset if self.offset else value
        return str(number).zfill(int(self.form) if self.form.isdigit() else 0)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NamePattern:
    """A parsed pattern.

    Attributes:
      text: as it was written.
      parts: literal texts and captures, in their order.
    """

    text: str
    parts: tuple[str | Capture, ...]

    @property
    def captures(self) -> tuple[Capture, ...]:
        """The captures, in their order."""
        return tuple(part for part in self.parts if isinstance(part, Capture))

    @property
    def names(self) -> tuple[str, ...]:
        """The names in all captures, in their order."""
        return tuple(name for capture in self.captures for name in capture.names)

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

    def expression(self, numbers: Collection[str]) -> re.Pattern[str]:
        """A regular expression with a group for each capture.

        Args:
          numbers: the captures that are numbers.
        """
        return re.compile(
            "".join(
                re.escape(part) if isinstance(part, str) else _group(part, numbers)
                for part in self.parts
            )
        )

    def skeleton(self, numbers: Collection[str]) -> re.Pattern[str]:
        """An expression that matches `skeleton(name)` of every name that matches.

        It may match skeletons of others too.
        """
        joined = "".join(
            part if isinstance(part, str) else "0" if part.is_number(numbers) else "{}"
            for part in self.parts
        )
        return re.compile(re.escape(skeleton(joined)).replace(r"\{\}", ".*"))

    def format(self, values: Mapping[tuple[str, ...], int | str]) -> str:
        """The name with `values` of the captures, by their names.

        Captures without a value remain: `layers.{layer}.weight`.
        """
        texts = []
        for part in self.parts:
            if isinstance(part, str):
                texts.append(part)
            elif part.names in values:
                texts.append(part.text(values[part.names]))
            else:
                texts.append(f"{{{' '.join(part.names)}}}")
        return "".join(texts)


def skeleton(name: str) -> str:
    """`name` with 0 in place of each number."""
    return _NUMBER.sub("0", name)


def glob(text: str) -> NamePattern:
    """The pattern of names that match `text`: `*` is any text, and `[*]` a star."""
    parts: list[str | Capture] = []
    for number, part in enumerate(_STAR.split(text)):
        is_any = part == "*"
        parts.append(
            Capture((str(number),), _ANY) if is_any else part.replace("[*]", "*")
        )
    return NamePattern(text=text, parts=tuple(part for part in parts if part))


def pattern_of(name: str) -> str:
    """The text of the pattern that matches `name` alone."""
    return name.replace("{", "{{").replace("}", "}}")


def glob_of(name: str) -> str:
    """The text for `glob` that matches `name` alone."""
    return name.replace("*", "[*]")


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
        inside = _INSIDE.fullmatch(match[1])
        if inside is None or (inside["offset"] and inside["form"] == "path"):
            raise LayoutError(
                f"column {match.start() + 1} of {text!r}: {match[0]} is no capture; "
                f"write {{layer}}, {{name:path}}, {{layer:03}}, {{layer+1}} or "
                f"{{(stage local)}}"
            )
        names = inside["name"] or inside["product"]
        offset = int(inside["offset"] or 0)
        capture = Capture(tuple(names.split()), inside["form"] or "", offset)
        parts += [literal, capture]
        literal = ""
    parts.append(literal + _literal(text, at, len(text)))
    pattern = NamePattern(text=text, parts=tuple(part for part in parts if part))
    for first, second in zip(pattern.parts, pattern.parts[1:], strict=False):
        if isinstance(first, Capture) and isinstance(second, Capture):
            raise LayoutError(f"{text!r}: put a text between two captures")
    for name in pattern.names:
        if pattern.names.count(name) > 1:
            raise LayoutError(f"{text!r}: the capture {name!r} occurs twice")
    return pattern


def _literal(text: str, start: int, stop: int) -> str:
    literal = text[start:stop]
    if "{" in literal or "}" in literal:
        raise LayoutError(
            f"{text!r}: a brace is not closed, or not opened; write {{{{ and }}}} for "
            f"braces of a name"
        )
    return literal


def _group(capture: Capture, numbers: Collection[str]) -> str:
    if capture.form == _ANY:
        return "(.*)"
    if capture.form.isdigit():
        width = int(capture.form)
        # Leading zeros only up to the width.
        return rf"([0-9]{{{width}}}|[1-9][0-9]{{{width},17}})"
    if capture.is_number(numbers):
        return _DIGITS
    return "(.+)" if capture.form == "path" else "([^./]+)"
