"""Writes the text files under a directory to a training file, one record per file."""

from __future__ import annotations

import dataclasses
import itertools
import os
import pathlib
import sysconfig
from collections.abc import Callable, Iterable, Iterator

from etils import epath

from elastic_ckpt.core import errors, storage
from elastic_ckpt.data.sources import columns

PYTHON_STDLIB = "python-stdlib"

# Directories under the standard library's that are not part of the library.
_NOT_STDLIB = ("site-packages", "dist-packages")
_ROW_GROUP_DOCUMENTS = 100


@dataclasses.dataclass(frozen=True, kw_only=True)
class Written:
    """A summary of the written data.

    Attributes:
      num_documents: the number of documents.
      text_bytes: the total size of the text.
      skipped: the paths of files that were skipped: they are empty or not UTF-8.
    """

    num_documents: int
    text_bytes: int
    skipped: tuple[str, ...] = ()


def write_arrayrecord(directory: epath.PathLike, file: epath.PathLike) -> Written:
    """Writes the text files under a directory as the records of an ArrayRecord file.

    Records are sorted by path, so the same files always produce the same records. Files
    that are empty or not UTF-8 are skipped.

    Args:
      directory: a local directory; or, for the `.py` files of the running Python's
        standard library, `python-stdlib` or a part such as `python-stdlib/email`.
      file: the ArrayRecord file, local or in a bucket; it is written atomically.

    Raises:
      DataError: if the directory is missing or has no text.
    """
    return write(os.fspath(directory), os.fspath(file), file_type="arrayrecord")


def write(directory: str, file: str, *, file_type: str) -> Written:
    """Like `write_arrayrecord`, but for any file type that can be written.

    Raises:
      ConfigError: if `file_type` cannot be written.
    """
    if file_type not in _WRITERS:
        raise errors.ConfigError(
            f"{file}: text cannot be written as {file_type}; set grain_file_type to one"
            f" of {', '.join(sorted(_WRITERS))}, or use your own data files"
        )
    sizes: list[int] = []
    skipped: list[str] = []

    def texts() -> Iterator[bytes]:
        for path in _documents(directory):
            content = path.read_bytes()
            try:
                is_text = bool(content.decode()) and b"\0" not in content
            except UnicodeDecodeError:
                is_text = False
            if is_text:
                sizes.append(len(content))
                yield content
            else:
                skipped.append(str(path))

    with storage.atomic_path(file) as temporary:
        _WRITERS[file_type](temporary, texts())
        if not sizes:
            raise errors.DataError(
                f"{directory}: this machine has no text files under this path; pass a"
                " directory that contains text files, or"
                f" {PYTHON_STDLIB!r} for Python's own sources"
            )
    return Written(
        num_documents=len(sizes), text_bytes=sum(sizes), skipped=tuple(skipped)
    )


def file_type(file: str) -> str | None:
    """The file type for a file name's suffix, such as `.parquet`; None if unknown."""
    return _FILE_TYPES.get(pathlib.PurePath(file).suffix.lower())


def _write_arrayrecord(path: str, texts: Iterable[bytes]) -> None:
    from array_record.python import array_record_module

    writer = array_record_module.ArrayRecordWriter(path, "group_size:1")
    for content in texts:
        writer.write(content)
    writer.close()


def _write_parquet(path: str, texts: Iterable[bytes]) -> None:
    pa, writer_class = columns.pyarrow(), columns.pyarrow(".parquet").ParquetWriter
    schema = pa.schema([("text", pa.string())])
    with writer_class(path, schema, write_page_checksum=True) as writer:
        contents = iter(texts)
        while group := list(itertools.islice(contents, _ROW_GROUP_DOCUMENTS)):
            texts_of = {"text": [content.decode() for content in group]}
            writer.write_table(pa.table(texts_of, schema=schema))


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
    root, pattern = pathlib.Path(directory).expanduser(), "*"
    foreign: tuple[str, ...] = ()
    if first == PYTHON_STDLIB:
        root, pattern = pathlib.Path(sysconfig.get_path("stdlib"), part), "*.py"
        foreign = _NOT_STDLIB
    documents = {}
    for path in filter(pathlib.Path.is_file, root.rglob(pattern)):
        below = path.relative_to(root)
        if not any(p.startswith(".") or p in foreign for p in below.parts):
            documents[below.as_posix()] = path
    return [documents[name] for name in sorted(documents)]
