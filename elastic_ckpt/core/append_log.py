"""Logs that grow by whole lines.

Only the last line can be cut short, by a crash, and `read` drops it. While a disk is
full, or takes nothing for another reason, lines wait in memory.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
from collections.abc import Mapping
from typing import Any, BinaryIO

from etils import epath

from elastic_ckpt.core import errors, storage

# Lines in memory while a disk or store takes none: 30,000 steps of a large batch.
MOST_LATE_BYTES = 64 * 2**20


class AppendLog:
    """A file of JSON lines that only grows.

    A line is in the kernel when `append` returns, so killing the process loses no line,
    unless the disk takes nothing: then the line waits in memory, and each later call
    tries again. After `sync` the lines also survive a crash of the machine. An existing
    log is continued after its last whole line.
    Objects in a store cannot be appended to: there the lines stay in memory until
    `sync` writes the whole object.
    """

    def __init__(self, path: epath.PathLike) -> None:
        storage.make_directory(epath.Path(path).parent)
        self._object = None if storage.is_local(path) else storage.absolute(path)
        self._late = bytearray()
        self._path = os.fspath(path)
        if self._object is None:
            # Without a buffer, whose state after a failure is not known.
            self._file = open(path, "a+b", buffering=0)  # noqa: SIM115
            _drop_torn_line(self._file)
            return
        self._file = io.BytesIO()
        with contextlib.suppress(FileNotFoundError):
            self._file.write(self._object.read_bytes())

    @property
    def late_bytes(self) -> int:
        """The bytes that a disk has not taken yet."""
        return len(self._late)

    def append(self, record: Mapping[str, storage.Json]) -> None:
        """Adds `record` as one line.

        Raises:
          OSError: if the disk takes nothing and `MOST_LATE_BYTES` wait.
        """
        self._late += json.dumps(record, separators=(",", ":")).encode() + b"\n"
        try:
            self._write()
        except OSError:
            if len(self._late) > MOST_LATE_BYTES:
                raise

    def check(self) -> None:
        """Checks that the file is still there: lines go into a removed one unseen.

        Raises:
          RunError: if it was removed or replaced.
        """
        if isinstance(self._file, io.BytesIO):
            return
        try:
            is_there = os.path.samestat(
                os.stat(self._path), os.fstat(self._file.fileno())
            )
        except FileNotFoundError:
            is_there = False
        if not is_there:
            raise errors.RunError(
                f"{self._path} was removed or replaced while this run was writing to"
                " it. What the run had recorded there is lost, so it stops; start it"
                " again, and do not touch the directory while it runs"
            )

    def sync(self) -> None:
        """Makes every line so far durable.

        Raises:
          OSError: if the disk or the store does not take them; lines that wait are
            tried again by the next call.
        """
        self._write()
        if isinstance(self._file, io.BytesIO):
            assert self._object is not None
            storage.write_atomic(self._object, self._file.getvalue())
        else:
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Syncs and closes the log; a second call does nothing."""
        if not self._file.closed:
            try:
                self.sync()
            finally:
                self._file.close()

    def _write(self) -> None:
        # A disk may take a part of them.
        while self._late:
            del self._late[: self._file.write(self._late)]


def read(
    path: epath.PathLike, *, last_bytes: int | None = None
) -> list[dict[str, Any]]:
    """The records of a JSON-lines file in order, without an incomplete last line.

    Args:
      path: of the file.
      last_bytes: reads only the records within so many bytes of the end; None reads
        all.

    Raises:
      DataError: if a line other than the last is not a JSON object.
    """
    with storage.absolute(path).open("rb") as file:
        end = file.seek(0, os.SEEK_END)
        start = 0 if last_bytes is None else max(0, end - last_bytes)
        file.seek(start)
        lines = file.read().split(b"\n")
    lines = lines[bool(start) :]  # without the end of a line
    # Text after the last newline is a line that a crash cut short: it is dropped.
    records = []
    for number, line in enumerate(lines[:-1], start=1):
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        if not isinstance(record, dict):
            raise errors.DataError(
                f"{path}, line {number}: not a JSON object; the log was changed after"
                " it was written, restore it from a copy"
            )
        records.append(record)
    return records


def _drop_torn_line(file: BinaryIO) -> None:
    # An incomplete last line is dropped: the next line would be joined to it.
    end = start = file.seek(0, os.SEEK_END)
    while start:
        stop, start = start, max(0, start - 2**16)
        file.seek(start)
        newline = file.read(stop - start).rfind(b"\n")
        if newline >= 0:
            start += newline + 1
            break
    if start < end:
        file.truncate(start)
