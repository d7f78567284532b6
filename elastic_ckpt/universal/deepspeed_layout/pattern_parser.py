"""Parses the regular expressions in checkpoints of DeepSpeed.

They have literals, `.`, classes, groups, `|`, `*`, `+`, `?`, `{m,n}`, `^` and `$`, with
the meaning of Python's `re`. Back references, looking around, and what else needs more
than a finite machine are refused.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable

from elastic_ckpt.universal.formats.format_error import FormatError

_COUNTS = re.compile(r"\{(?!\})([0-9]*)(,([0-9]*))?\}")
_MOST_DIGITS = 4
_MOST_NESTED = 32


def _is_word(char: str) -> bool:
    return char == "_" or char.isalnum()


_CLASSES: dict[str, Callable[[str], bool]] = {
    "d": str.isdecimal,
    "D": lambda char: not char.isdecimal(),
    "w": _is_word,
    "W": lambda char: not _is_word(char),
    "s": str.isspace,
    "S": lambda char: not char.isspace(),
}
_CONTROLS = {"n": "\n", "t": "\t", "r": "\r", "f": "\f", "v": "\v"}


@dataclasses.dataclass(frozen=True, slots=True)
class Char:
    """One character: this one, or one that a function accepts."""

    accepts: str | Callable[[str], bool]


@dataclasses.dataclass(frozen=True, slots=True)
class Anchor:
    """The begin (`^`) or the end (`$`) of the text."""

    sign: str


@dataclasses.dataclass(frozen=True, slots=True)
class Sequence:
    """Parts one after another."""

    parts: tuple[Node, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Choice:
    """One of several parts."""

    parts: tuple[Node, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Repeat:
    """A part, `least` to `most` times; any number of times if `most` is None."""

    part: Node
    least: int
    most: int | None


Node = Char | Anchor | Sequence | Choice | Repeat


def parse(pattern: str) -> Node:
    """The pattern as a tree.

    Raises:
      FormatError: if it is malformed, or has another construct.
    """
    parser = _Parser(pattern)
    node = parser.choice(0)
    if parser.peek():
        raise parser.error("an unbalanced )")
    return node


class _Parser:
    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._at = 0

    def peek(self) -> str:
        return self._pattern[self._at : self._at + 1]

    def error(self, what: str) -> FormatError:
        return FormatError(
            f"the pattern {self._pattern[:200]!r} has {what} at its character"
            f" {self._at}, which is not read; give a layout of your own"
        )

    def choice(self, depth: int) -> Node:
        if depth > _MOST_NESTED:
            raise self.error("too many nested groups")
        parts = [self._sequence(depth)]
        while self.peek() == "|":
            self._at += 1
            parts.append(self._sequence(depth))
        return parts[0] if len(parts) == 1 else Choice(tuple(parts))

    def _sequence(self, depth: int) -> Node:
        parts: list[Node] = []
        while self.peek() not in ("", "|", ")"):
            parts.append(self._repeated(self._atom(depth)))
        return parts[0] if len(parts) == 1 else Sequence(tuple(parts))

    def _repeated(self, atom: Node) -> Node:
        sign, counts = self.peek(), _COUNTS.match(self._pattern, self._at)
        if sign and sign in "*+?":
            self._at += 1
            least, most = int(sign == "+"), 1 if sign == "?" else None
        elif counts:
            if len(counts[1]) > _MOST_DIGITS or len(counts[3] or "") > _MOST_DIGITS:
                raise self.error("a count that is too large")
            self._at = counts.end()
            least = int(counts[1] or 0)
            most = least if counts[2] is None else int(counts[3]) if counts[3] else None
            if most is not None and most < least:
                raise self.error("wrong counts")
        else:
            return atom
        # Whether it prefers few does not change whether it matches.
        if self.peek() == "?":
            self._at += 1
        elif self.peek() in ("*", "+") or _COUNTS.match(self._pattern, self._at):
            raise self.error("a repeat of a repeat")
        return Repeat(atom, least, most)

    def _atom(self, depth: int) -> Node:
        char = self._take()
        if char == "(":
            if self.peek() == "?":
                if self._pattern[self._at : self._at + 2] != "?:":
                    raise self.error("a group of a special kind")
                self._at += 2
            inside = self.choice(depth + 1)
            if self.peek() != ")":
                raise self.error("an open group")
            self._at += 1
            return inside
        if char == "[":
            return Char(self._class())
        if char == ".":
            return Char(lambda char: char != "\n")
        if char in "^$":
            return Anchor(char)
        if char in "*+?":
            self._at -= 1
            raise self.error("nothing to repeat")
        return Char(self._escape() if char == "\\" else char)

    def _take(self) -> str:
        char = self.peek()
        if not char:
            raise self.error("its end too early")
        self._at += 1
        return char

    def _escape(self) -> str | Callable[[str], bool]:
        char = self._take()
        if char in _CLASSES:
            return _CLASSES[char]
        if char in _CONTROLS:
            return _CONTROLS[char]
        if char.isalnum():
            self._at -= 1
            raise self.error(f"the escape \\{char}")
        return char

    def _class(self) -> Callable[[str], bool]:
        negated = self.peek() == "^"
        self._at += negated
        members: list[str | Callable[[str], bool]] = []
        ranges: list[tuple[str, str]] = []
        while self.peek() != "]" or not (members or ranges):
            first = self._member()
            following = self._pattern[self._at : self._at + 2]
            if following[:1] != "-" or following in ("-]", "-"):
                members.append(first)
                continue
            self._at += 1
            last = self._member()
            if not isinstance(first, str) or not isinstance(last, str) or last < first:
                raise self.error("a range that is none")
            ranges.append((first, last))
        self._at += 1

        def accepts(char: str) -> bool:
            is_member = any(
                each == char if isinstance(each, str) else each(char)
                for each in members
            ) or any(first <= char <= last for first, last in ranges)
            return is_member != negated

        return accepts

    def _member(self) -> str | Callable[[str], bool]:
        char = self._take()
        return self._escape() if char == "\\" else char
