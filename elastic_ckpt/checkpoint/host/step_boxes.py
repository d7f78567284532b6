"""The saved boxes of an open step, for readers that make other trees of them.

A restore of the trees that were saved reads the boxes of their new shards. A tree of
another layout needs other boxes, in another order, and not all of them at a time: it
reads saved boxes whole, each verified, and from the same holders.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from elastic_ckpt.checkpoint.host.verified_read import VerifiedReader
from elastic_ckpt.core import boxes
from elastic_ckpt.steps import layout, read_plan
from elastic_ckpt.steps.manifest import Host
from elastic_ckpt.tiers.find import FoundStep


class StepBoxes:
    """The saved boxes of a step; any number of threads may read them.

    Args:
      step_found: the step.
      reader: of the step.
      host: that reads.
      domain: the kind of failure domain inside of which a peer is close.

    Attributes:
      holdings: of the step; a box has its number there.
      overlapping: the leaves of which saved boxes share elements.
    """

    def __init__(
        self,
        step_found: FoundStep,
        reader: VerifiedReader,
        *,
        host: Host,
        domain: str,
    ) -> None:
        self.holdings = step_found.step.holdings
        self.overlapping = step_found.step.overlapping
        self._reader = reader
        self._sources = step_found.sources
        self._near = read_plan.nearness(self.holdings, host, domain=domain)
        self._first_choice, self._choice = read_plan.box_choices(
            step_found.step, host, domain=domain
        )

    def of_leaf(self, leaf: int) -> list[int]:
        """The boxes of a leaf, by its number; the nearest first if they overlap."""
        numbers: list[int] = self.holdings.of_leaf(leaf).tolist()
        if leaf in self.overlapping:
            numbers.sort(key=self._distance)
        return numbers

    def box(self, number: int) -> boxes.Box:
        """A box, in the coordinates of its leaf."""
        leaf = self.holdings.contents.leaves[self.holdings.leaf[number]]
        return self.holdings.boxes.box(number, rank=len(leaf.shape))

    def num_bytes(self, number: int) -> int:
        """The size of the values of a box."""
        leaf = self.holdings.contents.leaves[self.holdings.leaf[number]]
        return layout.num_bytes(self.box(number), leaf.dtype)

    def place(self, number: int) -> str:
        """A name of a box, which no other box has: its nearest holder, leaf and bounds.

        It has "://" in it if the holder is reached through a network.
        """
        holder = self.holdings.holder[self._choice[self._first_choice[number]]]
        source = self._sources[self.holdings.offers[holder]]
        return f"{source.directory}/{self.holdings.name(number)}"

    def read_into(self, number: int, into: np.ndarray) -> None:
        """Fills memory with the values of a box, from the nearest good copy.

        Args:
          number: of the box.
          into: contiguous memory for exactly the values, uint8.

        Raises:
          CheckpointError: if no holder has it as it was saved.
        """
        first, after = self._first_choice[number : number + 2].tolist()
        holdings = self.holdings
        choices = [
            (holdings.offers[holdings.holder[row]], holdings.fragment(row))
            for row in self._choice[first:after].tolist()
        ]
        self._reader.fragment(choices, into, name=holdings.name(number))

    def _distance(self, number: int) -> int:
        holder = self.holdings.holder[self._choice[self._first_choice[number]]]
        return read_plan.NEARNESS.index(self._near[self.holdings.offers[holder]])


class TreeReading(Protocol):
    """Reads a tree of another layout than a step has, as this process needs it."""

    def of_boxes(self, saved: StepBoxes) -> Any:
        """The tree, made of the boxes of the open step in any tier.

        Raises:
          CheckpointError: if no holder has a box as it was saved.
        """
        ...

    def of_storage(self) -> Any:
        """The tree, made of persistent storage alone, for hosts that are elsewhere.

        Raises:
          CheckpointError: if the step is not there, or cannot be read.
        """
        ...
