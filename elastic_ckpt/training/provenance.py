"""Which steps used a document, and which documents a step used.

The step log has the batches of all attempts, those that were trained again included.
With the rows that an attempt left out, they place each batch in the stream of rows, and
so tell the rows of each logical shard in it (`data.rows`). These name their documents
when the shard's pipeline is executed once more (`data.provenance`), from the beginning
or from the last saved data state before them.
Which shard reads a record, and when, is a pure function of numbers, so a search reads
one shard for each epoch.

The texts of positional data are not read: each row is one record, whose number their
order has.
"""

from __future__ import annotations

import bisect
import collections
import dataclasses
import itertools
import os
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from elastic_ckpt.core import errors
from elastic_ckpt.data import (
    cursors,
    delivery,
    elastic_data,
    example_id,
    positional_data,
    provenance,
    records,
    rows,
    shard_rows,
    stages,
    state,
)
from elastic_ckpt.data.sources import arrayrecord, source
from elastic_ckpt.training import step_log
from elastic_ckpt.training.stream import (
    History,
    Stream,
    Trained,
    batches,
    sharded,
    until,
)

# After how many rows it is checked whether a document can still come.
_CHECK_ROWS = 32

Outcome = Literal[
    "used",
    "left_out",
    "too_short",
    "filtered",
    "corrupt",
    "read_ahead",
    "not_yet_used",
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reading:
    """What is read for an answer, at most.

    Attributes:
      shards: the logical shards that are read.
      num_rows: the rows of these shards that are made again.
      from_step: the saved step at whose data state reading begins; None if it begins
        with the data.
      epoch_records: the records of all files; 0 if no file is read.
      epoch_bytes: their bytes.
    """

    shards: tuple[int, ...] = ()
    num_rows: int
    from_step: int | None = None
    epoch_records: int = 0
    epoch_bytes: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Use:
    """Tokens of a document in a row of a step.

    Attributes:
      step: the step.
      attempt: the attempt that trained it; it may have been trained by several.
      is_current: whether it is a part of the run as it is now: false for a step that
        was trained again after a crash or because the run went back.
      row: the row of the global batch.
      first_token: the index in the document of the first token.
      num_tokens: the number of tokens among the row's inputs; None if it is not known.
    """

    step: int
    attempt: int
    is_current: bool
    row: int
    first_token: int
    num_tokens: int | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Found:
    """What became of a document in one epoch.

    Attributes:
      dataset: the dataset's name; empty if there is only one.
      file: the path or URI of the file.
      record: the record's number in the file, from 0.
      epoch: the epoch, from 0.
      shard: the logical shard that reads it; None if the data has no shards.
      outcome: `used` by steps; `left_out` with other rows when the run went back;
        `too_short` for an example; `filtered` by the pipeline; `corrupt` and skipped;
        `read_ahead` by one host, into a block, a shuffle window or an incomplete row,
        but in no step yet; or `not_yet_used`.
      document_tokens: the tokens of the whole document; None if they are not known.
      uses: the steps that used it, in the order of training.
    """

    dataset: str
    file: str
    record: int
    epoch: int
    shard: int | None
    outcome: Outcome
    document_tokens: int | None
    uses: tuple[Use, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class UsedRow:
    """A row of a step.

    Attributes:
      row: the row of the global batch.
      documents: whose tokens it has, in order; none for a row of padding.
    """

    row: int
    documents: tuple[provenance.Piece, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class UsedBatch:
    """A batch that trained a step.

    Attributes:
      step: the step.
      attempts: the attempts that trained it with this batch.
      is_current: whether that of the run as it is now is one of them.
      position: the number of rows before it in the stream of rows.
      num_rows: the rows of the batch.
    """

    step: int
    attempts: tuple[int, ...]
    is_current: bool
    position: int
    num_rows: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class SavedData:
    """The data state of a saved step.

    Attributes:
      step: its number.
      state: its data state.
      cursors: reads the cursors of shards.
    """

    step: int
    state: state.DataState
    cursors: Callable[[Iterable[int]], Mapping[int, cursors.Cursor]]


class Provenance:
    """Answers questions about the documents of a run.

    Args:
      attempts: the step log.
      data_of: returns the configured data of an attempt, given its number.
      saved: the data states in storage.
      first_step: the number of a run's first step; the log has 0.
      announce: is told what will be read, before it is.

    Attributes:
      current_end: the position after the run's last step, as it is now.

    Raises:
      DataError: if the step log lacks a step, or the data is not that of the run.
    """

    def __init__(
        self,
        attempts: Sequence[step_log.Attempt],
        data_of: Callable[[int], elastic_data.ElasticData],
        *,
        saved: Iterable[SavedData] = (),
        first_step: int = 0,
        announce: Callable[[Reading], None] = lambda _: None,
    ) -> None:
        self._first_step = first_step
        self._announce = announce
        # The records, and their bytes, that a row took up to a saved step.
        self._saved = sorted(saved, key=lambda each: each.state.row)
        self.stream = Stream(attempts, data_of)
        self._check_same(self.stream.keys[attempts[-1].attempt])
        num_rows = sum(
            record.num_rows for attempt in attempts for record in attempt.records
        )
        empties = _EmptyBatches(self, num_rows=num_rows)
        self.stream.place(after=empties.after, first_step=first_step)
        self._trained = self.stream.trained
        self.current_end = max(
            (t.stop for t in self._trained if t.is_current), default=0
        )
        self._left_out = {each for attempt in attempts for each in attempt.left_out}

    def find(self, file: str, record: int) -> Iterator[Found]:
        """What became of a record, epoch by epoch.

        Args:
          file: a file of the data, by the end of its path.
          record: the record's number in the file, from 0.

        Raises:
          DataError: if there is no such record, or it cannot be followed.
        """
        data = self._last_data
        if isinstance(data, positional_data.TextData):
            yield from self._find_text(data, file, record)
            return
        streams = self.stream.histories()
        found = (
            found
            for history, name, number, part in self._named(streams, file)
            for found in _OfHistory(self, history, streams[history]).find(
                name, part, number, record
            )
        )
        yield from found if len(streams) == 1 else _merged(found)

    def batches(self, step: int) -> list[UsedBatch]:
        """The batches that trained a step: several if it was trained again with others.

        Raises:
          DataError: if no attempt trained it.
        """
        return [batch for batch, _ in self._batches(step)]

    def step(self, step: int) -> Iterator[tuple[UsedBatch, Iterator[UsedRow]]]:
        """The documents of the batches of a step, row by row, in the order of reading.

        Raises:
          DataError: if no attempt trained it, or its rows cannot be followed.
        """
        for batch, trained in self._batches(step):
            data = self.stream.data_at(trained.history, trained.position)
            if isinstance(data, positional_data.TextData):
                yield batch, self._text_rows(data, trained)
            else:
                yield batch, self._sharded_rows(trained)

    @property
    def _last_data(self) -> elastic_data.ElasticData:
        return self.stream.data_at(
            self._trained[-1].history, self._trained[-1].position
        )

    def _check_same(self, key: str) -> None:
        # Whether the newest saved state is of the data of the last attempt.
        if self._saved:
            saved = self._saved[-1].state
            data = self.stream.data(key)
            state.check_same_pipeline(saved, data.engine, data.identity())

    def saved_before(self, history: History, position: int) -> list[SavedData]:
        """The saved states of the same stream up to a position, newest first.

        Where attempts of the run had other pipelines, only those that all attempts
        agree on up to the state are taken.
        """
        return [
            saved
            for saved in reversed(self._saved)
            if saved.state.row <= position
            and all(
                until(each, saved.state.row) == until(history, saved.state.row)
                for each, end in self.stream.ends.items()
                if end >= saved.state.row
            )
        ]

    def announce(
        self,
        history: History,
        shards: Mapping[int, int],
        saved: SavedData | None,
        position: int,
    ) -> None:
        """Says what is read: the number of rows of each shard, up to a position."""
        num_rows = sum(shards.values())
        if not num_rows:
            return
        parts = provenance.parts(self.stream.sharded(history, position).make_shard(0))
        self._announce(
            Reading(
                shards=tuple(sorted(shards)),
                num_rows=num_rows,
                from_step=saved.step if saved else None,
                epoch_records=sum(part.epoch_records() for part in parts.values()),
                epoch_bytes=sum(records.num_bytes(part) for part in parts.values()),
            )
        )

    def _batches(self, step: int) -> list[tuple[UsedBatch, Trained]]:
        trained = [t for t in self._trained if t.record.step + self._first_step == step]
        if not trained:
            steps = [t.record.step + self._first_step for t in self._trained]
            raise errors.DataError(
                f"no attempt of the run trained step {step}; its steps are"
                f" {min(steps)} to {max(steps)}"
            )
        same: dict[Any, list[Trained]] = collections.defaultdict(list)
        for each in trained:
            same[each.position, each.record.num_rows, each.history].append(each)
        return [
            (
                UsedBatch(
                    step=step,
                    attempts=tuple(each.record.attempt for each in group),
                    is_current=any(each.is_current for each in group),
                    position=group[0].position,
                    num_rows=group[0].record.num_rows,
                ),
                group[0],
            )
            for group in same.values()
        ]

    def _sharded_rows(self, trained: Trained) -> Iterator[UsedRow]:
        data = self.stream.sharded(trained.history, trained.position)
        before = batches(trained.history, trained.position)
        stream = rows.batch_ids(data.num_shards, before, trained.record.num_rows)
        self._check_ids(trained, stream)
        of_shard: dict[int, list[tuple[int, int]]] = collections.defaultdict(list)
        for row, number in enumerate(stream.tolist()):
            index, shard = divmod(number, data.num_shards)
            of_shard[shard].append((index, row))
        states = self.saved_before(trained.history, trained.position)
        saved = states[0] if states else None
        so_far = state.history_of(saved.state.position) if saved else ()
        begins = rows.emitted(data.num_shards, so_far)
        self.announce(
            trained.history,
            {s: max(each)[0] + 1 - int(begins[s]) for s, each in of_shard.items()},
            saved,
            trained.position,
        )
        for shard, wanted in of_shard.items():
            stream_rows = ShardStream(self, trained.history, shard, saved)
            documents: list[provenance.Piece] | None = None
            for index, row in sorted(wanted):
                while stream_rows.index <= index:
                    documents = stream_rows.next()
                yield UsedRow(row=row, documents=tuple(documents or ()))
            stream_rows.close()

    def _check_ids(self, trained: Trained, stream: np.ndarray) -> None:
        # Whether the step log has these rows, if it lists them.
        ids = [each for each in trained.record.ids if each != example_id.NONE]
        if not set(ids) <= set(stream.tolist()):
            step = trained.record.step + self._first_step
            raise errors.DataError(
                f"step {step} of attempt {trained.record.attempt} was trained on other"
                " rows of the data than its step log and its pipeline say; run"
                " `elastic-ckpt audit` to see how they differ"
            )

    def _text_rows(
        self, data: positional_data.TextData, trained: Trained
    ) -> Iterator[UsedRow]:
        origins = _Origins(data)
        self._check_ids(trained, np.arange(trained.position, trained.stop))
        for row, number in enumerate(range(trained.position, trained.stop)):
            documents: tuple[provenance.Piece, ...] = ()
            if number < len(data.order):
                record = data.order[number]
                assert record is not None
                documents = (origins.piece(record, number // data.num_records),)
            yield UsedRow(row=row, documents=documents)

    def _find_text(
        self, data: positional_data.TextData, file: str, record: int
    ) -> Iterator[Found]:
        origins = _Origins(data)
        record_number = origins.number(file, record)
        stop = -(-self.current_end // data.num_records) * data.num_records
        self._announce(Reading(num_rows=stop))
        for number in range(min(stop, len(data.order))):
            if data.order[number] != record_number:
                continue
            uses = tuple(
                self.use(trained, number - trained.position, 0, None)
                for trained in self._trained
                if trained.position <= number < trained.stop
            )
            outcome: Outcome = "not_yet_used"
            if any(use.is_current for use in uses):
                outcome = "used"
            elif any(start <= number < end for start, end in self._left_out):
                outcome = "left_out"
            piece = origins.piece(record_number, number // data.num_records)
            yield Found(
                dataset="",
                file=piece.file,
                record=piece.record,
                epoch=piece.epoch,
                shard=None,
                outcome=outcome,
                document_tokens=None,
                uses=uses,
            )

    def use(self, trained: Trained, row: int, first: int, number: int | None) -> Use:
        """A use in a row of a step."""
        return Use(
            step=trained.record.step + self._first_step,
            attempt=trained.record.attempt,
            is_current=trained.is_current,
            row=row,
            first_token=first,
            num_tokens=number,
        )

    def _named(
        self, histories: Iterable[History], file: str
    ) -> list[tuple[History, str, int, records.Records]]:
        # The parts of each stream, and the number of the file in each, that have a
        # file. Not all streams need have it.
        named: list[tuple[History, str, int, records.Records]] = []
        files: list[str] = []
        for history in histories:
            of_history: dict[str, records.Records] = {}
            for start, _ in reversed(history):
                data = self.stream.data_at(history, start)
                # Those of stages that have not begun, too.
                of_stages = stages.of(data)
                every = (
                    [each.data for each in of_stages.stages] if of_stages else [data]
                )
                for each in every:
                    parts = provenance.parts(sharded(each).make_shard(0))
                    of_history = parts | of_history
            for name, part in of_history.items():
                files += records.files_of(part)
                number = _file_number(records.files_of(part), file)
                if number is not None:
                    named.append((history, name, number, part))
        if not named:
            raise _unknown(file, files)
        return named


class ShardStream:
    """The rows of a shard in the stream, with the pipelines that made them.

    Args:
      run: the run.
      history: the pipelines of the stream.
      shard: the shard's number.
      saved: the saved state to begin at; None for the beginning of the data.
      watched: see `provenance.FollowedShard`.

    Attributes:
      index: the number of the shard's next row.
      begins: that of the first row that each pipeline of the stream makes.
    """

    def __init__(
        self,
        run: Provenance,
        history: History,
        shard: int,
        saved: SavedData | None,
        *,
        watched: tuple[str, int] | None = None,
    ) -> None:
        self._run, self._history, self._shard = run, history, shard
        self._watched = watched
        self._cursor: cursors.Cursor = None
        if saved is not None:
            self._cursor = saved.cursors([shard])[shard]
        num_shards = run.stream.sharded(history, 0).num_shards
        self.index = shard_rows.row_of(self._cursor)
        # The first row of each pipeline of the stream.
        self.begins = [
            int(rows.emitted(num_shards, batches(history, start))[shard])
            for start, _ in history
        ]
        self._key: list[Any] = []
        # The shard by each pipeline, the current one last.
        self._all: list[provenance.FollowedShard] = []

    @property
    def is_read(self) -> bool:
        """Whether the watched record was read."""
        return any(each.is_read for each in self._all)

    @property
    def is_filtered(self) -> bool:
        """Whether it was read, but did not become a document of tokens."""
        return self.is_read and not any(
            each.is_document or not each.is_tokenized for each in self._all
        )

    @property
    def watched_tokens(self) -> int | None:
        """The tokens of its document; None if they are not known."""
        numbers = (each.watched_tokens for each in self._all)
        return next((number for number in numbers if number is not None), None)

    def next(self) -> list[provenance.Piece] | None:
        """The documents of the next row; None for a row of padding."""
        found = self._open().next()
        self.index += 1
        return found

    def read_until(self, name: str) -> tuple[int, int] | None:
        """See `provenance.read_until`."""
        return provenance.read_until(self._open(ahead=False).cursor(), name)

    def close(self) -> None:
        """Closes what is open."""
        if self._all:
            self._all[-1].close()

    def _open(self, *, ahead: bool = True) -> provenance.FollowedShard:
        number = bisect.bisect_right(self.begins, self.index) - 1
        start, (*key, _) = self._history[number]
        if self._all and (key == self._key or not ahead):
            return self._all[-1]
        data = self._run.stream.data_at(self._history, start)
        if self._all:
            # The run continued with other weights or datasets, or in another stage.
            self._cursor = self._all[-1].cursor()
            self._all[-1].close()
        self._key = key
        self._all.append(
            provenance.FollowedShard(
                sharded(data).make_shard,
                self._shard,
                self._cursor,
                watched=self._watched,
            )
        )
        return self._all[-1]


class _OfHistory:
    """Searches the stream of one history for a record.

    Args:
      run: the run.
      history: the pipelines of the stream.
      trained: the steps that have it.
    """

    def __init__(
        self, run: Provenance, history: History, trained: Sequence[Trained]
    ) -> None:
        self._run, self._history, self._trained = run, history, trained
        self._end = max(t.stop for t in trained)
        self._num_shards = run.stream.sharded(history, 0).num_shards
        self._saved = run.saved_before(history, self._end)

    def find(
        self, name: str, part: records.Records, file: int, record: int
    ) -> Iterator[Found]:
        """What became of a record of a dataset in each epoch."""
        reached = self._reached(name)
        is_first_unused = True
        for turn in records.turns(part, file, record):
            found = self._followed(name, part, turn)
            is_unused = found.outcome == "not_yet_used"
            if not is_unused or is_first_unused:
                yield found
            is_first_unused &= not is_unused
            # Shards are in about the same epoch, but not exactly.
            if is_unused and turn.epoch > reached + 1:
                return

    def _reached(self, name: str) -> int:
        # The last epoch that a shard was in at the newest saved state.
        if not self._saved:
            return -1
        at_end = self._saved[0].cursors(range(self._num_shards))
        return max(
            (provenance.read_until(cursor, name) or (0, 0))[0]
            for cursor in at_end.values()
        )

    def _followed(self, name: str, part: records.Records, turn: records.Turn) -> Found:
        def is_before(saved: SavedData) -> bool:
            cursor = saved.cursors([turn.shard])[turn.shard]
            until = provenance.read_until(cursor, name, is_exact=True)
            return until is not None and until <= turn.at

        # States are newest first, and what they have read decreases.
        newest = bisect.bisect_left(self._saved, True, key=is_before)
        for saved in (*self._saved[newest:], None):
            stream = ShardStream(
                self._run,
                self._history,
                turn.shard,
                saved,
                watched=(name, turn.number),
            )
            begin, first = stream.index, stream.next()
            if saved is None or not stream.is_read:
                break
            # Rows before the state may have a part of it.
            stream.close()
        self._run.announce(
            self._history,
            {turn.shard: max(0, self._indices(turn.shard, [self._end])[0] - begin)},
            saved,
            self._end - 1,
        )
        pieces, is_over = self._pieces(stream, name, turn, begin, first)
        found = self._found(name, part, turn, stream, pieces, is_over=is_over)
        stream.close()
        return found

    def _pieces(
        self,
        stream: ShardStream,
        name: str,
        turn: records.Turn,
        index: int,
        found: list[provenance.Piece] | None,
    ) -> tuple[list[tuple[int, provenance.Piece]], bool]:
        # The pieces of the record with the numbers of their rows in the shard, from one
        # on, and whether no more can come.
        (end,) = self._indices(turn.shard, [self._end])
        pieces: list[tuple[int, provenance.Piece]] = []
        num_tokens = 0
        for number in itertools.count(1):
            if index >= end:
                # The first row is read in any case.
                return pieces, number > 1 and self._is_past(stream, name, turn)
            if found is None and index >= stream.begins[-1]:
                return pieces, True
            # A later stage may have more of a shard that has ended.
            found = found or []
            pieces += [(index, piece) for piece in found]
            num_tokens += sum(piece.num_tokens or 0 for piece in found)
            is_whole = bool(num_tokens) and num_tokens + 1 == stream.watched_tokens
            is_due = number % _CHECK_ROWS == 0
            if is_whole or (is_due and self._is_past(stream, name, turn)):
                return pieces, True
            index = stream.index
            if index < end:
                found = stream.next()
        raise AssertionError

    def _is_past(self, stream: ShardStream, name: str, turn: records.Turn) -> bool:
        until = stream.read_until(name)
        return until is not None and until > turn.at

    def _found(
        self,
        name: str,
        part: records.Records,
        turn: records.Turn,
        stream: ShardStream,
        pieces: Sequence[tuple[int, provenance.Piece]],
        *,
        is_over: bool,
    ) -> Found:
        begins = self._indices(turn.shard, [each.position for each in self._trained])
        ends = self._indices(turn.shard, [each.stop for each in self._trained])
        uses = [
            (number, self._use(number, index * self._num_shards + turn.shard, piece))
            for index, piece in pieces
            for number in np.flatnonzero((begins <= index) & (index < ends)).tolist()
        ]
        uses.sort(key=lambda each: each[0])
        outcome: Outcome
        if any(use.is_current for _, use in uses):
            outcome = "used"
        elif pieces:
            (current,) = self._indices(turn.shard, [self._run.current_end])
            is_left = any(index < current for index, _ in pieces)
            outcome = "left_out" if is_left else "not_yet_used"
        elif not stream.is_read:
            outcome = "corrupt" if is_over else "not_yet_used"
        elif stream.watched_tokens is not None and stream.watched_tokens < 2:
            outcome = "too_short"
        else:
            outcome = "filtered" if is_over or stream.is_filtered else "read_ahead"
        file, record_in_file, _ = records.origin(part, turn.number)
        return Found(
            dataset=name,
            file=file,
            record=record_in_file,
            epoch=turn.epoch,
            shard=turn.shard,
            outcome=outcome,
            document_tokens=stream.watched_tokens,
            uses=tuple(use for _, use in uses),
        )

    def _indices(self, shard: int, positions: Sequence[int]) -> np.ndarray:
        # The number of rows of a shard before each position.
        total, begin = np.zeros(len(positions), np.int64), 0
        for size, number in batches(self._history, self._end):
            taken = np.clip((np.array(positions) - begin) // size, 0, number)
            total += rows.shard_rows(self._num_shards, shard, size, taken)
            begin += size * number
        return total

    def _use(self, number: int, id_: int, piece: provenance.Piece) -> Use:
        trained = self._trained[number]
        before = batches(trained.history, trained.position)
        ids = rows.batch_ids(self._num_shards, before, trained.record.num_rows)
        (row,) = np.flatnonzero(ids == id_)
        return self._run.use(trained, int(row), piece.first_token, piece.num_tokens)


class _EmptyBatches:
    """Finds batches of finite data that no step has, as all of their shards had ended.

    All shards are read for that, from the beginning.

    Args:
      run: the run.
      num_rows: the rows of all of its steps.
    """

    def __init__(self, run: Provenance, *, num_rows: int) -> None:
        self._run = run
        self._num_rows_of_run = num_rows
        self._streams: dict[Any, ShardStream] = {}
        # The rows of shards that had ended.
        self._padding: set[Any] = set()

    def after(self, history: History, position: int, size: int) -> int:
        """The position of the next batch of a step."""
        data = self._run.stream.data_at(history, position)
        max_empty = delivery.batches_of_end(data, size) - 1
        if max_empty and not self._streams:
            shards = range(self._run.stream.sharded(history, position).num_shards)
            of_shard = -(-self._num_rows_of_run // len(shards))
            of_shards = dict.fromkeys(shards, of_shard)
            self._run.announce(history, of_shards, None, position)
        for _ in range(max_empty):
            num_shards = self._run.stream.sharded(history, position).num_shards
            ids = rows.batch_ids(num_shards, batches(history, position), size)
            if any(
                self._is_real(history, *divmod(n, num_shards)) for n in ids.tolist()
            ):
                break
            position += size
        return position

    def _is_real(self, history: History, index: int, shard: int) -> bool:
        key = history, shard
        if key not in self._streams:
            self._streams[key] = ShardStream(
                self._run, history, shard, None, watched=("", -1)
            )
        stream = self._streams[key]
        while stream.index <= index:
            if stream.next() is None:
                self._padding.add((key, stream.index - 1))
        return (key, index) not in self._padding


class _Origins:
    """The files of texts."""

    def __init__(self, data: positional_data.TextData) -> None:
        self._files = data.files
        indexes = source.indexes(arrayrecord.ArrayRecord(files=data.files))
        self._counts = np.array([index.num_records for index in indexes])
        self._firsts = np.cumsum(self._counts) - self._counts

    def piece(self, number: int, epoch: int) -> provenance.Piece:
        """A record, by its number over all files."""
        file = int(np.searchsorted(self._firsts, number, side="right")) - 1
        return provenance.Piece(
            dataset="",
            file=self._files[file],
            record=number - int(self._firsts[file]),
            epoch=epoch,
        )

    def number(self, file: str, record: int) -> int:
        """The number over all files of a record."""
        at = _file_number(self._files, file)
        if at is None:
            raise _unknown(file, self._files)
        if not 0 <= record < self._counts[at]:
            raise errors.DataError(
                f"{self._files[at]} has no record {record}: its {self._counts[at]:,}"
                f" records are numbered from 0 to {self._counts[at] - 1}"
            )
        return int(self._firsts[at]) + record


def _merged(found: Iterable[Found]) -> list[Found]:
    # What became of a record in several streams, of which steps may be in two.
    merged: dict[Any, Found] = {}
    for each in found:
        key = each.dataset, each.file, each.record, each.epoch
        other = merged.get(key, each)
        outcomes = typing.get_args(Outcome)
        uses = dict.fromkeys((*other.uses, *each.uses))
        best = min(each, other, key=lambda one: outcomes.index(one.outcome))
        merged[key] = dataclasses.replace(
            best, uses=tuple(sorted(uses, key=lambda use: use.attempt))
        )
    return sorted(merged.values(), key=lambda each: each.epoch)


def _file_number(files: Sequence[str], file: str) -> int | None:
    # The number of the file with this path, or with this end of its path.
    if file in files:
        return files.index(file)
    found = [
        number
        for number, each in enumerate(files)
        if each.endswith("/" + file.lstrip("/")) or each == os.path.abspath(file)
    ]
    if len(found) > 1:
        raise errors.ConfigError(
            f"{file}: {len(found)} files of the data end so,"
            f" {', '.join(files[number] for number in found[:3])}; give more of the"
            " path"
        )
    return found[0] if found else None


def _unknown(file: str, files: Sequence[str]) -> errors.DataError:
    names = sorted({os.path.basename(each) for each in files})
    shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if names[5:] else "")
    return errors.DataError(
        f"{file} is not a file of the run's data, which has {shown}; give the path of"
        " one of them, or the end of it"
    )
