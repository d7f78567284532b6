"""Finds the steps that used a document and the documents that a step used.

The step log gives each batch's position in the stream of rows, counting rows that the
run skipped. The sizes of earlier batches determine the logical shard of each row
(`data.rows`). To find which documents are in the rows, the shard's pipeline is rerun
(`data.provenance`) from the start or from the last data state saved before them. Which
shard reads a record, and when, can be computed without reading data, so a search reads
only one shard per epoch.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import itertools
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal, TypeAlias

import numpy as np
from etils import epath

from elastic_ckpt.checkpoint import foreign_steps
from elastic_ckpt.core import errors
from elastic_ckpt.data import (
    cursors,
    elastic_data,
    provenance,
    records,
    rows,
    sharded_data,
    stages,
    state,
)
from elastic_ckpt.training import audit, step_log
from elastic_ckpt.training.step_log import StepRecord

# The number of rows between checks of whether a document can still appear.
_CHECK_ROWS = 32

# A data state in storage, and a function that reads its cursors.
Saved: TypeAlias = tuple[state.DataState, elastic_data.ReadCursors]
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
      attempt: an attempt that trained the step; there may be more than one.
      is_current: whether the attempt's step is part of the run's lineage; False for a
        step that was retrained after a crash or rollback.
      row: the row of the global batch.
      first_token: the index, in the document, of the first of these tokens.
      num_tokens: the number of tokens among the row's inputs; None if unknown.
    """

    step: int
    attempt: int
    is_current: bool
    row: int
    first_token: int
    num_tokens: int | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Found:
    """What happened to a document in one epoch.

    Attributes:
      dataset: the dataset's name; empty if there is only one.
      file: the path or URI of the file.
      record: the record's index in the file, from 0.
      epoch: the epoch, from 0.
      shard: the logical shard that reads the record.
      outcome: `used` by steps; `left_out`, skipped with other rows after a rollback;
        `too_short` for an example; `filtered` by the pipeline; `corrupt` and skipped;
        `read_ahead` into a block, a shuffle window or an incomplete row, but in no step
        yet; or `not_yet_used`.
      document_tokens: the number of tokens in the whole document; None if unknown.
      uses: the steps that used it, in training order.
    """

    dataset: str
    file: str
    record: int
    epoch: int
    shard: int
    outcome: Outcome
    document_tokens: int | None
    uses: tuple[Use, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class UsedBatch:
    """A batch that a step was trained on.

    Attributes:
      attempts: the attempts that trained the step on this batch.
      is_current: whether the run's lineage contains one of these attempts.
      position: the number of rows before the batch in the stream of rows.
      rows: for each row of the global batch, the documents with tokens in the row, in
        order; empty for a padding row.
    """

    step: int
    attempts: tuple[int, ...]
    is_current: bool
    position: int
    rows: tuple[tuple[provenance.Piece, ...], ...]


class Provenance:
    """Answers questions about the documents of a run.

    It covers the batches of the run's lineage and the batches that the run skipped. It
    does not follow batches that the run trained on only before a rollback.

    Args:
      attempts: the step log.
      data_of: a function that returns the data of a step; see `audit`.
      saved: the data states in storage.
      first_step: the step number of the run's first step; the log starts at 0.

    Raises:
      DataError: if the step log has no steps or the data is not the run's data.
    """

    def __init__(
        self,
        attempts: Sequence[step_log.Attempt],
        data_of: audit.DataOf,
        *,
        saved: Iterable[Saved] = (),
        first_step: int = 0,
    ) -> None:
        self._first_step = first_step
        self._lineage = step_log.lineage(attempts)
        if not self._lineage:
            raise errors.DataError("the step log is empty: the run has not trained yet")
        # The trained batches by first row; each may have been trained on repeatedly.
        self._trained: dict[int, list[StepRecord]] = collections.defaultdict(list)
        for record in itertools.chain.from_iterable(a.records for a in attempts):
            self._trained[record.row].append(record)
        self._batches = [each.record for each in audit.stream(attempts, data_of)]
        self._data = [*map(data_of, self._batches)]
        # For each batch, the sizes of the earlier batches.
        sizes = (each.rows for each in self._batches[:-1])
        self._histories = [*itertools.accumulate(sizes, rows.after, initial=())]
        # The saved states between these batches, newest first: the index of the next
        # batch and the shards' cursors. The last state is the start of the data.
        self._saved: list[tuple[int, elastic_data.ReadCursors]] = []
        numbers = {history: n for n, history in enumerate(self._histories)}
        by_row = sorted(saved, key=lambda each: -each[0].row)
        for each, _ in by_row[:1]:
            last = data_of(self._lineage[max(self._lineage)])
            state.check_same_pipeline(each, last.engine, last.identity())
        for each, read_cursors in by_row:
            if "batches" in each.position:
                number = numbers.get(state.history_of(each.position), 0)
                if number and each.pipeline == self._data[number - 1].identity():
                    self._saved.append((number, read_cursors))
        self._saved.append((0, dict.fromkeys))

    @classmethod
    def of_run(cls, run: audit.RunAudit) -> Provenance:
        """The provenance of a run in a directory."""
        steps = foreign_steps.steps(run.record.steps_directory)
        return cls(
            run.attempts,
            run.data_of,
            saved=itertools.chain.from_iterable(map(_saved_at, steps.values())),
            first_step=run.record.first_step,
        )

    def find(self, file: str, record: int) -> Iterator[Found]:
        """Finds what happened to a record in each epoch.

        Args:
          file: the path of a data file, or the end of its path.
          record: the record's index in the file, from 0.

        Raises:
          DataError: if there is no such record or it cannot be followed.
        """
        for name, number, dataset in self._named(file):
            num_unused = 0
            for occurrence in records.occurrences(dataset, number, record):
                found = self._followed(name, dataset, occurrence)
                num_unused += found.outcome == "not_yet_used"
                # Shards are only roughly in the same epoch.
                if num_unused > 1:
                    break
                yield found

    def step(self, step: int) -> Iterator[UsedBatch]:
        """The batches of a step, with their documents.

        A step that was retrained on different rows has more than one batch.

        Raises:
          DataError: if no attempt trained the step or its rows cannot be followed.
        """
        is_followed = False
        for number, batch in enumerate(self._batches):
            uses = [use for use in self._uses(batch) if use.step == step]
            if uses:
                is_followed = True
                yield UsedBatch(
                    step=step,
                    attempts=tuple(use.attempt for use in uses),
                    is_current=any(use.is_current for use in uses),
                    position=batch.row,
                    rows=self._documents(number),
                )
        if not is_followed:
            trained = itertools.chain.from_iterable(self._trained.values())
            steps = {each.step + self._first_step for each in trained}
            why = (
                "trained, but the run rolled back past it; only steps that were"
                " retrained or skipped can be followed"
                if step in steps
                else "not trained in any attempt; choose one of the run's steps,"
                f" {min(steps)} to {max(steps)}"
            )
            raise errors.DataError(f"step {step} was {why}")

    def _documents(self, number: int) -> tuple[tuple[provenance.Piece, ...], ...]:
        # The documents in each row of a batch.
        found: list[tuple[provenance.Piece, ...]] = [()] * self._batches[number].rows
        start = next(saved for saved in self._saved if saved[0] <= number)
        for shard in {*self._shards(number).tolist()}:
            with self._opened(shard, *start) as followed:
                through = range(start[0], number + 1)
                for at, row, pieces in self._rows(followed, shard, through):
                    if at == number:
                        found[row] = tuple(pieces or ())
        return tuple(found)

    def _shards(self, number: int) -> np.ndarray:
        # The shard of each row of a batch.
        size, history = self._batches[number].rows, self._histories[number]
        num_shards = _sharded(self._data[number]).num_shards
        return rows.batch_shards(num_shards, size, rows.batches_of(history, size))

    def _opened(
        self,
        shard: int,
        number: int,
        read_cursors: elastic_data.ReadCursors,
        *,
        watched: tuple[str, int] | None = None,
    ) -> contextlib.closing[provenance.FollowedShard]:
        # Opens a shard just before a batch.
        cursor = read_cursors([shard])[shard]
        data = _sharded(self._entered(shard, number))
        row = rows.emitted(data.num_shards, self._histories[number])[shard]
        return contextlib.closing(
            provenance.FollowedShard(
                data.make_shard, shard, cursor, row=int(row), watched=watched
            )
        )

    def _rows(
        self, followed: provenance.FollowedShard, shard: int, numbers: range
    ) -> Iterator[tuple[int, int, list[provenance.Piece] | None]]:
        # For each row of a shard in some batches: the batch, the row, the documents.
        data = self._entered(shard, numbers.start)
        for number in numbers:
            for row in np.flatnonzero(self._shards(number) == shard).tolist():
                if self._data[number] != data:
                    data = self._data[number]
                    followed.continue_with(_sharded(data).make_shard)
                yield number, row, followed.next()

    def _entered(self, shard: int, number: int) -> elastic_data.ElasticData:
        # The data of a shard's first row from a batch on: a shard without rows in a
        # stage does not enter it.
        later = range(number, len(self._batches))
        first = next((n for n in later if shard in self._shards(n)), number)
        return self._data[first]

    def _uses(
        self, batch: StepRecord, row: int = 0, piece: provenance.Piece | None = None
    ) -> list[Use]:
        # The steps that were trained on a batch, for a piece in one of its rows.
        return [
            Use(
                step=record.step + self._first_step,
                attempt=record.attempt,
                is_current=self._lineage.get(record.step) is record,
                row=row,
                first_token=piece.first_token if piece else 0,
                num_tokens=piece.num_tokens if piece else None,
            )
            for record in self._trained.get(batch.row, ())
            if record.digest == batch.digest
        ]

    def _named(self, file: str) -> list[tuple[str, int, records.Records]]:
        # The datasets that have a file, and the file's index in each.
        datasets: dict[str, records.Records] = {}
        for data, _ in itertools.groupby(self._data):
            # Includes stages that have not begun.
            is_staged = isinstance(data, stages.StagedData)
            for each in [e.data for e in data.stages] if is_staged else [data]:
                datasets |= provenance.parts(_sharded(each).make_shard(0))
        files = {name: records.files_of(each) for name, each in datasets.items()}
        return [
            (name, number, datasets[name]) for name, number in _located(files, file)
        ]

    def _start(
        self, name: str, occurrence: records.Occurrence
    ) -> tuple[int, elastic_data.ReadCursors]:
        # The batch from which to follow a record, and the cursors before it.
        watched = name, occurrence.number
        for start in self._saved[:-1]:
            cursor = start[1]([occurrence.shard])[occurrence.shard]
            until = provenance.read_until(cursor, name, is_exact=True)
            if until is not None and until <= occurrence.at:
                with self._opened(
                    occurrence.shard, *start, watched=watched
                ) as followed:
                    followed.next()
                # Otherwise rows before the state may have pieces of the record.
                if not followed.is_read:
                    return start
        return self._saved[-1]

    def _followed(
        self, name: str, dataset: records.Records, occurrence: records.Occurrence
    ) -> Found:
        start, watched = self._start(name, occurrence), (name, occurrence.number)
        uses: list[Use] = []
        has_rows = is_over = False
        num_tokens = 0
        with self._opened(occurrence.shard, *start, watched=watched) as followed:
            later = range(start[0], len(self._batches))
            read = self._rows(followed, occurrence.shard, later)
            for some in iter(lambda: [*itertools.islice(read, _CHECK_ROWS)], []):
                for number, row, pieces in some:
                    has_rows |= bool(pieces)
                    for piece in pieces or ():
                        uses += self._uses(self._batches[number], row, piece)
                        num_tokens += piece.num_tokens or 0
                number, _, pieces = some[-1]
                until = provenance.read_until(followed.cursor(), name)
                is_over = (
                    num_tokens + 1 == followed.watched_tokens
                    or (until is not None and until > occurrence.at)
                    # A later stage may continue a shard that has ended.
                    or (pieces is None and self._data[number] == self._data[-1])
                )
                if is_over:
                    break
        tokens = followed.watched_tokens
        outcome: Outcome = "read_ahead"
        if has_rows:
            outcome = _outcome(uses)
        elif not followed.is_read:
            outcome = "corrupt" if is_over else "not_yet_used"
        elif tokens is not None and tokens < 2:
            outcome = "too_short"
        elif is_over or (followed.is_tokenized and not followed.is_document):
            outcome = "filtered"
        file, record, epoch = records.origin(dataset, occurrence.number)
        return Found(
            dataset=name,
            file=file,
            record=record,
            epoch=epoch,
            shard=occurrence.shard,
            outcome=outcome,
            document_tokens=tokens,
            uses=tuple(sorted(uses, key=lambda use: (use.attempt, use.step))),
        )


def _outcome(uses: Iterable[Use]) -> Outcome:
    # The outcome of a document that reached rows.
    return "used" if any(use.is_current for use in uses) else "left_out"


def _sharded(data: elastic_data.ElasticData) -> sharded_data.ShardedData:
    # The data of the current stage, if there are stages.
    if isinstance(data, stages.StagedData):
        data = data.sharded()
    if not isinstance(data, sharded_data.ShardedData):
        raise errors.DataError(
            f"the documents in {type(data).__name__} cannot be determined; use"
            " ec.data.sharded or ec.data.from_config"
        )
    return data


def _located(files: Mapping[str, Sequence[str]], file: str) -> list[tuple[str, int]]:
    # The datasets that have a file with this path or a path that ends in it, and the
    # file's index in each dataset.
    whole, end = os.path.abspath(file), "/" + file.lstrip("/")
    found = [
        (name, number, each)
        for name, of_dataset in files.items()
        for number, each in enumerate(of_dataset)
        if each in (file, whole) or each.endswith(end)
    ]
    if not found:
        names = {os.path.basename(e) for of_data in files.values() for e in of_data}
        raise errors.DataError(
            f"{file} is not one of the run's data files"
            f" ({errors.first_of(sorted(names))}); pass the path"
            " of one of them, or the end of that path"
        )
    if len({name for name, _, _ in found}) < len(found):
        raise errors.ConfigError(
            f"{file} matches {len(found)} data files:"
            f" {errors.first_of(each for _, _, each in found)}; pass more of the path"
        )
    return [(name, number) for name, number, _ in found]


def _saved_at(path: epath.Path) -> Iterator[Saved]:
    # The readable data states of a step, nearly always just one.
    for file in path.glob(f"*/{state.FILE_NAME}"):
        directory = file.parent
        # If a state cannot be read, an older one is used.
        with contextlib.suppress(errors.DataError):
            found = state.read(directory)
            yield (
                found,
                functools.partial(cursors.read, directory, position=found.position),
            )
