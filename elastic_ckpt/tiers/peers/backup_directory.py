"""The files of a backup host in its RAM disk, besides those of every machine.

backup_host        the RAM disk is that of a backup host: how it fetches parts, as JSON
backup_request     the newest request that it has not taken yet
backup_refused     the request that it could not do last, and why, as JSON
"""

from __future__ import annotations

import contextlib
import hashlib
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
_REFUSED = "backup_refused"
_MOST_WHY = 2000


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


def name_of(request: bytes) -> str:
    """The name of a request, different for each content."""
    return hashlib.blake2b(request, digest_size=16).hexdigest()


def refuse(root: epath.PathLike, request: bytes, why: str) -> None:
    """Notes why a request cannot be done, for who has sent it."""
    refused = {"request": name_of(request), "why": why[:_MOST_WHY]}
    records.write(root, _REFUSED, refused)


def refused(root: epath.PathLike) -> dict[str, str] | None:
    """The request that could not be done last, and why; None if there is none."""
    return records.read(root, _REFUSED)
