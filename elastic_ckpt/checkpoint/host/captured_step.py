"""Who holds the boxes of a captured state, and the captured values as a source."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from elastic_ckpt.checkpoint.host.capture import ArrayPlace, Shards
from elastic_ckpt.core import boxes
from elastic_ckpt.core.boxes import Box
from elastic_ckpt.steps.manifest import Leaf
from elastic_ckpt.steps.owners import Holders
from elastic_ckpt.tiers.captured import Captured, CapturedLeaf, Values, fetched
from elastic_ckpt.tiers.source import OnPiece, ReadError, ignored

# A part: the path of its leaf, and its box.
Part = tuple[str, Box]


class CapturedSource:
    """What a host has captured, as a `source.Source`.

    Args:
      values: of the parts; not to be released while they are read.
      host_id: of this host.
    """

    def __init__(self, values: Mapping[Part, Values], host_id: str) -> None:
        self._values = values
        self.directory = f"memory of host {host_id}"

    def values(self, leaf: Leaf, box: Box) -> np.ndarray:
        """The values of a part, without a copy.

        Raises:
          ReadError: if there is no such part.
        """
        values = self._values.get((leaf.path, box))
        if values is None:
            raise ReadError("is not in this host's memory")
        return fetched(values)

    def read_into(
        self, leaf: Leaf, box: Box, into: memoryview, on_piece: OnPiece = ignored
    ) -> None:
        """See `source.Source`."""
        values = np.ascontiguousarray(self.values(leaf, box))
        into[:] = values.reshape(-1).view(np.uint8).data
        on_piece(into)

    def size(self, leaf: Leaf, box: Box) -> int:
        """See `source.Source`."""
        return self.values(leaf, box).nbytes


def holders(captured: Captured, *, num_hosts: int) -> dict[Part, Holders]:
    """The hosts that hold each part that this one has captured, ascending.

    A leaf that is not cut is on every host.

    Args:
      captured: not released.
      num_hosts: of the world.
    """
    return {
        (part.leaf.path, chunk): of_chunk
        for part in captured.parts
        for chunk, of_chunk in _holders(part, tuple(range(num_hosts)))
    }


def _holders(part: CapturedLeaf, everyone: Holders) -> Iterator[tuple[Box, Holders]]:
    place = part.place
    if isinstance(place, Shards):
        yield from ((box, place.holders(part.shard(box))) for box, _ in part.boxes)
        return
    if not isinstance(place, ArrayPlace) or place.sharding.is_fully_addressable:
        yield from ((box, everyone) for box, _ in part.boxes)
        return
    everywhere = boxes.holders(place.sharding, place.shape)
    # The numbers of a random key are its last dimension.
    rank = len(place.shape)
    for box, _ in part.boxes:
        shard = part.shard(box)
        whole = Box(start=shard.start[:rank], stop=shard.stop[:rank])
        yield box, tuple(sorted({each.process_index for each in everywhere[whole]}))
