"""Verified reads: values are compared with their digest before callers get them.

If a copy is missing, truncated or altered, the reader records that and tries the next
holder. So callers get either the saved values or an error that names the part.

A restore of saved trees reads the boxes of their new shards (`read_leaves`). A tree
with a different layout reads saved boxes in its own order, a few at a time
(`OtherTree`).
"""

from __future__ import annotations

import collections
import dataclasses
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent import futures
from typing import Any, NamedTuple

import jax
import numpy as np
from absl import logging

from elastic_ckpt.checkpoint.host import trees
from elastic_ckpt.core import background, digest, errors, host_memory
from elastic_ckpt.steps import layout, read_plan
from elastic_ckpt.steps.read_plan import Nearness
from elastic_ckpt.tiers import stored_part
from elastic_ckpt.tiers.find import FoundStep
from elastic_ckpt.tiers.source import (
    LendingSource,
    ReadError,
    RepairableSource,
    RepairError,
)

# A restore holds at most 512 MiB beside the state. Half of it are boxes on their way to
# devices, in memory that is used again and again: JAX may refer to memory for a while
# after a device has received it.
_RING_BYTES = 2**28
# What a box takes at least, so at most 64 boxes, which may be mapped files, are there.
_LEAST_BYTES = 2**22
# The other half are the saved boxes that threads are reading.
_READ_BYTES = 2**28
_THREADS = 8
_REMEDY = (
    "restore its files from elsewhere, bring back a host that has a good copy, or"
    " restore an older step"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BadCopy:
    """A copy that could not be read or does not match its manifest.

    Attributes:
      host: the ID of the copy's holder.
      name: the leaf and box, or the component file, as in `StepTable.name`.
      why: a description of the problem that completes `<name> at <holder> ...`.
    """

    host: str
    tier: str
    name: str
    why: str

    def __str__(self) -> str:
        return f"{self.name} at {self.holder} {self.why}"

    @property
    def holder(self) -> str:
        """The holder, as named in messages."""
        return f"host {self.host}" if self.tier == "local" else "the persistent tier"


class VerifiedReader:
    """Reads parts of one step from their holders; any number of threads may call it.

    Args:
      near: the order in which to try holders; None means table order.
      maps: whether files in this machine's memory may be mapped instead of copied; the
        step must then not be removed while values are used.

    Attributes:
      table: the table of the step, whose items are the saved boxes.
      bad: the copies found to be bad.
      read_bytes: the number of bytes read and returned, by holder index.
    """

    def __init__(
        self, step: FoundStep, near: Nearness | None = None, *, maps: bool = False
    ) -> None:
        self.table, self._sources, self.near = step.table, step.sources, near
        self._maps = maps
        self._lock = threading.Lock()
        self.bad: list[BadCopy] = []
        self.read_bytes: collections.Counter[int] = collections.Counter()

    def holders_of(self, item: int) -> list[int]:
        """The indices of an item's holders, in the order to try them."""
        return (self.near or self.table).holders_of(item)

    def of_leaf(self, leaf: int) -> list[int]:
        """The items of a leaf; if they overlap, the nearest come first."""
        items: list[int] = self.table.of_leaf(leaf).tolist()
        if self.near is not None and leaf in self.table.overlapping:
            items.sort(key=self.near.nearest.__getitem__)
        return items

    def place(self, item: int) -> str:
        """A unique name for an item: its nearest holder, leaf and bounds.

        The name contains "://" if the holder is reached over a network.
        """
        source = self._sources[self.holders_of(item)[0]]
        return f"{source.directory}/{self.table.name(item)}"

    def values(self, item: int) -> np.ndarray:
        """Like `read`, but into new memory; returns an array of the leaf's dtype."""
        return self.as_array(item, self.read(item, host_memory.allocate))

    def as_array(self, item: int, values: np.ndarray) -> np.ndarray:
        """An item's values, uint8, as an array of its leaf's dtype."""
        dtype, shape = self.table.leaf(item).dtype, self.table.box(item).shape
        return values.view(np.dtype(dtype)).reshape(shape)

    def read_into(self, item: int, into: np.ndarray) -> None:
        """Like `read`, but into contiguous uint8 memory of exactly the values' size."""
        self.read(item, lambda _: into)

    def read(
        self, item: int, memory: Callable[[int], np.ndarray], *, borrows: bool = False
    ) -> np.ndarray:
        """Reads an item from the first holder with good values.

        Args:
          item: the item's index in the table.
          memory: a function that takes a size in bytes and returns contiguous uint8
            memory.
          borrows: whether to use the memory of the source, if it has any, instead of
            `memory`; the values are then read-only.

        Returns:
          The values, uint8.

        Raises:
          CheckpointError: if no holder has good values.
        """
        table = self.table
        leaf, box, expected = table.leaf(item), table.box(item), table.digest(item)
        tried: list[BadCopy] = []
        for number in self.holders_of(item):
            source, actual = self._sources[number], digest.values_hash()
            try:
                is_safe = self._maps or table.holders[number].tier == "persistent"
                if borrows and is_safe and isinstance(source, LendingSource):
                    values = source.lent(leaf, box)
                    actual.update(values.data)
                else:
                    values = memory(leaf.num_bytes(box))
                    source.read_into(leaf, box, values.data, actual.update)
                if actual.digest() == expected:
                    with self._lock:
                        self.read_bytes[number] += values.nbytes
                        self.bad += tried
                    return values
                # In the meantime, the step may have been removed and its mapped files
                # reused for a different step.
                source.read_into(leaf, box, memoryview(bytearray(1)))
                why = stored_part.DIFFERS
            except ReadError as error:
                why = str(error)
            holder = table.holders[number]
            tried.append(
                BadCopy(
                    host=holder.host.id,
                    tier=holder.tier,
                    name=table.name(item),
                    why=why,
                )
            )
        with self._lock:
            self.bad += tried
        failures = "; ".join(f"at {bad.holder} it {bad.why}" for bad in tried)
        raise errors.CheckpointError(
            f"step {table.step_id.step}: no good copy of {table.name(item)} is left"
            f" ({failures}); {_REMEDY}"
        )

    def repair(self, bad: Collection[tuple[str, str]]) -> list[str]:
        """Rewrites bad copies on this machine, and on other machines through agents.

        Replaces them with verified values from other holders.

        Args:
          bad: the holder's ID and the name of each bad copy, as in `BadCopy`.

        Returns:
          The names of the repaired items; the log says why other items were not
          repaired.
        """
        table, mended = self.table, []
        wanted = {name for _, name in bad}
        for item in range(len(table)) if bad else ():
            name, leaf, box = table.name(item), table.leaf(item), table.box(item)
            for number in table.holders_of(item) if name in wanted else ():
                holder, source = table.holders[number], self._sources[number]
                if holder.tier != "local" or (holder.host.id, name) not in bad:
                    continue
                try:
                    content = stored_part.content(leaf, self.values(item))
                    if isinstance(source, RepairableSource):
                        source.repair(leaf, box, content)
                    mended.append(name)
                except (errors.ElasticCkptError, RepairError, OSError) as error:
                    logging.warning("%s at host %s: %s", name, holder.host.id, error)
        return mended


# Reads this process's part of a tree that was saved in a different layout: from the
# open step in any tier or, if passed None (because hosts are other processes), from
# persistent storage.
OtherTree = Callable[[VerifiedReader | None], Any]


def read_leaves(
    reader: VerifiedReader, wanted: Sequence[trees.WantedLeaf]
) -> dict[str, list[Any]]:
    """Reads, verifies and places the boxes that a host needs.

    Boxes are read in windows, and windows are placed in order while later ones are
    read. A saved box is always read whole, because its digest covers all of it, and
    only once for all boxes of a window that share it. It is read directly into the
    wanted box if it is contiguous there.

    Args:
      reader: the reader of the step for this host.
      wanted: the leaves that this host needs.

    Returns:
      The placed boxes of each leaf, by path.

    Raises:
      CheckpointError: if the step is not complete or lacks a wanted leaf, or no good
        copy of a part is left.
    """
    assert reader.near is not None
    plan = planned(reader.near, wanted)
    largest = max([1, *plan.table.num_bytes[plan.item].tolist()])
    num_threads = max(1, min(_THREADS, _READ_BYTES // largest))
    with background.pool(num_threads, "read") as pool:
        reading = _Reading(plan, reader, pool, wanted)
        try:
            for window, num_bytes in reading.windows():
                reading.begin(window, num_bytes)
            while reading.ahead:
                reading.end()
        except BaseException:
            # Cancels reads that have not started.
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return reading.placed


def planned(near: Nearness, wanted: Sequence[trees.WantedLeaf]) -> read_plan.ReadPlan:
    """Plans a host's reads of the boxes of all leaves, in order.

    Raises:
      CheckpointError: if the step is not complete or lacks a wanted leaf.
    """
    listed = [(leaf.path, box) for leaf in wanted for box in leaf.boxes]
    contents = near.table.contents
    return read_plan.ReadPlan(
        near, read_plan.Wanted.from_boxes(listed, contents=contents)
    )


class _Window(NamedTuple):
    # Wanted boxes, by index, that are read together into the ring from `start` on, and
    # the reads that fill them.
    start: int
    made: dict[int, np.ndarray]
    reads: list[futures.Future[None]]


class _Reading:
    # Reads and places the wanted boxes of a plan, in windows.

    def __init__(
        self,
        plan: read_plan.ReadPlan,
        reader: VerifiedReader,
        pool: futures.Executor,
        wanted: Sequence[trees.WantedLeaf],
    ) -> None:
        self._plan, self._reader, self._pool = plan, reader, pool
        self._of_boxes = [(leaf, n) for leaf in wanted for n in range(len(leaf.boxes))]
        self.placed: dict[str, list[Any]] = {leaf.path: [] for leaf in wanted}
        # The pieces of wanted box n are those from bound n to bound n + 1.
        self._bounds = np.searchsorted(
            plan.of_wanted, np.arange(len(self._of_boxes) + 1)
        )
        self.ahead: collections.deque[_Window] = collections.deque()
        is_moved = any(leaf.is_moved for leaf in wanted)
        self._ring, self._stop = host_memory.allocate(is_moved * _RING_BYTES), 0

    def windows(self) -> Iterator[tuple[range, int]]:
        # Ranges of wanted boxes, and their sizes. Only boxes that share saved boxes are
        # worth a large window.
        first = num_bytes = 0
        shared: set[int] = set()
        for at, (leaf, number) in enumerate(self._of_boxes):
            saved = self._plan.table.contents.leaves[self._plan.wanted.leaf[at]]
            units = -(-saved.num_bytes(leaf.boxes[number]) // _LEAST_BYTES)
            pieces = slice(self._bounds[at], self._bounds[at + 1])
            items = {*self._plan.item[pieces].tolist()}
            most = layout.CHUNK_BYTES if shared.isdisjoint(items) else _RING_BYTES
            if at > first and num_bytes + units * _LEAST_BYTES > most:
                yield range(first, at), num_bytes
                first, num_bytes, shared = at, 0, set()
            num_bytes += units * _LEAST_BYTES
            shared |= items
        yield range(first, len(self._of_boxes)), num_bytes

    def begin(self, window: range, num_bytes: int) -> None:
        # A box that is larger than the ring is alone in its window, outside the ring.
        start, num_bytes = self._stop, min(num_bytes, _RING_BYTES)
        if start % _RING_BYTES + num_bytes > _RING_BYTES:
            start += -start % _RING_BYTES
        self._stop = start + num_bytes
        while self.ahead and self._stop > self.ahead[0].start + _RING_BYTES:
            self.end()
        made: dict[int, np.ndarray] = {}
        pieces: dict[int, list[int]] = collections.defaultdict(list)
        free = self._ring[start % _RING_BYTES :]
        for at in window:
            made[at] = self._empty(at, free)
            free = free[-(-made[at].nbytes // _LEAST_BYTES) * _LEAST_BYTES :]
            for number in range(self._bounds[at], self._bounds[at + 1]):
                pieces[int(self._plan.item[number])].append(number)
        reads = [
            self._pool.submit(self._read, item, numbers, made)
            for item, numbers in pieces.items()
        ]
        self.ahead.append(_Window(start, made, reads))

    def end(self) -> None:
        # Places the boxes of the first window, once they are read, and waits for the
        # devices. The first error stops the read.
        _, made, reads = self.ahead.popleft()
        for each in futures.as_completed(reads):
            each.result()
        arriving = []
        for at in list(made):
            leaf, number = self._of_boxes[at]
            part = leaf.place(number, made.pop(at))
            self.placed[leaf.path].append(part)
            if leaf.is_moved:
                arriving.append(part)
        jax.block_until_ready(arriving)

    def _empty(self, at: int, free: np.ndarray) -> np.ndarray:
        wanted = self._plan.wanted
        leaf = self._plan.table.contents.leaves[wanted.leaf[at]]
        box = wanted.boxes.box(at, rank=len(leaf.shape))
        num_bytes = leaf.num_bytes(box)
        if not self._of_boxes[at][0].is_moved or num_bytes > len(free):
            # The box becomes the leaf, or has no room.
            free = host_memory.allocate(num_bytes)
        return free[:num_bytes].view(np.dtype(leaf.dtype)).reshape(box.shape)

    def _read(
        self, item: int, numbers: Sequence[int], made: dict[int, np.ndarray]
    ) -> None:
        # Reads a saved box for all pieces that are cut from it.
        plan, reader, whole = self._plan, self._reader, self._plan.table.box(item)
        reads = [plan.read(number) for number in numbers]
        boxes = [int(plan.of_wanted[number]) for number in numbers]
        targets = [
            made[box][(*read.into, ...)] for box, read in zip(boxes, reads, strict=True)
        ]
        first, target = boxes[0], targets[0]
        is_whole = reads[0].piece == whole and target.flags.c_contiguous
        is_moved = self._of_boxes[first][0].is_moved and target.size == made[first].size
        borrows = is_moved or not is_whole

        def memory(num_bytes: int) -> np.ndarray:
            if is_whole:
                return target.reshape(-1).view(np.uint8)
            return host_memory.allocate(num_bytes)

        values = reader.as_array(item, reader.read(item, memory, borrows=borrows))
        # JAX would copy other memory, such as that of storage, once more.
        is_there = is_whole and (not borrows or values.ctypes.data % 64 == 0)
        if is_there and is_moved:
            made[first] = values
        # If the item was read directly into the first box, that box is already filled.
        rest = slice(1 if is_there else 0, None)
        for read, other in zip(reads[rest], targets[rest], strict=True):
            other[...] = values[read.out_of]
