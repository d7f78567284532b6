"""Describes the steps of a shard's pipeline by inspecting its datasets.

A pipeline is a chain of Grain datasets, each of which refers to its parents. Our
datasets are `Step`s with a method that returns their settings; the settings of Grain's
datasets are read from attributes listed here. Everything else, such as a mapped
function, is the user's own code: only the name that the user gives to the pipeline
identifies it.
"""

from __future__ import annotations

import abc
import dataclasses
import enum
import functools
import itertools
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import grain
import numpy as np

from elastic_ckpt.core import errors, storage

T = TypeVar("T")

MakeShard = Callable[[int], grain.IterDataset]

# The field of a step that names it.
STEP = "name"

# How deep the attributes of two shards' datasets are compared.
_MAX_DEPTH = 12

# The attributes that determine the elements of Grain's datasets.
_PACKER = (
    "_length_struct",
    "_num_packing_bins",
    "_seed",
    "_shuffle_bins",
    "_shuffle_bins_group_by_feature",
    "_meta_features",
    "_pack_alignment_struct",
    "_padding_struct",
    "_max_sequences_per_bin",
)
_GRAIN_SETTINGS = {
    "BatchIterDataset": ("_batch_size", "_drop_remainder", "_batch_fn"),
    "BestFitPackIterDataset": _PACKER,
    "ConcatThenSplitIterDataset": ("_config",),
    "FirstFitPackIterDataset": _PACKER,
    "LimitIterDataset": ("_count",),
    "MixedIterDataset": ("_proportions",),
    "RangeMapDataset": ("start", "stop", "step"),
    "RebatchIterDataset": ("_batch_size", "_drop_remainder"),
    "RepeatIterDataset": ("_num_epochs",),
    "RepeatMapDataset": ("_num_epochs", "_reseed_each_epoch"),
    "ShuffleMapDataset": ("_seed",),
    "SliceMapDataset": ("_start", "_stop", "_step"),
    "WindowShuffleIterDataset": ("_window_size", "_seed"),
    "WindowShuffleMapDataset": ("_window_size", "_seed"),
    "ZipIterDataset": ("_strict",),
    "ZipMapDataset": (),
}
# Grain's packers.
PACKERS = ("BestFitPackIterDataset", "FirstFitPackIterDataset")
# The datasets that pass on the elements of their parent.
_GRAIN_PASSING = {
    "PrefetchIterDataset",
    "ThreadPrefetchIterDataset",
    "WithOptionsIterDataset",
    "_WithSeedIterDataset",
    "_WithSeedMapDataset",
}


