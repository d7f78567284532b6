"""Writes the text files below a directory as ArrayRecord, one file a record."""

from __future__ import annotations

import dataclasses
import pathlib
import sysconfig

from elastic_ckpt.core import errors, storage

PYTHON_STDLIB = "python-stdlib"

# Below the standard library's directory, but not of it.
_NOT_STDLIB = ("site-packages", "dist-packages")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Written:
    """What was written: how many documents, and how many bytes of text they hold."""

    num_documents: int
    text_bytes: int


def write_arrayrecord(directory: str, file: str) -> Written:
    """Writes each non-empty text file below `directory` as one record of `file`.

    Records follow the sorted relative paths, so the same tree gives the same file.
    Files that are not UTF-8 are taken for binary and left out.

    Args:
      directory: any directory, or `python-stdlib` for the `.py` files of the standard
        library of the Python that runs this.
      file: the ArrayRecord file to write; it appears whole or not at all.

    Raises:
      DataError: if there is no such directory, or no text in it.
    """
    from array_record.python import array_record_module

    documents = _documents(directory)
    text_bytes = 0
    num_documents = 0
    with storage.atomic_path(file) as temporary:
        writer = array_record_module.ArrayRecordWriter(temporary, "group_size:1")
        for path in documents:
            text = path.read_bytes()
            if not _is_text(text):
                continue
            writer.write(text)
            num_documents += 1
            text_bytes += len(text)
        writer.close()
        if not num_documents:
            raise errors.DataError(
                f"{directory}: no text file in it; name a directory that has some"
            )
    return Written(num_documents=num_documents, text_bytes=text_bytes)


def _documents(directory: str) -> list[pathlib.Path]:
    if directory == PYTHON_STDLIB:
        root, pattern = pathlib.Path(sysconfig.get_path("stdlib")), "*.py"
    else:
        root, pattern = pathlib.Path(directory).expanduser(), "*"
    if not root.is_dir():
        raise errors.DataError(
            f"{root}: no such directory; name one that has text files, or"
            f" {PYTHON_STDLIB!r} for Python's own sources"
        )
    found = []
    for path in root.rglob(pattern):
        parts = path.relative_to(root).parts
        hidden = any(part.startswith(".") for part in parts)
        foreign = pattern == "*.py" and any(part in _NOT_STDLIB for part in parts)
        if not hidden and not foreign and path.is_file():
            found.append(path)
    return sorted(found, key=lambda path: path.relative_to(root).as_posix())


def _is_text(content: bytes) -> bool:
    if not content or b"\0" in content:
        return False
    try:
        content.decode()
    except UnicodeDecodeError:
        return False
    return True
