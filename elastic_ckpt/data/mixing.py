"""Weighted mixtures of datasets, scheduled by a pure function.

The dataset of turn `n` of shard `s` depends only on `n`, `s` and the weights: the
weights split the unit interval, and the point `n * phi + s * sqrt(2)`, modulo one,
falls into one dataset's interval. Multiples of the golden ratio fill the unit interval
more evenly than any other Kronecker sequence (Niederreiter 1992): among n elements, the
count of a dataset differs from its share by at most 4 up to n = 1,000, and by at most 6
up to a million. Because the only state is `n`, weights can change at any turn.
"""

from __future__ import annotations

import collections
import functools
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import grain
import numpy as np

from elastic_ckpt.core import errors, storage
from elastic_ckpt.data import cursors, shard_steps

# The unit interval in 64 bits, and the fractions of the golden ratio and of sqrt(2).
_ONE = 2**64
_GOLDEN = 0x9E3779B97F4A7C15
_PHASE = 0x6A09E667F3BCC909
# Weights are rounded to multiples of the largest weight divided by this, but not to 0.
_FINENESS = 2**40

# A field of a state; for others, see `cursors`.
_WEIGHTS = "weights"


def check_weights(weights: Mapping[str, float]) -> None:
    """Raises a ConfigError if a weight is invalid; the message names the dataset."""
    for name, weight in weights.items():
        if not 0 <= weight < float("inf"):
            raise errors.ConfigError(
                f"mixture: dataset {name} has weight {weight}; set it to a finite"
                " number, 0 or greater"
            )
    if not any(weights.values()):
        raise errors.ConfigError(
            f"mixture: the weights of {sorted(weights)} are all 0; set at least one"
            " above 0"
        )


