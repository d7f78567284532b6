"""Finds the patterns that match a name, among many names and patterns.

Names that differ in numbers alone have one skeleton. The patterns that may match are
searched once for each skeleton; each name is then compared with these.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Sequence

from elastic_ckpt.universal.rules import name_pattern
from elastic_ckpt.universal.rules.name_pattern import NamePattern
from elastic_ckpt.universal.rules.rows import Captured


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A pattern of names.

    Attributes:
      owner: the number of the rule, with its state; -1 for names that are dropped.
      tensor: the number of the tensor on its side.
      kind: of the tensors; None for any.
      name: the pattern; complete with the name of the state.
      numbers: the captures that are numbers.
      kept: the captures that all names of the rule have.
    """

    owner: int
    tensor: int
    kind: str | None
    name: NamePattern
    numbers: Collection[str]
    kept: Sequence[str]


@dataclasses.dataclass(frozen=True, slots=True)
class Match:
    """A pattern that matches a name.

    Attributes:
      entry: the pattern.
      kept: the values of captures that all names of the rule have, in their order.
      captured: the values of the others.
    """

    entry: Entry
    kept: Captured
    captured: Captured


class NameIndex:
    """Patterns, indexed by skeleton."""

    def __init__(self, entries: Sequence[Entry]) -> None:
        self._exact: dict[str, list[Entry]] = {}
        self._patterns: list[tuple[re.Pattern[str], re.Pattern[str], Entry]] = []
        for entry in entries:
            if entry.name.captures:
                skeleton = entry.name.skeleton(entry.numbers)
                expression = entry.name.expression(entry.numbers)
                self._patterns.append((skeleton, expression, entry))
            else:
                self._exact.setdefault(entry.name.text, []).append(entry)
        self._by_skeleton: dict[str, list[tuple[re.Pattern[str], Entry]]] = {}

    def matches(self, name: str) -> list[Match]:
        """All patterns that match `name`."""
        skeleton = name_pattern.skeleton(name)
        candidates = self._by_skeleton.get(skeleton)
        if candidates is None:
            candidates = self._by_skeleton[skeleton] = [
                (expression, entry)
                for expected, expression, entry in self._patterns
                if expected.fullmatch(skeleton)
            ]
        exact = self._exact.get(name)
        matches = [Match(entry, (), ()) for entry in exact] if exact else []
        for expression, entry in candidates:
            match = expression.fullmatch(name)
            if match is not None:
                matches.append(_match(entry, match.groups()))
        return matches


def _match(entry: Entry, texts: Sequence[str]) -> Match:
    kept, captured = {}, []
    for capture, text in zip(entry.name.captures, texts, strict=True):
        value = name_pattern.value(capture, text, entry.numbers)
        if capture.names[0] in entry.kept:
            kept[capture.names[0]] = value
        else:
            captured.append((capture.names, value))
    ordered = tuple(((name,), kept[name]) for name in entry.kept) if kept else ()
    return Match(entry, ordered, tuple(captured))
