"""The ID of a machine's memory, which is lost along with the memory's content."""

from __future__ import annotations

import functools
import os
import pathlib
import re
import secrets
import socket

from absl import logging
from etils import epath

from elastic_ckpt.core import errors, storage

FILE = "machine"
ID_LENGTH = 16
# The ID is part of file names.
_ID = re.compile(rb"[0-9a-f]{%d}" % ID_LENGTH)
_IN_MEMORY = frozenset({"devtmpfs", "hugetlbfs", "ramfs", "tmpfs"})


def machine_id(root: epath.PathLike) -> str:
    """The ID of the RAM disk at `root`, 16 hex digits, which the first call creates.

    Raises:
      CheckpointError: if `root` cannot be created or belongs to another user, or the
        file with its ID is damaged.
    """
    path = os.path.join(root, FILE)
    if not os.path.exists(path):
        # Only a run's owner may read its files.
        try:
            storage.make_private_directory(root)
        except OSError as error:
            raise errors.CheckpointError(
                f"the RAM directory {os.fspath(root)} cannot be created"
                f" ({error.strerror}); set local_checkpoint_directory (the directory of"
                " ec.Local) to a tmpfs directory that this user may write to, such as"
                " /dev/shm"
            ) from error
    # The owner could change the steps and their digests. Root could always do so.
    owner = os.stat(root).st_uid
    if owner not in (0, os.geteuid()):
        raise errors.CheckpointError(
            f"{root} on {socket.gethostname()} belongs to user {owner}, but this"
            f" process runs as user {os.geteuid()}, so the other user could change the"
            " steps there; remove the directory, or set local_checkpoint_directory (the"
            " directory of ec.Local) to a directory of your own"
        )
    if not os.path.exists(path):
        storage.create(path, secrets.token_hex(ID_LENGTH // 2).encode())
    known = find(root)
    assert known is not None
    return known


def find(root: epath.PathLike) -> str | None:
    """The ID of the RAM disk at `root`; None if there is none on this machine.

    Raises:
      CheckpointError: if the file with the ID is damaged.
    """
    path = pathlib.Path(root, FILE)
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    if not _ID.fullmatch(content):
        raise errors.CheckpointError(
            f"{path} contains {content[: 2 * ID_LENGTH]!r}, not the {ID_LENGTH} hex"
            " digits of a machine ID; remove the RAM disk directory, whose files are"
            " useless without the ID"
        )
    return content.decode()


@functools.cache
def warn_unless_in_memory(root: epath.PathLike) -> None:
    """Warns once per process if a RAM disk is not in memory."""
    device = os.stat(root).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    mounts = pathlib.Path("/proc/self/mountinfo").read_text().splitlines()
    # The file system's type follows the dash.
    kinds = {each.split()[2]: each.rpartition(" - ")[2].split()[0] for each in mounts}
    kind = kinds.get(number)
    if kind is not None and kind not in _IN_MEMORY:
        logging.warning(
            "%s is on a file system of type %s, not in memory: saves are as slow as"
            " that disk and wear it out; set the directory of ec.Local"
            " (local_checkpoint_directory in a configuration) to a tmpfs directory,"
            " such as /dev/shm/run",
            root,
            kind,
        )
