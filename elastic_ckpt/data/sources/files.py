"""Data files, here or in any store that fsspec opens, and patience with bad reads."""

from __future__ import annotations

import contextlib
import dataclasses
import glob
import hashlib
import os
import time
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO, TypeVar

import fsspec
from absl import logging

from elastic_ckpt.core import errors, storage

T = TypeVar("T")

# Pauses before each further try, for networks and disks that come back.
_PAUSES_SECS = (0.1, 0.5, 2.0)
# Errors that do not go away by trying again, when a run starts.
_LASTING = (FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError)

# The spans of a file that its sample covers: a file of 32 KiB is covered whole.
_SAMPLE_SPANS = 8
_SAMPLE_SPAN_BYTES = 4096

# The properties by which stores tell one version of an object from another.
_VERSIONS = ("etag", "generation", "md5hash", "mtime", "created", "lastmodified")

# What forgets what this process remembers of files.
_FORGET: list[Callable[[], object]] = []


@dataclasses.dataclass(frozen=True, kw_only=True)
class Content:
    """What is in a file, as far as a glance shows it.

    Attributes:
      num_bytes: its size.
      sample: 8 hex digits of the bytes in up to 8 spans of 4 KiB, evenly spaced from
        its begin to its end.
      version: changes with each write; empty if the store has no such property.
    """

    num_bytes: int
    sample: str
    version: str


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


def names(value: Any, *, of: str, required: bool = False) -> tuple[str, ...]:
    """A tuple of names, such as `files` or `columns`, from what a caller gave.

    Args:
      value: names or paths.
      of: the class and argument that they were given to, for messages.
      required: whether there has to be one.

    Raises:
      ConfigError: if it is a single text, something else than names, or empty.
    """
    if isinstance(value, str | bytes | os.PathLike):
        raise errors.ConfigError(
            f"{of}={value!r} is a single name; give a tuple: ({value!r},)"
        )
    try:
        found = tuple(str(os.fspath(name)) for name in value)
    except TypeError as error:
        raise errors.ConfigError(f"{of}={value!r}: {error}; give names") from None
    if required and not found:
        raise errors.ConfigError(f"{of} is empty; give at least one")
    return found


def absolute(patterns: str) -> str:
    """Comma-separated patterns, those of this machine as absolute paths."""
    parts = filter(None, (part.strip() for part in patterns.split(",")))
    return ",".join(
        os.path.abspath(os.path.expanduser(part)) if storage.is_local(part) else part
        for part in parts
    )


def content(file: str) -> Content:
    """Size, sample and version of `file`."""
    if storage.is_local(file):
        with open(file, "rb") as local:
            descriptor = local.fileno()
            version = _local_version(os.fstat(descriptor))
            num_bytes = os.fstat(descriptor).st_size
            spans = [
                os.pread(descriptor, _SAMPLE_SPAN_BYTES, start)
                for start in _sample_starts(num_bytes)
            ]
    else:
        system, path = fsspec.url_to_fs(file)
        properties = {
            name.lower().replace("-", "").replace("_", ""): value
            for name, value in system.info(path).items()
        }
        found = [str(properties[name]) for name in _VERSIONS if properties.get(name)]
        version, num_bytes = " ".join(found), properties["size"]
        starts = _sample_starts(num_bytes)
        stops = [min(start + _SAMPLE_SPAN_BYTES, num_bytes) for start in starts]
        spans = system.cat_ranges([path] * len(starts), starts, stops, on_error="raise")
    sample = hashlib.blake2b(b"".join(spans), digest_size=4).hexdigest()
    return Content(num_bytes=num_bytes, sample=sample, version=version)


def has_changed(file: str, version: str) -> bool:
    """Whether a file of this machine is of another version; others are not asked."""
    if not storage.is_local(file) or not version:
        return False
    try:
        return _local_version(os.stat(file)) != version
    except OSError:
        return True


def remembers(forget: Callable[[], object]) -> None:
    """Has `forget_all` call `forget`, which clears what a module remembers of files."""
    _FORGET.append(forget)


def forget_all() -> None:
    """Forgets indexes and open files: one of them has changed."""
    for forget in _FORGET:
        forget()


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


def retried(read: Callable[[], T], place: str, *, at_start: bool = False) -> T:
    """What `read` returns, tried again after each `OSError`.

    Args:
      read: may be called several times.
      place: the file, and where in it, for messages.
      at_start: whether this is the first time that the run reads the file; if it is
        missing then, it is not waited for.

    Raises:
      DataError: naming the place, when the last try has failed.
    """
    for pause_secs in _PAUSES_SECS:
        try:
            return read()
        except OSError as error:
            if at_start and isinstance(error, _LASTING):
                raise errors.DataError(
                    f"{place}: {error.strerror or 'cannot be opened'}; correct the"
                    " path, or restore the file"
                ) from error
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


def _sample_starts(num_bytes: int) -> list[int]:
    last = num_bytes - _SAMPLE_SPAN_BYTES
    if last <= 0:
        return [0] if num_bytes else []
    spans = min(_SAMPLE_SPANS, -(-num_bytes // _SAMPLE_SPAN_BYTES))
    return [last * span // (spans - 1) for span in range(spans)]


def _local_version(found: os.stat_result) -> str:
    # The time of change cannot be set: unlike that of modification it shows a file that
    # was copied here together with its times.
    return f"{found.st_ino} {found.st_size} {found.st_mtime_ns} {found.st_ctime_ns}"
