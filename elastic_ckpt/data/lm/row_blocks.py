"""Makes rows of blocks of examples: many rows at a time, each token moved once.

Each class here yields the rows of a dataset that makes them example by example, with
the same states: `Concatenated` those of `packing.ConcatThenSplit`, `Fitted` those of
Grain's first-fit and best-fit packers, `Padded` those of `language.padded`. Rows have
MaxText's names.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import grain
import numpy as np

from elastic_ckpt.core import errors
from elastic_ckpt.data import blocks

Row = dict[str, np.ndarray]

# About how many tokens of rows are made together.
_TOKENS = 2**14


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Consecutive rows.

    Attributes:
      inputs: int32 `[rows, length]`, as the three that follow.
      targets: one token ahead.
      segmentation: of both; numbers the examples of a row from 1, 0 for padding.
      position: of both; numbers the tokens of an example, or of its part, from 0.
    """

    inputs: np.ndarray
    targets: np.ndarray
    segmentation: np.ndarray
    position: np.ndarray

    def __len__(self) -> int:
        return len(self.inputs)

    def row(self, number: int) -> Row:
        """A row by the names of its features."""
        segmentation, position = self.segmentation[number], self.position[number]
        return {
            "inputs": self.inputs[number],
            "targets": self.targets[number],
            "inputs_segmentation": segmentation,
            "targets_segmentation": segmentation,
            "inputs_position": position,
            "targets_position": position,
        }


class RowBlocks(grain.DatasetIterator[Row], abc.ABC):
    """Yields the rows that a packer makes of examples, block by block.

    Args:
      examples: in blocks.
      length: tokens of a row.
    """

    def __init__(self, examples: blocks.Blocks, length: int) -> None:
        super().__init__()
        self._blocks = examples
        self._reader = blocks.Reader(examples)
        self._length = length
        self._rows: Rows | None = None
        self._number = 0
        # Returns the state after a number of rows of the current ones.
        self._state_after: Callable[[int], Callable[[], Any]] = self._at_begin

    def __next__(self) -> Row:
        if self._rows is None or self._number == len(self._rows):
            self._rows, self._state_after = self._next_rows()
            self._number = 0
        self._number += 1
        return self._rows.row(self._number - 1)

    def mark(self) -> Callable[[], Any]:
        """Returns a function that returns what `get_state` would have returned now."""
        return self._state_after(self._number)

    def get_state(self) -> Any:
        """See `grain.DatasetIterator`."""
        return self.mark()()

    def set_state(self, state: Any) -> None:
        """See `grain.DatasetIterator`."""
        self._rows, self._number = None, 0
        self._restore(state)
        self._reader = blocks.Reader(self._blocks)
        self._state_after = lambda _: lambda: state

    def close(self) -> None:
        """See `grain.DatasetIterator`."""
        self._blocks.close()

    def _at_begin(self, number: int) -> Callable[[], Any]:
        del number
        return self._begin

    @abc.abstractmethod
    def _begin(self) -> Any:
        """The state before the first row."""

    @abc.abstractmethod
    def _restore(self, state: Any) -> None:
        """Moves the examples, and this, to a state."""

    @abc.abstractmethod
    def _next_rows(self) -> tuple[Rows, Callable[[int], Callable[[], Any]]]:
        """The next rows, and the states after a number of them."""


