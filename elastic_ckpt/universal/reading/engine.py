"""Reads the boxes of targets that a host needs, in groups.

A group has as many targets as fit into half of the budget. Its moves are cut, at the
bounds of the needed boxes and of the source tensors' fragments, into strided copies
from one file into one buffer each. Copies that are near each other in a file form a
span, which a thread reads with one request. A span whose bytes are the same in a buffer
is read straight into the buffer; any other span is read into scratch memory and copied
while it is in the cache. While the caller uses a group, the next group is read.

There may be a copy for each row, so copies that differ only in position share a form.
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
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent import futures
from typing import Any, NamedTuple

import numpy as np

from elastic_ckpt.core import box_join, boxes, bucket_clients, errors, host_memory
from elastic_ckpt.core.boxes import Box, Boxes
from elastic_ckpt.universal import factors
from elastic_ckpt.universal.factors import row_major
from elastic_ckpt.universal.formats.checkpoint import Checkpoint, Fragment, whole
from elastic_ckpt.universal.formats.files import FormatError
from elastic_ckpt.universal.moves import Fill, Matched, Move, Side, TargetTensor
from elastic_ckpt.universal.reading import arithmetic, sources
from elastic_ckpt.universal.reading.sources import Checks, Limits, Sources, VirtualFile

BUDGET_BYTES = 2**28
_LOCAL_THREADS = 8
_REMOTE_THREADS = 16
# A copy of at least this size that does not change values gets its own request.
_ALONE_BYTES = 2**18
# Scratch memory of at most this size is reused for the next requests.
_KEPT_BYTES = 12 * 2**20
# Values have the same alignment in memory as in their file.
_ALIGNMENT = 64
# Up to this many boxes are searched one by one.
_FEW_BOXES = 256
# The scale, shift and view of values that are copied as they are.
_PLAIN = (1.0, 0.0, "")

# A target and the boxes of it that are read together.
Unit = tuple[TargetTensor, Sequence[Box]]


@dataclasses.dataclass(frozen=True)
class Form:
    """A strided copy without its position.

    Attributes:
      sizes: the lengths of the dims, each greater than 1. The last dim has the smallest
        stride in the buffer.
      source: the strides in the file, in bytes.
      buffer: the strides in the buffer, in elements.
      kind: the dtype of the elements in the file, the scale, the shift, and the view of
        the stored tensor (see `StoredTensor`).
    """

    sizes: tuple[int, ...]
    source: tuple[int, ...]
    buffer: tuple[int, ...]
    kind: tuple[np.dtype, float, float, str]

    @functools.cached_property
    def volume(self) -> int:
        """The number of elements."""
        return math.prod(self.sizes)

    @functools.cached_property
    def extent(self) -> int:
        """The size in the file from the first element's start to the last one's end."""
        steps = zip(self.sizes, self.source, strict=True)
        return sum((n - 1) * stride for n, stride in steps) + self.kind[0].itemsize

    @functools.cached_property
    def is_large(self) -> bool:
        """Whether the contiguous, unchanged bytes are enough for their own request."""
        is_row = (
            self.buffer == (1,) and self.extent == self.volume * self.kind[0].itemsize
        )
        return is_row and self.kind[1:] == _PLAIN and self.extent >= _ALONE_BYTES


@dataclasses.dataclass(eq=False)
class Buffer:
    """A target's box with row-major values; `left` of them are not yet planned."""

    target: TargetTensor
    box: Box
    values: np.ndarray
    left: int = 0


class Copy(NamedTuple):
    """A form with its first byte in a file and its first element in a buffer."""

    start: int
    form: Form
    buffer: Buffer
    element: int
    tensor: str


@dataclasses.dataclass(eq=False)
class Span:
    """A range of a file that one request reads, and the copies to make from it."""

    file: str
    start: int
    stop: int
    copies: list[Copy]

    @property
    def is_direct(self) -> bool:
        """Whether the span is read straight into its buffer."""
        (copy, *others) = self.copies
        form, dtype = copy.form, copy.buffer.values.dtype
        is_all = not others and form.extent == self.stop - self.start
        return is_all and form.is_large and form.kind[0] == dtype


# Units, their buffers, and the requests that fill the buffers.
_Group = tuple[Sequence[Unit], list[Buffer], Sequence[futures.Future[None]]]


