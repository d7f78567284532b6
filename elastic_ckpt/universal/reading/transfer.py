"""Carries out a plan: a few threads read its spans, and copy them into buffers.

A span whose bytes are those of the buffers is read straight into these. Any other is
read into memory of its thread first, and copied from there while it is in the cache.
"""

from __future__ import annotations

import collections
import os
import queue
import threading
from collections.abc import Callable, Generator, Sequence

import numpy as np

from elastic_ckpt.core import bucket_clients, errors, host_memory
from elastic_ckpt.universal.formats.format_error import FormatError
from elastic_ckpt.universal.plan.load_plan import LoadPlan
from elastic_ckpt.universal.reading.buffer_memory import BufferMemory
from elastic_ckpt.universal.reading.byte_source import ByteSource, LocalFiles
from elastic_ckpt.universal.reading.in_flight import InFlight

_LOCAL_THREADS = 8
_REMOTE_THREADS = 16
# The most parts of one system call.
_MOST_PARTS = 512
# The most memory that a thread keeps for its next request.
_KEPT_BYTES = 12 * 2**20
# Values are aligned in memory as they are in their file.
_ALIGNMENT = 64


class Transfer:
    """The reads of one plan.

    Args:
      plan: of this host.
      source_of: the source of a file.
      budget_bytes: of the bytes in flight.
      is_staged: whether a buffer is given up once its values are on a device, so that
        its bytes are in flight until then.
      allocate: see `BufferMemory`.
      note: called with each range of a file that was read: its path, its first byte,
        and the memory that has it.
    """

    def __init__(
        self,
        plan: LoadPlan,
        source_of: Callable[[str], ByteSource],
        *,
        budget_bytes: int,
        is_staged: Callable[[int], bool],
        allocate: Callable[[int], np.ndarray] = host_memory.allocate,
        note: Callable[[str, int, Sequence[np.ndarray]], None] | None = None,
    ) -> None:
        self._plan = plan
        self._note = note
        self._num_targets = plan.num_targets
        self._sources = [source_of(file) for file in plan.files]
        self._memory = BufferMemory(plan, allocate=allocate)
        self._is_staged = is_staged
        self.in_flight = InFlight(budget_bytes)
        self._done: queue.SimpleQueue[int | BaseException] = queue.SimpleQueue()
        self._taking = threading.Lock()
        self._next = 0
        self._is_direct = _direct(plan)
        self._request_bytes = _request_bytes(plan, self._is_direct, self._sources)
        # The first copy of each buffer; those that have fills alone have none.
        self._begun = self._first_copies()
        self._new_bytes = self._first_bytes()

    def buffers(self) -> Generator[tuple[int, np.ndarray], None, None]:
        """Yields the number and the values of each buffer of a target once complete.

        The caller calls `free` for a buffer once its values are on a device, and
        closes the generator, which ends the threads, if it does not reach the end.

        Raises:
          CheckpointError: if a file cannot be read or ends too early, or values that
            should be equal differ.
        """
        complete = self._memory.complete_at_once
        for number in complete:
            yield number, self._memory.take(number)
        left = self._num_targets - len(complete)
        if not left:
            return
        remote = any("://" in file for file in self._plan.files)
        most = _REMOTE_THREADS if remote else min(_LOCAL_THREADS, os.cpu_count() or 1)
        threads = [
            threading.Thread(target=self._work, name="relayout", daemon=True)
            for _ in range(min(most, len(self._plan.spans)))
        ]
        for thread in threads:
            thread.start()
        try:
            for _ in range(left):
                done = self._done.get()
                if isinstance(done, BaseException):
                    raise done
                yield done, self._memory.take(done)
                self.in_flight.handed_on(0, completed=1)
        finally:
            self.in_flight.end()
            for thread in threads:
                thread.join()

    def free(self, number: int) -> None:
        """Frees the bytes in flight of a buffer that was yielded."""
        if number in self._begun:
            self.in_flight.handed_on(self._counted_bytes(number))

    def _first_copies(self) -> dict[int, int]:
        # By buffer. The result of a region is due when its first layer is begun.
        numbers, copies = np.unique(self._plan.spans.buffer, return_index=True)
        first = dict(zip(numbers.tolist(), copies.tolist(), strict=True))
        for region in self._plan.regions:
            buffers = (*region.layers, region.buffer)
            first[region.buffer] = min(first[each] for each in buffers if each in first)
        return first

    def _first_bytes(self) -> np.ndarray:
        # The bytes of the buffers that each span is the first for.
        spans, copies = self._plan.spans, list(self._begun.values())
        of_copy = np.searchsorted(spans.first_copy, copies, side="right") - 1
        num_bytes = [self._counted_bytes(number) for number in self._begun]
        new_bytes = np.zeros(len(spans), np.int64)
        np.add.at(new_bytes, of_copy, np.array(num_bytes, np.int64))
        return new_bytes

    def _counted_bytes(self, number: int) -> int:
        # The bytes in flight of a buffer: none if an array takes over its memory.
        if number < self._num_targets and not self._is_staged(number):
            return 0
        buffer = self._plan.buffers[number]
        return buffer.box.volume * buffer.dtype.itemsize

    def _work(self) -> None:
        scratch = _Scratch()
        try:
            while (span := self._take()) is not None:
                self._carry_out(span, scratch)
        except BaseException as error:  # the root of a thread; `buffers` raises it
            self._done.put(error)
        finally:
            for source in set(self._sources):
                source.close()

    def _take(self) -> int | None:
        # The next span, once it fits. Spans are admitted in their order.
        with self._taking:
            span = self._next
            if span == len(self._plan.spans) or not self.in_flight.begin(
                int(self._request_bytes[span]), int(self._new_bytes[span])
            ):
                return None
            self._next += 1
            return span

    def _carry_out(self, span: int, scratch: _Scratch) -> None:
        spans = self._plan.spans
        copies = range(int(spans.first_copy[span]), int(spans.first_copy[span + 1]))
        if not (
            self._is_direct[span] and self._read_into_buffers(span, copies, scratch)
        ):
            self._read_and_copy(span, copies, scratch)
        volumes: collections.Counter[int] = collections.Counter()
        for copy in copies:
            volumes[int(spans.buffer[copy])] += spans.forms[spans.form[copy]].volume
        complete, freed = self._memory.completed(volumes)
        self.in_flight.handed_on(freed)
        self.in_flight.done(int(self._request_bytes[span]), completed=len(complete))
        for number in complete:
            self._done.put(number)

    def _read_into_buffers(self, span: int, copies: range, scratch: _Scratch) -> bool:
        # False if the source reads more than the span, or several parts only as one.
        spans = self._plan.spans
        file = int(spans.file[span])
        start, stop = int(spans.start[span]), int(spans.stop[span])
        whole = self._sources[file].range_of(self._plan.files[file], start, stop)
        if whole != (start, stop):
            return False
        read = sum(spans.forms[spans.form[copy]].extent for copy in copies)
        # Each gap has its own memory: its bytes are checked, too.
        gaps = scratch.memory(stop - start - read)
        parts, at = [], start
        for copy in copies:
            form, first = spans.forms[spans.form[copy]], int(spans.source[copy])
            if first > at:
                parts.append(gaps[: first - at])
                gaps = gaps[first - at :]
            memory = self._memory.bytes_of(int(spans.buffer[copy]))
            place = int(spans.element[copy]) * form.dtype.itemsize
            parts.append(memory[place : place + form.extent])
            at = first + form.extent
        self._read(span, start, parts)
        return True

    def _read_and_copy(self, span: int, copies: range, scratch: _Scratch) -> None:
        spans = self._plan.spans
        file = int(spans.file[span])
        start, stop = self._sources[file].range_of(
            self._plan.files[file], int(spans.start[span]), int(spans.stop[span])
        )
        memory = scratch.memory(stop - start, offset=start)
        self._read(span, start, [memory])
        for copy in copies:
            form = spans.forms[spans.form[copy]]
            values = np.ndarray(
                form.sizes,
                form.dtype,
                memory.data,
                int(spans.source[copy]) - start,
                form.source_strides,
            )
            buffer, element = int(spans.buffer[copy]), int(spans.element[copy])
            self._memory.put(buffer, element, form, values)

    def _read(self, span: int, start: int, parts: Sequence[np.ndarray]) -> None:
        number = int(self._plan.spans.file[span])
        file = self._plan.files[number]
        expected = sum(part.nbytes for part in parts)
        try:
            count = self._sources[number].read_into(file, start, parts)
        # TensorStore raises ValueErrors.
        except (*bucket_clients.failures(), ValueError) as error:
            raise errors.CheckpointError(
                f"{file}: {self._tensor_at(span, start)} cannot be read at bytes"
                f" {start} to {start + expected} ({error}); restore the file or the"
                " access to it, or use another step"
            ) from error
        if count < expected:
            raise FormatError(
                f"{file}: {self._tensor_at(span, start + count)} is at bytes {start} to"
                f" {start + expected}, but the file ends after {start + count}; it is"
                " cut short, restore it from a copy"
            )
        if self._note is not None:
            self._note(file, start, parts)

    def _tensor_at(self, span: int, offset: int) -> str:
        # The name of the stored tensor of a span that has bytes behind `offset`.
        spans = self._plan.spans
        for copy in range(int(spans.first_copy[span]), int(spans.first_copy[span + 1])):
            extent = spans.forms[spans.form[copy]].extent
            if int(spans.source[copy]) + extent > offset:
                break
        return self._plan.tensors[int(spans.tensor[copy])].name


