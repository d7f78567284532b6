"""Rows of documents: cut, shuffled and packed, a chapter at a time.

A chapter is the next few groups of a shard's documents. What cuts, shuffles and packs
them is a function of the chapter alone, and outside of it nothing is held. So the state
is where the chapter's documents were read from, and how many of its rows were taken; to
go on, they are read again.
"""

from __future__ import annotations

import bisect
import operator
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import grain
import numpy as np
import xxhash

from elastic_ckpt.core import errors, storage
from elastic_ckpt.data import cursors, mixing, shard_steps
from elastic_ckpt.data import tokens as token_numbers
from elastic_ckpt.data.sources import files

FIRST_FIT = "first_fit"
BEST_FIT = "best_fit"
CONCAT_THEN_SPLIT = "concat_then_split"
PACKINGS = (FIRST_FIT, BEST_FIT, CONCAT_THEN_SPLIT)

FEATURES = (
    "inputs",
    "targets",
    "inputs_segmentation",
    "targets_segmentation",
    "inputs_position",
    "targets_position",
)

# The rows that a chapter has at least: so many that rows are 97 % full, but about this
# number of tokens where rows are long. The first chapters are short, for the first
# batch waits for those of all shards.
_MOST_ROWS, _LEAST_ROWS = 32, 4
_CHAPTER_TOKENS = 2**17
# The documents that are read together, and those of the first chapter.
_GROUP, _FIRST_GROUP = 128, 8

Row = dict[str, np.ndarray]
# An array of tokens, or a dict with `tokens` and further features.
Document = Any
# Inputs of a document: its number in the chapter, the first of them, and how many.
Piece = tuple[int, int, int]


class Unmade(NamedTuple):
    """A row before its arrays are made.

    Attributes:
      tokens: of each document of the chapter.
      documents: the same with further features.
      pieces: what the row has of them.
    """

    tokens: list[np.ndarray]
    documents: list[Document]
    pieces: list[Piece]


class Rows(shard_steps.Step[Row]):
    """Makes rows of `length` tokens of documents.

    A document of n tokens has n - 1 inputs, each with the next token as its target; one
    of fewer than two tokens has none. Each row has, int32 `[length]`,

    * `inputs` and `targets`;
    * `inputs_segmentation` and `targets_segmentation`: the documents of the row,
      numbered from 1; 0 in padding;
    * `inputs_position` and `targets_position`: the tokens of each document in the row,
      numbered from 0.

    A token of which no loss counts, such as one that a user says, is `~token` in its
    document. As an input it is `token`; as a target it is 0, and 0 in
    `targets_segmentation`.

    Args:
      parent: documents, arrays of tokens `[tokens]`; with `features` dicts of arrays
        of one length, of `tokens` and of these features.
      length: tokens of a row.
      packing: `"first_fit"` or `"best_fit"`, which put each document whole into a row;
        `"concat_then_split"`, which fills rows and cuts documents at their ends; or
        empty, which gives each document a row of its own.
      window: documents that are shuffled together, at least; 0 shuffles none.
      seed: of the shuffle, a number from 0; shards differ by themselves.
      shard: the number of the shard.
      max_examples: the most documents in a row that is fitted; 0 sets no limit.
      features: further features of documents; rows have those of their inputs.
      truncate: whether a document ends after `length` inputs; otherwise what is longer
        than a row is cut into several.
      vocab_size: rows of the model's embedding; a token that is not below it is an
        error. 0 checks none.

    Raises:
      ConfigError: if a value is not as described.
    """

    # Chapters read their documents again, by the weights that they were read by.
    renews = True

    def __init__(
        self,
        parent: grain.IterDataset,
        *,
        length: int,
        packing: str = FIRST_FIT,
        window: int = 0,
        seed: int = 0,
        shard: int = 0,
        max_examples: int = 0,
        features: Sequence[str] = (),
        truncate: bool = True,
        vocab_size: int = 0,
    ) -> None:
        super().__init__(parent)
        if packing not in ("", *PACKINGS):
            raise errors.ConfigError(
                f"Rows: packing={packing!r}; choose one of {', '.join(PACKINGS)}, or"
                " '' to give each document a row"
            )
        for name, value, least in (
            ("length", length, 1),
            ("window", window, 0),
            ("seed", seed, 0),
            ("max_examples", max_examples, 0),
        ):
            if value < least:
                raise errors.ConfigError(f"Rows: {name}={value}; give {least} or more")
        if max_examples and packing == CONCAT_THEN_SPLIT:
            raise errors.ConfigError(
                f"Rows: max_examples={max_examples} does not work with"
                " packing='concat_then_split', which cuts documents wherever a row is"
                " full; set it to 0, or pack by first_fit or best_fit"
            )
        self.features = files.names(features, argument="Rows: features")
        if clashing := {"tokens", *FEATURES} & {*self.features}:
            raise errors.ConfigError(
                f"Rows: features={self.features!r}: {sorted(clashing)} are there in any"
                " case; name only further features, or rename these"
            )
        self.length, self.packing, self.truncate = length, packing, truncate
        self.window, self.shard, self.key = window, shard, (seed, shard)
        self.max_examples, self.vocab_size = max_examples, vocab_size
        # Of inputs and targets; another if `provenance` follows documents.
        self.dtype: Any = np.int32

    def __iter__(self) -> RowsIterator:
        return RowsIterator(self)

    def __str__(self) -> str:
        return f"Rows(shard={self.shard})"

    def settings(self) -> dict[str, storage.Json]:
        """What determines the rows of the parent's documents, but for the shard."""
        return {
            "length": self.length,
            "packing": self.packing,
            "window": self.window,
            "seed": self.key[0],
            "max_examples": self.max_examples,
            "features": list(self.features),
            "truncate": self.truncate,
        }