# Those that hold no elements between two that they yield.
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
      shard: the shard that it was made for; None if it is the same for all.
      num_shards: S, if it was made for one of S shards.
      describes_parents: whether its settings include the steps before it.
    """

    shard: int | None = None
    num_shards: int | None = None
    describes_parents = False

    @abc.abstractmethod
    def settings(self) -> dict[str, storage.Json]:
        """The settings by the names of the arguments, the same for all shards."""


class Elements(grain.DatasetIterator[T]):
    """An iterator that returns many elements at a time."""

    @abc.abstractmethod
    def take(self, num_elements: int) -> list[T]:
        """The next elements, however they are taken.

        Fewer are returned at the end, and before an error, which the next call raises.
        """

    def __next__(self) -> T:
        for element in self.take(1):
            return element
        raise StopIteration


def take(iterator: grain.DatasetIterator[T], num_elements: int) -> list[T]:
    """The next elements of any iterator; fewer at the end alone."""
    if isinstance(iterator, Elements):
        return iterator.take(num_elements)
    return list(itertools.islice(iterator, num_elements))


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckedShards:
    """A `make_shard` that checks that each pipeline reads the requested shard.

    Attributes:
      make_shard: makes the pipeline of a shard.
      num_shards: S.
    """

    make_shard: MakeShard
    num_shards: int

    def __call__(self, shard: int) -> grain.IterDataset:
        """The pipeline of a shard.

        Raises:
          ConfigError: if it is not an `IterDataset`, or reads another shard.
        """
        made = made_for(self.make_shard, shard)
        for step in datasets(made):
            if not isinstance(step, Step):
                continue
            wrong = step.shard not in (None, shard)
            if wrong or step.num_shards not in (None, self.num_shards):
                raise errors.ConfigError(
                    f"make_shard({shard}) of {self.num_shards} shards contains {step};"
                    " pass the argument of make_shard as its shard=, and the same"
                    " num_shards= everywhere"
                )
        return made

    def steps(self) -> list[storage.Json]:
        """The steps of all shards, first to last.

        For a setting that depends on the shard, those of the first and of the last one.
        """
        first, last = (step_descriptions(self(s)) for s in (0, self.num_shards - 1))
        return _spread(first, last)


def made_for(make_shard: MakeShard, shard: int) -> grain.IterDataset:
    """The result of `make_shard`, checked.

    Raises:
      ConfigError: if it is not an `IterDataset`.
    """
    made = make_shard(shard)
    if not isinstance(made, grain.IterDataset):
        hint = ""
        if isinstance(made, grain.MapDataset):
            hint = "; end it with .to_iter_dataset()"
        raise errors.ConfigError(
            f"make_shard({shard}) returned a {type(made).__name__}, not a"
            f" grain.IterDataset{hint}"
        )
    return made


def numbers_of_shards(made: grain.IterDataset) -> set[int]:
    """The values of S in the steps of a pipeline."""
    given = (step.num_shards for step in datasets(made) if isinstance(step, Step))
    return {number for number in given if number is not None}


def own_code(made: grain.IterDataset) -> list[str]:
    """The datasets of a pipeline that have no settings to compare, as strings.

    They run the user's own code, or depend on it.
    """
    return [shown(dataset) for dataset in datasets(made) if not is_described(dataset)]


def shown(dataset: Any) -> str:
    """A dataset as a string: its class, unless it says more."""
    is_bare = type(dataset).__str__ is object.__str__ and (
        type(dataset).__repr__ is object.__repr__
    )
    return type(dataset).__name__ if is_bare else str(dataset)


def unsliced(first: Any, last: Any) -> list[str]:
    """The sources that two shards read alike, as strings.

    A shard has its part of a source if anything but a seed, from the source to the end
    of its pipeline, depends on the shard.
    """
    if type(first) is not type(last) or _depends_on_shard(first, last):
        return []
    inputs = parents(first), parents(last)
    if len(inputs[0]) != len(inputs[1]):
        return []
    if not inputs[0]:
        is_empty = isinstance(first, grain.MapDataset) and not len(first)
        return [] if is_empty else [str(first)]
    return [each for pair in zip(*inputs, strict=True) for each in unsliced(*pair)]


def _depends_on_shard(first: Any, last: Any) -> bool:
    if isinstance(first, Step):
        # Of ours, only the first step of a pipeline reads a part of its records.
        return not parents(first) and first.shard is not None
    return not _alike(_unseeded(first), _unseeded(last))


def _unseeded(dataset: Any) -> dict[str, Any]:
    return {
        name: value
        for name, value in vars(dataset).items()
        if name != "_parents" and "seed" not in name
    }


def _alike(one: Any, other: Any, depth: int = 0) -> bool:
    # Whether two objects are certainly equal.
    if one is other:
        return True
    if type(one) is not type(other) or depth > _MAX_DEPTH:
        return False
    alike = functools.partial(_alike, depth=depth + 1)
    if isinstance(one, types.FunctionType):
        cells = [
            [cell.cell_contents for cell in each.__closure__ or ()]
            for each in (one, other)
        ]
        given = [
            [each.__code__, each.__defaults__, each.__kwdefaults__]
            for each in (one, other)
        ]
        return alike(*cells) and alike(*given)
    if isinstance(one, functools.partial):
        return alike(
            (one.func, one.args, one.keywords), (other.func, other.args, other.keywords)
        )
    if isinstance(one, types.MethodType):
        return alike((one.__func__, one.__self__), (other.__func__, other.__self__))
    if isinstance(one, np.ndarray):
        return np.array_equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(
            alike(value, other[key]) for key, value in one.items()
        )
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(alike, one, other))
    if type(one).__eq__ is object.__eq__ and hasattr(one, "__dict__"):
        return alike(vars(one), vars(other))
    try:
        return bool(one == other)
    except Exception:  # a comparison of the user's
        return False


def step_descriptions(
    made: grain.IterDataset | grain.MapDataset,
) -> list[dict[str, storage.Json]]:
    """The steps of a pipeline, first to last, each with its name and settings."""
    inputs = parents(made)
    if isinstance(made, Step) and made.describes_parents:
        inputs = ()
    before = step_descriptions(inputs[0]) if len(inputs) == 1 else []
    if passes_on(made):
        return before
    step = description(made)
    if len(inputs) > 1:
        step["parents"] = [step_descriptions(parent) for parent in inputs]
    return [*before, step]


def is_described(made: Any) -> bool:
    """Whether its settings determine the elements of a dataset."""
    return _settings(made) is not None


def are_alike(one: Any, other: Any) -> bool:
    """Whether two datasets of the same type are certainly alike, but for parents."""
    return _alike(_unseeded(one), _unseeded(other))


def description(made: Any) -> dict[str, storage.Json]:
    """The name and settings of one step."""
    step: dict[str, storage.Json] = {
        STEP: type(made).__name__,
        **(_settings(made) or {}),
    }
    return step | made.settings() if isinstance(made, Step) else step


def chain(made: Any) -> list[Any]:
    """The datasets from the last that has not one parent, or describes them, to `made`.

    Those are what the pipeline begins with, and the steps after it, first to last.
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
    # A user's source may not have called the constructor of its base class.
    return getattr(dataset, "_parents", ())


