"""Records in storage, which are valid for as long as their holders renew them.

A record names its process. On the same machine, the process number, its start time and
the machine's boot ID prove whether it is alive. From elsewhere nothing can be proved,
so a holder increases a count in its record four times in `secs`. A record that was not
renewed for `secs`, by the clock of the program that looks at it, has lapsed. Clocks are
never compared.

    <directory>/<number>.json

Of numbered records the newest counts. Whoever wants to succeed its holder creates the
next number, which storage lets only one program do. A holder that hung finds that
record before it renews its own. The claims of a run's worlds and of the leader of its
machines are numbered records; leases of steps are single ones.
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
      start: the unique name of one start of a program.
      secs: how long it is valid without being renewed; 0 once it was given back.
      since_ms: when it was created, in milliseconds since 1970.
      count: how often it was renewed.
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
    """A unique name for a start of a program."""
    return f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"


def to_bytes(value: Any) -> bytes:
    """Encodes a record, or any other dataclass, for its file."""
    fields: Any = codec.encode(value)
    return checked_json.to_bytes(fields, version=_VERSION)


class OutOfReachError(errors.CheckpointError):
    """Storage is unavailable, so its content is unknown; the cause says why."""


@contextlib.contextmanager
def within_reach(path: epath.Path) -> Iterator[None]:
    """Turns errors of storage, other than a missing file, into an OutOfReachError."""
    try:
        yield
    except FileNotFoundError:
        raise
    except bucket_clients.failures() as error:
        raise OutOfReachError(
            f"{path} cannot be read or listed, because it is out of reach ({error});"
            " check the path and its permissions, or try again when the storage is back"
        ) from error


def read(path: epath.Path, kind: type[T] = Record) -> T | None:
    """Reads what `to_bytes` encoded; None if there is no file.

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
            f"{path} {error}; restore the file from a copy, or end all programs of the"
            " run and remove it"
        ) from None


def names(directory: epath.Path) -> list[str]:
    """The names in a directory, in any order; none if it does not exist.

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
        "%s, may still hold %s: waiting for up to %g s to see whether it renews it",
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
class Records:
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
        while not storage.is_local(self.directory) and self.path(number + 1).exists():
            number += 1
        return number, read(self.path(number)) if number else None

    def take(
        self,
        number: int,
        record: Record,
        *,
        renewed: Callable[[int], None] = lambda _: None,
    ) -> Held | None:
        """Creates a record unless its number exists; records are never removed.

        Returns:
          The record, renewed from now on; None if another program took the number.
        """
        path, after = self.path(number), self.path(number + 1)
        is_created = storage.create(path, to_bytes(record), mode=self.mode)
        # An object store's client may have repeated its request.
        if not (is_created or read(path) == record):
            return None
        return Held(path, record, after=after, renewed=renewed, mode=self.mode)


class Held:
    """A record that this process has created, and the thread that renews it.

    Args:
      after: the file that a successor creates; None if there can be none.
      renewed: called with the count after each renewal, in that thread.

    Attributes:
      record: the content that was written last.
      is_lost: whether the record was found to be gone or held by another program.
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
        is_followed = self._after is not None and self._after.exists()
        self.is_lost |= is_followed or not is_own
        return not self.is_lost

    def renew(self, **changes: Any) -> None:
        """Increases the count, and makes `changes` to other attributes.

        Does nothing if the record is lost or was given back.
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

    def give_back(self) -> None:
        """Makes the record lapse at once, so that another program may follow."""
        self._end(lambda: self.renew(secs=0.0))

    def remove(self) -> None:
        """Removes the record."""
        self._end(lambda: storage.remove(self.path))

    def _end(self, end: Callable[[], None]) -> None:
        # A forked process has its parent's record.
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
