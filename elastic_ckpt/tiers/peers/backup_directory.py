"""The files of a backup host in its RAM disk, besides those of every machine.

backup_host        the RAM disk is that of a backup host
backup_request     the newest request that it has not taken yet
"""

from __future__ import annotations

import contextlib
import os
import pathlib

from etils import epath

from elastic_ckpt.core import storage

# The path at which an agent takes requests.
URL_PATH = "/v1/backup"
REQUEST = "backup_request"
_MARKER = "backup_host"


def make(root: epath.PathLike) -> None:
    """Makes the RAM disk at `root` that of a backup host."""
    storage.make_private_directory(root)
    storage.write_atomic(os.path.join(root, _MARKER), b"")


def is_one(root: epath.PathLike) -> bool:
    """Whether the RAM disk at `root` is that of a backup host."""
    return os.path.exists(os.path.join(root, _MARKER))


def take_request(root: epath.PathLike) -> bytes | None:
    """The newest request, which is removed; None if there is none."""
    path = pathlib.Path(root, REQUEST)
    # A newer one may replace it between the two; then the next call has it.
    taken = path.with_name(f"{REQUEST}-taken")
    with contextlib.suppress(FileNotFoundError):
        storage.rename(path, taken)
        return taken.read_bytes()
    return None
