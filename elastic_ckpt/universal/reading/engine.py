"""Reads the boxes of targets that a host needs: planned, read and copied in groups.

A group is as many targets as half of the budget has room for. Its moves are cut by the
boxes that are needed and by the fragments of their tensors into copies: strided, from
one file into one buffer. Copies that are near each other in a file are one span, which
one request of a thread reads. A span whose bytes are those of a buffer is read straight
into it; any other is read into memory of its own, and copied from there while it is in
the cache. While the caller has a group, the next one is read.

Copies of one kind are made of one form, which is divided into parts only once.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import itertools
import math
import operator
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent import futures
from typing import NamedTuple

import numpy as np

from elastic_ckpt.core import box_join, boxes, bucket_clients, errors, host_memory
from elastic_ckpt.core.boxes import Box, Boxes
from elastic_ckpt.universal.formats import opened
from elastic_ckpt.universal.formats.coverage import whole
from elastic_ckpt.universal.formats.format_error import FormatError
from elastic_ckpt.universal.new_moves import Fill, Matched, Move, Side, TargetTensor
from elastic_ckpt.universal.reading import derived, factors, sources, values
from elastic_ckpt.universal.reading.checks import Checks
from elastic_ckpt.universal.reading.sources import Limits, Sources, VirtualFile
from elastic_ckpt.universal.stored import Checkpoint, StoredTensor
from elastic_ckpt.universal.strides import row_major

BUDGET_BYTES = 2**28
_LOCAL_THREADS = 8
_REMOTE_THREADS = 16
# A copy without change gets a request of its own from this size on.
_ALONE_BYTES = 2**18
# The most memory that is kept for the next requests, by request.
_KEPT_BYTES = 12 * 2**20
# Values are aligned in memory as they are in their file.
_ALIGNMENT = 64
# With fewer pairs of boxes, all of them are tried.
_FEW_PAIRS = 256

# What is read together: a target, and boxes of it.
Unit = tuple[TargetTensor, Sequence[Box]]


@dataclasses.dataclass(frozen=True)
class Form:
    """A strided copy without its place.

    Attributes:
      sizes: of its dims, more than 1 each; the last advances least in the buffer.
      source: bytes from an element to the next in the file, by dim.
      buffer: elements from one to the next in the buffer, by dim.
      dtype: of the elements in the file.
      scale: factor of the values.
      shift: added after scaling.
      view: of the stored tensor, see `StoredTensor`.
    """

    sizes: tuple[int, ...]
    source: tuple[int, ...]
    buffer: tuple[int, ...]
    dtype: np.dtype
    scale: float
    shift: float
    view: str

    @functools.cached_property
    def volume(self) -> int:
        """The number of elements."""
        return math.prod(self.sizes)

    @functools.cached_property
    def extent(self) -> int:
        """Bytes in the file from the start of the first element to the last's end."""
        steps = zip(self.sizes, self.source, strict=True)
        return sum((n - 1) * stride for n, stride in steps) + self.dtype.itemsize

    @functools.cached_property
    def is_changed(self) -> bool:
        """Whether values are computed."""
        return (self.scale, self.shift, self.view) != (1, 0, "")

    @functools.cached_property
    def is_plain(self) -> bool:
        """Whether the bytes of the file are those of the buffer, if it has the dtype."""
        rank = len(self.sizes)
        strides = (self.source, self.buffer)
        is_row = rank <= 1 and strides == ((self.dtype.itemsize,) * rank, (1,) * rank)
        return is_row and not self.is_changed


@dataclasses.dataclass(eq=False)
class Buffer:
    """A box of a target, and its values in row-major order."""

    target: TargetTensor
    box: Box
    values: np.ndarray
    left: int = 0

    def __str__(self) -> str:
        return f"{self.target.name}{self.box}"


class Copy(NamedTuple):
    """A form with its place: the first byte in a file, the first element in a buffer."""

    start: int
    form: Form
    buffer: Buffer
    element: int
    tensor: int


# The copies of a request, by their place in its file.
Span = list[Copy]


