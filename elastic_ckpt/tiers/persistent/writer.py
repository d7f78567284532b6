"""The writer of a directory of steps: one program at a time.

    <root>/writers/<number>.json   the record of the program that writes, or wrote last

A program that opens the directory to save creates the next record, unless the one that
is there is of a program that still writes: the record names that process. On the same
machine its number, its start and the boot of the machine prove whether it is alive. Of
one elsewhere nothing can be proved, so a writer increases a count in its record four
times in `duration_secs`; one that was not increased for the whole duration, by the
clock of the program that waits for that, has ended. Clocks are never compared.

The worlds of one start of a run have one name, and follow each other. Another start of
a run that claims its worlds follows by its claim (see `claims`), unless both run on one
machine. A writer that was replaced, because it stood still for so long, finds the next
record before it commits a step. The record is removed when its writer closes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import os
import re
import threading
from multiprocessing import util
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

DIRECTORY = "writers"
DURATION_SECS = 60.0
_VERSION = 1
_RENEWALS = 4
_LOOKS = 4 * _RENEWALS
_NAME = re.compile(r"([1-9][0-9]*)\.json")
_ADVICE = (
    "wait for it or stop it, save to another directory, or open it with read_only=True"
    " to read beside it"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Record:
    """The record of a writer.

    Attributes:
      name: of the start of a program, which no other has.
      process: of that program.
      is_claiming: whether claims decide between it and other starts of its run.
      since_ms: when it was created, since the epoch.
      duration_secs: how long it counts without being renewed.
      count: of its renewals.
    """

    name: str
    process: process.Process
    is_claiming: bool
    since_ms: int
    duration_secs: float
    count: int = 0


class Writer:
    """This program as the writer of a directory of steps.

    Args:
      steps: the directory, local or in an object store.
      claimant: who claims the worlds of the run; None if it claims none.
      owner: the process by which others see whether the program is alive; by default
        the claimant's, or this one.
      duration_secs: how long others wait for a renewal.
      advice: what to do where another program writes.
    """

    def __init__(
        self,
        steps: epath.PathLike,
        *,
        claimant: claims.Claimant | None = None,
        owner: process.Process | None = None,
        duration_secs: float = DURATION_SECS,
        advice: str = _ADVICE,
    ) -> None:
        self._claimant = claimant
        self._advice = advice
        of_start = None if claimant is None else claimant.owner
        own = claims.new_claimant() if claimant is None else claimant
        self._renewed = _Renewed(
            storage.absolute(steps) / DIRECTORY,
            Record(
                name=own.name,
                process=owner or of_start or process.this(),
                is_claiming=claimant is not None,
                since_ms=clock.time_ns() // 1_000_000,
                duration_secs=duration_secs,
            ),
        )
        # This also runs if `close` is never called, in children that are forked, too.
        util.Finalize(self, self._renewed.close, exitpriority=0)

    def begin(self) -> None:
        """Becomes the writer; may wait until the writer before has expired.

        Raises:
          RunError: if another program writes.
          CheckpointError: if a record cannot be read.
          OSError: if storage is unavailable, or another of `bucket_clients.failures`.
        """
        renewed = self._renewed
        while not renewed.number:
            number, there = _newest(renewed.directory)
            if there is not None and not self._may_follow(number, there):
                raise errors.RunError(
                    f"{renewed.directory.parent} is being written by another live"
                    f" program, {there.process}, since {_time(there)}; {self._advice}"
                )
            # Others may have come and gone while this one waited.
            if _numbers(renewed.directory)[-1:] == ([number] if number else []):
                renewed.create(number + 1)

    def check(self) -> None:
        """Raises a ReplacedError if another program writes now.

        Raises:
          OSError: if storage is unavailable, or another of `bucket_clients.failures`.
        """
        renewed = self._renewed
        if renewed.is_replaced():
            _, by = _newest(renewed.directory)
            other = "another program" if by is None else f"{by.process}"
            since = "" if by is None else f" since {_time(by)}"
            raise errors.ReplacedError(
                f"{other} writes to {renewed.directory.parent}{since}: this one had not"
                f" renewed its record there for {renewed.record.duration_secs:g} s, or"
                " has opened the directory once more; it commits no step there from"
                " now on"
            )

    def __enter__(self) -> Writer:
        self.begin()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Removes the record: another program may write at once."""
        self._renewed.close()

    def _may_follow(self, number: int, there: Record) -> bool:
        own = self._renewed.record
        is_own = there.name == own.name or there.process == own.process
        if is_own or there.process.is_dead:
            return True
        if own.is_claiming and there.is_claiming:
            is_by_hand = self._claimant is not None and self._claimant.owner is not None
            return not (is_by_hand and there.process.is_running)
        if there.process.is_here:
            return False
        return _expires(self._renewed.directory, number, there)


