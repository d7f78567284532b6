"""Which steps used a document, and which documents a step used.

The step log places each batch in the stream of rows, those of attempts that went back
included. The sizes of the batches so far determine the rows of each logical shard
(`data.rows`), and these name their documents when the shard's pipeline is executed once
more (`data.provenance`), from the beginning or from the last saved data state before
them. Which shard reads a record, and when, is a pure function of numbers, so a search
reads one shard for each epoch.

The texts of positional data are not read: each row is one record, whose number their
order has.
"""

from __future__ import annotations

import bisect
import collections
import contextlib
import dataclasses
import functools
import itertools
import os
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent import futures
from typing import Any, Literal, NamedTuple

import numpy as np
from etils import epath

from elastic_ckpt.checkpoint import foreign_steps
from elastic_ckpt.core import errors
from elastic_ckpt.data import (
    cursors,
    elastic_data,
    positional_data,
    provenance,
    records,
    rows,
    shard_rows,
    sharded_data,
    stages,
    state,
)
from elastic_ckpt.data.sources import arrayrecord, source
from elastic_ckpt.training import audit, step_log
from elastic_ckpt.training.step_log import Record

# After how many rows it is checked whether a document can still come.
_CHECK_ROWS = 32
# Data states that are read at once.
_READERS = 16

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


class _Period(NamedTuple):
    # Batches of the same rows that the same pipeline made: the number of the first, the
    # sizes of the batches before it, and the pipeline with what identifies it.
    first: int
    history: rows.History
    key: Any
    data: elastic_data.ElasticData


