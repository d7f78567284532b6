"""Mixtures of datasets by weight, after a schedule that is a pure function.

Which dataset gives element `n` of shard `s` follows from `n`, `s` and the weights now:
the point `n * phi + s * sqrt(2)`, modulo one, falls into one of the intervals that the
weights cut the unit interval into. Multiples of the golden ratio fill it more evenly
than any other sequence of this kind (Kronecker's; Niederreiter 1992): of n elements, a
dataset is at most 4 from its share up to n = 1,000, and 6 up to a million. As nothing
is remembered but `n`, weights can change at any resume.
"""

from __future__ import annotations

import collections
import fractions
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import grain

from elastic_ckpt.core import errors, storage
from elastic_ckpt.data import cursors, shard_steps

# The unit interval in 64 bits; the fractions of the golden ratio and of sqrt(2) in it.
_ONE = 2**64
_GOLDEN = 0x9E3779B97F4A7C15
_PHASE = 0x6A09E667F3BCC909

# Turns that are tried one by one before the next turn of a dataset is computed.
_NEAR_TURNS = 100

# The field of a cursor that counts what was taken of each dataset.
TAKEN = "taken"


def check_weights(weights: Mapping[str, float]) -> None:
    """Raises a ConfigError that names the weight that cannot be meant."""
    for name, weight in weights.items():
        if not 0 <= weight < float("inf"):
            raise errors.ConfigError(
                f"mixture: dataset {name} has the weight {weight}; weights are numbers"
                " from 0 on"
            )
    if not any(weights.values()):
        raise errors.ConfigError(
            f"mixture: all weights of {sorted(weights)} are 0; raise one of them"
        )


def bounds(weights: Mapping[str, float]) -> list[tuple[int, str]]:
    """Where the interval of each dataset ends, in 64 bits, and its name.

    However small a weight above 0 is, its interval has a point.
    """
    check_weights(weights)
    exact = {name: fractions.Fraction(weight) for name, weight in weights.items()}
    total = sum(exact.values())
    share, end = fractions.Fraction(), 0
    to_come = sum(weight > 0 for weight in exact.values())
    found = []
    for name, weight in exact.items():
        share += weight / total
        to_come -= weight > 0
        end = min(max(int(share * _ONE), end + (weight > 0)), _ONE - to_come)
        found.append((end, name))
    return found


def chosen(turn: int, *, shard: int, ends: list[tuple[int, str]]) -> str:
    """The dataset that gives element `turn` of `shard`; see `bounds`."""
    point = _point(turn, shard)
    return next(name for end, name in ends if point < end)


def next_chosen(
    turn: int, *, shard: int, ends: list[tuple[int, str]], among: Collection[str]
) -> tuple[int, str]:
    """The first turn from `turn` on that is one of `among`'s datasets, and which.

    However rare these datasets are, the time is about the same.
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
    # Turns until the point has moved by low to high, around the unit interval.
    if low > high:
        return 0
    return first_multiple(_GOLDEN, _ONE, low, high)


def first_multiple(step: int, modulus: int, low: int, high: int) -> int:
    """The least n from 0 on for which `n * step` modulo `modulus` is `low` to `high`.

    As Euclid's algorithm, it takes a logarithmic number of steps. `step` is less than
    `modulus`, they have no common divisor, and `0 <= low <= high < modulus`.
    """
    if not low:
        return 0
    if 2 * step > modulus:
        return first_multiple(modulus - step, modulus, modulus - high, modulus - low)
    number = -(-low // step)
    if number * step <= high:
        return number
    # No multiple before the first turn around; after how many turns is there one?
    turns = first_multiple(-modulus % step, step, low % step, high % step)
    return -(-(low + modulus * turns) // step)


class Mixture(shard_steps.Step):
    """Elements of several datasets of one shard, by weight.

    A dataset is opened when its first element is due. If datasets end, the others go
    on, and the mixture ends with the last of them. The state is keyed by the datasets'
    names: at a resume, one may be new, one gone, and the weights others. It does not
    record which datasets have ended: after a resume they are asked again.

    Args:
      parts: the datasets by name.
      weights: a number from 0 on for each name; only their ratios count.
      shard: the shard's number.
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
        # In the order of names, so that a list in another order is the same mixture.
        weighed = {name: weights[name] for name in sorted(parts) if weights[name]}
        self._ends = bounds(weighed or dict(weights))
        super().__init__([parts[name] for name in weighed])
        self._parts = {name: parts[name] for name in weighed}
        self._given = {name: (weights[name], parts[name]) for name in sorted(parts)}
        self._shard = self.shard = shard

    def __iter__(self) -> grain.DatasetIterator:
        return _MixtureIterator(self._parts, self._ends, self._shard)

    def __str__(self) -> str:
        return f"Mixture(shard={self.shard}, {sorted(self._given)})"

    def settings(self) -> dict[str, storage.Json]:
        """Each dataset by its name: its weight and its steps."""
        return {
            "datasets": {
                name: {"weight": weight, "steps": shard_steps.described(part)}
                for name, (weight, part) in self._given.items()
            }
        }


class _MixtureIterator(grain.DatasetIterator):
    def __init__(
        self,
        parts: dict[str, grain.IterDataset],
        ends: list[tuple[int, str]],
        shard: int,
    ) -> None:
        super().__init__()
        self._parts = parts
        self._ends = ends
        self._shard = shard
        self._turn = 0
        self._opened: dict[str, grain.DatasetIterator] = {}
        self._going_on = set(parts)
        self._taken: dict[str, int] = {}
        # Where the datasets are that were not opened since.
        self._saved: dict[str, Any] = {}

    def __next__(self) -> Any:
        while self._going_on:
            # The turns of those that have ended pass by, and the others keep theirs.
            turn, name = next_chosen(
                self._turn, shard=self._shard, ends=self._ends, among=self._going_on
            )
            try:
                element = next(self._open(name))
            except StopIteration:
                self._going_on.remove(name)
                continue
            self._turn = turn + 1
            self._taken[name] = self._taken.get(name, 0) + 1
            return element
        raise StopIteration

    def get_state(self) -> dict[str, Any]:
        now = {name: opened.get_state() for name, opened in self._opened.items()}
        state: dict[str, Any] = {"turn": self._turn, TAKEN: dict(self._taken)}
        state["parts"] = self._saved | now
        return state

    def set_state(self, state: dict[str, Any]) -> None:
        self.close()
        self._turn = state["turn"]
        self._taken = dict(state[TAKEN])
        self._saved = dict(state["parts"])
        # Those that had ended are asked again: weights inside them may be others now.
        self._going_on = set(self._parts)

    def close(self) -> None:
        for opened in self._opened.values():
            opened.close()
        self._opened = {}

    def _open(self, name: str) -> grain.DatasetIterator:
        opened = self._opened.get(name)
        if opened is None:
            opened = iter(self._parts[name])
            if name in self._saved:
                opened.set_state(self._saved.pop(name))
            self._opened[name] = opened
        return opened


def taken(of_shards: Iterable[cursors.Cursor]) -> dict[str, int]:
    """Elements taken of each dataset, by the cursors of all shards."""
    found: collections.Counter[str] = collections.Counter()
    for cursor in of_shards:
        for part in cursors.parts(cursor):
            if TAKEN in part and "parts" in part:
                found.update(part[TAKEN])
    return dict(found)
