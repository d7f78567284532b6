"""Tells which documents each row of a logical shard is made of.

What shuffles, cuts and packs documents decides on their lengths alone. So the pipeline
of a shard is executed once more, with each token replaced by a number that names it:
the document, numbered as they are read, and the token's index in it. The rows that come
out name their documents. Everything else is the pipeline's own code and state, so it
can begin at any saved cursor. In a run of stages each stage has such a pipeline, and
documents that come over from one to the next name themselves, too.

A pipeline that makes no tokens with `Tokens` is followed by the field `record` of its
rows.
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

# The bits of a token's index in its document; above them is the document's number.
_INDEX_BITS = 31
_INDICES = (1 << _INDEX_BITS) - 1

_UNKNOWN = "the documents of these rows cannot be told: "
# Steps of Grain's that leave elements as they are.
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
      first_token: the index in the document of the first of these tokens.
      num_tokens: the number of these tokens among the row's inputs; the target of the
        last is one further. None if the pipeline makes no tokens of its records.
      document_tokens: the tokens of the whole document; likewise.
    """

    dataset: str
    file: str
    record: int
    epoch: int
    first_token: int = 0
    num_tokens: int | None = None
    document_tokens: int | None = None


class _Number(int):
    """The number of a record, which also has the name of its dataset."""

    dataset: str