@functools.lru_cache(maxsize=64)
def bounds(weights: tuple[float, ...]) -> np.ndarray:
    """The upper ends, in 64 bits, of the intervals of all weights but the last."""
    largest = max(weights, default=1)
    exact = [max(1, round(weight / largest * _FINENESS)) for weight in weights]
    ends = [end * _ONE // sum(exact) for end in itertools.accumulate(exact)]
    return np.array(ends[:-1], np.uint64)


def chosen(turn: int, num_turns: int, *, shard: int, ends: np.ndarray) -> np.ndarray:
    """The index of the dataset of each turn, given the `bounds` of the weights."""
    points = np.arange(turn, turn + num_turns, dtype=np.uint64) * np.uint64(_GOLDEN)
    points += np.uint64(shard * _PHASE % _ONE)
    return np.searchsorted(ends, points, side="right")


class Mixture(shard_steps.Step):
    """Mixes the datasets of one shard by weight.

    If a dataset ends, the others continue, and the mixture ends with the last one. A
    dataset is opened when its first element is due.

    The state contains the state of each dataset by name, so it can be loaded after
    datasets were added or removed and weights changed. It also contains the weights, so
    that `lm.Rows` can reread its documents in the same order. New weights take effect
    at the next chapter of `lm.Rows`; datasets that had ended are tried again then, too.
    The weights cannot change if a later step buffers elements (`map` and `filter` do
    not).

    Args:
      parts: the datasets by name, or a function that creates a dataset, given its name,
        when it is opened; that dataset must not contain a mixture.
      weights: the weight of each dataset by name, 0 or more; only ratios matter.
      shard: the shard number.
    """

    describes_parents = renews = True

    def __init__(
        self,
        parts: Mapping[str, grain.IterDataset] | Callable[[str], grain.IterDataset],
        weights: Mapping[str, float],
        *,
        shard: int,
    ) -> None:
        check_weights(weights)
        # Sorted by name, so that the order of the list does not matter.
        self._weights = {name: weights[name] for name in sorted(weights)}
        self._shard = self.shard = shard
        if isinstance(parts, Mapping):
            if parts.keys() != weights.keys():
                raise errors.ConfigError(
                    f"Mixture: the datasets are named {sorted(parts)}, but the weights"
                    f" are named {sorted(weights)}; pass one weight for each dataset"
                )
            self._keep(parts)
        else:
            super().__init__()
            self._make = parts

    def _keep(self, parts: Mapping[str, grain.IterDataset]) -> None:
        self._make = parts.__getitem__
        super().__init__([parts[name] for name in self._weights])

    def __iter__(self) -> grain.DatasetIterator:
        return _MixtureIterator(self)

    def __str__(self) -> str:
        return f"Mixture(shard={self.shard}, {sorted(self._weights)})"

    def settings(self) -> dict[str, storage.Json]:
        """The weight and the steps of each dataset, keyed by dataset name."""
        return {
            "datasets": {
                name: {
                    "weight": weight,
                    "steps": shard_steps.step_descriptions(self._make(name)),
                }
                for name, weight in self._weights.items()
            }
        }


class _MixtureIterator(shard_steps.Elements):
    """Draws from the datasets of a mixture, turn by turn."""

    def __init__(self, mixture: Mixture) -> None:
        super().__init__()
        self._mixture, self._shard = mixture, mixture._shard
        self._now = _weights_now(mixture)
        # Nested mixtures begin with the current weights.
        datasets = zip(mixture._weights, shard_steps.parents(mixture), strict=False)
        self._nested = [name for name, dataset in datasets if names(dataset)]
        self._opened: dict[str, grain.DatasetIterator] = {}
        self.set_state(
            {
                "turn": 0,
                _WEIGHTS: self._now,
                "ended": (),
                cursors.TAKEN: {},
                cursors.PARTS: {},
            }
        )

    def _use(self, weights: dict[str, float], ended: frozenset[str]) -> None:
        # A loader may have loaded the weights in another order.
        self._weights, self._ended = dict(sorted(weights.items())), ended
        active = {n: each for n, each in self._weights.items() if n not in ended}
        self._active, self._ends = [*active], bounds(tuple(active.values()))

    def some(self, at_most: int) -> list[Any]:
        """See `Elements`; stops at a turn at which a dataset ends."""
        num_turns = at_most
        while self._active:
            turns = chosen(self._turn, num_turns, shard=self._shard, ends=self._ends)
            counts = np.bincount(turns).tolist()
            opened = {n: self._part(self._active[n]) for n in sorted({*turns.tolist()})}
            before = {n: each.get_state() for n, each in opened.items()}
            drawn = {n: shard_steps.take(each, counts[n]) for n, each in opened.items()}
            short = [n for n in drawn if len(drawn[n]) < counts[n]]
            if not short:
                self._turn += num_turns
                for n in drawn:
                    self._taken[self._active[n]] += counts[n]
                in_turn = {n: iter(elements) for n, elements in drawn.items()}
                return [next(in_turn[n]) for n in turns.tolist()]
            # After a dataset ends, its turns go to the others.
            for n, state in before.items():
                opened[n].set_state(state)
            num_turns = int(
                min([np.flatnonzero(turns == n)[len(drawn[n])] for n in short])
            )
            if not num_turns:
                self._use(self._weights, self._ended | {self._active[turns[0]]})
                num_turns = at_most
        return []

    def renew(self) -> bool:
        """Switches to the current weights; see the module's `renew`."""
        changed = list(map(renew, self._opened.values()))
        if self._weights == self._now and not any(changed):
            return False
        self._use(self._now, frozenset())
        return True

    def get_state(self) -> dict[str, Any]:
        opened = {name: each.get_state() for name, each in self._opened.items()}
        return {
            "turn": self._turn,
            _WEIGHTS: self._weights,
            "ended": sorted(self._ended),
            cursors.TAKEN: dict(self._taken),
            cursors.PARTS: self._saved | opened,
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
        self.close()
        self._turn, self._saved = state["turn"], dict(state[cursors.PARTS])
        self._taken = collections.Counter(state[cursors.TAKEN])
        self._use(state[_WEIGHTS], frozenset(state["ended"]))
        for name in self._nested:
            self._part(name)

    def close(self) -> None:
        for opened in self._opened.values():
            opened.close()
        self._opened = {}

    def _part(self, name: str) -> grain.DatasetIterator:
        opened = self._opened.get(name)
        if opened is None:
            if name not in self._mixture._weights:
                raise errors.DataError(
                    f"mixture: dataset {name} was removed, but incomplete rows still"
                    " contain some of its examples; add the dataset back with weight 0"
                    " until these are used"
                )
            made = self._mixture._make(name)
            # Otherwise, Grain would add a slow step to the end of the pipeline.
            made.has_child = True
            opened = iter(made)
            if name in self._saved:
                opened.set_state(self._saved[name])
                del self._saved[name]
            self._opened[name] = opened
        return opened


def renew(iterator: Any) -> bool:
    """Switches the mixtures of a pipeline to their current weights.

    Call this only when no elements are buffered, or when the buffered elements will be
    reread from an earlier state; that state keeps its own weights.

    Returns:
      Whether any weights have changed.
    """
    own = getattr(iterator, "renew", None)
    if own is not None:
        return own()
    changed = list(map(renew, getattr(iterator, "_parents", ())))
    return any(changed)


def check_weights_of(dataset: Any, state: Any) -> None:
    """Checks that the weights of a state's buffered elements have not changed.

    Raises:
      DataError: if weights have changed before a step that buffers elements.
    """
    holding = [
        step
        for step in shard_steps.datasets(dataset)
        if not getattr(step, "renews", False)
        and not shard_steps.holds_nothing(step)
        and names(step)
    ]
    if not holding:
        return
    now = {
        name: _weights_now(made)
        for name, made in by_name(dataset)
        if isinstance(made, Mixture)
    }
    for name, of_name in cursors.states(state, oldest=True):
        if _WEIGHTS in of_name and of_name[_WEIGHTS] != now.get(name):
            raise errors.DataError(
                "the weights of a mixture have changed, but"
                f" {shard_steps.shown(holding[-1])}, a later step, may have buffered"
                " some of the mixture's elements; restore the old weights, shuffle each"
                " dataset before the mixture, or pack with ec.data.lm.Rows"
            )


def _weights_now(mixture: Mixture) -> dict[str, float]:
    return {name: weight for name, weight in mixture._weights.items() if weight}


def gone(cursor: cursors.Cursor, names: Collection[str]) -> set[str]:
    """The datasets not in `names` from which a cursor may reread elements."""
    return {
        name
        for _, state in cursors.states(cursor)
        for place, num_elements in state.get(cursors.FROM, ())
        if num_elements
        for mixture in _mixtures(place)
        for name in mixture[_WEIGHTS]
    } - set(names)


def _mixtures(state: Any) -> Iterator[dict[str, Any]]:
    # The states of mixtures in the state of a pipeline.
    return (
        s for _, s in cursors.states(state) if cursors.TAKEN in s and cursors.PARTS in s
    )


def names(made: Any) -> set[str]:
    """The names of all datasets in the mixtures of a pipeline."""
    mixtures = (
        each for each in shard_steps.datasets(made) if isinstance(each, Mixture)
    )
    return {name for mixture in mixtures for name in mixture._weights}


def by_name(made: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """The datasets of a pipeline, last to first, each with its name in the mixture.

    The name is empty outside mixtures and `outer/inner` in a nested mixture. Datasets
    that would be created when opened are created now and kept.
    """
    yield name, made
    if isinstance(made, Mixture):
        made._keep({part: made._make(part) for part in made._weights})
        for part in made._weights:
            yield from by_name(made._make(part), f"{name}/{part}".lstrip("/"))
        return
    for parent in shard_steps.parents(made):
        yield from by_name(parent, name)


def taken(shard_cursors: Iterable[cursors.Cursor]) -> dict[str, int]:
    """The number of elements taken from each dataset, given all shards' cursors."""
    counts: collections.Counter[str] = collections.Counter()
    for cursor in shard_cursors:
        for mixture in _mixtures(cursor):
            counts.update(mixture[cursors.TAKEN])
    return dict(counts)
