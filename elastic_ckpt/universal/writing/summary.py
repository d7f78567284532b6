"""The summary of a conversion before anything is written: what it reads and makes."""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Sequence

from elastic_ckpt.core.boxes import Box
from elastic_ckpt.universal.moves import Matched
from elastic_ckpt.universal.writing.conversion import Conversion


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RuleUse:
    """The tensors that a rule makes.

    Attributes:
      rule: its place in the layout.
      sources: stored tensors that it reads.
      targets: tensors that it makes, in whole or in part.
      num_bytes: of the elements that it copies, as the targets have them.
    """

    rule: str
    sources: int
    targets: int
    num_bytes: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """A conversion.

    Attributes:
      format: of the source, for people.
      sources: stored tensors.
      targets: tensors that are made.
      num_bytes: of their values.
      rules: in the order of the layout.
      fills: boxes that no source has.
      filled_bytes: of their values.
      unverified: files for which the format has no checksum.
    """

    format: str
    sources: int
    targets: int
    num_bytes: int
    rules: Sequence[RuleUse]
    fills: int
    filled_bytes: int
    unverified: Sequence[str]


def summary(conversion: Conversion) -> Summary:
    """Summarizes a conversion, and compares the checksums of its files.

    Raises:
      FormatError: if a file has another checksum.
    """
    targets = conversion.matched.targets
    filled = [
        Box(start=each.start, stop=each.stop).volume
        * targets[each.target].dtype.itemsize
        for each in conversion.matched.fills
    ]
    return Summary(
        format=conversion.checkpoint.format,
        sources=len(conversion.checkpoint.tensors),
        targets=len(conversion.targets),
        num_bytes=conversion.num_bytes,
        rules=rule_uses(conversion.matched),
        fills=len(filled),
        filled_bytes=sum(filled),
        unverified=conversion.checkpoint.check(conversion.files),
    )


def rule_uses(matched: Matched) -> list[RuleUse]:
    """What each rule of a layout makes, in the order of the layout."""
    uses: dict[str, list[slice]] = collections.defaultdict(list)
    begin = 0
    for rule, stop in matched.rules:
        uses[rule].append(slice(begin, stop))
        begin = stop
    listed = []
    for rule, parts in uses.items():
        moves = [move for part in parts for move in matched.moves[part]]
        listed.append(
            RuleUse(
                rule=rule,
                sources=len({each.tensor for move in moves for each in move.sources}),
                targets=len({move.target for move in moves}),
                num_bytes=sum(
                    math.prod(move.sizes) * matched.targets[move.target].dtype.itemsize
                    for move in moves
                ),
            )
        )
    return listed