class _Scratch:
    """The memory of a thread for what it reads."""

    def __init__(self) -> None:
        self._memory = host_memory.allocate(0)

    def memory(self, num_bytes: int, *, offset: int = 0) -> np.ndarray:
        """Memory of so many bytes, aligned as `offset` is; used until the next call."""
        skipped = offset % _ALIGNMENT
        memory = self._memory
        if memory.nbytes < skipped + num_bytes:
            memory = host_memory.allocate(skipped + num_bytes)
            if memory.nbytes <= _KEPT_BYTES:
                self._memory = memory
        return memory[skipped : skipped + num_bytes]


def _direct(plan: LoadPlan) -> np.ndarray:
    # Which spans can be read into buffers without a copy, bool `[s]`.
    spans = plan.spans
    if not len(spans):
        return np.zeros(0, bool)
    dtypes = list(dict.fromkeys(buffer.dtype for buffer in plan.buffers))
    of_buffer = np.array([dtypes.index(each.dtype) for each in plan.buffers], np.int64)
    of_form = [
        dtypes.index(form.dtype) if form.contiguous and form.dtype in dtypes else -1
        for form in spans.forms
    ]
    alike = np.array(of_form, np.int64)[spans.form] == of_buffer[spans.buffer]
    extents = np.array([form.extent for form in spans.forms], np.int64)[spans.form]
    stops = spans.source + extents
    # Copies that overlap in the file have their bytes twice.
    plain = alike.copy()
    plain[1:] &= spans.source[1:] >= stops[:-1]
    first = spans.first_copy[:-1]
    plain[first] = alike[first]
    return np.logical_and.reduceat(plain, first) & (
        np.diff(spans.first_copy) <= _MOST_PARTS // 2
    )


