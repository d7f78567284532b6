"""Data files, local or in any store that fsspec supports; reads are retried."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import glob
import hashlib
import os
import time
from collections.abc import Callable, Iterable
from typing import Any, BinaryIO, TypeVar

import fsspec
from absl import logging
from fsspec import asyn

from elastic_ckpt.core import bucket_clients, errors, storage
from elastic_ckpt.data.sources import remote_file

T = TypeVar("T")

# Pauses before each retry, for temporary failures of networks and disks.
_PAUSES_SECS = (0.1, 0.5, 2.0)
# Errors that are not retried at the start of a run.
_LASTING = (FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError)

# The spans of a file's sample, which covers files of up to 32 KiB completely.
_SAMPLE_SPANS = 8
_SAMPLE_SPAN_BYTES = 4096

# The properties by which stores distinguish versions of an object. For a local file,
# `created` is the time of the last change, which users cannot set.
_VERSIONS = (
    "etag",
    "generation",
    "md5hash",
    "mtime",
    "created",
    "lastmodified",
    "ino",
)

# Protocols of sites that may change files, limit requests, or be unable to list files.
_SITES = ("hf", "http", "https")

# Maximum time until a store's first response.
_REACH_SECS = 20

# How long an object's size and version are cached.
_LOOK_SECS = 30.0

# Functions that clear this process's caches of files.
_CLEAR_CACHES: list[Callable[[], object]] = []


@dataclasses.dataclass(frozen=True, kw_only=True)
class Content:
    """A summary of the content of a file.

    Attributes:
      num_bytes: the size of the file.
      digest: a digest, in 16 hex digits, of up to 8 spans of 4 KiB, evenly spaced from
        the beginning to the end, and of any other parts that the format digests.
      version: a string that changes with each write; empty if the store has none.
    """

    num_bytes: int
    digest: str
    version: str


def find_files(patterns: str, *, key: str = "grain_train_files") -> tuple[str, ...]:
    """The files that match comma-separated patterns, sorted within each pattern.

    Args:
      patterns: paths or globs, local or as URIs of any scheme that fsspec supports.
      key: the configuration key of the patterns, used in error messages.

    Raises:
      DataError: if a pattern matches nothing. The message includes the pattern.
      ConfigError: if two patterns match the same file, or if a pattern with brackets is
        itself the name of a file that it does not match.
    """
    matched: dict[str, str] = {}
    for pattern in _patterns(patterns):
        matches = list(map(absolute_path, _matches(pattern)))
        if "[" in pattern and not {*matches}.issuperset(
            map(absolute_path, _matches(glob.escape(pattern)))
        ):
            raise errors.ConfigError(
                f"{key}: brackets in {pattern} match one of the characters in them, so"
                f" the file of this name is not read; write {glob.escape(pattern)}"
            )
        if not matches:
            raise errors.DataError(
                f"{key}: {pattern} matches no files; check the path, or write a file"
                " with `elastic-ckpt data DIRECTORY FILE`"
            )
        for match in matches:
            if match in matched:
                raise errors.ConfigError(
                    f"{key}: {matched[match]} and {pattern} both match {match}, so it"
                    " would be read twice in each epoch; list each file once"
                )
        matched |= dict.fromkeys(matches, pattern)
    if not matched:
        raise errors.DataError(f"{key} is empty; set it to the files to read")
    return tuple(matched)


def exists(file: str) -> bool:
    """Whether a path or URI exists."""
    return bool(_matches(file))


def names(value: Any, *, argument: str, required: bool = False) -> tuple[str, ...]:
    """Checks an argument that takes names, such as `files`, and returns a tuple.

    Raises:
      ConfigError: if `value` is a single string, does not consist of names, lacks a
        required name, or contains a name twice.
    """
    is_single = isinstance(value, str | bytes | os.PathLike)
    items = () if is_single else tuple(value or ())
    if (
        is_single
        or not all(isinstance(name, str | os.PathLike) for name in items)
        or (required and not items)
    ):
        raise errors.ConfigError(
            f"{argument}={value!r}: pass a tuple of {'one or more ' * required}names"
        )
    for name, number in collections.Counter(items).most_common(1):
        if number > 1:
            raise errors.ConfigError(f"{argument} lists {name!r} twice; list it once")
    return tuple(map(str, items))


def absolute(patterns: str) -> str:
    """Makes local paths in comma-separated patterns absolute."""
    return ",".join(map(absolute_path, _patterns(patterns)))


def absolute_path(path: str) -> str:
    """Makes a path absolute, because the program may change its working directory."""
    if not storage.is_local(path):
        return path
    return os.path.abspath(os.path.expanduser(path))


def content(*files: str) -> Content:
    """The size of the first file, and the version and sample digest of all files."""
    found = list(map(_looked_up, files))
    sample = hashlib.blake2b(digest_size=8)
    for each in found:
        last = max(0, each.num_bytes - _SAMPLE_SPAN_BYTES)
        starts = sorted({last * n // (_SAMPLE_SPANS - 1) for n in range(_SAMPLE_SPANS)})
        stops = [min(start + _SAMPLE_SPAN_BYTES, each.num_bytes) for start in starts]
        if storage.is_local(each.url):
            with open(each.path, "rb") as file:
                for start, stop in zip(starts, stops, strict=True):
                    sample.update(os.pread(file.fileno(), stop - start, start))
            continue
        paths = [each.path] * len(starts)
        with remote_file.store_errors():
            spans = each.system.cat_ranges(paths, starts, stops, on_error="raise")
        sample.update(b"".join(spans))
    return Content(
        num_bytes=found[0].num_bytes, digest=sample.hexdigest(), version=_joined(found)
    )


def version(*files: str) -> str:
    """A string that changes, within 30 s, when one of the files is written.

    Empty if a store has no such property or a file is missing.
    """
    with contextlib.suppress(OSError):
        return _joined(map(_looked_up, files))
    return ""


def _joined(found: Iterable[remote_file.Object]) -> str:
    versions = [each.version for each in found]
    return " ".join(versions) if all(versions) else ""


def register_cache(clear: Callable[[], object]) -> None:
    """Registers a function for `forget_all` that clears a cache of files."""
    _CLEAR_CACHES.append(clear)


def forget_all() -> None:
    """Clears all caches of indexes and open files, after a file has changed."""
    for clear in _CLEAR_CACHES:
        clear()


def opened(file: str, until: int | None = None) -> BinaryIO:
    """Opens a seekable file for reading; in an object store, only up to `until`."""
    if storage.is_local(file):
        return open(file, "rb")
    return remote_file.opened(_remote(file), until)


def read_ahead(file: str, start: int, stop: int) -> None:
    """Requests bytes of a file in an object store before they are read.

    Any error is raised later, by the read itself.
    """
    if start < stop and not storage.is_local(file):
        with contextlib.suppress(OSError, errors.DataError):
            remote_file.read_ahead(_remote(file), start, stop)


def local_copy(file: str) -> str:
    """A local path with the content of `file`, for readers that need one."""
    return file if storage.is_local(file) else remote_file.copied(_remote(file))


def retried(read: Callable[[], T], place: str, *, at_start: bool = False) -> T:
    """Calls `read` and retries after each `OSError`.

    Args:
      read: the function, which may be called more than once.
      place: the file and the position in the file, used in error messages.
      at_start: whether this is the run's first read of the file. If it is, a missing
        file fails immediately.

    Raises:
      DataError: if the last attempt fails. The message includes the place.
    """
    pauses_secs = iter(_PAUSES_SECS)
    while True:
        try:
            return read()
        except OSError as error:
            if at_start and isinstance(error, _LASTING):
                raise errors.DataError(
                    f"{place}: {error.strerror or 'cannot be opened'}; correct the"
                    " path, or restore the file"
                ) from error
            pause_secs = next(pauses_secs, None)
            if pause_secs is None:
                raise errors.DataError(
                    f"{place}: reading failed {len(_PAUSES_SECS) + 1} times ({error});"
                    " restore the file or access to it, and restart the run"
                ) from error
            logging.warning("%s: %s; retrying in %s s", place, error, pause_secs)
            time.sleep(pause_secs)


def _patterns(text: str) -> Iterable[str]:
    return filter(None, (part.strip() for part in text.split(",")))


def _matches(pattern: str) -> list[str]:
    # Globs skip directories; a directory that is listed fails when it is read.
    if storage.is_local(pattern):
        pattern = os.path.expanduser(pattern)
        if not glob.has_magic(pattern):
            return [pattern] * os.path.exists(pattern)
        found = glob.glob(pattern, recursive=True)
        return sorted(match for match in found if not os.path.isdir(match))
    system, path = _located(pattern)

    def listed() -> list[str]:
        with remote_file.store_errors():
            if glob.has_magic(path):
                matches = system.glob(path, detail=True)
                return [m for m in matches if matches[m]["type"] != "directory"]
            return [path] * system.exists(path)

    return sorted(map(system.unstrip_protocol, retried(listed, pattern, at_start=True)))


def _located(file: str) -> tuple[Any, str]:
    # A remote file's file system, and the file's path in it.
    protocol = file.partition("://")[0]
    bucket_clients.prepare(file, is_data=True)
    try:
        if protocol in _SITES:
            raise ValueError(
                "such a site may change files, limit requests, or be unable to list"
                " files"
            )
        system, path = fsspec.url_to_fs(file)
    except (ImportError, ValueError) as error:
        raise errors.DataError(
            f"{file}: data cannot be read from {protocol}:// ({error}); download the"
            " files, or copy them to gs://, s3:// or az://"
        ) from None
    bucket = f"{protocol}://{path.partition('/')[0]}"
    if bucket_clients.is_bucket(file) and bucket not in _REACHED:
        _check_reachable(system, bucket, path)
        _REACHED.add(bucket)
    return system, path


# The buckets whose stores have answered.
_REACHED: set[str] = set()


def _check_reachable(system: Any, bucket: str, path: str) -> None:
    # Clients retry for minutes, even if their store never answered.
    try:
        # Not `_exists`, which returns False for an unreachable store.
        asyn.sync(system.loop, system._info, path, timeout=_REACH_SECS)
    except bucket_clients.failures() as error:
        # If the store answered, the next request raises its own error.
        is_late = isinstance(error, TimeoutError)
        if is_late or bucket_clients.is_connection_failure(error):
            raise errors.DataError(
                f"{bucket}: the store did not respond within {_REACH_SECS} s"
                f" ({error}); check this machine's network and the store's address"
                " (AWS_ENDPOINT_URL, STORAGE_EMULATOR_HOST or Azure's equivalent),"
                " then restart the run"
            ) from error


def _remote(file: str) -> remote_file.Object:
    # Checks that this process has not read a different version before.
    remote = _looked_up(file)
    if _READ.setdefault(file, remote) != remote:
        raise errors.DataError(
            f"{file} was overwritten during the run (its version was"
            f" {_READ[file].version!r}, and is now {remote.version!r}); restore the"
            " original file, and restart the run"
        )
    return remote


def _looked_up(file: str) -> remote_file.Object:
    if storage.is_local(file):
        return _found(os.path.realpath(file))
    return _looked_up_in(file, int(time.monotonic() // _LOOK_SECS))


@functools.lru_cache(maxsize=2**16)
def _looked_up_in(file: str, period: int) -> remote_file.Object:
    del period
    return _found(file)


def _found(file: str) -> remote_file.Object:
    system, path = _located(file)
    with remote_file.store_errors():
        properties = {
            name.lower().replace("-", "").replace("_", ""): value
            for name, value in system.info(path).items()
        }
    versions = [str(properties[name]) for name in _VERSIONS if properties.get(name)]
    return remote_file.Object(
        url=file,
        version=" ".join(versions),
        system=system,
        path=path,
        num_bytes=properties["size"],
    )


# The objects that this process has read.
_READ: dict[str, remote_file.Object] = {}

register_cache(_looked_up_in.cache_clear)
register_cache(_READ.clear)
register_cache(remote_file.forget)
