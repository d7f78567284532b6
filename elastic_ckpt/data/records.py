"""The records of one logical shard, epoch by epoch."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
from absl import logging

from elastic_ckpt.core import errors, storage
from elastic_ckpt.data import cursors, order, shard_steps
from elastic_ckpt.data import tokens as token_numbers
from elastic_ckpt.data.sources import decoded, files, source

T = TypeVar("T")

# The field of an element with its record number, counted over all epochs.
RECORD = "record"

# How a mixture's records are dealt to shards. With joint shares, the extra records of
# all datasets rotate over the shards together, not separately for each dataset.
DEALING = "dealing"
SHARES, JOINT_SHARES = "shares", "joint shares"

# Fields of a state. `taken` includes corrupt records; `skipped` counts all epochs.
_EPOCH, _TAKEN, _SKIPPED = "epoch", "taken", "skipped"

# Records converted to elements at a time.
_ELEMENTS = 64

# It is an error if a shard reads more records than this, and more than twice as many as
# the files have, for a row: with S shards, about 2 S epochs, because in one epoch, the
# records that a filter keeps may all be in the shares of other shards.
_LEAST_FRUITLESS = 100_000


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReadOptions:
    """How `Records` reads its files.

    Attributes:
      shuffle_seed: the seed for shuffling blocks, in a different order in each epoch;
        None reads blocks in file order. (`lm.Rows` shuffles documents.)
      num_epochs: the number of epochs; None reads endlessly.
      skip_corrupt: whether to skip and count corrupt records instead of failing.
    """

    shuffle_seed: int | None = None
    num_epochs: int | None = None
    skip_corrupt: bool = False

    def __post_init__(self) -> None:
        if self.num_epochs is not None and self.num_epochs < 1:
            raise errors.ConfigError(
                f"ReadOptions: num_epochs={self.num_epochs} is invalid; pass 1 or more,"
                " or None to read endlessly"
            )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Occurrence:
    """When a shard reads a record.

    Attributes:
      number: the value of the element's `record` field.
      epoch: the epoch, from 0.
      shard: the shard that reads the record.
      taken: the number of records that the shard reads before this one in the epoch.
    """

    number: int
    epoch: int
    shard: int
    taken: int

    @property
    def at(self) -> tuple[int, int]:
        """The epoch and `taken`, a sort key for the order in which the shard reads."""
        return self.epoch, self.taken


class Number(int):
    """A record number that refers to its `Records`; pickled as an int.

    Attributes:
      of: the `Records` that the record was read from.
      dataset: the dataset name, if `provenance` sets it.
    """

    of: Records
    dataset: str

    def __reduce__(self) -> tuple[Any, ...]:
        return int, (int(self),)


class Records(shard_steps.Step[source.Element]):
    """A `grain.IterDataset` of one shard's records, as dicts of columns.

    Each element also has a `record` field, an int that is unique over all epochs.

    Args:
      source: the files, for example a `Parquet`.
      shard: the shard number, from 0.
      num_shards: S, the number of shards in the run.
      read_options: how to read the files; by default, endlessly and in file order.
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
                f"Records: shard={shard} is invalid with num_shards={num_shards}; pass"
                " a shard from 0 to num_shards - 1"
            )
        self._source = source
        self._shard = self.shard = shard
        self.num_shards = num_shards
        self._reading = read_options or ReadOptions()
        # See `order.share`.
        self.lead = 0
        # Called with the `record` field of each element; `provenance` sets it.
        self.tag: Callable[[Number], None] | None = None

    def __iter__(self) -> RecordsIterator:
        return RecordsIterator(self)

    def epoch_records(self) -> int:
        """The number of records in an epoch, across all shards."""
        return source.num_records(self._source)

    def __str__(self) -> str:
        return f"Records(shard={self.shard} of {self.num_shards})"

    def settings(self) -> dict[str, storage.Json]:
        """The files, their order and the number of epochs."""
        reading = self._reading
        return {
            "shuffle_seed": reading.shuffle_seed,
            "num_epochs": reading.num_epochs,
            # Skipped damage must not change a file's identity.
            **source.identity(self._source, digested=not reading.skip_corrupt),
        }


def files_of(records: Records) -> tuple[str, ...]:
    """The paths or URIs of the files, in order."""
    return records._source.files


