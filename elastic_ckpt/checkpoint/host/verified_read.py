"""Verified reads: values are compared with their digest before anyone sees them.

A copy that is missing, cut short or altered is noted, and the next holder is asked. So
what is handed out is what was saved, or an error names it.

A restore of the trees that were saved reads the boxes of their new shards
(`read_leaves`). A tree of another layout is made of saved boxes, in another order, and
not of all at a time (`OtherTree`).
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent import futures
from typing import Any

import jax
import numpy as np
from absl import logging

from elastic_ckpt.checkpoint.host import trees
from elastic_ckpt.core import background, digest, errors, host_memory
from elastic_ckpt.steps import read_plan
from elastic_ckpt.steps.read_plan import Nearness
from elastic_ckpt.tiers import stored_part
from elastic_ckpt.tiers.find import FoundStep
from elastic_ckpt.tiers.source import ReadError, RepairableSource, RepairError

_THREADS = 8
# Of boxes that are read at a time, and moved to devices at a time.
_WINDOW_BYTES = 2**28
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
      near: in which order they are asked; None for that of the table.

    Attributes:
      table: of the step; a saved box is an item there.
      near: as given.
      bad: the copies that were found to be bad.
      read_bytes: bytes that were read and handed out, by the number of the holder.
    """

    def __init__(self, step: FoundStep, near: Nearness | None = None) -> None:
        self.table, self._sources, self.near = step.table, step.sources, near
        self._lock = threading.Lock()
        self.bad: list[BadCopy] = []
        self.read_bytes: collections.Counter[int] = collections.Counter()

    def holders_of(self, item: int) -> list[int]:
        """The numbers of the holders of an item, in the order to ask them."""
        return (self.near or self.table).holders_of(item)

    def of_leaf(self, leaf: int) -> list[int]:
        """The items of a leaf, by its number; the nearest first if they overlap."""
        items: list[int] = self.table.of_leaf(leaf).tolist()
        if self.near is not None and leaf in self.table.overlapping:
            items.sort(key=self.near.nearest.__getitem__)
        return items

    def place(self, item: int) -> str:
        """A name of an item, which no other has: its nearest holder, leaf and bounds.

        It has "://" in it if the holder is reached through a network.
        """
        source = self._sources[self.holders_of(item)[0]]
        return f"{source.directory}/{self.table.name(item)}"

    def values(self, item: int) -> np.ndarray:
        """As `read_into`, in new memory; an array of the leaf's dtype."""
        leaf, box = self.table.leaf(item), self.table.box(item)
        memory = host_memory.allocate(leaf.num_bytes(box))
        self.read_into(item, memory)
        return memory.view(np.dtype(leaf.dtype)).reshape(box.shape)

    def read_into(self, item: int, into: np.ndarray) -> None:
        """Fills `into` with an item, from the first holder with good values.

        Args:
          item: its number in the table.
          into: contiguous memory for exactly the values, uint8.

        Raises:
          CheckpointError: if no holder has it as it was saved.
        """
        table = self.table
        leaf, box, expected = table.leaf(item), table.box(item), table.digest(item)
        tried: list[BadCopy] = []
        for number in self.holders_of(item):
            source, actual = self._sources[number], digest.values_hash()
            try:
                source.read_into(leaf, box, into.data, actual.update)
                if actual.digest() == expected:
                    with self._lock:
                        self.read_bytes[number] += into.nbytes
                        self.bad += tried
                    return
                # While a step is read it may be removed, and its files be written anew
                # for another.
                source.read_into(leaf, box, into.data[:1])
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
        """Rewrites bad copies on this machine, and elsewhere through agents.

        What is written was read from another holder, verified.

        Args:
          bad: the ids of holders, and what they hold, as `BadCopy` names it.

        Returns:
          The names of the repaired items; why others were not is logged.
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
                        source.put_right(leaf, box, content)
                    mended.append(name)
                except (errors.CheckpointError, RepairError, OSError) as error:
                    logging.warning("%s at host %s: %s", name, holder.host.id, error)
        return mended


# Reads a tree of another layout than a step has, as this process needs it: from the
# boxes of the open step in any tier, or None from persistent storage alone, for hosts
# that are elsewhere.
OtherTree = Callable[[VerifiedReader | None], Any]


def read_leaves(
    reader: VerifiedReader, wanted: Sequence[trees.WantedLeaf]
) -> dict[str, list[Any]]:
    """Reads the requested boxes of a host, verified, and places them.

    They are read in windows, of which one is moved to the devices while the next is
    read: what is in host memory at a time is bounded, but for leaves that stay there.
    A saved box is read whole, since its digest is that of the whole, and once for all
    boxes of a window that share it: straight into the wanted box where it lies there in
    one piece. Besides the boxes themselves a saved box is in memory for each thread.

    Args:
      reader: of the step, for this host.
      wanted: the leaves that this host needs.

    Returns:
      By the path of each leaf, its placed boxes.

    Raises:
      CheckpointError: if the step is not complete, lacks what is wanted, or no good
        copy of a part is left.
    """
    assert reader.near is not None
    plan = planned(reader.near, wanted)
    of_boxes = [(leaf, number) for leaf in wanted for number in range(len(leaf.boxes))]
    placed: dict[str, list[Any]] = {leaf.path: [] for leaf in wanted}
    arrived: list[Any] = []
    with background.pool(_THREADS, "read") as pool:
        begin = _Windows(plan, reader, pool).begin
        try:
            windows = list(_windows(plan, of_boxes))
            coming = begin(windows[0])
            for window, following in itertools.pairwise([*windows, range(0)]):
                (values, reads), coming = coming, begin(following)
                # The first error ends all.
                for each in futures.as_completed(reads):
                    each.result()
                # A device may still receive the window before.
                jax.block_until_ready(arrived)
                arrived = []
                for at, box_values in zip(window, values, strict=True):
                    leaf, number = of_boxes[at]
                    part = leaf.place(number, box_values)
                    placed[leaf.path].append(part)
                    if leaf.is_moved:
                        arrived.append(part)
        except BaseException:
            # What is not begun is not read.
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return placed


def planned(near: Nearness, wanted: Sequence[trees.WantedLeaf]) -> read_plan.ReadPlan:
    """Plans the reads of a host; its boxes are those of the leaves in their order.

    Raises:
      CheckpointError: if the step is not complete, or lacks what is wanted.
    """
    listed = [(leaf.path, box) for leaf in wanted for box in leaf.boxes]
    contents = near.table.contents
    return read_plan.ReadPlan(
        near, read_plan.Wanted.from_boxes(listed, contents=contents)
    )


def _windows(
    plan: read_plan.ReadPlan, of_boxes: Sequence[tuple[trees.WantedLeaf, int]]
) -> Iterator[range]:
    # What stays in host memory is bounded by nothing: it ends no window.
    leaves = plan.table.contents.leaves
    first = num_bytes = 0
    for at, ((leaf, number), saved) in enumerate(
        zip(of_boxes, plan.wanted.leaf.tolist(), strict=True)
    ):
        size = leaves[saved].num_bytes(leaf.boxes[number]) if leaf.is_moved else 0
        if size and num_bytes and num_bytes + size > _WINDOW_BYTES:
            yield range(first, at)
            first, num_bytes = at, 0
        num_bytes += size
    yield range(first, len(of_boxes))


class _Windows:
    # Reads windows of the wanted boxes of a plan, in threads of a pool.

    def __init__(
        self, plan: read_plan.ReadPlan, reader: VerifiedReader, pool: futures.Executor
    ) -> None:
        self._plan, self._reader, self._pool = plan, reader, pool
        self._scratch = threading.local()

    def begin(
        self, window: range
    ) -> tuple[list[np.ndarray], list[futures.Future[None]]]:
        # The boxes of a window in new memory, and what fills them.
        plan = self._plan
        made = {at: self._empty(at) for at in window}
        bounds = np.searchsorted(plan.of_wanted, [window.start, window.stop])
        pieces: dict[int, list[int]] = collections.defaultdict(list)
        for number in range(*bounds.tolist()):
            pieces[int(plan.item[number])].append(number)
        reads = [
            self._pool.submit(self._read, item, numbers, made)
            for item, numbers in pieces.items()
        ]
        return list(made.values()), reads

    def _empty(self, at: int) -> np.ndarray:
        wanted = self._plan.wanted
        leaf = self._plan.table.contents.leaves[wanted.leaf[at]]
        box = wanted.boxes.box(at, rank=len(leaf.shape))
        memory = host_memory.allocate(leaf.num_bytes(box))
        return memory.view(np.dtype(leaf.dtype)).reshape(box.shape)

    def _read(
        self, item: int, numbers: Sequence[int], made: dict[int, np.ndarray]
    ) -> None:
        # Reads a saved box for all pieces that are cut out of it.
        plan, reader, leaf = self._plan, self._reader, self._plan.table.leaf(item)
        whole = plan.table.box(item)
        reads = [plan.read(number) for number in numbers]
        targets = [
            made[int(plan.of_wanted[number])][(*read.into, ...)]
            for number, read in zip(numbers, reads, strict=True)
        ]
        if reads[0].piece == whole and targets[0].flags.c_contiguous:
            values = targets[0]
            reader.read_into(item, values.reshape(-1).view(np.uint8))
        else:
            memory = self._memory(leaf.num_bytes(whole))
            reader.read_into(item, memory)
            values = memory.view(np.dtype(leaf.dtype)).reshape(whole.shape)
            targets[0][...] = values[reads[0].out_of]
        for read, target in zip(reads[1:], targets[1:], strict=True):
            target[...] = values[read.out_of]

    def _memory(self, num_bytes: int) -> np.ndarray:
        memory = getattr(self._scratch, "memory", None)
        if memory is None or memory.nbytes < num_bytes:
            memory = self._scratch.memory = host_memory.allocate(num_bytes)
        return memory[:num_bytes]
