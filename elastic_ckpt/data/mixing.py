"""Mixtures of datasets by weight, with a schedule that is a pure function.

The dataset of element `n` of shard `s` depends on `n`, `s` and the current weights: the
weights divide the unit interval, and the point `n * phi + s * sqrt(2)`, modulo one, is
in the interval of one dataset. Multiples of the golden ratio fill the unit interval
more evenly than any other sequence of this kind (Kronecker's; Niederreiter 1992): among
n elements, the count of a dataset differs from its share by at most 4 up to n = 1,000,
and by at most 6 up to a million. Because the only state is `n`, weights can change at
any resume.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
import fractions
import functools
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import grain
import numpy as np

from elastic_ckpt.core import errors, storage
from elastic_ckpt.data import blocks, cursors, records, shard_steps

# The unit interval in 64 bits; the fractions of the golden ratio and of sqrt(2) in it.
_ONE = 2**64
_GOLDEN = 0x9E3779B97F4A7C15
_PHASE = 0x6A09E667F3BCC909

# The turns that are drawn together: as many as have about so many tokens, unless a
# dataset has another number of them (`block_tokens`).
_LEAST_TURNS = 16
_MOST_TURNS = 512
_BLOCK_TOKENS = 2**16
_NONE = np.empty(0, np.int64)

# The number of turns that are tried one by one before the next one is computed.
_NEAR_TURNS = 100

# The field of a cursor with the number of elements taken from each dataset.
TAKEN = "taken"
# The field with the periods, each with weights of its own, in which elements after the
# state were chosen. The fields of a period: the turn before which it ended, the
# weights, whether all of its datasets had ended, and the first states of the mixtures
# that were opened in it.
SCHEDULE = "schedule"
_UNTIL, _WEIGHTS, _ENDED, _OPENED = "until", "weights", "ended", "opened"
# Marks the state of a nested mixture whose elements are read again; it is not saved.
_READ_AGAIN = "read_again"


def check_weights(weights: Mapping[str, float]) -> None:
    """Raises a ConfigError that names the invalid weight."""
    for name, weight in weights.items():
        if not 0 <= weight < float("inf"):
            raise errors.ConfigError(
                f"mixture: dataset {name} has the weight {weight}; weights are finite"
                " numbers of at least 0"
            )
    if not any(weights.values()):
        raise errors.ConfigError(
            f"mixture: all weights of {sorted(weights)} are 0; raise one of them"
        )


def bounds(weights: Mapping[str, float]) -> list[tuple[int, str]]:
    """The end of the interval of each dataset, in 64 bits, and its name.

    The interval of every weight above 0 has at least one point.
    """
    check_weights(weights)
    exact = {name: fractions.Fraction(weight) for name, weight in weights.items()}
    total = sum(exact.values())
    share, end = fractions.Fraction(), 0
    remaining = sum(weight > 0 for weight in exact.values())
    ends = []
    for name, weight in exact.items():
        share += weight / total
        remaining -= weight > 0
        end = min(max(int(share * _ONE), end + (weight > 0)), _ONE - remaining)
        ends.append((end, name))
    return ends


def chosen(turn: int, *, shard: int, ends: list[tuple[int, str]]) -> str:
    """The dataset of element `turn` of `shard`; see `bounds`."""
    point = _point(turn, shard)
    return next(name for end, name in ends if point < end)


def next_chosen(
    turn: int, *, shard: int, ends: list[tuple[int, str]], among: Collection[str]
) -> tuple[int, str]:
    """The first turn from `turn` on of a dataset in `among`, and that dataset.

    The time does not depend on how rare these datasets are.
    """
    for near in range(turn, turn + _NEAR_TURNS):
        name = chosen(near, shard=shard, ends=ends)
        if name in among:
            return near, name
    begins = [0, *(end for end, _ in ends)]
    point = _point(turn, shard)
    waits = [
        (_turns_until((begin - point) % _ONE, (end - 1 - point) % _ONE), name)
        for begin, (end, name) in zip(begins, ends, strict=False)
        if name in among
    ]
    turns, name = min(waits)
    return turn + turns, name


def _point(turn: int, shard: int) -> int:
    return (turn * _GOLDEN + shard * _PHASE) % _ONE


def _turns_until(low: int, high: int) -> int:
    # The number of turns until the point has moved by low to high, modulo one.
    if low > high:
        return 0
    return first_multiple(_GOLDEN, _ONE, low, high)


def first_multiple(step: int, modulus: int, low: int, high: int) -> int:
    """The smallest n >= 0 with `low <= n * step % modulus <= high`.

    Like Euclid's algorithm it takes a logarithmic number of steps. It requires that
    `step` is less than `modulus`, that they have no common divisor, and that
    `0 <= low <= high < modulus`.
    """
    if not low:
        return 0
    if 2 * step > modulus:
        return first_multiple(modulus - step, modulus, modulus - high, modulus - low)
    number = -(-low // step)
    if number * step <= high:
        return number
    # No multiple fits before the first wraparound: computes after how many one does.
    turns = first_multiple(-modulus % step, step, low % step, high % step)
    return -(-(low + modulus * turns) // step)


@functools.lru_cache(maxsize=64)
def _intervals(weights: tuple[tuple[str, float], ...]) -> list[tuple[int, str]]:
    # `bounds`, which all shards share.
    return bounds(dict(weights))


class Parts(Mapping[str, grain.IterDataset]):
    """Datasets by name, each made when it is used.

    Args:
      names: of all of them.
      make: makes one by its name; all have `blocks`, or none.
      columns: returns the same documents by their place, if they have some.
    """

    def __init__(
        self,
        names: Collection[str],
        make: Callable[[str], grain.IterDataset],
        *,
        columns: Callable[[str], records.SmallBlocks | None] = lambda _: None,
    ) -> None:
        self._names = names
        self._make = make
        self.columns = columns

    def __getitem__(self, name: str) -> grain.IterDataset:
        if name not in self._names:
            raise KeyError(name)
        return self._make(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


class Mixture(shard_steps.Step):
    """Mixes several datasets of one shard by weight.

    If a dataset ends, the others continue; the mixture ends with the last of them. A
    dataset is opened when its first element is due.

    The state contains the state of each dataset under its name: when it is loaded,
    datasets may have been added or removed, and weights changed. New weights apply to
    the elements after those that a shuffle or a packer has already taken from here,
    which it reads again, in the same order. Datasets that have ended are tried again.

    Args:
      parts: the datasets by name; `Parts` are made when they are opened.
      weights: the weight of each name, 0 or more; only their ratios count.
      shard: the number of the shard.
    """

    describes_parents = True

    def __init__(
        self,
        parts: Mapping[str, grain.IterDataset],
        weights: Mapping[str, float],
        *,
        shard: int,
    ) -> None:
        if parts.keys() != weights.keys():
            raise errors.ConfigError(
                f"Mixture: parts are named {sorted(parts)}, and weights"
                f" {sorted(weights)}; give each part a weight"
            )
        check_weights(weights)
        # Sorted by name, so that the order of the list does not matter.
        if isinstance(parts, Parts):
            self._parts: Mapping[str, grain.IterDataset] = parts
            super().__init__()
        else:
            self._parts = {name: parts[name] for name in sorted(parts)}
            super().__init__(list(self._parts.values()))
        self._weights = {name: weights[name] for name in sorted(parts)}
        self._shard = self.shard = shard

    def __iter__(self) -> grain.DatasetIterator:
        return _MixtureIterator(self)

    def blocks(self) -> blocks.Blocks | None:
        """The elements in blocks; None if a dataset yields single elements only."""
        names = list(self._parts)
        if isinstance(self._parts, Parts):
            names = names[:1]
        parts = [self._parts[name] for name in names]
        if not all(map(_has_blocks, parts)):
            return None
        return _MixtureBlocks(self, min(map(_block_tokens, parts)))

    def make_parts(self) -> None:
        """Makes datasets that would be made when they are opened."""
        if isinstance(self._parts, Parts):
            self._parts = {name: self._parts[name] for name in sorted(self._parts)}
            self._parents = tuple(self._parts.values())

    def __str__(self) -> str:
        return f"Mixture(shard={self.shard}, {sorted(self._weights)})"

    def settings(self) -> dict[str, storage.Json]:
        """The weight and the steps of each dataset, by its name."""
        return {
            "datasets": {
                name: {
                    "weight": weight,
                    "steps": shard_steps.step_descriptions(self._parts[name]),
                }
                for name, weight in self._weights.items()
            }
        }


def _has_blocks(dataset: grain.IterDataset) -> bool:
    # Whether a dataset of a mixture has blocks; it is not opened. A mixture in it has
    # none: single elements are read again after its weights have changed.
    if getattr(dataset, "makes_blocks", False):
        return True
    if isinstance(dataset, Mixture) or not hasattr(dataset, "blocks"):
        return False
    return all(map(_has_blocks, shard_steps.parents(dataset)))


def _block_tokens(dataset: grain.IterDataset) -> int:
    # How many tokens of a dataset are drawn together, about.
    parents = map(_block_tokens, shard_steps.parents(dataset))
    return min([getattr(dataset, "block_tokens", _BLOCK_TOKENS), *parents])


class _Draws:
    """Which dataset is drawn from at which turn; see `Mixture`."""

    def __init__(self, mixture: Mixture) -> None:
        super().__init__()
        self._parts, self._shard = mixture._parts, mixture._shard
        self._weights = {name: each for name, each in mixture._weights.items() if each}
        self._turn = 0
        self._taken: dict[str, int] = {}
        # The saved states of datasets that were not opened since.
        self._saved: dict[str, Any] = {}
        # Periods of other weights that are read again, and last the current period.
        self._schedule = _continued([], turn=0, weights=self._weights)
        self._now = self._schedule[-1]
        self._read_again_until = 0
        self._begin(0)

    def _restore(self, state: dict[str, Any]) -> None:
        # Goes on from a state, with no dataset open.
        self._turn = state["turn"]
        self._taken = dict(state[TAKEN])
        self._saved = dict(state["parts"])
        past = state.get(SCHEDULE, [])
        for period in past:
            self._saved = period.get(_OPENED, {}) | self._saved
        self._check_datasets(past, is_read_again=state.pop(_READ_AGAIN, False))
        self._schedule = _continued(past, turn=self._turn, weights=self._weights)
        self._now = self._schedule[-1]
        self._read_again_until = max((period[_UNTIL] for period in past), default=0)
        self._begin(0)

    def _begin(self, number: int) -> None:
        self._number, self._period = number, self._schedule[number]
        weights = self._period[_WEIGHTS]
        self._ends = _intervals(tuple(weights.items()))
        # Includes datasets that had ended: the weights inside them may have changed.
        self._active = weights.keys() & self._parts.keys()

    def _check_datasets(
        self, past: Sequence[dict[str, Any]], *, is_read_again: bool
    ) -> None:
        # Raises a DataError if elements that are read again would differ.
        turn = self._turn
        for period in past:
            until, weights = period[_UNTIL], period[_WEIGHTS]
            gone = weights.keys() - self._parts.keys()
            if gone and turn < until:
                due, name = next_chosen(
                    turn, shard=self._shard, ends=bounds(weights), among=gone
                )
                if due < until:
                    raise errors.DataError(
                        f"mixture: dataset {name} was removed, but some of its"
                        " examples are still in a shuffle buffer or in incomplete"
                        " rows; add it again with weight 0 until they are used"
                    )
            new = sorted(self._weights.keys() - weights.keys())
            if period.get(_ENDED) and new and (turn < until or is_read_again):
                raise errors.DataError(
                    f"mixture: the weights of {new} were raised from 0 after the other"
                    " datasets had ended, but the last examples of those are still in"
                    " a shuffle buffer or in incomplete rows; leave the weights at 0"
                    " until they are used"
                )
            turn = max(turn, until)


class _MixtureIterator(_Draws, grain.DatasetIterator):
    def __init__(self, mixture: Mixture) -> None:
        super().__init__(mixture)
        self._opened: dict[str, grain.DatasetIterator] = {}
        # The current state, if `get_state` was called.
        self._state: dict[str, Any] | None = None

    def __next__(self) -> Any:
        if self._state is not None:
            # A caller that sets this state again must then read the same elements.
            self._state[SCHEDULE] = self._schedule[self._number :]
            self._state = None
        while self._period is not self._now:
            for element in self._draw(self._period[_UNTIL]):
                return element
            self._turn = self._period[_UNTIL]
            self._begin(self._number + 1)
        for element in self._draw(None):
            self._now[_UNTIL] = max(self._now[_UNTIL], self._turn)
            return element
        self._now[_ENDED] = True
        raise StopIteration

    def get_state(self) -> dict[str, Any]:
        if self._state is None:
            now = {name: opened.get_state() for name, opened in self._opened.items()}
            self._state = {"turn": self._turn, TAKEN: dict(self._taken)}
            self._state["parts"] = self._saved | now
            if self._period is not self._now or self._now.get(_ENDED):
                self._state[SCHEDULE] = self._schedule[self._number :]
        return self._state

    def set_state(self, state: dict[str, Any]) -> None:
        self.close()
        self._restore(state)
        self._state = state
        for name, saved in self._saved.items():
            if any(SCHEDULE in part for part in _mixtures(saved)):
                # A mixture in this one may not be read for long: check its state now.
                part = iter(self._parts[name]) if name in self._parts else None
                if part is not None and gone(saved, names(self._parts[name])):
                    part.set_state(copy.deepcopy(saved))
                    part.close()

    def close(self) -> None:
        for opened in self._opened.values():
            opened.close()
        self._opened = {}

    def _draw(self, until: int | None) -> list[Any]:
        # The next element, if there is one at a turn before `until`.
        while self._active:
            # Skips the turns of datasets that have ended; the others keep theirs.
            turn, name = next_chosen(
                self._turn, shard=self._shard, ends=self._ends, among=self._active
            )
            if until is not None and turn >= until:
                break
            try:
                element = next(self._open(name))
            except StopIteration:
                self._active.remove(name)
                continue
            self._turn = turn + 1
            self._taken[name] = self._taken.get(name, 0) + 1
            return [element]
        return []

    def _open(self, name: str) -> grain.DatasetIterator:
        opened = self._opened.get(name)
        if opened is None:
            opened = iter(self._parts[name])
            if name in self._saved:
                saved = self._saved.pop(name)
                if self._turn < self._read_again_until:
                    for part in _mixtures(saved):
                        part[_READ_AGAIN] = True
                opened.set_state(saved)
            else:
                first = opened.get_state()
                if any(_mixtures(first)):
                    # Its elements must be read again with the same weights.
                    self._period.setdefault(_OPENED, {})[name] = first
            self._opened[name] = opened
        return opened


class _MixtureBlocks(_Draws):
    """The elements of a mixture in blocks, drawn many turns at a time."""

    def __init__(self, mixture: Mixture, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._names = sorted(mixture._parts)
        self._numbers = {name: number for number, name in enumerate(self._names)}
        self._readers: dict[int, blocks.Reader] = {}
        super().__init__(mixture)
        # The place or the saved state of each dataset that was opened, by name.
        self._at: dict[str, Any] = {}
        self._mean_tokens = 0.0
        # The first rows need few elements.
        self._num_drawn = _LEAST_TURNS
        # How far each dataset with columns was read; None if it was not.
        self._read_to: list[records.Place | None] = [None] * len(self._names)
        # What was read ahead of a draw, or why nothing was.
        self._drawn_now: dict[int, _Runs] = {}
        self._problems: dict[int, Exception] = {}

    def read(self, at_most: int) -> blocks.Block:
        """See `Blocks`."""
        del at_most
        while self._period is not self._now:
            block = self._draw(self._period[_UNTIL])
            if block is not None:
                return block
            self._turn = self._period[_UNTIL]
            self._begin(self._number + 1)
        block = self._draw(None)
        if block is None:
            raise StopIteration
        return block

    def end(self) -> blocks.Place:
        """See `Blocks`."""
        return blocks.Place(self._places(is_end=True), 0)

    def get_state(self) -> dict[str, Any]:
        """See `Blocks`."""
        return blocks.Place(self._places(), 0).state()

    def set_state(self, state: dict[str, Any]) -> None:
        """See `Blocks`."""
        self.close()
        self._restore(state)
        self._at = dict(self._saved)
        self._read_to = [None] * len(self._names)
        self._num_drawn, self._mean_tokens = _LEAST_TURNS, 0.0

    def close(self) -> None:
        """See `Blocks`."""
        self._readers = {}

    def _begin(self, number: int) -> None:
        super()._begin(number)
        self._ends_of = np.array([end for end, _ in self._ends[:-1]], np.uint64)
        # The number of the dataset of each interval; -1 if it is not active.
        self._drawn = np.array(
            [
                self._numbers[name] if name in self._active else -1
                for _, name in self._ends
            ]
        )

    def _draw(self, until: int | None) -> blocks.Block | None:
        # Elements of turns before `until`, if there are any.
        while self._active:
            turns, chosen = self._next_turns(until)
            if not len(turns):
                return None
            counts = np.bincount(chosen)
            num, lacking = len(turns), -1
            self._drawn_now, self._problems = {}, {}
            for number in np.flatnonzero(counts).tolist():
                count = int(counts[number])
                held = self._fill(number, count)
                if held < count:
                    first = int(np.flatnonzero(chosen == number)[held])
                    if first < num:
                        num, lacking = first, number
            if num:
                return self._taken_at(turns[:num], chosen[:num])
            try:
                if lacking in self._problems:
                    raise self._problems[lacking]
                self._reader(lacking).raise_end()
            except StopIteration:
                self._active.remove(self._names[lacking])
                self._drawn[self._drawn == lacking] = -1
        return None

    def _next_turns(self, until: int | None) -> tuple[np.ndarray, np.ndarray]:
        # Some of the next turns of datasets that have not ended, and those datasets.
        first, number = self._turn, self._num_turns()
        last = first + number if until is None else min(first + number, until)
        turns = np.arange(first, last)
        points = turns.astype(np.uint64) * np.uint64(_GOLDEN)
        points += np.uint64(self._shard * _PHASE % _ONE)
        chosen = self._drawn[np.searchsorted(self._ends_of, points, side="right")]
        is_active = chosen >= 0
        if is_active.all():
            return turns, chosen
        if is_active.any():
            return turns[is_active], chosen[is_active]
        turn, name = next_chosen(
            self._turn, shard=self._shard, ends=self._ends, among=self._active
        )
        if until is not None and turn >= until:
            return turns[:0], chosen[:0]
        return np.array([turn]), np.array([self._numbers[name]])

    def _num_turns(self) -> int:
        # As many as have about the tokens of a block, if elements are as before.
        if not self._mean_tokens:
            return _LEAST_TURNS
        wanted = int(min(max(self._block_tokens / self._mean_tokens, 1), _MOST_TURNS))
        # Few turns of many datasets would read a single element of most.
        wanted = max(wanted, min(len(self._names), 2 * _MOST_TURNS))
        self._num_drawn = min(2 * self._num_drawn, wanted)
        return self._num_drawn

    def _taken_at(self, turns: np.ndarray, chosen: np.ndarray) -> blocks.Block:
        # The block of these turns, which their datasets have.
        before = self._places(turns=turns, chosen=chosen)
        counts = np.bincount(chosen)
        parts = []
        for number in np.flatnonzero(counts).tolist():
            name, num_taken = self._names[number], int(counts[number])
            self._taken[name] = self._taken.get(name, 0) + num_taken
            if number in self._drawn_now:
                runs = self._drawn_now[number]
                parts += runs.lists(num_taken)
                before.of_part[number] = runs.places
                self._read_to[number] = _after(runs.places, num_taken)
                continue
            block = self._readers[number].take(num_taken)
            parts.append((block.values, block.start, block.length))
            before.of_part[number] = block.without_values()
            self._at[name] = block.place(num_taken)
        self._turn, self._drawn_now = int(turns[-1]) + 1, {}
        values, start, length = blocks.together(parts)
        if len(parts) > 1:
            # Of each dataset's elements, which follow each other, the next is drawn.
            place = np.argsort(chosen, kind="stable")
            in_turn = np.empty((2, len(turns)), np.int64)
            in_turn[0, place], in_turn[1, place] = start, length
            start, length = in_turn
        mean = max(1.0, float(length.sum()) / len(turns))
        self._mean_tokens = (self._mean_tokens or mean) / 2 + mean / 2
        return blocks.Block(
            values=values,
            start=start,
            length=length,
            runs=((0, blocks.Place(before, 0)),),
        )

    def _places(
        self,
        *,
        turns: np.ndarray = _NONE,
        chosen: np.ndarray = _NONE,
        is_end: bool = False,
    ) -> _MixturePlaces:
        # The places of the elements that are drawn next, at these turns.
        return _MixturePlaces(
            names=self._names,
            turns=np.concatenate([[self._turn], turns + 1]),
            chosen=chosen,
            taken=dict(self._taken),
            at=dict(self._at),
            read_to=list(self._read_to),
            of_part={},
            schedule=self._schedule,
            period=self._number,
            is_end=is_end,
        )

    def _fill(self, number: int, count: int) -> int:
        # How many of the next `count` elements of a dataset there are.
        columns = self._columns(number)
        at = None if columns is None else self._place(number)
        if columns is None or at is None:
            return self._reader(number).fill(count)
        runs = _Runs()
        try:
            # A read ends where an epoch does.
            while runs.num_held < count:
                lists, first = columns.next_lists(
                    self._shard, at, count - runs.num_held
                )
                runs.add(lists, first)
                at = first.after(len(lists[1]))
        except records.NotListsError:
            if not runs.num_held:
                if self._read_to[number] is not None:
                    self._saved[self._names[number]] = _document_state(at)
                self._read_to[number] = None
                return self._reader(number).fill(count)
        except Exception as error:
            # After elements, it is raised by the next read.
            if not runs.num_held:
                if isinstance(error, StopIteration):
                    self._read_to[number] = error.value
                self._problems[number] = error
        self._drawn_now[number] = runs
        return runs.num_held

    def _place(self, number: int) -> records.Place | None:
        # How far a dataset with columns was read; None if a reader must go on.
        place = self._read_to[number]
        if place is not None:
            return place
        name = self._names[number]
        if name not in self._saved:
            return records.Place()
        saved = self._saved[name]
        if saved["document"]:
            return None
        place = records.Place.of(saved["parent"])
        del self._saved[name], self._at[name]
        self._read_to[number] = place
        return place

    def _columns(self, number: int) -> records.SmallBlocks | None:
        if number in self._readers or not isinstance(self._parts, Parts):
            return None
        return self._parts.columns(self._names[number])

    def _reader(self, number: int) -> blocks.Reader:
        reader = self._readers.get(number)
        if reader is None:
            name = self._names[number]
            of_part = blocks.of(self._parts[name])
            assert of_part is not None
            if name in self._saved:
                of_part.set_state(self._saved.pop(name))
            self._at[name] = of_part.get_state()
            reader = self._readers[number] = blocks.Reader(of_part)
        return reader


# The places of documents that were read one after the other, each with the number of
# documents before it.
_ReadPlaces = list[tuple[int, records.Place]]


class _Runs:
    """Documents of one dataset with columns: what some reads returned, in order."""

    def __init__(self) -> None:
        self.places: _ReadPlaces = []
        self.num_held = 0
        self._lists: list[blocks.Lists] = []

    def add(self, lists: blocks.Lists, first: records.Place) -> None:
        self._lists.append(lists)
        self.places.append((self.num_held, first))
        self.num_held += len(lists[1])

    def lists(self, num_documents: int) -> list[blocks.Lists]:
        """Those of the first documents."""
        if num_documents == self.num_held:
            return self._lists
        return [
            (values, start[: num_documents - begin], length[: num_documents - begin])
            for (values, start, length), (begin, _) in zip(
                self._lists, self.places, strict=True
            )
            if begin < num_documents
        ]


def _after(places: _ReadPlaces, num_documents: int) -> records.Place:
    # The place after some of the documents, at least one.
    begin, first = next(each for each in reversed(places) if each[0] < num_documents)
    return first.after(num_documents - begin)


def _document_state(place: records.Place) -> dict[str, Any]:
    # The state of `Tokens` at a place.
    return {"parent": place.state(), "document": 0}


@dataclasses.dataclass(slots=True, kw_only=True)
class _MixturePlaces:
    """The states before the elements of a block of a mixture.

    Attributes:
      names: of all datasets, by number.
      turns: before each element and after the last, int64 `[elements + 1]`.
      chosen: the number of each element's dataset, int64 `[elements]`.
      taken: how many elements of each dataset were taken before the block.
      at: the place, or the saved state, of each opened dataset before the block.
      read_to: how far each dataset with columns was read before the block.
      of_part: the elements of each dataset in the block, without their tokens; or
        their places, of a dataset with columns.
      schedule: the periods; see `_Draws`.
      period: the number of the period of the block.
      is_end: whether nothing follows.
    """

    names: Sequence[str]
    turns: np.ndarray
    chosen: np.ndarray
    taken: dict[str, int]
    at: dict[str, Any]
    read_to: list[records.Place | None]
    of_part: dict[int, blocks.Block | _ReadPlaces]
    schedule: list[dict[str, Any]]
    period: int
    is_end: bool

    def state(self, number: int, read: blocks.Place) -> dict[str, Any]:
        """See `Places`."""
        counts = np.bincount(self.chosen[:number], minlength=len(self.names))
        taken, parts = dict(self.taken), dict(self.at)
        for name, read_to in zip(self.names, self.read_to, strict=True):
            if read_to is not None:
                parts[name] = _document_state(read_to)
        for part in np.flatnonzero(counts).tolist():
            name, count = self.names[part], int(counts[part])
            taken[name] = taken.get(name, 0) + count
            elements = self.of_part[part]
            if isinstance(elements, blocks.Block):
                parts[name] = elements.place(count)
            else:
                parts[name] = _document_state(_after(elements, count))
        turn = int(self.turns[number])
        state: dict[str, Any] = {
            "turn": turn,
            TAKEN: taken,
            "parts": {
                name: at.state() if isinstance(at, blocks.Place) else at
                for name, at in parts.items()
            },
        }
        last = read.of
        assert isinstance(last, _MixturePlaces)
        until = int(last.turns[read.number])
        is_now = self.period == len(self.schedule) - 1
        if until > turn or last.is_end or not is_now:
            periods = [dict(period) for period in self.schedule[self.period :]]
            if last.period == len(self.schedule) - 1:
                periods[-1][_UNTIL] = max(periods[-1][_UNTIL], until)
            if last.is_end:
                periods[-1][_ENDED] = True
            state[SCHEDULE] = periods
        return state

    def read(self, number: int) -> blocks.Place:
        """See `Places`; no buffer is below."""
        return blocks.Place(self, number)


def _continued(
    past: Sequence[dict[str, Any]], *, turn: int, weights: dict[str, float]
) -> list[dict[str, Any]]:
    # The periods of a saved schedule that are read again from `turn` on, and last the
    # current period.
    periods = []
    for period in past:
        if period[_UNTIL] > turn:
            periods.append(dict(period))
            turn = period[_UNTIL]
    if periods and periods[-1][_WEIGHTS] == weights:
        return periods
    return [*periods, {_UNTIL: turn, _WEIGHTS: weights}]


def _mixtures(state: Any) -> Iterator[dict[str, Any]]:
    # The states of mixtures in the state of a pipeline.
    return (part for part in cursors.parts(state) if TAKEN in part and "parts" in part)


def gone(cursor: cursors.Cursor, names: Collection[str]) -> set[str]:
    """The datasets by which a cursor reads elements again, without those in `names`."""
    periods = itertools.chain.from_iterable(
        part.get(SCHEDULE, ()) for part in _mixtures(cursor)
    )
    return {name for period in periods for name in period[_WEIGHTS]} - set(names)


def names(made: grain.IterDataset) -> set[str]:
    """The names of all datasets in the mixtures of a pipeline."""
    mixtures = (
        each for each in shard_steps.datasets(made) if isinstance(each, Mixture)
    )
    return {name for mixture in mixtures for name in mixture._parts}


def all_made(made: Any) -> Any:
    """A pipeline, with all `Parts` of its mixtures made now, to be kept."""
    for each in shard_steps.datasets(made):
        if isinstance(each, Mixture):
            each.make_parts()
    return made


def by_name(made: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """The datasets of a pipeline, last to first, with the name of their mixture's part.

    The name is empty outside of mixtures, and `outer/inner` in a mixture inside one.
    """
    yield name, made
    if isinstance(made, Mixture):
        for part, dataset in made._parts.items():
            yield from by_name(dataset, f"{name}/{part}".lstrip("/"))
        return
    for parent in shard_steps.parents(made):
        yield from by_name(parent, name)


def states_by_name(state: Any, name: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """The states inside the state of a pipeline, outermost first; see `by_name`.

    Those of an older cursor inside it are left out.
    """
    if isinstance(state, dict):
        yield name, state
        if TAKEN in state and "parts" in state:
            for part, of_part in state["parts"].items():
                yield from states_by_name(of_part, f"{name}/{part}".lstrip("/"))
            return
        state = [value for key, value in state.items() if key != cursors.HELD]
    if isinstance(state, list | tuple):
        for value in state:
            yield from states_by_name(value, name)


def taken(shard_cursors: Iterable[cursors.Cursor]) -> dict[str, int]:
    """The number of elements taken from each dataset, by the cursors of all shards."""
    counts: collections.Counter[str] = collections.Counter()
    for cursor in shard_cursors:
        for part in _mixtures(cursor):
            counts.update(part[TAKEN])
    return dict(counts)
