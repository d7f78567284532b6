"""Megatron's indexed datasets: tokens in a `.bin` file, offsets in an `.idx` file.

An index (`megatron.core.datasets.indexed_dataset`) has a magic number, a version, the
token type, the counts of sequences and documents, and then arrays: the length of each
sequence, its offset in the `.bin` file, and the first sequence of each document. Both
files are mapped into memory.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import struct
from typing import NamedTuple

import numpy as np

from elastic_ckpt.core import digest, errors
from elastic_ckpt.data.sources import columns, files, source

COLUMN = "tokens"
_MAGIC = b"MMIDIDX\x00\x00"
_VERSION = 1
# Magic number, version, type, number of sequences, and number of documents plus one.
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
    """Megatron's `.bin` files as a source, each with its `.idx` next to it.

    An element has one column, a document's tokens, in the file's token type. The files
    do not have checksums, so the index is only checked to be complete and within the
    bounds of its `.bin` file.

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
                    f"Megatron: {file} is not a .bin file; list the .bin files, each"
                    " with its .idx file next to it"
                )

    def _paths(self, file: str) -> tuple[str, ...]:
        """The token file and its index."""
        return file, _index_of(file)

    def _find(self, file: str) -> source.Found:
        # The digest covers only the index.
        name = _index_of(file)
        path, num_bytes = (
            files.local_copy(name),
            os.path.getsize(files.local_copy(file)),
        )
        index = _index(path, name)
        starts, stops = index.documents[:-1], index.documents[1:]
        last = index.num_bytes - index.lengths.astype(np.int64) * index.dtype.itemsize
        if (
            index.documents[[0, -1]].tolist() != [0, len(index.lengths)]
            or (starts > stops).any()
            or (index.lengths < 0).any()
            or (index.offsets < 0).any()
            or (index.offsets > last).any()
            or index.num_bytes != num_bytes
        ):
            raise errors.DataError(
                f"{file} does not match its index, or one of them is damaged: the file"
                f" has {num_bytes} bytes, and the index describes {index.num_bytes}"
                f" bytes in {len(index.lengths)} sequences; restore both from a good"
                " copy or, if you joined files, use Megatron's tools/merge_datasets.py"
            )
        content = digest.values_digest(np.memmap(path, np.uint8, "r")).hex()
        return source.Found(
            content, source.pieces(len(starts), num_bytes, source.BLOCK_RECORDS)
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
            raise source.changed(path, f"documents from index {first} on are truncated")
        pa = columns.pyarrow()
        column = pa.LargeListArray.from_arrays(pa.array(offsets), pa.array(tokens))
        batch = pa.record_batch([column], names=self.columns[:1] or (COLUMN,))
        return columns.Columns(batch, functools.partial(source.corrupt, path))


class _Index(NamedTuple):
    """The arrays of an index.

    Attributes:
      dtype: the token type.
      lengths: the length of each sequence, int32.
      offsets: the offset of each sequence in the token file, int64.
      documents: the first sequence of each document, and the number of sequences,
        int64.
    """

    dtype: np.dtype
    lengths: np.ndarray
    offsets: np.ndarray
    documents: np.ndarray

    @property
    def num_bytes(self) -> int:
        """Where the last sequence ends in the token file."""
        if not len(self.lengths):
            return 0
        return int(self.offsets[-1] + self.lengths[-1] * self.dtype.itemsize)


def _index_of(file: str) -> str:
    return f"{file.removesuffix('.bin')}.idx"


@functools.lru_cache(maxsize=1024)
def _index(path: str, name: str) -> _Index:
    # Reads the index at a local path; `name` is used in error messages.
    with open(path, "rb") as stream:
        header = stream.read(_HEADER.size).ljust(_HEADER.size)
    magic, version, code, num_sequences, num_documents = _HEADER.unpack(header)
    num_bytes = 12 * num_sequences + 8 * num_documents
    # An index with multiple modalities has an extra byte for each sequence.
    sizes = _HEADER.size + num_bytes, _HEADER.size + num_bytes + num_sequences
    is_whole = num_documents and os.path.getsize(path) in sizes
    if magic != _MAGIC or version != _VERSION or code not in _TYPES or not is_whole:
        raise errors.DataError(
            f"{name} is not a Megatron index or is truncated (it begins with {magic!r},"
            f" version {version}, token type {code}); restore it from a good copy, or"
            " recreate it with Megatron's tools/preprocess_data.py"
        )
    content = np.memmap(path, np.uint8, "r")[_HEADER.size :]
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
