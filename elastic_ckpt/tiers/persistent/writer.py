"""The writer of a directory of steps: one program at a time.

    <root>/writers/<number>.json   the record of the program that writes, or wrote last

A program that opens the directory to save creates the next record (see `renewed`),
unless the one that is there is of a program that still writes.

The worlds of one start of a run have one name, and follow each other. Another start of
a run that claims its worlds follows by its claim (see `claims`), unless both run on one
machine. A writer that was replaced, because it stood still for so long, finds the next
record before it commits a step. The record is removed when its writer closes.
"""

from __future__ import annotations

from multiprocessing import util

from absl import logging
from etils import epath

from elastic_ckpt.core import clock, errors, process, storage
from elastic_ckpt.tiers.persistent import claims, renewed

DIRECTORY = "writers"
DURATION_SECS = 60.0
_LOOKS = 16
_ADVICE = (
    "wait for it or stop it, save to another directory, or open it with read_only=True"
    " to read beside it"
)
_CLAIMING = "is_claiming"


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
        self._renewed = renewed.Renewed(
            _records(steps),
            renewed.Record(
                name=own.name,
                process=owner or of_start or process.this(),
                duration_secs=duration_secs,
                fields={_CLAIMING: claimant is not None},
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
        records = self._renewed.records
        while not self._renewed.number:
            number, there = records.newest()
            if there is not None and not self._may_follow(number, there):
                raise errors.RunError(
                    f"{records.directory.parent} is being written by another live"
                    f" program, {there.process}, since {there.since}; {self._advice}"
                )
            # Others may have come and gone while this one waited.
            if claims.numbers(records.directory)[-1:] == ([number] if number else []):
                self._renewed.create(number + 1)

    def check(self) -> None:
        """Raises a ReplacedError if another program writes now.

        Raises:
          OSError: if storage is unavailable, or another of `bucket_clients.failures`.
        """
        own = self._renewed
        if not own.check():
            _, by = own.records.newest()
            other = "another program" if by is None else f"{by.process}"
            since = "" if by is None else f" since {by.since}"
            raise errors.ReplacedError(
                f"{other} writes to {own.records.directory.parent}{since}: this one had"
                f" not renewed its record there for {own.record.duration_secs:g} s, or"
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

    def _may_follow(self, number: int, there: renewed.Record) -> bool:
        own = self._renewed.record
        is_own = there.name == own.name or there.process == own.process
        if is_own or there.process.is_dead:
            return True
        if own.fields[_CLAIMING] and there.fields[_CLAIMING]:
            is_by_hand = self._claimant is not None and self._claimant.owner is not None
            return not (is_by_hand and there.process.is_running)
        if there.process.is_here:
            return False
        return _expires(self._renewed.records, number, there)


def live(steps: epath.PathLike) -> renewed.Record | None:
    """The record of the program that writes, or wrote last; None if none does.

    Raises:
      CheckpointError: if it cannot be read.
      OSError: if storage is unavailable, or another of `bucket_clients.failures`.
    """
    _, record = _records(steps).newest()
    return None if record is None or record.process.is_dead else record


def _records(steps: epath.PathLike) -> renewed.Records:
    directory = storage.absolute(steps) / DIRECTORY
    return renewed.Records(
        directory=directory,
        what="record of a writer",
        remedy=f"remove it if no program writes to {directory.parent}",
    )


def _expires(records: renewed.Records, number: int, there: renewed.Record) -> bool:
    # Waits for the next renewal, and returns whether there was none.
    logging.warning(
        "%s may still write to %s (since %s), and cannot be asked: waiting for up to"
        " %g s until that is known",
        there.process,
        records.directory.parent,
        there.since,
        there.duration_secs,
    )
    until_secs = clock.monotonic() + there.duration_secs
    while clock.monotonic() < until_secs:
        clock.sleep(there.duration_secs / _LOOKS)
        if records.read(number) != there:
            # It was renewed; or it is gone, and what is there now decides.
            return records.newest()[0] != number
    return True
