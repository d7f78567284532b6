"""Files that are opened without following a link.

Each directory on the way is opened by itself, below the one before: what was checked is
what is read, whatever happens to names meanwhile.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Sequence

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_PLACE = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC


def open_file(root: str, names: Sequence[str] | Sequence[bytes]) -> int:
    """Opens a regular file to be read, and returns its descriptor.

    Args:
      root: a directory.
      names: of the directories on the way from there, and of the file.

    Raises:
      OSError: as `os.open`; ELOOP for a link, EINVAL if it is no regular file.
    """
    descriptor = os.open(root, _DIRECTORY)
    try:
        for number, name in enumerate(names, start=1):
            flags = _DIRECTORY if number < len(names) else _PLACE
            below = os.open(name, flags, dir_fd=descriptor)
            os.close(descriptor)
            descriptor = below
        # Checked before it is opened (through /proc), because opening a pipe or
        # a device has side effects.
        mode = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(mode):
            kind = errno.ELOOP if stat.S_ISLNK(mode) else errno.EINVAL
            raise OSError(kind, "not a regular file")
        return os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.close(descriptor)
