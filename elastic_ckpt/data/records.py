"""The records of one logical shard, read unit by unit and epoch by epoch."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import TYPE_CHECKING, Any, cast

import grain
import numpy as np
from absl import logging

from elastic_ckpt.core import errors, renamed, storage
from elastic_ckpt.data import cursors, shard_steps, units
from elastic_ckpt.data.sources import source

if TYPE_CHECKING:
    import pyarrow as pa

# The field of an element with the number of its record in the list of all epochs.
RECORD = "record"

# The field of a cursor with the number of corrupt records that were skipped.
_SKIPPED = "skipped"

# When a shard without rows is an error: after this many records if these are two
# epochs, or after the second number of records if they are from this many units.
_MIN_FRUITLESS_RECORDS = 30_000
_MAX_FRUITLESS_RECORDS = 1_000_000
_MAX_FRUITLESS_UNITS = 1_000


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReadOptions:
    """How `Records` reads its files.

    Attributes:
      shuffle_seed: the seed with which blocks of records are shuffled, anew in each
        epoch; None reads them in the order of the files. `WindowShuffle` shuffles the
        records themselves.
      num_epochs: the number of epochs; None reads endlessly.
      skip_corrupt: whether corrupt records are skipped and counted; by default one is
        an error.
    """

    shuffle_seed: int | None = None
    num_epochs: int | None = None
    skip_corrupt: bool = False

    def __post_init__(self) -> None:
        if self.num_epochs is not None and self.num_epochs < 1:
            raise errors.ConfigError(
                f"ReadOptions: num_epochs={self.num_epochs}; give 1 or more, or None to"
                " read endlessly"
            )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """A record that is read in some epoch.

    Attributes:
      file: the path or URI of its file.
      record: its number in the file, from 0.
      epoch: the epoch, from 0.
    """

    file: str
    record: int
    epoch: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """When a shard reads a record.

    Attributes:
      number: that of the field `record`.
      epoch: the epoch, from 0.
      shard: the shard that reads it.
      turn: the number of units that this shard reads before that of the record.
      skip: the number of records before it in its unit.
    """

    number: int
    epoch: int
    shard: int
    turn: int
    skip: int

    @property
    def at(self) -> tuple[int, int]:
        """`turn` and `skip`, which are ordered as the shard reads."""
        return self.turn, self.skip


class Records(shard_steps.Step[source.Element]):
    """A `grain.IterDataset` of one shard's records, as dicts of columns.

    Each element also has the field `record`, an int that no other element has, in any
    epoch.

    Args:
      source: the files: `Parquet`, `ArrayRecord` or `TFRecord`.
      shard: the number of the shard, from 0.
      num_shards: S, the number of shards of the run.
      read_options: the order, and the number of epochs.
    """

    @renamed.parameters(reading="read_options")
    def __init__(
        self,
        source: source.Source,
        *,
        shard: int,
        num_shards: int,
        read_options: ReadOptions | None = None,
    ) -> None:
        super().__init__()
        if not 0 <= shard < num_shards:
            raise errors.ConfigError(
                f"Records: shard={shard} of num_shards={num_shards}; shards are"
                " numbered from 0 to num_shards - 1"
            )
        self._source = source
        self._shard = self.shard = shard
        self._num_shards = self.num_shards = num_shards
        self._reading = read_options or ReadOptions()
        # What replaces the number of each record in its field `record`.
        self._tag: Callable[[int], int] | None = None

    def __iter__(self) -> grain.DatasetIterator[source.Element]:
        return _RecordsIterator(self)

    def batches(self) -> RecordBatches | None:
        """The records in batches of columns; None if the source has only records."""
        return RecordBatches(self) if hasattr(self._source, "read_batches") else None

    def epoch_records(self) -> int:
        """The number of records in an epoch, over all shards."""
        return source.num_records(self._source)

    @functools.cached_property
    def _first_records(self) -> np.ndarray:
        # The number of the first record of each file, over all files.
        counts = np.array([i.num_records for i in source.indexes(self._source)])
        return np.cumsum(counts) - counts

    def __str__(self) -> str:
        return f"Records(shard={self.shard} of {self.num_shards})"

    def settings(self) -> dict[str, storage.Json]:
        """The files, their order and the number of epochs."""
        reading = self._reading
        return {
            "shuffle_seed": reading.shuffle_seed,
            "num_epochs": reading.num_epochs,
            # Damage that is skipped does not change the identity of a file.
            **source.identity(self._source, sampled=not reading.skip_corrupt),
        }


def tag(records: Records, tag: Callable[[int], int]) -> None:
    """Calls `tag` for each record that is read one by one; see `provenance`.

    Args:
      records: of a shard, not iterated over before.
      tag: returns what the field `record` has in place of the record's number.
    """
    records._tag = tag


def files_of(records: Records) -> tuple[str, ...]:
    """The paths or URIs of the files, in order."""
    return records._source.files


def num_bytes(records: Records) -> int:
    """The bytes of all files."""
    return sum(i.content.num_bytes for i in source.indexes(records._source))


def origin(records: Records, number: int) -> Origin:
    """The record that has `number` in its field `record`."""
    epoch, record = divmod(number, records.epoch_records())
    firsts = records._first_records
    # Of the files that begin there, all but the last are empty.
    file = int(np.searchsorted(firsts, record, side="right")) - 1
    return Origin(
        file=files_of(records)[file], record=record - int(firsts[file]), epoch=epoch
    )


def turns(records: Records, file: int, record: int) -> Iterator[Turn]:
    """When shards read a record, epoch by epoch.

    Args:
      records: of any shard.
      file: the number of the file.
      record: the record's number in the file, from 0.

    Raises:
      DataError: if the file has no such record.
    """
    of_file = source.indexes(records._source)[file].num_records
    if not 0 <= record < of_file:
        raise errors.DataError(
            f"{files_of(records)[file]} has no record {record}: its {of_file:,} records"
            f" are numbered from 0 to {of_file - 1}"
        )
    record += int(records._first_records[file])
    cut = source.cut(records._source, records._num_shards)
    unit = int(np.searchsorted(cut.record, record, side="right")) - 1
    seed, num_epochs = records._reading.shuffle_seed, records._reading.num_epochs
    for epoch in itertools.count() if num_epochs is None else range(num_epochs):
        place = unit
        if seed is not None:
            place = units.place_of(unit, length=len(cut), key=(seed, epoch))
        turn, shard = divmod(epoch * len(cut) + place, records._num_shards)
        yield Turn(
            number=epoch * cut.total_records + record,
            epoch=epoch,
            shard=shard,
            turn=turn,
            skip=record - int(cut.record[unit]),
        )


def num_read(records: Records, turn: int, taken: int) -> float:
    """About how many records a shard has read at a state, which has these."""
    cut = source.cut(records._source, records._num_shards)
    return turn * cut.total_records / len(cut) + taken


def epoch_at(records: Records, turn: int, *, shard: int) -> int:
    """The epoch of the unit that a shard reads at `turn`."""
    num_shards = records._num_shards
    num_units = len(source.cut(records._source, num_shards))
    return units.dealt(turn, shard=shard, num_shards=num_shards, num_units=num_units)[0]


class _UnitsInTurn:
    """Reads the units of a shard in turn, record by record or batch by batch.

    Args:
      records: of the shard.
      read: of their source: what a unit has after some of its records.
    """

    def __init__(
        self, records: Records, read: Callable[[units.Unit, int], Iterator[Any]]
    ) -> None:
        self._source, self._reading = records._source, records._reading
        self._shard, self._num_shards = records._shard, records._num_shards
        self._read = read
        self._units = source.cut(self._source, self._num_shards)
        self._turn, self._taken, self._skipped = 0, 0, 0
        self._open: Iterator[Any] | None = None
        self._first_record = 0
        # The number of records after which the next unit is requested.
        self._ahead_at = 0

    def next(self) -> Any:
        """What is read next; the caller counts it by `took`."""
        while True:
            if self._open is None:
                self._open = self._open_unit()
            try:
                read = next(self._open)
            except StopIteration:
                self._turn, self._taken, self._open = self._turn + 1, 0, None
                continue
            except BaseException:
                # A generator ends when it raises; the unit is opened again.
                self._open = None
                raise
            if not isinstance(read, source.CorruptError):
                return read
            if not self._reading.skip_corrupt:
                self._open = None
                raise read
            logging.warning("%s; skipped %d", read, read.num_records)
            self._taken += read.num_records
            self._skipped += read.num_records
            _FRUITLESS.note_corrupt(read)

    def took(self, num_records: int, columns: Collection[str]) -> int:
        """Counts records; returns the number of the first in the list of all epochs."""
        if RECORD in columns:
            raise errors.DataError(
                f"{self._source.files[0]}: its column {RECORD!r} has the name of a"
                " field that Records adds; select other columns, or rename it"
            )
        first = self._first_record + self._taken
        before, self._taken = self._taken, self._taken + num_records
        if before < self._ahead_at <= self._taken:
            self._read_ahead()
        return first

    def get_state(self) -> dict[str, Any]:
        return _state(self._turn, self._taken, self._skipped)

    def set_state(self, state: dict[str, Any]) -> None:
        self._turn, self._taken = state["turn"], state["taken"]
        self._skipped = state.get(_SKIPPED, 0)
        self._open = None

    def _open_unit(self) -> Iterator[Any]:
        epoch, unit = self._unit(self._turn)
        _FRUITLESS.count(unit.num_records, 2 * self._units.total_records, self._source)
        self._first_record = epoch * self._units.total_records + unit.record
        self._ahead_at = unit.num_records // 2
        source.read_ahead(self._source, unit)
        return self._read(unit, self._taken)

    def _read_ahead(self) -> None:
        with contextlib.suppress(StopIteration):
            source.read_ahead(self._source, self._unit(self._turn + 1)[1])

    def _unit(self, turn: int) -> tuple[int, units.Unit]:
        # The epoch and the unit of a turn.
        reading, count = self._reading, len(self._units)
        epoch, place = units.dealt(
            turn, shard=self._shard, num_shards=self._num_shards, num_units=count
        )
        if reading.num_epochs is not None and epoch >= reading.num_epochs:
            raise StopIteration
        if reading.shuffle_seed is not None:
            key = (reading.shuffle_seed, epoch)
            place = units.permuted(place, length=count, key=key)
        return epoch, self._units[place]


def _state(turn: int, taken: int, skipped: int) -> dict[str, Any]:
    state = {"turn": turn, "taken": taken}
    return state | {_SKIPPED: skipped} if skipped else state


class _RecordsIterator(grain.DatasetIterator[source.Element]):
    def __init__(self, records: Records) -> None:
        super().__init__()
        self._in_turn = _UnitsInTurn(records, records._source.read)
        self._tag = records._tag

    def __next__(self) -> source.Element:
        element = self._in_turn.next()
        number = self._in_turn.took(1, element)
        element[RECORD] = self._tag(number) if self._tag else number
        return element

    def get_state(self) -> dict[str, Any]:
        return self._in_turn.get_state()

    def set_state(self, state: dict[str, Any]) -> None:
        self._in_turn.set_state(state)


class RecordBatches:
    """The records of a shard in Arrow's batches.

    Args:
      records: of the shard, of a source that has batches.
    """

    def __init__(self, records: Records) -> None:
        self._in_turn = _UnitsInTurn(records, cast(Any, records._source).read_batches)

    def __next__(self) -> tuple[pa.RecordBatch, RecordPlaces]:
        """The next records, and their places."""
        before = self._in_turn.get_state()
        batch = self._in_turn.next()
        first = self._in_turn.get_state()
        number = self._in_turn.took(batch.num_rows, batch.schema.names)
        return batch, RecordPlaces(before=before, first=first, number=number)

    def get_state(self) -> dict[str, Any]:
        """The state after the last batch."""
        return self._in_turn.get_state()

    def set_state(self, state: dict[str, Any]) -> None:
        """Goes on from a state of `Records`."""
        self._in_turn.set_state(state)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RecordPlaces:
    """The states before each record of a batch.

    Attributes:
      before: the state before corrupt records that were skipped before the batch.
      first: the state before its first record.
      number: that of its first record in the list of all epochs.
    """

    before: dict[str, Any]
    first: dict[str, Any]
    number: int

    def state(self, number: int) -> dict[str, Any]:
        """The state before record `number`."""
        if not number:
            return self.before
        return self.first | {"taken": self.first["taken"] + number}


def skipped(shard_cursors: Iterable[cursors.Cursor]) -> int:
    """The number of corrupt records skipped so far, by the cursors of all shards."""
    parts = itertools.chain.from_iterable(map(cursors.parts, shard_cursors))
    return sum(part[_SKIPPED] for part in parts if _SKIPPED in part)


class RandomMap(shard_steps.Step):
    """Maps elements with randomness, such as augmentation of images.

    The random numbers of an element depend on the seed and its field `record`, which
    differs in each epoch; not on the host, the shard, or the elements before it.

    Args:
      parent: elements with the field `record`, as `Records` yields them.
      function: `(element, numpy.random.Generator) -> element`.
      seed: a number from 0.
    """

    runs_own_code = True

    def __init__(
        self,
        parent: grain.IterDataset,
        function: Callable[[source.Element, np.random.Generator], Any],
        *,
        seed: int,
    ) -> None:
        super().__init__(parent)
        self._function = function
        self._seed = seed

    def __iter__(self) -> grain.DatasetIterator:
        return iter(self._parent.map(self._map))

    def __str__(self) -> str:
        name = getattr(self._function, "__name__", repr(self._function))
        return f"RandomMap({name})"

    def settings(self) -> dict[str, storage.Json]:
        """The seed."""
        return {"seed": self._seed}

    def _map(self, element: source.Element) -> Any:
        generator = np.random.default_rng([self._seed, element[RECORD]])
        return self._function(element, generator)


class _Fruitless(threading.local):
    """Counts the records that this thread reads until a shard yields its next row."""

    # None while no row is due; then nothing is counted.
    describe: Callable[[], str] | None = None
    num_records = 0
    num_units = 0
    num_corrupt = 0
    last_corrupt = ""

    def note_corrupt(self, error: source.CorruptError) -> None:
        """Counts corrupt records that are skipped."""
        self.num_corrupt += error.num_records
        self.last_corrupt = str(error).partition("; ")[0]

    def count(self, num_records: int, two_epochs: int, files: source.Source) -> None:
        """Counts the records of a unit that is opened."""
        if self.describe is None:
            return
        self.num_records += num_records
        self.num_units += 1
        enough = self.num_records > max(two_epochs, _MIN_FRUITLESS_RECORDS)
        many = (
            self.num_records > _MAX_FRUITLESS_RECORDS
            and self.num_units > _MAX_FRUITLESS_UNITS
        )
        if enough or many:
            raise errors.DataError(
                f"{files.files[0]} and the {len(files.files) - 1} files after it:"
                f" {self.num_records:,} records in a row made no example;"
                f" {self.describe()}{skipped_since()}"
            )


_FRUITLESS = _Fruitless()


def row_is_due(describe: Callable[[], str] | None) -> None:
    """Starts or stops counting the records that this thread reads for a row.

    While it counts, reading endlessly without a row is an error instead of a loop.

    Args:
      describe: returns a message with the likely reason; None once the row was read.
    """
    _FRUITLESS.describe = describe
    _FRUITLESS.num_records = _FRUITLESS.num_units = 0
    if describe is not None:
        _FRUITLESS.num_corrupt = 0


def skipped_since() -> str:
    """What this thread skipped as corrupt since `row_is_due`; empty if nothing."""
    if not _FRUITLESS.num_corrupt:
        return ""
    return (
        f"; {_FRUITLESS.num_corrupt:,} corrupt records were skipped, the last of them:"
        f" {_FRUITLESS.last_corrupt}"
    )
