"""The plan of what a host reads of a checkpoint: proven before a byte is read."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence

from elastic_ckpt.core.boxes import Box
from elastic_ckpt.universal.formats.checkpoint import StoredTensor
from elastic_ckpt.universal.moves import Fill, Move, TargetTensor
from elastic_ckpt.universal.plan.pieces import Buffer, FilledPart, Region, cut
from elastic_ckpt.universal.plan.spans import Limits, Spans, spans

# A request to a local file costs as much as a few pages; one to a bucket takes tens of
# milliseconds.
LOCAL = Limits(gap_bytes=2**14, span_bytes=2**23)
REMOTE = Limits(gap_bytes=2**20, span_bytes=2**24)


def limits_of(file: str) -> Limits:
    """The limits of the requests to a file, by its path or URL."""
    return REMOTE if "://" in file else LOCAL


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LoadPlan:
    """The reads of one host.

    Attributes:
      tensors: the stored tensors, by number.
      buffers: to be filled, by number; first those of the target's boxes, in the order
        in which they were requested, then the layers of regions.
      regions: of sources that are reduced.
      fills: parts of buffers that no source has.
      files: by number.
      spans: the reads, in their order.
    """

    tensors: Sequence[StoredTensor]
    buffers: Sequence[Buffer]
    regions: Sequence[Region]
    fills: Sequence[FilledPart]
    files: Sequence[str]
    spans: Spans

    @property
    def num_targets(self) -> int:
        """The number of buffers of the target's boxes."""
        return len(self.buffers) - sum(len(each.layers) for each in self.regions)


def plan(
    tensors: Sequence[StoredTensor],
    moves: Iterable[Move],
    fills: Iterable[Fill],
    needed: Mapping[TargetTensor, Sequence[Box]],
    *,
    limits: Callable[[str], Limits] = limits_of,
) -> LoadPlan:
    """Plans the reads of one host, and checks that they fill what it needs.

    Args:
      tensors: of the checkpoint.
      moves: of a layout that was matched with it.
      fills: of the same.
      needed: the distinct boxes that this host needs, by target.
      limits: of the requests to a file.

    Raises:
      CheckpointError: if an element of these boxes is filled by no source, or by two.
    """
    pieces = cut(tensors, moves, fills, needed)
    return LoadPlan(
        tensors=tensors,
        buffers=pieces.buffers,
        regions=pieces.regions,
        fills=pieces.fills,
        files=pieces.files,
        spans=spans(pieces, limits),
    )
