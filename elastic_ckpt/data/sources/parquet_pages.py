"""Reads what is left of a Parquet row group that has damaged pages.

In a sparse copy of the file in memory, a damaged page is replaced by one that has a
null for each of its rows; Arrow reads the rest, and the rows of the page are reported
as lost. Arrow also tells which pages are damaged: it reads some of them at a time. Only
the headers of pages are parsed here, which are Thrift structs in its compact encoding.
"""

from __future__ import annotations

import dataclasses
import functools
import io
import mmap
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, BinaryIO

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

# The kinds of pages, and the fields of a page header by number.
_DATA, _DICTIONARY, _DATA_V2 = 0, 2, 3
_KIND, _RAW_SIZE, _SIZE, _DATA_FIELDS, _V2_FIELDS = 1, 2, 3, 5, 8
# The encodings of values that refer to the dictionary.
_OF_DICTIONARY = (2, 8)
# The bytes of a zero of each type of value.
_WIDTHS = {"INT32": 4, "INT64": 8, "INT96": 12, "FLOAT": 4, "DOUBLE": 8}
_WIDTHS["BYTE_ARRAY"] = 4

# More bytes than a page header without statistics takes.
_HEADER_BYTES = 40

# Memory as large as the file is not reserved. Python has the name from 3.13 on.
_MAP_NORESERVE = 0x4000

Lost = list[tuple[int, int]]


class _UnsalvageableError(Exception):
    pass


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Page:
    # A page at `start` to `stop` of its column chunk; its values are -1 if unknown.
    start: int
    stop: int
    kind: int = _DATA
    num_values: int = -1
    uses_dictionary: bool = False


def salvaged(
    file: BinaryIO,
    metadata: pq.FileMetaData,
    block: int,
    columns: Sequence[str],
) -> tuple[pa.Table, Lost] | None:
    """What is left of a row group; None if its pages cannot be told apart.

    Args:
      file: the file.
      metadata: from its footer.
      block: the number of the row group.
      columns: the names of the columns to read; empty reads all.

    Returns:
      All of its rows, of which the lost ones have nulls or zeros; and which are lost,
      as ranges of a first row and a stop.
    """
    import pyarrow as pa
    from pyarrow import parquet as pq

    group = metadata.row_group(block)
    lost: Lost = []
    # Memory for the file, of which only the row group takes room.
    content = mmap.mmap(
        -1,
        file.seek(0, io.SEEK_END),
        flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE,
    )

    def table(names: Sequence[str]) -> pa.Table | None:
        try:
            with pq.ParquetFile(
                pa.BufferReader(content),
                metadata=metadata,
                pre_buffer=False,
                page_checksum_verification=True,
            ) as opened:
                read = opened.read_row_group(
                    block, columns=list(names) or None, use_threads=False
                )
                read.validate(full=True)
                return read
        except (OSError, ValueError, EOFError):
            return None

    try:
        for number in range(group.num_columns):
            chunk = group.column(number)
            if not is_read(chunk.path_in_schema, columns):
                continue
            file.seek(begin_bytes(chunk))
            raw = file.read(chunk.total_compressed_size)
            place = memoryview(content)[begin_bytes(chunk) :][: len(raw)]
            place[:] = raw
            read = functools.partial(table, [chunk.path_in_schema])
            whole = read()
            if whole is None or whole.num_rows != group.num_rows:
                schema = metadata.schema.column(number)
                column = _Column(place, chunk, schema, group.num_rows, read)
                lost += column.salvage()
    except _UnsalvageableError:
        return None
    left = table(columns)
    if not lost or left is None or left.num_rows != group.num_rows:
        return None
    return left, lost


def begin_bytes(chunk: pq.ColumnChunkMetaData) -> int:
    """The first byte of a column chunk, which may begin with its dictionary."""
    return min(
        chunk.dictionary_page_offset or chunk.data_page_offset, chunk.data_page_offset
    )


def is_read(path: str, columns: Sequence[str]) -> bool:
    """Whether a leaf is in one of the columns, whose names may contain dots."""
    names = (path == name or path.startswith(f"{name}.") for name in columns)
    return not columns or any(names)


