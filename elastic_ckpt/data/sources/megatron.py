"""Megatron's indexed datasets: tokens in a `.bin` file, their places in an `.idx`.

An index (`megatron.core.datasets.indexed_dataset`) has a magic number, its version, the
type of the tokens, the numbers of sequences and of documents, and then arrays: the
length of each sequence, its offset in the `.bin` file, and the first sequence of each
document. Both files are mapped.
"""

from __future__ import annotations

import dataclasses
import functools
import struct
from typing import NamedTuple

import numpy as np

from elastic_ckpt.core import digest, errors
from elastic_ckpt.data.sources import arrow, columns, files, offset_index, source

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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Megatron(source.Source):
    """Megatron's `.bin` files as a source, each with its `.idx` beside it.

    An element has one column, the tokens of a document, of
    the type that the file has. The files have no checksums: an index is checked to be
    whole, and to lie within its `.bin` file.

    Attributes:
      files: the paths or URIs of the `.bin` files; remote files are copied to this
        machine first.
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
        """The number of documents, and a digest of the index."""
        name = _index_of(file)
        found = offset_index.of_blocks(
            "megatron", name, functools.partial(_found, name)
        )
        content, index = files.content(file), _index(files.local_copy(name), name)
        if index.num_bytes != content.num_bytes:
            is_short = index.num_bytes > content.num_bytes
            raise errors.DataError(
                f"{file}: {'cut short' if is_short else 'of another index'},"
                f" {content.num_bytes} of {index.num_bytes} bytes that its index names;"
                " restore both from a copy, and join files by Megatron's"
                " tools/merge_datasets.py"
            )
        version = content.version and f"{content.version} {found.content.version}"
        return source.FileIndex(
            content=dataclasses.replace(
                content.including(found.content.digest), version=version
            ),
            block_records=source.pieces(
                found.num_records, content.num_bytes, source.BLOCK_RECORDS
            ),
        )

    def decode(self, file: int, block: int) -> source.Block:
        """See `Source`."""
        path, of_file = self.files[file], source.indexes(self)[file]
        name = _index_of(path)
        index = _index(files.local_copy(name), name)
        first = of_file.first_record(block)
        stop = first + int(of_file.block_records[block])
        sequences = index.documents[first : stop + 1]
        lengths = index.lengths[sequences[0] : sequences[-1]].astype(np.int64)
        begins = index.offsets[sequences[0] : sequences[-1]]
        ends = begins + lengths * index.dtype.itemsize
        content = np.memmap(files.local_copy(path), np.uint8, "r") if ends.any() else ()
        values = [
            content[begin:end]
            for begin, end in zip(begins.tolist(), ends.tolist(), strict=True)
        ]
        tokens = np.concatenate([np.zeros(0, np.uint8), *values]).view(index.dtype)
        offsets = np.concatenate([[0], np.cumsum(lengths)])[sequences - sequences[0]]
        if len(tokens) < offsets[-1]:
            raise source.changed(path, f"documents from {first} on are cut short")
        pa = arrow.pyarrow()
        column = pa.LargeListArray.from_arrays(pa.array(offsets), pa.array(tokens))
        (name,) = self.columns[:1] or (COLUMN,)
        return columns.Columns(pa.record_batch([column], names=[name]))


class _Index(NamedTuple):
    """The arrays of an index.

    Attributes:
      dtype: the type of the tokens.
      lengths: of the sequences, int32.
      offsets: of the sequences in the file of tokens, int64.
      documents: the first sequence of each document, and the number of all, int64.
    """

    dtype: np.dtype
    lengths: np.ndarray
    offsets: np.ndarray
    documents: np.ndarray

    @property
    def num_bytes(self) -> int:
        """Where the last sequence ends."""
        if not len(self.lengths):
            return 0
        return int(self.offsets[-1] + self.lengths[-1] * self.dtype.itemsize)


def _index_of(file: str) -> str:
    return f"{file.removesuffix('.bin')}.idx"


@functools.lru_cache(maxsize=1024)
def _index(path: str, name: str) -> _Index:
    # The index at a local path; `name` is for errors.
    def foreign(problem: str) -> errors.DataError:
        return errors.DataError(
            f"{name}: {problem}; restore it, or write it again by Megatron's"
            " tools/preprocess_data.py"
        )

    with open(path, "rb") as stream:
        header = stream.read(_HEADER.size)
    if len(header) < _HEADER.size:
        raise foreign("cut short")
    magic, version, code, num_sequences, num_documents = _HEADER.unpack(header)
    if magic != _MAGIC:
        raise foreign(f"not an index of Megatron (it begins with {magic!r})")
    if version != _VERSION or code not in _TYPES or not num_documents:
        raise foreign(f"version {version} and type {code} of tokens are not read")
    content = np.memmap(path, np.uint8, "r")[_HEADER.size :]
    num_bytes = 12 * num_sequences + 8 * num_documents
    # An index of several modalities has a byte more for each sequence.
    if len(content) not in (num_bytes, num_bytes + num_sequences):
        raise foreign(f"cut short, or damaged: {len(content)} of {num_bytes} bytes")
    lengths, offsets, documents = np.split(
        content[:num_bytes], [4 * num_sequences, 12 * num_sequences]
    )
    return _Index(
        np.dtype(_TYPES[code]),
        lengths.view("<i4"),
        offsets.view("<i8"),
        documents.view("<i8"),
    )


files.register_cache(_index.cache_clear)


def _found(name: str) -> offset_index.Offsets:
    # Checks all of an index, and digests it.
    path = files.local_copy(name)
    index = _index(path, name)
    ends = index.documents[[0, -1]].tolist()
    if ends != [0, len(index.lengths)]:
        raise errors.DataError(
            f"{name}: documents begin and end at the sequences {ends}, not at 0 and"
            f" {len(index.lengths)}; the index is damaged, restore it from a copy"
        )
    is_rising = (np.diff(index.documents) >= 0).all()
    last = index.num_bytes - index.lengths.astype(np.int64) * index.dtype.itemsize
    is_inside = (index.offsets >= 0).all() and (index.offsets <= last).all()
    if not is_rising or not is_inside or (index.lengths < 0).any():
        raise errors.DataError(
            f"{name}: a document or a sequence has no such place; the index is"
            " damaged, restore it from a copy"
        )
    content = digest.values_hash()
    content.update(np.memmap(path, np.uint8, "r").data)
    num_documents = len(index.documents) - 1
    return offset_index.Offsets([0], [num_documents], content.hexdigest())
