"""The records of one logical shard, read unit by unit and epoch by epoch."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import threading
from collections.abc import (
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from typing import Any, NamedTuple, cast

import grain
import numpy as np
from absl import logging

from elastic_ckpt.core import errors, storage
from elastic_ckpt.data import cursors, shard_steps, units
from elastic_ckpt.data.sources import files, kept_blocks, source

# The field of an element with the number of its record in the list of all epochs.
RECORD = "record"

# How a mixture's records are dealt to shards. In joint shares, the datasets of finite
# data follow each other in the turn of the shards that read one record more.
DEALING = "dealing"
SHARES, JOINT_SHARES = "shares", "joint shares"

# The field of a cursor with the number of corrupt records that were skipped.
_SKIPPED = "skipped"

# The records that are converted to elements together.
_ELEMENTS = 64

# It is an error if more records, and more than two epochs of their datasets, make no
# row.
_LEAST_FRUITLESS = 100_000


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


# What a unit of a source has after some of its records.
_Read = Callable[[units.Unit, int], Iterator[Any]]


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
      turn: the epoch; or the number of units that the shard reads before that of the
        record, if units are dealt.
      skip: the number of records of the shard's before it in the epoch, or the unit.
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
        # Of the shares of its shards; see `units.share`.
        self.lead = 0
        # What replaces the number of each record in its field `record`.
        self._tag: Callable[[int], int] | None = None

    def __iter__(self) -> grain.DatasetIterator[source.Element]:
        return RecordsIterator(self)

    def batches(self, *, tokens: str = "") -> RecordBatches | None:
        """The records in batches of columns; None if the source has only records.

        Args:
          tokens: the column of tokens if nothing else is needed.
        """
        if not isinstance(self._source, kept_blocks.ColumnFiles):
            return None
        return RecordBatches(self, tokens=tokens)

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
            **source.identity(self._source, digested=not reading.skip_corrupt),
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
    dealt = _dealt(records)
    num_epochs = records._reading.num_epochs
    for epoch in itertools.count() if num_epochs is None else range(num_epochs):
        shard, turn, skip = dealt.turn_of(record, epoch)
        yield Turn(
            number=epoch * dealt.units.total_records + record,
            epoch=epoch,
            shard=shard,
            turn=turn,
            skip=skip,
        )


def epoch_at(records: Records, turn: int, *, shard: int) -> int:
    """The epoch of what a shard reads at `turn`."""
    return _dealt(records).epoch(shard, turn)


def place_in(state: Any) -> tuple[int, int] | None:
    """How far a state of `Records` has read, as `Turn.at`; None if it is another's."""
    if not isinstance(state, dict) or not isinstance(state.get(_TAKEN), int):
        return None
    if _EPOCH in state:
        return state[_EPOCH], state[_TAKEN]
    return (state[_TURN], state[_TAKEN]) if _TURN in state else None


def _reader(
    records: Records,
    read: _Read,
    state: Mapping[str, Any] | None = None,
    *,
    tokens: str = "",
) -> _InTurn | _InShare:
    dealt = _dealt(records)
    at = Place() if state is None else Place.of(state, dealt.key)
    if isinstance(dealt, _Shares) and dealt.is_grouped:
        return _InShare(records, at, tokens=tokens)
    return _InTurn(records, read, dealt, at)


class _InShare:
    """Reads the records of a shard from small blocks.

    Args:
      records: of the shard.
      at: how far they have been read.
      tokens: the column of tokens if nothing else is needed.
    """

    def __init__(self, records: Records, at: Place, *, tokens: str) -> None:
        self._blocks = SmallBlocks(
            records._source,
            records._num_shards,
            records._reading,
            tokens=tokens,
            lead=records.lead,
        )
        self._shard, self._at = records._shard, at

    def next(self, at_most: int) -> kept_blocks.Picked:
        """What is read next; the caller counts it by `took`."""
        try:
            read, self._at = self._blocks.next(self._shard, self._at, at_most)
        except StopIteration as end:
            # There may have been corrupt records before it.
            self._at = end.value
            raise
        return read

    def took(self, num_records: int, columns: Collection[str]) -> None:
        """Counts records that were read."""
        del columns
        self._at = self._at.after(num_records)

    def record(self) -> int:
        """The number of the record to be counted next in the list of all epochs."""
        return int(self._blocks.numbers(self._shard, self._at, 1)[0])

    def get_state(self) -> dict[str, Any]:
        """The state after the records that were counted."""
        return self._at.state()