def begin_from(place: Any) -> dict[str, Any]:
    """The state of rows that begin with a state of their documents."""
    state = {"skip": 0, "used": 0, "chapter": 0, "ended": False, "row": 0}
    return {cursors.FROM: [[place, 0]], **state}


class _Group(NamedTuple):
    """Documents that were read together.

    Attributes:
      place: the state from which they were read.
      reads_on: whether that is where the group before ended.
      documents: as they are held.
      tokens: of each, int32, uint16 or the `dtype` of the rows.
      sizes: the inputs of each; less than 1 if there are none.
    """

    place: Any
    reads_on: bool
    documents: list[Document]
    tokens: list[np.ndarray]
    sizes: list[int]


class RowsIterator(grain.DatasetIterator[Row]):
    """The rows of `Rows`.

    The state has, in `from`, the states of the documents from which those that are held
    were read, each with how many; `skip` and `used`, the documents and the inputs of
    the next one that earlier chapters used up; `chapter`, its number; `ended`, whether
    its documents are the last; `row`, the rows that were taken of it; and `digest`,
    of the tokens that are held.
    """

    def __init__(self, rows: Rows) -> None:
        (parent,) = shard_steps.parents(rows)
        self.documents = iter(parent)
        super().__init__(self.documents)
        self.of = rows
        self._is_cut = rows.packing == CONCAT_THEN_SPLIT
        self._most_tokens = rows.length + 1 if rows.truncate else 2**62
        self._counted = np.arange(rows.length + 1, dtype=np.int32)
        self._dtypes = {np.dtype(each) for each in (np.int32, np.uint16, rows.dtype)}
        self._hold(skip=0, used=0, chapter=0)

    def _hold(self, *, skip: int, used: int, chapter: int) -> None:
        self._groups: list[_Group] = []
        self._reads_on = False
        self._skip, self._used, self._number = skip, used, chapter
        # The chapter: its state, documents, and rows.
        self._begin: dict[str, Any] = {}
        self._held: list[Document] = []
        self._tokens: list[np.ndarray] = []
        self._rows: list[list[Piece]] = []
        self._next = 0

    def __next__(self) -> Row:
        made = self.made([self.unmade()])
        return {name: each[0] for name, each in made.items()}

    def unmade(self) -> Unmade:
        """The next row, of which `made` makes arrays."""
        while self._next == len(self._rows):
            self._read_chapter()
        self._next += 1
        return Unmade(self._tokens, self._held, self._rows[self._next - 1])

    def made(self, rows: Sequence[Unmade | None]) -> Row:
        """Several rows, as features `[rows, length, ...]`; None is a row of zeros."""
        length = self.of.length
        inputs, targets = np.empty((2, len(rows), length), self.of.dtype)
        segments, positions = np.empty((2, len(rows), length), np.int32)
        zeros, counted = np.zeros(length, np.uint16), self._counted
        some: list[list[np.ndarray]] = [[], [], [], []]
        for row in rows:
            tokens, pieces = (row.tokens, row.pieces) if row else ([], [])
            sizes = [size for _, _, size in pieces]
            some[0] += [tokens[n][a : a + size] for n, a, size in pieces]
            some[1] += [tokens[n][a + 1 : a + 1 + size] for n, a, size in pieces]
            some[2] += [counted[:size] for size in sizes]
            some[3].append(np.repeat(counted[1 : len(sizes) + 1], sizes))
            padding = zeros[: length - sum(sizes)]
            for each in some if len(padding) else ():
                each.append(padding)
        arrays = (inputs, targets, positions, segments)
        for each, out in zip(some, arrays, strict=True):
            np.concatenate(each, out=out.reshape(-1))
        made = {
            "inputs": inputs,
            "targets": targets,
            "inputs_segmentation": segments,
            "targets_segmentation": segments.copy(),
            "inputs_position": positions,
            "targets_position": positions.copy(),
        }
        if self.of.vocab_size and self.of.dtype == np.int32:
            _check_vocabulary(self.of.vocab_size, inputs, targets)
        elif min(inputs.min(), targets.min()) < 0:
            np.copyto(inputs, ~inputs, where=inputs < 0)
            made["targets_segmentation"][targets < 0] = 0
            targets[targets < 0] = token_numbers.PAD
        return made | self.more(rows)

    def get_state(self) -> dict[str, Any]:
        """See `grain.DatasetIterator`."""
        if self._next == len(self._rows):
            return self._state(ended=False)
        return {**self._begin, "row": self._next}

    def set_state(self, state: dict[str, Any]) -> None:
        """See `grain.DatasetIterator`."""
        self._hold(skip=state["skip"], used=state["used"], chapter=state["chapter"])
        for place, num_documents in state[cursors.FROM]:
            self.documents.set_state(place)
            self._reads_on = False
            self._read(num_documents)
        if self.of.dtype == np.int32 and self._digest() != state.get("digest", ""):
            raise errors.DataError(
                f"logical shard {self.of.shard}: the documents that rows of the saved"
                " state are made of are others now; make_shard has to make the same of"
                " a record each time, so give its random functions a seed, and"
                " pipeline= another name if they have changed"
            )
        if state["row"]:
            self._make_rows(ended=state["ended"])
            self._next = state["row"]

    @property
    def chapter(self) -> int:
        """The number of the next chapter."""
        return self._number

    def renew(self) -> bool:
        """See `mixing.renew`; weights change with the next chapter."""
        return False

    def rest(self) -> list[Document]:
        """The documents, or parts of some, that were read and are in no row yet."""
        left = [
            self.cut(self._held[number], first, first + size + 1)
            for row in self._rows[self._next :]
            for number, first, size in row
        ]
        after = [each for group in self._groups for each in group.documents]
        after = after[self._skip :]
        if self._used:
            after[0] = self.cut(after[0], self._used, None)
        return left + after

    def checked(self, documents: list[Document]) -> list[Document]:
        """Documents as they are held.

        Raises:
          DataError: if one is not as described.
        """
        expected = ("tokens", *self.of.features)
        for document in documents if self.of.features else ():
            if not isinstance(document, dict) or document.keys() != {*expected}:
                is_dict = isinstance(document, dict)
                found = sorted(document) if is_dict else type(document)
                raise errors.DataError(
                    f"a document to pack has {found}; Rows expects a dict of"
                    f" {', '.join(expected)}: name further features in its features=,"
                    " or leave them out before"
                )
            lengths = {name: len(values) for name, values in document.items()}
            if len({*lengths.values()}) > 1:
                raise errors.DataError(
                    f"a document to pack has features of several lengths, {lengths};"
                    " give each a value for each token"
                )
        return documents

    def tokens(self, document: Document) -> Any:
        """The tokens of a document."""
        return document["tokens"] if self.of.features else document

    def cut(self, document: Document, first: int, stop: int | None) -> Document:
        """Some tokens of a document, with their features."""
        if not self.of.features:
            return document[first:stop]
        return {name: values[first:stop] for name, values in document.items()}

    def costs(self, document: Document) -> tuple[int, ...]:
        """What a document takes of each of `limits`."""
        del document
        return (1,) if self.of.max_examples else ()

    def limits(self) -> tuple[int, ...]:
        """What the documents of a row may take, beside its tokens."""
        return (self.of.max_examples,) if self.of.max_examples else ()

    def more(self, rows: Sequence[Unmade | None]) -> Row:
        """The further features of some rows."""
        more: Row = {}
        for name in self.of.features:
            values = [
                [row.documents[n][name][a : a + size] for n, a, size in row.pieces]
                if row
                else []
                for row in rows
            ]
            like = next(each for row in values for each in row)
            shape = (len(rows), self.of.length, *like.shape[1:])
            more[name] = np.zeros(shape, like.dtype)
            for out, row in zip(more[name], values, strict=True):
                if row:
                    joined = np.concatenate(row)
                    out[: len(joined)] = joined
        return more

    def _state(self, *, ended: bool) -> dict[str, Any]:
        places: list[list[Any]] = []
        for group in self._groups:
            if places and group.reads_on:
                places[-1][1] += len(group.documents)
            else:
                places.append([group.place, len(group.documents)])
        return {
            cursors.FROM: places or [[self.documents.get_state(), 0]],
            "skip": self._skip,
            "used": self._used,
            "chapter": self._number,
            "ended": ended,
            "row": 0,
            "digest": self._digest(),
        }

    def _digest(self) -> str:
        # Of the tokens of all documents that are held and not used up.
        held = [each for group in self._groups for each in group.tokens][self._skip :]
        if not held or self.of.dtype != np.int32:
            return ""
        sizes = np.array(list(map(len, held)), np.int32)
        return xxhash.xxh3_64_hexdigest(np.concatenate([sizes, *held]).data)

    def _read(self, num_documents: int) -> int:
        # Reads documents, and returns the number of their inputs; 0 at the end.
        place = self.documents.get_state()
        try:
            some = self.checked(shard_steps.take(self.documents, num_documents))
            tokens = self._tokens_of(some)
        except Exception:
            # Those before the error are read again, if it is asked again.
            self.documents.set_state(place)
            self._reads_on = False
            raise
        if not some:
            return 0
        most = self._most_tokens
        sizes = [min(len(each), most) - 1 for each in tokens]
        self._groups.append(_Group(place, self._reads_on, some, tokens, sizes))
        self._reads_on = True
        return max(sum(sizes), 1)

    def _tokens_of(self, documents: list[Document]) -> list[np.ndarray]:
        tokens = documents
        if {*map(type, documents)} != {np.ndarray}:
            tokens = [self.tokens(each) for each in documents]
        if all(map(self._is_plain, tokens)):
            return tokens
        return [_narrowed(each) for each in tokens]

    def _is_plain(self, tokens: Any) -> bool:
        is_array = type(tokens) is np.ndarray and tokens.ndim == 1
        return is_array and tokens.dtype in self._dtypes

    def _read_chapter(self) -> None:
        if mixing.renew(self.documents):
            self._reads_on = False
        first = _FIRST_GROUP << min(self._number, 8)
        group = max(self.of.window, min(first, _GROUP))
        num_rows = min(max(_CHAPTER_TOKENS // self.of.length, _LEAST_ROWS), _MOST_ROWS)
        num_rows = min(num_rows, _LEAST_ROWS << min(self._number, 8))
        held = [size for each in self._groups for size in each.sizes][self._skip :]
        missing = num_rows * self.of.length + self._used - sum(held)
        ended = False
        while missing > 0 and not ended:
            num_inputs = self._read(group)
            missing -= num_inputs
            ended = not num_inputs
        self._make_rows(ended=ended)
        if ended and not self._rows:
            raise StopIteration

    def _make_rows(self, *, ended: bool) -> None:
        self._begin = self._state(ended=ended)
        groups, skip = self._groups, self._skip
        self._tokens = [each for group in groups for each in group.tokens][skip:]
        self._held = self._tokens
        if any(group.documents is not group.tokens for group in groups):
            self._held = [each for group in groups for each in group.documents][skip:]
        sizes = [each for group in groups for each in group.sizes][skip:]
        pieces, used = self._pieces(sizes), (len(sizes), 0)
        if self._is_cut and not ended:
            pieces, used = _full(pieces, self.of.length, used)
        if self.of.window:
            generator = np.random.default_rng([*self.of.key, self._number])
            order = generator.permutation(len(pieces)).tolist()
            pieces = [pieces[number] for number in order]
        if self._is_cut:
            self._rows = _concatenated(pieces, self.of.length)
        elif self.of.packing:
            self._rows = fitted(
                pieces,
                [self.costs(self._held[number]) for number, _, _ in pieces],
                self.limits(),
                length=self.of.length,
                is_best=self.of.packing == BEST_FIT,
            )
        else:
            self._rows = [[piece] for piece in pieces]
        self._next = 0
        self._number += 1
        self._skip, self._used = skip + used[0], used[1]
        while groups and self._skip >= len(groups[0].documents):
            self._skip -= len(groups.pop(0).documents)

    def _pieces(self, sizes: list[int]) -> list[Piece]:
        pieces, longest = [], 2**62 if self._is_cut else self.of.length
        first = self._used
        for number, size in enumerate(sizes):
            if size - first > longest:
                begins = range(first, size, longest)
                pieces += [(number, n, min(longest, size - n)) for n in begins]
            elif size > first:
                pieces.append((number, first, size - first))
            first = 0
        return pieces


def _narrowed(tokens: Any) -> np.ndarray:
    is_array = isinstance(tokens, np.ndarray) and tokens.ndim == 1
    if is_array and np.issubdtype(tokens.dtype, np.integer):
        return token_numbers.narrowed(tokens, place="a document to pack")
    raise errors.DataError(
        f"a document to pack is a {type(tokens).__name__}; Rows takes arrays of"
        " integers, [tokens]"
    )


def _full(
    pieces: list[Piece], length: int, used: tuple[int, int]
) -> tuple[list[Piece], tuple[int, int]]:
    # The pieces that fill rows; and the documents, and inputs of the next, in them.
    rest = sum(size for _, _, size in pieces) % length
    while rest:
        number, first, size = pieces.pop()
        some = min(size, rest)
        if some < size:
            pieces.append((number, first, size - some))
        used, rest = (number, first + size - some), rest - some
    return pieces, used


def _concatenated(pieces: list[Piece], length: int) -> list[list[Piece]]:
    rows: list[list[Piece]] = []
    free = 0
    for number, first, size in pieces:
        while size:
            if not free:
                rows.append([])
                free = length
            some = min(size, free)
            rows[-1].append((number, first, some))
            first, size, free = first + some, size - some, free - some
    return rows


def fitted(
    pieces: Iterable[Piece],
    costs: Iterable[tuple[int, ...]],
    limits: tuple[int, ...],
    *,
    length: int,
    is_best: bool,
) -> list[list[Piece]]:
    """Rows of whole pieces, each in the first row that has room, or the fullest one.

    Args:
      pieces: of at most `length` inputs.
      costs: what each of them takes of each limit.
      limits: what the pieces of a row take at most.
      length: of a row.
      is_best: whether it is the fullest.
    """
    rows: list[list[Piece]] = []
    left: list[tuple[int, ...]] = []
    # The room and the number of each row that has some; by room if `is_best`.
    free: list[tuple[int, int]] = []
    for piece, cost in zip(pieces, costs, strict=True):
        size = piece[2]
        begin = bisect.bisect_left(free, (size, -1)) if is_best else 0
        for at in range(begin, len(free)):
            room, row = free[at]
            if room >= size and (not cost or all(map(operator.le, cost, left[row]))):
                del free[at]
                break
        else:
            at, room, row = len(free), length, len(rows)
            rows.append([])
            left.append(limits)
        rows[row].append(piece)
        if cost:
            left[row] = tuple(map(operator.sub, left[row], cost))
        if is_best:
            bisect.insort(free, (room - size, row))
        elif room > size:
            free.insert(at, (room - size, row))
    return rows


def _check_vocabulary(vocab_size: int, *arrays: np.ndarray) -> None:
    for numbers in arrays:
        # Viewed as unsigned numbers, negative ones are the largest.
        is_wrong = numbers.view(np.uint32) >= vocab_size
        if is_wrong.any():
            raise errors.DataError(
                f"a document has the token {numbers[is_wrong][0]}, but the model's"
                f" vocabulary has tokens from 0 to {vocab_size - 1}; set vocab_size to"
                " that of the tokenizer that made the tokens"
            )
