"""Claims: each world of a run belongs to the first start that creates its record.

The records are beside the run's steps, `worlds/<number>.json`, numbered from 1. A
record is created if it is absent (`storage.create`), so that of several starts of a run
that do not see each other one gets the next world. The others, and those that cannot
reach the storage, have to stop. A record is never changed. It has the line of the world
(see `steps.line`), so that nothing counts that a replaced world still saves, and
its claimant, so that a replaced start stops before it commits a step.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import secrets
import socket
from collections.abc import Iterator

from etils import epath

from elastic_ckpt.core import (
    bucket_clients,
    checked_json,
    clock,
    errors,
    process,
    storage,
)
from elastic_ckpt.steps.line import Line

DIRECTORY = "worlds"
_VERSION = 1
_NAME = re.compile(r"([1-9][0-9]*)\.json")


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
    """The record of one world.

    Attributes:
      run: the identity of the run.
      number: of the world, from 1.
      claimant: the name of the start that created the record.
      line: of the world's first save: the steps that it goes on from.
      time_ms: when it was claimed, since the epoch.
    """

    run: str
    number: int
    claimant: str
    line: Line
    time_ms: int = dataclasses.field(default_factory=lambda: clock.time_ns() // 10**6)


def new_claimant(owner: process.Process | None = None) -> Claimant:
    """A claimant for a start of a run, named after this process."""
    name = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
    return Claimant(name=name, owner=owner)


def newest(steps: epath.PathLike) -> Claim | None:
    """The claim of the newest world; None before the first.

    Args:
      steps: the directory of the run's steps, local or in an object store.

    Raises:
      CheckpointError: if the storage is out of reach, or the record cannot be read.
    """
    directory = storage.absolute(steps) / DIRECTORY
    with _within_reach(directory):
        number = max(numbers(directory), default=0)
        if not storage.is_local(directory):
            # The list of an object store may lag behind its objects.
            while _path(steps, number + 1).exists():
                number += 1
    return _read(directory, number) if number else None


def first(steps: epath.PathLike) -> Claim | None:
    """The claim of the first world, likewise."""
    directory = storage.absolute(steps) / DIRECTORY
    with _within_reach(directory):
        claimed = numbers(directory)
    return _read(directory, claimed[0]) if claimed else None


def claim(steps: epath.PathLike, line: Line, *, run: str, claimant: Claimant) -> Claim:
    """Claims the world that follows the newest one.

    Args:
      steps: the directory of the run's steps.
      line: of the world; its save is later than all that were found before.
      run: the identity of the run.
      claimant: whose world it becomes.

    Raises:
      ReplacedError: if another start has claimed it, or one after the claimant's own.
      CheckpointError: if the storage is out of reach: the world is not claimed then,
        unless `newest` shows its record later.
    """
    before = newest(steps)
    if before is not None and before.run == run and before.claimant != claimant.name:
        is_later = before.line.save >= line.save
        if claimant.has_claimed or is_later:
            raise replaced(before)
    number = 1 if before is None else before.number + 1
    made = Claim(run=run, number=number, claimant=claimant.name, line=line)
    path = _path(steps, number)
    with _within_reach(path.parent):
        storage.make_directory(path.parent)
        is_created = storage.create(path, _to_bytes(made))
    if not is_created:
        # A client of an object store may have repeated its request after a timeout.
        there = _read(path.parent, number)
        if there != made:
            raise replaced(there)
    return made


def check(steps: epath.PathLike, own: Claim, line: Line | None = None) -> Claim:
    """Checks that the newest claim is that of a claimant, and returns it.

    Args:
      steps: the directory of the run's steps.
      own: the claim that was known to be the newest.
      line: that was to be claimed after that; the answer may have been lost.

    Raises:
      ReplacedError: if the world after `own` is claimed by another one.
      OSError: if storage is unavailable, or another of `bucket_clients.failures`.
    """
    path = _path(steps, own.number + 1)
    if not path.exists():
        return own
    later = _read(path.parent, own.number + 1)
    # Worlds of one start have one claimant, and different lines.
    if (later.claimant, later.line) == (own.claimant, line):
        return check(steps, later, line)
    raise replaced(later)


def is_replaced(steps: epath.PathLike, number: int) -> bool:
    """Whether another start has claimed a world after the one of a number.

    Raises:
      CheckpointError: as `newest`.
    """
    last = newest(steps)
    if last is None or last.number <= number:
        return False
    own = _read(storage.absolute(steps) / DIRECTORY, number)
    return last.claimant != own.claimant


def replaced(by: Claim) -> errors.ReplacedError:
    """The error of a start whose run another one has continued.

    Args:
      by: the claim of the other one.
    """
    return errors.ReplacedError(
        f"another start of this run, {by.claimant}, has continued it as world"
        f" {by.number}, so this one stops, and what it has saved since is not used; if"
        " you do not want the other one, end it and start the run again"
    )


def numbers(directory: epath.Path) -> list[int]:
    """The numbers of the records in a directory, `<number>.json`, ascending."""
    names = storage.names(directory) if directory.exists() else []
    return sorted(int(found[1]) for found in map(_NAME.fullmatch, names) if found)


def _path(steps: epath.PathLike, number: int) -> epath.Path:
    return storage.absolute(steps) / DIRECTORY / f"{number}.json"


def _to_bytes(claim: Claim) -> bytes:
    fields: dict[str, storage.Json] = {
        "run": claim.run,
        "number": claim.number,
        "claimant": claim.claimant,
        "save": claim.line.save,
        "parents": [list(parent) for parent in claim.line.parents],
        "time_ms": claim.time_ms,
    }
    return checked_json.to_bytes(fields, version=_VERSION)


def _read(directory: epath.Path, number: int) -> Claim:
    path = directory / f"{number}.json"
    try:
        fields = checked_json.parse(
            path.read_bytes(), what="claim of a world", version=_VERSION
        )
    except (checked_json.UnreadableError, *bucket_clients.failures()) as error:
        raise errors.CheckpointError(
            f"claim of a world {path} {error}; restore the file from a copy, or end all"
            " processes of the run and remove it to continue from the newest step,"
            " which may be one that was abandoned"
        ) from error
    return Claim(
        run=fields["run"],
        number=fields["number"],
        claimant=fields["claimant"],
        line=Line.from_fields(fields["save"], fields["parents"]),
        time_ms=fields["time_ms"],
    )


@contextlib.contextmanager
def _within_reach(directory: epath.Path) -> Iterator[None]:
    try:
        yield
    except bucket_clients.failures() as error:
        raise errors.CheckpointError(
            f"the claims of the run's worlds, {directory}, are out of reach ({error}),"
            " and so is whether another start has continued the run; bring the storage"
            " back, and start the run again if it has ended"
        ) from error
