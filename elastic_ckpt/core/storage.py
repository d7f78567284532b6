"""Writes all files except append-only logs (`jsonlog`), and locks directories.

A file appears complete or not at all. A local file is written under a temporary name in
the same directory, flushed to disk and renamed; puts to object stores (`gs://`,
`s3://`) are atomic.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import mmap
import os
import pathlib
import re
import secrets
import socket
import struct
import tempfile
import time
from collections.abc import Collection, Iterator
from typing import IO, TYPE_CHECKING, Any

from etils import epath

from elastic_ckpt.core import bucket_clients, errors

if TYPE_CHECKING:
    import numpy as np

# The mode of new files, before the umask applies.
_MODE = 0o666
# The `struct flock` of a whole file; `kind` comes first.
_FLOCK = struct.Struct("hhqqi4x")
# Smaller files are written to object stores in one request; gcsfs would do the same.
_SMALL_BYTES = 5 * 2**20

# What TensorStore's paths cannot contain, by whether they are local. It writes to `a/b`
# for the file `a\b` and for the URL of `a%2Fb`, and refuses the others.
NOT_IN_TENSORSTORE = {
    True: re.compile(r"\\|\.__lock(?=/|$)|[\ud800-\udfff]"),
    False: re.compile(r"[?#%|\x00-\x1f\x7f\ud800-\udfff]"),
}

Json = None | bool | int | float | str | list[Any] | dict[str, Any]


def before(change: str, path: epath.PathLike) -> None:
    """Announces a change: `create`, `write`, `rename`, `link`, `remove` or `make`.

    This function does nothing, but tests of crashes replace it with one that raises.
    Code that changes files without this module must call it.
    """


def is_local(path: epath.PathLike) -> bool:
    """Whether `path` is on this machine's file system, not in an object store."""
    return "://" not in os.fspath(path)


def absolute(path: epath.PathLike) -> epath.Path:
    """Returns `path` as an absolute path or a URL.

    Raises:
      ConfigError: if `path` is in an object store whose client is not installed.
    """
    if is_local(path):
        return epath.Path(os.path.abspath(path))
    bucket_clients.prepare(os.fspath(path))
    return epath.Path(path)


def check_tensorstore(path: epath.PathLike) -> None:
    """Raises a ConfigError if TensorStore cannot have `path`, or changes it."""
    found = NOT_IN_TENSORSTORE[is_local(path)].search(os.fspath(path))
    if found is not None:
        raise errors.ConfigError(
            f"{os.fspath(path)!r} contains {found[0]!r}, which TensorStore, the library"
            " that stores arrays, refuses in a path or replaces; choose a path without"
            " it"
        )


def canonical_json(value: Json) -> bytes:
    """Returns `value` as canonical JSON: keys sorted, no spaces."""
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


@contextlib.contextmanager
def atomic_path(path: epath.PathLike, *, mode: int = _MODE) -> Iterator[str]:
    """Yields a temporary local path; on success its file becomes `path`, durably.

    Use this for writers that need a path instead of an open file (ArrayRecord). On an
    exception, the temporary file is removed and any file at `path` is left unchanged.

    Args:
      path: the final path; its directory is created. In an object store, the file is
        uploaded at the end.
      mode: the file's permissions, before the umask applies; ignored in object stores.

    Raises:
      OSError: if storage fails; or any other of `bucket_clients.failures`.
    """
    if is_local(path):
        with _temporary_file(path, mode) as temporary:
            yield temporary
            sync(temporary)
            rename(temporary, path)
        return
    with tempfile.NamedTemporaryFile() as file:
        yield file.name
        if os.path.getsize(file.name) < _SMALL_BYTES:
            write_atomic(path, pathlib.Path(file.name).read_bytes())
            return
        filesystem, name = bucket_clients.opened(os.fspath(path))
        before("write", path)
        filesystem.put_file(file.name, name)


def write_atomic(
    path: epath.PathLike, content: bytes | memoryview, *, mode: int = _MODE
) -> None:
    """Writes `content` so that readers see either all of it or the previous content.

    The directory is created. For `mode`, see `atomic_path`.
    """
    if not is_local(path):
        # One request, which is repeated as a whole if its answer is lost. But gcsfs
        # puts "\n" after the content, so a server may take a final "\r" for part of
        # that line break and drop it. A chunk of its own has nothing after it.
        sent = bytes(content)
        own_chunk = {"chunksize": len(sent)} if sent.endswith(b"\r") else {}
        filesystem, name = bucket_clients.opened(os.fspath(path))
        before("write", path)
        filesystem.pipe_file(name, sent, **own_chunk)
        return
    with atomic_path(path, mode=mode) as temporary:
        write_in_place(temporary, content)


