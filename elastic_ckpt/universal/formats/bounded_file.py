"""Reads whole files that may not be larger than a limit."""

from __future__ import annotations

from etils import epath

from elastic_ckpt.universal.formats import source_file
from elastic_ckpt.universal.formats.format_error import FormatError

# The most of a file that has the name of another.
MOST_NAME_BYTES = 1000


def read(path: epath.PathLike, *, most_bytes: int) -> bytes:
    """The content of a file.

    Args:
      path: local, or in a bucket.
      most_bytes: the limit.

    Raises:
      FormatError: if the file is missing, larger, or has holes.
    """
    with source_file.opened(path) as file:
        num_bytes = file.seek(0, 2)
        if num_bytes > most_bytes:
            raise FormatError(
                f"{path} has {num_bytes} bytes, and at most {most_bytes} are read"
            )
        if source_file.num_stored_bytes(path, num_bytes) < num_bytes:
            raise FormatError(
                f"{path} has holes, which no such file has; copy it again"
            )
        file.seek(0)
        return file.read(num_bytes)
