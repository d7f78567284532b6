"""Reads whole files that may not be larger than a limit."""

from __future__ import annotations

from etils import epath

from elastic_ckpt.universal.formats.format_error import FormatError


def read(path: epath.PathLike, *, most_bytes: int) -> bytes:
    """The content of a file.

    Args:
      path: local, or in a bucket.
      most_bytes: the limit.

    Raises:
      FormatError: if the file is missing, or larger.
    """
    try:
        with epath.Path(path).open("rb") as file:
            num_bytes = file.seek(0, 2)
            if num_bytes > most_bytes:
                raise FormatError(
                    f"{path} has {num_bytes} bytes, and at most {most_bytes} are read"
                )
            file.seek(0)
            return file.read(num_bytes)
    except (FileNotFoundError, IsADirectoryError):
        raise FormatError(f"{path} is missing; copy the whole checkpoint") from None