def num_bytes(records: Records) -> int:
    """The size of all files together."""
    return sum(i.content.num_bytes for i in source.indexes(records._source))


def named(function: Callable[[source.Element], T], element: source.Element) -> T:
    """Calls `function(element)`; a `DataError` names the file and the record."""
    try:
        return function(element)
    except errors.DataError as error:
        number = element.get(RECORD)
        if not isinstance(number, Number):
            raise
        file, record, _ = origin(number.of, number)
        raise errors.DataError(f"{file}, record {record}: {error}") from None


def origin(records: Records, number: int) -> tuple[str, int, int]:
    """The file, the index in the file, and the epoch of record `number`."""
    epoch, record = divmod(number, records.epoch_records())
    firsts = decoded.blocks(records._source).first_records
    # If multiple files begin at the same record, all but the last are empty.
    file = int(np.searchsorted(firsts, record, side="right")) - 1
    return files_of(records)[file], record - int(firsts[file]), epoch


def occurrences(records: Records, file: int, record: int) -> Iterator[Occurrence]:
    """Yields, for each epoch, when a record is read and by which shard.

    Args:
      records: the `Records` of any shard.
      file: the index of the file.
      record: the record's index in the file, from 0.

    Raises:
      DataError: if the file has no such record.
    """
    of_file = source.indexes(records._source)[file].num_records
    if not 0 <= record < of_file:
        raise errors.DataError(
            f"{files_of(records)[file]} has no record {record}: its {of_file:,} records"
            f" are numbered from 0 to {of_file - 1}"
        )
    record += int(decoded.blocks(records._source).first_records[file])
    of_all = _order_of(records)
    num_epochs = records._reading.num_epochs
    for epoch in itertools.count() if num_epochs is None else range(num_epochs):
        shard, taken = of_all.find(record, epoch)
        yield Occurrence(
            number=epoch * of_all.num_records + record,
            epoch=epoch,
            shard=shard,
            taken=taken,
        )


def place_in(state: Any) -> tuple[int, int] | None:
    """How far a state of `Records` has read, in the form of `Occurrence.at`.

    None if `state` is not a `Records` state.
    """
    if not isinstance(state, dict) or not {_EPOCH, _TAKEN} <= state.keys():
        return None
    return state[_EPOCH], state[_TAKEN]


@functools.cache
def _order(
    of: source.Source, num_shards: int, seed: int | None, lead: int
) -> order.Order:
    blocks = decoded.blocks(of)
    return order.Order(
        blocks.sizes,
        blocks.is_chained,
        num_bytes=blocks.num_bytes,
        num_shards=num_shards,
        seed=seed,
        lead=lead,
    )


files.register_cache(_order.cache_clear)


def _order_of(records: Records) -> order.Order:
    seed = records._reading.shuffle_seed
    return _order(records._source, records.num_shards, seed, records.lead)


# Converts some records of a block, given the number of the block's first record.
_Convert = Callable[[source.Block, Sequence[int], int], list[Any]]


