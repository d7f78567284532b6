"""Data files, here or in any store that fsspec opens, and patience with bad reads."""

from __future__ import annotations

import contextlib
import glob
import os
import time
from collections.abc import Callable, Iterator
from typing import BinaryIO, TypeVar

import fsspec
from absl import logging

from elastic_ckpt.core import errors, storage

T = TypeVar("T")

# Pauses before each further try, for networks and disks that come back.
_PAUSES_SECS = (0.1, 0.5, 2.0)


def find_files(patterns: str, *, key: str = "grain_train_files") -> tuple[str, ...]:
    """The files of comma-separated paths or globs, sorted within each.

    Args:
      patterns: paths of this machine, or URIs of any scheme that fsspec knows.
      key: the configuration key that they come from, for messages.

    Raises:
      DataError: naming the pattern that matches nothing.
    """
    found: list[str] = []
    for pattern in filter(None, (part.strip() for part in patterns.split(","))):
        matches = _matches(pattern)
        if not matches:
            raise errors.DataError(
                f"{key}: {pattern} matches no file; write one with `elastic-ckpt data"
                " DIRECTORY FILE`, or set text_directory"
            )
        found += matches
    if not found:
        raise errors.DataError(f"{key} is empty; set it to the files to read")
    return tuple(found)


def absolute(patterns: str) -> str:
    """Comma-separated patterns, those of this machine as absolute paths."""
    parts = filter(None, (part.strip() for part in patterns.split(",")))
    return ",".join(
        os.path.abspath(os.path.expanduser(part)) if storage.is_local(part) else part
        for part in parts
    )


def size_bytes(file: str) -> int:
    """Bytes of `file`."""
    if storage.is_local(file):
        return os.stat(file).st_size
    system, path = fsspec.url_to_fs(file)
    return system.size(path)


@contextlib.contextmanager
def opened(file: str) -> Iterator[BinaryIO]:
    """`file` open for reading, seekable."""
    if storage.is_local(file):
        with open(file, "rb") as local:
            yield local
        return
    system, path = fsspec.url_to_fs(file)
    with system.open(path, "rb") as remote:
        yield remote


def local_copy(file: str) -> str:
    """A path of this machine with the content of `file`, for readers that need one."""
    if storage.is_local(file):
        return file
    return str(fsspec.open_local(f"simplecache::{file}"))


def retried(read: Callable[[], T], place: str) -> T:
    """What `read` returns, tried again after each `OSError`.

    Args:
      read: may be called several times.
      place: the file, and where in it, for messages.

    Raises:
      DataError: naming the place, when the last try has failed.
    """
    for pause_secs in _PAUSES_SECS:
        try:
            return read()
        except OSError as error:
            logging.warning("%s: %s; trying again in %s s", place, error, pause_secs)
            time.sleep(pause_secs)
    try:
        return read()
    except OSError as error:
        raise errors.DataError(
            f"{place}: cannot be read, in {len(_PAUSES_SECS) + 1} tries ({error});"
            " restore the file or the way to it, and start the run again"
        ) from error


def _matches(pattern: str) -> list[str]:
    if storage.is_local(pattern):
        return sorted(glob.glob(os.path.expanduser(pattern), recursive=True))
    system, path = fsspec.url_to_fs(pattern)
    found = system.glob(path) if glob.has_magic(path) else [path] * system.exists(path)
    return sorted(system.unstrip_protocol(match) for match in found)
