"""A temporary directory that the last process to use it removes.

Worlds without a RAM disk store component files in such a directory; supervisors store
executables in one.

Each process holds a shared lock in the directory until the process exits. The last
process removes the directory, even after an exception. If the last process is killed,
the next process that the same user launches removes the directory.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import tempfile
import weakref

from etils import epath

from elastic_ckpt.core import errors, storage

_NAME = re.compile(r"elastic_ckpt-([0-9]+)-[0-9a-f]{8}")
_LOCK = "in-use.lock"


def new_path(parent: str | None = None) -> str:
    """A path for a new working directory, by default in the system's temporary one."""
    name = f"elastic_ckpt-{os.getpid()}-{secrets.token_hex(4)}"
    return os.path.join(parent or tempfile.gettempdir(), name)


class WorkingDirectory:
    """A directory that this process uses until `close`, or until the process exits.

    Creating one also removes the directories that killed processes left next to it.

    Args:
      path: a path from `new_path`; other processes of the world may also use it.
    """

    def __init__(self, path: epath.PathLike) -> None:
        _remove_leftovers(os.path.dirname(path))
        storage.make_private_directory(path)
        presence = storage.Presence(os.path.join(path, _LOCK))
        # This also runs if `close` is never called.
        self._release = weakref.finalize(self, _release, os.fspath(path), presence)

    def close(self) -> None:
        """Removes the directory, unless another process is using it."""
        self._release()


def _release(path: str, presence: storage.Presence) -> None:
    presence.close()
    _remove_unless_used(path)


def _remove_leftovers(parent: str) -> None:
    for name in os.listdir(parent):
        named = _NAME.fullmatch(name)
        # A live creator may be about to lock it.
        if named and not os.path.exists(f"/proc/{named[1]}"):
            _remove_unless_used(os.path.join(parent, name))


def _remove_unless_used(path: str) -> None:
    # The lock fails if another process is using the directory.
    with contextlib.suppress(errors.RunError, OSError):
        # Never removes another user's directory or the target of another user's link.
        if os.lstat(path).st_uid == os.getuid():
            with storage.exclusive_lock(os.path.join(path, _LOCK)):
                storage.remove(path)
