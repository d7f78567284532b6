"""Finds the documents in each row of a logical shard.

Shuffling, splitting and packing depend only on document lengths. So a shard's pipeline
is rerun with each token replaced by an ID: the document's number, in reading order, and
the token's index in the document. Everything else is the pipeline's own code and state,
so the rerun can begin at any saved cursor. In a run with stages, each stage has its own
pipeline, and documents carried over to the next stage keep their IDs.

In a pipeline without `Tokens`, the `record` field of the rows identifies the records.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, cast

import numpy as np

from elastic_ckpt.core import errors
from elastic_ckpt.data import (
    cursors,
    mixing,
    records,
    shard_rows,
    shard_steps,
    stages,
)
from elastic_ckpt.data.lm import documents, rows

# Bits of a token's index in its document; the higher bits are the document's number.
_INDEX_BITS = 31
_INDICES = (1 << _INDEX_BITS) - 1

_UNKNOWN = "the documents of these rows cannot be identified: "
# Grain's steps that leave elements unchanged.
_LEAVING = (
    "LimitIterDataset",
    "MixedIterDataset",
    "RepeatIterDataset",
    "WindowShuffleIterDataset",
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Consecutive tokens of a document in a row, or a whole record.

    Attributes:
      dataset: the dataset's name; empty if the pipeline has no mixture.
      file: the path or URI of the document's file.
      record: the document's record in the file, from 0.
      epoch: the epoch, from 0.
      first_token: the index in the document of the piece's first token.
      num_tokens: the number of the piece's tokens in the row's inputs; the targets end
        one token later. None if the pipeline does not tokenize records.
      document_tokens: the number of tokens in the whole document; None if the pipeline
        does not tokenize records.
    """

    dataset: str
    file: str
    record: int
    epoch: int
    first_token: int = 0
    num_tokens: int | None = None
    document_tokens: int | None = None


class FollowedShard:
    """Iterates over the rows of a logical shard as lists of documents.

    Args:
      make_shard: the function that builds a shard's pipeline, with or without stages.
      shard: the shard number.
      cursor: the cursor to begin at; None for the beginning.
      row: the first row to return, if it is after the cursor.
      watched: a dataset name and one of the dataset's records, numbered over all
        epochs; if passed, rows contain only the pieces of this record.

    Attributes:
      parts: the `Records` read so far, keyed by dataset name. If a dataset of a mixture
        has more than one `Records`, the others are numbered, for example `web#2`.
      is_tokenized: whether `Tokens` tokenizes the records.
      is_read: whether the watched record was read.

    Raises:
      DataError: if documents cannot be traced through this pipeline.
    """

    def __init__(
        self,
        make_shard: shard_steps.MakeShard,
        shard: int,
        cursor: cursors.Cursor = None,
        *,
        row: int = 0,
        watched: tuple[str, int] | None = None,
    ) -> None:
        self.parts: dict[str, records.Records] = {}
        self.is_tokenized = self.is_read = False
        self._watched = watched
        # Each numbered document's dataset and record, and its number of tokens.
        self._documents: list[tuple[str, int]] = []
        self._num_tokens: list[int | None] = []
        self._shard, self._row = shard, max(row, cursors.row_of(cursor))
        self._open(make_shard, cursor)

    def _open(self, make_shard: shard_steps.MakeShard, cursor: cursors.Cursor) -> None:
        if isinstance(make_shard, stages.StagedShards):
            of_stages = make_shard.make_shards
            followed = [functools.partial(self._followed, each) for each in of_stages]
            make_shard = dataclasses.replace(make_shard, make_shards=tuple(followed))
            made: Any = make_shard(self._shard)
        else:
            made = self._followed(make_shard, self._shard)
        self._rows = shard_rows.iterator(made, cursor, self._row)
        self._has_ended = False

    def continue_with(self, make_shard: shard_steps.MakeShard) -> None:
        """Continues with new weights or datasets, or in a different stage."""
        cursor = self.cursor()
        self._rows.close()
        self._open(make_shard, cursor)

    def next(self) -> list[Piece] | None:
        """The documents of the next row, in order; None after the last row."""
        row = None if self._has_ended else next(self._rows, None)
        self._row += 1
        if row is None:
            self._has_ended = True
            return None
        return self._pieces(row) if self.is_tokenized else self._records(row)

    @property
    def is_document(self) -> bool:
        """Whether the watched record became a tokenized document."""
        return bool(self._watched and self._documents)

    @property
    def watched_tokens(self) -> int | None:
        """The number of tokens in the watched document; None until it is tokenized."""
        known = [number for number in self._num_tokens if number is not None]
        return max(known, default=None) if self._watched else None

    def cursor(self) -> cursors.Cursor:
        """The cursor after the last row."""
        return shard_rows.cursor_of(self._row, self._rows)

    def close(self) -> None:
        """Closes the pipeline."""
        self._rows.close()

    def numbered(self, record: records.Number) -> int:
        """Numbers a document, from 1; returns 0 if a different document is watched."""
        document = record.dataset, int(record)
        if self._watched not in (None, document):
            return 0
        self._documents.append(document)
        self._num_tokens.append(None)
        return len(self._documents)

    def note_tokens(self, document: int, num_tokens: int) -> None:
        """Records the number of tokens in a document; called from multiple threads."""
        if document:
            self._num_tokens[document - 1] = num_tokens

    def _tag(self, dataset: str, number: records.Number) -> None:
        self.is_read |= self._watched == (dataset, number)
        number.dataset = dataset

    def _followed(self, make_shard: shard_steps.MakeShard, shard: int) -> Any:
        # A pipeline with numbered records and with any tokens replaced by IDs.
        made: Any = make_shard(shard)
        for name, each in parts(made).items():
            self.parts.setdefault(name, each)
            each.tag = functools.partial(self._tag, name)
        for each in shard_steps.datasets(made):
            if isinstance(each, documents.Tokens):
                self.is_tokenized = True
                _check_after(each, made)
                # Pipelines may share a dataset: do not wrap its documents twice.
                of = getattr(each.documents, "of", each.documents)
                each.documents = cast(Any, _Documents(of, self))
            elif isinstance(each, rows.Rows) and self.is_tokenized:
                each.dtype = np.int64
        return made

    def _pieces(self, row: Any) -> list[Piece]:
        named = [
            each
            for each in (row.get("inputs"), *row.values())
            if isinstance(each, np.ndarray)
            and each.ndim == 1
            and each.dtype == np.int64
            and each.max(initial=0) > _INDICES
        ]
        if not named:
            return []
        numbers = named[0]
        begins = np.flatnonzero(np.diff(numbers, prepend=-1) != 1)
        sizes = np.diff(begins, append=len(numbers)).tolist()
        pieces = []
        for number, size in zip(numbers[begins].tolist(), sizes, strict=True):
            if number <= _INDICES:
                # Padding, or a document that is not watched.
                continue
            document = (number >> _INDEX_BITS) - 1
            whole = self._whole(*self._documents[document])
            piece = dataclasses.replace(
                whole,
                first_token=number & _INDICES,
                num_tokens=size,
                document_tokens=self._num_tokens[document],
            )
            pieces.append(piece)
        return pieces

    def _records(self, row: Any) -> list[Piece]:
        number = row.get(records.RECORD) if isinstance(row, dict) else None
        found: list[Any] = [number]
        if number is not None and not isinstance(number, int):
            found = np.ravel(number).tolist()
        only, *others = self.parts
        is_unknown = others and not all(
            isinstance(each, records.Number) for each in found
        )
        if number is None or is_unknown:
            raise errors.DataError(
                f"{_UNKNOWN}make_shard does not use Tokens, and its rows change or lack"
                f" the field {records.RECORD!r} of Records; keep this field unchanged"
                " or, if a row combines multiple records, reread the run's batches with"
                " ec.data.LocalBatches and search their rows for the document"
            )
        named = [(getattr(each, "dataset", only), int(each)) for each in found]
        return [self._whole(*each) for each in named if self._watched in (None, each)]

    def _whole(self, dataset: str, number: int) -> Piece:
        file, record, epoch = records.origin(self.parts[dataset], number)
        return Piece(dataset=dataset, file=file, record=record, epoch=epoch)


