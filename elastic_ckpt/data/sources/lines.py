"""Files of lines: JSON Lines and plain text.

Each line that is not blank is a record. The blocks of a compressed file form a chain: a
reader that starts in the middle must decompress everything before that point.
"""

from __future__ import annotations

import abc
import codecs
import dataclasses
import functools
import gzip
import io
import itertools
import json
import re
import zlib
from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO

import numpy as np

from elastic_ckpt.core import extras, storage
from elastic_ckpt.data.sources import decoded, files, source

# The suffixes of compressed files.
_GZIP, _ZSTD = ".gz", ".zst"
# The approximate number of bytes decompressed at a time.
_BUFFER_BYTES = 256 * 1024
TEXT_COLUMN = "text"
# The escape sequence of half a surrogate pair.
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LineFiles(source.WalkedFiles):
    """Files of lines, plain or compressed (`.gz`, `.zst`)."""

    def _find(self, file: str) -> source.Found:
        found = super()._find(file)
        if not _is_compressed(file):
            return found
        # Offsets refer to the decompressed content.
        return found._replace(starts=None, chains=[0] * len(found.records))

    def decode(self, file: int, block: int) -> source.Block:
        """See `Source`."""
        if not _is_compressed(self.files[file]):
            return super().decode(file, block)
        return decoded.in_sequence(
            self, file, block, functools.partial(self._chain, file)
        )

    def _chain(self, file: int) -> Iterator[source.Block]:
        # The blocks of a compressed file.
        path, sizes = self.files[file], source.indexes(self)[file].block_records
        with files.opened(path) as stream:
            records = self._records(path, stream, is_whole=True)
            lines = (line for _, line in records)
            for block, size in enumerate(sizes.tolist()):
                made = self._block(file, block, itertools.islice(lines, size))
                yield made
                if made.lost is not None:
                    raise source.corrupt(path, made.lost)

    def _records(
        self, file: str, stream: BinaryIO, *, is_whole: bool
    ) -> Iterator[tuple[int, bytes]]:
        end, last = 0, b""
        try:
            for line in self._split(
                _decompressed(file, stream) if is_whole else stream
            ):
                # Strips a byte-order mark.
                is_first = is_whole and not end
                text = line.removeprefix(codecs.BOM_UTF8) if is_first else line
                end += len(line)
                if not text.strip():
                    continue
                if is_whole and not last:
                    self._check(text)
                last = text
                yield end - len(text), text
        except (OSError, EOFError, zlib.error) as error:
            # An error for bytes that cannot be decompressed has no errno.
            if getattr(error, "errno", None) is not None:
                raise
            raise source.LostError(f"{error}; later records cannot be read") from None
        if is_whole and last:
            self._check(last)

    def _split(self, stream: BinaryIO) -> Iterable[bytes]:
        return stream

    @abc.abstractmethod
    def _check(self, line: bytes) -> None:
        """Raises a LostError if the first or last line shows a different format."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class JsonLines(LineFiles):
    r"""JSON Lines as a source: a JSON object on each line.

    Files that end in `.gz` or `.zst` are decompressed. An element maps each field name
    to a value: lists of integers are int64 arrays, lists of floats are float64 arrays,
    and other values are as `json` decodes them. A line is corrupt if it is not a JSON
    object, or if a field would be lost or changed because a name occurs twice or a
    string contains half a surrogate pair (`\ud800`).

    Attributes:
      files: the paths or URIs of the files.
      columns: the fields to read; empty reads all.
    """

    file_type = "jsonl"

    def _element(self, record: bytes, place: str) -> source.Element:
        try:
            fields = _DECODER.decode(record.decode())
            if _SURROGATE.search(record):
                # Fails for half a pair.
                json.dumps(fields, ensure_ascii=False).encode()
        except (ValueError, RecursionError) as error:
            raise source.corrupt(place, f"it cannot be read as JSON: {error}") from None
        if not isinstance(fields, dict):
            raise source.corrupt(
                place, f"it is of type {type(fields).__name__}, not an object"
            )
        names = self.columns or tuple(fields)
        source.check_columns(place, names, sorted(fields), what="field")
        return {name: _value(fields[name]) for name in names}

    def _check(self, line: bytes) -> None:
        try:
            json.loads(line.decode())
        except (ValueError, RecursionError) as error:
            raise source.LostError(
                f"its first or last line is not JSON: {error}"
            ) from None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Text(LineFiles):
    """UTF-8 plain text as a source: one document per line, or per file.

    Files that end in `.gz` or `.zst` are decompressed. An element has one column, the
    text without line ending or byte-order mark. Blank lines and files are skipped.

    Attributes:
      files: the paths or URIs of the files.
      columns: the name of the only column, by default `text`.
      whole_files: whether a file is one document.
    """

    file_type = "text"
    whole_files: bool = False

    def settings(self) -> dict[str, storage.Json]:
        """The format, the column, and `whole_files`."""
        return {**super().settings(), "whole_files": self.whole_files}

    def _split(self, stream: BinaryIO) -> Iterable[bytes]:
        return (stream.read(),) if self.whole_files else stream

    def _element(self, record: bytes, place: str) -> source.Element:
        (name,) = self.columns[:1] or (TEXT_COLUMN,)
        try:
            text = record.decode()
        except UnicodeDecodeError as error:
            raise source.corrupt(place, error) from None
        return {name: text if self.whole_files else text.rstrip("\r\n")}

    def _check(self, line: bytes) -> None:
        if b"\0" in line:
            raise source.LostError("it contains NUL bytes")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        names = [name for name, _ in pairs]
        twice = max(names, key=names.count)
        raise ValueError(f"an object has field {twice!r} twice")
    return fields


# `json.loads` would create a decoder for each record.
_DECODER = json.JSONDecoder(object_pairs_hook=_object)


def _value(value: Any) -> Any:
    kinds = set(map(type, value)) if isinstance(value, list) else set()
    if kinds <= {int, float} and len(kinds) == 1:
        array = np.array(value)
        # Otherwise, larger integers would be rounded or become objects.
        if array.dtype == (np.int64 if kinds == {int} else np.float64):
            return array
    return value


def _is_compressed(file: str) -> bool:
    return file.lower().endswith((_GZIP, _ZSTD))


def _decompressed(file: str, stream: BinaryIO) -> BinaryIO:
    if file.lower().endswith(_GZIP):
        # Arrow rejects the zeros with which tapes and block devices end.
        read: Any = gzip.GzipFile(fileobj=stream)
    elif _is_compressed(file):
        arrow = extras.module(
            "pyarrow", extra="parquet", otherwise="decompress it first"
        )
        read = arrow.CompressedInputStream(arrow.PythonFile(stream, "r"), "zstd")
    else:
        return stream
    return io.BufferedReader(read, _BUFFER_BYTES)