class _InTurn:
    """Reads the records of a shard unit by unit.

    Args:
      records: of the shard.
      read: of their source: what a unit has after some of its records.
      dealt: which units the shard reads.
      at: how far it has read.
    """

    def __init__(
        self, records: Records, read: _Read, dealt: _Units | _Shares, at: Place
    ) -> None:
        self._source, self._reading = records._source, records._reading
        self._shard = records._shard
        self._read, self._dealt = read, dealt
        # The unit that is read, how many of its records were, and what is left of it.
        self._unit: units.Unit | None = None
        self._in_unit = 0
        # The place of its first record, and the number in the list of all epochs.
        self._begin, self._first = at, 0
        self._open: Iterator[Any] | None = None
        # The number of records after which the next unit is requested.
        self._ahead_at = 0

    def next(self, at_most: int) -> Any:
        """See `_InShare`."""
        del at_most
        while True:
            read = self._next()
            if not isinstance(read, source.CorruptError):
                return read
            if not self._reading.skip_corrupt:
                self._open = None
            _note_corrupt(read, skips=self._reading.skip_corrupt)
            self._count(read.num_records)
            self._in_unit += read.num_records
            self._begin = self._begin.after(0, read.num_records)

    def took(self, num_records: int, columns: Collection[str]) -> None:
        """See `_InShare`."""
        _check_names(self._source, columns)
        self._count(num_records)
        before = self._in_unit
        self._in_unit += num_records
        unit = self._unit
        if unit is not None and before < self._ahead_at <= self._in_unit:
            with contextlib.suppress(StopIteration):
                source.read_ahead(self._source, self._unit_at(self._after(unit))[-1])

    def record(self) -> int:
        """See `_InShare`."""
        return self._first + self._in_unit

    def get_state(self) -> dict[str, Any]:
        """See `_InShare`."""
        return self._begin.after(self._in_unit).state(self._dealt.key)

    def _count(self, num_records: int) -> None:
        _SINCE_ROW.count(num_records, self._dealt.units.total_records, self._source)

    def _next(self) -> Any:
        while True:
            unit = self._unit
            if unit is not None:
                # At its end, formats check what is behind it.
                read = self._next_of_unit(unit)
                if read is not None:
                    return read
                self._begin, self._in_unit = self._after(unit), 0
            self._unit = self._open = None
            at, self._in_unit, unit = self._unit_at(self._begin.after(self._in_unit))
            self._begin = at.after(-self._in_unit)
            epoch = self._dealt.epoch(self._shard, at.epoch)
            self._first = epoch * self._dealt.units.total_records + unit.record
            self._ahead_at = unit.num_records // 2
            source.read_ahead(self._source, unit)
            self._unit = unit

    def _next_of_unit(self, unit: units.Unit) -> Any:
        # The next records of a unit; None if there is none.
        if self._open is None:
            self._open = self._read(unit, self._in_unit)
        try:
            return next(self._open, None)
        except BaseException:
            # A generator ends when it raises; the unit is opened again.
            self._open = None
            raise

    def _after(self, unit: units.Unit) -> Place:
        at = self._begin.after(self._in_unit)
        return self._dealt.after(at, unit.num_records - self._in_unit)

    def _unit_at(self, at: Place) -> tuple[Place, int, units.Unit]:
        # The unit at a place, or the first after it, and how much of it was taken.
        epochs = self._reading.num_epochs
        while True:
            if (
                epochs is not None
                and self._dealt.epoch(self._shard, at.epoch) >= epochs
            ):
                raise StopIteration
            found = self._dealt.unit(self._shard, at)
            if found is not None:
                return at, *found
            at = at.next_epoch()


