"""Files of lines: JSON Lines, and plain text.

Each line that is not blank is a record. Finding the blocks requires a pass over the
file (`offset_index`). Those of a compressed file are a chain: whoever begins in the
middle decompresses what is before.
"""

from __future__ import annotations

import abc
import codecs
import contextlib
import dataclasses
import functools
import io
import itertools
import json
import os
import re
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

import numpy as np

from elastic_ckpt.core import errors, extras, storage
from elastic_ckpt.data.sources import decoded, files, offset_index, source

# How files are compressed, by the end of their names.
_COMPRESSED = {".gz": "gzip", ".zst": "zstd"}
# About how many bytes are decompressed together.
_BUFFER_BYTES = 256 * 1024
TEXT_COLUMN = "text"
# The escape of half of a surrogate pair.
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LineFiles(source.RawFiles):
    """Files of lines, as they are or compressed (`.gz`, `.zst`)."""

    def index(self, file: str) -> source.FileIndex:
        """The offsets of the blocks, from the cache or from a pass over the file."""
        walk = functools.partial(_walk, file, self._check)
        index = offset_index.index(self.file_type, file, walk)
        if not _is_compressed(file):
            return index
        # These offsets are not those of the file.
        is_chained = np.arange(len(index.block_records)) > 0
        return dataclasses.replace(index, block_bytes=None, is_chained=is_chained)

    def decode(self, file: int, block: int) -> source.Block:
        """See `Source`."""
        if not _is_compressed(self.files[file]):
            content = io.BytesIO(self._content(file, block))
            lines = (line for _, line in _lines("", content))
            return self._block(file, block, lines)
        return decoded.in_turn(self, file, block, functools.partial(self._chain, file))

    def _chain(self, file: int) -> Iterator[source.Block]:
        # The blocks of a compressed file.
        path, sizes = self.files[file], source.indexes(self)[file].block_records
        with files.opened(path) as stream:
            lines = (line for _, line in _lines(path, stream))
            for block, size in enumerate(sizes.tolist()):
                made = self._block(file, block, itertools.islice(lines, size))
                yield made
                if made.lost is not None:
                    yield from itertools.repeat(source.LostBlock(path, made.lost))

    @abc.abstractmethod
    def _check(self, line: bytes, file: str, *, is_first: bool) -> None:
        """Raises a DataError if the first or the last line shows another format."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class JsonLines(LineFiles):
    r"""JSON Lines as a source: a JSON object on each line.

    Files that end in `.gz` or `.zst` are decompressed. An element has the value of each
    field by name: lists of numbers as arrays (int64, or float64), other values as JSON
    has them. A line is corrupt if it is no JSON object, or if a field would be lost or
    changed: a name that is there twice, or half of a surrogate pair (`\ud800`).

    Attributes:
      files: the paths or URIs of the files.
      columns: the fields to read; all if it is empty.
    """

    file_type = "jsonl"

    def _element(self, record: bytes, place: str) -> source.Element:
        try:
            fields = _DECODER.decode(record.decode())
            if _SURROGATE.search(record):
                # Halves of pairs cannot be encoded.
                json.dumps(fields, ensure_ascii=False).encode()
        except (ValueError, RecursionError) as error:
            raise source.corrupt(place, f"cannot be read as JSON: {error}") from None
        if not isinstance(fields, dict):
            raise source.corrupt(place, f"a {type(fields).__name__}, not an object")
        names = self.columns or tuple(fields)
        source.check_columns(place, names, sorted(fields), what="field")
        return {name: _value(fields[name]) for name in names}

    def _check(self, line: bytes, file: str, *, is_first: bool) -> None:
        try:
            json.loads(line.decode())
        except (ValueError, RecursionError) as error:
            if is_first:
                what = "not a JSON Lines file: its first line"
                advice = files.RESTORE
            else:
                what, advice = "cut short: its last line", "restore it from a copy"
            raise errors.DataError(
                f"{file}: {what} is not JSON ({error}); {advice}"
            ) from None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Text(LineFiles):
    """Plain text in UTF-8 as a source: a document on each line, or in each file.

    Files that end in `.gz` or `.zst` are decompressed. An element has one column, the
    text without the end of its line, and without the byte-order mark of the file. Blank
    lines are no documents.

    Attributes:
      files: the paths or URIs of the files.
      columns: the name of the only column, by default `text`.
      whole_files: whether a file is one document.
    """

    file_type = "text"
    whole_files: bool = False

    def settings(self) -> dict[str, storage.Json]:
        """The format, the column, and what is a document."""
        return {**super().settings(), "whole_files": self.whole_files}

    def index(self, file: str) -> source.FileIndex:
        """See `LineFiles`."""
        if not self.whole_files:
            return super().index(file)
        content = files.content(file)
        return source.FileIndex(
            content=content,
            block_records=np.ones(min(content.num_bytes, 1), np.int64),
        )

    def decode(self, file: int, block: int) -> source.Block:
        """See `Source`."""
        if not self.whole_files:
            return super().decode(file, block)
        path = self.files[file]
        with files.opened(path) as stream:
            return self._block(file, block, self._whole(path, stream))

    def _whole(self, path: str, stream: BinaryIO) -> Iterator[bytes]:
        with _damaged():
            yield _decompressed(path, stream).read().removeprefix(codecs.BOM_UTF8)

    def _element(self, record: bytes, place: str) -> source.Element:
        name = self.columns[0] if self.columns else TEXT_COLUMN
        try:
            return {name: record.decode()}
        except UnicodeDecodeError as error:
            raise source.corrupt(place, error) from None

    def _check(self, line: bytes, file: str, *, is_first: bool) -> None:
        if is_first and b"\0" in line:
            raise errors.DataError(
                f"{file}: not text, it has NUL bytes; {files.RESTORE}"
            )


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        twice = source.most_common(name for name, _ in pairs)
        raise ValueError(f"an object has the field {twice!r} twice")
    return fields


# `json.loads` would make one for each record.
_DECODER = json.JSONDecoder(object_pairs_hook=_object)


def _value(value: Any) -> Any:
    if isinstance(value, list) and value and set(map(type, value)) <= {int, float}:
        return np.array(value)
    return value


def _walk(
    file: str, check: Callable[..., None], stream: BinaryIO, num_bytes: int
) -> Iterator[int]:
    del num_bytes
    last = b""
    try:
        for offset, line in _lines(file, stream):
            if not last:
                check(line, file, is_first=True)
            last = line
            yield offset
    except source.LostError as error:
        raise errors.DataError(
            f"{file}: cannot be decompressed ({error}); restore it from a copy"
        ) from None
    if last:
        check(last, file, is_first=False)


def _lines(file: str, stream: BinaryIO) -> Iterator[tuple[int, bytes]]:
    # The offset of each line that is not blank, and the line without its end.
    end = 0
    with _damaged():
        for line in _decompressed(file, stream):
            # A byte-order mark is no part of the first line.
            text = line if end else line.removeprefix(codecs.BOM_UTF8)
            end += len(line)
            if text.strip():
                yield end - len(text), text.rstrip(b"\r\n")


@contextlib.contextmanager
def _damaged() -> Iterator[None]:
    # Arrow raises an OSError without an errno for bytes that it cannot decompress.
    try:
        yield
    except OSError as error:
        if error.errno is not None:
            raise
        raise source.LostError(f"{error}; later records cannot be read") from None


def _is_compressed(file: str) -> bool:
    return os.path.splitext(file.lower())[1] in _COMPRESSED


def _decompressed(file: str, stream: BinaryIO) -> BinaryIO:
    # What is in an open file.
    if not _is_compressed(file):
        return stream
    arrow = extras.module("pyarrow", extra="parquet", otherwise="decompress it")
    kind = _COMPRESSED[os.path.splitext(file.lower())[1]]
    read: Any = arrow.CompressedInputStream(arrow.PythonFile(stream, "r"), kind)
    return io.BufferedReader(read, _BUFFER_BYTES)
