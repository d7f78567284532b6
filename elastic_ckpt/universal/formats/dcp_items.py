"""Finds the values of many small files of `torch.save`, each a part of a larger file.

An item of a distributed checkpoint has one tensor: a zip with a pickle and a storage.
Most pickles are equal, and each is decoded once.
"""

from __future__ import annotations

import binascii
import dataclasses
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from etils import epath

from elastic_ckpt.core.boxes import Box
from elastic_ckpt.universal.formats import closed_pickle, torch_names, torch_tensor
from elastic_ckpt.universal.formats.byte_windows import GAP_BYTES, ByteWindows
from elastic_ckpt.universal.formats.dcp_metadata import Item
from elastic_ckpt.universal.formats.format_error import FormatError
from elastic_ckpt.universal.formats.source_budget import SourceBudget
from elastic_ckpt.universal.formats.stored_zip import check_crc
from elastic_ckpt.universal.formats.torch_tensor import Tensor
from elastic_ckpt.universal.formats.zip_directory import Entry, Read, Zip
from elastic_ckpt.universal.stored import Fragment

_WRITER = "PyTorch's distributed checkpoint"
# The directory of a zip and the header of the storage of a larger item are here.
_ENDS_BYTES = 8 << 10
# Smaller items are read whole.
_MOST_WHOLE_BYTES = 2 * _ENDS_BYTES + GAP_BYTES
_BATCH_BYTES = 16 << 20
# The length of a header of safetensors, and its first characters.
_HEADER_BYTES = 10
_PREFIX = "archive/"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """A box of a tensor, and the item that has it.

    Attributes:
      name: of the tensor.
      dtype: of the tensor.
      box: in the tensor.
      item: a part of a file.
    """

    name: str
    dtype: np.dtype
    box: Box
    item: Item


@dataclasses.dataclass(frozen=True, slots=True)
class _ItemZip:
    # Implements `torch_tensor.Zip`, without reading values.
    path: str
    entries: Mapping[str, Entry]

    def entry(self, name: str) -> Entry:
        return self.entries[name]

    def size(self, name: str) -> int | None:
        entry = self.entries.get(name)
        return None if entry is None else entry.size

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        del start, stop
        raise FormatError(f"{self.path} is closed; read {name} by its offset")


