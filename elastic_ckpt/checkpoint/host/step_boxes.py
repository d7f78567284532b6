"""The saved boxes of an open step, for readers that make other trees of them.

A restore of the trees that were saved reads the boxes of their new shards. A tree of
another layout needs other boxes, in another order, and not all of them at a time: it
reads saved boxes whole, each verified, and from the same holders.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from elastic_ckpt.checkpoint.host.verified_read import VerifiedReader
from elastic_ckpt.steps.read_plan import Nearness
from elastic_ckpt.tiers.find import FoundStep


class StepBoxes:
    """The saved boxes of a step; any number of threads may read them.

    Args:
      step_found: the step.
      reader: of the step.
      near: the nearness of its holders to this host.

    Attributes:
      table: of the step; a box is an item there.
    """

    def __init__(
        self, step_found: FoundStep, reader: VerifiedReader, near: Nearness
    ) -> None:
        self.table = step_found.table
        self._reader = reader
        self._sources = step_found.sources
        self._nearest = near.nearest
        self._choices = near.of_items()

    def of_leaf(self, leaf: int) -> list[int]:
        """The boxes of a leaf, by its number; the nearest first if they overlap."""
        numbers: list[int] = self.table.of_leaf(leaf).tolist()
        if leaf in self.table.overlapping:
            numbers.sort(key=self._nearest.__getitem__)
        return numbers

    def place(self, number: int) -> str:
        """A name of a box, which no other box has: its nearest holder, leaf and bounds.

        It has "://" in it if the holder is reached through a network.
        """
        source = self._sources[self._choices.of(number)[0]]
        return f"{source.directory}/{self.table.name(number)}"

    def read_into(self, number: int, into: np.ndarray) -> None:
        """Fills memory with the values of a box, from the nearest good copy.

        Args:
          number: of the box.
          into: contiguous memory for exactly the values, uint8.

        Raises:
          CheckpointError: if no holder has it as it was saved.
        """
        self._reader.read_into(number, into, self._choices.of(number))


# Reads a tree of another layout than a step has, as this process needs it: from the
# boxes of the open step in any tier, or None from persistent storage alone, for hosts
# that are elsewhere.
OtherTree = Callable[[StepBoxes | None], Any]