class Reader:
    """Reads targets of one checkpoint.

    Args:
      checkpoint: that is open.
      matched: the layout, matched with it.
      targets: the names of those that are read.
      budget_bytes: the most bytes of targets that are read and not yet taken; and of
        other memory of requests. What is read together may have more, and so may a
        single request.
      files: virtual files of the checkpoint's tensors.
      allocate: makes the memory of a buffer, uint8, of a number of bytes.

    Raises:
      CheckpointError: if an encoded array cannot be opened, or tensors that are
        compared or added up have different dtypes.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        matched: Matched,
        targets: Iterable[str],
        *,
        budget_bytes: int = BUDGET_BYTES,
        files: Mapping[str, VirtualFile] | None = None,
        allocate: Callable[[int], np.ndarray] = host_memory.allocate,
    ) -> None:
        self._moves: dict[str, list[Move]] = {target: [] for target in targets}
        self._fills: dict[str, list[Fill]] = collections.defaultdict(list)
        for move in matched.moves:
            if move.target in self._moves and math.prod(move.sizes):
                self._moves[move.target].append(move)
        for fill in matched.fills:
            self._fills[fill.target].append(fill)
        sourced = {move.source for moves in self._moves.values() for move in moves}
        stored, virtual = checkpoint.tensors, dict(files or {})
        used = {
            number
            for source in sourced
            for number in derived.stored_of(matched, source, len(stored))
        }
        tensors = sources.encoded(stored, sorted(used), virtual)
        tensors += derived.tensors(
            matched.derived, sourced, tensors, self._box, virtual
        )
        self.tensors: Sequence[StoredTensor] = tensors
        self._sources = Sources(tensors, virtual)
        self._held: dict[int, Boxes] = {}
        self._bounds: dict[str, Boxes] = {}
        self._budget_bytes, self._allocate = budget_bytes, allocate
        self._checks: Checks | None = None
        if checkpoint.checksums is not opened.no_checksums and not files:
            self._checks = Checks(checkpoint.checksums)
        self._scratch: collections.deque[np.ndarray] = collections.deque()
        self._room = _Room(budget_bytes)
        is_remote = any(
            "://" in fragment.file
            for number in used
            for fragment in tensors[number].fragments[:1]
        )
        most = min(_LOCAL_THREADS, os.cpu_count() or 1)
        self._num_threads = _REMOTE_THREADS if is_remote else most

    def read(self, units: Iterable[Unit]) -> Iterator[list[Buffer]]:
        """Yields the buffers of groups of units, in their order, once they are filled.

        Those of a group are emptied when the next one is asked for. The caller closes
        the iterator, which ends the threads, if it does not reach the end.

        Raises:
          CheckpointError: if an element is filled by nothing or twice, a file cannot be
            read or ends too early, values do not fit a dtype, or values that should be
            equal differ.
        """
        ahead: collections.deque[_Group] = collections.deque()
        with futures.ThreadPoolExecutor(
            self._num_threads, thread_name_prefix="relayout"
        ) as pool:
            try:
                for group in _groups(units, self._budget_bytes // 2):
                    held = sum(each.num_bytes for each in ahead)
                    if ahead and held + _num_bytes(group) > self._budget_bytes:
                        yield from ahead.popleft().finished()
                    ahead.append(self._begun(group, pool))
                    if len(ahead) > 1:
                        yield from ahead.popleft().finished()
                while ahead:
                    yield from ahead.popleft().finished()
            finally:
                pool.shutdown(cancel_futures=True)
                self._sources.close()

    def check(self) -> None:
        """Compares the checksums of what was read.

        Raises:
          FormatError: if the checkpoint has another one.
        """
        if self._checks is not None:
            self._checks.finish()

    def _begun(self, units: Sequence[Unit], pool: futures.ThreadPoolExecutor) -> _Group:
        group = _Group(buffers=[], pending=[], num_bytes=_num_bytes(units))
        copies: dict[str, Span] = collections.defaultdict(list)
        for target, needed in units:
            buffers = [self._buffer(target, box) for box in needed]
            group.buffers += buffers
            for move, buffer in self._overlapping(target.name, buffers):
                self._cut(move, buffer, copies)
            for fill in self._fills.get(target.name, ()):
                for buffer in buffers:
                    _fill(fill, buffer)
        for buffer in group.buffers:
            if buffer.left:
                raise errors.CheckpointError(
                    f"{buffer}: {abs(buffer.left)} of its elements are filled by"
                    f" {'nothing' if buffer.left > 0 else 'two sources'}; correct the"
                    " rules of the layout that name it, or use another step"
                )
        for file, held in copies.items():
            for span in self._spans(file, held):
                group.pending.append(pool.submit(self._carry_out, file, span))
        return group

    def _buffer(self, target: TargetTensor, box: Box) -> Buffer:
        memory = self._allocate(box.volume * target.dtype.itemsize)
        array = memory.view(target.dtype).reshape(box.shape)
        return Buffer(target=target, box=box, values=array, left=box.volume)

    def _box(self, number: int, box: Box) -> np.ndarray:
        # The values of a box of a stored tensor, read by this thread.
        tensor = self.tensors[number]
        target = TargetTensor(name=tensor.name, dtype=tensor.dtype, shape=tensor.shape)
        rank = len(tensor.shape)
        side = Side(start=(0,) * rank, dims=tuple(range(rank)), steps=(1,) * rank)
        move = Move(
            target=tensor.name,
            sizes=tensor.shape,
            target_side=side,
            source=number,
            source_side=side,
        )
        buffer = Buffer(target, box, np.empty(box.shape, tensor.dtype), box.volume)
        copies: dict[str, Span] = collections.defaultdict(list)
        self._cut(move, buffer, copies)
        assert not buffer.left
        for file, held in copies.items():
            for span in self._spans(file, held):
                self._read_and_copy(file, span)
        return buffer.values

    def _overlapping(
        self, target: str, buffers: Sequence[Buffer]
    ) -> Iterator[tuple[Move, Buffer]]:
        # The pairs that may overlap.
        moves = self._moves[target]
        if len(moves) * len(buffers) <= _FEW_PAIRS or len(moves) == 1:
            yield from itertools.product(moves, buffers)
            return
        rank = len(buffers[0].box.start)
        if target not in self._bounds:
            bounds = [factors.bounds(whole(m.sizes), m.target_side) for m in moves]
            self._bounds[target] = Boxes.from_boxes(bounds, rank=rank)
        needed = Boxes.from_boxes([buffer.box for buffer in buffers], rank=rank)
        pairs = box_join.overlaps(self._bounds[target], needed)
        for first, second in zip(*map(np.ndarray.tolist, pairs), strict=True):
            yield moves[first], buffers[second]

    def _cut(self, move: Move, buffer: Buffer, copies: dict[str, Span]) -> None:
        tensor = self.tensors[move.source]
        into = row_major(buffer.box.shape)
        advances = factors.advances(move.target_side, into)
        for part in factors.inside(whole(move.sizes), move.target_side, buffer.box):
            for fragment in self._fragments(move, part):
                for piece in factors.inside(part, move.source_side, fragment.box):
                    source = factors.place(
                        piece.start, move.source_side, fragment.box, fragment.strides
                    )
                    element = factors.place(
                        piece.start, move.target_side, buffer.box, into
                    )
                    for form, at, skipped in _parts(
                        piece.shape,
                        factors.advances(move.source_side, fragment.strides),
                        advances,
                        (tensor.dtype, move.scale, move.shift, tensor.view),
                        self._sources.limits(fragment.file),
                    ):
                        buffer.left -= form.volume
                        start = fragment.offset + source + at
                        copies[fragment.file].append(
                            Copy(start, form, buffer, element + skipped, move.source)
                        )

    def _fragments(self, move: Move, part: Box) -> Iterable[sources.Fragment]:
        # Those that a part of a move may overlap.
        held = self.tensors[move.source].fragments
        if len(held) < _FEW_PAIRS:
            return held
        rank = len(held[0].box.start)
        if move.source not in self._held:
            of_tensor = Boxes.from_boxes([each.box for each in held], rank=rank)
            self._held[move.source] = of_tensor
        bounds = [factors.bounds(part, move.source_side)]
        pairs = box_join.overlaps(
            Boxes.from_boxes(bounds, rank=rank), self._held[move.source]
        )
        return [held[number] for number in pairs[1].tolist()]

    def _spans(self, file: str, copies: Span) -> Iterator[Span]:
        limits = self._sources.limits(file)
        is_virtual = file in self._sources.virtual
        span: Span = []
        begin = end = 0
        for copy in sorted(copies, key=operator.itemgetter(0)):
            extent = copy.form.extent
            alone = not is_virtual and copy.form.is_plain and extent >= _ALONE_BYTES
            if span and (
                alone
                or copy.start - end > limits.gap_bytes
                or copy.start >= begin + limits.span_bytes
            ):
                yield span
                span = []
            if not span:
                begin, end = copy.start, 0
            span.append(copy)
            end = max(end, copy.start + extent)
            if alone:
                yield span
                span = []
        if span:
            yield span

    def _carry_out(self, file: str, span: Span) -> None:
        start, stop = self._range(file, span)
        taken = 0 if _is_direct(span) else stop - start
        taken += self._sources.request_bytes(file, stop - start)
        if any(copy.form.is_changed for copy in span):
            taken += 4 * (stop - start)
        with self._room.taken(taken):
            self._read_and_copy(file, span)

    def _range(self, file: str, span: Span) -> tuple[int, int]:
        stop = max(copy.start + copy.form.extent for copy in span)
        return self._sources.range_of(file, span[0].start, stop)

    def _read_and_copy(self, file: str, span: Span) -> None:
        start, stop = self._range(file, span)
        (first, *_) = span
        if _is_direct(span) and first.form.extent == stop - start:
            flat = first.buffer.values.reshape(-1)[first.element :]
            self._read(file, start, flat[: first.form.volume].view(np.uint8), span)
            return
        skipped = start % _ALIGNMENT
        scratch = self._scratch.pop() if self._scratch else np.empty(0, np.uint8)
        if scratch.nbytes < skipped + stop - start:
            scratch = host_memory.allocate(skipped + stop - start)
        memory = scratch[skipped : skipped + stop - start]
        self._read(file, start, memory, span)
        for copy in span:
            _put(copy, memory, copy.start - start)
        if scratch.nbytes <= _KEPT_BYTES:
            self._scratch.append(scratch)

    def _read(self, file: str, start: int, memory: np.ndarray, span: Span) -> None:
        stop = start + memory.nbytes
        try:
            count = self._sources.read_into(file, start, memory)
        # TensorStore raises ValueErrors.
        except (*bucket_clients.failures(), ValueError) as error:
            raise errors.CheckpointError(
                f"{file}: {self.tensors[span[0].tensor].name} cannot be read at bytes"
                f" {start} to {stop} ({error}); restore the file or the access to it,"
                " or use another step"
            ) from error
        if count < memory.nbytes:
            end = start + count
            behind = next(c for c in span if c.start + c.form.extent > end)
            raise FormatError(
                f"{file}: {self.tensors[behind.tensor].name} is at bytes {start} to"
                f" {stop}, but the file ends after {end}; it is cut short, restore it"
                " from a copy"
            )
        if self._checks is not None and file not in self._sources.virtual:
            self._checks.note(file, start, memory)


@dataclasses.dataclass(eq=False)
class _Group:
    buffers: list[Buffer]
    pending: list[futures.Future[None]]
    num_bytes: int

    def finished(self) -> Iterator[list[Buffer]]:
        for each in self.pending:
            each.result()
        yield self.buffers
        self.buffers.clear()


class _Room:
    # Memory for requests: one that needs all of it waits until no other has some.
    def __init__(self, num_bytes: int) -> None:
        self._most = self._free = num_bytes
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def taken(self, num_bytes: int) -> Iterator[None]:
        num_bytes = min(num_bytes, self._most)
        with self._changed:
            self._changed.wait_for(lambda: num_bytes <= self._free)
            self._free -= num_bytes
        try:
            yield
        finally:
            with self._changed:
                self._free += num_bytes
                self._changed.notify_all()


def _groups(units: Iterable[Unit], most_bytes: int) -> Iterator[list[Unit]]:
    group: list[Unit] = []
    held = 0
    for unit in units:
        size = _num_bytes([unit])
        if group and held + size > most_bytes:
            yield group
            group, held = [], 0
        group.append(unit)
        held += size
    if group:
        yield group


def _num_bytes(units: Iterable[Unit]) -> int:
    return sum(
        target.dtype.itemsize * sum(box.volume for box in needed)
        for target, needed in units
    )


def _fill(fill: Fill, buffer: Buffer) -> None:
    part = boxes.intersect(Box(start=fill.start, stop=fill.stop), buffer.box)
    if part is not None:
        buffer.left -= part.volume
        buffer.values[boxes.relative(part, buffer.box)] = fill.value


def _is_direct(span: Span) -> bool:
    # Whether a span is read into its buffer, if no more than it is read.
    (first, *others) = span
    dtype = first.buffer.values.dtype
    return not others and first.form.is_plain and first.form.dtype == dtype


def _put(copy: Copy, memory: np.ndarray, at: int) -> None:
    form, into = copy.form, copy.buffer.values
    dtype = into.dtype
    read = np.ndarray(form.sizes, form.dtype, memory.data, at, form.source)
    if form.is_changed:
        read = values.scaled(values.viewed(read, form.view), form.scale, form.shift)
    values.check_cast(read, dtype, copy.buffer.target.name)
    strides = [stride * dtype.itemsize for stride in form.buffer]
    flat = into.reshape(-1).view(np.uint8)
    place = copy.element * dtype.itemsize
    values.copy(np.ndarray(form.sizes, dtype, flat.data, place, strides), read)


@functools.lru_cache(maxsize=2**14)
def _parts(
    sizes: tuple[int, ...],
    source: tuple[int, ...],
    buffer: tuple[int, ...],
    kind: tuple[np.dtype, float, float, str],
    limits: Limits,
) -> list[tuple[Form, int, int]]:
    # A copy as parts that are read at once, within the limits, and their offsets. Only
    # the rows of its elements have larger gaps.
    lengths, extent = [1] * len(sizes), kind[0].itemsize
    for dim in sorted(range(len(sizes)), key=source.__getitem__):
        if source[dim] - extent > limits.gap_bytes:
            break
        rows = 1 + max(0, limits.span_bytes - extent) // max(1, source[dim])
        lengths[dim] = min(sizes[dim], rows)
        if rows < sizes[dim]:
            break
        extent += source[dim] * (sizes[dim] - 1)
    made = []
    ranges = [range(0, size, n) for size, n in zip(sizes, lengths, strict=True)]
    for firsts in itertools.product(*ranges):
        counts = [
            min(n, size - at)
            for at, n, size in zip(firsts, lengths, sizes, strict=True)
        ]
        form = Form(*_joined(counts, source, buffer), *kind)
        at = sum(map(operator.mul, firsts, source))
        made.append((form, at, sum(map(operator.mul, firsts, buffer))))
    return made


def _joined(
    sizes: Sequence[int], source: Sequence[int], buffer: Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    # The same copy in the fewest dims, in the order of the buffer.
    joined: list[tuple[int, int, int]] = []
    dims = [dim for dim in zip(sizes, source, buffer, strict=True) if dim[0] > 1]
    for size, step, into in sorted(dims, key=lambda dim: (-dim[2], -dim[1])):
        if joined and joined[-1][1:] == (size * step, size * into):
            size *= joined.pop()[0]
        joined.append((size, step, into))
    of_dims = zip(*joined, strict=True) if joined else ((), (), ())
    one, two, three = map(tuple, of_dims)
    return one, two, three
