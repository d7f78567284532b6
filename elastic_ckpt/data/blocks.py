"""Blocks: several documents, or examples, as columns.

Between a source and the packer that makes rows, documents travel in blocks: the tokens
of many of them in one array, and where each begins. Steps decide on lengths, and the
packer moves each token once. A dataset whose `blocks()` returns an iterator yields the
same elements as its own iterator does, and the states of one are those of the other.

A state is made only when it is saved. Until then a `Place` stands for it: a number in a
block. Buffers read ahead of what they have yielded, so a state is asked for together
with the place up to which elements were read (see `Places.state`).
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import numpy as np

NO_VALUES = np.empty(0, np.int32)

# Elements of so many tokens are copied one by one.
LONG_TOKENS = 48


class Places(Protocol):
    """The states before each element of a block, and after the last."""

    def state(self, number: int, read: Place) -> Any:
        """The state before element `number`, as `get_state` would have returned it.

        Args:
          number: from 0; the number of elements for the state after the last.
          read: up to which a buffer has read that goes on from the state.
        """
        ...

    def read(self, number: int) -> Place:
        """The place up to which the parent was read, once `number` were yielded."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """The place before an element of a block; see `Places`."""

    of: Places
    number: int

    def state(self, read: Place | None = None) -> Any:
        """The state at this place."""
        return self.of.state(self.number, read or self)

    def parent(self) -> Place:
        """The place up to which the parent was read for what was yielded so far."""
        return self.of.read(self.number)


@dataclasses.dataclass(frozen=True, slots=True)
class Fixed:
    """The only place of an iterator that has ended."""

    at: Any

    def state(self, number: int, read: Place | None = None) -> Any:
        """See `Places`."""
        del number, read
        return self.at

    def read(self, number: int) -> Place:
        """See `Places`."""
        return Place(self, number)


@dataclasses.dataclass(frozen=True, slots=True)
class Block:
    """Documents, or examples, of tokens that lie in one array.

    Attributes:
      values: tokens, int32 `[tokens]`, or uint16 if all of them fit.
      start: where each element begins in `values`, int64 `[elements]`.
      length: of each element, int64 `[elements]`.
      runs: the places, as pairs of the number of an element and the place before it;
        the elements after it have the numbers that follow. Ascending, the first is 0.
    """

    values: np.ndarray
    start: np.ndarray
    length: np.ndarray
    runs: tuple[tuple[int, Place], ...]

    def __len__(self) -> int:
        return len(self.start)

    def place(self, number: int) -> Place:
        """The place before an element, or after the last."""
        for first, place in reversed(self.runs):
            if number >= first:
                return Place(place.of, place.number + number - first)
        raise IndexError(number)

    def without_values(self) -> Block:
        """The same without the tokens, for its places."""
        return Block(NO_VALUES, self.start, self.length, self.runs)

    def cut(self, first: int, stop: int) -> Block:
        """The elements from `first` to before `stop`."""
        runs = [(0, self.place(first))]
        runs += [(n - first, at) for n, at in self.runs if first < n < stop]
        return Block(
            values=self.values,
            start=self.start[first:stop],
            length=self.length[first:stop],
            runs=tuple(runs),
        )


class Blocks(Protocol):
    """Reads the elements of a dataset in blocks."""

    def read(self, at_most: int) -> Block:
        """The next elements, at least one.

        Args:
          at_most: how many are wanted; more if they were made together.

        Raises:
          StopIteration: after the last.
          Exception: the error of the next element, again if it is asked for again.
        """
        ...

    def end(self) -> Place:
        """The place after the last element, once `read` has ended."""
        ...

    def get_state(self) -> Any:
        """The state before the first block after `set_state`."""
        ...

    def set_state(self, state: Any) -> None:
        """Goes on from a state of this iterator, or of the dataset's own."""
        ...

    def close(self) -> None:
        """Closes what is open."""
        ...


def of(dataset: Any) -> Blocks | None:
    """The blocks of a dataset; None if it yields single elements only."""
    make = getattr(dataset, "blocks", None)
    return make() if make is not None else None


def joined(parts: Sequence[Block]) -> Block:
    """The elements of several blocks, of whose tokens those between are kept."""
    if len(parts) == 1:
        return parts[0]
    runs: list[tuple[int, Place]] = []
    num_elements = 0
    for part in parts:
        runs += [(num_elements + n, place) for n, place in part.runs]
        num_elements += len(part)
    values, start, length = together([(p.values, p.start, p.length) for p in parts])
    return Block(values=values, start=start, length=length, runs=tuple(runs))


