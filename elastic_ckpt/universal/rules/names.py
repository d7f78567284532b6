"""Name patterns: `layers.{layer}.{part:q|k|v}.weight` matches tensor names.

A capture `{layer}` is a number if the rule uses it as one (as a dim or in an index),
and otherwise a string without `.` and `/`. `{name:path}` is any string, `{part:q|k|v}`
is one of these strings (or its position, where it is used as a number), `{layer:03}` is
a number with at least three digits, `{layer+1}` is the number `layer + 1`, and `{(stage
local)}` is the index of a dims expression. `{{` and `}}` are literal braces.

Names that differ only in numbers share a skeleton, which is used to find the patterns
that may match.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Collection, Iterable, Mapping

from elastic_ckpt.universal.rules import dims
from elastic_ckpt.universal.rules.layout import LayoutError

Value = int | str

_CAPTURE = re.compile(r"(\{\{|\}\}|\{[^{}]*\})")
_INSIDE = re.compile(
    r"\{(?P<node>[A-Za-z_]\w*(?:@\w+)?|\(.*\)(?:@\w+)?)"
    r"(?:\s*\+\s*(?P<offset>[1-9][0-9]{0,8}))?"
    r"(?::(?P<form>path|0[1-9]|[^:|]+(?:\|[^:|]+)+))?\}"
)
_STAR = re.compile(r"(\[\*\]|\*)")
# Flax wraps an array in an object with only this key.
BOX = "/value"


@dataclasses.dataclass(frozen=True)
class Capture:
    """A variable part of a name.

    Attributes:
      key: the node as written, which is the key of the captured value.
      node: a name, or the expression that the number indexes.
      form: "", "path", the choices (such as "q|k|v"), or the digits (such as "03").
      offset: the number in the name minus the value.
    """

    key: str
    node: dims.Node
    form: str = ""
    offset: int = 0

    @functools.cached_property
    def choices(self) -> list[str]:
        """The strings that the capture can match; empty if it has no list of them."""
        return self.form.split("|") if "|" in self.form else []

    @property
    def is_index(self) -> bool:
        """Whether the capture is the index of an expression."""
        return not isinstance(self.node, dims.Name)

    def is_number(self, numbers: Collection[str]) -> bool:
        """Whether the value is a number, given the keys that a rule uses as numbers."""
        is_always = self.is_index or self.form.isdigit() or self.offset > 0
        return is_always or (self.key in numbers and self.form != "path")

    def reader(self, numbers: Collection[str]) -> tuple[str, Callable[[str], Value]]:
        """A regular expression group that matches the capture, and its value's parser.

        Negative values become -1, which marks a mismatch: names that count from 1 have
        no 0.
        """
        is_number = self.is_number(numbers)
        if self.choices:
            group = "|".join(map(re.escape, self.choices))
            return f"({group})", self.choices.index if is_number else str
        if is_number:
            # Leading zeros may only pad the number to the width.
            width = int(self.form or 1)
            group = rf"([0-9]{{{width}}}|[1-9][0-9]{{{width},17}})"
            return group, lambda text: max(int(text) - self.offset, -1)
        return "(.+)" if self.form == "path" else "([^./]+)", str

    def text(self, value: Value) -> str:
        """Formats a value as it is spelled in names."""
        if isinstance(value, str):
            return value
        if self.choices:
            return self.choices[value]
        width = int(self.form) if self.form.isdigit() else 0
        return str(value + self.offset).zfill(width)


@dataclasses.dataclass(frozen=True)
class NamePattern:
    """A parsed pattern: literals and captures, in order."""

    text: str
    parts: tuple[str | Capture, ...]

    @functools.cached_property
    def captures(self) -> list[Capture]:
        """The captures, in order."""
        return [part for part in self.parts if isinstance(part, Capture)]

    def regex(self, numbers: Collection[str]) -> re.Pattern[str]:
        """A regular expression with a group for each capture."""
        parts = (
            re.escape(part) if isinstance(part, str) else part.reader(numbers)[0]
            for part in self.parts
        )
        return re.compile("".join(parts), re.DOTALL)

    def skeleton(self, numbers: Collection[str]) -> re.Pattern[str]:
        """A regular expression that matches the skeletons of matching names."""
        joined = "".join(
            part if isinstance(part, str)
            else "0" if part.is_number(numbers) and not part.choices
            else "\0"
            for part in self.parts
        )  # fmt: skip
        text = re.escape(skeleton(joined)).replace(re.escape("\0"), ".*")
        return re.compile(text, re.DOTALL)

    def format(self, values: Mapping[str, Value]) -> str:
        """Fills in values to get a name; captures without a value remain."""
        return "".join(
            part if isinstance(part, str)
            else part.text(values[part.key]) if part.key in values
            else f"{{{part.key}}}"
            for part in self.parts
        )  # fmt: skip


def skeleton(name: str) -> str:
    """Replaces each number in `name` with 0."""
    return re.sub(r"[0-9]+", "0", name)


def parse(text: str, forms: Mapping[str, str] | None = None) -> NamePattern:
    """Parses a pattern; `forms` has forms for captures that have none in `text`.

    Raises:
      LayoutError: if a brace is unmatched, a capture is malformed, or two captures
        touch.
    """
    parts: list[str | Capture] = []
    for part in _CAPTURE.split(text):
        inside = _INSIDE.fullmatch(part)
        if inside is not None:
            (node, *others), _ = dims.parse(inside["node"])
            if others:
                raise LayoutError(
                    f"{text!r}: {part} has more than one index; put their product in"
                    " parentheses, as in {(stage local)}"
                )
            form = inside["form"] or (forms or {}).get(inside["node"], "")
            offset = int(inside["offset"] or 0)
            made = Capture(inside["node"], node, form, offset)
            if form and not form.isdigit() and (made.is_index or offset):
                raise LayoutError(
                    f"{text!r}: {part} is a number; remove the form after its colon"
                )
            if parts and isinstance(parts[-1], Capture):
                raise LayoutError(
                    f"{text!r}: two captures touch; put a literal between them"
                )
            parts.append(made)
        elif part in ("{{", "}}"):
            parts.append(part[0])
        elif {"{", "}"} & {*part}:
            raise LayoutError(
                f"{text!r}: {part!r} is not a capture; use {{layer}}, {{name:path}}, "
                "{part:q|k|v}, {layer:03}, {layer+1} or {(stage local)}; for literal "
                "braces, use {{ and }}"
            )
        elif part:
            parts.append(part)
    return NamePattern(text, tuple(parts))


def pattern_of(name: str) -> str:
    """The pattern that matches only `name`."""
    return name.replace("{", "{{").replace("}", "}}")


def glob(texts: Iterable[str]) -> re.Pattern[str]:
    """A regular expression for globs: `*` is any string, and `[*]` is a star."""
    globs = (
        "".join(
            ".*" if part == "*" else re.escape(part.replace("[*]", "*"))
            for part in _STAR.split(text)
        )
        for text in texts
    )
    # Without globs, nothing matches.
    return re.compile("|".join(globs) or r"(?!)", re.DOTALL)


def glob_of(name: str) -> str:
    """The glob that matches only `name`."""
    return name.replace("*", "[*]")


def unboxed(names: Collection[str]) -> dict[str, str]:
    """The short names of leaves that Flax wraps, keyed by full name.

    NNX's `Param` and Linen's `Partitioned` are nodes with the single key `value`. So
    the leaf `kernel/value` is also `kernel` if nothing else is under `kernel`.
    """
    boxes = {name.removesuffix(BOX) for name in names if name.endswith(BOX)}
    for name in names if boxes else ():
        for slash in re.finditer("/", name):
            if name[slash.start() :] != BOX:
                boxes.discard(name[: slash.start()])
    return {box + BOX: box for box in boxes.difference(names)}
