"""Composes two layouts: the moves through a tensor between them become one move.

A dim of the tensor between is a number in mixed radix: each factor of either move
advances one of its digits. Split at the places of both moves, the digits of the dim are
independent, and the elements that both have are a box of digits.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Iterator, Sequence

from elastic_ckpt.universal.flat_ranges import boxes_of_range
from elastic_ckpt.universal.moves import (
    Arithmetic,
    Fill,
    Matched,
    Move,
    Side,
)
from elastic_ckpt.universal.rules.layout_error import LayoutError
from elastic_ckpt.universal.stored import StoredTensor

# The most indices of a factor that has no common digits with others.
_MOST_INDICES = 1 << 12
_PLAIN = Arithmetic()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Digits:
    # A box of the digits of a dim, of some elements of a move. Each digit has its first
    # value and their number, and the factor that it advances, with the step of the
    # factor's index; `offsets` has the first index of each factor.
    ranges: tuple[tuple[int, int], ...]
    advances: tuple[tuple[int, int] | None, ...]
    offsets: dict[int, int]


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
      LayoutError: if both reduce the same elements, or regroup them in ways that have
        no common factors.
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
    for part in _parts(first.target_side, first.sizes, second, shape):
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
    for part in _parts(side, sizes, move, shape):
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


def _parts(
    side: Side, sizes: Sequence[int], second: Move, shape: tuple[int, ...]
) -> Iterator[_Part]:
    # The common elements of a side of a move into a tensor, and of a move out of it.
    by_dim = []
    for dim, length in enumerate(shape):
        ones = _factors(side, sizes, dim)
        twos = _factors(second.source_side, second.sizes, dim)
        found = list(
            _in_dim(ones, twos, side.start[dim], second.source_side.start[dim], length)
        )
        if not found:
            return
        by_dim.append(found)
    for chosen in itertools.product(*by_dim):
        yield _Part(
            offsets=(
                {f: n for part in chosen for f, n in part.offsets[0].items()},
                {f: n for part in chosen for f, n in part.offsets[1].items()},
            ),
            factors=tuple(each for part in chosen for each in part.factors),
        )


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


def _in_dim(
    ones: list[_Factor], twos: list[_Factor], start_1: int, start_2: int, length: int
) -> Iterator[_Part]:
    steps = sorted({1, *(step for step, _, _ in (*ones, *twos))})
    if any(b % a for a, b in itertools.pairwise(steps)):
        yield from _one_by_one(ones, twos, start_1, start_2, length)
        return
    for one in _digits(ones, start_1, steps, length):
        for two in _digits(twos, start_2, steps, length):
            common = [
                (max(a, b), min(a + n, b + m))
                for (a, n), (b, m) in zip(one.ranges, two.ranges, strict=True)
            ]
            if any(low >= high for low, high in common):
                continue
            offsets = []
            for each in (one, two):
                first = dict(each.offsets)
                moves = zip(common, each.ranges, each.advances, strict=True)
                for (low, _), (at, _), advance in moves:
                    if advance is not None:
                        first[advance[0]] += (low - at) * advance[1]
                offsets.append(first)
            yield _Part(
                offsets=(offsets[0], offsets[1]),
                factors=tuple(
                    (high - low, a, b)
                    for (low, high), a, b in zip(
                        common, one.advances, two.advances, strict=True
                    )
                    if high - low > 1
                ),
            )


def _one_by_one(
    ones: list[_Factor], twos: list[_Factor], start_1: int, start_2: int, length: int
) -> Iterator[_Part]:
    # Takes the indices of the shortest factor one by one: no digits are common.
    side, (step, size, factor) = min(
        ((side, each) for side, of_side in enumerate((ones, twos)) for each in of_side
         if each[0] > 1), key=lambda each: each[1][1]
    )  # fmt: skip
    if size > _MOST_INDICES:
        raise LayoutError(
            f"the layouts regroup a dim of {length} in ways that have no common "
            "factors; write them as one layout"
        )
    left = [[each for each in of_side if each[2] != factor or at != side]
            for at, of_side in enumerate((ones, twos))]  # fmt: skip
    for index in range(size):
        starts = [start_1, start_2]
        starts[side] += index * step
        for part in _in_dim(left[0], left[1], starts[0], starts[1], length):
            part.offsets[side][factor] = index
            yield part


def _digits(
    factors: list[_Factor], start: int, steps: Sequence[int], length: int
) -> Iterator[_Digits]:
    # The elements of a side as boxes of digits, whose places are `steps`.
    radices = [b // a for a, b in itertools.pairwise(steps)]
    radices.append(-(-length // steps[-1]) + 1)
    for parts in _without_carry(factors, start):
        fixed = start + sum(step * first for step, _, _, first in parts)
        digits = [
            (fixed // step % radix, 1)
            for step, radix in zip(steps, radices, strict=True)
        ]
        choices: list[list[tuple[int, list[tuple[int, int]], tuple[int, int], int]]]
        choices = []
        above = len(steps)
        for step, count, factor, first in parts:
            place = steps.index(step)
            at = 0
            for digit in reversed(range(place, above)):
                at = at * radices[digit] + digits[digit][0]
            inside = radices[place:above][::-1]
            choices.append(
                [
                    (
                        place,
                        list(zip(box.start, box.shape, strict=True))[::-1],
                        (factor, step),
                        first - at,
                    )
                    for box in boxes_of_range(inside, at, at + count)
                ]
            )
            above = place
        for chosen in itertools.product(*choices):
            ranges = list(digits)
            advances: list[tuple[int, int] | None] = [None] * len(steps)
            offsets = {}
            for place, held, (factor, step), offset in chosen:
                for digit, each in enumerate(held, start=place):
                    weight = steps[digit] // step
                    ranges[digit], advances[digit] = each, (factor, weight)
                    offset += each[0] * weight
                offsets[factor] = offset
            yield _Digits(
                ranges=tuple(ranges), advances=tuple(advances), offsets=offsets
            )


def _without_carry(
    factors: list[_Factor], start: int
) -> Iterator[list[tuple[int, int, int, int]]]:
    # Cuts factors where their indices, from `start` on, run over into the next one's:
    # the step, the number of indices, the factor, its first index.
    if not factors:
        yield []
        return
    *outer, (step, size, factor) = factors
    block = outer[-1][0] // step if outer else 0
    at, first = start, 0
    while first < size:
        count = size - first
        if block:
            count = min(count, block - at // step % block)
        for before in _without_carry(outer, at):
            yield [*before, (step, count, factor, first)]
        at, first = at + count * step, first + count