# The fields of a state: the unit by its turn, or the epoch, and the records that were
# taken from it.
_TURN, _EPOCH, _TAKEN = "turn", "epoch", "taken"


class _Units:
    """Units of compressed files are dealt to shards; see `units.dealt`.

    In a place, the number of the unit's turn stands for the epoch.

    Args:
      of: the source.
      num_shards: S.
      seed: of the order; None if it is that of the files.
    """

    key = _TURN

    def __init__(self, of: source.Source, num_shards: int, seed: int | None) -> None:
        self._num_shards, self._seed = num_shards, seed
        self.units = source.cut(of, num_shards)

    def epoch(self, shard: int, turn: int) -> int:
        """The epoch of what a shard reads at a turn."""
        return self._place(shard, turn)[0]

    def unit(self, shard: int, at: Place) -> tuple[int, units.Unit]:
        """How many records a shard has taken of the unit at a place, and the unit."""
        epoch, place = self._place(shard, at.epoch)
        return at.taken, self.units[int(self._order(epoch, np.array([place]))[0])]

    def after(self, at: Place, num_left: int) -> Place:
        """The place after the rest of a unit."""
        del num_left
        return at.next_epoch()

    def turn_of(self, record: int, epoch: int) -> tuple[int, int, int]:
        """The shard, turn, and the records before it in its unit, of a record."""
        cut = self.units
        unit = int(np.searchsorted(cut.record, record, side="right")) - 1
        order = self._order(epoch, np.arange(len(cut)))
        place = int(np.flatnonzero(order == unit)[0])
        turn, shard = divmod(epoch * len(cut) + place, self._num_shards)
        return shard, turn, record - int(cut.record[unit])

    def _order(self, epoch: int, places: np.ndarray) -> np.ndarray:
        # The numbers of the units at places of an epoch.
        if self._seed is None:
            return places
        key = (self._seed, epoch)
        return units.permuted(places, length=len(self.units), key=key)

    def _place(self, shard: int, turn: int) -> tuple[int, int]:
        return units.dealt(
            turn, shard=shard, num_shards=self._num_shards, num_units=len(self.units)
        )


# The epochs whose order is kept: shards are not all in the same one.
_MOST_ORDERS = 3


