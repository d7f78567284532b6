"""The files of a backup host in its RAM disk, besides those of every machine.

backup_host        the RAM disk is that of a backup host: how it fetches parts, as JSON;
                   empty if a program of an earlier version made it
backup_request     the newest request that it has not taken yet
"""

from __future__ import annotations

import contextlib
import os
import pathlib
from typing import Any

from etils import epath

from elastic_ckpt.core import storage
from elastic_ckpt.tiers.peers import records

# The path at which an agent takes requests.
URL_PATH = "/v1/backup"
REQUEST = "backup_request"
_MARKER = "backup_host"


def make(root: epath.PathLike, **options: Any) -> None:
    """Makes the RAM disk at `root` that of a backup host.

    Args:
      root: of the RAM disk.
      **options: of its `PeerClient`.
    """
    storage.make_private_directory(root)
    records.write(root, _MARKER, options)


def read(root: epath.PathLike) -> dict[str, Any] | None:
    """The options of the backup host at `root`; None if it is none."""
    if not os.path.exists(os.path.join(root, _MARKER)):
        return None
    return records.read(root, _MARKER) or {}


def take_request(root: epath.PathLike) -> bytes | None:
    """The newest request, which is removed; None if there is none."""
    path = pathlib.Path(root, REQUEST)
    # A newer one may replace it between the two; then the next call has it.
    taken = path.with_name(f"{REQUEST}-taken")
    with contextlib.suppress(FileNotFoundError):
        storage.rename(path, taken)
        return taken.read_bytes()
    return None
