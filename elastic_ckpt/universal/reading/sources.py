"""Sources of tensor bytes: files, objects in a bucket, and virtual files.

A virtual file is a box of a tensor that is computed when it is read: decoded chunks of
TensorStore, a verified box of a step, or a part of a derived tensor. Its bytes are the
elements in row-major order.

A format's checksums are compared while bytes are read. A CRC-32 covers a whole entry of
a file, but a host may need only some of the entry's bytes. A range's CRC can be
computed from its parts' CRCs (as in zlib's `crc32_combine`, a product of polynomials
modulo the CRC-32 polynomial), so only the entry's remaining bytes must also be read.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent import futures
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from elastic_ckpt.core import box_cover, bucket_clients, errors
from elastic_ckpt.core.boxes import Box, Boxes
from elastic_ckpt.steps.manifest import Contents
from elastic_ckpt.universal.factors import row_major
from elastic_ckpt.universal.formats import checkpoint
from elastic_ckpt.universal.formats.checkpoint import Fragment, StoredTensor

if TYPE_CHECKING:
    import tensorstore as ts

    from elastic_ckpt.checkpoint.host.verified_read import VerifiedReader
import bisect
import zlib

from elastic_ckpt.universal.formats import files
from elastic_ckpt.universal.formats.checkpoint import Checksum

# The maximum size of a virtual file, unless a single chunk is larger.
PART_BYTES = 2**24
# TensorStore's cache of OCDBT's index nodes.
_INDEX_BYTES = 2**25
_CHUNKS = "cache_pool#chunks"
# The number of arrays to open concurrently because each waits for storage.
_OPENED_AT_ONCE = 256
_OPEN_FILES = 64
_PIECE_BYTES = 1 << 24
_POLYNOMIAL = 0xEDB88320
# The number of entries to compare concurrently.
_THREADS = 8


class Limits(NamedTuple):
    """The limits of a request to one kind of storage.

    Attributes:
      gap_bytes: the maximum gap within a request; reading the gap takes less time than
        a second request.
      span_bytes: the maximum size of a request, unless a single row is larger.
      memory: the extra memory of a request, as a multiple of its size. Bucket clients,
        for example, return bytes in memory of their own.
    """

    gap_bytes: int
    span_bytes: int
    memory: int


# A request to a local file takes as long as reading a few pages; a request to a bucket
# takes tens of milliseconds. A virtual file is read in one request.
LOCAL = Limits(gap_bytes=2**14, span_bytes=2**23, memory=0)
REMOTE = Limits(gap_bytes=2**20, span_bytes=2**24, memory=1)
_VIRTUAL = Limits(gap_bytes=2**62, span_bytes=2**62, memory=4)


class VirtualFile(NamedTuple):
    """A box of a tensor that is computed when it is read.

    Attributes:
      make: a function that writes the elements in a box of the tensor into uint8
        memory.
      is_whole: whether the box can only be read whole.
    """

    box: Box
    itemsize: int
    make: Callable[[Box, np.ndarray], None]
    is_whole: bool = False


class Sources:
    """Reads the bytes of a checkpoint's tensors; any number of threads may use it.

    `virtual` has the virtual files, keyed by their names in fragments.
    """

    def __init__(
        self, tensors: Sequence[StoredTensor], virtual: Mapping[str, VirtualFile]
    ) -> None:
        self.tensors, self.virtual = tensors, virtual
        self._opened = functools.lru_cache(_OPEN_FILES)(_File)

    def limits(self, file: str) -> Limits:
        """The limits of requests to a file."""
        if file in self.virtual:
            return _VIRTUAL
        return REMOTE if "://" in file else LOCAL

    def range_of(self, file: str, start: int, stop: int) -> tuple[int, int]:
        """The range to read if the bytes from `start` to `stop` are needed."""
        virtual = self.virtual.get(file)
        if virtual is None:
            return start, stop
        _, start, stop = _rows(virtual, start, stop)
        return start, stop

    def read_into(self, file: str, start: int, memory: np.ndarray) -> int:
        """Fills uint8 memory with a range that `range_of` returned.

        Returns:
          The number of bytes read, which is less than the size of the memory if the
          file ends early.

        Raises:
          OSError: if the file cannot be read. Any of `bucket_clients.failures`, or a
            ValueError from TensorStore, is also possible.
        """
        virtual = self.virtual.get(file)
        if virtual is not None:
            box, _, _ = _rows(virtual, start, start + memory.nbytes)
            virtual.make(box, memory)
            return memory.nbytes
        if "://" in file:
            system, path = bucket_clients.opened(file)
            content = system.cat_file(path, start=start, end=start + memory.nbytes)
            memory[: len(content)] = np.frombuffer(content, np.uint8)
            return len(content)
        opened = self._opened(file)
        done = 0
        while done < memory.nbytes:
            count = os.preadv(opened.descriptor, [memory[done:].data], start + done)
            if not count:
                break
            done += count
        return done

    def close(self) -> None:
        """Closes the files."""
        self._opened.cache_clear()


class _File:
    # Stays open while it is referenced.
    def __init__(self, path: str) -> None:
        self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self.descriptor)


def encoded(
    tensors: Sequence[StoredTensor],
    used: Iterable[int],
    virtual: dict[str, VirtualFile],
) -> list[StoredTensor]:
    """Adds fragments to tensors with encoded bytes, which TensorStore decodes.

    While TensorStore decodes a chunk, both the encoded and the decoded chunk are in
    memory. Chunks are not cached.

    Opens only the tensors whose indices are in `used`, and adds their files to
    `virtual`.

    Raises:
      CheckpointError: if an array cannot be opened or contradicts its tensor.
    """
    tensors = list(tensors)
    numbers = [number for number in used if tensors[number].spec is not None]
    for number, array in zip(numbers, _arrays(tensors, numbers), strict=True):
        tensor, dtype = tensors[number], array.dtype.numpy_dtype
        if tuple(array.shape) != tensor.shape or dtype != tensor.dtype:
            raise errors.CheckpointError(
                f"{tensor.name} is {dtype.name} {list(array.shape)} in its array but"
                f" {tensor.dtype.name} {list(tensor.shape)} in the checkpoint's"
                " metadata; the checkpoint is damaged, so use a different step"
            )
        chunk = array.chunk_layout.read_chunk.shape or array.shape
        chunk = [
            min(length or size, max(1, size))
            for length, size in zip(chunk, tensor.shape, strict=True)
        ]
        make = functools.partial(_decode, array)
        tensors[number] = in_parts(number, tensor, chunk, make, virtual)
    return tensors


def in_parts(
    number: int,
    tensor: StoredTensor,
    chunk: Sequence[int],
    make: Callable[[Box, np.ndarray], None],
    virtual: dict[str, VirtualFile],
) -> StoredTensor:
    """Adds fragments to a tensor, in virtual files of one or more chunks each.

    `make` writes the elements in a box into uint8 memory.
    """
    itemsize = tensor.dtype.itemsize
    lengths = list(chunk)
    for dim in reversed(range(len(lengths))):
        most = PART_BYTES // max(1, int(np.prod(lengths, dtype=object)) * itemsize)
        lengths[dim] = min(tensor.shape[dim], lengths[dim] * max(1, most))
        if lengths[dim] < tensor.shape[dim]:
            break
    ranges = [
        range(0, size, max(1, length))
        for size, length in zip(tensor.shape, lengths, strict=True)
    ]
    fragments: list[Fragment] = []
    for start in itertools.product(*ranges):
        ends = zip(start, lengths, tensor.shape, strict=True)
        box = Box(start=start, stop=tuple(min(a + n, size) for a, n, size in ends))
        file = f"{number}: {tensor.name}{box}"
        virtual[file] = VirtualFile(box, itemsize, make)
        strides = row_major(box.shape, itemsize)
        fragments.append(Fragment(box=box, file=file, offset=0, strides=strides))
    return dataclasses.replace(tensor, fragments=tuple(fragments), spec=None)


def _arrays(
    tensors: Sequence[StoredTensor], numbers: Sequence[int]
) -> Iterator[ts.TensorStore]:
    if not numbers:
        return
    import tensorstore as ts

    limits = {
        "cache_pool": {"total_bytes_limit": _INDEX_BYTES},
        _CHUNKS: {"total_bytes_limit": 0},
        "data_copy_concurrency": {"limit": os.cpu_count() or 1},
    }
    context = ts.Context(limits)
    for first in range(0, len(numbers), _OPENED_AT_ONCE):
        batch = [tensors[n] for n in numbers[first : first + _OPENED_AT_ONCE]]
        opening = [
            ts.open(
                {**(each.spec or {}), "cache_pool": _CHUNKS},
                open=True,
                read=True,
                context=context,
            )
            for each in batch
        ]
        for tensor, future in zip(batch, opening, strict=True):
            try:
                yield future.result()
            # TensorStore also raises ValueErrors.
            except (OSError, ValueError) as error:
                errors.check_open_files(error)
                raise errors.CheckpointError(
                    f"{tensor.name} cannot be opened ({str(error).splitlines()[0]});"
                    " use a different step, or restore the checkpoint from a good copy"
                ) from error


def _decode(array: ts.TensorStore, box: Box, memory: np.ndarray) -> None:
    import tensorstore as ts

    values = memory.view(array.dtype.numpy_dtype).reshape(box.shape)
    place = tuple(map(slice, box.start, box.stop))
    ts.array(values).write(array[place]).result()


def _rows(virtual: VirtualFile, start: int, stop: int) -> tuple[Box, int, int]:
    # The smallest box of whole rows that contains a byte range of a virtual file, and
    # that box's byte range.
    box, first, base = virtual.box, [], 0
    strides = row_major(box.shape, virtual.itemsize)
    if virtual.is_whole or not strides:
        return box, 0, box.volume * virtual.itemsize
    for dim, stride in enumerate(strides):
        row, after = (start - base) // stride, -(-(stop - base) // stride)
        rest = dim + 1
        if after - row > 1 or rest == len(strides):
            break
        first.append(row)
        base += row * stride
    lead = tuple(at + n for at, n in zip(box.start, first, strict=False))
    at = box.start[dim]
    rows = Box(
        start=(*lead, at + row, *box.start[rest:]),
        stop=(*(n + 1 for n in lead), at + after, *box.stop[rest:]),
    )
    return rows, base + row * stride, base + after * stride


def saved_boxes(
    saved: VerifiedReader, tree: str
) -> tuple[list[StoredTensor], dict[str, VirtualFile]]:
    """A step tree's leaves with fragments, and the fragments' virtual files.

    Each file is a saved box. Because the box's digest covers all of it, the box is read
    whole, from the nearest tier with a good copy.
    """
    made: list[StoredTensor] = []
    files: dict[str, VirtualFile] = {}
    contents = saved.table.contents
    for number, tensor in zip(
        _numbers(contents, tree), tensors_of(contents, tree), strict=True
    ):
        itemsize, rank = tensor.dtype.itemsize, len(tensor.shape)
        covered: list[Box] = []
        fragments: list[Fragment] = []
        for item in saved.of_leaf(number):
            box, file = saved.table.box(item), saved.place(item)
            make = functools.partial(_verified, saved, item)
            files[file] = VirtualFile(box, itemsize, make, is_whole=True)
            parts = Boxes.from_boxes([box], rank=rank)
            if number in saved.table.overlapping:
                # An element in more than one box is read from the first.
                parts = box_cover.gaps(box, Boxes.from_boxes(covered, rank=rank))
                covered.append(box)
            strides = row_major(box.shape, itemsize)
            for part in map(parts.__getitem__, range(len(parts))):
                skips = zip(part.start, box.start, strides, strict=True)
                offset = sum((a - b) * stride for a, b, stride in skips)
                fragments.append(
                    Fragment(box=part, file=file, offset=offset, strides=strides)
                )
        checkpoint.check_cover(
            tensor.shape, [each.box for each in fragments], tensor.name
        )
        made.append(dataclasses.replace(tensor, fragments=tuple(fragments)))
    return made, files


def _verified(saved: VerifiedReader, item: int, _: Box, memory: np.ndarray) -> None:
    saved.read_into(item, memory)


def tensors_of(contents: Contents, tree: str) -> list[StoredTensor]:
    """A step tree's leaves, without fragments."""
    leaves = [contents.leaves[number] for number in _numbers(contents, tree)]
    return [
        StoredTensor(
            name=leaf.path.partition("/")[2],
            dtype=np.dtype(leaf.dtype),
            shape=checkpoint.checked_shape(leaf.shape, leaf.path),
        )
        for leaf in leaves
    ]


