"""Shards of a parameter along one dim, and the dims of a rule that relates them.

A parameter is cut along one dim into segments, each in the shards of one or several
ranks. Consecutive segments of ascending ranks become one name, sharded by given widths:

    "(s0@tp + s1@tp) d1"  ->  "(s0 + s1) d1"      widths: {s0: {tp: [6, 6]}, ...}

Segments that several ranks hold are taken from the first of them. The others' copies
are names that the target lacks, as is the padding of a vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from elastic_ckpt.universal.formats.format_error import FormatError

AXIS = "tp"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A part of a parameter along the dim that is cut.

    Attributes:
      start: its first index in the parameter.
      length: its number of indices.
      at: its first index in the shard of each rank that has it.
    """

    start: int
    length: int
    at: Mapping[int, int]


@dataclasses.dataclass(frozen=True, slots=True)
class Geometry:
    """The dims of the shards and of the whole parameter, as a rule has them.

    Attributes:
      source: the dims expression of a shard.
      target: that of the parameter.
      reduced: `replicated`, `mean`, or "" if all ranks have different elements.
      widths: of sharded names on each rank.
      sizes: of other names that shapes do not determine.
      pad: the names that the target lacks.
      scale: the values of shards, over those of the parameter.
    """

    source: str
    target: str
    reduced: str = ""
    widths: tuple[tuple[str, tuple[int, ...]], ...] = ()
    sizes: tuple[tuple[str, int], ...] = ()
    pad: tuple[str, ...] = ()
    scale: float = 1.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    # A segment in the shard of one rank.
    rank: int
    at: int
    length: int
    is_pad: bool


def whole(
    shape: Sequence[int], *, ranks: int, reduced: str, rows: int | None = None
) -> Geometry:
    """The geometry of a parameter of which each rank has all.

    Args:
      shape: of the parameter.
      ranks: their number.
      reduced: see `Geometry`.
      rows: that are kept of the first dim; None for all.
    """
    dims = [f"d{dim}" for dim in range(len(shape))]
    target = " ".join(dims)
    reduced = reduced if ranks > 1 else ""
    if rows is None or not shape or shape[0] <= rows:
        return Geometry(target, target, reduced)
    sizes = (("d0", rows), ("x0", shape[0] - rows))
    source = " ".join(["(d0 + x0)", *dims[1:]])
    return Geometry(source, target, reduced, sizes=sizes, pad=("x0",))


def cut(
    shapes: Sequence[Sequence[int]],
    dim: int,
    segments: Sequence[Segment],
    *,
    rows: int | None = None,
) -> Geometry:
    """The geometry of a parameter that is cut along a dim.

    Args:
      shapes: the shape of each rank's shard.
      dim: along which it is cut.
      segments: of the whole parameter, in their order.
      rows: that are kept of this dim; None for all.

    Raises:
      FormatError: if segments do not cover each shard once.
    """
    entries = [entry for each in segments for entry in _entries(each, rows)]
    _check_cover([shape[dim] for shape in shapes], entries)
    if not entries:
        return whole(shapes[0], ranks=len(shapes), reduced="replicated")
    groups = _groups(entries)
    order = _order(groups)
    if order is None:
        groups = [[entry] for entry in entries]
        order = _order(groups)
        assert order is not None
    names = [
        f"{'x' if group[0].is_pad else 's'}{number}"
        for number, group in enumerate(groups)
    ]
    ranks = len(shapes)
    suffix = f"@{AXIS}" if ranks > 1 else ""
    kept = [
        name for name, group in zip(names, groups, strict=True) if not group[0].is_pad
    ]
    widths = {
        name: tuple(
            sum(entry.length for entry in group if entry.rank == rank)
            for rank in range(ranks)
        )
        for name, group in zip(names, groups, strict=True)
    }
    before = [f"d{number}" for number in range(dim)]
    after = [f"d{number}" for number in range(dim + 1, len(shapes[0]))]
    return Geometry(
        " ".join([*before, _sum([names[at] + suffix for at in order]), *after]),
        " ".join([*before, _sum(kept), *after]),
        widths=tuple(widths.items()) if ranks > 1 else (),
        sizes=() if ranks > 1 else tuple((name, sum(widths[name])) for name in names),
        pad=tuple(name for name in names if name not in kept),
    )


def _sum(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"({' + '.join(names)})"


def _entries(segment: Segment, rows: int | None) -> list[_Entry]:
    # Those of the segment's first rank, as far as they are kept; then the others.
    entries = []
    first = min(segment.at)
    for rank, at in sorted(segment.at.items()):
        kept = segment.length
        if rows is not None:
            kept = max(0, min(kept, rows - segment.start))
        if rank != first:
            kept = 0
        for start, stop, is_pad in ((0, kept, False), (kept, segment.length, True)):
            if stop > start:
                entry = _Entry(
                    rank=rank, at=at + start, length=stop - start, is_pad=is_pad
                )
                entries.append(entry)
    return entries


def _check_cover(lengths: Sequence[int], entries: Sequence[_Entry]) -> None:
    ends = [0] * len(lengths)
    for entry in sorted(entries, key=lambda each: (each.rank, each.at)):
        if entry.rank >= len(lengths):
            raise FormatError(f"there is no tensor-parallel rank {entry.rank}")
        if entry.at != ends[entry.rank]:
            raise FormatError(
                f"rank {entry.rank} has a segment at {entry.at}, and the one before it"
                f" ends at {ends[entry.rank]}"
            )
        ends[entry.rank] += entry.length
    for rank, (end, length) in enumerate(zip(ends, lengths, strict=True)):
        if end != length:
            raise FormatError(f"rank {rank} has {length} rows, and segments of {end}")


def _groups(entries: Sequence[_Entry]) -> list[list[_Entry]]:
    # Entries of one name: at most one of each rank, ascending.
    groups: list[list[_Entry]] = []
    for is_pad in (False, True):
        last: _Entry | None = None
        for entry in entries:
            if entry.is_pad != is_pad:
                continue
            if last is not None and last.rank < entry.rank:
                groups[-1].append(entry)
            else:
                groups.append([entry])
            last = entry
    return groups


def _order(groups: Sequence[Sequence[_Entry]]) -> list[int] | None:
    # An order of the groups in which each rank has its entries; None if there is none.
    at = [(e.rank, e.at, n) for n, group in enumerate(groups) for e in group]
    after: list[set[int]] = [set() for _ in groups]
    for (rank, _, number), (next_rank, _, following) in zip(
        sorted(at), sorted(at)[1:], strict=False
    ):
        if rank == next_rank:
            after[number].add(following)
    waiting = [0] * len(groups)
    for followers in after:
        for number in followers:
            waiting[number] += 1
    ready = [number for number, count in enumerate(waiting) if not count]
    order = []
    while ready:
        number = ready.pop(0)
        order.append(number)
        for following in sorted(after[number]):
            waiting[following] -= 1
            if not waiting[following]:
                ready.append(following)
    return order if len(order) == len(groups) else None
