"""Composes two layouts: the moves through a tensor between them become one move.

Of each dim of the tensor between, one of the two moves has successive elements; the
factors of the other one divide them. Where both regroup a dim, the layouts are refused.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Iterator, Sequence

from elastic_ckpt.universal.formats.checkpoint import StoredTensor
from elastic_ckpt.universal.moves import (
    Arithmetic,
    Fill,
    Matched,
    Move,
    Side,
)
from elastic_ckpt.universal.rules.layout import LayoutError

_PLAIN = Arithmetic()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    # Elements that two moves have in common: the first index of each factor of either,
    # and new factors: a size, and what an index advances in each move, (factor, step).
    offsets: tuple[dict[int, int], dict[int, int]]
    factors: tuple[tuple[int, tuple[int, int] | None, tuple[int, int] | None], ...]


def composed(
    first: Matched, second: Matched, between: Sequence[StoredTensor]
) -> Matched:
    """Two layouts, one after the other, as one.

    Args:
      first: of the checkpoint.
      second: of the targets of the first.
      between: these targets, as the tensors of `second`.

    Raises:
      LayoutError: if both reduce the same elements, or regroup the same dim.
    """
    into: dict[str, list[Move]] = collections.defaultdict(list)
    fills: dict[str, list[Fill]] = collections.defaultdict(list)
    for move in first.moves:
        into[move.target].append(move)
    for fill in first.fills:
        fills[fill.target].append(fill)
    made: list[Move] = []
    filled = list(second.fills)
    rules: list[tuple[str, int]] = []
    begin = 0
    for rule, end in second.rules:
        for move in second.moves[begin:end]:
            tensors = [between[source.tensor] for source in move.sources]
            if any(source.viewed_as is not None for source in move.sources):
                raise LayoutError(
                    f"{rule}: `as` is for the bytes of a file; write it in the first "
                    "layout of `through`"
                )
            if any(fills[tensor.name] for tensor in tensors) and len(tensors) > 1:
                raise LayoutError(
                    f"{move.target}: the layout before pads what it is reduced from; "
                    "reduce it there"
                )
            if len(tensors) > 1:
                made += _reduced(move, tensors, into)
                continue
            (tensor,) = tensors
            for each in into[tensor.name]:
                made += _through(each, move, tensor.shape)
            for fill in fills[tensor.name]:
                filled += _filled(fill, move, tensor.shape)
        begin = end
        rules.append((rule, len(made)))
    return Matched(moves=made, fills=filled, targets=second.targets, rules=rules)


def _through(first: Move, second: Move, shape: tuple[int, ...]) -> Iterator[Move]:
    # The elements of the second move that come from the first.
    if part := _part(first.target_side, first.sizes, second, shape):
        sizes = [size for size, _, _ in part.factors]
        contracted = [
            factor for factor, dim in enumerate(first.target_side.dims) if dim < 0
        ]
        repeated = [
            factor for factor, dim in enumerate(second.source_side.dims) if dim < 0
        ]
        sizes += [second.sizes[factor] for factor in repeated]
        sizes += [first.sizes[factor] for factor in contracted]
        before = [one for _, one, _ in part.factors]
        before += [None] * len(repeated) + [(factor, 1) for factor in contracted]
        after = [two for _, _, two in part.factors]
        after += [(factor, 1) for factor in repeated] + [None] * len(contracted)
        yield Move(
            target=second.target,
            sizes=tuple(sizes),
            target_side=_moved(second.target_side, part.offsets[1], after),
            sources=tuple(
                dataclasses.replace(
                    source, side=_moved(source.side, part.offsets[0], before)
                )
                for source in first.sources
            ),
            arithmetic=_both(first.arithmetic, second.arithmetic),
        )


def _reduced(
    move: Move, tensors: Sequence[StoredTensor], into: dict[str, list[Move]]
) -> Iterator[Move]:
    # A move that reduces several tensors, each of which is made by plain moves.
    by_place: dict[object, list[Move]] = {}
    for source, tensor in zip(move.sources, tensors, strict=True):
        alone = dataclasses.replace(move, sources=(source,), arithmetic=None)
        for each in into[tensor.name]:
            if each.arithmetic is not None:
                raise _too_much(move.target)
            for made in _through(each, alone, tensor.shape):
                place = (made.sizes, made.target_side)
                by_place.setdefault(place, []).append(made)
    for parts in by_place.values():
        if len(parts) != len(move.sources):
            raise LayoutError(
                f"{move.target}: the tensors that it is reduced from are cut in "
                "different ways by the layout before; reduce them there"
            )
        yield dataclasses.replace(
            parts[0],
            sources=tuple(part.sources[0] for part in parts),
            arithmetic=move.arithmetic,
        )


def _filled(fill: Fill, move: Move, shape: tuple[int, ...]) -> Iterator[Fill]:
    # The elements of a move that the layout before fills with a number.
    arithmetic = move.arithmetic or _PLAIN
    sizes = tuple(b - a for a, b in zip(fill.start, fill.stop, strict=True))
    dims = tuple(range(len(sizes)))
    side = Side(start=fill.start, dims=dims, steps=(1,) * len(sizes))
    value = fill.value * arithmetic.scale + arithmetic.shift
    if part := _part(side, sizes, move, shape):
        repeated = [f for f, dim in enumerate(move.source_side.dims) if dim < 0]
        advances = [two for _, _, two in part.factors]
        advances += [(factor, 1) for factor in repeated]
        target = _moved(move.target_side, part.offsets[1], advances)
        counts = [size for size, _, _ in part.factors]
        counts += [move.sizes[factor] for factor in repeated]
        rows = itertools.product(
            *(range(n) if step != 1 else (None,) for n, step in
              zip(counts, target.steps, strict=True))
        )  # fmt: skip
        for numbers in rows:
            start, stop = list(target.start), [at + 1 for at in target.start]
            for number, count, dim, step in zip(
                numbers, counts, target.dims, target.steps, strict=True
            ):
                if number is None:
                    stop[dim] += count - 1
                else:
                    start[dim] += number * step
                    stop[dim] += number * step
            yield Fill(
                target=move.target, start=tuple(start), stop=tuple(stop), value=value
            )


def _both(first: Arithmetic | None, second: Arithmetic | None) -> Arithmetic | None:
    if first is None or second is None:
        return first or second
    return dataclasses.replace(
        first,
        scale=first.scale * second.scale,
        shift=first.shift * second.scale + second.shift,
    )


def _too_much(target: str) -> LayoutError:
    return LayoutError(
        f"{target}: both of two layouts do arithmetic on what it is reduced from; "
        "write it as one layout"
    )


def _moved(
    side: Side, offsets: dict[int, int], advances: Sequence[tuple[int, int] | None]
) -> Side:
    # A side from other first indices of its factors on, with other factors.
    start = list(side.start)
    for factor, index in offsets.items():
        if side.dims[factor] >= 0:
            start[side.dims[factor]] += index * side.steps[factor]
    return Side(
        start=tuple(start),
        dims=tuple(-1 if each is None else side.dims[each[0]] for each in advances),
        steps=tuple(
            0 if each is None else each[1] * side.steps[each[0]] for each in advances
        ),
    )


def _part(
    side: Side, sizes: Sequence[int], second: Move, shape: tuple[int, ...]
) -> _Part | None:
    # The common elements of a side of a move into a tensor, and of a move out of it;
    # None if there are none.
    sides = (side, sizes), (second.source_side, second.sizes)
    spans = [[_span(*each, dim) for each in sides] for dim in range(len(shape))]
    if any(max(a.start, b.start) >= min(a.stop, b.stop) for a, b in spans):
        return None
    offsets: tuple[dict[int, int], dict[int, int]] = {}, {}
    factors = []
    for dim, of_dim in enumerate(spans):
        ones, twos = (_factors(*each, dim) for each in sides)
        low, high = max(s.start for s in of_dim), min(s.stop for s in of_dim)
        for span, of_side, held in zip(of_dim, (ones, twos), offsets, strict=True):
            if _is_run(of_side):
                held.update({factor: low - span.start for _, _, factor in of_side})
        if _is_run(ones) and _is_run(twos):
            if high - low > 1:
                factors.append((high - low, (ones[0][2], 1), (twos[0][2], 1)))
        elif _is_run(ones) and range(low, high) == of_dim[1]:
            factors += [
                (size, (ones[0][2], step), (factor, 1)) for step, size, factor in twos
            ]
        elif _is_run(twos) and range(low, high) == of_dim[0]:
            factors += [
                (size, (factor, 1), (twos[0][2], step)) for step, size, factor in ones
            ]
        else:
            raise LayoutError(
                f"{second.target}: both layouts of `through` regroup dim {dim} of the "
                "tensor that it is made of; write them as one"
            )
    return _Part(offsets=offsets, factors=tuple(factors))


# Of a factor along a dim: its step, its size, its number.
_Factor = tuple[int, int, int]


def _factors(side: Side, sizes: Sequence[int], dim: int) -> list[_Factor]:
    return sorted(
        (
            (step, size, factor)
            for factor, (of_dim, step, size) in enumerate(
                zip(side.dims, side.steps, sizes, strict=True)
            )
            if of_dim == dim and size > 1
        ),
        reverse=True,
    )


def _span(side: Side, sizes: Sequence[int], dim: int) -> range:
    # From the first element along a dim to the last one.
    length = sum((size - 1) * step for step, size, _ in _factors(side, sizes, dim))
    return range(side.start[dim], side.start[dim] + length + 1)


def _is_run(factors: Sequence[_Factor]) -> bool:
    # Whether these are successive elements.
    return not factors or [step for step, _, _ in factors] == [1]
