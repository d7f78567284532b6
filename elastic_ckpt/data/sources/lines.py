"""Files of lines: JSON Lines, and plain text.

Each line that is not blank is a record. Finding the blocks of 1,024 of them requires a
pass over the file (`offset_index`). A compressed file is one block, which is not cut:
whoever reads it from the middle on decompresses what is before.
"""

from __future__ import annotations

import abc
import codecs
import contextlib
import dataclasses
import functools
import gzip
import io
import json
import re
import zlib
from collections.abc import Callable, Generator, Iterator
from typing import Any, BinaryIO

import numpy as np

from elastic_ckpt.core import errors, extras, storage
from elastic_ckpt.data import units
from elastic_ckpt.data.sources import files, offset_index, runs, source

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
class LineFiles(runs.RunFiles):
    """Files of lines, as they are or compressed (`.gz`, `.zst`)."""

    def index(self, file: str) -> source.FileIndex:
        """The offsets of the blocks, from the cache or from a pass over the file."""
        return offset_index.index(
            self.file_type,
            file,
            functools.partial(_walk, file, self._check),
            is_whole=_is_compressed(file),
        )

    def _records(
        self, file: str, offset: int, before: int
    ) -> Generator[tuple[bytes, int, int]]:
        try:
            with _opened(file) as stream:
                for line, end in _lines(stream, offset):
                    if before:
                        before -= 1
                    else:
                        yield line.rstrip(b"\r\n"), len(line), end
        except _DAMAGED as error:
            raise runs.LostError(f"{error}; later ones cannot be read") from None

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

    def _element(self, record: bytes, place: str) -> source.Read:
        try:
            fields = _DECODER.decode(record.decode())
            if _SURROGATE.search(record):
                # Halves of pairs cannot be encoded.
                json.dumps(fields, ensure_ascii=False).encode()
        except (ValueError, RecursionError) as error:
            return source.corrupt(place, f"cannot be read as JSON: {error}")
        if not isinstance(fields, dict):
            return source.corrupt(place, f"a {type(fields).__name__}, not an object")
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

    def read(self, unit: units.Unit, skip: int) -> Iterator[source.Read]:
        """See `LineFiles`."""
        if not self.whole_files:
            yield from super().read(unit, skip)
        elif not skip:
            file = self.files[unit.file]
            try:
                content = files.retried(functools.partial(_content, file), file)
            except _DAMAGED as error:
                yield source.corrupt(file, error)
                return
            yield self._element(content.removeprefix(codecs.BOM_UTF8), file)

    def _element(self, record: bytes, place: str) -> source.Read:
        name = self.columns[0] if self.columns else TEXT_COLUMN
        try:
            return {name: record.decode()}
        except UnicodeDecodeError as error:
            return source.corrupt(place, error)

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
) -> offset_index.Offsets:
    # A pass over the lines; a compressed file has one block.
    del num_bytes
    starts: list[int] = []
    count, last = 0, b""
    try:
        for line, offset in _lines(_decompressed(file, stream), 0):
            if not count:
                check(line, file, is_first=True)
            if count % source.BLOCK_RECORDS == 0:
                starts.append(offset - len(line))
            count, last = count + 1, line
    except _DAMAGED as error:
        raise errors.DataError(
            f"{file}: cannot be decompressed ({error}); restore it from a copy"
        ) from None
    if last:
        check(last, file, is_first=False)
    if last and _is_compressed(file):
        return [0], [count]
    return starts, source.blocks(count).tolist()


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


def _content(file: str) -> bytes:
    with _opened(file) as stream:
        return stream.read()


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
