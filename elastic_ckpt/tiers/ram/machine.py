"""The id of a machine's memory: what is in it lasts as long as this id does."""

from __future__ import annotations

import os
import pathlib
import secrets

from etils import epath

from elastic_ckpt.core import storage

FILE = "machine"
ID_LENGTH = 16


def machine_id(root: epath.PathLike) -> str:
    """The id of the RAM disk at `root`, 16 hex digits, created by the first call."""
    path = os.path.join(root, FILE)
    if not os.path.exists(path):
        # Only the owner of a run may read its files.
        storage.make_private_directory(root)
        storage.create(path, secrets.token_hex(ID_LENGTH // 2).encode())
    return pathlib.Path(path).read_text()


def find(root: epath.PathLike) -> str | None:
    """The id of the RAM disk at `root`; None if there is none on this machine."""
    try:
        return pathlib.Path(root, FILE).read_text()
    except FileNotFoundError:
        return None