class _Shares:
    """Each shard has a share of the records of each epoch; see `units.share`.

    Args:
      of: the source.
      num_shards: S.
      seed: of the order; None if it is that of the files.
    """

    key = _EPOCH

    def __init__(
        self, of: source.Source, num_shards: int, seed: int | None, lead: int = 0
    ) -> None:
        self._seed = seed
        whole = source.whole_blocks(of)
        # Whether shards read the same blocks together.
        self.is_grouped = isinstance(of, kept_blocks.BlockFiles) and units.are_small(
            whole
        )
        self.units = whole if self.is_grouped else source.cut(of, num_shards)
        self._sizes = {
            "num_shards": num_shards,
            "num_records": self.units.total_records,
            "group": min(num_shards, units.GROUP_SHARDS) if self.is_grouped else 1,
            "lead": lead,
        }
        # The orders of the last epochs.
        self._orders: dict[int, units.Order] = {}

    def epoch(self, shard: int, epoch: int) -> int:
        """The epoch of what a shard reads in an epoch."""
        del shard
        return epoch

    def unit(self, shard: int, at: Place) -> tuple[int, units.Unit] | None:
        """How many records a shard has taken of the part of a unit that is next.

        Also returns the part; None at the end of an epoch.
        """
        share = units.share(shard, epoch=at.epoch, **self._sizes)
        if at.taken == len(share):
            return None
        number, begin, end = self._order(at.epoch).at(share[at.taken])
        unit = self.units[number]
        # Of the unit, the part that is in the share.
        first, stop = max(begin, share[0]), min(end, share[-1] + 1)
        part = dataclasses.replace(
            unit,
            first=unit.first + first - begin,
            num_records=stop - first,
            record=unit.record + first - begin,
        )
        return share[at.taken] - first, part

    def after(self, at: Place, num_left: int) -> Place:
        """The place after the rest of a unit."""
        return at.after(num_left)

    def picked(
        self, shard: int, at: Place, at_most: int
    ) -> list[tuple[units.Unit, np.ndarray]]:
        """The records of small blocks that a shard reads next in an epoch."""
        share = units.share(shard, epoch=at.epoch, **self._sizes)
        places = share[at.taken : at.taken + at_most]
        picked = self._order(at.epoch).picked(places)
        return [(self._blocks[number], rows) for number, rows in picked]

    def turn_of(self, record: int, epoch: int) -> tuple[int, int, int]:
        """The shard, epoch, and the records of the shard before it, of a record."""
        cut = self.units
        order = self._order(epoch)
        unit = int(np.searchsorted(cut.record, record, side="right")) - 1
        index = int(np.flatnonzero(order.number == unit)[0])
        row = record - int(cut.record[unit])
        begin = order.start[index]
        row = int(np.flatnonzero(order.rows(index) == row)[0])
        shard, taken = units.reader(begin + row, epoch=epoch, **self._sizes)
        return shard, epoch, taken

    @functools.cached_property
    def _blocks(self) -> list[units.Unit]:
        return [self.units[number] for number in range(len(self.units))]

    def _order(self, epoch: int) -> units.Order:
        order = self._orders.get(epoch)
        if order is None:
            key = None if self._seed is None else (self._seed, epoch)
            order = units.Order.of(self.units, key, with_rows=self.is_grouped)
            self._orders[epoch] = order
            # Several threads may come here.
            for old in list(self._orders)[:-_MOST_ORDERS]:
                self._orders.pop(old, None)
        return order


_shares = functools.cache(_Shares)
files.register_cache(_shares.cache_clear)


def _dealt(records: Records) -> _Units | _Shares:
    source_of, seed = records._source, records._reading.shuffle_seed
    if source.has_whole_blocks(source_of):
        return _Units(source_of, records._num_shards, seed)
    return _shares(source_of, records._num_shards, seed, records.lead)


class Place(NamedTuple):
    """How far a shard has read its records.

    Attributes:
      epoch: the current one.
      taken: the records of its share that it has read, with corrupt ones.
      skipped: the corrupt ones of all epochs.
    """

    epoch: int = 0
    taken: int = 0
    skipped: int = 0

    def after(self, num_records: int, num_skipped: int = 0) -> Place:
        """The place after some records of the same epoch, of which some are corrupt."""
        return Place(self.epoch, self.taken + num_records, self.skipped + num_skipped)

    def next_epoch(self) -> Place:
        """The place at the begin of the next epoch."""
        return Place(self.epoch + 1, 0, self.skipped)

    def state(self, key: str = _EPOCH) -> dict[str, Any]:
        """The state of `Records` at this place."""
        state = {key: self.epoch, _TAKEN: self.taken}
        return state | {_SKIPPED: self.skipped} if self.skipped else state

    @classmethod
    def of(cls, state: Mapping[str, Any], key: str = _EPOCH) -> Place:
        """The place of a state."""
        return cls(state[key], state[_TAKEN], state.get(_SKIPPED, 0))