class FollowedShard:
    """The rows of a logical shard, as the documents that they are made of.

    Args:
      make_shard: makes the pipeline of a shard, also that of a stage of a run.
      shard: the shard's number.
      cursor: where to begin; None for the beginning.
      row: the rows of the shard before the first one, if the cursor is behind it.
      watched: the name of a dataset, and the number of one of its records in the list
        of all epochs. Then rows have only the pieces of this record.

    Attributes:
      parts: the records of each dataset, by name, as far as stages are read; several in
        the same part of a mixture are numbered, such as `web#2`.
      is_tokenized: whether its records become tokens, by `Tokens`.
      is_read: whether the watched record was read.

    Raises:
      DataError: if rows of this pipeline cannot be followed.
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
        # The dataset and the record of each document that is numbered, and its tokens.
        self._documents: list[tuple[str, int]] = []
        self._num_tokens: list[int | None] = []
        self._shard, self._row = shard, max(row, shard_rows.row_of(cursor))
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

    def go_on(self, make_shard: shard_steps.MakeShard) -> None:
        """Continues with other weights or datasets, or in another stage."""
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
        """Whether the watched record became a document of tokens."""
        return bool(self._watched and self._documents)

    @property
    def watched_tokens(self) -> int | None:
        """The tokens of this document; None until they are made."""
        known = [number for number in self._num_tokens if number is not None]
        return max(known, default=None) if self._watched else None

    def cursor(self) -> cursors.Cursor:
        """The cursor after the last row."""
        return shard_rows.cursor_of(self._row, self._rows)

    def close(self) -> None:
        """Closes what is open."""
        self._rows.close()

    def numbered(self, record: _Number) -> int:
        """The number, from 1, of a document; 0 if another is watched."""
        document = record.dataset, int(record)
        if self._watched not in (None, document):
            return 0
        self._documents.append(document)
        self._num_tokens.append(None)
        return len(self._documents)

    def note_tokens(self, document: int, num_tokens: int) -> None:
        """Notes the tokens of a document; threads call it."""
        if document:
            self._num_tokens[document - 1] = num_tokens

    def _tagged(self, dataset: str, number: int) -> _Number:
        self.is_read |= self._watched == (dataset, number)
        tagged = _Number(number)
        tagged.dataset = dataset
        return tagged

    def _followed(self, make_shard: shard_steps.MakeShard, shard: int) -> Any:
        # A pipeline whose records have numbers, and whose tokens, if there are any, are
        # replaced.
        made: Any = make_shard(shard)
        for name, each in parts(made).items():
            self.parts.setdefault(name, each)
            each.tag = functools.partial(self._tagged, name)
        for each in shard_steps.datasets(made):
            if isinstance(each, documents.Tokens):
                self.is_tokenized = True
                _check_after(each, made)
                # Several pipelines may share a dataset, which was followed before.
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
                # Of another document than the one that is watched, or padding.
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
        is_unknown = others and not all(isinstance(each, _Number) for each in found)
        if number is None or is_unknown:
            raise errors.DataError(
                f"{_UNKNOWN}make_shard makes no tokens with Tokens, and the field"
                f" {records.RECORD!r} of Records is changed or missing in its rows;"
                " leave it in them as it is; if a row is made of several records, read"
                " the run's batches again, with ec.data.LocalBatches, and search their"
                " rows for the document"
            )
        named = [(getattr(each, "dataset", only), int(each)) for each in found]
        return [self._whole(*each) for each in named if self._watched in (None, each)]

    def _whole(self, dataset: str, number: int) -> Piece:
        file, record, epoch = records.origin(self.parts[dataset], number)
        return Piece(dataset=dataset, file=file, record=record, epoch=epoch)


@dataclasses.dataclass(frozen=True)
class _Documents:
    """Documents whose tokens name themselves.

    Attributes:
      of: makes their tokens.
      shard: numbers them.
    """

    of: documents.Encoder
    shard: FollowedShard

    def value(self, element: dict[str, Any]) -> tuple[Any, int]:
        """What is encoded of a record, and the number of the document."""
        value = self.of.value(element)
        record = element.get(records.RECORD)
        if not isinstance(record, _Number):
            raise errors.DataError(
                f"{_UNKNOWN}a function before Tokens drops or changes the field"
                f" {records.RECORD!r} of Records; leave it in the elements that it"
                " returns"
            )
        return value, self.shard.numbered(record)

    def tokens(self, values: Sequence[tuple[Any, int]]) -> list[np.ndarray]:
        """The numbers of the tokens of each."""
        made = self.of.tokens([value for value, _ in values])
        named = []
        for (_, document), tokens in zip(values, made, strict=True):
            self.shard.note_tokens(document, len(tokens))
            first = document << _INDEX_BITS
            named.append(np.arange(first, first + len(tokens), dtype=np.int64))
        return named


def parts(made: Any) -> dict[str, records.Records]:
    """The records that a pipeline reads, by the names of its datasets.

    Raises:
      DataError: if there are none.
    """
    found: dict[str, records.Records] = {}
    for name, each in mixing.by_name(made):
        if isinstance(each, records.Records) and each not in found.values():
            number = sum(other.partition("#")[0] == name for other in found) + 1
            found[f"{name}#{number}" if number > 1 else name] = each
    if not found:
        raise errors.DataError(
            f"{_UNKNOWN}make_shard reads no ec.data.Records, whose fields name them;"
            " read its files with Records"
        )
    return found


def read_until(
    cursor: cursors.Cursor, name: str, *, is_exact: bool = False
) -> tuple[int, int] | None:
    """Up to where a shard read a dataset when all of its buffers were last empty.

    Args:
      cursor: of the shard; None at its beginning.
      name: of the dataset.
      is_exact: whether the steps of the dataset itself must have no buffer: a mixture
        opens a dataset, and fills its buffer again, when its turn comes.

    Returns:
      As of `records.Turn.at`; None if it is not known.
    """
    states = mixing.states_by_name(shard_rows.state_of(cursor))
    found = [records.place_in(state) for of_part, state in states if of_part == name]
    if not found:
        # It was not opened yet, unless it is one of several of the same name.
        return None if "#" in name else (0, 0)
    if name and is_exact:
        return found[0]
    places = [place for place in found if place is not None]
    return places[0] if len(places) == 1 else None


def _check_after(tokens: Any, made: Any) -> None:
    # Raises a DataError if functions of the user's work on tokens.
    for each in shard_steps.datasets(made):
        is_ours = type(each).__module__.startswith("elastic_ckpt.")
        leaves = shard_steps.passes_on(each) or type(each).__name__ in _LEAVING
        if tokens in shard_steps.datasets(each) and not is_ours and not leaves:
            raise errors.DataError(
                f"{_UNKNOWN}{shard_steps.shown(each)}, of your own code, works on"
                " tokens; apply it to records, before Tokens"
            )
