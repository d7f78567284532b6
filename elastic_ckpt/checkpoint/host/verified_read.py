"""Verified reads: values are compared with their digest before anyone sees them.

A copy that is missing, cut short or altered is noted, and the next holder is asked. So
what is handed out is what was saved, or an error names it.

Glossary: a chunk is a saved box of a read plan; its pieces go into wanted boxes.
"""

from __future__ import annotations

import collections
import dataclasses
import threading
from collections.abc import Iterator, Sequence
from concurrent import futures

import numpy as np

from elastic_ckpt.core import background, boxes, digest, errors, host_memory
from elastic_ckpt.steps import read_plan
from elastic_ckpt.steps.manifest import Leaf
from elastic_ckpt.tiers import stored_part
from elastic_ckpt.tiers.find import FoundStep
from elastic_ckpt.tiers.source import ReadError

_REMEDY = (
    "restore it from a copy, bring back a host that has it, or restore an older step"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BadCopy:
    """A copy that could not be read, or does not match its manifest.

    Attributes:
      host: the id of its holder.
      tier: of the holder.
      name: of the leaf and box, or file of a component, as `StepTable.name` gives it.
      why: what is wrong, as the end of `<name> at <holder> ...`.
    """

    host: str
    tier: str
    name: str
    why: str

    def __str__(self) -> str:
        return f"{self.name} at {self.holder} {self.why}"

    @property
    def holder(self) -> str:
        """The holder, for people."""
        return f"host {self.host}" if self.tier == "local" else "the persistent tier"


class VerifiedReader:
    """Reads parts of one step from their holders; any number of threads may call it.

    Args:
      step: with the sources of its holders.
    """

    def __init__(self, step: FoundStep) -> None:
        self.table, self._sources = step.table, step.sources
        self._lock = threading.Lock()
        self._bad: list[BadCopy] = []
        self._read_bytes: collections.Counter[int] = collections.Counter()

    @property
    def bad(self) -> tuple[BadCopy, ...]:
        """The bad copies that were detected so far."""
        with self._lock:
            return tuple(self._bad)

    @property
    def read_bytes(self) -> dict[int, int]:
        """Bytes that were read from each holder, by number, and handed out."""
        with self._lock:
            return dict(self._read_bytes)

    def values(self, item: int, holders: Sequence[int] | None = None) -> np.ndarray:
        """As `read_into`, in new memory; an array of the leaf's dtype."""
        leaf, box = self.table.leaf(item), self.table.box(item)
        memory = host_memory.allocate(leaf.num_bytes(box))
        self.read_into(item, memory, holders)
        return memory.view(np.dtype(leaf.dtype)).reshape(box.shape)

    def read_into(
        self, item: int, into: np.ndarray, holders: Sequence[int] | None = None
    ) -> None:
        """Fills `into` with an item, from the first holder with good values.

        Args:
          item: its number in the table.
          into: contiguous memory for exactly the values, uint8.
          holders: in the order to ask them; by default all, in the table's order.

        Raises:
          CheckpointError: if no holder has it as it was saved.
        """
        table = self.table
        leaf, box, expected = table.leaf(item), table.box(item), table.digest(item)
        tried: dict[int, BadCopy] = {}
        for number in table.holders_of(item) if holders is None else holders:
            source, actual = self._sources[number], digest.values_hash()
            try:
                source.read_into(leaf, box, into.data, actual.update)
                if actual.digest() == expected:
                    with self._lock:
                        self._read_bytes[number] += into.nbytes
                        self._bad += tried.values()
                    return
                # While a step is read it may be removed, and its files be written anew
                # for another.
                source.size(leaf, box)
                why = stored_part.DIFFERS
            except ReadError as error:
                why = str(error)
            holder = table.holders[number]
            tried[number] = BadCopy(
                host=holder.host.id, tier=holder.tier, name=table.name(item), why=why
            )
        with self._lock:
            self._bad += tried.values()
        failures = "; ".join(f"at {bad.holder} it {bad.why}" for bad in tried.values())
        raise errors.CheckpointError(
            f"step {table.step_id.step}: no good copy of {table.name(item)} is left"
            f" ({failures}); {_REMEDY}"
        )


def read_windows(
    plan: read_plan.ReadPlan,
    reader: VerifiedReader,
    windows: Sequence[range],
    *,
    num_threads: int = 8,
) -> Iterator[list[np.ndarray]]:
    """Reads the wanted boxes of a plan, a window of them at a time.

    A chunk is read whole, since its digest is that of the whole, and once for all
    boxes of a window that share it: straight into the wanted box where it lies there in
    one piece. Besides the boxes themselves a chunk is in memory for each thread.

    Args:
      plan: for one reader.
      reader: reads the pieces of the plan.
      windows: the numbers of the wanted boxes, in order.
      num_threads: that read at a time.

    Yields:
      For each box of a window an array of the leaf's dtype, in new host memory, while
      the next window is being read.

    Raises:
      CheckpointError: if no holder has a part as it was saved.
    """
    scratch = threading.local()
    with background.pool(num_threads, "read") as pool:
        try:
            ahead = None
            for window in windows:
                begun = _begun(plan, reader, window, pool, scratch)
                if ahead is not None:
                    yield _ended(*ahead)
                ahead = begun
                del begun
            if ahead is not None:
                yield _ended(*ahead)
        except BaseException:
            # What is not begun is not read.
            pool.shutdown(wait=False, cancel_futures=True)
            raise


_Begun = tuple[list[np.ndarray], list[futures.Future[None]]]


def _begun(
    plan: read_plan.ReadPlan,
    reader: VerifiedReader,
    window: range,
    pool: futures.Executor,
    scratch: threading.local,
) -> _Begun:
    # Begins to read a window; returns its boxes, and what fills them.
    table, leaves = plan.table, plan.table.contents.leaves
    numbers = plan.wanted.leaf[window.start : window.stop].tolist()
    made = [
        _empty(plan.wanted.boxes[wanted], leaves[number])
        for wanted, number in zip(window, numbers, strict=True)
    ]
    first, end = np.searchsorted(plan.of_wanted, [window.start, window.stop]).tolist()
    pieces: dict[int, list[int]] = collections.defaultdict(list)
    for number, item in enumerate(plan.item[first:end].tolist(), first):
        pieces[item].append(number)

    def read_item(item: int) -> None:
        leaf, whole = table.leaf(item), table.box(item)
        reads = [plan.read(number) for number in pieces[item]]
        targets = [
            made[plan.of_wanted[number] - window.start][(*read.into, ...)]
            for number, read in zip(pieces[item], reads, strict=True)
        ]
        holders = plan.choices.of(pieces[item][0])
        if reads[0].piece == whole and targets[0].flags.c_contiguous:
            values = targets[0]
            reader.read_into(item, values.reshape(-1).view(np.uint8), holders)
        else:
            memory = _scratch(scratch, leaf.num_bytes(whole))
            reader.read_into(item, memory, holders)
            values = memory.view(np.dtype(leaf.dtype)).reshape(whole.shape)
            targets[0][...] = values[reads[0].out_of]
        for read, target in zip(reads[1:], targets[1:], strict=True):
            target[...] = values[read.out_of]

    return made, [pool.submit(read_item, item) for item in pieces]


def _ended(
    made: list[np.ndarray], begun: list[futures.Future[None]]
) -> list[np.ndarray]:
    # The first error ends all.
    for each in futures.as_completed(begun):
        each.result()
    return made


def _empty(box: boxes.Box, leaf: Leaf) -> np.ndarray:
    shape, dtype = box.shape[: len(leaf.shape)], np.dtype(leaf.dtype)
    memory = host_memory.allocate(int(np.prod(shape, dtype=np.int64)) * dtype.itemsize)
    return memory.view(dtype).reshape(shape)


def _scratch(of_thread: threading.local, num_bytes: int) -> np.ndarray:
    memory = getattr(of_thread, "memory", None)
    if memory is None or memory.nbytes < num_bytes:
        memory = of_thread.memory = host_memory.allocate(num_bytes)
    return memory[:num_bytes]
