"""Detects and reports a filter of a shard's pipeline that rejects all elements.

With such a filter an endless pipeline would read forever. `Filters` counts the elements
that each filter has rejected since it last accepted one, and raises an error after two
epochs. If a pipeline makes no row for another reason, it reports the filter that has
rejected the most.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import grain

from elastic_ckpt.core import errors
from elastic_ckpt.data import records, shard_steps

# How many consecutive elements may be rejected: at least this many even if an epoch has
# fewer, and the second number if the length of an epoch is unknown.
_MIN_PATIENCE = 10_000
_PATIENCE = 1_000_000

# The attribute of Grain's datasets with the function of a filter.
_FUNCTION = "_filter_fn"


class Filters:
    """The filters of pipelines, and the number of elements that each rejects."""

    def __init__(self) -> None:
        self._counted: list[_Counted] = []

    def watch(self, dataset: grain.IterDataset, *, endless: bool) -> None:
        """Counts the elements that the filters of a pipeline reject.

        Args:
          dataset: the pipeline; it must not have been iterated over before.
          endless: whether it is an error if a filter rejects all of two epochs.
        """
        for node in reversed(shard_steps.datasets(dataset)):
            function = getattr(node, _FUNCTION, None)
            if function is None:
                continue
            if isinstance(function, _Counted):
                # Several pipelines share this dataset.
                function = function.function
            name = re.sub(r"^\w+\(transform=(.*)\)$", r"\1", str(node))
            counted = _Counted(function, name, node if endless else None)
            setattr(node, _FUNCTION, counted)
            self._counted.append(counted)

    def describe(self) -> str:
        """A hint with the filter that rejected the most consecutive elements."""
        worst = max(self._counted, key=lambda each: each.num_rejected, default=None)
        if worst is None or not worst.num_rejected:
            return "check whether a step leaves out all of them"
        return worst.describe()


class _Counted:
    """The function of a filter, which counts consecutive rejected elements."""

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
                    f"{self.describe()}, more than two epochs; change it to accept"
                    ' some, or declare the data finite: end="padded"'
                )
        return False

    def describe(self) -> str:
        """A sentence with the number of rejected elements."""
        return (
            f"the filter {self._name} rejected the last {self.num_rejected:,} elements"
        )


def _epoch(dataset: Any) -> int:
    # The number of elements in one pass over the sources of a filter.
    total = 0
    for node in shard_steps.datasets(dataset):
        if shard_steps.parents(node):
            continue
        if isinstance(node, records.Records):
            total += node.epoch_records()
        elif isinstance(node, grain.MapDataset):
            total += len(node)
        else:
            total += _PATIENCE // 2
    return total