class _Renewed:
    """A record, and the thread that renews it."""

    def __init__(self, directory: epath.Path, record: Record) -> None:
        self.directory = directory
        self.record = record
        # 0 until it is created.
        self.number = 0
        self._pid = os.getpid()
        self._ended = threading.Event()
        self._lock = threading.Lock()

    def create(self, number: int) -> None:
        # Does nothing if another program has created it.
        storage.make_directory(self.directory)
        if not storage.create(self._path(number), _to_bytes(self.record)):
            # A client of an object store may have repeated its request.
            there = _read(self.directory, number)
            if there is None or there.name != self.record.name or there.count:
                return
        self.number = number
        for older in _numbers(self.directory):
            if older < number:
                storage.remove(self._path(older))
        background.in_thread(self._renew, name="writer")

    def is_replaced(self) -> bool:
        # Whether another program has created a record after this one.
        there = _read(self.directory, self.number)
        is_own = there is not None and there.name == self.record.name
        return not is_own or self._path(self.number + 1).exists()

    def close(self) -> None:
        # A process that was forked has the record of its parent.
        if self._ended.is_set() or os.getpid() != self._pid:
            return
        self._ended.set()
        with self._lock:
            if not self.number:
                return
            try:
                there = _read(self.directory, self.number)
                if there is not None and there.name == self.record.name:
                    storage.remove(self._path(self.number))
            except (errors.CheckpointError, *bucket_clients.failures()) as error:
                logging.warning(
                    "the record of this writer stays in %s: %s", self.directory, error
                )

    def _renew(self) -> None:
        while not self._ended.wait(self.record.duration_secs / _RENEWALS):
            try:
                with self._lock:
                    if self._ended.is_set() or self.is_replaced():
                        return
                    count = self.record.count + 1
                    self.record = dataclasses.replace(self.record, count=count)
                    path = self._path(self.number)
                    storage.write_atomic(path, _to_bytes(self.record))
            except (errors.CheckpointError, *bucket_clients.failures()) as error:
                logging.warning("the record of this writer is not renewed: %s", error)

    def _path(self, number: int) -> epath.Path:
        return self.directory / f"{number}.json"


def live(steps: epath.PathLike) -> Record | None:
    """The record of the program that writes, or wrote last; None if none does.

    Raises:
      CheckpointError: if it cannot be read.
      OSError: if storage is unavailable, or another of `bucket_clients.failures`.
    """
    _, record = _newest(storage.absolute(steps) / DIRECTORY)
    return None if record is None or record.process.is_dead else record


def _expires(directory: epath.Path, number: int, there: Record) -> bool:
    # Waits for the next renewal, and returns whether there was none.
    logging.warning(
        "%s may still write to %s (since %s), and cannot be asked: waiting for up to"
        " %g s until that is known",
        there.process,
        directory.parent,
        _time(there),
        there.duration_secs,
    )
    until_secs = clock.monotonic() + there.duration_secs
    while clock.monotonic() < until_secs:
        clock.sleep(there.duration_secs / _LOOKS)
        if _read(directory, number) != there:
            # It was renewed; or it is gone, and what is there now decides.
            return _newest(directory)[0] != number
    return True


def _time(record: Record) -> str:
    when = datetime.datetime.fromtimestamp(record.since_ms / 1000, datetime.UTC)
    return f"{when:%Y-%m-%d %H:%M:%S} UTC"


def _newest(directory: epath.Path) -> tuple[int, Record | None]:
    while True:
        number = max(_numbers(directory), default=0)
        record = _read(directory, number) if number else None
        # It may have been removed meanwhile.
        if record is not None or not number:
            return number, record


def _numbers(directory: epath.Path) -> list[int]:
    names = storage.names(directory) if directory.exists() else []
    return sorted(int(found[1]) for found in map(_NAME.fullmatch, names) if found)


def _read(directory: epath.Path, number: int) -> Record | None:
    path = directory / f"{number}.json"
    with contextlib.suppress(FileNotFoundError):
        try:
            fields = checked_json.parse(
                path.read_bytes(), what="record of a writer", version=_VERSION
            )
        except checked_json.UnreadableError as error:
            raise errors.CheckpointError(
                f"{path} {error}; remove it if no program writes to {directory.parent}"
            ) from None
        return Record(
            name=fields["name"],
            process=process.Process(**fields["process"]),
            is_claiming=fields["is_claiming"],
            since_ms=fields["since_ms"],
            duration_secs=fields["duration_secs"],
            count=fields["count"],
        )
    return None


def _to_bytes(record: Record) -> bytes:
    fields: dict[str, Any] = dataclasses.asdict(record)
    return checked_json.to_bytes(fields, version=_VERSION)
