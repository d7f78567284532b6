"""Reads boxes of targets into memory, one after the other, within a budget."""

from __future__ import annotations

import contextlib
from collections.abc import Generator

import numpy as np

from elastic_ckpt.core.boxes import Box
from elastic_ckpt.universal.reading.planned_reads import PlannedReads
from elastic_ckpt.universal.reading.reused_memory import ReusedMemory
from elastic_ckpt.universal.reading.transfer import Transfer


def read(
    planned: PlannedReads, *, budget_bytes: int, memory: ReusedMemory
) -> Generator[tuple[str, Box, np.ndarray], None, None]:
    """Yields the boxes of a plan once they are complete, in any order.

    A caller that does not reach the end closes the generator.

    Args:
      planned: the plan, whose checksums were compared.
      budget_bytes: the most bytes of requests in flight, and the most bytes of boxes
        that are complete in part, or were yielded last; boxes that share a request, or
        a larger one, are read all the same.
      memory: of the values; the caller gives it back.

    Yields:
      The name of the target, the box, and its values.

    Raises:
      CheckpointError: if a file cannot be read or ends too early, or values that should
        be equal differ.
    """
    transfer = Transfer(
        planned.plan,
        planned.sources().__getitem__,
        budget_bytes=budget_bytes,
        # The bytes of a box count until it was written.
        is_staged=lambda _: True,
        allocate=memory.take,
    )
    with contextlib.closing(transfer.buffers()) as buffers:
        for number, values in buffers:
            buffer = planned.plan.buffers[number]
            yield buffer.tensor.name, buffer.box, values
            del values
            transfer.free(number)
