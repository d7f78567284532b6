"""Writes the text files below a directory as training files, one record for each.

A file of JSON lines has a document on each line.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import io
import itertools
import json
import os
import pathlib
import sysconfig
from collections.abc import Callable, Iterable, Iterator

from etils import epath

from elastic_ckpt.core import errors, storage
from elastic_ckpt.data.lm import tokenizers
from elastic_ckpt.data.sources import files, parquet, tfrecord

PYTHON_STDLIB = "python-stdlib"

# Directories below the standard library's that are not part of it.
_NOT_STDLIB = ("site-packages", "dist-packages")
_ROW_GROUP_DOCUMENTS = 100
# Files that are read from a bucket at once.
_READERS = 16
# Files with a JSON object on each line.
_JSON_LINES = (".jsonl", ".ndjson")


# The path of a file, and its lines.
_Content = tuple[str, Iterable[bytes]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Written:
    """What was written.

    Attributes:
      num_documents: the number of documents.
      text_bytes: the bytes of text in them.
      skipped: the files that are empty or not UTF-8.
    """

    num_documents: int
    text_bytes: int
    skipped: tuple[str, ...] = ()


def write_arrayrecord(
    directory: epath.PathLike, file: epath.PathLike, *, column: str = "text"
) -> Written:
    """Writes the text files below a directory as the records of an ArrayRecord file.

    Each file is a record; of a file of JSON lines (`.jsonl`, `.ndjson`), each line is
    one. Records are in the order of the sorted paths, so that the same files always
    give the same records. Empty files, and those that are not UTF-8, are skipped.

    Args:
      directory: a directory, local or in a bucket, or one file of JSON lines; or
        `python-stdlib`, the `.py` files of the standard library of the running Python,
        or a part of it such as `python-stdlib/email`.
      file: the ArrayRecord file to write, local or in a bucket; it appears complete or
        not at all.
      column: the field of a JSON line that contains the text.

    Raises:
      DataError: if there is no such directory, if there is no text in it, or if a JSON
        line has no text.
    """
    places = os.fspath(directory), os.fspath(file)
    return write(*places, file_type="arrayrecord", column=column)


def write(
    directory: str, file: str, *, file_type: str, column: str = "text"
) -> Written:
    """Like `write_arrayrecord`, for any of the file types that can be written.

    Raises:
      ConfigError: if that is another file type.
    """
    if file_type not in _WRITERS:
        raise errors.ConfigError(
            f"{file}: text is not written to files of the type {file_type}; write"
            f" {', '.join(sorted(_WRITERS))} (grain_file_type), or read your own files"
        )
    if storage.is_local(directory):
        contents = _local_contents(directory)
    else:
        contents = _stored_contents(directory)
    counted = _Counted(contents, column)
    with storage.atomic_path(file) as temporary:
        _WRITERS[file_type](temporary, counted)
        if not counted.num_documents:
            raise errors.DataError(
                f"{directory}: this directory contains no text files; give one that"
                " does"
            )
    return Written(
        num_documents=counted.num_documents,
        text_bytes=counted.text_bytes,
        skipped=tuple(counted.skipped),
    )


def file_type(file: str) -> str | None:
    """The file type by the suffix of a name, such as `.parquet`; None if unknown."""
    return _FILE_TYPES.get(pathlib.PurePath(file).suffix.lower())


class _Counted:
    """Iterates over the documents in files, and counts them."""

    def __init__(self, contents: Iterable[_Content], column: str) -> None:
        self._contents = contents
        self._column = column
        self.num_documents = 0
        self.text_bytes = 0
        self.skipped: list[str] = []

    def __iter__(self) -> Iterator[bytes]:
        for name, lines in self._contents:
            if name.lower().endswith(_JSON_LINES):
                documents = _texts_of_lines(name, lines, self._column)
            else:
                documents = filter(_is_text, [b"".join(lines)])
            before = self.num_documents
            for document in documents:
                self.num_documents += 1
                self.text_bytes += len(document)
                yield document
            if self.num_documents == before:
                self.skipped.append(name)


def _texts_of_lines(name: str, lines: Iterable[bytes], column: str) -> Iterator[bytes]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        place = f"{name}, line {number}"
        try:
            fields = json.loads(line)
        except ValueError as error:
            raise errors.DataError(
                f"{place}: not JSON ({error}); correct the line, or rename the file if"
                " it is one text"
            ) from None
        found = sorted(fields) if isinstance(fields, dict) else type(fields).__name__
        text = fields.get(column) if isinstance(fields, dict) else None
        if not isinstance(text, str):
            raise errors.DataError(
                f"{place}: no text in the field {column!r}, found {found}; choose the"
                " field of the text with --column, which is column= in Python"
            )
        if text:
            yield tokenizers.readable(text).encode()


def _write_arrayrecord(path: str, texts: Iterable[bytes]) -> None:
    from array_record.python import array_record_module

    writer = array_record_module.ArrayRecordWriter(path, "group_size:1")
    for content in texts:
        writer.write(content)
    writer.close()


def _write_parquet(path: str, texts: Iterable[bytes]) -> None:
    writer_class = parquet.library().ParquetWriter
    import pyarrow as pa

    schema = pa.schema([("text", pa.string())])
    with writer_class(path, schema, write_page_checksum=True) as writer:
        contents = iter(texts)
        while group := list(itertools.islice(contents, _ROW_GROUP_DOCUMENTS)):
            columns = {"text": [content.decode() for content in group]}
            writer.write_table(pa.table(columns, schema=schema))


_WRITERS: dict[str, Callable[[str, Iterable[bytes]], None]] = {
    "arrayrecord": _write_arrayrecord,
    "parquet": _write_parquet,
    "tfrecord": tfrecord.write,
}

_FILE_TYPES = {
    ".array_record": "arrayrecord",
    ".arrayrecord": "arrayrecord",
    ".parquet": "parquet",
    ".tfrecord": "tfrecord",
    ".tfrecords": "tfrecord",
}


def _local_contents(directory: str) -> Iterator[_Content]:
    for path in _documents(directory):
        with path.open("rb") as lines:
            yield str(path), lines


def _documents(directory: str) -> list[pathlib.Path]:
    first, _, part = directory.partition("/")
    if first == PYTHON_STDLIB:
        root, pattern = pathlib.Path(sysconfig.get_path("stdlib"), part), "*.py"
    else:
        root, pattern = pathlib.Path(directory).expanduser(), "*"
    if root.is_file() and root.name.lower().endswith(_JSON_LINES):
        return [root]
    if not root.is_dir():
        raise errors.DataError(
            f"{root}: no such directory; give a directory with text files, a .jsonl"
            f" file, or {PYTHON_STDLIB!r} for Python's own sources"
        )
    documents = []
    for path in root.rglob(pattern):
        parts = path.relative_to(root).parts
        hidden = any(part.startswith(".") for part in parts)
        foreign = pattern == "*.py" and any(part in _NOT_STDLIB for part in parts)
        if not hidden and not foreign and path.is_file():
            documents.append(path)
    return sorted(documents, key=lambda path: path.relative_to(root).as_posix())


def _stored_contents(directory: str) -> Iterator[_Content]:
    # The content of each file below a directory in a bucket, likewise.
    if directory.lower().endswith(_JSON_LINES):
        yield directory, io.BytesIO(files.read(directory))
        return
    names = [
        name
        for name in files.below(directory)
        if not any(part.startswith(".") for part in name.split("/"))
    ]
    if not names:
        raise errors.DataError(
            f"{directory}: this directory contains no files; give one with text files"
        )
    with concurrent.futures.ThreadPoolExecutor(_READERS) as readers:
        for some in range(0, len(names), _READERS):
            paths = [f"{directory}/{name}" for name in names[some : some + _READERS]]
            contents = readers.map(files.read, paths)
            yield from zip(paths, map(io.BytesIO, contents), strict=True)


def _is_text(content: bytes) -> bool:
    if not content or b"\0" in content:
        return False
    try:
        content.decode()
    except UnicodeDecodeError:
        return False
    return True
