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
import fractions
import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import grain

from elastic_ckpt.core import errors, storage
from elastic_ckpt.data import cursors, shard_steps

# The unit interval in 64 bits; the fractions of the golden ratio and of sqrt(2) in it.
_ONE = 2**64
_GOLDEN = 0x9E3779B97F4A7C15
_PHASE = 0x6A09E667F3BCC909

# The number of turns that are tried one by one before the next one is computed.
_NEAR_TURNS = 100

# The field of a cursor with the number of elements taken from each dataset.
TAKEN = "taken"
# The field with the stages in which elements after the state were chosen. The fields of
# a stage: the turn before which it ended, its weights, whether all of its datasets had
# ended, and the first states of the mixtures that were opened in it.
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


class Mixture(shard_steps.Step):
    """Mixes several datasets of one shard by weight.

    If a dataset ends, the others continue; the mixture ends with the last of them. A
    dataset is opened when its first element is due.

    The state contains the state of each dataset under its name: when it is loaded,
    datasets may have been added or removed, and weights changed. New weights apply to
    the elements after those that a shuffle or a packer has already taken from here,
    which it reads again, in the same order. Datasets that have ended are tried again.

    Args:
      parts: the datasets by name.
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
        self._parts = {name: parts[name] for name in sorted(parts)}
        super().__init__(list(self._parts.values()))
        self._weights = {name: weights[name] for name in self._parts}
        self._shard = self.shard = shard

    def __iter__(self) -> grain.DatasetIterator:
        return _MixtureIterator(self)

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


class _MixtureIterator(grain.DatasetIterator):
    def __init__(self, mixture: Mixture) -> None:
        super().__init__()
        self._parts, self._shard = mixture._parts, mixture._shard
        self._weights = {name: each for name, each in mixture._weights.items() if each}
        self._turn = 0
        self._opened: dict[str, grain.DatasetIterator] = {}
        self._taken: dict[str, int] = {}
        # The saved states of datasets that were not opened since.
        self._saved: dict[str, Any] = {}
        # The current state, if `get_state` was called.
        self._state: dict[str, Any] | None = None
        # Stages of other weights that are read again, and last the current stage.
        self._schedule = _continued([], turn=0, weights=self._weights)
        self._now = self._schedule[-1]
        self._read_again_until = 0
        self._begin(0)

    def __next__(self) -> Any:
        if self._state is not None:
            # A caller that sets this state again must then read the same elements.
            self._state[SCHEDULE] = self._schedule[self._number :]
            self._state = None
        while self._stage is not self._now:
            for element in self._draw(self._stage[_UNTIL]):
                return element
            self._turn = self._stage[_UNTIL]
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
            if self._stage is not self._now or self._now.get(_ENDED):
                self._state[SCHEDULE] = self._schedule[self._number :]
        return self._state

    def set_state(self, state: dict[str, Any]) -> None:
        self.close()
        self._turn = state["turn"]
        self._taken = dict(state[TAKEN])
        self._saved = dict(state["parts"])
        past = state.get(SCHEDULE, [])
        for stage in past:
            self._saved = stage.get(_OPENED, {}) | self._saved
        self._check_datasets(past, is_read_again=state.pop(_READ_AGAIN, False))
        self._schedule = _continued(past, turn=self._turn, weights=self._weights)
        self._now = self._schedule[-1]
        self._read_again_until = max((stage[_UNTIL] for stage in past), default=0)
        self._state = state
        self._begin(0)
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

    def _begin(self, number: int) -> None:
        self._number, self._stage = number, self._schedule[number]
        weights = self._stage[_WEIGHTS]
        self._ends = bounds(weights)
        # Includes datasets that had ended: the weights inside them may have changed.
        self._active = weights.keys() & self._parts.keys()

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
                    self._stage.setdefault(_OPENED, {})[name] = first
            self._opened[name] = opened
        return opened

    def _check_datasets(
        self, past: Sequence[dict[str, Any]], *, is_read_again: bool
    ) -> None:
        # Raises a DataError if elements that are read again would differ.
        turn = self._turn
        for stage in past:
            until, weights = stage[_UNTIL], stage[_WEIGHTS]
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
            if stage.get(_ENDED) and new and (turn < until or is_read_again):
                raise errors.DataError(
                    f"mixture: the weights of {new} were raised from 0 after the other"
                    " datasets had ended, but the last examples of those are still in"
                    " a shuffle buffer or in incomplete rows; leave the weights at 0"
                    " until they are used"
                )
            turn = max(turn, until)


def _continued(
    past: Sequence[dict[str, Any]], *, turn: int, weights: dict[str, float]
) -> list[dict[str, Any]]:
    # The stages of a saved schedule that are read again from `turn` on, and last the
    # current stage.
    stages = []
    for stage in past:
        if stage[_UNTIL] > turn:
            stages.append(dict(stage))
            turn = stage[_UNTIL]
    if stages and stages[-1][_WEIGHTS] == weights:
        return stages
    return [*stages, {_UNTIL: turn, _WEIGHTS: weights}]


def _mixtures(state: Any) -> Iterator[dict[str, Any]]:
    # The states of mixtures in the state of a pipeline.
    return (part for part in cursors.parts(state) if TAKEN in part and "parts" in part)


def gone(cursor: cursors.Cursor, names: Collection[str]) -> set[str]:
    """The datasets by which a cursor reads elements again, without those in `names`."""
    stages = itertools.chain.from_iterable(
        part.get(SCHEDULE, ()) for part in _mixtures(cursor)
    )
    return {name for stage in stages for name in stage[_WEIGHTS]} - set(names)


def names(made: grain.IterDataset) -> set[str]:
    """The names of all datasets in the mixtures of a pipeline."""
    mixtures = (
        each for each in shard_steps.datasets(made) if isinstance(each, Mixture)
    )
    return {name for mixture in mixtures for name in mixture._parts}


def taken(shard_cursors: Iterable[cursors.Cursor]) -> dict[str, int]:
    """The number of elements taken from each dataset, by the cursors of all shards."""
    counts: collections.Counter[str] = collections.Counter()
    for cursor in shard_cursors:
        for part in _mixtures(cursor):
            counts.update(part[TAKEN])
    return dict(counts)