class SmallBlocks:
    """Records of small blocks that shards read together; see `units.are_small`.

    Args:
      of: their source.
      num_shards: S.
      reading: the order, and the number of epochs.
      tokens: the column of tokens if nothing else is needed.
      lead: see `units.share`.
    """

    def __init__(
        self,
        of: source.Source,
        num_shards: int,
        reading: ReadOptions,
        *,
        tokens: str = "",
        lead: int = 0,
    ) -> None:
        self._source = cast(kept_blocks.BlockFiles, of)
        self._reading, self._tokens = reading, tokens
        self._shares = _shares(of, num_shards, reading.shuffle_seed, lead)
        self._total_records = self._shares.units.total_records

    def next(
        self, shard: int, at: Place, at_most: int
    ) -> tuple[kept_blocks.Picked, Place]:
        """The next records, at least one, and the place of the first.

        Raises:
          StopIteration: after the last epoch; its value is the place of the end.
        """
        while True:
            picked = self._picked(shard, at, at_most)
            if not picked:
                at = at.next_epoch()
                continue
            self._count(picked)
            read = kept_blocks.picked(
                (kept_blocks.kept(self._source, unit, self._tokens), rows)
                for unit, rows in picked
            )
            if not isinstance(read, source.CorruptError):
                _check_names(self._source, read.names)
                return read, at
            _note_corrupt(read, skips=self._reading.skip_corrupt)
            at = at.after(read.num_records, read.num_records)

    def numbers(self, shard: int, at: Place, num_records: int) -> np.ndarray:
        """The numbers of the records from a place on in the list of all epochs."""
        picked = self._shares.picked(shard, at, num_records)
        numbers = [unit.record + rows.astype(np.int64) for unit, rows in picked]
        return at.epoch * self._total_records + np.concatenate(numbers)

    def _picked(
        self, shard: int, at: Place, at_most: int
    ) -> list[tuple[units.Unit, np.ndarray]]:
        num_epochs = self._reading.num_epochs
        if num_epochs is not None and at.epoch >= num_epochs:
            raise StopIteration(at)
        return self._shares.picked(shard, at, at_most)

    def _count(self, picked: Sequence[tuple[units.Unit, np.ndarray]]) -> None:
        num_records = sum(len(rows) for _, rows in picked)
        _SINCE_ROW.count(num_records, self._total_records, self._source)


def _note_corrupt(read: source.CorruptError, *, skips: bool) -> None:
    # Raises the error unless corrupt records are skipped.
    if not skips:
        raise read
    logging.warning("%s; skipped %d", read, read.num_records)


def _check_names(of: source.Source, columns: Collection[str]) -> None:
    if RECORD in columns:
        raise errors.DataError(
            f"{of.files[0]}: its column {RECORD!r} has the name of a field that Records"
            " adds; select other columns, or rename it"
        )


class RecordsIterator(shard_steps.Elements[source.Element]):
    """The records of a shard.

    The state is how far the shard has read; see `Place`.
    """

    def __init__(self, records: Records) -> None:
        super().__init__()
        self._records = records
        self._tag = records._tag
        self._go_on(None)

    def _go_on(self, state: dict[str, Any] | None) -> None:
        self._reader = _reader(self._records, self._records._source.read, state)
        self._elements: Iterator[source.Element] = iter(())
        # Batches of columns, and what is left of the last.
        self._batches: RecordBatches | None = None
        self._documents: list[np.ndarray] = []
        self._places: RecordPlaces | None = None
        self._taken = 0

    def take(self, num_elements: int) -> list[source.Element]:
        """See `Elements`."""
        if self._batches is not None:
            self._go_on(self.get_state())
        return list(itertools.islice(self._each(), num_elements))

    def _each(self) -> Iterator[source.Element]:
        while True:
            element = next(self._elements, None)
            if element is None:
                try:
                    read = self._reader.next(_ELEMENTS)
                except StopIteration:
                    return
                if isinstance(read, kept_blocks.Picked):
                    self._elements = read.elements()
                    read = next(self._elements)
                element = read
            record = self._reader.record()
            self._reader.took(1, element)
            element[RECORD] = self._tag(record) if self._tag else record
            yield element

    def take_tokens(self, column: str, num_elements: int) -> list[np.ndarray] | None:
        """As `take`, the lists of tokens of a column, each int32 or uint16 `[tokens]`.

        May return fewer; None if the next records have other values.
        """
        found: list[np.ndarray] = []
        while len(found) < num_elements:
            if self._places is None:
                try:
                    if not self._read(column, num_elements - len(found)):
                        return found or None
                except StopIteration:
                    break
            stop = self._taken + num_elements - len(found)
            found += self._documents[self._taken : stop]
            self._taken = min(stop, len(self._documents))
            if self._taken == len(self._documents):
                self._places = None
        return found

    def _read(self, column: str, at_most: int) -> bool:
        if self._batches is None:
            self._batches = self._records.batches(tokens=column)
            if self._batches is None:
                return False
            self._batches.set_state(self._reader.get_state())
        read, places = self._batches.read(at_most)
        documents = read.documents(column)
        if documents is None:
            self._batches.set_state(places.state(0))
            return False
        self._documents, self._places, self._taken = documents, places, 0
        return True

    def get_state(self) -> dict[str, Any]:
        """See `grain.DatasetIterator`."""
        if self._places is not None:
            return self._places.state(self._taken)
        return (self._batches or self._reader).get_state()

    def set_state(self, state: dict[str, Any]) -> None:
        """See `grain.DatasetIterator`."""
        self._go_on(state)