def create(path: epath.PathLike, content: bytes, *, mode: int = _MODE) -> bool:
    """Writes a file durably unless it exists.

    If multiple processes try simultaneously, exactly one writes: local file systems
    reject a second link with the same name, and object stores reject a second object
    (if-generation-match, if-none-match).

    Returns:
      Whether this call wrote the file.

    Raises:
      OSError: if storage is unavailable; or any other of `bucket_clients.failures`.
    """
    if not is_local(path):
        filesystem, name = bucket_clients.opened(os.fspath(path))
        before("create", path)
        with contextlib.suppress(FileExistsError):
            filesystem.pipe_file(name, content, mode="create")
            return True
        return False
    with _temporary_file(path, mode) as temporary:
        write_in_place(temporary, content)
        before("link", path)
        with contextlib.suppress(FileExistsError):
            os.link(temporary, path)
            sync(os.path.dirname(temporary))
            return True
    return False


def write_in_place(path: epath.PathLike, *content: bytes | memoryview) -> None:
    """Writes a local file that nothing refers to yet, durably.

    A crash may truncate the file. Its directory must exist and is not flushed.
    """
    before("write", path)
    with open(path, "wb") as file:
        file.writelines(content)
        file.flush()
        os.fsync(file.fileno())


def mapped_file(path: epath.PathLike, num_bytes: int) -> tuple[np.ndarray, int]:
    """Creates a local file and maps it into memory.

    Args:
      path: the path of a new file; its directory is created.
      num_bytes: the file size, at least 1.

    Returns:
      The file's writable bytes, uint8 `[num_bytes]`, with undefined content; and the
      file's inode number.

    Raises:
      OSError: if there is not enough space.
    """
    # Agents import this module but do not need NumPy.
    from elastic_ckpt.core import host_memory

    before("create", path)
    os.makedirs(os.path.dirname(os.fspath(path)), exist_ok=True)
    with open(path, "x+b") as file:
        try:
            # Otherwise, a write into the mapping would raise SIGBUS on a full disk.
            os.posix_fallocate(file.fileno(), 0, num_bytes)
            mapped = host_memory.map_file(
                file.fileno(), num_bytes, flags=mmap.MAP_SHARED, writes=True
            )
            return mapped, os.fstat(file.fileno()).st_ino
        except BaseException:
            os.unlink(path)
            raise


def move(source: epath.PathLike, target: epath.PathLike) -> None:
    """Flushes a local file and renames it, without flushing the directory."""
    sync(source)
    before("rename", target)
    os.replace(source, target)


def make_directory(path: epath.PathLike) -> epath.Path:
    """Creates the directory `path` and its parents unless they exist; returns it."""
    directory = absolute(path)
    before("make", directory)
    directory.mkdir(parents=True, exist_ok=True)
    return directory


def make_private_directory(path: epath.PathLike) -> None:
    """Creates a local directory with mode 0700, so that only its owner can use it.

    A directory that belongs to another user is left unchanged.
    """
    before("make", path)
    os.makedirs(path, mode=0o700, exist_ok=True)
    with contextlib.suppress(PermissionError):
        os.chmod(path, 0o700)


def rename(source: epath.PathLike, target: epath.PathLike) -> None:
    """Renames a local file or directory, durably; a file at `target` is replaced.

    Raises:
      OSError: if `target` is a non-empty directory, which is left unchanged.
    """
    before("rename", target)
    os.replace(source, target)
    sync(os.path.dirname(os.path.abspath(target)))


def copy_tree(source: epath.PathLike, target: epath.PathLike, *, last: str) -> None:
    """Copies a directory and replaces existing files; copies file `last` last."""
    copied = epath.Path(target)
    remove(copied / last)
    filesystem, root = bucket_clients.opened(os.fspath(source))
    files = [os.path.relpath(file, root) for file in filesystem.find(root)]
    for directory in {os.path.dirname(file) for file in files}:
        make_directory(copied / directory)
    for file in sorted(files, key=lambda file: file == last):
        before("write", copied / file)
        (epath.Path(source) / file).copy(copied / file, overwrite=True)


def remove(path: epath.PathLike) -> None:
    """Removes a file, or a directory and its content, if it exists."""
    before("remove", path)
    target = epath.Path(path)
    with contextlib.suppress(FileNotFoundError):
        if target.is_dir():
            target.rmtree()
        else:
            target.unlink()


def keep_only(directory: epath.PathLike, named: Collection[str]) -> None:
    """Removes everything in a directory except the relative paths `named`."""
    above = {str(parent) for name in named for parent in pathlib.Path(name).parents}
    prefixes = [""]
    for prefix in prefixes:
        for name in names(epath.Path(directory) / prefix):
            path = f"{prefix}{name}"
            if path in above:
                prefixes.append(f"{path}/")
            elif path not in named:
                remove(epath.Path(directory) / path)


