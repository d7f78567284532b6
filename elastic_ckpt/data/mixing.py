"""Mixtures of datasets by weight, with a schedule that is a pure function.

The dataset of turn `n` of shard `s` depends on `n`, `s` and the weights: the weights
divide the unit interval, and the point `n * phi + s * sqrt(2)`, modulo one, is in the
interval of one dataset. Multiples of the golden ratio fill the unit interval more
evenly than any other sequence of this kind (Kronecker's; Niederreiter 1992): among n
elements, the count of a dataset differs from its share by at most 4 up to n = 1,000,
and by at most 6 up to a million. Because the only state is `n`, weights can change at
any turn.
"""

from __future__ import annotations

import bisect
import collections
import functools
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import grain
import numpy as np

from elastic_ckpt.core import errors, storage
from elastic_ckpt.data import cursors, shard_steps

# The unit interval in 64 bits; the fractions of the golden ratio and of sqrt(2) in it.
_ONE = 2**64
_GOLDEN = 0x9E3779B97F4A7C15
_PHASE = 0x6A09E667F3BCC909
# The smallest part of the largest weight that counts, so that each has a turn.
_FINENESS = 2**40

# Fields of a cursor: the number of elements taken from each dataset, and the states.
TAKEN, _PARTS, _WEIGHTS = "taken", "parts", "weights"


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


@functools.lru_cache(maxsize=64)
def bounds(weights: tuple[float, ...]) -> tuple[int, ...]:
    """The end of the interval of each weight, all above 0, in 64 bits."""
    largest = max(weights)
    exact = [max(1, round(weight / largest * _FINENESS)) for weight in weights]
    total = sum(exact)
    return tuple(end * _ONE // total for end in itertools.accumulate(exact))


def chosen(turn: int, *, shard: int, ends: tuple[int, ...]) -> int:
    """The number of the interval of a turn of a shard; see `bounds`."""
    return bisect.bisect_right(ends, (turn * _GOLDEN + shard * _PHASE) % _ONE)


def all_chosen(
    turn: int, num_turns: int, *, shard: int, ends: tuple[int, ...]
) -> np.ndarray:
    """Those of some turns, from one on, int64 `[num_turns]`."""
    points = np.arange(turn, turn + num_turns, dtype=np.uint64) * np.uint64(_GOLDEN)
    points += np.uint64(shard * _PHASE % _ONE)
    return np.searchsorted(_inner_bounds(ends), points, side="right")


@functools.lru_cache(maxsize=64)
def _inner_bounds(ends: tuple[int, ...]) -> np.ndarray:
    return np.array(ends[:-1], np.uint64)


class Parts(Mapping[str, grain.IterDataset]):
    """Datasets by name, each made when it is used; there is no mixture in them.

    Args:
      names: of all of them.
      make: makes one by its name.
    """

    def __init__(
        self, names: Collection[str], make: Callable[[str], grain.IterDataset]
    ) -> None:
        self._names = names
        self._make = make

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
    datasets may have been added or removed, and weights changed. A state keeps its
    weights, so that `lm.Rows` reads the documents that it holds again in the same
    order; new weights apply from its next chapter on, and datasets that have ended are
    tried again. Other steps may follow that hold no elements, such as `map` and
    `filter`; with steps that do, weights cannot change.

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


class _MixtureIterator(shard_steps.Elements):
    """Draws from the datasets of a mixture, turn by turn.

    The state has the weights that hold, and what has ended under them.
    """

    def __init__(self, mixture: Mixture) -> None:
        super().__init__()
        self._parts, self._shard = mixture._parts, mixture._shard
        self._now = {name: each for name, each in mixture._weights.items() if each}
        # Mixtures in this one begin with the weights of now.
        self._nested = []
        if not isinstance(self._parts, Parts):
            self._nested = [name for name in self._parts if names(self._parts[name])]
        self._opened: dict[str, grain.DatasetIterator] = {}
        self._go_on(turn=0, weights=self._now, ended=(), taken={}, parts={})

    def _go_on(
        self,
        *,
        turn: int,
        weights: dict[str, float],
        ended: Iterable[str],
        taken: dict[str, int],
        parts: dict[str, Any],
    ) -> None:
        self.close()
        self._turn, self._taken, self._saved = turn, dict(taken), dict(parts)
        self._use(weights, frozenset(ended))
        for name in self._nested:
            self._part(name)

    def _use(self, weights: dict[str, float], ended: frozenset[str]) -> None:
        self._weights, self._ended = weights, ended
        active = {name: each for name, each in weights.items() if name not in ended}
        self._active, self._ends = [*active], ()
        if active:
            self._ends = bounds(tuple(active.values()))

    def take(self, num_elements: int) -> list[Any]:
        """The next elements; fewer at the end alone."""
        found: list[Any] = []
        while self._active and len(found) < num_elements:
            missing = num_elements - len(found)
            some = self._drawn(missing)
            # Where a dataset ends, those after its turn depend on it.
            found += self._one_by_one(missing) if some is None else some
        return found

    def renew(self) -> bool:
        """Uses the weights of now; see `renew` of the module."""
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
            TAKEN: dict(self._taken),
            _PARTS: self._saved | opened,
        }

    def set_state(self, state: dict[str, Any]) -> None:
        self._go_on(**state)

    def close(self) -> None:
        for opened in self._opened.values():
            opened.close()
        self._opened = {}

    def _drawn(self, num_elements: int) -> list[Any] | None:
        # The elements of the next turns; None if a dataset ends in them.
        turns = all_chosen(self._turn, num_elements, shard=self._shard, ends=self._ends)
        counts = np.bincount(turns)
        numbers = np.flatnonzero(counts).tolist()
        before: dict[str, Any] = {}
        drawn: dict[int, Iterator[Any]] = {}
        for number in numbers:
            name, count = self._active[number], int(counts[number])
            part = self._part(name)
            before[name] = part.get_state()
            some = shard_steps.take(part, count)
            if len(some) < count:
                for each, state in before.items():
                    self._opened[each].set_state(state)
                return None
            drawn[number] = iter(some)
        for number in numbers:
            self._count(self._active[number], int(counts[number]))
        self._turn += num_elements
        return [next(drawn[number]) for number in turns.tolist()]

    def _one_by_one(self, at_most: int) -> list[Any]:
        # The next elements until a dataset ends.
        found: list[Any] = []
        while len(found) < at_most:
            number = chosen(self._turn, shard=self._shard, ends=self._ends)
            name = self._active[number]
            some = shard_steps.take(self._part(name), 1)
            if not some:
                self._use(self._weights, self._ended | {name})
                break
            found += some
            self._count(name, 1)
            self._turn += 1
        return found

    def _count(self, name: str, num_elements: int) -> None:
        self._taken[name] = self._taken.get(name, 0) + num_elements

    def _part(self, name: str) -> grain.DatasetIterator:
        opened = self._opened.get(name)
        if opened is None:
            if name not in self._parts:
                raise errors.DataError(
                    f"mixture: dataset {name} was removed, but some of its examples are"
                    " in incomplete rows still; add it again with weight 0 until they"
                    " are used"
                )
            opened = self._opened[name] = iter(self._parts[name])
            if name in self._saved:
                opened.set_state(self._saved.pop(name))
        return opened


