"""Writes the text files below a directory as a training file, one record for each."""

from __future__ import annotations

import dataclasses
import itertools
import os
import pathlib
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence

from etils import epath

from elastic_ckpt.core import errors, storage
from elastic_ckpt.data.sources import parquet

PYTHON_STDLIB = "python-stdlib"

# Directories below the standard library's that are not part of it.
_NOT_STDLIB = ("site-packages", "dist-packages")
_ROW_GROUP_DOCUMENTS = 100


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


def write_arrayrecord(directory: epath.PathLike, file: epath.PathLike) -> Written:
    """Writes the text files below a directory as the records of an ArrayRecord file.

    Records are in the order of the sorted paths, so that the same files always give the
    same records. Empty files, and those that are not UTF-8, are skipped.

    Args:
      directory: a local directory; or `python-stdlib`, the `.py` files of the standard
        library of the running Python, or a part of it such as `python-stdlib/email`.
      file: the ArrayRecord file to write, local or in a bucket; it appears complete or
        not at all.

    Raises:
      DataError: if there is no such directory, or no text in it.
    """
    return write(os.fspath(directory), os.fspath(file), file_type="arrayrecord")


def write(directory: str, file: str, *, file_type: str) -> Written:
    """Like `write_arrayrecord`, for any of the file types that can be written.

    Raises:
      ConfigError: if that is another file type.
    """
    if file_type not in _WRITERS:
        raise errors.ConfigError(
            f"{file}: text is not written to files of the type {file_type}; write"
            f" {', '.join(sorted(_WRITERS))} (grain_file_type), or read your own files"
        )
    counted = _Counted(_documents(directory))
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
    """Iterates over the contents of text files, and counts them."""

    def __init__(self, paths: Sequence[pathlib.Path]) -> None:
        self._paths = paths
        self.num_documents = 0
        self.text_bytes = 0
        self.skipped: list[str] = []

    def __iter__(self) -> Iterator[bytes]:
        for path in self._paths:
            content = path.read_bytes()
            if not _is_text(content):
                self.skipped.append(str(path))
                continue
            self.num_documents += 1
            self.text_bytes += len(content)
            yield content


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
}

_FILE_TYPES = {
    ".array_record": "arrayrecord",
    ".arrayrecord": "arrayrecord",
    ".parquet": "parquet",
    ".tfrecord": "tfrecord",
    ".tfrecords": "tfrecord",
}


def _documents(directory: str) -> list[pathlib.Path]:
    first, _, part = directory.partition("/")
    if first == PYTHON_STDLIB:
        root, pattern = pathlib.Path(sysconfig.get_path("stdlib"), part), "*.py"
    else:
        root, pattern = pathlib.Path(directory).expanduser(), "*"
    if not root.is_dir():
        raise errors.DataError(
            f"{directory}: no such directory on this machine; give a directory with"
            f" text files, or {PYTHON_STDLIB!r} for Python's own sources"
        )
    documents = []
    for path in root.rglob(pattern):
        parts = path.relative_to(root).parts
        hidden = any(part.startswith(".") for part in parts)
        foreign = pattern == "*.py" and any(part in _NOT_STDLIB for part in parts)
        if not hidden and not foreign and path.is_file():
            documents.append(path)
    return sorted(documents, key=lambda path: path.relative_to(root).as_posix())


def _is_text(content: bytes) -> bool:
    if not content or b"\0" in content:
        return False
    try:
        content.decode()
    except UnicodeDecodeError:
        return False
    return True
