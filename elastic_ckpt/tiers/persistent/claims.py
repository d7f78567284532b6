"""Claims: one program at a time writes to a directory of steps, and says so in storage.

A program that opens the directory to save creates the next record of `worlds/` (see
`records`), unless the newest one is of a program that still writes. The worlds of one
start of a run have one name, and follow each other. Another start of a run that a
launcher starts follows at once, unless both run on one machine: whoever has the newest
record writes, and the other finds it before it commits a step.

The record has the line of its world (see `steps.step`) from its first save on, and
before that the line of the world before. So what a replaced world still saves does not
count, and neither does what a run went back from, even if no step of the new line is
left.
"""

from __future__ import annotations

import dataclasses
import threading
from multiprocessing import util
from typing import Any, Self

from etils import epath

from elastic_ckpt.core import clock, errors, process, storage
from elastic_ckpt.steps.step import Line, StepId
from elastic_ckpt.tiers.persistent import records
from elastic_ckpt.tiers.persistent.records import Record, Records

DIRECTORY = "worlds"
SECS = 60.0
_ADVICE = (
    "wait for it or stop it, save to another directory, or open it with read_only=True"
    " to read beside it"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Claimant:
    """A start of a run, which claims its worlds.

    Attributes:
      name: that no other start has.
      has_claimed: whether an earlier world of this start was claimed.
      owner: the process of the start, if nothing but that shows whether it is alive;
        None if it is one of several, or a launcher starts it again.
    """

    name: str
    has_claimed: bool = False
    owner: process.Process | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Claim:
    """The claim of one world.

    Attributes:
      number: of the world, from 1.
      start: the name of the start of the run.
      run: the identity of the run.
      line: of the world's first save: the steps that it goes on from. Its save is empty
        if no world of the run has saved anything.
      begun_ms: when the first world of the run was claimed, since the epoch.
    """

    number: int
    start: str
    run: str
    line: Line
    begun_ms: int


def new_claimant(owner: process.Process | None = None) -> Claimant:
    """A claimant for a start of a run, named after this process."""
    return Claimant(name=records.new_start(), owner=owner)


def newest(steps: epath.PathLike) -> Claim | None:
    """The claim of the newest world; None before the first.

    Args:
      steps: the directory of the run's steps, local or in an object store.

    Raises:
      CheckpointError: if the storage is out of reach, or the record cannot be read.
    """
    there = _records(steps)
    with records.within_reach(there.directory):
        number, record = there.newest()
    return None if record is None else _claim(number, record)


def is_replaced(steps: epath.PathLike, number: int) -> bool:
    """Whether another start has claimed a world after the one of a number.

    Raises:
      CheckpointError: as `newest`.
    """
    last = newest(steps)
    if last is None or last.number <= number:
        return False
    with records.within_reach(_records(steps).directory):
        own = records.read(_records(steps).path(number))
    return own is None or own.start != last.start


def check(steps: epath.PathLike, own: Claim) -> None:
    """Checks that the claim of a world is the newest, and was not given back.

    Raises:
      ReplacedError: if another world was claimed.
      CheckpointError: if the claim was given back, or is damaged.
      OSError: if storage is unavailable, or another of `bucket_clients.failures`.
    """
    there = _records(steps)
    record = records.read(there.path(own.number))
    is_own = record is not None and record.start == own.start
    if not is_own or there.path(own.number + 1).exists():
        raise _replaced(there)
    if record is not None and not record.secs:
        raise errors.CheckpointError(
            "the checkpointer was closed before its upload was committed; save once"
            " more"
        )


class Writer:
    """This program as the one that writes to a directory of steps.

    Args:
      steps: the directory, local or in an object store.
      run: the identity of the run.
      claimant: who claims the worlds of the run; None if nobody but this program does.
      advice: what to do where another program writes.
    """

    def __init__(
        self,
        steps: epath.PathLike,
        *,
        run: str = "",
        claimant: Claimant | None = None,
        advice: str = _ADVICE,
    ) -> None:
        own = claimant or new_claimant()
        self._records = _records(steps)
        self._run, self._claimant, self._advice = run, claimant, advice
        self._record = Record(
            start=own.name, process=own.owner or process.this(), secs=SECS
        )
        self._number = 0
        # A backup and a commit may find at the same time that storage is back.
        self._beginning = threading.Lock()
        self._held: records.Held | None = None
        # The save of the line of the start that this one follows.
        self._before = ""

    @property
    def own(self) -> Claim | None:
        """The claim of this program; None before `begin`."""
        return None if self._held is None else _claim(self._number, self._held.record)

    def begin(self) -> None:
        """Becomes the writer; may wait until the writer before has expired.

        Raises:
          RunError: if another program writes.
          ReplacedError: if another start has claimed a world after this one's.
          CheckpointError: if a record cannot be read.
          OSError: if storage is unavailable, or another of `bucket_clients.failures`.
        """
        with self._beginning:
            self._begin()

    def claim(self, line: Line) -> Claim:
        """Has the record tell a line, before anything is saved to it.

        Raises:
          ReplacedError: if another program writes now, or has saved to a later line.
          OSError: if storage is unavailable, or another of `bucket_clients.failures`.
        """
        self.check()
        assert self._held is not None
        if line.save <= self._before:
            # It was claimed after this program had looked for steps.
            raise _replaced(self._records)
        of_line = {"save": line.save, "parents": [list(each) for each in line.parents]}
        self._held.renew(fields={**self._held.record.fields, **of_line})
        self.check()
        return _claim(self._number, self._held.record)

    def check(self) -> None:
        """Raises a ReplacedError if another program writes now.

        Raises:
          OSError: if storage is unavailable, or another of `bucket_clients.failures`.
        """
        if self._held is not None and not self._held.check():
            raise _replaced(self._records)

    def close(self) -> None:
        """Gives the record back: another program may write at once."""
        if self._held is not None:
            self._held.give_back()

    def __enter__(self) -> Self:
        self.begin()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _begin(self) -> None:
        while self._held is None:
            number, there = self._records.newest()
            begun_ms = clock.time_ns() // 10**6
            fields: dict[str, Any] = {"save": "", "parents": [], "begun_ms": begun_ms}
            if there is not None:
                self._check_follows(number, there)
                fields |= there.fields if there.fields["run"] == self._run else {}
                is_own = there.start == self._record.start
                self._before = "" if is_own else fields["save"]
            fields |= {"run": self._run, "is_launched": self._claimant is not None}
            record = dataclasses.replace(self._record, fields=fields)
            if self._records.create(number + 1, record):
                self._number = number + 1
                self._held = records.Held(
                    self._records.path(number + 1),
                    record,
                    after=self._records.path(number + 2),
                )
                # Also if `close` is never called, and in children that are forked.
                util.Finalize(self, self._held.give_back, exitpriority=0)

    def _check_follows(self, number: int, there: Record) -> None:
        own, claimant = self._record, self._claimant
        if own.start == there.start:
            return
        if claimant is not None and claimant.has_claimed:
            raise _replaced(self._records)
        if own.process == there.process or not there.secs:
            return
        if claimant is not None and there.fields["is_launched"]:
            may_follow = claimant.owner is None or not there.process.is_running
        else:
            may_follow = records.is_over(self._records.path(number), there)
        if not may_follow:
            raise errors.RunError(
                f"{self._records.directory.parent} is being written by another live"
                f" program, {there}; {self._advice}"
            )


def _records(steps: epath.PathLike) -> Records:
    return Records(storage.absolute(steps) / DIRECTORY)


def _claim(number: int, record: Record) -> Claim:
    fields = record.fields
    return Claim(
        number=number,
        start=record.start,
        run=fields["run"],
        line=Line(
            save=fields["save"],
            parents=tuple(StepId(*each) for each in fields["parents"]),
        ),
        begun_ms=fields["begun_ms"],
    )


def _replaced(there: Records) -> errors.ReplacedError:
    number, by = there.newest()
    other = "another program" if by is None else f"{by.start} ({by})"
    return errors.ReplacedError(
        f"another start of this run, {other}, has continued it in"
        f" {there.directory.parent} as world {number}, so this one commits no step"
        " there from now on; if you do not want the other one, end it and start the run"
        " again"
    )