def _request_bytes(
    plan: LoadPlan, is_direct: np.ndarray, sources: Sequence[ByteSource]
) -> np.ndarray:
    # The memory that each span takes beside the buffers, int64 `[s]`.
    spans = plan.spans
    if not len(spans):
        return np.zeros(0, np.int64)
    sizes = spans.stop - spans.start
    extents = np.array([form.extent for form in spans.forms], np.int64)[spans.form]
    gaps = sizes - np.add.reduceat(extents, spans.first_copy[:-1])
    taken = np.where(is_direct, gaps, sizes)
    is_local = np.array([isinstance(each, LocalFiles) for each in sources], bool)
    for span in np.flatnonzero(~is_local[spans.file]).tolist():
        number = int(spans.file[span])
        file, source = plan.files[number], sources[number]
        planned = int(spans.start[span]), int(spans.stop[span])
        read = source.range_of(file, *planned)
        sizes[span] = read[1] - read[0]
        taken[span] = source.request_bytes(
            file, int(sizes[span]), is_direct=bool(is_direct[span]) and read == planned
        )
    computed = [
        (form.scale, form.shift, form.view) != (1, 0, "") for form in spans.forms
    ]
    scaled = np.logical_or.reduceat(
        np.array(computed, bool)[spans.form], spans.first_copy[:-1]
    )
    return taken + np.where(scaled, 4 * sizes, 0)
