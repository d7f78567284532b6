"""Finds and names the filter of a shard's pipeline that rejects everything.

An endless pipeline would then read without end. `Filters` counts what each filter has
rejected since it last passed an element, and raises an error when that is more than two
epochs. Where a pipeline has another reason to make no row, it names the filter that has
rejected the most.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import grain

from elastic_ckpt.core import errors
from elastic_ckpt.data import records

# Elements that may be rejected one after the other: at least so many, however few an
# epoch has, and so many if it is not known how many it has.
_MIN_PATIENCE = 10_000
_PATIENCE = 1_000_000

# Where Grain's datasets hold the function of a filter.
_FUNCTION = "_filter_fn"


class Filters:
    """The filters of pipelines, and what they reject from now on."""

    def __init__(self) -> None:
        self._counted: list[_Counted] = []

    def watch(self, dataset: grain.IterDataset, *, endless: bool) -> None:
        """Counts what the filters of a pipeline reject.

        Args:
          dataset: the pipeline; iterate over it only after this.
          endless: whether it is an error if a filter rejects all of two epochs.
        """
        for node in _nodes(dataset):
            function = getattr(node, _FUNCTION, None)
            if function is None:
                continue
            if isinstance(function, _Counted):
                # Of a dataset that several pipelines have in common.
                function = function.function
            name = re.sub(r"^\w+\(transform=(.*)\)$", r"\1", str(node))
            counted = _Counted(function, name, node if endless else None)
            setattr(node, _FUNCTION, counted)
            self._counted.append(counted)

    def describe(self) -> str:
        """Which filter has rejected the most since it last let an element pass."""
        worst = max(self._counted, key=lambda of: of.num_rejected, default=None)
        if worst is None or not worst.num_rejected:
            return "is there a step that leaves out everything?"
        return worst.describe()


class _Counted:
    """The function of a filter, and the elements that it rejected one after another."""

    def __init__(
        self, function: Callable[[Any], bool], name: str, endless: Any | None
    ) -> None:
        self.function = function
        self.num_rejected = 0
        self._name = name
        self._endless = endless
        self._patience = _MIN_PATIENCE

    def __call__(self, element: Any) -> bool:
        if self.function(element):
            self.num_rejected = 0
            return True
        self.num_rejected += 1
        if self.num_rejected > self._patience and self._endless is not None:
            self._patience = max(_MIN_PATIENCE, 2 * _epoch(self._endless))
            if self.num_rejected > self._patience:
                raise errors.DataError(
                    f"{self.describe()}, more than two epochs; let it pass some, or"
                    " say that the data is finite"
                )
        return False

    def describe(self) -> str:
        """How much it rejected, in words."""
        return (
            f"the filter {self._name} rejected the last {self.num_rejected:,} elements"
            " that it was given"
        )


def _nodes(dataset: Any) -> Iterator[Any]:
    # A dataset and all that it is made of.
    seen, waiting = set(), [dataset]
    while waiting:
        node = waiting.pop()
        if id(node) not in seen:
            seen.add(id(node))
            waiting += getattr(node, "parents", ())
            yield node


def _epoch(dataset: Any) -> int:
    # Elements of one pass over the sources of a filter.
    total = 0
    for node in _nodes(dataset):
        if getattr(node, "parents", ()):
            continue
        if isinstance(node, records.Records):
            total += node.epoch_records()
        elif isinstance(node, grain.MapDataset):
            total += len(node)
        else:
            total += _PATIENCE // 2
    return total
