"""Finds the values of many small files of `torch.save`, each a part of a larger file.

An item of a distributed checkpoint has one tensor: a zip with a pickle and a storage.
Items of a model differ in little but their values, so one is parsed and others of its
size are compared with it: all that was parsed must be equal, but for checksums.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from etils import epath

from elastic_ckpt.universal.formats import (
    plain_pickle,
    source_files,
    stored_zip,
    torch_file,
)
from elastic_ckpt.universal.formats.format_error import FormatError
from elastic_ckpt.universal.formats.source_budget import SourceBudget
from elastic_ckpt.universal.formats.stored_zip import ZipEntry
from elastic_ckpt.universal.stored import Checksum

_WRITER = "PyTorch's distributed checkpoint"
# The directory of a zip and the header of the storage of a larger item are here.
_ENDS_BYTES = 8 << 10
# Smaller items are read whole.
_MOST_WHOLE_BYTES = 2 * _ENDS_BYTES + source_files.GAP_BYTES
_BATCH_BYTES = 16 << 20
# The length of a header of safetensors, and its first characters.
_HEADER_BYTES = 10
_PREFIX = "archive/"
_CRC_BYTES = 4
# Of headers of entries: the first bytes, and where CRC-32 and sizes are.
_LOCAL, _LOCAL_CRC, _LOCAL_LENGTHS = b"PK\x03\x04", 14, 26
_CENTRAL, _CENTRAL_CRC, _CENTRAL_BYTES = b"PK\x01\x02", 16, 46
_SERIALIZATION = f"{_PREFIX}.data/serialization_id"


class Item(NamedTuple):
    """A part of a file: its first byte, and its size."""

    offset: int
    size: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Located:
    """The tensor of an item.

    Attributes:
      dtype: of its elements.
      shape: in elements.
      view: see `StoredTensor.view`.
      offset: of its first element, from the first byte of the item.
      strides: bytes from an element to the next, by dim.
      storage: that has its values, from the first byte of the item.
    """

    dtype: np.dtype
    shape: tuple[int, ...]
    view: str
    offset: int
    strides: tuple[int, ...]
    storage: ZipEntry


class _Ends:
    """The content of an item, or its beginning and its end if it is large."""

    def __init__(self, content: bytes, item: Item) -> None:
        self.content = content
        is_whole = item.size <= _MOST_WHOLE_BYTES
        self._head = content if is_whole else content[:_ENDS_BYTES]
        self._tail = b"" if is_whole else content[_ENDS_BYTES:]
        # The first byte of the item that is in the tail.
        self._tail_start = item.size - len(self._tail)

    def read(self, start: int, size: int) -> bytes:
        """Bytes of the item; fewer, if the part that has the first ends before."""
        if start >= self._tail_start:
            start -= self._tail_start
            return self._tail[start : start + size]
        return self._head[start : start + size]

    def in_head(self, start: int) -> int:
        """The place, which must be in the beginning.

        Raises:
          ValueError: if it is not.
        """
        if start > len(self._head):
            raise ValueError(f"byte {start} is behind the beginning")
        return start


class _Template:
    """What items of a size have in common, and the tensor that they have."""

    def __init__(
        self, ends: _Ends, entries: Mapping[str, ZipEntry], name: str, tensor: Located
    ) -> None:
        self.tensor = tensor
        content = ends.content
        storage = ends.in_head(entries[name].start)
        header = content.rindex(_LOCAL, 0, storage)
        masked = [(header + _LOCAL_CRC, header + _LOCAL_LENGTHS)]
        self._crc = _central(content, name) + _CENTRAL_CRC
        for each in (name, _SERIALIZATION):
            if each in entries:
                at = _central(content, each) + _CENTRAL_CRC
                masked.append((at, at + _CRC_BYTES))
        # Values, and entries of no interest, lie before the directory.
        masked.append((storage, _central(content, next(iter(entries)))))
        self._parts = []
        at = 0
        for start, stop in sorted(masked):
            self._parts.append((at, start, content[at:start]))
            at = stop
        self._parts.append((at, len(content), content[at:]))

    def fits(self, content: bytes) -> bool:
        """Whether an item of the same size has the same tensor."""
        return all(content[a:b] == part for a, b, part in self._parts)

    def crc(self, content: bytes) -> int:
        """The CRC-32 of the storage of an item that fits."""
        return int.from_bytes(content[self._crc : self._crc + _CRC_BYTES], "little")


def _central(content: bytes, name: str) -> int:
    # Where the directory has an entry, whose names come behind all others.
    at = content.rindex(name.encode()) - _CENTRAL_BYTES
    if content[max(0, at) : at + len(_CENTRAL)] != _CENTRAL:
        raise ValueError(f"{name} is not found in the directory")
    return at


class ItemFile:
    """A file of items.

    Args:
      path: of the file.
      items: all parts of it, the first byte and the size of each, int64 `[n, 2]`.
      budget: of the checkpoint.

    Attributes:
      path: of the file.

    Raises:
      FormatError: if the file is missing, or items are outside of it or overlap.
    """

    def __init__(
        self, path: epath.Path, items: np.ndarray, budget: SourceBudget
    ) -> None:
        self._budget = budget
        self.path = str(path)
        # By size of the item.
        self._templates: dict[int, _Template] = {}
        # By their pickles.
        self._rows: dict[bytes, list[Any]] = {}
        self._checksums: list[tuple[int, int, int]] = []
        try:
            num_bytes = path.stat().length
        except FileNotFoundError:
            raise FormatError(
                f"{self.path} is missing; copy the whole checkpoint"
            ) from None
        # Sums of large numbers are no numbers from 0 up.
        ends = items.sum(axis=1)
        outside = np.flatnonzero((ends > num_bytes) | (ends < 0))
        if len(outside):
            offset, size = items[outside[0]].tolist()
            raise FormatError(
                f"{self.path} is cut short: it has {num_bytes} bytes, and an item of"
                f" {size} from {offset}"
            )
        order = np.lexsort((items[:, 1], items[:, 0]))
        overlaps = np.flatnonzero(items[order[1:], 0] < ends[order[:-1]])
        if len(overlaps):
            with path.open("rb") as file:
                _check_header(file.read(_HEADER_BYTES), self.path)
            at = ends[order[overlaps[0]]]
            raise FormatError(f"{self.path} has items that overlap at byte {at}")

    def located(self, items: Sequence[Item]) -> Iterator[Located]:
        """The tensors of items, which are ordered by their first bytes.

        Raises:
          FormatError: if an item is no zip of one tensor.
        """
        batch: list[Item] = []
        size = 0
        for item in items:
            batch.append(item)
            size += min(item.size, _MOST_WHOLE_BYTES)
            if size >= _BATCH_BYTES:
                yield from self._batch(batch)
                batch, size = [], 0
        yield from self._batch(batch)

    def checksums(self) -> Sequence[Checksum]:
        """The CRC-32 of the storages of all items; none if it was written without."""
        if not any(crc for _, _, crc in self._checksums):
            return ()
        return [Checksum(*each) for each in self._checksums]

    def _batch(self, items: Sequence[Item]) -> Iterator[Located]:
        spans = [span for item in items for span in _spans(item)]
        windows = source_files.ByteWindows(self.path, spans)
        for item in items:
            template = self._templates.get(item.size)
            content = _content(windows, item)
            if template is not None and template.fits(content):
                tensor, crc = template.tensor, template.crc(content)
            else:
                tensor = self._parsed(item, _Ends(content, item))
                crc = tensor.storage.crc
            start = item.offset + tensor.storage.start
            if tensor.storage.size:
                self._checksums.append((start, start + tensor.storage.size, crc))
            yield tensor

    def _parsed(self, item: Item, ends: _Ends) -> Located:
        place = f"{self.path} (from byte {item.offset})"
        _check_header(ends.content[:_HEADER_BYTES], self.path)
        entries = stored_zip.entries(
            ends.read,
            begin=0,
            size=item.size,
            stored_bytes=item.size,
            place=place,
            writer=_WRITER,
        )
        pickle = entries.get(f"{_PREFIX}data.pkl")
        order = entries.get(f"{_PREFIX}byteorder")
        if pickle is None:
            raise FormatError(f"{place} has no tensor of torch.save")
        if order is not None and ends.read(order.start, order.size) != b"little":
            raise FormatError(f"{place} is not little-endian, which alone is read")
        content = ends.read(pickle.start, pickle.size)
        has_crc = any(each.crc for each in entries.values())
        if has_crc and zlib.crc32(content) != pickle.crc:
            raise FormatError(f"{place} is damaged: its pickle has another CRC-32")
        tensor = self._tensor(place, content, entries)
        located = Located(
            dtype=tensor.dtype,
            shape=tensor.shape,
            view=tensor.view,
            offset=tensor.file_offset,
            strides=tensor.byte_strides,
            storage=tensor.entry,
        )
        names = [name for name, each in entries.items() if each == tensor.entry]
        if order is None or order.start < tensor.entry.start:
            try:
                self._templates[item.size] = _Template(ends, entries, names[0], located)
            except ValueError:
                # Another writer; items like this one are parsed.
                self._templates.pop(item.size, None)
        return located

    def _tensor(
        self, place: str, content: bytes, entries: Mapping[str, ZipEntry]
    ) -> torch_file.Tensor:
        row = self._rows.get(content)
        if row is None:
            rows: list[Any] = []
            value = plain_pickle.value(
                content,
                file=place,
                budget=self._budget,
                names=torch_file.NAMES,
                tensor=lambda each: rows.append(each) or _ROW,
            )
            if value is not _ROW:
                raise FormatError(f"{place} has no tensor, but one is listed there")
            row = self._rows[content] = rows[0]
        make = torch_file.tensor_of(self.path, entries, _PREFIX, with_views=True)
        try:
            return make(row)
        except ValueError as error:
            raise FormatError(f"{place} has an invalid tensor ({error})") from None


_ROW = object()


def _check_header(content: bytes, path: str) -> None:
    # Refuses safetensors, whose places are not those of its header.
    if content[8:] == b'{"':
        raise FormatError(
            f"{path} has tensors as safetensors, which are read from separate files;"
            " save with the default serialization_format"
        )


def _content(windows: source_files.ByteWindows, item: Item) -> bytes:
    if item.size <= _MOST_WHOLE_BYTES:
        return windows.read(item.offset, item.size)
    head, tail = (windows.read(a, b - a) for a, b in _spans(item))
    return head + tail


def _spans(item: Item) -> list[tuple[int, int]]:
    # The parts of an item that have all of its headers.
    stop = item.offset + item.size
    if item.size <= _MOST_WHOLE_BYTES:
        return [(item.offset, stop)]
    return [(item.offset, item.offset + _ENDS_BYTES), (stop - _ENDS_BYTES, stop)]