# The values, and the start and length of lists in them.
Lists = tuple[np.ndarray, np.ndarray, np.ndarray]


def together(parts: Sequence[Lists]) -> Lists:
    """The lists of all parts, whose values are in one array."""
    if len(parts) == 1:
        return parts[0]
    values: list[np.ndarray] = []
    starts: list[int] = []
    num_values = 0
    for of, start, length in parts:
        if len(start) > _FEW:
            low, high = int(start.min()), int((start + length).max()) + 1
            if high - low <= _DENSE * int(length.sum()):
                values.append(of[low:high])
                starts += (start + (num_values - low)).tolist()
                num_values += len(values[-1])
                continue
        for first, size in zip(start.tolist(), length.tolist(), strict=True):
            # An example of n tokens has a target after the last of them.
            values.append(of[first : first + size + 1])
            starts.append(num_values)
            num_values += len(values[-1])
    length = np.concatenate([length for _, _, length in parts])
    return np.concatenate(values), np.array(starts, np.int64), length


# Lists are moved together, with what is between them, if they are more than so many,
# and lie so close together that this is no more than so many times as much.
_FEW = 16
_DENSE = 2


class Reader:
    """Reads elements from blocks, any number at a time.

    Args:
      blocks: to read from.
    """

    def __init__(self, blocks: Blocks) -> None:
        self._blocks = blocks
        self._held: collections.deque[Block] = collections.deque()
        self._problem: BaseException | None = None
        self.num_held = 0

    def fill(self, num_elements: int) -> int:
        """Holds that many elements, or all up to the end or an error, if that is less.

        Returns:
          How many are held, at most `num_elements`.
        """
        while self.num_held < num_elements and self._problem is None:
            try:
                block = self._blocks.read(num_elements - self.num_held)
            except Exception as error:
                self._problem = error
                break
            self._held.append(block)
            self.num_held += len(block)
        return min(self.num_held, num_elements)

    def raise_end(self) -> None:
        """Raises what ended the elements that are held, if anything has.

        An error other than the end is raised once; then the next `fill` tries again.
        """
        problem = self._problem
        if problem is None:
            return
        if not isinstance(problem, StopIteration):
            self._problem = None
        raise problem

    @property
    def has_ended(self) -> bool:
        """Whether there are no elements after those that are held."""
        return isinstance(self._problem, StopIteration)

    def peek(self, num_elements: int) -> Block:
        """The first of the elements that are held, which stay."""
        return joined(list(self._first(num_elements)))

    def take(self, num_elements: int) -> Block:
        """The first of the elements that are held."""
        taken = self.peek(num_elements)
        self.drop(num_elements)
        return taken

    def drop(self, num_elements: int) -> None:
        """Drops the first of the elements that are held."""
        self.num_held -= num_elements
        while num_elements:
            block = self._held.popleft()
            if len(block) > num_elements:
                self._held.appendleft(block.cut(num_elements, len(block)))
                return
            num_elements -= len(block)

    def lengths(self) -> list[np.ndarray]:
        """The lengths of the elements that are held, by block."""
        return [block.length for block in self._held]

    def end(self) -> Place:
        """The place after the last element of all."""
        return self._blocks.end()

    def _first(self, num_elements: int) -> Iterable[Block]:
        for block in self._held:
            if len(block) >= num_elements:
                yield (
                    block if len(block) == num_elements else block.cut(0, num_elements)
                )
                return
            num_elements -= len(block)
            yield block


def gathered(block: Block, length: np.ndarray) -> np.ndarray:
    """The numbers, among `block.values`, of the tokens of all elements in a row.

    Args:
      block: the elements.
      length: how many tokens of each, int64 `[elements]`.
    """
    ends = np.cumsum(length)
    numbers = np.repeat(block.start - ends + length, length)
    numbers += _counted(len(numbers))
    return numbers


def counted(length: np.ndarray) -> np.ndarray:
    """For each element, 0 to before its length; all in a row, int32."""
    ends = np.cumsum(length)
    first = np.repeat((ends - length).astype(np.int32), length)
    return _counted(len(first)).astype(np.int32) - first


_COUNTED = np.arange(2**16)


def _counted(num: int) -> np.ndarray:
    global _COUNTED
    if num > len(_COUNTED):
        _COUNTED = np.arange(max(num, 2 * len(_COUNTED)))
    return _COUNTED[:num]
