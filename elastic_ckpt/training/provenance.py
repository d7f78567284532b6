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
from typing import Any, Literal, NamedTuple, TypeAlias

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
from elastic_ckpt.data.sources import arrayrecord
from elastic_ckpt.training import audit, step_log
from elastic_ckpt.training.step_log import Record

# After how many rows it is checked whether a document can still come.
_CHECK_ROWS = 32
# Data states that are read at once.
_READERS = 16

# A shard that is followed, and of its next row the batch, the number in the shard, and
# the documents.
_Read: TypeAlias = Iterator[
    tuple[provenance.FollowedShard, int, int, list[provenance.Piece] | None]
]
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
class UsedBatch:
    """A batch that trained a step.

    Attributes:
      step: the step.
      attempts: the attempts that trained it with this batch.
      is_current: whether that of the run as it is now is one of them.
      position: the number of rows before it in the stream of rows.
      rows: for each row of the global batch the documents whose tokens it has, in
        order; none for a row of padding.
    """

    step: int
    attempts: tuple[int, ...]
    is_current: bool
    position: int
    rows: tuple[tuple[provenance.Piece, ...], ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SavedData:
    """The data state of a saved step.

    Attributes:
      state: its data state.
      cursors: reads the cursors of shards.
    """

    state: state.DataState
    cursors: Callable[[Iterable[int]], Mapping[int, cursors.Cursor]]


class _Batch(NamedTuple):
    # A batch, what made it, and what two batches that the same made have alike.
    record: Record
    key: Any
    data: elastic_data.ElasticData


class Provenance:
    """Answers questions about the documents of a run.

    It knows the batches of the run as it is, those that it left out, and those after
    its last step that an earlier attempt has trained. Batches in another place of the
    stream, such as those of another size that were trained again, are not followed.

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
        read: list[Record] = []
        for unused, record in audit.stream(attempts, data_of):
            read += [*unused, record]
        self._current_end = read[-1].stop
        # The origins of rows depend on the sizes of all batches before them: an attempt
        # goes on from a batch only if it has trained the same one.
        ends = {
            (each.attempt, each.stop, each.digest)
            for of_row in self._trained.values()
            for each in of_row
        }
        while later := [
            each
            for each in self._trained.get(read[-1].stop, ())
            if (each.attempt, each.row, read[-1].digest) in ends
        ]:
            read.append(later[-1])
        self._batches = [_Batch(e, *audit.pipeline_of(e, data_of)) for e in read]
        # The sizes of the batches before each, and of all.
        sizes = (each.rows for each in read)
        self._histories = [*itertools.accumulate(sizes, rows.after, initial=())]
        self._saved = sorted(saved, key=lambda each: -each.state.row)
        if self._saved:
            last, newest = data_of(attempts[-1].attempt), self._saved[0].state
            state.check_same_pipeline(newest, last.engine, last.identity())
        self._saved = [each for each in self._saved if self._is_of_these(each.state)]

    @classmethod
    def of_run(cls, run: audit.RunAudit) -> Provenance:
        """That of a run in a directory."""
        steps = foreign_steps.steps(run.record.steps_directory)
        with futures.ThreadPoolExecutor(_READERS) as pool:
            found = list(pool.map(_saved_at, steps.values()))
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
        data = self._batches[-1].data
        if isinstance(data, positional_data.TextData):
            yield from self._find_text(data, file, record)
            return
        for name, number, part in self._named(file):
            num_unused = 0
            for turn in records.turns(part, number, record):
                found = self._followed(name, part, turn)
                num_unused += found.outcome == "not_yet_used"
                # Shards are in about the same epoch, but not exactly.
                if num_unused > 1:
                    break
                yield found

    def step(self, step: int) -> Iterator[UsedBatch]:
        """The batches of a step, with their documents.

        A step that was trained again with other rows has several batches.

        Raises:
          DataError: if no attempt trained it, or its rows cannot be followed.
        """
        of_step = [
            (number, uses)
            for number, batch in enumerate(self._batches)
            if (uses := [u for u in self._uses(batch) if u.step == step])
        ]
        trained = itertools.chain.from_iterable(self._trained.values())
        if not of_step and step - self._first_step in {each.step for each in trained}:
            raise errors.DataError(
                f"step {step} was trained, and the run went back before it and trained"
                " again in batches of another size; it is not followed"
            )
        if not of_step:
            steps = [each.record.step + self._first_step for each in self._batches]
            raise errors.DataError(
                f"no attempt of the run trained step {step}; its steps are"
                f" {min(steps)} to {max(steps)}"
            )
        for number, uses in of_step:
            batch = self._batches[number]
            is_text = isinstance(batch.data, positional_data.TextData)
            yield UsedBatch(
                step=step,
                attempts=tuple(use.attempt for use in uses),
                is_current=any(use.is_current for use in uses),
                position=batch.record.row,
                rows=self._text_rows(batch) if is_text else self._sharded_rows(number),
            )

    @property
    def num_shards(self) -> int:
        """The number of logical shards, the same in all stages."""
        return _sharded(self._batches[0].data).num_shards

    def _number_at(self, row: int) -> int:
        # The number of the batch that has a row, or of the one after the last.
        if row >= self._batches[-1].record.stop:
            return len(self._batches)
        return bisect.bisect(self._batches, row, key=lambda each: each.record.row) - 1

    def _is_of_these(self, saved: state.DataState) -> bool:
        # Whether a state lies between these batches, by the pipeline that made them.
        number = self._number_at(saved.row)
        data = self._batches[max(0, number - 1)].data
        if not data.num_shards or saved.pipeline != data.identity():
            return False
        return state.history_of(saved.position) == self._histories[number]

    def _sharded_rows(self, number: int) -> tuple[tuple[provenance.Piece, ...], ...]:
        record = self._batches[number].record
        found: list[tuple[provenance.Piece, ...]] = [()] * record.rows
        of_shard: dict[int, dict[int, int]] = collections.defaultdict(dict)
        for row, (shard, index) in enumerate(zip(*self._origins(number), strict=True)):
            of_shard[int(shard)][int(index)] = row
        states = (each for each in self._saved if each.state.row <= record.row)
        saved = next(states, None)
        for shard, wanted in of_shard.items():
            before = self._rows_before(shard)
            for _, _, index, documents in self._follow(shard, saved, before):
                if index in wanted:
                    found[wanted.pop(index)] = tuple(documents or ())
                if not wanted:
                    break
        return tuple(found)

    def _origins(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        # The shard of each row of a batch, and the number of the row in it.
        size, history = self._batches[number].record.rows, self._histories[number]
        return rows.batch_origins(self.num_shards, history, size)

    def _rows_before(self, shard: int) -> np.ndarray:
        # The rows of a shard before each batch, and those of all.
        before = [np.zeros(1, np.int64)]
        for size, number in self._histories[-1]:
            batches = np.arange(1, number + 1)
            taken = rows.shard_rows(self.num_shards, shard, size, batches)
            before.append(before[-1][-1] + taken)
        return np.concatenate(before)

    def _follow(
        self,
        shard: int,
        saved: SavedData | None,
        before: np.ndarray,
        *,
        watched: tuple[str, int] | None = None,
    ) -> _Read:
        # Follows a shard up to the last batch, or for one row in any case.
        cursor = saved.cursors([shard])[shard] if saved is not None else None
        begin = shard_rows.row_of(cursor)
        # The batch that has a row of the shard.
        stop = max(begin + 1, int(before[-1]))
        numbers = np.searchsorted(before, np.arange(begin, stop), side="right") - 1
        numbers = np.minimum(numbers, len(self._batches) - 1).tolist()
        batch = self._batches[numbers[0]]
        make_shard = _sharded(batch.data).make_shard
        with contextlib.closing(
            provenance.FollowedShard(make_shard, shard, cursor, watched=watched)
        ) as followed:
            for index, number in enumerate(numbers, begin):
                if self._batches[number].key != batch.key:
                    batch = self._batches[number]
                    followed.go_on(_sharded(batch.data).make_shard)
                yield followed, number, index, followed.next()

    def _text_rows(self, batch: _Batch) -> tuple[tuple[provenance.Piece, ...], ...]:
        data, found = batch.data, []
        assert isinstance(data, positional_data.TextData)
        texts = _texts(data)
        for number in range(batch.record.row, batch.record.stop):
            documents: tuple[provenance.Piece, ...] = ()
            if number < len(data.order):
                text = data.order[number]
                assert text is not None
                text += number // data.num_records * data.num_records
                file, record, epoch = records.origin(texts, text)
                piece = provenance.Piece(
                    dataset="", file=file, record=record, epoch=epoch
                )
                documents = (piece,)
            found.append(documents)
        return tuple(found)

    def _find_text(
        self, data: positional_data.TextData, file: str, record: int
    ) -> Iterator[Found]:
        ((_, at),) = _located({"": data.files}, file)
        wanted = next(records.turns(_texts(data), at, record)).number
        stop = -(-self._current_end // data.num_records) * data.num_records
        for number in range(min(stop, len(data.order))):
            if data.order[number] != wanted:
                continue
            batches = self._batches[self._number_at(number) :][:1]
            uses = [
                use
                for batch in batches
                for use in self._uses(batch, number - batch.record.row)
            ]
            yield Found(
                dataset="",
                file=data.files[at],
                record=record,
                epoch=number // data.num_records,
                shard=None,
                outcome=self._outcome(uses, number),
                document_tokens=None,
                uses=tuple(uses),
            )

    def _uses(
        self, batch: _Batch, row: int = 0, piece: provenance.Piece | None = None
    ) -> list[Use]:
        # The steps that were trained on a batch, for a piece in a row of it.
        return [
            Use(
                step=record.step + self._first_step,
                attempt=record.attempt,
                is_current=self._lineage.get(record.step) is record,
                row=row,
                first_token=piece.first_token if piece else 0,
                num_tokens=piece.num_tokens if piece else None,
            )
            for record in self._trained.get(batch.record.row, ())
            if record.digest == batch.record.digest
        ]

    def _outcome(self, uses: Sequence[Use], row: int) -> Outcome:
        if any(use.is_current for use in uses):
            return "used"
        return "left_out" if row < self._current_end else "not_yet_used"

    def _named(self, file: str) -> list[tuple[str, int, records.Records]]:
        # The parts of the run that have a file, and the number of the file in each.
        parts: dict[str, records.Records] = {}
        for data in {each.key: each.data for each in self._batches}.values():
            of_stages = stages.of(data)
            # Those of stages that have not begun, too.
            every = [e.data for e in of_stages.stages] if of_stages else [data]
            for each in every:
                parts |= provenance.parts(_sharded(each).make_shard(0))
        files = {name: records.files_of(part) for name, part in parts.items()}
        return [(name, number, parts[name]) for name, number in _located(files, file)]

    def _followed(self, name: str, part: records.Records, turn: records.Turn) -> Found:
        shard, watched = turn.shard, (name, turn.number)
        before = self._rows_before(shard)
        for saved in (*self._saved, None):
            if saved is not None:
                cursor = saved.cursors([shard])[shard]
                until = provenance.read_until(cursor, name, is_exact=True)
                if until is None or until > turn.at:
                    continue
            read = self._follow(shard, saved, before, watched=watched)
            first = next(read)
            followed = first[0]
            # Rows before the state may have a part of what was read at once.
            if saved is None or not followed.is_read:
                break
        uses: list[Use] = []
        outcomes: set[Outcome] = set()
        num_tokens, is_over, end = 0, False, int(before[-1])
        for _, number, index, pieces in itertools.chain([first], read):
            batch = self._batches[number]
            # A later stage may have more of a shard that has ended.
            is_over = pieces is None and batch.key == self._batches[-1].key
            if is_over or index >= end:
                break
            for piece in pieces or ():
                origins = np.equal(self._origins(number), ((shard,), (index,)))
                row = int(origins.all(axis=0).argmax())
                of_piece = self._uses(batch, row, piece)
                outcomes.add(self._outcome(of_piece, batch.record.row))
                uses += of_piece
                num_tokens += piece.num_tokens or 0
            is_over = bool(num_tokens) and num_tokens + 1 == followed.watched_tokens
            if not is_over and (index % _CHECK_ROWS == 0 or index + 1 == end):
                until = provenance.read_until(followed.cursor(), name)
                is_over = until is not None and until > turn.at
            if is_over:
                break
        tokens = followed.watched_tokens
        outcome: Outcome = "read_ahead"
        if outcomes:
            outcome = min(outcomes, key=typing.get_args(Outcome).index)
        elif not followed.is_read:
            outcome = "corrupt" if is_over else "not_yet_used"
        elif tokens is not None and tokens < 2:
            outcome = "too_short"
        elif is_over or (followed.is_tokenized and not followed.is_document):
            outcome = "filtered"
        file, record_in_file, epoch = records.origin(part, turn.number)
        return Found(
            dataset=name,
            file=file,
            record=record_in_file,
            epoch=epoch,
            shard=shard,
            outcome=outcome,
            document_tokens=tokens,
            uses=tuple(sorted(uses, key=lambda use: (use.attempt, use.step))),
        )


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


def _texts(data: positional_data.TextData) -> records.Records:
    # In the order of the files.
    texts = arrayrecord.ArrayRecord(files=data.files)
    return records.Records(texts, shard=0, num_shards=1)


def _located(files: Mapping[str, Sequence[str]], file: str) -> list[tuple[str, int]]:
    # The datasets that have the file with this path, or this end of its path, and the
    # number of the file in each.
    whole, end = os.path.abspath(file), "/" + file.lstrip("/")
    found = [
        (name, number, each)
        for name, of_dataset in files.items()
        for number, each in enumerate(of_dataset)
        if each in (file, whole) or each.endswith(end)
    ]
    if not found:
        every = itertools.chain.from_iterable(files.values())
        names = errors.first_of(sorted({os.path.basename(each) for each in every}))
        raise errors.DataError(
            f"{file} is not a file of the run's data, which has {names}; give the path"
            " of one of them, or the end of it"
        )
    if len({name for name, _, _ in found}) < len(found):
        raise errors.ConfigError(
            f"{file}: {len(found)} files of the data end so,"
            f" {errors.first_of(each for _, _, each in found)}; give more of the path"
        )
    return [(name, number) for name, number, _ in found]


def _saved_at(path: epath.Path) -> list[SavedData]:
    # The data states of a step that can be read, nearly always one.
    found = []
    for part in path.iterdir():
        # An older state serves, too.
        with contextlib.suppress(errors.DataError):
            if (part / state.FILE_NAME).exists():
                saved = state.read(part)
                read = functools.partial(cursors.read, part, position=saved.position)
                found.append(SavedData(state=saved, cursors=read))
    return found
