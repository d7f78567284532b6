"""Matches names with many regular expressions of a file, in bounded time.

Python's `re` tries alternatives one after another, and a hostile pattern makes that
exponential. Here all patterns are one finite machine: a name is read once, whatever the
patterns, and states of the machine are kept as they occur.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from elastic_ckpt.universal.deepspeed_layout import pattern_parser
from elastic_ckpt.universal.deepspeed_layout.pattern_parser import Node
from elastic_ckpt.universal.formats.format_error import FormatError

_MOST_NODES = 2_000_000
# Nodes in all sets that are kept, each once: some hundred MiB, and seconds.
_MOST_VISITS = 8_000_000
_MATCH, _CHAR, _BRANCH, _BEGIN, _END = range(5)
_KEPT = (_MATCH, _CHAR, _END)

# The kind of a node of the machine, the characters it accepts, the nodes after it.
_MachineNode = tuple[int, str | Callable[[str], bool] | None, tuple[int, ...]]


class PatternSet:
    """Patterns of which each matches, as `re.match` does, a begin of a text.

    Args:
      patterns: in the order of their numbers.

    Raises:
      FormatError: if one is malformed, has a construct that is not read, or all are too
        long.
    """

    def __init__(self, patterns: Sequence[str]) -> None:
        self._nodes: list[_MachineNode] = []
        self._visits = 0
        # The patterns, by their last nodes.
        self._ends: dict[int, int] = {}
        starts = []
        for number, pattern in enumerate(patterns):
            end = self._add(_MATCH, None, ())
            self._ends[end] = number
            starts.append(self._built(pattern_parser.parse(pattern), end))
        # Sets of nodes, and the set after each character.
        self._after: dict[frozenset[int], dict[str, frozenset[int]]] = {}
        # The patterns whose ends a set has.
        self._patterns: dict[frozenset[int], frozenset[int]] = {}
        self._start = self._closed(starts, at_begin=True)

    def matches(self, text: str) -> list[int]:
        """The numbers of the patterns that match.

        Raises:
          FormatError: if the patterns are made to take long.
        """
        nodes = self._start
        matching = set(self._matched(nodes))
        for char in text:
            after = self._after.setdefault(nodes, {})
            following = after.get(char)
            if following is None:
                following = after[char] = self._step(nodes, char)
            nodes = following
            if not nodes:
                break
            matching |= self._matched(nodes)
        matching |= self._matched(self._closed(nodes, at_begin=not text, at_end=True))
        return sorted(matching)

    def _add(
        self,
        kind: int,
        accepts: str | Callable[[str], bool] | None,
        following: tuple[int, ...],
    ) -> int:
        if len(self._nodes) >= _MOST_NODES:
            raise FormatError("the patterns are too long; give a layout of your own")
        self._nodes.append((kind, accepts, following))
        return len(self._nodes) - 1

    def _built(self, node: Node, following: int) -> int:
        # The first node of a part, which leads to `following`.
        if isinstance(node, pattern_parser.Char):
            return self._add(_CHAR, node.accepts, (following,))
        if isinstance(node, pattern_parser.Anchor):
            return self._add(_BEGIN if node.sign == "^" else _END, None, (following,))
        if isinstance(node, pattern_parser.Sequence):
            for part in reversed(node.parts):
                following = self._built(part, following)
            return following
        if isinstance(node, pattern_parser.Choice):
            starts = tuple(self._built(part, following) for part in node.parts)
            return self._add(_BRANCH, None, starts)
        return self._repeated(node, following)

    def _repeated(self, node: pattern_parser.Repeat, following: int) -> int:
        start = following
        if node.most is None:
            start = self._add(_BRANCH, None, ())
            inside = self._built(node.part, start)
            self._nodes[start] = (_BRANCH, None, (inside, following))
        else:
            for _ in range(node.most - node.least):
                inside = self._built(node.part, start)
                start = self._add(_BRANCH, None, (inside, following))
        for _ in range(node.least):
            start = self._built(node.part, start)
        return start

    def _step(self, nodes: frozenset[int], char: str) -> frozenset[int]:
        reached: list[int] = []
        for number in nodes:
            kind, accepts, following = self._nodes[number]
            if kind == _CHAR and (
                accepts == char
                if isinstance(accepts, str)
                else callable(accepts) and accepts(char)
            ):
                reached += following
        self._visit(len(nodes))
        return self._closed(reached)

    def _closed(
        self, nodes: Iterable[int], *, at_begin: bool = False, at_end: bool = False
    ) -> frozenset[int]:
        # With the nodes that are reached without a character.
        pending, closed = list(nodes), set(nodes)
        while pending:
            kind, _, following = self._nodes[pending.pop()]
            is_open = kind == _BRANCH or (kind == _BEGIN and at_begin)
            if not is_open and not (kind == _END and at_end):
                continue
            new = set(following) - closed
            closed |= new
            pending += new
        self._visit(len(closed))
        return frozenset(number for number in closed if self._nodes[number][0] in _KEPT)

    def _matched(self, nodes: frozenset[int]) -> frozenset[int]:
        matched = self._patterns.get(nodes)
        if matched is None:
            self._visit(len(nodes))
            matched = self._patterns[nodes] = frozenset(
                self._ends[number] for number in nodes if number in self._ends
            )
        return matched

    def _visit(self, count: int) -> None:
        self._visits += count
        if self._visits > _MOST_VISITS:
            raise FormatError(
                "the patterns take too long to match; give a layout of your own"
            )
