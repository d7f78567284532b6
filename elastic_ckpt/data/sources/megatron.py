"""Megatron's indexed datasets: tokens in a `.bin` file, their places in an `.idx`.

An index (`megatron.core.datasets.indexed_dataset`) has a magic number, its version, the
type of the tokens, the numbers of sequences and of documents, and then arrays: the
length of each sequence, its offset in the `.bin` file, and the first sequence of each
document. Only the parts that a reader needs are read.
"""

from __future__ import annotations

import dataclasses
import functools
import struct
from collections.abc import Iterator
from typing import TYPE_CHECKING, BinaryIO, NamedTuple

import numpy as np

from elastic_ckpt.core import errors
from elastic_ckpt.data import units
from elastic_ckpt.data.sources import arrow, files, kept_blocks, offset_index, source

if TYPE_CHECKING:
    import pyarrow as pa

COLUMN = "tokens"
_MAGIC = b"MMIDIDX\x00\x00"
_VERSION = 1
# Magic number, version, type, sequences, and documents with one after the last.
_HEADER = struct.Struct("<9sQBQQ")
_TYPES: dict[int, type[np.generic]] = {
    1: np.uint8,
    2: np.int8,
    3: np.int16,
    4: np.int32,
    5: np.int64,
    8: np.uint16,
}
# About how many bytes of documents are read together.
_RUN_BYTES = 256 * 1024


@dataclasses.dataclass(frozen=True, kw_only=True)
class Megatron(kept_blocks.ColumnFiles):
    """Megatron's `.bin` files as a source, each with its `.idx` beside it.

    A block is 1,024 documents. An element has one column, the tokens of a document, of
    the type that the file has. The files have no checksums: an index is checked to be
    whole, and to lie within its `.bin` file.

    Attributes:
      files: the paths or URIs of the `.bin` files.
      columns: the name of the only column, by default `tokens`.
    """

    file_type = "megatron"

    def __post_init__(self) -> None:
        super().__post_init__()
        for file in self.files:
            if not file.endswith(".bin"):
                raise errors.ConfigError(
                    f"Megatron: {file} is no .bin file; name those, each of which has"
                    " an .idx file beside it"
                )

    def index(self, file: str) -> source.FileIndex:
        """The number of documents, from the beginning of the index."""
        content, header = files.content(file), _header(file)
        walk = functools.partial(_walk, header)
        index = offset_index.index("megatron", _index_of(file), walk)
        of_index = index.content
        version = content.version and f"{content.version} {of_index.version}"
        # An index of several modalities has a byte more for each sequence.
        sizes = {header.num_index_bytes, header.num_index_bytes + header.num_sequences}
        if of_index.num_bytes not in sizes:
            raise errors.DataError(
                f"{_index_of(file)}: cut short, or damaged: {of_index.num_bytes} of"
                f" {header.num_index_bytes} bytes; restore it from a copy"
            )
        end = _end(file, header)
        if end != content.num_bytes:
            problem = "cut short" if end > content.num_bytes else "of another index"
            raise errors.DataError(
                f"{file}: {problem}, {content.num_bytes} of {end} bytes that its index"
                " names; restore both from a copy, and join files by Megatron's"
                " tools/merge_datasets.py"
            )
        return source.FileIndex(
            content=dataclasses.replace(
                content.including(of_index.digest), version=version
            ),
            block_records=index.block_records,
        )

    def read_batches(
        self, unit: units.Unit, skip: int, *, tokens: str = ""
    ) -> Iterator[kept_blocks.Picked]:
        """See `ColumnFiles`."""
        del tokens
        arrow.library()
        file = self.files[unit.file]
        begin = unit.block * source.BLOCK_RECORDS + unit.first
        first, stop = begin + skip, begin + unit.num_records
        place = f"{file}, document {first}"
        header = files.retried(functools.partial(_header, file), place)
        found = files.retried(
            functools.partial(_read, file, header, first, stop), place
        )
        sizes = np.add.reduceat(
            np.append(found.length, 0), found.first_sequence[:-1]
        ) * (np.diff(found.first_sequence) > 0)
        ends = np.cumsum(sizes) * header.dtype.itemsize
        done = 0
        while done < stop - first:
            before = int(ends[done - 1]) if done else 0
            more = int(np.searchsorted(ends, before + _RUN_BYTES, side="right"))
            until = min(max(more, done + 1), stop - first)
            sequences = slice(*found.first_sequence[[done, until]].tolist())
            values = files.retried(
                functools.partial(
                    _tokens,
                    file,
                    header,
                    found.offset[sequences],
                    found.length[sequences],
                ),
                f"{file}, document {first + done}",
            )
            batch = self._batch(values, sizes[done:until])
            rows = np.arange(until - done)
            yield kept_blocks.Picked([(kept_blocks.Decoded(batch, place), rows)])
            done = until

    def _batch(self, values: np.ndarray, sizes: np.ndarray) -> pa.RecordBatch:
        import pyarrow as pa

        offsets = np.concatenate([[0], np.cumsum(sizes)])
        column = pa.LargeListArray.from_arrays(pa.array(offsets), pa.array(values))
        name = self.columns[0] if self.columns else COLUMN
        return pa.record_batch([column], names=[name])


