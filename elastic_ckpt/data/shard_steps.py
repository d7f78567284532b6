"""Describes the steps of a shard's pipeline by inspecting its datasets.

A pipeline is a chain of Grain datasets, each of which refers to its parents. Our
datasets are `Step`s, which return their settings. Grain's and the user's own datasets
are described by class name only; the user's name for the pipeline identifies them.
"""

from __future__ import annotations

import abc
import dataclasses
import itertools
from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeVar

import cloudpickle
import grain
import numpy as np

from elastic_ckpt.core import errors, storage

T = TypeVar("T")

MakeShard = Callable[[int], grain.IterDataset]

# The field with a step's name.
STEP = "name"

# Grain's datasets that pass on their parent's elements unchanged.
_GRAIN_PASSING = {
    "PrefetchIterDataset",
    "ThreadPrefetchIterDataset",
    "WithOptionsIterDataset",
    "_WithSeedIterDataset",
    "_WithSeedMapDataset",
}
# Grain's datasets that buffer no elements.
_GRAIN_HOLDING_NOTHING = {
    "BatchIterDataset",
    "FilterIterDataset",
    "MapIterDataset",
    "WithOptionsIterDataset",
    "_WithSeedIterDataset",
}


class Step(grain.IterDataset[T]):
    """A dataset that reports the settings that determine its elements.

    Attributes:
      shard: the shard that the step belongs to; None if it is the same for all shards.
      num_shards: S, if the step belongs to one of S shards; `ec.data.sharded` sets it
        where the step does not.
      describes_parents: whether the settings include the steps before this one.
    """

    shard: int | None = None
    num_shards: int | None = None
    describes_parents = False

    @abc.abstractmethod
    def settings(self) -> dict[str, storage.Json]:
        """The settings by argument name, the same for all shards."""


class Elements(grain.DatasetIterator[T]):
    """An iterator that can return many elements at a time."""

    def some(self, at_most: int) -> list[T]:
        """Returns at least one of the next elements, or an empty list at the end.

        Arrays may be views of larger arrays: copy those that you keep.
        """
        raise NotImplementedError

    def __next__(self) -> Any:
        for element in self.some(1):
            if isinstance(element, np.ndarray):
                # Tokens may be narrow views; a user's step gets int32 copies.
                is_narrow = element.dtype == np.uint16
                return element.astype(np.int32 if is_narrow else element.dtype)
            return element
        raise StopIteration


def take(iterator: grain.DatasetIterator[T], num_elements: int) -> list[T]:
    """The next `num_elements` elements of any iterator; fewer only at the end.

    After an error, the iterator may be past some of these elements, so restore its
    earlier state before you call this again.
    """
    if not isinstance(iterator, Elements):
        return list(itertools.islice(iterator, num_elements))
    found: list[T] = []
    while len(found) < num_elements:
        more = iterator.some(num_elements - len(found))
        if not more:
            break
        found += more
    return found


@dataclasses.dataclass(frozen=True)
class CheckedShards:
    """A `make_shard` that checks that each pipeline reads the requested shard.

    Attributes:
      make_shard: the user's function.
      num_shards: S, for steps that lack it.
    """

    make_shard: MakeShard
    num_shards: int | None = None

    def __call__(self, shard: int) -> grain.IterDataset:
        """The pipeline of a shard.

        Raises:
          ConfigError: if the pipeline is not an `IterDataset` or reads a different
            shard.
        """
        made = self.make_shard(shard)
        if not isinstance(made, grain.IterDataset):
            raise errors.ConfigError(
                f"make_shard({shard}) returned {type(made).__name__}, not a"
                " grain.IterDataset; convert a MapDataset with .to_iter_dataset()"
            )
        for step in (each for each in datasets(made) if isinstance(each, Step)):
            if step.shard not in (None, shard):
                raise errors.ConfigError(
                    f"make_shard({shard}) contains {step}, which reads a different"
                    " shard; pass make_shard's argument to it as shard="
                )
            step.num_shards = step.num_shards or self.num_shards
        return made


