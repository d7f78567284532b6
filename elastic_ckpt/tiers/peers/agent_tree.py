"""The files that an agent serves: only regular files below `<root>/hosts`.

Names come from the network, and no link is followed (`no_follow`).
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import re
import urllib.parse
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from etils import epath

from elastic_ckpt.core import storage
from elastic_ckpt.tiers import no_follow

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
    return [manifest._asdict() for manifest in sorted(_manifests(root))]


class _Manifest(NamedTuple):
    step: int
    save: str
    slot: str
    manifest: str
    bytes: int
    mtime: float


def _manifests(root: epath.PathLike) -> Iterator[_Manifest]:
    for hosts, slot in _subdirectories(os.path.join(root, "hosts"), None):
        if not re.fullmatch("[0-9]+", slot):
            continue
        for steps, name in _subdirectories(slot, hosts):
            if not (parsed := _STEP.fullmatch(name)):
                continue
            with _scanned(name, steps) as (_, entries):
                for entry in entries:
                    regular = entry.is_file(follow_symlinks=False)
                    if not (regular and _MANIFEST.fullmatch(entry.name)):
                        continue
                    # A step may be removed meanwhile.
                    with contextlib.suppress(FileNotFoundError):
                        status = entry.stat(follow_symlinks=False)
                        yield _Manifest(
                            step=int(parsed[1]),
                            save=parsed[2],
                            slot=slot,
                            manifest=entry.name,
                            bytes=status.st_size,
                            mtime=status.st_mtime,
                        )


def _subdirectories(name: str, above: int | None) -> Iterator[tuple[int, str]]:
    with _scanned(name, above) as (descriptor, entries):
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                yield descriptor, entry.name


@contextlib.contextmanager
def _scanned(
    name: str, above: int | None
) -> Iterator[tuple[int, list[os.DirEntry[str]]]]:
    with contextlib.ExitStack() as stack:
        try:
            descriptor = stack.enter_context(no_follow.opened_directory(name, above))
            entries = list(stack.enter_context(os.scandir(descriptor)))
        except OSError as error:
            if error.errno not in _ABSENT:
                raise
            descriptor, entries = -1, []
        yield descriptor, entries
