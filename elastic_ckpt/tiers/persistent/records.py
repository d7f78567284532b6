"""Records in storage that are valid for as long as their holders renew them.

A record names its process. On the same machine, the process ID, its start time and the
machine's boot ID prove whether the process is alive. On a different machine, nothing
can be proved, so a holder increments a count in its record four times in `secs`. A
record has lapsed if it was not renewed for `secs` by the clock of the program that
reads it. Clocks of different machines are never compared.

    <directory>/<number>.json

Of numbered records, only the newest counts. A program that wants to succeed its holder
creates the record with the next number, which storage allows only once. A holder that
hung finds that record before it renews its own. Claims of a run's worlds and of its
machines' leader are numbered records; step leases are single records.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import os
import re
import secrets
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from absl import logging
from etils import epath

from elastic_ckpt.core import (
    background,
    bucket_clients,
    checked_json,
    clock,
    codec,
    errors,
    process,
    storage,
)

T = TypeVar("T")

_VERSION = 1
_RENEWALS = 4
_LOOKS = 16
_NAME = re.compile(r"([1-9][0-9]*)\.json")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Record:
    """One record.

    Attributes:
      start: the unique name of one launch of a program.
      secs: the time that the record is valid without renewal; 0 once it was released.
      since_ms: when the record was created, in milliseconds since 1970.
      count: the number of renewals.
    """

    start: str
    process: process.Process
    secs: float
    since_ms: int = dataclasses.field(default_factory=lambda: clock.time_ns() // 10**6)
    count: int = 0
    fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __str__(self) -> str:
        when = datetime.datetime.fromtimestamp(self.since_ms / 1000, datetime.UTC)
        return f"{self.process}, since {when:%Y-%m-%d %H:%M:%S} UTC"


def new_start() -> str:
    """A unique name for a launch of a program."""
    return f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"


def to_bytes(value: Any) -> bytes:
    """Encodes a record, or any other dataclass, for its file."""
    fields: Any = codec.encode(value)
    return checked_json.to_bytes(fields, version=_VERSION)


class OutOfReachError(errors.CheckpointError):
    """Storage is unavailable, so its content is unknown; `__cause__` says why."""


@contextlib.contextmanager
def within_reach(path: epath.Path) -> Iterator[None]:
    """Turns storage errors, except for a missing file, into an OutOfReachError."""
    try:
        yield
    except FileNotFoundError:
        raise
    except bucket_clients.failures() as error:
        raise OutOfReachError(
            f"{path} cannot be read or listed, because it is unreachable ({error});"
            " check the path and its permissions, or try again when the storage is back"
        ) from error


def read(path: epath.Path, kind: type[T] = Record) -> T | None:
    """Decodes a file that `to_bytes` encoded; None if the file is missing.

    Raises:
      CheckpointError: if the file is damaged, or storage is unavailable.
    """
    try:
        with within_reach(path):
            # Its holder may replace it at any moment.
            content = storage.read_bytes(path)
        fields = checked_json.parse(content, what="record", version=_VERSION)
        return codec.decode(kind, fields, name="record")
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise errors.CheckpointError(
            f"{path} {error}; restore the file from a good copy, or stop all of the"
            " run's programs and remove the file"
        ) from None


def names(directory: epath.Path) -> list[str]:
    """The names in a directory, in any order; empty if it does not exist.

    Raises:
      OutOfReachError: if storage is unavailable.
    """
    with contextlib.suppress(FileNotFoundError), within_reach(directory):
        return storage.names(directory)
    return []


def is_over(path: epath.Path, record: Record) -> bool:
    """Whether a record's holder is gone; may wait until the record lapses."""
    if not record.secs or record.process.is_here:
        return not record.secs or record.process.is_dead
    logging.warning(
        "%s, may still hold %s: waiting up to %g s to see whether it renews the record",
        record,
        path,
        record.secs,
    )
    until_secs = clock.monotonic() + record.secs
    while clock.monotonic() < until_secs:
        clock.sleep(record.secs / _LOOKS)
        if read(path) != record:
            return False
    return True