@dataclasses.dataclass(frozen=True)
class _Documents:
    """Returns IDs in place of the tokens from the encoder `of`."""

    of: documents.Encoder
    shard: FollowedShard

    def value(self, element: dict[str, Any]) -> tuple[Any, int]:
        """The value to encode, and the document number."""
        value = self.of.value(element)
        record = element.get(records.RECORD)
        if not isinstance(record, records.Number):
            raise errors.DataError(
                f"{_UNKNOWN}a function before Tokens drops or changes the field"
                f" {records.RECORD!r} of Records; make the function return this field"
                " unchanged"
            )
        return value, self.shard.numbered(record)

    def tokens(self, values: Sequence[tuple[Any, int]]) -> list[np.ndarray]:
        """The IDs of the tokens of each document."""
        made = self.of.tokens([value for value, _ in values])
        named = []
        for (_, document), tokens in zip(values, made, strict=True):
            self.shard.note_tokens(document, len(tokens))
            first = document << _INDEX_BITS
            named.append(np.arange(first, first + len(tokens), dtype=np.int64))
        return named


def parts(made: Any) -> dict[str, records.Records]:
    """The `Records` of a pipeline, keyed by dataset name.

    Raises:
      DataError: if the pipeline has none.
    """
    found: dict[str, records.Records] = {}
    for name, each in mixing.by_name(made):
        if isinstance(each, records.Records) and each not in found.values():
            number = sum(other.partition("#")[0] == name for other in found) + 1
            found[f"{name}#{number}" if number > 1 else name] = each
    if not found:
        raise errors.DataError(
            f"{_UNKNOWN}make_shard does not read its files with ec.data.Records, which"
            " numbers the records; read the files with ec.data.Records"
        )
    return found


def read_until(
    cursor: cursors.Cursor, name: str, *, is_exact: bool = False
) -> tuple[int, int] | None:
    """How far a shard had read a dataset when the pipeline last buffered no elements.

    Args:
      cursor: the shard's cursor; None at its beginning.
      name: the dataset name.
      is_exact: whether to return None if the dataset's own steps may buffer elements,
        because a mixture opens a dataset and refills its buffers only when its turn
        comes.

    Returns:
      The epoch and the number of records read in it (see `records.Occurrence.at`);
      None if unknown.
    """
    states = cursors.states(cursors.state_of(cursor), oldest=True)
    found = [records.place_in(state) for of_part, state in states if of_part == name]
    if not found:
        # The dataset is not open yet, unless more than one has this name.
        return None if "#" in name else (0, 0)
    if name and is_exact:
        return found[0]
    places = [place for place in found if place is not None]
    return places[0] if len(places) == 1 else None


def _check_after(tokens: Any, made: Any) -> None:
    for each in shard_steps.datasets(made):
        is_ours = type(each).__module__.startswith("elastic_ckpt.")
        leaves = shard_steps.passes_on(each) or type(each).__name__ in _LEAVING
        if tokens in shard_steps.datasets(each) and not is_ours and not leaves:
            raise errors.DataError(
                f"{_UNKNOWN}your step {shard_steps.shown(each)} processes tokens; apply"
                " the step to records instead, before Tokens"
            )