class RecordsIterator(shard_steps.Elements[source.Element]):
    """Reads the records of a shard.

    The state is the one after the last record taken. Every call that reaches a bad
    record raises the record's error.
    """

    def __init__(self, records: Records) -> None:
        super().__init__()
        self._records, self._order = records, _order_of(records)
        self._blocks = decoded.blocks(records._source)
        # The records read since the last progress on a row; see `row_due`.
        self._row, self._num_fruitless = None, 0
        self._noted = ""
        # The last block, because the next record is usually in the same block.
        self._last: tuple[int, source.Block] | None = None
        self._go_to(0, 0, 0)

    def _go_to(self, epoch: int, taken: int, skipped: int) -> None:
        self._epoch, self._taken, self._skipped = epoch, taken, skipped
        self._share = self._order.share(self._records._shard, epoch)
        # Elements read but not taken yet, in reverse.
        self._ahead: list[source.Element] = []

    def __next__(self) -> source.Element:
        if not self._ahead:
            self._ahead = self._next(_ELEMENTS, self._elements)[::-1]
        if not self._ahead:
            raise StopIteration
        element, tag = self._ahead.pop(), self._records.tag
        if tag is not None:
            tag(element[RECORD])
        return element

    def some(self, at_most: int) -> list[source.Element]:
        """See `Elements`."""
        return list(itertools.islice(self, min(at_most, len(self._ahead) or 1)))

    def some_tokens(self, column: str, at_most: int) -> list[np.ndarray]:
        """Like `some`, but returns only the tokens in one column of each record.

        Raises:
          DataError: if the column is missing or does not contain tokens.
        """
        if self._ahead:
            self.set_state(self.get_state())
        of_element = functools.partial(token_numbers.of_element, column=column)
        one = functools.partial(named, of_element)
        return self._next(
            at_most,
            lambda block, rows, first: (
                block.tokens(column, rows)
                or source.until_error(one, self._elements(block, rows, first))
            ),
        )

    def get_state(self) -> dict[str, Any]:
        """See `grain.DatasetIterator`."""
        state = {_EPOCH: self._epoch, _TAKEN: self._taken - len(self._ahead)}
        return state | ({_SKIPPED: self._skipped} if self._skipped else {})

    def set_state(self, state: Mapping[str, Any]) -> None:
        """See `grain.DatasetIterator`."""
        self._go_to(state[_EPOCH], state[_TAKEN], state.get(_SKIPPED, 0))

    def _next(self, at_most: int, convert: _Convert) -> list[Any]:
        # Converts some of the next records, all from one block.
        reading, read = self._records._reading, []
        while not read and self._epoch != reading.num_epochs:
            positions = self._share[self._taken : self._taken + at_most]
            if not positions:
                self._go_to(self._epoch + 1, 0, self._skipped)
                continue
            number, rows, following = self._order.next_in_block(self._epoch, positions)
            first = self._epoch * self._order.num_records
            first += int(self._order.first[number])
            try:
                read = convert(self._decoded(number, following), rows, first)
            except source.CorruptError as error:
                if not reading.skip_corrupt:
                    raise
                # Log once per block.
                if str(error) != self._noted:
                    logging.warning("%s; skipped", error)
                self._noted = str(error)
            self._watch(len(read) or 1)
            self._taken += len(read) or 1
            self._skipped += not read
        return read

    def _watch(self, num_records: int) -> None:
        row = getattr(_DUE, "row", None)
        self._num_fruitless = num_records + (
            self._num_fruitless if row is self._row else 0
        )
        self._row = row
        most = max(_LEAST_FRUITLESS, 2 * self._order.num_records)
        if row is not None and self._num_fruitless > most:
            raise errors.DataError(
                f"data files from {files_of(self._records)[0]} on: logical shard"
                f" {self._records._shard} read {self._num_fruitless:,} consecutive"
                f" records, {self._num_fruitless // len(self._share)} epochs of its"
                " share, without producing a row; check whether a filter or another"
                " step drops them all"
            )

    def _decoded(self, number: int, following: int | None) -> source.Block:
        if self._last is not None and self._last[0] == number:
            return self._last[1]
        block = self._blocks.get(number, following)
        if not self._order.is_shared:
            # Many shards would evict each other's blocks from the shared cache.
            self._last = number, block
        return block

    def _elements(
        self, block: source.Block, rows: Sequence[int], first: int
    ) -> list[source.Element]:
        elements = block.elements(rows)
        for element, row in zip(elements, rows, strict=False):
            if RECORD in element:
                raise errors.DataError(
                    f"{self._records._source.files[0]}: the column {RECORD!r} clashes"
                    " with a field that Records adds; rename the column, or select"
                    " different columns"
                )
            number = element[RECORD] = Number(first + row)
            number.of = self._records
        return elements


def skipped(shard_cursors: Iterable[cursors.Cursor]) -> int:
    """The number of corrupt records skipped so far, from the cursors of all shards."""
    states = itertools.chain.from_iterable(map(cursors.states, shard_cursors))
    return sum(
        state[_SKIPPED] for _, state in states if {*state} == {_EPOCH, _TAKEN, _SKIPPED}
    )


# Identifies the row that a thread is making; changes when the row progresses.
_DUE = threading.local()


def note_progress() -> None:
    """Records that the records read so far contribute to the row that is due."""
    if getattr(_DUE, "row", None) is not None:
        _DUE.row = object()


@contextlib.contextmanager
def row_due() -> Iterator[None]:
    """Makes reads raise an error, instead of never ending, if no record is kept."""
    _DUE.row = object()
    try:
        yield
    finally:
        _DUE.row = None
