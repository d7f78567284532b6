"""Claims let only one program at a time write to a directory of steps.

A program that opens the directory to save claims a world: it creates the next record in
`worlds/` (see `records`), unless the newest record's program is still writing. All
worlds of one launch of a run share a name and follow each other. If a launcher restarts
the run, the new launch follows immediately, unless both launches run on the same
machine. Only the newest record is a valid claim: its program writes, and an earlier
program notices before it commits a step.

Before a world saves anything, its record gets the world's line (see `steps.step`);
until then the record contains the previous world's line. So steps that a replaced world
still saves, or that the run rolled back, do not count, even if all steps of the new
line are gone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable
from multiprocessing import util
from typing import Any

from etils import epath

from elastic_ckpt.core import (
    allgather,
    background,
    bucket_clients,
    clock,
    errors,
    process,
    storage,
)
from elastic_ckpt.steps.step import Line, StepId
from elastic_ckpt.tiers.persistent import records, run_files

DIRECTORY = "worlds"
SECS = 60.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Claimant:
    """A launch of a run, which claims the run's worlds.

    Attributes:
      name: the unique name of the launch; by default derived from this process.
      has_claimed: whether an earlier world of this launch was claimed.
      owner: the launch's process, if the launch is alive exactly as long as this
        process; None if the launch has multiple processes, or a launcher restarts it.
    """

    name: str = dataclasses.field(default_factory=records.new_start)
    has_claimed: bool = False
    owner: process.Process | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Claim:
    """One world's claim.

    Attributes:
      number: the world number, from 1.
      line: the line of the world's first save; the line's save is empty if no world of
        the run has saved anything.
      begun_ms: when the first world of the run was claimed, in milliseconds since 1970.
    """

    number: int
    run: str
    line: Line
    begun_ms: int


def newest(steps: epath.PathLike) -> Claim | None:
    """The claim of the latest world; None before the first.

    Raises:
      CheckpointError: if storage is unreachable, or the record cannot be read.
    """
    number, record = _records(steps).newest()
    if record is None:
        return None
    fields = record.fields
    return Claim(
        number=number,
        run=fields["run"],
        line=Line(
            save=fields["save"],
            parents=tuple(StepId(*each) for each in fields["parents"]),
        ),
        begun_ms=fields["begun_ms"],
    )


def is_replaced(steps: epath.PathLike, number: int) -> bool:
    """Whether another launch has claimed a world after world `number`.

    Raises:
      CheckpointError: see `newest`.
    """
    there = _records(steps)
    (last, newer), own = there.newest(), records.read(there.path(number))
    return last > number and not (newer and own and newer.start == own.start)


def check(steps: epath.PathLike, number: int) -> None:
    """Checks that a world's claim is the newest one and was not released.

    Raises:
      ReplacedError: if a later world was claimed.
      CheckpointError: if the claim was released or is damaged.
    """
    there = _records(steps)
    own = records.read(there.path(number))
    if storage.has_file(there.path(number + 1)):
        raise _replaced(there)
    if own is None:
        raise errors.ReplacedError(
            f"{there.path(number)}, which claims the directory for this program, was"
            " removed, so another program may be writing there; restart the run"
        )
    if not own.secs:
        raise errors.CheckpointError(
            "the checkpointer was closed before its upload was committed; save again"
        )


class WriteClaim:
    """A program's claim to write to a directory of steps.

    Every process that drives the hosts of a run creates a claim with the same
    arguments. Only host 0 accesses storage; the claims on all hosts raise its errors.

    Args:
      steps: the directory, local or in an object store.
      run: the identity of the run.
      claimant: the launch that claims the run's worlds; None if there is only this
        program.
      gather: a function that takes a name and a value, passes the value to all
        drivers and returns all their values; see `Hosts.gather`.
      acts: whether this process belongs to host 0.

    Attributes:
      number: the number of the world that this program has claimed; 0 if it has not
        claimed a world yet.
    """

    def __init__(
        self,
        steps: epath.PathLike,
        *,
        run: str = "",
        claimant: Claimant | None = None,
        gather: Callable[[str, Any], list[Any]] = lambda _, value: [value],
        acts: bool = True,
    ) -> None:
        self._steps, self._records = storage.absolute(steps), _records(steps)
        self._run, self._claimant = run, claimant
        self._gather, self._acts = gather, acts
        own = claimant or Claimant()
        self._record = records.Record(
            start=own.name, process=own.owner or process.this(), secs=SECS
        )
        self._identity: run_files.Identity | None = None
        self.number = 0
        # A backup and a commit may notice simultaneously that storage is back.
        self._lock = threading.Lock()
        self._held: records.Held | None = None
        # The save in the record of the previous launch.
        self._before = ""

    def begin(self, identity: run_files.Identity | None = None) -> None:
        """Claims a world; if storage is unreachable, `check` does so later.

        May wait until the previous program's record lapses.

        Args:
          identity: the run's identity; None if it is unknown.

        Raises:
          RunError: if another program is writing there.
          ReplacedError: if another launch has claimed a later world.
          HostsFailedError: if a record cannot be read.
        """
        self._identity = identity

        def begin() -> int:
            with contextlib.suppress(
                records.OutOfReachError, *bucket_clients.failures()
            ):
                return self._begin()
            return 0

        self._agreed("begin", begin)

    def check(self) -> int:
        """Checks before a write to storage that this program's claim still holds.

        Returns:
          This world's number.

        Raises:
          ReplacedError: if another program is writing now, or the directory was
            removed.
          HostsFailedError: if storage is unreachable.
        """
        return self._agreed("check", self._begin)

    def claim(self, line: Line) -> int:
        """Checks, then records the line for all steps saved from now on.

        Raises:
          ReplacedError: see `check`; also if another launch has saved to a later line.
          HostsFailedError: see `check`.
        """

        def claim() -> int:
            number, held = self._begin(), self._held
            assert held is not None
            if line.save <= self._before:
                # The other launch claimed it after this program searched for steps.
                raise _replaced(self._records)
            of_line = {"save": line.save, "parents": list(map(list, line.parents))}
            held.renew(fields={**held.record.fields, **of_line})
            check(self._steps, number)
            return number

        return self._agreed("claim", claim)

    def close(self) -> None:
        """Releases the record, so that another program may write immediately."""
        if self._held is not None:
            self._held.release()

    def _agreed(self, name: str, act: Callable[[], int]) -> int:
        # Named, because a backup and a commit may ask simultaneously.
        own = allgather.outcome(act) if self._acts else {}
        outcome = self._gather(f"writer/{name}", own)[0]
        if outcome.get("kind") == errors.RunError.__name__:
            raise errors.RunError(outcome["failed"])
        (self.number,) = allgather.answers({0: outcome})
        return self.number

    def _begin(self) -> int:
        # Claims a world unless this program already has one; returns the world's
        # number.
        with self._lock:
            if self._identity is not None:
                run_files.keep(self._steps, self._identity, is_first=self._held is None)
            while self._held is None:
                self._held = self._take(*self._records.newest())
        number = int(self._held.path.stem)
        check(self._steps, number)
        return number

    def _take(self, number: int, before: records.Record | None) -> records.Held | None:
        own, claimant = self._record, self._claimant
        fields: dict[str, Any] = {"save": "", "parents": []}
        fields["begun_ms"] = clock.time_ns() // 10**6
        if before is not None and before.start != own.start:
            if claimant is not None and claimant.has_claimed:
                raise _replaced(self._records)
            if claimant is not None and before.secs and before.fields["is_launched"]:
                may_follow = claimant.owner is None or not before.process.is_running
            else:
                may_follow = records.is_over(self._records.path(number), before)
            if not may_follow and before.process != own.process:
                raise errors.RunError(
                    f"{self._steps} is being written by another live program, {before};"
                    " wait for that program or stop it, write to a new directory, or"
                    " open this directory with read_only=True"
                )
        if before is not None and before.fields["run"] == self._run:
            fields |= before.fields
            self._before = "" if before.start == own.start else fields["save"]
        fields |= {"run": self._run, "is_launched": claimant is not None}
        record = dataclasses.replace(own, fields=fields)
        held = self._records.take(number + 1, record)
        if held is not None:
            # In case `close` is never called, including in forked children. A separate
            # thread is needed, because garbage may be collected in a storage client's
            # thread, which must not wait for itself.
            named = {"name": "give-back"}
            util.Finalize(self, background.in_thread, [held.release], named)
            util.Finalize(None, held.release, exitpriority=0)
        return held


def _records(steps: epath.PathLike) -> records.RecordStore:
    return records.RecordStore(storage.absolute(steps) / DIRECTORY)


def _replaced(there: records.RecordStore) -> errors.ReplacedError:
    number, by = there.newest()
    other = "another program" if by is None else f"{by.start} ({by})"
    return errors.ReplacedError(
        f"another launch of this run, {other}, has continued it in"
        f" {there.directory.parent} as world {number}, so this launch commits no more"
        " steps there; if you do not want the other launch, stop it and restart the run"
    )
