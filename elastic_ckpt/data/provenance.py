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

import array
import copy
import dataclasses
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
    stage_shards,
)
from elastic_ckpt.data.lm import documents, rows

# The bits of a token's index in its document; above them is the document's number.
_INDEX_BITS = 31
_INDICES = (1 << _INDEX_BITS) - 1

# The feature of packed rows that numbers their documents.
_SEGMENTS = "inputs_segmentation"
_SEARCH = (
    "read the run's batches again, with ec.data.LocalBatches, and search their rows for"
    " the document"
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
    """The number of a record, which also has the number of its dataset."""

    part: int


class FollowedShard:
    """The rows of a logical shard, as the documents that they are made of.

    Args:
      make_shard: makes the pipeline of a shard, also that of a stage of a run.
      shard: the shard's number.
      cursor: where to begin; None for the beginning.
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
        watched: tuple[str, int] | None = None,
    ) -> None:
        self.shard = shard
        self.parts: dict[str, records.Records] = {}
        self.is_tokenized = self.is_read = self._has_ended = False
        # The names of parts, by number.
        self._names: list[str] = []
        self._watched: tuple[int, int] | None = None
        if watched is not None:
            name, record = watched
            self._watched = self._number_of(name), record
        self._watched_documents: set[int] = set()
        # Of each document, the number of its part, that of its record, and its tokens.
        self._part_of = array.array("i")
        self._record_of = array.array("q")
        self._tokens_of = array.array("q")
        if isinstance(make_shard, stage_shards.StagedShards):
            self._made = make_shard.mapped(self._followed)(shard)
        else:
            self._made = self._followed(make_shard(shard))
        self._state = shard_rows.from_json(shard_rows.state_of(cursor))
        self._row = shard_rows.row_of(cursor)
        self._rows = shard_rows.iterator(self._made, cursor, self._row)

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
        return bool(self._watched_documents)

    @property
    def watched_tokens(self) -> int | None:
        """The tokens of this document; None until they are made."""
        numbers = (self._tokens_of[document] for document in self._watched_documents)
        return max((number for number in numbers if number >= 0), default=None)

    def reads_again(self, name: str) -> bool:
        """Whether a dataset reads the watched record for its next element, or before.

        Datasets of a mixture are opened when their turn comes, which may be late.

        Args:
          name: of the dataset; the pipeline must not have been asked for a row.
        """
        states = mixing.states_by_name(self._state)
        state = next((each for of, each in states if of == name), None)
        if state is None:
            return False
        datasets = mixing.by_name(self._made)
        dataset = next((each for of, each in datasets if of == name), None)
        if dataset is None:
            # It is not known: a later stage may read it.
            return True
        elements = iter(dataset)
        elements.set_state(copy.deepcopy(state))
        next(elements, None)
        elements.close()
        return self.is_read

    def cursor(self) -> cursors.Cursor:
        """The cursor after the last row."""
        return shard_rows.cursor_of(self._row, self._rows)

    def close(self) -> None:
        """Closes what is open."""
        self._rows.close()

    def note_read(self, part: int, number: int) -> None:
        """Notes that a record is read."""
        self.is_read |= self._watched == (part, number)

    def numbered(self, part: int, record: int) -> int:
        """The number, from 1, of the next document that is read."""
        self._part_of.append(part)
        self._record_of.append(record)
        self._tokens_of.append(-1)
        if self._watched == (part, record):
            self._watched_documents.add(len(self._part_of) - 1)
        return len(self._part_of)

    def note_tokens(self, document: int, num_tokens: int) -> None:
        """Notes the tokens of a document; threads call it."""
        self._tokens_of[document - 1] = num_tokens

    def _number_of(self, name: str) -> int:
        # The number of a part.
        if name not in self._names:
            self._names.append(name)
        return self._names.index(name)

    def _followed(self, made: Any) -> Any:
        # A pipeline whose records have numbers, and whose tokens, if there are any, are
        # replaced.
        mixing.all_made(made)
        for name, each in parts(made).items():
            self.parts.setdefault(name, each)
            each.tag = _Tag(self, self._number_of(name))
        for tokens in shard_steps.datasets(made):
            if not isinstance(tokens, documents.Tokens):
                continue
            self.is_tokenized = True
            code = _own_code_after(made, tokens)
            if code:
                raise errors.DataError(
                    f"the documents of these rows cannot be told: {code[0]}, of your"
                    " own code, works on tokens; apply it to records, before Tokens"
                )
            # Several pipelines may share a dataset, which was followed before.
            of = getattr(tokens.documents, "of", tokens.documents)
            tokens.documents = cast(Any, _Documents(of, self))
        for each in shard_steps.datasets(made):
            if isinstance(each, rows.Rows) and self.is_tokenized:
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
        if not named or (self._watched and not self._watched_documents):
            return []
        numbers = named[0][named[0] > _INDICES]
        begins = np.flatnonzero(np.diff(numbers, prepend=-1) != 1)
        sizes = np.diff(begins, append=len(numbers)).tolist()
        pieces = zip(numbers[begins].tolist(), sizes, strict=True)
        return [
            self._piece(number >> _INDEX_BITS, number & _INDICES, size)
            for number, size in pieces
            if not self._watched
            or (number >> _INDEX_BITS) - 1 in self._watched_documents
        ]

    def _piece(self, document: int, first: int, size: int) -> Piece:
        at = document - 1
        return dataclasses.replace(
            self._whole(self._part_of[at], self._record_of[at]),
            first_token=first,
            num_tokens=size,
            document_tokens=self._tokens_of[at],
        )

    def _records(self, row: Any) -> list[Piece]:
        number = row.get(records.RECORD) if isinstance(row, dict) else None
        if number is None and isinstance(row, dict) and _SEGMENTS in row:
            raise errors.DataError(
                "the documents of these rows cannot be told: they are packed of"
                " documents that Tokens has not made, as MultimodalRows does, and"
                f" name none of them; {_SEARCH}"
            )
        if number is None:
            raise errors.DataError(
                "the documents of these rows cannot be told: make_shard makes no tokens"
                f" with Tokens, and its rows have no field {records.RECORD!r}; leave"
                " this field of Records in them; if a row is made of several records,"
                f" {_SEARCH}"
            )
        pieces = []
        for each in [number] if isinstance(number, int) else np.ravel(number).tolist():
            part = getattr(each, "part", 0)
            if not isinstance(each, _Number) and len(self.parts) > 1:
                raise errors.DataError(
                    "the documents of these rows cannot be told: make_shard reads"
                    f" {len(self.parts)} datasets, and changes the field"
                    f" {records.RECORD!r} of their elements; leave it as it is"
                )
            if self._watched in (None, (part, each)):
                pieces.append(self._whole(part, int(each)))
        return pieces

    def _whole(self, part: int, number: int) -> Piece:
        name = self._names[part]
        origin = records.origin(self.parts[name], number)
        return Piece(
            dataset=name, file=origin.file, record=origin.record, epoch=origin.epoch
        )


@dataclasses.dataclass(frozen=True)
class _Documents:
    """Documents whose tokens name themselves.

    Attributes:
      of: makes their tokens.
      shard: numbers them.
    """

    of: documents.Encoder
    shard: FollowedShard

    def __getattr__(self, name: str) -> Any:
        return getattr(self.of, name)

    def value(self, element: dict[str, Any]) -> tuple[Any, int]:
        """What is encoded of a record, and the number of the document."""
        value = self.of.value(element)
        record = element.get(records.RECORD)
        if not isinstance(record, _Number):
            raise errors.DataError(
                "the documents of these rows cannot be told: a function before Tokens"
                f" drops or changes the field {records.RECORD!r} of Records; leave it"
                " in the elements that it returns"
            )
        return value, self.shard.numbered(record.part, int(record))

    def tokens(self, values: Sequence[tuple[Any, int]]) -> list[np.ndarray]:
        """The numbers of the tokens of each."""
        made = self.of.tokens([value for value, _ in values])
        named = []
        for (_, document), tokens in zip(values, made, strict=True):
            self.shard.note_tokens(document, len(tokens))
            first = document << _INDEX_BITS
            named.append(np.arange(first, first + len(tokens), dtype=np.int64))
        return named


@dataclasses.dataclass(frozen=True, slots=True)
class _Tag:
    # Numbers of records that also have the number of their dataset.
    shard: FollowedShard
    part: int

    def __call__(self, number: int) -> int:
        self.shard.note_read(self.part, number)
        tagged = _Number(number)
        tagged.part = self.part
        return tagged


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
            "the documents of these rows cannot be told: make_shard reads no"
            " ec.data.Records, whose fields name them; read its files with Records"
        )
    return found


def read_until(cursor: cursors.Cursor, name: str) -> tuple[int, int] | None:
    """Up to where a shard read a dataset when all of its buffers were last empty.

    Args:
      cursor: of the shard; None at its beginning.
      name: of the dataset.

    Returns:
      As of `records.Turn.at`; None if it is not known.
    """
    # Documents of an older stage that are not used up are in a buffer, too.
    oldest = stage_shards.oldest(shard_rows.state_of(cursor))
    found = [
        place
        for of_part, state in mixing.states_by_name(oldest)
        if of_part == name and (place := records.place_in(state)) is not None
    ]
    if not found:
        # It was not opened yet, unless it is one of several of the same name.
        return None if "#" in name else (0, 0)
    return found[0] if len(found) == 1 else None


def _own_code_after(made: Any, before: Any) -> list[str]:
    # The datasets between `before` and the end of a pipeline that run functions of the
    # user's.
    after = [
        each
        for each in shard_steps.datasets(made)
        if each is not before
        and any(one is before for one in shard_steps.datasets(each))
    ]
    return [shard_steps.shown(each) for each in after if _runs_own_code(each)]


# Steps of Grain's that leave elements as they are.
_LEAVING = (
    "LimitIterDataset",
    "MixedIterDataset",
    "RepeatIterDataset",
    "WindowShuffleIterDataset",
)


def _runs_own_code(dataset: Any) -> bool:
    is_ours = type(dataset).__module__.startswith("elastic_ckpt.")
    leaves = shard_steps.passes_on(dataset) or type(dataset).__name__ in _LEAVING
    return not is_ours and not leaves