def renew(iterator: Any) -> bool:
    """Has the mixtures of a pipeline use their present weights from here on.

    A state keeps the weights by which its elements were chosen. Who holds no elements,
    or reads them again by an earlier state, calls this.

    Args:
      iterator: of the pipeline, or of any part of it.

    Returns:
      Whether any weights differ from those before.
    """
    own = getattr(iterator, "renew", None)
    if own is not None:
        return own()
    changed = list(map(renew, getattr(iterator, "_parents", ())))
    return any(changed)


def check_weights_of(dataset: Any, state: Any) -> None:
    """Checks that a pipeline goes on from a state by the weights of its elements.

    Raises:
      DataError: if a step may hold elements that were chosen by other weights.
    """
    holding = _holding(dataset)
    if holding is None:
        return
    now = {
        name: {part: each for part, each in made._weights.items() if each}
        for name, made in by_name(dataset)
        if isinstance(made, Mixture)
    }
    for name, of_name in states_by_name(state):
        if _WEIGHTS in of_name and of_name[_WEIGHTS] != now.get(name):
            raise errors.DataError(
                "the weights of a mixture have changed, and"
                f" {shard_steps.shown(holding)} after it may hold some of its elements;"
                " use the weights of before, or shuffle each dataset before they are"
                " mixed, or pack by ec.data.lm.Rows"
            )


def _holding(dataset: Any) -> Any:
    # The first step that may hold elements of a mixture, and does not read them again
    # by their weights; None if there is none.
    if not names(dataset):
        return None
    renews = isinstance(dataset, Mixture) or getattr(dataset, "renews", False)
    if not renews and not shard_steps.holds_nothing(dataset):
        return dataset
    below = map(_holding, shard_steps.parents(dataset))
    return next((each for each in below if each is not None), None)


def gone(cursor: cursors.Cursor, names: Collection[str]) -> set[str]:
    """The datasets by which a cursor may read elements again, without `names`."""
    return {
        name
        for part in cursors.parts(cursor)
        for place, num_elements in part.get(cursors.FROM, ())
        if num_elements
        for state in _mixtures(place)
        for name in state[_WEIGHTS]
    } - set(names)


def _mixtures(state: Any) -> Iterator[dict[str, Any]]:
    # The states of mixtures in the state of a pipeline.
    return (part for part in cursors.parts(state) if TAKEN in part and _PARTS in part)


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

    Those of an older cursor inside it are left out, and of the states from which rows
    read their documents all but the first.
    """
    if isinstance(state, dict):
        yield name, state
        if TAKEN in state and _PARTS in state:
            for part, of_part in state[_PARTS].items():
                yield from states_by_name(of_part, f"{name}/{part}".lstrip("/"))
            return
        state = [
            value[0] if key == cursors.FROM else value
            for key, value in state.items()
            if key != cursors.HELD
        ]
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