class ItemFile:
    """A file of items.

    Args:
      directory: of the checkpoint.
      name: of the file.
      items: all parts of it.
      budget: of the checkpoint.

    Attributes:
      path: of the file.

    Raises:
      FormatError: if the file is missing, or items are outside of it or overlap.
    """

    def __init__(
        self,
        directory: epath.Path,
        name: str,
        items: Sequence[Item],
        budget: SourceBudget,
    ) -> None:
        self._budget = budget
        self.path = str(directory / name)
        self._items = sorted(items, key=lambda item: item.offset)
        self._storages: list[Entry] = []
        # By their pickles; the files that they name are those of the first.
        self._tensors: dict[bytes, Tensor] = {}
        try:
            num_bytes = (directory / name).stat().length
        except FileNotFoundError:
            raise FormatError(
                f"{self.path} is missing; copy the whole checkpoint"
            ) from None
        end = 0
        for item in self._items:
            if item.offset < end:
                with (directory / name).open("rb") as file:
                    _check_header(file.read(_HEADER_BYTES), self.path)
                raise FormatError(f"{self.path} has items that overlap at byte {end}")
            end = item.offset + item.size
            if end > num_bytes:
                raise FormatError(
                    f"{self.path} is cut short: it has {num_bytes} bytes, and an item"
                    f" of {item.size} from {item.offset}"
                )

    def fragments(self, chunks: Sequence[Chunk]) -> Iterator[tuple[Chunk, Fragment]]:
        """The places of the values of chunks that are not empty, in the file's order.

        Raises:
          FormatError: if an item is no zip of one tensor of that shape and type.
        """
        ordered = sorted(chunks, key=lambda chunk: chunk.item.offset)
        batch: list[Chunk] = []
        size = 0
        for chunk in ordered:
            batch.append(chunk)
            size += min(chunk.item.size, _MOST_WHOLE_BYTES)
            if size >= _BATCH_BYTES:
                yield from self._located(batch)
                batch, size = [], 0
        yield from self._located(batch)

    def _located(self, chunks: Sequence[Chunk]) -> Iterator[tuple[Chunk, Fragment]]:
        spans = [span for chunk in chunks for span in _ends(chunk.item)]
        windows = ByteWindows(self.path, spans)
        for chunk in chunks:
            tensor, entry = self._tensor(windows, chunk)
            if (tensor.dtype, tensor.shape) != (chunk.dtype, chunk.box.shape):
                raise FormatError(
                    f"{self.path} has a tensor {tensor.dtype}{list(tensor.shape)} from"
                    f" byte {chunk.item.offset}, and {chunk.name} is listed there as"
                    f" {chunk.dtype}{list(chunk.box.shape)}"
                )
            if chunk.box.volume:
                yield (
                    chunk,
                    Fragment(
                        box=chunk.box,
                        file=self.path,
                        offset=entry.start + tensor.entry_offset,
                        strides=tensor.byte_strides,
                    ),
                )

    def _tensor(self, windows: ByteWindows, chunk: Chunk) -> tuple[Tensor, Entry]:
        item = chunk.item
        place = Zip(begin=item.offset, size=item.size, file=self.path, writer=_WRITER)
        read = _reader(windows, item)
        _check_header(read(item.offset, _HEADER_BYTES), self.path)
        entries = place.entries(read)
        pickle = entries.get(f"{_PREFIX}data.pkl")
        order = entries.get(f"{_PREFIX}byteorder")
        if pickle is None:
            raise FormatError(f"{place} has no tensor of torch.save")
        if order is not None and read(order.start, order.size) != b"little":
            raise FormatError(f"{place} is not little-endian, which alone is read")
        content = read(pickle.start, pickle.size)
        tensor = self._tensors.get(content)
        storage = None if tensor is None else entries.get(tensor.entry)
        if tensor is None or storage is None or storage.size != tensor.entry_bytes:
            if binascii.crc32(content) != pickle.crc:
                raise FormatError(f"{place} is damaged: its pickle has another CRC-32")
            tensor = closed_pickle.decode(
                content,
                file=str(place),
                names=torch_names.NAMES,
                persistent=torch_tensor.storages(_ItemZip(self.path, entries), _PREFIX),
                budget=self._budget,
            )
            if not isinstance(tensor, Tensor):
                raise FormatError(f"{place} has no tensor, but {chunk.name} is one")
            storage = entries[tensor.entry]
            self._tensors[content] = tensor
        self._storages.append(storage)
        return tensor, storage

    def verify(self) -> None:
        """Compares the CRC-32 of the values of all tensors in the file.

        Raises:
          FormatError: if one differs.
        """
        with epath.Path(self.path).open("rb") as file:

            def read(start: int, size: int) -> bytes:
                file.seek(start)
                return file.read(size)

            for entry in self._storages:
                problem = f"{self.path} is damaged: the tensor from byte {entry.start}"
                check_crc(read, entry, problem)


def _check_header(content: bytes, path: str) -> None:
    # Refuses safetensors, whose places are not those of its header.
    if content[8:] == b'{"':
        raise FormatError(
            f"{path} has tensors as safetensors, which are read from separate files;"
            " save with the default serialization_format"
        )


def _ends(item: Item) -> list[tuple[int, int]]:
    # The parts of an item that have all of its headers.
    stop = item.offset + item.size
    if item.size <= _MOST_WHOLE_BYTES:
        return [(item.offset, stop)]
    return [(item.offset, item.offset + _ENDS_BYTES), (stop - _ENDS_BYTES, stop)]


def _reader(windows: ByteWindows, item: Item) -> Read:
    # Takes the bytes of an item from memory.
    if item.size > _MOST_WHOLE_BYTES:
        return windows.read
    content, first = windows.read(item.offset, item.size), item.offset

    def read(start: int, size: int) -> bytes:
        return content[max(0, start - first) : max(0, start - first + size)]

    return read