class RecordBatches:
    """The records of a shard, many at a time.

    Args:
      records: of the shard, of a source that has batches.
      tokens: the column of tokens if nothing else is needed.
    """

    def __init__(self, records: Records, *, tokens: str = "") -> None:
        read = cast(kept_blocks.ColumnFiles, records._source).read_batches
        self._make = functools.partial(
            _reader, records, functools.partial(read, tokens=tokens), tokens=tokens
        )
        self._reader = self._make()

    def read(self, at_most: int) -> tuple[kept_blocks.Picked, RecordPlaces]:
        """The next records, and their places.

        Args:
          at_most: how many are wanted; may be more if they are decoded together.
        """
        before = self._reader.get_state()
        read = self._reader.next(at_most)
        first = self._reader.get_state()
        self._reader.took(read.num_rows, read.names)
        return read, RecordPlaces(before=before, first=first)

    def get_state(self) -> dict[str, Any]:
        """The state after the last batch."""
        return self._reader.get_state()

    def set_state(self, state: dict[str, Any]) -> None:
        """Goes on from a state of `Records`."""
        self._reader = self._make(state)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RecordPlaces:
    """The states before each record of a batch.

    Attributes:
      before: the state before corrupt records that were skipped before the batch.
      first: the state before its first record.
    """

    before: dict[str, Any]
    first: dict[str, Any]

    def state(self, number: int) -> dict[str, Any]:
        """The state before record `number`."""
        if not number:
            return self.before
        return self.first | {"taken": self.first["taken"] + number}


def skipped(shard_cursors: Iterable[cursors.Cursor]) -> int:
    """The number of corrupt records skipped so far, by the cursors of all shards."""
    parts = itertools.chain.from_iterable(map(cursors.parts, shard_cursors))
    return sum(part[_SKIPPED] for part in parts if _SKIPPED in part)


class _SinceRow(threading.local):
    """The records that this thread has read for the row that is due."""

    is_due = False
    num_records = 0
    two_epochs = 0

    def __init__(self) -> None:
        # The sources that they are of, by identity.
        self.sources: set[int] = set()

    def begin(self) -> None:
        """Counts from 0."""
        self.is_due, self.num_records, self.two_epochs = True, 0, 0
        self.sources.clear()

    def count(self, num_records: int, of_epoch: int, of: source.Source) -> None:
        """Counts records that are read, of a source with so many in an epoch."""
        if not self.is_due:
            return
        self.num_records += num_records
        if id(of) not in self.sources:
            self.sources.add(id(of))
            self.two_epochs += 2 * of_epoch
        if self.num_records > max(self.two_epochs, _LEAST_FRUITLESS):
            raise errors.DataError(
                f"{of.files[0]} and the {len(of.files) - 1} files after it:"
                f" {self.num_records:,} records in a row, more than two epochs, made no"
                " row; check whether a filter or another step leaves out all of them"
            )


_SINCE_ROW = _SinceRow()


@contextlib.contextmanager
def row_due() -> Iterator[None]:
    """Makes it an error, instead of an endless loop, if all records are left out.

    Counts the records that this thread reads until a row is made of them.
    """
    _SINCE_ROW.begin()
    try:
        yield
    finally:
        _SINCE_ROW.is_due = False
