"""Verified reads: values are compared with their digest before anyone sees them.

A copy that is missing, cut short or altered is noted, and the next holder is asked. So
what is handed out is what was saved, or an error names it.

Glossary: a chunk is a saved box of a read plan; its pieces go into wanted boxes.
"""

from __future__ import annotations

import collections
import dataclasses
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent import futures

import numpy as np

from elastic_ckpt.core import background, boxes, digest, errors, host_memory
from elastic_ckpt.steps import layout, read_plan
from elastic_ckpt.steps.holdings import Holdings, Offer
from elastic_ckpt.steps.manifest import ComponentFile, Fragment
from elastic_ckpt.tiers import stored_part
from elastic_ckpt.tiers.source import ReadError, Source

_REMEDY = (
    "restore it from a copy, bring back a host that has it, or restore an older step"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BadCopy:
    """A copy that could not be read, or does not match its manifest.

    Attributes:
      host: the id of its holder.
      tier: of the holder.
      file: in the step's directory of the holder.
      name: of the leaf and box, or file of a component.
      why: what is wrong, as the end of `<name> at <holder> ...`.
    """

    host: str
    tier: str
    file: str
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
      sources: where to read what each holder offers.
    """

    def __init__(self, sources: Mapping[Offer, Source]) -> None:
        self._sources = sources
        self._lock = threading.Lock()
        self._bad: list[BadCopy] = []
        self._read_bytes: collections.Counter[Offer] = collections.Counter()

    @property
    def bad(self) -> tuple[BadCopy, ...]:
        """The bad copies that were detected so far."""
        with self._lock:
            return tuple(self._bad)

    @property
    def read_bytes(self) -> dict[Offer, int]:
        """Bytes that were read from each holder and handed out."""
        with self._lock:
            return dict(self._read_bytes)

    def fragment(
        self,
        choices: Sequence[tuple[Offer, Fragment]],
        into: np.ndarray,
        *,
        name: str,
    ) -> None:
        """Fills `into` with the values of a box, from the first holder with good ones.

        Args:
          choices: the holders in the order to ask them, as in `read_plan.Read`.
          into: contiguous memory for exactly the values, uint8.
          name: of the box, for messages.

        Raises:
          CheckpointError: if no holder has it as it was saved.
        """
        parts = [
            (offer, part.file, part.offset, part.digest) for offer, part in choices
        ]
        self._fill(parts, into, name)

    def file(self, file: ComponentFile, offers: Sequence[Offer]) -> bytes:
        """As `content`, in bytes."""
        return self.content(file, offers).tobytes()

    def content(self, file: ComponentFile, offers: Sequence[Offer]) -> memoryview:
        """The content of a component's file, from the first holder with a good one.

        Raises:
          CheckpointError: if no holder has it as it was saved.
        """
        content = np.empty(file.stored_bytes, np.uint8)
        parts = [(offer, file.path, 0, file.digest) for offer in offers]
        self._fill(parts, content, file.path)
        return content.data

    def _fill(
        self,
        parts: Sequence[tuple[Offer, str, int, bytes]],
        into: np.ndarray,
        name: str,
    ) -> None:
        tried: dict[Offer, BadCopy] = {}
        for offer, file, offset, expected in parts:
            source, actual = self._sources[offer], digest.values_hash()
            try:
                source.read_into(file, offset, into.data, actual.update)
            except ReadError as error:
                why = str(error)
            else:
                if actual.digest() == expected:
                    with self._lock:
                        self._read_bytes[offer] += into.nbytes
                        self._bad += tried.values()
                    return
                why = stored_part.why_differs(source, file)
            tried[offer] = BadCopy(
                host=offer.host.id, tier=offer.tier, file=file, name=name, why=why
            )
        with self._lock:
            self._bad += tried.values()
        failures = "; ".join(f"at {bad.holder} it {bad.why}" for bad in tried.values())
        raise errors.CheckpointError(
            f"step {parts[0][0].manifest.step}: no good copy of {name} is left"
            f" ({failures}); {_REMEDY}"
        )


def read_item(
    holdings: Holdings,
    item: int,
    reader: VerifiedReader,
    *,
    first: str | None = None,
) -> np.ndarray:
    """Reads the values of a saved box into new memory, verified.

    Args:
      holdings: of the step.
      item: the number of the box.
      reader: of the step.
      first: the id of the host to ask first.

    Raises:
      CheckpointError: if no good copy is left.
    """
    of_item = choices(holdings, item, first=first)
    saved = of_item[0][1]
    dtype = np.dtype(holdings.contents.leaves[saved.leaf].dtype)
    memory = host_memory.allocate(layout.num_bytes(saved.box, dtype.name))
    reader.fragment(of_item, memory, name=holdings.name(item))
    return memory.view(dtype).reshape(saved.box.shape)


def choices(
    holdings: Holdings, item: int, *, first: str | None = None
) -> list[tuple[Offer, Fragment]]:
    """The holders of a saved box in the order to ask them; see `read_item`."""
    rows = range(int(holdings.first_row[item]), int(holdings.first_row[item + 1]))
    listed = [
        (holdings.offers[holdings.holder[row]], holdings.fragment(row)) for row in rows
    ]
    return sorted(listed, key=lambda each: each[0].host.id != first)


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
    contents = plan.holdings.contents
    numbers = plan.wanted.leaf[window.start : window.stop].tolist()
    leaves = [contents.leaves[number] for number in numbers]
    made = [
        _empty(plan.wanted.boxes[number], np.dtype(leaf.dtype), len(leaf.shape))
        for number, leaf in zip(window, leaves, strict=True)
    ]
    first, end = np.searchsorted(plan.of_wanted, [window.start, window.stop]).tolist()
    pieces: dict[int, list[int]] = collections.defaultdict(list)
    for number, box in enumerate(plan.box[first:end].tolist(), first):
        pieces[box].append(number)

    def read_chunk(box: int) -> None:
        reads = [plan.read(number) for number in pieces[box]]
        leaf = plan.holdings.leaf[box]
        dtype = np.dtype(contents.leaves[leaf].dtype)
        targets = [
            made[plan.of_wanted[number] - window.start][(*read.into, ...)]
            for number, read in zip(pieces[box], reads, strict=True)
        ]
        choices = reads[0].choices
        whole = choices[0][1].box
        name = f"{reads[0].path}{whole}"
        if reads[0].piece == whole and targets[0].flags.c_contiguous:
            values = targets[0]
            reader.fragment(choices, _bytes(values), name=name)
        else:
            memory = _scratch(scratch, layout.num_bytes(whole, dtype.name))
            reader.fragment(choices, memory, name=name)
            values = memory.view(dtype).reshape(whole.shape)
            targets[0][...] = values[reads[0].out_of]
        for read, target in zip(reads[1:], targets[1:], strict=True):
            target[...] = values[read.out_of]

    return made, [pool.submit(read_chunk, box) for box in pieces]


def _ended(
    made: list[np.ndarray], begun: list[futures.Future[None]]
) -> list[np.ndarray]:
    # The first error ends all.
    for each in futures.as_completed(begun):
        each.result()
    return made


def _empty(box: boxes.Box, dtype: np.dtype, rank: int) -> np.ndarray:
    shape = box.shape[:rank]
    memory = host_memory.allocate(int(np.prod(shape, dtype=np.int64)) * dtype.itemsize)
    return memory.view(dtype).reshape(shape)


def _bytes(values: np.ndarray) -> np.ndarray:
    return values.reshape(-1).view(np.uint8)


def _scratch(of_thread: threading.local, num_bytes: int) -> np.ndarray:
    memory = getattr(of_thread, "memory", None)
    if memory is None or memory.nbytes < num_bytes:
        memory = of_thread.memory = host_memory.allocate(num_bytes)
    return memory[:num_bytes]
