"""The summary of a conversion before anything is written: what it reads and makes."""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Sequence

from elastic_ckpt.core.boxes import Box
from elastic_ckpt.universal.writing.conversion import Conversion
from elastic_ckpt.universal.writing.destination import Destination


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
class ProcessReads:
    """The work of a process.

    Attributes:
      written_bytes: values of its boxes.
      needed_bytes: elements that it reads; one that goes to two places counts twice.
      read_bytes: all of its requests.
      requests: their number.
    """

    written_bytes: int
    needed_bytes: int
    read_bytes: int
    requests: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """A conversion.

    Attributes:
      format: of the source, for people.
      sources: stored tensors.
      targets: tensors that are made.
      num_bytes: of their values.
      rules: in the order of the layout.
      processes: by number.
      fills: boxes that no source has.
      filled_bytes: of their values.
      unverified: files for which the format has no checksum.
    """

    format: str
    sources: int
    targets: int
    num_bytes: int
    rules: Sequence[RuleUse]
    processes: Sequence[ProcessReads]
    fills: int
    filled_bytes: int
    unverified: Sequence[str]


def summary(
    conversion: Conversion, destination: Destination, *, num_processes: int
) -> Summary:
    """Plans the reads of all processes, and compares the checksums of the files.

    Args:
      conversion: that is planned.
      destination: that it would write.
      num_processes: that would write it.

    Raises:
      CheckpointError: if an element of a target is filled by no source or by two;
        FormatError if a file has another checksum.
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
        rules=_rules(conversion),
        processes=[
            _reads(conversion, destination, host, num_processes)
            for host in range(num_processes)
        ],
        fills=len(filled),
        filled_bytes=sum(filled),
        unverified=conversion.checkpoint.check(conversion.files),
    )


def _rules(conversion: Conversion) -> list[RuleUse]:
    matched = conversion.matched
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
                sources=len({move.source for move in moves}),
                targets=len({move.target for move in moves}),
                num_bytes=sum(
                    math.prod(move.sizes) * matched.targets[move.target].dtype.itemsize
                    for move in moves
                ),
            )
        )
    return listed


def _reads(
    conversion: Conversion, destination: Destination, host: int, num_hosts: int
) -> ProcessReads:
    needed = destination.needed(host, num_hosts)
    reads = conversion.planned(needed).plan.total()
    return ProcessReads(
        written_bytes=sum(
            box.volume * target.dtype.itemsize
            for target, boxes in needed.items()
            for box in boxes
        ),
        needed_bytes=reads.needed_bytes,
        read_bytes=reads.read_bytes,
        requests=reads.requests,
    )
