"""A directory that ends with the process that uses it.

Hosts without a RAM disk have files of components in one, and supervisors executables.

The process holds a lock in it, and removes it when it ends, also by an exception. If it
is killed, the next start by the same user finds the lock free, and removes it.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import tempfile
import weakref

from etils import epath

from elastic_ckpt.core import storage

_PREFIX = "elastic_ckpt-working-"
_LOCK = "in-use.lock"


class WorkingDirectory:
    """A new directory that is this process's until `close`, or until it ends.

    Removes the leftovers of killed processes beside it.

    Args:
      parent: the directory that has it, by default that of temporary files.

    Attributes:
      path: of the directory, which no other user can enter.
    """

    def __init__(self, parent: epath.PathLike | None = None) -> None:
        parent = parent or tempfile.gettempdir()
        _remove_leftovers(parent)
        self.path = storage.make_unique_directory(parent, prefix=_PREFIX)
        lock = os.path.join(self.path, _LOCK)
        kept = contextlib.ExitStack()
        kept.enter_context(storage.exclusive_lock(f"{lock}.new"))
        kept.callback(storage.remove, self.path)
        # Who looks for leftovers finds it locked, or does not find it.
        storage.rename(f"{lock}.new", lock)
        # This also runs if `close` is never called.
        self._release = weakref.finalize(self, kept.close)

    def close(self) -> None:
        """Removes the directory."""
        self._release()


def _remove_leftovers(parent: epath.PathLike) -> None:
    for lock in pathlib.Path(parent).glob(f"{_PREFIX}*/{_LOCK}"):
        with contextlib.suppress(OSError):
            is_own = lock.parent.lstat().st_uid == os.getuid()
            if is_own and not storage.is_locked(lock):
                storage.remove(lock.parent)