def read_bytes(path: epath.PathLike) -> bytes:
    """Reads a file in one request, so that all bytes are from the same version.

    Raises:
      FileNotFoundError: if the file does not exist.
    """
    if is_local(path):
        return pathlib.Path(path).read_bytes()
    filesystem, name = bucket_clients.opened(os.fspath(path))
    # Otherwise s3fs would first ask for the size and read large files in pieces.
    whole = {"max_concurrency": 1} if "s3" in filesystem.protocol else {}
    return filesystem.cat_file(name, **whole)


def has_file(path: epath.PathLike) -> bool:
    """Whether a small file exists.

    Reads the file, which takes object stores one request; `exists` takes up to three.
    """
    if is_local(path):
        return os.path.exists(path)
    with contextlib.suppress(FileNotFoundError):
        read_bytes(path)
        return True
    return False


def names(directory: epath.PathLike) -> list[str]:
    """The names in a directory, in any order.

    Raises:
      FileNotFoundError: if the directory does not exist. In a bucket, a missing
        directory may seem empty instead.
    """
    if is_local(directory):
        return os.listdir(directory)
    return [child.name for child in epath.Path(directory).iterdir()]


def make_unique_directory(parent: epath.PathLike) -> str:
    """Creates a directory named after the current time in a local directory."""
    return tempfile.mkdtemp(
        prefix=time.strftime("%Y%m%d-%H%M%S-"), dir=make_directory(parent)
    )


@contextlib.contextmanager
def exclusive_lock(
    path: epath.PathLike, *, target: str = "", waits: bool = False
) -> Iterator[None]:
    """Locks `path` for this process; the kernel unlocks it if the process dies.

    The error says that `target`, by default the file's directory, is being written.
    Object stores have no locks, so there launchers must prevent concurrent runs.

    Raises:
      RunError: if another live process holds the lock, unless the call `waits` for it.
        The message names that process.
    """
    if not is_local(path):
        yield
        return
    make_directory(epath.Path(path).parent)
    with open(path, "a+") as file:
        try:
            _lock(file, fcntl.F_OFD_SETLKW if waits else fcntl.F_OFD_SETLK)
        except BlockingIOError:
            owner = pathlib.Path(path).read_text().strip() or "an unknown process"
            raise errors.RunError(
                f"{target or os.path.dirname(path)} is being written by another live"
                f" run ({owner}); wait for that run to finish, stop it, or use a"
                " different directory"
            ) from None
        file.truncate(0)
        print(f"process {os.getpid()} on {socket.gethostname()}", file=file, flush=True)
        yield


def is_locked(path: epath.PathLike) -> bool:
    """Whether a process holds a file's exclusive lock; False if the file is missing."""
    try:
        with open(path, "rb") as file:
            held = _lock(file, fcntl.F_OFD_GETLK, fcntl.F_RDLCK)
    except FileNotFoundError:
        return False
    return held != fcntl.F_UNLCK


class Presence:
    """A shared lock that marks this process as a user of a directory.

    The kernel releases it if the process dies.

    Args:
      path: a local file in that directory; created unless it exists.

    Raises:
      OSError: if the file cannot be opened or the file system does not support locks.
    """

    def __init__(self, path: epath.PathLike) -> None:
        make_directory(epath.Path(path).parent)
        self._file = open(path, "a+")  # noqa: SIM115
        try:
            _lock(self._file, fcntl.F_OFD_SETLKW, fcntl.F_RDLCK)
        except OSError:
            self._file.close()
            raise

    @contextlib.contextmanager
    def alone(self) -> Iterator[bool]:
        """Yields whether this is the only live process that holds the lock.

        If it is, no other process can acquire the lock while the block runs.
        """
        try:
            _lock(self._file, fcntl.F_OFD_SETLK)
        except BlockingIOError:
            yield False
            return
        try:
            yield True
        finally:
            _lock(self._file, fcntl.F_OFD_SETLK, fcntl.F_RDLCK)

    def close(self) -> None:
        """Releases the lock."""
        self._file.close()


def _lock(file: IO[Any], command: int, kind: int = fcntl.F_WRLCK) -> int:
    # Locks an open file until it is closed, or returns the kind of the conflicting
    # lock. A shared lock that cannot become exclusive stays shared. `flock` would drop
    # it, and per-process locks (`lockf`) do not exclude other threads.
    asked = _FLOCK.pack(kind, os.SEEK_SET, 0, 0, 0)
    return _FLOCK.unpack(fcntl.fcntl(file, command, asked))[0]


@contextlib.contextmanager
def _temporary_file(path: epath.PathLike, mode: int) -> Iterator[str]:
    # A new file in the directory of `path`, removed at the end unless it was renamed.
    before("create", path)
    directory, name = os.path.split(os.path.abspath(path))
    os.makedirs(directory, exist_ok=True)
    temporary = os.path.join(directory, f".{name}.{secrets.token_hex(8)}")
    os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode))
    try:
        yield temporary
    finally:
        if os.path.exists(temporary):
            before("remove", temporary)
            os.unlink(temporary)


def sync(path: epath.PathLike) -> None:
    """Flushes a local file, or the entries of a directory, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
