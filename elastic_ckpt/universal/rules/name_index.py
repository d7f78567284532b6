"""Finds the patterns that match a name, among many names and patterns.

Names that differ in numbers alone have one skeleton. The patterns that may match are
searched once for each skeleton; each name is then compared with these.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Sequence

from elastic_ckpt.universal.rules import name_pattern
from elastic_ckpt.universal.rules.name_pattern import NamePattern
from elastic_ckpt.universal.rules.rows import Captured, Kept

# The kind of all tensors of formats that have no kinds; it fits any state.
ANY_KIND = "parameter"


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
      is_of_any_kind: whether tensors of formats without kinds match, too.
    """

    owner: int
    tensor: int
    kind: str | None
    name: NamePattern
    numbers: Collection[str]
    kept: Sequence[str]
    is_of_any_kind: bool = True


@dataclasses.dataclass(frozen=True, slots=True)
class Match:
    """A pattern that matches a name.

    Attributes:
      entry: the pattern.
      kept: the values of captures that all names of the rule have.
      captured: the values of the others.
    """

    entry: Entry
    kept: Kept
    captured: Captured


class _Reader:
    """An entry, and how its captures are read from a match."""

    def __init__(self, entry: Entry) -> None:
        self.entry = entry
        self.skeleton = entry.name.skeleton(entry.numbers)
        self._expression = entry.name.expression(entry.numbers)
        captures = entry.name.captures
        groups = [
            (group, capture.names, capture.is_number(entry.numbers))
            for group, capture in enumerate(captures)
        ]
        kept = {names[0]: (group, number) for group, names, number in groups}
        self._kept = [kept[name] for name in entry.kept]
        self._captured = [each for each in groups if each[1][0] not in entry.kept]
        self._offsets = [capture.offset for capture in captures]
        self._has_offsets = any(self._offsets)

    def match(self, name: str) -> Match | None:
        match = self._expression.fullmatch(name)
        if match is None:
            return None
        texts: Sequence[int | str] = match.groups()
        if self._has_offsets:
            texts = [
                int(text) - offset if offset else text
                for text, offset in zip(texts, self._offsets, strict=True)
            ]
            if any(isinstance(text, int) and text < 0 for text in texts):
                return None
        kept = tuple(
            [int(texts[at]) if number else texts[at] for at, number in self._kept]
        )
        captured = tuple(
            [
                (names, int(texts[at]) if number else texts[at])
                for at, names, number in self._captured
            ]
        )
        return Match(self.entry, kept, captured)


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
        key = name_pattern.skeleton(name), kind
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