def shown(dataset: Any) -> str:
    """A dataset as a string: its class name, unless it defines its own string."""
    is_bare = type(dataset).__str__ is object.__str__ and (
        type(dataset).__repr__ is object.__repr__
    )
    return type(dataset).__name__ if is_bare else str(dataset)


def unsliced(first: Any, last: Any) -> list[str]:
    """The sources from which two shards read the same records, as strings.

    The shards read different records if anything but a seed, from the source to the end
    of the pipeline, depends on the shard.
    """
    inputs = parents(first), parents(last)
    # Only the first of our steps in a pipeline selects records.
    is_later = isinstance(first, Step) and isinstance(last, Step) and all(inputs)
    if not is_later and not are_alike(first, last, seeds=False):
        return []
    if not any(inputs):
        is_empty = isinstance(first, grain.MapDataset) and not len(first)
        return [] if is_empty else [shown(first)]
    if len(inputs[0]) != len(inputs[1]):
        return []
    return [each for pair in zip(*inputs, strict=True) for each in unsliced(*pair)]


def are_alike(one: Any, other: Any, *, seeds: bool = True) -> bool:
    """Whether datasets are certainly equal, ignoring parents and, optionally, seeds."""
    if type(one) is not type(other):
        return False
    settings, others = (
        {
            name: value
            for name, value in vars(dataset).items()
            if name != "_parents" and (seeds or "seed" not in name)
        }
        for dataset in (one, other)
    )
    if settings.keys() != others.keys():
        return False
    try:
        return all(
            value is others[name]
            or cloudpickle.dumps(value) == cloudpickle.dumps(others[name])
            for name, value in settings.items()
        )
    except Exception:  # a user's object that cannot be pickled
        return False


def step_descriptions(made: Any) -> list[dict[str, storage.Json]]:
    """The steps of a pipeline, first to last, each with its name and settings."""
    return [description(step) for step in chain(made) if not passes_on(step)]


def description(made: Any) -> dict[str, storage.Json]:
    """A step's name and settings, and its parents' steps if it has multiple parents."""
    step: dict[str, storage.Json] = {STEP: type(made).__name__}
    if isinstance(made, Step):
        return step | made.settings()
    inputs = parents(made)
    if len(inputs) > 1:
        step["parents"] = [step_descriptions(parent) for parent in inputs]
    return step


def chain(made: Any) -> list[Any]:
    """The start of a pipeline and the steps after it, first to last.

    The start is the last dataset that does not have exactly one parent or that
    describes its parents.
    """
    steps = [made]
    while len(parents(steps[0])) == 1 and not getattr(
        steps[0], "describes_parents", False
    ):
        steps.insert(0, parents(steps[0])[0])
    return steps


def datasets(made: Any) -> list[Any]:
    """The datasets of a pipeline, first to last, each once."""
    before = {id(each): each for parent in parents(made) for each in datasets(parent)}
    return [*before.values(), made]


def parents(dataset: Any) -> Sequence[Any]:
    """The datasets that a dataset reads from."""
    # A user's source may not have called its base class's constructor.
    return getattr(dataset, "_parents", ())


def passes_on(dataset: Any) -> bool:
    """Whether a dataset passes on its parent's elements unchanged."""
    return _is_grains(dataset, _GRAIN_PASSING) or getattr(dataset, "passes_on", False)


def holds_nothing(dataset: Any) -> bool:
    """Whether a dataset buffers no elements: its state is its parent's."""
    named = _is_grains(dataset, _GRAIN_HOLDING_NOTHING)
    return named or getattr(dataset, "holds_nothing", False)


def _is_grains(dataset: Any, names: Collection[str]) -> bool:
    kind = type(dataset)
    return kind.__module__.partition(".")[0] == "grain" and kind.__name__ in names