class Provenance:
    """Answers questions about the documents of a run.

    It knows the batches of the run as it is, those that it left out, and those after
    its last step that an earlier attempt has trained.

    Args:
      attempts: the step log.
      data_of: of the run, see `audit`.
      saved: the data states in storage.
      first_step: the number of a run's first step; the log has 0.

    Raises:
      DataError: if the step log has no step, or the data is not that of the run.
    """

    def __init__(
        self,
        attempts: Sequence[step_log.Attempt],
        data_of: audit.DataOf,
        *,
        saved: Iterable[SavedData] = (),
        first_step: int = 0,
    ) -> None:
        self._first_step = first_step
        self._lineage = step_log.lineage(attempts)
        if not self._lineage:
            raise errors.DataError("the step log has no step; the run trained none yet")
        # What was trained, by the rows; each batch several times.
        self._trained: dict[int, list[Record]] = collections.defaultdict(list)
        for record in itertools.chain.from_iterable(a.records for a in attempts):
            self._trained[record.row].append(record)
        batches: list[Record] = []
        for unused, record in audit.stream(attempts, data_of):
            batches += [*unused, record]
        self._current_end = batches[-1].stop
        while later := self._trained.get(batches[-1].stop):
            batches.append(later[-1])
        self._batches, self._end = batches, batches[-1].stop
        self.periods: list[_Period] = []
        history, before = (), None
        for number, record in enumerate(batches):
            key, data = audit.pipeline_of(record, data_of)
            if (key, record.rows) != before:
                self.periods.append(_Period(number, history, key, data))
            history, before = rows.after(history, record.rows), (key, record.rows)
        last = data_of(attempts[-1].attempt)
        self._saved = sorted(saved, key=lambda each: -each.state.row)
        if self._saved:
            newest = self._saved[0].state
            state.check_same_pipeline(newest, last.engine, last.identity())
        self._saved = [each for each in self._saved if self._is_of_these(each.state)]

    @classmethod
    def of_run(cls, run: audit.RunAudit) -> Provenance:
        """That of a run in a directory."""
        steps = foreign_steps.steps(run.record.steps_directory)
        with futures.ThreadPoolExecutor(_READERS) as pool:
            found = list(pool.map(_saved_at, steps.keys(), steps.values()))
        return cls(
            run.attempts,
            run.data_of,
            saved=itertools.chain.from_iterable(found),
            first_step=run.record.first_step,
        )

    def find(self, file: str, record: int) -> Iterator[Found]:
        """What became of a record, epoch by epoch.

        Args:
          file: a file of the data, by the end of its path.
          record: the record's number in the file, from 0.

        Raises:
          DataError: if there is no such record, or it cannot be followed.
        """
        data = self.periods[-1].data
        if isinstance(data, positional_data.TextData):
            yield from self._find_text(data, file, record)
            return
        for name, number, part in self._named(file):
            reached, is_first_unused = self._reached(name), True
            for turn in records.turns(part, number, record):
                found = self._followed(name, part, turn)
                is_unused = found.outcome == "not_yet_used"
                if not is_unused or is_first_unused:
                    yield found
                is_first_unused &= not is_unused
                # Shards are in about the same epoch, but not exactly.
                if is_unused and turn.epoch > reached + 1:
                    break

    def step(self, step: int) -> Iterator[tuple[UsedBatch, Iterator[UsedRow]]]:
        """The documents of the batches of a step, row by row, in the order of reading.

        A step that was trained again with other rows has several batches.

        Raises:
          DataError: if no attempt trained it, or its rows cannot be followed.
        """
        is_found = False
        for number, batch in enumerate(self._batches):
            uses = [
                use for use in self._uses(batch) if use.step == step - self._first_step
            ]
            if not uses:
                continue
            is_found = True
            used = UsedBatch(
                step=step,
                attempts=tuple(use.attempt for use in uses),
                is_current=any(map(self._is_current, uses)),
                position=batch.row,
                num_rows=batch.rows,
            )
            data = self._period(number).data
            if isinstance(data, positional_data.TextData):
                yield used, self._text_rows(data, batch)
            else:
                yield used, self._sharded_rows(number)
        if not is_found:
            steps = [each.step + self._first_step for each in self._batches]
            raise errors.DataError(
                f"no attempt of the run trained step {step}; its steps are"
                f" {min(steps)} to {max(steps)}"
            )

    @property
    def num_shards(self) -> int:
        """The number of logical shards, the same in all stages."""
        return _sharded(self.periods[0].data).num_shards

    def _is_current(self, record: Record) -> bool:
        return self._lineage.get(record.step) is record

    def _uses(self, batch: Record) -> list[Record]:
        # The steps that were trained on a batch.
        return [e for e in self._trained.get(batch.row, ()) if e.digest == batch.digest]

    def _period(self, number: int) -> _Period:
        # Of a batch, by its number.
        place = bisect.bisect_right(self.periods, number, key=lambda each: each.first)
        return self.periods[place - 1]

    def _history(self, number: int) -> rows.History:
        # The sizes of the batches before one.
        period = self._period(number)
        so_far, size = number - period.first, self._batches[period.first].rows
        return rows.after(period.history, size, so_far) if so_far else period.history

    def _number_at(self, row: int) -> int:
        # The number of the batch that has a row, or of the one after the last.
        if row >= self._end:
            return len(self._batches)
        return bisect.bisect_right(self._batches, row, key=lambda each: each.row) - 1

    def _is_of_these(self, saved: state.DataState) -> bool:
        # Whether a state lies between these batches, and other attempts had no others.
        number = self._number_at(saved.row)
        period = self._period(max(0, number - 1))
        if not period.data.num_shards or saved.pipeline != period.data.identity():
            return False
        return state.history_of(saved.position) == self._history(number)

    def _sharded_rows(self, number: int) -> Iterator[UsedRow]:
        batch = self._batches[number]
        origins = rows.batch_origins(self.num_shards, self._history(number), batch.rows)
        of_shard: dict[int, list[tuple[int, int]]] = collections.defaultdict(list)
        for row, (shard, index) in enumerate(zip(*origins, strict=True)):
            of_shard[int(shard)].append((int(index), row))
        states = (each for each in self._saved if each.state.row <= batch.row)
        saved = next(states, None)
        for shard, wanted in of_shard.items():
            stream = _ShardStream(self, shard, saved)
            documents: list[provenance.Piece] | None = None
            for index, row in sorted(wanted):
                while stream.index <= index:
                    documents = stream.next()
                yield UsedRow(row=row, documents=tuple(documents or ()))
            stream.close()

    def _text_rows(
        self, data: positional_data.TextData, batch: Record
    ) -> Iterator[UsedRow]:
        origins = _Origins(data)
        for row, number in enumerate(range(batch.row, batch.stop)):
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
        stop = -(-self._current_end // data.num_records) * data.num_records
        for number in range(min(stop, len(data.order))):
            if data.order[number] != record_number:
                continue
            piece = origins.piece(record_number, number // data.num_records)
            uses = self._uses_at(self._number_at(number), number, piece)
            yield Found(
                dataset="",
                file=piece.file,
                record=piece.record,
                epoch=piece.epoch,
                shard=None,
                outcome=self._outcome(uses, number),
                document_tokens=None,
                uses=tuple(uses),
            )

    def _uses_at(self, number: int, row: int, piece: provenance.Piece) -> list[Use]:
        # The uses of a batch, by its number, for a row of the run.
        return [
            Use(
                step=record.step + self._first_step,
                attempt=record.attempt,
                is_current=self._is_current(record),
                row=row - record.row,
                first_token=piece.first_token,
                num_tokens=piece.num_tokens,
            )
            for batch in self._batches[number : number + 1]
            for record in self._uses(batch)
        ]

    def _outcome(self, uses: Sequence[Use], row: int) -> Outcome:
        if any(use.is_current for use in uses):
            return "used"
        return "left_out" if row < self._current_end else "not_yet_used"

    def _named(self, file: str) -> list[tuple[str, int, records.Records]]:
        # The parts of the run that have a file, and the number of the file in each.
        parts: dict[str, records.Records] = {}
        for period in self.periods:
            of_stages = stages.of(period.data)
            # Those of stages that have not begun, too.
            every = [e.data for e in of_stages.stages] if of_stages else [period.data]
            for each in every:
                parts |= provenance.parts(_sharded(each).make_shard(0))
        named: list[tuple[str, int, records.Records]] = []
        for name, part in parts.items():
            number = _file_number(records.files_of(part), file)
            if number is not None:
                named.append((name, number, part))
        if not named:
            files = [each for part in parts.values() for each in records.files_of(part)]
            raise _unknown(file, files)
        return named

    def _reached(self, name: str) -> int:
        # The last epoch that a shard was in at the newest saved state.
        if not self._saved:
            return -1
        at_end = self._saved[0].cursors(range(self.num_shards)).values()
        return max((provenance.read_until(each, name) or (0, 0))[0] for each in at_end)

    def _followed(self, name: str, part: records.Records, turn: records.Turn) -> Found:
        def is_before(saved: SavedData) -> bool:
            cursor = saved.cursors([turn.shard])[turn.shard]
            until = provenance.read_until(cursor, name, is_exact=True)
            return until is not None and until <= turn.at

        # States are newest first, and what they have read decreases.
        newest = bisect.bisect_left(self._saved, True, key=is_before)
        watched = name, turn.number
        for saved in (*self._saved[newest:], None):
            stream = _ShardStream(self, turn.shard, saved, watched=watched)
            index, first = stream.index, stream.next()
            if saved is None or not stream.is_read:
                break
            # Rows before the state may have a part of it.
            stream.close()
        before = self._rows_before(turn.shard)
        pieces, is_over = _pieces(stream, name, turn, index, first, end=before[-1])
        found = self._found(name, part, turn, stream, pieces, is_over=is_over)
        stream.close()
        return found

    def _rows_before(self, shard: int) -> np.ndarray:
        # The rows of a shard before each batch, and those of all.
        ends = [period.first for period in self.periods[1:]] + [len(self._batches)]
        counts, so_far = [np.zeros(1, np.int64)], 0
        for period, end in zip(self.periods, ends, strict=True):
            size, taken = self._batches[period.first].rows, end - period.first
            first = rows.batches_of(period.history, size)
            numbers = np.arange(first, first + taken + 1)
            of_shard = rows.shard_rows(self.num_shards, shard, size, numbers)
            counts.append(so_far + of_shard[1:] - of_shard[0])
            so_far = int(counts[-1][-1])
        return np.concatenate(counts)

    def _found(
        self,
        name: str,
        part: records.Records,
        turn: records.Turn,
        stream: _ShardStream,
        pieces: Sequence[tuple[int, provenance.Piece]],
        *,
        is_over: bool,
    ) -> Found:
        before = self._rows_before(turn.shard)
        uses: list[Use] = []
        outcomes: set[Outcome] = set()
        for index, piece in pieces:
            number = int(np.searchsorted(before, index, side="right")) - 1
            row = self._end
            if number < len(self._batches):
                batch = self._batches[number]
                shards, indices = rows.batch_origins(
                    self.num_shards, self._history(number), batch.rows
                )
                ((place,),) = np.nonzero((shards == turn.shard) & (indices == index))
                row = batch.row + int(place)
            found = self._uses_at(number, row, piece)
            uses += found
            outcomes.add(self._outcome(found, row))
        outcome: Outcome
        if outcomes:
            outcome = min(outcomes, key=typing.get_args(Outcome).index)
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
            uses=tuple(sorted(uses, key=lambda use: (use.attempt, use.step))),
        )


class _ShardStream:
    """The rows of a shard, by the pipelines that made them.

    Args:
      run: the run.
      shard: the shard's number.
      saved: the saved state to begin at; None for the beginning of the data.
      watched: see `provenance.FollowedShard`.

    Attributes:
      index: the number of the shard's next row.
      begins: that of the first row that each period of the run makes.
    """

    def __init__(
        self,
        run: Provenance,
        shard: int,
        saved: SavedData | None,
        *,
        watched: tuple[str, int] | None = None,
    ) -> None:
        self._periods, self._shard, self._watched = run.periods, shard, watched
        self._cursor: cursors.Cursor = None
        if saved is not None:
            self._cursor = saved.cursors([shard])[shard]
        self.index = shard_rows.row_of(self._cursor)
        self.begins = [
            int(rows.emitted(run.num_shards, period.history)[shard])
            for period in run.periods
        ]
        self._key: Any = None
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
        period = self._periods[bisect.bisect_right(self.begins, self.index) - 1]
        if self._all and (period.key == self._key or not ahead):
            return self._all[-1]
        if self._all:
            # The run continued with other weights or datasets, or in another stage.
            self._cursor = self._all[-1].cursor()
            self._all[-1].close()
        self._key = period.key
        make_shard, watched = _sharded(period.data).make_shard, self._watched
        opened = provenance.FollowedShard(
            make_shard, self._shard, self._cursor, watched=watched
        )
        self._all.append(opened)
        return opened


def _pieces(
    stream: _ShardStream,
    name: str,
    turn: records.Turn,
    index: int,
    found: list[provenance.Piece] | None,
    *,
    end: int,
) -> tuple[list[tuple[int, provenance.Piece]], bool]:
    # The pieces of the record with the numbers of their rows in the shard, from one
    # on, and whether no more can come.
    pieces: list[tuple[int, provenance.Piece]] = []
    num_tokens = 0
    for number in itertools.count(1):
        if index >= end:
            # The first row is read in any case.
            return pieces, number > 1 and _is_past(stream, name, turn)
        if found is None and index >= stream.begins[-1]:
            return pieces, True
        # A later stage may have more of a shard that has ended.
        found = found or []
        pieces += [(index, piece) for piece in found]
        num_tokens += sum(piece.num_tokens or 0 for piece in found)
        is_whole = bool(num_tokens) and num_tokens + 1 == stream.watched_tokens
        is_due = number % _CHECK_ROWS == 0
        if is_whole or (is_due and _is_past(stream, name, turn)):
            return pieces, True
        index = stream.index
        if index < end:
            found = stream.next()
    raise AssertionError


def _is_past(stream: _ShardStream, name: str, turn: records.Turn) -> bool:
    until = stream.read_until(name)
    return until is not None and until > turn.at


def _sharded(data: elastic_data.ElasticData) -> sharded_data.ShardedData:
    # The data, or that of the stage that it is in.
    of_stages = stages.of(data)
    if of_stages is not None:
        return of_stages.sharded()
    if not isinstance(data, sharded_data.ShardedData):
        raise errors.DataError(
            f"the documents of {type(data).__name__} cannot be told; use"
            " ec.data.sharded or ec.data.from_config"
        )
    return data


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


def _saved_at(step: int, path: epath.Path) -> list[SavedData]:
    # The data states of a step that can be read, nearly always one.
    found = []
    for part in path.iterdir():
        # An older state serves, too.
        with contextlib.suppress(errors.DataError):
            if (part / state.FILE_NAME).exists():
                saved = state.read(part)
                read = functools.partial(cursors.read, part, position=saved.position)
                found.append(SavedData(step=step, state=saved, cursors=read))
    return found
