"""Numbered records, of which the newest counts as long as its holder renews it.

    <directory>/<number>.json

Who is to hold a directory creates the next record; storage lets one of several do so.
The record names its process: on the same machine its number, its start and the boot of
the machine prove whether it is alive. Of one elsewhere nothing can be proved, so a
holder increases a count in its record four times in `duration_secs`; a record that was
not renewed for the whole duration, by the clock of the program that looks at it, has
lapsed. Clocks are never compared. A holder that stood still for so long finds the next
record before it renews its own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import os
import threading
from collections.abc import Callable, Mapping
from typing import Any

from absl import logging
from etils import epath

from elastic_ckpt.core import (
    background,
    bucket_clients,
    checked_json,
    clock,
    errors,
    process,
    storage,
)
from elastic_ckpt.tiers.persistent import claims

_VERSION = 1
_RENEWALS = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Record:
    """One record.

    Attributes:
      name: of the start of a program, which no other has.
      process: of that program.
      since_ms: when it was created, since the epoch.
      duration_secs: how long it counts without being renewed.
      count: of its renewals.
      fields: others, of its kind.
    """

    name: str
    process: process.Process
    since_ms: int = dataclasses.field(default_factory=lambda: clock.time_ns() // 10**6)
    duration_secs: float
    count: int = 0
    fields: Mapping[str, storage.Json] = dataclasses.field(default_factory=dict)

    @property
    def since(self) -> str:
        """When it was created, for people."""
        when = datetime.datetime.fromtimestamp(self.since_ms / 1000, datetime.UTC)
        return f"{when:%Y-%m-%d %H:%M:%S} UTC"


_OF_ALL = {each.name for each in dataclasses.fields(Record)} - {"fields"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Records:
    """The records in a directory.

    Attributes:
      directory: local or in an object store.
      what: the kind of them, for messages.
      remedy: what to do about one that cannot be read.
      mode: the permissions of their files.
    """

    directory: epath.Path
    what: str
    remedy: str
    mode: int = 0o666

    def path(self, number: int) -> epath.Path:
        """The file of a record."""
        return self.directory / f"{number}.json"

    def newest(self) -> tuple[int, Record | None]:
        """The newest record and its number; 0 and None if there is none.

        Raises:
          CheckpointError: if it cannot be read.
          OSError: if storage is unavailable, or another of `bucket_clients.failures`.
        """
        while True:
            number = max(claims.numbers(self.directory), default=0)
            record = self.read(number) if number else None
            # It may have been removed meanwhile.
            if record is not None or not number:
                return number, record

    def read(self, number: int) -> Record | None:
        """A record; None if it is not there.

        Raises:
          CheckpointError: if it cannot be read.
        """
        path = self.path(number)
        with contextlib.suppress(FileNotFoundError):
            try:
                # Its holder may replace it at any moment.
                fields = checked_json.parse(
                    storage.read_bytes(path), what=self.what, version=_VERSION
                )
            except checked_json.UnreadableError as error:
                raise errors.CheckpointError(f"{path} {error}; {self.remedy}") from None
            known = {name: fields[name] for name in _OF_ALL}
            return Record(
                **known | {"process": process.Process(**known["process"])},
                fields={
                    name: value
                    for name, value in fields.items()
                    if name not in _OF_ALL and name != "version"
                },
            )
        return None

    def write(self, number: int, record: Record) -> None:
        """Replaces a record."""
        storage.write_atomic(self.path(number), _to_bytes(record), mode=self.mode)


class Renewed:
    """A record that this process holds or is to hold, and the thread that renews it.

    Args:
      records: of its kind.
      record: as it is to be created.
      renewed: called with the count after each renewal, in that thread.

    Attributes:
      records: as given.
      record: as it was written last.
      number: of the record; 0 until it is created.
      is_lost: whether another program was found to have created the next one.
    """

    def __init__(
        self,
        records: Records,
        record: Record,
        *,
        renewed: Callable[[int], None] = lambda _: None,
    ) -> None:
        self.records = records
        self.record = record
        self.number = 0
        self.is_lost = False
        self._renewed = renewed
        self._pid = os.getpid()
        self._ended = threading.Event()
        self._lock = threading.Lock()

    def create(self, number: int) -> bool:
        """Creates the record, and removes older ones; False if that number is there.

        Raises:
          CheckpointError: if the record that is there cannot be read.
          OSError: if storage is unavailable, or another of `bucket_clients.failures`.
        """
        records = self.records
        storage.make_directory(records.directory)
        content = _to_bytes(self.record)
        if not storage.create(records.path(number), content, mode=records.mode):
            # A client of an object store may have repeated its request.
            there = records.read(number)
            if there is None or there.name != self.record.name or there.count:
                return False
        there_are = claims.numbers(records.directory)
        if there_are and there_are[-1] > number:
            # Others have created, and removed, this number since it was chosen.
            storage.remove(records.path(number))
            return False
        for older in there_are:
            if older < number:
                storage.remove(records.path(older))
        self.number = number
        background.in_thread(self._keep, name="renewals")
        return True

    def check(self) -> bool:
        """Whether no other program has created the next record.

        Raises:
          CheckpointError: if the record cannot be read.
          OSError: if storage is unavailable, or another of `bucket_clients.failures`.
        """
        there = self.records.read(self.number)
        is_own = there is not None and there.name == self.record.name
        is_last = not self.records.path(self.number + 1).exists()
        self.is_lost |= not (is_own and is_last)
        return not self.is_lost

    def renew(self, **changes: Any) -> None:
        """Increases the count, unless the record is lost, or held no more.

        Args:
          **changes: of other fields of the record.

        Raises:
          CheckpointError: as `check`; also what it raises besides.
        """
        with self._lock:
            if self._ended.is_set() or self.is_lost or not self.check():
                return
            count = self.record.count + 1
            self.record = dataclasses.replace(self.record, count=count, **changes)
            self.records.write(self.number, self.record)
        self._renewed(count)

    def close(self) -> None:
        """Removes the record: another program may create one at once."""
        self._end(lambda: storage.remove(self.records.path(self.number)))

    def give_back(self) -> None:
        """Has the record lapse at once; the next one gets the next number."""
        over = dataclasses.replace(
            self.record, count=self.record.count + 1, duration_secs=0.0
        )
        self._end(lambda: self.records.write(self.number, over))

    def _end(self, end: Callable[[], None]) -> None:
        # A process that was forked has the record of its parent.
        if self._ended.is_set() or os.getpid() != self._pid:
            return
        self._ended.set()
        with self._lock:
            if not self.number:
                return
            try:
                if self.check():
                    end()
            except (errors.CheckpointError, *bucket_clients.failures()) as error:
                logging.warning(
                    "this program's %s stays in %s: %s",
                    self.records.what,
                    self.records.directory,
                    error,
                )

    def _keep(self) -> None:
        secs = self.record.duration_secs / _RENEWALS
        while not self._ended.wait(secs) and not self.is_lost:
            try:
                self.renew()
            except (errors.CheckpointError, *bucket_clients.failures()) as error:
                logging.warning(
                    "this program's %s is not renewed: %s", self.records.what, error
                )


def _to_bytes(record: Record) -> bytes:
    fields: dict[str, Any] = dataclasses.asdict(record)
    return checked_json.to_bytes(fields | fields.pop("fields"), version=_VERSION)
