"""Opens a file of a checkpoint: a regular one, since reading a pipe would not end."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from typing import IO

from etils import epath

from elastic_ckpt.core import storage
from elastic_ckpt.universal.formats.format_error import FormatError


def opened(path: epath.PathLike) -> IO[bytes]:
    """The file, open for reading.

    Args:
      path: local, or in a bucket; it may be a link.

    Raises:
      FormatError: if it is missing, or no regular file.
    """
    try:
        if storage.is_local(path) and not stat.S_ISREG(os.stat(path).st_mode):
            raise FormatError(f"{path} is no regular file; copy the whole checkpoint")
        return epath.Path(path).open("rb")
    except (FileNotFoundError, IsADirectoryError):
        raise FormatError(f"{path} is missing; copy the whole checkpoint") from None


def num_stored_bytes(path: epath.PathLike, num_bytes: int | None = None) -> int:
    """The bytes of a file without its holes, which take no space; 0 of no file.

    Args:
      path: local, or in a bucket.
      num_bytes: its size; None if it is not known.
    """
    if not storage.is_local(path):
        return epath.Path(path).stat().length if num_bytes is None else num_bytes
    if not stat.S_ISREG(os.stat(path).st_mode):
        return 0
    stored = end = 0
    with open(path, "rb") as file:
        try:
            while True:
                start = os.lseek(file.fileno(), end, os.SEEK_DATA)
                end = os.lseek(file.fileno(), start, os.SEEK_HOLE)
                stored += end - start
        except OSError as error:
            # There are no values behind `end`.
            if error.errno != errno.ENXIO:
                raise
    return stored


def num_stored_bytes_in(directory: epath.Path) -> int:
    """The bytes of all files in a directory, without their holes."""
    return sum(map(num_stored_bytes, _files(directory)))


def _files(directory: epath.Path) -> Iterator[epath.PathLike]:
    if storage.is_local(directory):
        # Links may lead back.
        for parent, _, names in os.walk(directory):
            yield from (os.path.join(parent, name) for name in names)
    else:
        for path in directory.rglob("*"):
            if not path.is_dir():
                yield path