class Reader:
    """Reads targets of one checkpoint.

    Args:
      checkpoint: an open checkpoint.
      matched: the layout matched with `checkpoint`.
      targets: the names of the targets to read.
      budget_bytes: the maximum size of targets that were read but not yet taken and,
        separately, of the requests' other memory. A single unit or request may exceed
        it.
      is_kept: whether the caller keeps the buffers' memory, so that the budget does not
        include it.
      files: the virtual files of the checkpoint's tensors, by file name.
      host: this host's index and the number of hosts. The hosts share the work of
        comparing checksums.
      allocate: a function that allocates a number of bytes for a buffer, as uint8.

    Raises:
      CheckpointError: if an encoded array cannot be opened, or tensors to compare or
        add up have different dtypes.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        matched: Matched,
        targets: Iterable[str],
        *,
        budget_bytes: int = BUDGET_BYTES,
        is_kept: bool = False,
        files: Mapping[str, VirtualFile] | None = None,
        host: tuple[int, int] = (0, 1),
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
            for number in arithmetic.stored_of(matched, source, len(stored))
        }
        tensors = sources.encoded(stored, sorted(used), virtual)
        tensors += arithmetic.tensors(
            matched.derived, sourced, tensors, self._box, virtual
        )
        self.tensors = tensors
        self._sources = Sources(tensors, virtual)
        # The boxes of a target's moves and of a tensor's fragments.
        self._boxes: dict[object, Boxes] = {}
        self._budget_bytes, self._allocate = budget_bytes, allocate
        self._most_bytes = math.inf if is_kept else budget_bytes
        self.checks = Checks(checkpoint.checksums, [stored[n] for n in used], host)
        self._scratch: collections.deque[np.ndarray] = collections.deque()
        self._room = _Room(budget_bytes)
        is_remote = any(
            "://" in each.file
            for number in used
            for each in tensors[number].fragments[:1]
        )
        # Twice the cores because threads that wait for a decoder do not copy.
        most = min(_LOCAL_THREADS, 2 * (os.cpu_count() or 1))
        self._num_threads = _REMOTE_THREADS if is_remote else most

    def read(self, units: Iterable[Unit]) -> Generator[list[Buffer]]:
        """Yields the filled buffers of each group of units, in unit order.

        A list is cleared when the caller requests the next one. A caller that stops
        early must close the iterator to stop the threads.

        Raises:
          CheckpointError: if an element is filled twice or not at all, a file cannot be
            read, a dtype cannot represent a value, or values that should be identical
            differ.
          FormatError: if a file is truncated or its checksums cannot be read.
        """
        last: _Group | None = None
        with futures.ThreadPoolExecutor(
            self._num_threads, thread_name_prefix="relayout"
        ) as pool:
            try:
                for group in _groups(units, self._budget_bytes // 2):
                    if (
                        last
                        and _num_bytes(last[0]) + _num_bytes(group) > self._most_bytes
                    ):
                        yield from _finished(last)
                        last = None
                    buffers, spans = self.planned(group)
                    pending = [pool.submit(self._carry_out, span) for span in spans]
                    if last:
                        yield from _finished(last)
                    last = group, buffers, pending
                if last:
                    yield from _finished(last)
            finally:
                pool.shutdown(cancel_futures=True)
                self._sources.close()

    def planned(self, units: Iterable[Unit]) -> tuple[list[Buffer], list[Span]]:
        """Plans the requests that fill the buffers of units.

        Raises:
          CheckpointError: if an element is filled twice or not at all.
        """
        every: list[Buffer] = []
        copies: dict[str, list[Copy]] = collections.defaultdict(list)
        for target, needed in units:
            for box in needed:
                memory = self._allocate(box.volume * target.dtype.itemsize)
                array = memory.view(target.dtype).reshape(box.shape)
                buffer = Buffer(target, box, array, left=box.volume)
                moves, fills = self._moves[target.name], self._fills[target.name]
                if len(moves) > _FEW_BOXES:
                    moves = self._near(
                        moves,
                        box,
                        target.name,
                        lambda move: factors.bounds(
                            whole(move.sizes), move.target_side
                        ),
                    )
                for move in moves:
                    self._cut(move, buffer, copies)
                for fill in fills:
                    _fill(fill, buffer)
                if buffer.left:
                    raise errors.CheckpointError(
                        f"{target.name}{box}: {abs(buffer.left)} of its elements are"
                        f" filled by {'nothing' if buffer.left > 0 else 'two sources'};"
                        " correct the layout's rules for this tensor, or use a"
                        " different step"
                    )
                every.append(buffer)
        return every, self._spans(copies)

    def _box(self, number: int, box: Box) -> np.ndarray:
        # Reads a box of a stored tensor in this thread.
        tensor = self.tensors[number]
        rank = len(tensor.shape)
        side = Side(start=(0,) * rank, dims=tuple(range(rank)), steps=(1,) * rank)
        move = Move(
            target=tensor.name,
            sizes=tensor.shape,
            target_side=side,
            source=number,
            source_side=side,
        )
        target = TargetTensor(name=tensor.name, dtype=tensor.dtype, shape=tensor.shape)
        made = np.empty(box.shape, tensor.dtype)
        buffer = Buffer(target, box, made, left=box.volume)
        copies: dict[str, list[Copy]] = collections.defaultdict(list)
        self._cut(move, buffer, copies)
        assert not buffer.left
        for span in self._spans(copies):
            self._read_and_copy(span)
        return made

    def _near(
        self, every: Sequence[Any], box: Box, key: object, box_of: Callable[[Any], Box]
    ) -> Sequence[Any]:
        # Of many boxes of the tensor `key`, finds those that may overlap a box.
        rank = len(box.start)
        if key not in self._boxes:
            self._boxes[key] = Boxes.from_boxes(map(box_of, every), rank=rank)
        chosen = Boxes.from_boxes([box], rank=rank)
        _, found = box_join.overlaps(chosen, self._boxes[key])
        return [every[number] for number in found.tolist()]

    def _cut(self, move: Move, buffer: Buffer, copies: dict[str, list[Copy]]) -> None:
        tensor, of_source = self.tensors[move.source], move.source_side
        of_target = move.target_side
        into = row_major(buffer.box.shape)
        advances = factors.advances(of_target, into)
        kind = (tensor.dtype, move.scale, move.shift, tensor.view)
        for part in factors.inside(whole(move.sizes), of_target, buffer.box):
            held: Sequence[Fragment] = tensor.fragments
            if len(held) > _FEW_BOXES:
                bounds = factors.bounds(part, of_source)
                held = self._near(held, bounds, move.source, operator.attrgetter("box"))
            for fragment in held:
                file, box, strides = fragment.file, fragment.box, fragment.strides
                steps = factors.advances(of_source, strides)
                limits = self._sources.limits(file)
                for piece in factors.inside(part, of_source, box):
                    start = factors.place(piece.start, of_source, box, strides)
                    start += fragment.offset
                    element = factors.place(piece.start, of_target, buffer.box, into)
                    for form, at, skipped in _parts(
                        piece.shape, steps, advances, kind, limits
                    ):
                        buffer.left -= form.volume
                        copy = (start + at, form, buffer, element + skipped)
                        copies[file].append(Copy(*copy, tensor.name))

    def _spans(self, copies: Mapping[str, list[Copy]]) -> list[Span]:
        # One request reads copies that are near each other in a file. A large copy that
        # does not change values has its own request, which reads straight into the
        # buffer.
        spans: list[Span] = []
        for file, held in copies.items():
            gap_bytes, span_bytes, _ = self._sources.limits(file)
            span, is_over = Span(file, 0, 0, []), True
            for copy in sorted(held, key=operator.itemgetter(0)):
                is_alone = copy.form.is_large and file not in self._sources.virtual
                if (
                    is_over
                    or is_alone
                    or copy.start - span.stop > gap_bytes
                    or copy.start >= span.start + span_bytes
                ):
                    span = Span(file, copy.start, 0, [])
                    spans.append(span)
                span.copies.append(copy)
                span.stop = max(span.stop, copy.start + copy.form.extent)
                is_over = is_alone
        for span in spans:
            span.start, span.stop = self._sources.range_of(
                span.file, span.start, span.stop
            )
        return spans

    def _carry_out(self, span: Span) -> None:
        is_changed = any(copy.form.kind[1:] != _PLAIN for copy in span.copies)
        is_checked = any(
            not arithmetic.is_safe(copy.form.kind[0], copy.buffer.values.dtype)
            for copy in span.copies
        )
        times = (not span.is_direct) + 4 * is_changed + 2 * is_checked
        times += self._sources.limits(span.file).memory
        with self._room.taken(times * (span.stop - span.start)):
            self._read_and_copy(span)

    def _read_and_copy(self, span: Span) -> None:
        size = span.stop - span.start
        if span.is_direct:
            (copy,) = span.copies
            flat = copy.buffer.values.reshape(-1)[copy.element :]
            self._read(span, flat[: copy.form.volume].view(np.uint8))
            return
        skipped = span.start % _ALIGNMENT
        try:
            scratch = self._scratch.pop()
        except IndexError:
            scratch = np.empty(0, np.uint8)
        if scratch.nbytes < skipped + size:
            scratch = host_memory.allocate(skipped + size)
        memory = scratch[skipped : skipped + size]
        self._read(span, memory)
        for copy in span.copies:
            _put(copy, memory, copy.start - span.start)
        if scratch.nbytes <= _KEPT_BYTES:
            self._scratch.append(scratch)

    def _read(self, span: Span, memory: np.ndarray) -> None:
        file, start, stop = span.file, span.start, span.stop
        try:
            count = self._sources.read_into(file, start, memory)
        # TensorStore raises ValueErrors.
        except (*bucket_clients.failures(), ValueError) as error:
            errors.check_open_files(error)
            raise errors.CheckpointError(
                f"{file}: {span.copies[0].tensor} cannot be read at bytes {start}"
                f" to {stop} ({error}); restore the file or your access to it, or use"
                " a different step"
            ) from error
        if count < memory.nbytes:
            end = start + count
            behind = (c for c in span.copies if c.start + c.form.extent > end)
            raise FormatError(
                f"{file}: {next(behind).tensor} is at bytes {start} to {stop}, but"
                f" the file ends at byte {end}; the file is truncated, so restore it"
                " from a good copy"
            )
        if file not in self._sources.virtual:
            self.checks.note(file, start, memory)


def _finished(group: _Group) -> Generator[list[Buffer]]:
    _, buffers, pending = group
    for each in pending:
        each.result()
    yield buffers
    buffers.clear()


class _Room:
    # Memory for requests. A request that needs all of it waits for all other requests.
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
        arithmetic.check_cast(np.array(fill.value), buffer.values.dtype, fill.target)
        buffer.values[boxes.relative(part, buffer.box)] = fill.value


def _put(copy: Copy, memory: np.ndarray, at: int) -> None:
    form, into = copy.form, copy.buffer.values
    stored, scale, shift, view = form.kind
    read = np.ndarray(form.sizes, stored, memory.data, at, form.source)
    read = arithmetic.changed(read, scale, shift, view)
    arithmetic.check_cast(read, into.dtype, copy.buffer.target.name)
    size = into.dtype.itemsize
    strides = [stride * size for stride in form.buffer]
    flat, place = into.reshape(-1).view(np.uint8), copy.element * size
    arithmetic.copy(np.ndarray(form.sizes, into.dtype, flat.data, place, strides), read)


def _parts(
    sizes: tuple[int, ...],
    source: tuple[int, ...],
    buffer: tuple[int, ...],
    kind: tuple[np.dtype, float, float, str],
    limits: Limits,
) -> Iterator[tuple[Form, int, int]]:
    # Cuts a copy into parts within a request's limits and yields them with offsets.
    lengths = _lengths(sizes, source, kind[0].itemsize, limits)
    ranges = [range(0, size, n) for size, n in zip(sizes, lengths, strict=True)]
    for firsts in itertools.product(*ranges):
        parts = zip(firsts, lengths, sizes, strict=True)
        counts = tuple(min(n, size - at) for at, n, size in parts)
        at = sum(map(operator.mul, firsts, source))
        skipped = sum(map(operator.mul, firsts, buffer))
        yield _form(counts, source, buffer, kind), at, skipped


@functools.lru_cache(maxsize=2**12)
def _lengths(
    sizes: tuple[int, ...], source: tuple[int, ...], itemsize: int, limits: Limits
) -> tuple[int, ...]:
    # The lengths of a part, which does not extend along a dim whose gaps are too large
    # to read.
    lengths, extent = [1] * len(sizes), itemsize
    for dim in sorted(range(len(sizes)), key=source.__getitem__):
        if source[dim] - extent > limits.gap_bytes:
            break
        rows = 1 + max(0, limits.span_bytes - extent) // max(1, source[dim])
        lengths[dim] = min(sizes[dim], rows)
        if rows < sizes[dim]:
            break
        extent += source[dim] * (sizes[dim] - 1)
    return tuple(lengths)


@functools.lru_cache(maxsize=2**12)
def _form(
    sizes: tuple[int, ...],
    source: tuple[int, ...],
    buffer: tuple[int, ...],
    kind: tuple[np.dtype, float, float, str],
) -> Form:
    # Joins dims where possible and orders them as in the buffer.
    joined: list[tuple[int, int, int]] = []
    dims = [dim for dim in zip(sizes, source, buffer, strict=True) if dim[0] > 1]
    for size, step, into in sorted(dims, key=lambda dim: (-dim[2], -dim[1])):
        if joined and joined[-1][1:] == (size * step, size * into):
            size *= joined.pop()[0]
        joined.append((size, step, into))
    of_dims = zip(*joined, strict=True) if joined else ((), (), ())
    one, two, three = map(tuple, of_dims)
    return Form(one, two, three, kind)