class _Column:
    """The pages of one column of a row group.

    Args:
      place: its bytes, which are replaced.
      chunk: from the footer.
      schema: of the column.
      num_rows: of the row group.
      table: reads the column from `place`; None if it cannot be read.
    """

    def __init__(
        self,
        place: memoryview,
        chunk: pq.ColumnChunkMetaData,
        schema: pq.ColumnSchema,
        num_rows: int,
        table: Callable[[], pa.Table | None],
    ) -> None:
        self._chunk, self._schema, self._table = chunk, schema, table
        self._num_rows = num_rows
        self._place, self._content = place, bytes(place)
        self._is_flat = schema.max_repetition_level == 0
        pages = _pages(self._content)
        self._dictionary = [page for page in pages if page.kind == _DICTIONARY]
        self._pages = [page for page in pages if page.kind != _DICTIONARY]
        if len(self._dictionary) > 1 or not self._pages:
            raise _UnsalvageableError

    def salvage(self) -> Lost:
        """Replaces the damaged pages; returns their rows."""
        damaged = self._damaged()
        if not damaged:
            raise _UnsalvageableError
        first, stop = damaged[0], damaged[-1] + 1
        pages = self._bytes(self._pages)
        if self._is_flat:
            counts = [page.num_values for page in self._pages]
            if len(damaged) == 1:
                others = sum(counts) - counts[first]
                counts[first] = self._num_rows - others
            if min(counts) < 1 or sum(counts) != self._num_rows:
                raise _UnsalvageableError
            for number in damaged:
                pages[number] = self._null_page(counts[number])
            lost = [(sum(counts[:n]), sum(counts[: n + 1])) for n in damaged]
        else:
            # A row may begin in a page and end in a later one: what is between two
            # damaged pages is lost with them, and the row before the first one too.
            before = self._rows(0, first) if first else 0
            after = self._rows(stop, len(pages)) if stop < len(pages) else 0
            count = self._num_rows - before - after
            if count < 1:
                raise _UnsalvageableError
            pages[first:stop] = [self._null_page(count)]
            lost = [(max(before - 1, 0), before + count)]
        if not self._write(pages):
            raise _UnsalvageableError
        return lost

    def _bytes(self, pages: Sequence[_Page]) -> list[bytes]:
        return [self._content[page.start : page.stop] for page in pages]

    def _write(self, pages: Sequence[bytes]) -> bool:
        # Puts these data pages into the file; whether there is room for them.
        content = b"".join([*self._bytes(self._dictionary), *pages])
        rest = len(self._content) - len(content)
        if rest >= 0:
            # What follows looks like a page without values.
            self._place[:] = content + _filling(rest)
        return rest >= 0

    def _damaged(self) -> list[int]:
        # The numbers of the damaged pages.
        unknown = [n for n, page in enumerate(self._pages) if page.num_values < 0]
        needless = []
        if self._dictionary and self._read([]) is None:
            needless = [n for n, p in enumerate(self._pages) if p.uses_dictionary]
            # No page that is read refers to it any more.
            self._dictionary = []
        suspects = [
            n for n in range(len(self._pages)) if n not in {*unknown, *needless}
        ]
        found: list[int] = []

        def search(numbers: list[int]) -> None:
            if not numbers or self._read(numbers) is not None:
                return
            if len(numbers) == 1:
                found.extend(numbers)
                return
            middle = len(numbers) // 2
            search(numbers[:middle])
            search(numbers[middle:])

        search(suspects)
        return sorted({*unknown, *needless, *found})

    def _rows(self, first: int, stop: int) -> int:
        # The number of rows that begin in consecutive pages.
        rows = self._read(list(range(first, stop)))
        if rows is None:
            raise _UnsalvageableError
        return rows - 1

    def _read(self, numbers: list[int]) -> int | None:
        # The rows that Arrow reads from an empty row and some pages; None if it fails.
        pages = [self._pages[number] for number in numbers]
        if not self._write([self._null_page(1), *self._bytes(pages)]):
            return None
        read = self._table()
        if read is None:
            return None
        if self._is_flat:
            expected = 1 + sum(page.num_values for page in pages)
            return read.num_rows if read.num_rows == expected else None
        return read.num_rows

    def _null_page(self, num_rows: int) -> bytes:
        # A page with nulls, or zeros if there can be no nulls.
        import pyarrow as pa

        run = _varint(num_rows << 1) + b"\0"
        level = len(run).to_bytes(4, "little") + run
        raw = level * (not self._is_flat)
        if self._schema.max_definition_level:
            raw += level
        elif self._chunk.physical_type == "BOOLEAN":
            raw += bytes(-(-num_rows // 8))
        else:
            width = _WIDTHS.get(self._chunk.physical_type, self._schema.length)
            raw += bytes(num_rows * width)
        codec = self._chunk.compression.lower()
        body = raw
        if codec != "uncompressed":
            codec = "lz4_raw" if codec == "lz4" else codec
            body = pa.Codec(codec).compress(raw, asbytes=True)
        return b"".join(
            (
                b"\x15\x00\x15",
                _varint(2 * len(raw)),
                b"\x15",
                _varint(2 * len(body)),
                b"\x2c\x15",
                _varint(2 * num_rows),
                b"\x15\x00\x15\x06\x15\x06\x00\x00",
                body,
            )
        )


def _filling(size: int) -> bytes:
    # A page of an index, which Arrow skips. Fewer bytes than one takes may only follow
    # the last value.
    content = bytes(max(size - _HEADER_BYTES, 0))
    sizes = _varint(2 * len(content))
    header = b"\x15\x02\x15" + sizes + b"\x15" + sizes
    # A field that no reader knows makes its header as long as is needed.
    missing = size - len(header) - 1 - len(content)
    if missing > 1:
        # Less than 128: the length takes one byte.
        header += bytes([6 << 4 | 8, missing - 2]) + bytes(missing - 2)
    elif missing:
        header += bytes([6 << 4 | 1])
    return (header + b"\0" + content)[:size]


def _pages(content: bytes) -> list[_Page]:
    # The pages of a column chunk; one whose header is damaged has no number of values.
    pages: list[_Page] = []
    place = 0
    while place < len(content):
        page = _page(content, place)
        if page is None:
            stop = _next_chain(content, place)
            if pages and pages[-1].kind != _DICTIONARY:
                # The size in the header before may be wrong.
                place = pages.pop().start
            page = _Page(start=place, stop=stop)
        pages.append(page)
        place = page.stop
    return pages


def _next_chain(content: bytes, place: int) -> int:
    # The first place from which pages follow each other to the end.
    while True:
        place = content.find(b"\x15", place + 1)
        if place < 0:
            return len(content)
        end = place
        while end < len(content):
            page = _page(content, end)
            if page is None or page.kind == _DICTIONARY:
                break
            end = page.stop
        if end == len(content):
            return place


def _page(content: bytes, place: int) -> _Page | None:
    try:
        fields, begin = _struct(content, place)
        kind, size = fields[_KIND], fields[_SIZE]
        if kind == _DICTIONARY:
            values: dict[int, Any] = {1: 0}
        else:
            values = fields[_V2_FIELDS if kind == _DATA_V2 else _DATA_FIELDS]
        encoding = values.get(4 if kind == _DATA_V2 else 2)
        count, stop = values[1], begin + size
    except (IndexError, KeyError, TypeError, ValueError, AttributeError):
        return None
    if kind not in (_DATA, _DICTIONARY, _DATA_V2) or count < 0 or size < 0:
        return None
    if fields.get(_RAW_SIZE, -1) < 0 or stop > len(content):
        return None
    return _Page(
        start=place,
        stop=stop,
        kind=kind,
        num_values=count,
        uses_dictionary=encoding in _OF_DICTIONARY,
    )


def _varint(number: int) -> bytes:
    digits = bytearray()
    while number > 0x7F:
        digits.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*digits, number])


def _read_varint(content: bytes, place: int) -> tuple[int, int]:
    number = 0
    for digit in range(10):
        byte = content[place + digit]
        number |= (byte & 0x7F) << 7 * digit
        if byte < 0x80:
            return number, place + digit + 1
    raise ValueError


def _struct(content: bytes, place: int, depth: int = 0) -> tuple[dict[int, Any], int]:
    # The fields of a Thrift struct by number, and where it ends.
    fields: dict[int, Any] = {}
    number = 0
    if depth > 4:
        raise ValueError
    while True:
        head = content[place]
        place += 1
        if not head:
            return fields, place
        kind, delta = head & 15, head >> 4
        if delta:
            number += delta
        else:
            raw, place = _read_varint(content, place)
            number = raw >> 1 ^ -(raw & 1)
        if kind in (1, 2):
            fields[number] = kind == 1
        elif kind in (3, 7):
            place += 1 if kind == 3 else 8
        elif kind in (4, 5, 6):
            raw, place = _read_varint(content, place)
            fields[number] = raw >> 1 ^ -(raw & 1)
        elif kind == 8:
            length, place = _read_varint(content, place)
            place += length
        elif kind == 12:
            fields[number], place = _struct(content, place, depth + 1)
        else:
            raise ValueError
