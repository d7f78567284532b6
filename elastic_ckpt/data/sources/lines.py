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
import gzip
import io
import itertools
import json
import re
import zlib
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

import numpy as np

from elastic_ckpt.core import errors, extras, storage
from elastic_ckpt.data.sources import decoded, files, offset_index, source

_GZIP, _ZSTD = ".gz", ".zst"
_COMPRESSED = (_GZIP, _ZSTD)
# Errors of bytes that cannot be decompressed.
_DAMAGED = (EOFError, zlib.error, gzip.BadGzipFile)
# About how many bytes are decompressed together.
_BUFFER_BYTES = 256 * 1024
TEXT_COLUMN = "text"
# The escape of half of a surrogate pair.
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LineFiles(source.Source):
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
        return decoded.in_turn(
            self, file, block, functools.partial(self._chain, file, block)
        )

    def _chain(self, file: int, block: int) -> Iterator[source.Block]:
        # The blocks from one on that is not compressed, or from the first one on.
        path, index = self.files[file], source.indexes(self)[file]
        offset = 0 if index.block_bytes is None else int(index.block_bytes[block])
        with _opened(path) as stream:
            read = _lines(stream, offset)
            problem: object = ""
            for number in index.chain(block):
                first = index.first_record(number)
                held: list[bytes] = []
                try:
                    for line, _ in itertools.islice(read, index.block_records[number]):
                        held.append(line.rstrip(b"\r\n"))
                except _DAMAGED as error:
                    problem = f"{error}; later ones cannot be read"
                if not problem and len(held) < index.block_records[number]:
                    raise source.changed(
                        path, f"block {number} has {len(held)} records"
                    )
                element = functools.partial(self._at, path, first)
                yield source.RawBlock(
                    held,
                    element,
                    num_bytes=sum(map(len, held)),
                    lost=(f"{path}, record {first + len(held)}", problem),
                )

    def _at(self, path: str, first: int, line: bytes, row: int) -> source.Element:
        return self._element(line, f"{path}, record {first + row}")

    @abc.abstractmethod
    def _element(self, line: bytes, place: str) -> source.Element:
        """The element of a line.

        Raises:
          CorruptError: if it is none.
          DataError: if it lacks a field.
        """

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

    def _element(self, line: bytes, place: str) -> source.Element:
        try:
            fields = _DECODER.decode(line.decode())
            if _SURROGATE.search(line):
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
        try:
            with _opened(path) as stream:
                content = stream.read().removeprefix(codecs.BOM_UTF8)
        except _DAMAGED as error:
            return source.lost_block(path, error)
        return source.RawBlock(
            [content],
            lambda document, _: self._element(document, path),
            num_bytes=len(content),
        )

    def _element(self, line: bytes, place: str) -> source.Element:
        name = self.columns[0] if self.columns else TEXT_COLUMN
        try:
            return {name: line.decode()}
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
        for line, end in _lines(_decompressed(file, stream), 0):
            if not last:
                check(line, file, is_first=True)
            last = line
            yield end - len(line)
    except _DAMAGED as error:
        raise errors.DataError(
            f"{file}: cannot be decompressed ({error}); restore it from a copy"
        ) from None
    if last:
        check(last, file, is_first=False)


def _lines(stream: BinaryIO, offset: int) -> Iterator[tuple[bytes, int]]:
    # The lines that are not blank, from an offset on, and the offset after each.
    if offset:
        stream.seek(offset)
    for line in stream:
        # A byte-order mark is no part of the first line.
        text = line if offset else line.removeprefix(codecs.BOM_UTF8)
        offset += len(line)
        if text.strip():
            yield text, offset


def _is_compressed(file: str) -> bool:
    return file.lower().endswith(_COMPRESSED)


def _opened(file: str) -> BinaryIO:
    return _decompressed(file, files.opened(file))


def _decompressed(file: str, stream: BinaryIO) -> BinaryIO:
    # What is in an open file.
    if file.lower().endswith(_GZIP):
        decompressed: Any = gzip.GzipFile(fileobj=stream)
    elif file.lower().endswith(_ZSTD):
        pyarrow = extras.module("pyarrow", extra="parquet", otherwise="decompress it")
        raw = pyarrow.PythonFile(stream, "r")
        decompressed = pyarrow.CompressedInputStream(raw, "zstd")
    else:
        return stream
    return io.BufferedReader(_Decompressed(decompressed, stream), _BUFFER_BYTES)


class _Decompressed(io.RawIOBase):
    def __init__(self, stream: Any, file: BinaryIO) -> None:
        self._stream, self._file = stream, file

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        into = memoryview(buffer).cast("B")
        try:
            read = self._stream.read(len(into))
        except OSError as error:
            if error.errno is not None:
                raise
            # Of bytes that cannot be decompressed.
            raise EOFError(str(error)) from None
        into[: len(read)] = read
        return len(read)

    def close(self) -> None:
        with contextlib.suppress(Exception):
            self._stream.close()
        self._file.close()
        super().close()
