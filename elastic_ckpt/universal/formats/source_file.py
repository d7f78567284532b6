"""Opens a file of a checkpoint: a regular one, since reading a pipe would not end."""

from __future__ import annotations

import os
import stat
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
