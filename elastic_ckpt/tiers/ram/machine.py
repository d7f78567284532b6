"""The id of a machine's memory: what is in it lasts as long as this id does."""

from __future__ import annotations

import os
import re
import secrets

from etils import epath

from elastic_ckpt.core import errors, storage

FILE = "machine"
ID_LENGTH = 16
# It is a part of names of files.
_ID = re.compile(rb"[0-9a-f]{%d}" % ID_LENGTH)


def machine_id(root: epath.PathLike) -> str:
    """The id of the RAM disk at `root`, 16 hex digits, created by the first call.

    Raises:
      CheckpointError: if its file has something else.
    """
    path = os.path.join(root, FILE)
    if not os.path.exists(path):
        # Only the owner of a run may read its files.
        storage.make_private_directory(root)
        storage.create(path, secrets.token_hex(ID_LENGTH // 2).encode())
    return _read(path)


def find(root: epath.PathLike) -> str | None:
    """The id of the RAM disk at `root`; None if there is none on this machine.

    Raises:
      CheckpointError: if its file has something else.
    """
    try:
        return _read(os.path.join(root, FILE))
    except FileNotFoundError:
        return None


def _read(path: str) -> str:
    with open(path, "rb") as file:
        content = file.read(ID_LENGTH + 1)
    if not _ID.fullmatch(content):
        raise errors.CheckpointError(
            f"{path} has {content!r}, not the {ID_LENGTH} hex digits of a machine;"
            " remove the RAM disk, whose files are of no use without them"
        )
    return content.decode()