def _numbers(contents: Contents, tree: str) -> list[int]:
    # The indices of a tree's leaves.
    paths = enumerate(leaf.path for leaf in contents.leaves)
    return [number for number, path in paths if path.partition("/")[0] == tree]


class Checks:
    """Compares the checksums of the tensors that are read.

    The hosts of a world share the work: one host compares each entry, and reads all of
    it even if its devices need little of it. Any thread may call `note`.

    Args:
      checksums: a function that returns the checksums in a file; see `Checkpoint`.
      tensors: the tensors that any host reads.
      host: this host's index and the number of hosts.
    """

    def __init__(
        self,
        checksums: Callable[[str], Sequence[Checksum]],
        tensors: Iterable[StoredTensor],
        host: tuple[int, int],
    ) -> None:
        self._tensors, self._host = tensors, host
        self._listed = functools.cache(lambda file: sorted(checksums(file)))
        # The CRCs of the ranges that were read, by file and entry.
        self._read: dict[tuple[str, Checksum], dict[tuple[int, int], int]] = {}

    def note(self, file: str, start: int, memory: np.ndarray) -> None:
        """Records uint8 bytes that were read from a file at `start`.

        Raises:
          FormatError: if checksums cannot be read.
        """
        stop = start + memory.nbytes
        for entry in self._of_host(file, start, stop):
            low, high = max(start, entry.start), min(stop, entry.stop)
            crc = zlib.crc32(memory[low - start : high - start].data)
            self._read.setdefault((file, entry), {})[low, high] = crc

    def finish(self) -> None:
        """Compares the checksums of this host's entries.

        Raises:
          FormatError: if a checksum does not match.
        """
        with futures.ThreadPoolExecutor(_THREADS, thread_name_prefix="check") as pool:
            try:
                for _ in pool.map(self._compare, self.entries()):
                    pass
            finally:
                pool.shutdown(cancel_futures=True)

    def _compare(self, of_file: tuple[str, Checksum]) -> None:
        file, entry = of_file
        at, crc, parts = entry.start, 0, self._read.pop(of_file, {})
        for (start, stop), part in sorted(parts.items()):
            # The rest of a part that overlaps an earlier one is read again.
            if start >= at:
                crc = _continued(file, at, start, crc)
                crc = _times(_power(stop - start), crc) ^ part
                at = stop
        crc = _continued(file, at, entry.stop, crc)
        if crc != entry.crc:
            found = f"the CRC-32 {crc:08x}, not {entry.crc:08x}"
            raise checkpoint.damaged(file, entry.start, entry.stop, found)

    def entries(self) -> Iterator[tuple[str, Checksum]]:
        """The files and entries whose checksums this host compares."""
        ranges: dict[str, list[tuple[int, int]]] = {}
        for tensor in self._tensors:
            for each in filter(lambda each: self._listed(each.file), tensor.fragments):
                steps = zip(each.box.shape, each.strides, strict=True)
                extent = sum((size - 1) * stride for size, stride in steps)
                stop = each.offset + extent + tensor.dtype.itemsize
                ranges.setdefault(each.file, []).append((each.offset, stop))
        for file, of_file in ranges.items():
            found = (entry for a, b in of_file for entry in self._of_host(file, a, b))
            for entry in dict.fromkeys(found):
                yield file, entry

    def _of_host(self, file: str, start: int, stop: int) -> list[Checksum]:
        # This host's entries that overlap a range of a file.
        listed, (host, hosts) = self._listed(file), self._host
        first = bisect.bisect_right(listed, start, key=lambda entry: entry.stop)
        after = bisect.bisect_left(listed, stop, key=lambda entry: entry.start)
        # Hashes the base name because hosts may have the same files in different
        # directories.
        turn = host - zlib.crc32(os.path.basename(file).encode()) - first
        return listed[first + turn % hosts : after : hosts]


def _continued(file: str, start: int, stop: int, crc: int) -> int:
    # Reads a range that was not read before, and continues a CRC over it.
    if start < stop:
        with files.opened(file) as content:
            content.seek(start)
            for at in range(start, stop, _PIECE_BYTES):
                crc = zlib.crc32(content.read(min(_PIECE_BYTES, stop - at)), crc)
    return crc


@functools.lru_cache(maxsize=2**14)
def _power(num_bytes: int) -> int:
    # x to the number of bits, modulo the polynomial.
    power, square, rest = 1 << 31, 1 << 23, num_bytes
    while rest:
        if rest & 1:
            power = _times(power, square)
        square, rest = _times(square, square), rest >> 1
    return power


def _times(one: int, other: int) -> int:
    product, bit = 0, 1 << 31
    while bit:
        if one & bit:
            product ^= other
        other = (other >> 1) ^ _POLYNOMIAL if other & 1 else other >> 1
        bit >>= 1
    return product