def _settings(dataset: Any) -> dict[str, storage.Json] | None:
    """The settings of a Grain dataset; None if it runs the user's own code."""
    if isinstance(dataset, Step):
        return {}
    name = type(dataset).__name__
    if passes_on(dataset):
        return {}
    if not _is_grains(dataset) or name not in _GRAIN_SETTINGS:
        return None
    try:
        return {
            attribute.lstrip("_"): _to_json(getattr(dataset, attribute))
            for attribute in _GRAIN_SETTINGS[name]
        }
    except (AttributeError, TypeError):
        # Another version of Grain, or a user's object.
        return None


def passes_on(dataset: Any) -> bool:
    """Whether the elements of a dataset are those of its parent."""
    if _is_grains(dataset):
        return type(dataset).__name__ in _GRAIN_PASSING
    return getattr(dataset, "passes_on", False)


def holds_nothing(dataset: Any) -> bool:
    """Whether the state of a dataset between two elements is that of its parent."""
    if _is_grains(dataset):
        return type(dataset).__name__ in _GRAIN_HOLDING_NOTHING
    return getattr(dataset, "holds_nothing", False)


def _is_grains(dataset: Any) -> bool:
    return type(dataset).__module__.split(".")[0] == "grain"


def _to_json(value: Any) -> storage.Json:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, Mapping):
        return {str(key): _to_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_to_json(item) for item in value]
    if dataclasses.is_dataclass(value):
        return _to_json(vars(value))
    if callable(value) and getattr(value, "__module__", "").startswith("grain."):
        return value.__name__
    raise TypeError(value)


def _spread(first: Any, last: Any) -> Any:
    if first == last:
        return first
    if (
        isinstance(first, dict)
        and isinstance(last, dict)
        and first.keys() == last.keys()
    ):
        return {key: _spread(first[key], last[key]) for key in first}
    if isinstance(first, list) and isinstance(last, list) and len(first) == len(last):
        return [_spread(*pair) for pair in zip(first, last, strict=True)]
    return {"first": first, "last": last}