class _Header(NamedTuple):
    # The type of the tokens, and the numbers of sequences and of documents.
    dtype: np.dtype
    num_sequences: int
    num_documents: int

    @property
    def num_index_bytes(self) -> int:
        return _HEADER.size + 12 * self.num_sequences + 8 * (self.num_documents + 1)


class _Sequences(NamedTuple):
    # Of consecutive documents: the first sequence of each and one after the last; the
    # length and the offset of each sequence.
    first_sequence: np.ndarray
    length: np.ndarray
    offset: np.ndarray


def _index_of(file: str) -> str:
    return f"{file.removesuffix('.bin')}.idx"


@functools.lru_cache(maxsize=1024)
def _header(file: str) -> _Header:
    index = _index_of(file)
    with files.opened(index) as stream:
        content = stream.read(_HEADER.size)
    if len(content) < _HEADER.size:
        raise errors.DataError(f"{index}: cut short; restore it from a copy")
    magic, version, code, num_sequences, num_documents = _HEADER.unpack(content)
    if magic != _MAGIC:
        raise errors.DataError(
            f"{index}: not an index of Megatron (it begins with {magic!r}); restore it,"
            " or write it again by Megatron's tools/preprocess_data.py"
        )
    if version != _VERSION or code not in _TYPES or not num_documents:
        raise errors.DataError(
            f"{index}: version {version} and type {code} of tokens are not read; write"
            " the data again by Megatron's tools/preprocess_data.py"
        )
    return _Header(np.dtype(_TYPES[code]), num_sequences, num_documents - 1)


files.register_cache(_header.cache_clear)


def _read(file: str, header: _Header, first: int, stop: int) -> _Sequences:
    # The sequences of documents from `first` to before `stop`.
    index = _index_of(file)
    with files.opened(index) as stream:
        array = functools.partial(_array, stream, index)
        documents = array(12 * header.num_sequences, "<i8", first, stop + 1)
        is_rising = (np.diff(documents) >= 0).all() and documents[0] >= 0
        if not is_rising or documents[-1] > header.num_sequences:
            raise errors.DataError(
                f"{index}: documents {first} to {stop - 1} have no such sequences; the"
                " index is damaged, restore it from a copy"
            )
        sequences = int(documents[0]), int(documents[-1])
        length = array(0, "<i4", *sequences)
        offset = array(4 * header.num_sequences, "<i8", *sequences)
    if (length < 0).any() or (offset < 0).any():
        raise errors.DataError(
            f"{index}: sequences {sequences[0]} to {sequences[1]} have lengths or"
            " offsets below 0; the index is damaged, restore it from a copy"
        )
    return _Sequences(documents - documents[0], length, offset)


def _walk(header: _Header, stream: BinaryIO, num_bytes: int) -> offset_index.Offsets:
    # Where the documents of each block are in the index.
    del stream, num_bytes
    counts = source.blocks(header.num_documents)
    begin = _HEADER.size + 12 * header.num_sequences
    starts = begin + 8 * source.BLOCK_RECORDS * np.arange(len(counts))
    return starts.tolist(), counts.tolist()


def _end(file: str, header: _Header) -> int:
    # Where the last sequence ends, if each sequence is of a document.
    index, num = _index_of(file), header.num_sequences
    with files.opened(index) as stream:
        array = functools.partial(_array, stream, index)
        for document, expected in ((0, 0), (header.num_documents, num)):
            (first,) = array(12 * num, "<i8", document, document + 1)
            if first != expected:
                raise errors.DataError(
                    f"{index}: the documents end or begin at sequence {first}, not at"
                    f" {expected}; the index is damaged, restore it from a copy"
                )
        if not num:
            return 0
        (length,) = array(0, "<i4", num - 1, num)
        (offset,) = array(4 * num, "<i8", num - 1, num)
    return int(offset + length * header.dtype.itemsize)


def _array(
    stream: BinaryIO, index: str, place: int, dtype: str, begin: int, end: int
) -> np.ndarray:
    # Elements of the array that begins `place` bytes behind the header.
    width = np.dtype(dtype).itemsize
    stream.seek(_HEADER.size + place + begin * width)
    content = stream.read((end - begin) * width)
    if len(content) < (end - begin) * width:
        raise errors.DataError(f"{index}: cut short; restore it from a copy")
    return np.frombuffer(content, dtype).astype(np.int64)


def _tokens(
    file: str, header: _Header, offset: np.ndarray, length: np.ndarray
) -> np.ndarray:
    # The tokens of some sequences; those that follow each other are read together.
    if not len(offset):
        return np.empty(0, header.dtype)
    ends = offset + length * header.dtype.itemsize
    breaks = np.flatnonzero(offset[1:] != ends[:-1]) + 1
    begins = [0, *breaks.tolist()]
    parts = []
    with files.opened(file) as stream:
        for begin, stop in zip(begins, [*begins[1:], len(offset)], strict=True):
            num_bytes = int(ends[stop - 1] - offset[begin])
            stream.seek(int(offset[begin]))
            content = stream.read(num_bytes)
            if len(content) < num_bytes:
                raise errors.DataError(
                    f"{file}: ends before byte {int(ends[stop - 1])}, which its index"
                    " names; restore both from a copy"
                )
            parts.append(np.frombuffer(content, header.dtype))
    return parts[0] if len(parts) == 1 else np.concatenate(parts)
