"""The files that an agent serves: only regular files below `<root>/hosts`.

Names come from the network, and no link is followed (`no_follow`).
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import re
import stat
import urllib.parse
from collections.abc import Iterator, Sequence

from etils import epath

from elastic_ckpt.core import storage
from elastic_ckpt.tiers import no_follow

_SLOT = re.compile("[0-9]+")
_STEP = re.compile(r"([0-9]{1,18})-([^/]+)")
_MANIFEST = re.compile(r"manifest-[^/]+\.json")
# The errors of names that do not exist, or that must not be followed.
_ABSENT = (
    errno.EACCES,
    errno.EINVAL,
    errno.ELOOP,
    errno.ENAMETOOLONG,
    errno.ENOENT,
    errno.ENOTDIR,
)


class NotServedError(Exception):
    """There is no such file, or it is not for others."""


def parts(path: str) -> list[bytes]:
    """The names in the path of a URL, each decoded once.

    Raises:
      NotServedError: if one of them could lead elsewhere, or is hidden.
    """
    encoded = path.encode("utf-8", "surrogateescape").split(b"/")
    names = [urllib.parse.unquote_to_bytes(name) for name in encoded]
    for name in names:
        # `.` and `..` are hidden, too.
        if not name or name.startswith(b".") or set(name) & set(b"/\\\0"):
            raise NotServedError
    return names


def open_file(root: epath.PathLike, names: Sequence[bytes]) -> io.FileIO:
    """Opens `hosts/<slot>/<step>-<save>/...`, a regular file reached without links.

    Raises:
      NotServedError: if there is none.
    """
    if len(names) < 3:
        raise NotServedError
    try:
        return io.FileIO(no_follow.open_file(os.path.join(root, "hosts"), names))
    except OSError as error:
        if error.errno not in _ABSENT:
            raise
        raise NotServedError from None


def manifests(root: epath.PathLike) -> list[storage.Json]:
    """The manifests that there are now, by step: where each is, its size and time."""
    hosts = os.path.join(root, "hosts")
    found = []
    # Directories that are links are not entered, and those that are gone left out.
    for path, directories, files, descriptor in _walked(hosts):
        slot, _, name = os.path.relpath(path, hosts).partition("/")
        if not name:
            wanted = _SLOT if path == hosts else _STEP
            directories[:] = filter(wanted.fullmatch, directories)
            continue
        directories.clear()
        step, _, save = name.partition("-")
        for file in filter(_MANIFEST.fullmatch, files):
            # A step may be removed meanwhile.
            with contextlib.suppress(FileNotFoundError):
                status = os.stat(file, dir_fd=descriptor, follow_symlinks=False)
                if stat.S_ISREG(status.st_mode):
                    size, mtime = status.st_size, status.st_mtime
                    found.append((int(step), save, slot, file, size, mtime))
    keys = ("step", "save", "slot", "manifest", "bytes", "mtime")
    return [dict(zip(keys, each, strict=True)) for each in sorted(found)]


def _walked(top: str) -> Iterator[tuple[str, list[str], list[str], int]]:
    # Nothing may have been saved yet.
    with contextlib.suppress(FileNotFoundError):
        yield from os.fwalk(top)