@dataclasses.dataclass(frozen=True)
class RecordStore:
    """The numbered records in a directory, local or in an object store."""

    directory: epath.Path
    mode: int = 0o666

    def path(self, number: int) -> epath.Path:
        """The file of a record."""
        return self.directory / f"{number}.json"

    def newest(self) -> tuple[int, Record | None]:
        """The newest record and its number; 0 and None before the first."""
        found = map(_NAME.fullmatch, names(self.directory))
        number = max((int(each[1]) for each in found if each), default=0)
        # The listing of an object store may lag behind.
        is_lagging = not storage.is_local(self.directory)
        while is_lagging and storage.has_file(self.path(number + 1)):
            number += 1
        return number, read(self.path(number)) if number else None

    def take(
        self,
        number: int,
        record: Record,
        *,
        renewed: Callable[[int], None] = lambda _: None,
    ) -> Held | None:
        """Creates a record unless its number is taken; never removes records.

        Returns:
          The record, which is renewed from now on; None if another program took its
          number.
        """
        path, after = self.path(number), self.path(number + 1)
        is_created = storage.create(path, to_bytes(record), mode=self.mode)
        # An object store's client may have repeated its request.
        if not (is_created or read(path) == record):
            return None
        return Held(path, record, after=after, renewed=renewed, mode=self.mode)


class Held:
    """A record that this process created, and the thread that renews it.

    Args:
      after: the file that a successor creates; None if there can be no successor.
      renewed: a function that the thread calls with the count after each renewal.

    Attributes:
      record: the last-written content.
      is_lost: whether the record turned out to be gone or held by another program.
    """

    def __init__(
        self,
        path: epath.Path,
        record: Record,
        *,
        after: epath.Path | None = None,
        renewed: Callable[[int], None] = lambda _: None,
        mode: int = 0o666,
    ) -> None:
        self.path, self.record = path, record
        self.is_lost = False
        self._after, self._renewed, self._mode = after, renewed, mode
        self._pid = os.getpid()
        self._ended, self._lock = threading.Event(), threading.RLock()
        background.in_thread(self._keep, name="renewals")

    def check(self) -> bool:
        """Asks storage whether this process still holds the record.

        Raises:
          CheckpointError: if the record is damaged.
          OSError: if storage is unavailable, or another of `bucket_clients.failures`.
        """
        there = read(self.path)
        is_own = there is not None and there.start == self.record.start
        is_followed = self._after is not None and storage.has_file(self._after)
        self.is_lost |= is_followed or not is_own
        return not self.is_lost

    def renew(self, **changes: Any) -> None:
        """Increments the count and applies `changes` to other attributes.

        Does nothing if the record was lost or released.
        """
        with self._lock:
            if self._ended.is_set() or not self.check():
                return
            count = self.record.count + 1
            self.record = dataclasses.replace(self.record, count=count, **changes)
            content = to_bytes(self.record)
            storage.write_atomic(self.path, content, mode=self._mode)
        if self.record.secs:
            self._renewed(self.record.count)

    def release(self) -> None:
        """Makes the record lapse immediately, so that another program may follow."""
        self._end(lambda: self.renew(secs=0.0))

    def remove(self) -> None:
        """Removes the record."""
        self._end(lambda: storage.remove(self.path))

    def _end(self, end: Callable[[], None]) -> None:
        # A forked process has a copy of its parent's record.
        if self._ended.is_set() or os.getpid() != self._pid:
            return
        with self._lock:
            try:
                self._attempt(end)
            finally:
                self._ended.set()

    def _keep(self) -> None:
        secs = self.record.secs / _RENEWALS
        while not self._ended.wait(secs) and not self.is_lost:
            self._attempt(self.renew)

    def _attempt(self, act: Callable[[], None]) -> None:
        try:
            act()
        except (errors.CheckpointError, *bucket_clients.failures()) as error:
            logging.warning("%s was not written: %s", self.path, error)