class Concatenated(RowBlocks):
    """Concatenates examples, and cuts them every L tokens."""

    # The tokens of the next example that are already in rows.
    _taken = 0

    def _begin(self) -> Any:
        return {"parent": self._blocks.get_state(), "taken": 0}

    def _restore(self, state: Any) -> None:
        self._blocks.set_state(state["parent"])
        self._taken = state["taken"]

    def _next_rows(self) -> tuple[Rows, Callable[[int], Callable[[], Any]]]:
        examples, num_rows = self._examples()
        length = self._length
        ends = np.cumsum(examples.length) - self._taken
        # Examples are cut into pieces, each in one row.
        row_ends = np.arange(1, num_rows + 1) * length
        stop = min(int(ends[-1]), num_rows * length)
        piece_ends = np.union1d(ends, row_ends)
        piece_ends = piece_ends[piece_ends <= stop]
        begins = np.concatenate([[0], piece_ends[:-1]])
        example = np.searchsorted(ends, begins, side="right")
        before = ends - examples.length
        pieces = dataclasses.replace(
            examples,
            start=examples.start[example] + begins - before[example],
            length=piece_ends - begins,
        )
        row = begins // length
        first = np.searchsorted(row, np.arange(num_rows))
        rows = _filled(
            pieces,
            segment=np.arange(1, len(row) + 1) - first[row],
            num_rows=num_rows,
            length=length,
        )
        at_end = np.searchsorted(ends, np.minimum(row_ends, stop))
        is_whole = ends[at_end] == np.minimum(row_ends, stop)
        places = examples.without_values()
        rests = np.where(is_whole, 0, row_ends - before[at_end])
        self._reader.drop(int(at_end[-1] + is_whole[-1]))
        self._taken = int(rests[-1])

        def after(number: int) -> Callable[[], Any]:
            at, whole = int(at_end[number - 1]), bool(is_whole[number - 1])
            rest = int(rests[number - 1])

            def state() -> Any:
                place = places.place(at + whole)
                if whole:
                    return {"parent": place.state(), "taken": 0}
                parent = place.state(places.place(at + 1))
                return {"parent": parent, "taken": rest}

            return state

        return rows, after

    def _examples(self) -> tuple[blocks.Block, int]:
        # The examples of the next rows, and how many rows they fill.
        reader, wanted = self._reader, 1
        while True:
            held = reader.fill(wanted)
            num_tokens = sum(int(part.sum()) for part in reader.lengths()) - self._taken
            num_rows = min(num_tokens // self._length, -(-_TOKENS // self._length))
            if num_rows or held < wanted:
                break
            wanted = reader.num_held + 1
        if not num_rows:
            if not (reader.num_held and reader.has_ended):
                reader.raise_end()
            # Only the last row has padding.
            return reader.peek(reader.num_held), 1
        ends = np.cumsum(np.concatenate(reader.lengths())) - self._taken
        num_examples = int(np.searchsorted(ends, num_rows * self._length)) + 1
        return reader.peek(num_examples), num_rows


class Padded(RowBlocks):
    """Pads each example to a row."""

    def _begin(self) -> Any:
        return self._blocks.get_state()

    def _restore(self, state: Any) -> None:
        self._blocks.set_state(state)

    def _next_rows(self) -> tuple[Rows, Callable[[int], Callable[[], Any]]]:
        reader = self._reader
        if not reader.fill(1):
            reader.raise_end()
        num_rows = min(reader.num_held, max(1, _TOKENS // self._length))
        examples = reader.take(num_rows)
        places = examples.without_values()

        def after(number: int) -> Callable[[], Any]:
            return places.place(number).state

        return _padded(examples, self._length), after


def too_long(num_tokens: int, length: int) -> errors.DataError:
    """The error for an example that fits into no row of `length` tokens."""
    return errors.DataError(
        f"packed: an example has {num_tokens} tokens, but rows have {length} (length="
        f"{length}); cut documents to the length of rows before, by"
        f" ec.data.lm.Examples(length={length}), or give packed the length of the"
        " examples"
    )


class Fitted(RowBlocks):
    """Puts each example whole into one of several rows that are filled together.

    Args:
      examples: in blocks.
      length: tokens of a row.
      num_bins: rows that are filled together.
      seed: of the order in which they are yielded.
      max_examples: the most examples in a row; 0 sets no limit.
      is_best: whether an example goes into the fullest row that has room, rather than
        into the first.
    """

    def __init__(
        self,
        examples: blocks.Blocks,
        length: int,
        *,
        num_bins: int,
        seed: int,
        max_examples: int,
        is_best: bool,
    ) -> None:
        super().__init__(examples, length)
        self._num_bins, self._seed = num_bins, seed
        self._max_examples = max_examples or 2**62
        self._is_best = is_best
        # The rows of the next ones that were taken, and of all.
        self._skipped, self._counter = 0, 0

    def _begin(self) -> Any:
        return {"parent": self._blocks.get_state(), "next_row": 0, "counter": 0}

    def _restore(self, state: Any) -> None:
        self._blocks.set_state(state["parent"])
        self._skipped, self._counter = state["next_row"], state["counter"]

    def _next_rows(self) -> tuple[Rows, Callable[[int], Callable[[], Any]]]:
        bins, num_used, is_last = self._bins()
        examples = self._reader.peek(len(bins) + (not is_last))
        begin, end = examples.place(0), examples.place(len(bins))
        read = self._reader.end() if is_last else examples.place(len(bins) + 1)
        self._reader.drop(len(bins))
        counter = self._counter - self._skipped
        order = np.random.default_rng(self._seed + counter).permuted(range(num_used))
        rows = _binned(
            examples.cut(0, len(bins)), bins, num_rows=num_used, length=self._length
        )
        skipped, self._skipped = self._skipped, 0
        self._counter = counter + num_used

        def after(number: int) -> Callable[[], Any]:
            taken = skipped + number

            def state() -> Any:
                if taken == num_used:
                    parent = end.state(read)
                    return {"parent": parent, "next_row": 0, "counter": counter + taken}
                parent = begin.state(read)
                return {"parent": parent, "next_row": taken, "counter": counter + taken}

            return state

        order = order[skipped:]
        return (
            Rows(
                inputs=rows.inputs[order],
                targets=rows.targets[order],
                segmentation=rows.segmentation[order],
                position=rows.position[order],
            ),
            after,
        )

    def _bins(self) -> tuple[list[int], int, bool]:
        # The row of each of the next examples, up to the first that fits into none; how
        # many rows have some; and whether the examples have ended.
        free = [self._length] * self._num_bins
        room = [self._max_examples] * self._num_bins
        choose = _fullest if self._is_best else _first
        bins: list[int] = []
        reader = self._reader
        while True:
            wanted = len(bins) + 1
            if reader.fill(wanted) < wanted:
                if not (bins and reader.has_ended):
                    reader.raise_end()
                return bins, _num_used(free, self._length), True
            held = np.concatenate(reader.lengths())[len(bins) :].tolist()
            for size in held:
                number = choose(size, free, room)
                if number < 0:
                    if not bins:
                        raise too_long(size, self._length)
                    return bins, _num_used(free, self._length), False
                free[number] -= size
                room[number] -= 1
                bins.append(number)


_NONE = np.empty(0, np.int32)


def _first(size: int, free: Sequence[int], room: Sequence[int]) -> int:
    for number, each in enumerate(free):
        if size <= each and room[number]:
            return number
    return -1


def _fullest(size: int, free: Sequence[int], room: Sequence[int]) -> int:
    best, least = -1, 2**62
    for number, each in enumerate(free):
        if size <= each < least and room[number]:
            best, least = number, each
    return best


def _num_used(free: Sequence[int], length: int) -> int:
    return sum(each < length for each in free)


def _filled(
    pieces: blocks.Block, *, segment: np.ndarray, num_rows: int, length: int
) -> Rows:
    # Rows of pieces that fill them one after the other; only the last has padding.
    size = num_rows * length
    shape = (num_rows, length)
    inputs, targets, position = (
        _copied(pieces)
        if int(pieces.length.sum()) >= blocks.LONG_TOKENS * len(pieces)
        else _gathered(pieces)
    )
    segmentation = np.repeat(segment.astype(np.int32), pieces.length)
    features = (inputs, targets, segmentation, position)
    if len(inputs) < size:
        features = tuple(np.pad(each, (0, size - len(each))) for each in features)
    inputs, targets, segmentation, position = (each.reshape(shape) for each in features)
    return Rows(
        inputs=inputs, targets=targets, segmentation=segmentation, position=position
    )


def _gathered(pieces: blocks.Block) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    # The inputs, targets and positions of pieces, token by token.
    numbers = blocks.gathered(pieces, pieces.length)
    return (
        _wide(pieces.values.take(numbers)),
        _wide(pieces.values[1:].take(numbers)),
        blocks.counted(pieces.length),
    )


def _wide(values: np.ndarray) -> np.ndarray:
    # Tokens of rows are int32; those that name their documents are wider.
    return values.astype(np.int32) if values.dtype == np.uint16 else values


def _copied(pieces: blocks.Block) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    # The same, piece by piece, which is faster if these are long.
    values, ahead = pieces.values, pieces.values[1:]
    sizes = pieces.length.tolist()
    spans = [
        slice(first, first + size)
        for first, size in zip(pieces.start.tolist(), sizes, strict=True)
    ]
    counted = np.arange(max(sizes), dtype=np.int32)
    return (
        _wide(np.concatenate([values[span] for span in spans])),
        _wide(np.concatenate([ahead[span] for span in spans])),
        np.concatenate([counted[:size] for size in sizes]),
    )


def _binned(
    examples: blocks.Block, bins: Sequence[int], *, num_rows: int, length: int
) -> Rows:
    row = np.array(bins)
    order = np.argsort(row, kind="stable")
    row, sizes = row[order], examples.length[order]
    first = np.searchsorted(row, np.arange(num_rows + 1))
    used = np.add.reduceat(sizes, first[:-1])
    segment = np.arange(1, len(row) + 1) - first[row]
    # Padding is a piece, too, after those of its row.
    at = first[1:]
    zeros = len(examples.values)
    pieces = blocks.Block(
        values=np.concatenate([examples.values, np.zeros(length + 1, np.int32)]),
        start=np.insert(examples.start[order], at, zeros),
        length=np.insert(sizes, at, length - used),
        runs=(),
    )
    rows = _filled(
        pieces, segment=np.insert(segment, at, 0), num_rows=num_rows, length=length
    )
    for number, begin in enumerate(used.tolist()):
        rows.position[number, begin:] = 0
    return rows


def _padded(examples: blocks.Block, length: int) -> Rows:
    sizes = examples.length
    steps = np.diff(examples.start)
    counted = np.arange(length, dtype=np.int32)
    shape = (len(sizes), length)
    position = np.broadcast_to(counted, shape)
    step = int(steps[0]) if len(steps) else 1
    if step > 0 and (sizes == length).all() and (steps == step).all():
        # Rows lie in the block as they are needed, one after the other.
        values = _wide(examples.values[int(examples.start[0]) :])
        strides = (step * values.strides[0], values.strides[0])
        inputs, targets = (
            np.lib.stride_tricks.as_strided(each, shape, strides, writeable=False)
            for each in (values, values[1:])
        )
        ones = np.broadcast_to(np.int32(1), shape)
        return Rows(
            inputs=inputs, targets=targets, segmentation=ones, position=position
        )
    segmentation = (counted < sizes[:, None]).astype(np.int32)
    numbers = examples.start[:, None] + counted
    values = examples.values
    inputs = values.take(numbers, mode="clip") * segmentation
    targets = values.take(numbers + 1, mode="clip") * segmentation
    return Rows(
        inputs=inputs, targets=targets, segmentation=segmentation, position=position
    )
