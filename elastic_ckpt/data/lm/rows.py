"""Rows of documents: split, shuffled and packed, a chapter at a time.

A chapter is the next few groups of a shard's documents. Splitting, shuffling and
packing depend only on the chapter, and nothing else is buffered. The state therefore
consists of the place from which the chapter's documents were read and the number of
rows taken from the chapter; a resumed run rereads the documents.
"""

from __future__ import annotations

import bisect
import itertools
import operator
from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple

import grain
import numpy as np
import xxhash

from elastic_ckpt.core import errors, storage
from elastic_ckpt.data import cursors, mixing, records, shard_steps
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

# The number of rows in a chapter: 48 rows of whole documents are 95% to 99% full. A
# chapter has fewer if 48 rows are too long. If documents stay whole, the chapters of
# all shards share `_FITTED_TOKENS`, 1 GiB if one host runs them all. If not, rows are
# full anyway, and a resumed run rereads less than `_OTHER_TOKENS` of each shard.
_MOST_ROWS, _LEAST_ROWS = 48, 4
_FITTED_TOKENS, _OTHER_TOKENS = 2**28, 2**17
# The part of a row that a chapter of whole documents leaves free, because they rarely
# fill rows completely.
_FREE = 0.02
# Maximum number of documents read at a time.
_GROUP = 4096
# From this chapter on, all chapters have the same length.
_LATER = 8
# More inputs than any document has.
_ENDLESS = 2**62

Row = dict[str, np.ndarray]
# An array of tokens, or a dict with `tokens` and other features.
Document = Any
# Consecutive inputs of a document: the index of the first in the chapter, and how many.
Piece = tuple[int, int]


class Held(NamedTuple):
    """Concatenated documents.

    Attributes:
      arrays: `tokens` and other features of all documents, `[tokens, ...]`.
      lengths: the number of tokens in each document, int64 `[documents]`.
      documents: the original documents, if rows need more than the arrays.
    """

    arrays: dict[str, np.ndarray]
    lengths: np.ndarray
    documents: list[Document]

    @property
    def starts(self) -> np.ndarray:
        """The index of the first token of each document."""
        return np.cumsum(self.lengths) - self.lengths


_NOTHING = Held({"tokens": np.empty(0, np.int32)}, np.empty(0, np.int64), [])


class Unmade(NamedTuple):
    """A row before its arrays are built: pieces of a chapter's documents."""

    held: Held
    pieces: list[Piece]


# A row of zeros.
NONE = Unmade(_NOTHING, [])


class Rows(shard_steps.Step[Row]):
    """Packs documents into rows of `length` tokens.

    A document of n tokens has n - 1 inputs, each with the next token as its target; a
    document of fewer than two tokens has none. Each row has these features, int32
    `[length]`:

    * `inputs` and `targets`;
    * `inputs_segmentation` and `targets_segmentation`: the index in the row of each
      token's document, starting at 1; 0 in padding;
    * `inputs_position` and `targets_position`: the index of each token in its part of a
      document, starting at 0.

    A token excluded from the loss, as in a user turn, is stored as `~token`. As
    an input, it becomes `token`; as a target, it becomes 0, with 0 in
    `targets_segmentation`.

    Args:
      parent: a dataset of documents, which are arrays of tokens `[tokens]` or, with
        `features`, dicts of `tokens` and these features, all arrays of the same length.
      length: the number of tokens per row.
      packing: `"first_fit"` or `"best_fit"`, which put each document whole into a row;
        `"concat_then_split"`, which fills rows and splits documents at row ends; or
        empty, which puts each document into its own row.
      window: the minimum number of documents shuffled together; 0 disables shuffling.
      seed: the seed of the shuffle, 0 or more; each shard shuffles differently.
      shard: the shard index.
      max_examples: the maximum number of documents per row, for `"first_fit"` and
        `"best_fit"`; 0 sets no limit.
      features: the names of additional features of documents; rows have their values
        for each input.
      truncate: whether to truncate documents to `length` inputs; otherwise longer
        documents are split.
      vocab_size: the number of rows in the model's embedding; a token outside this
        range is an error. 0 disables the check.

    Raises:
      ConfigError: if an argument is invalid.
    """

    # Chapters reread their documents with the original weights.
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
                " '' to put each document into its own row"
            )
        for name, value, least in (
            ("length", length, 1),
            ("window", window, 0),
            ("seed", seed, 0),
            ("max_examples", max_examples, 0),
        ):
            if value < least:
                raise errors.ConfigError(f"Rows: {name}={value}; pass at least {least}")
        if max_examples and packing == CONCAT_THEN_SPLIT:
            raise errors.ConfigError(
                f"Rows: max_examples={max_examples} does not work with"
                " packing='concat_then_split', which splits documents wherever a row is"
                " full; set max_examples to 0, or pack with first_fit or best_fit"
            )
        self.features = files.names(features, argument="Rows: features")
        if clashing := {"tokens", *FEATURES} & {*self.features}:
            raise errors.ConfigError(
                f"Rows: features={self.features!r} includes {sorted(clashing)}, which"
                " rows always have; list only additional features, or rename these"
            )
        self.length, self.packing, self.truncate = length, packing, truncate
        self.window, self.shard, self.key = window, shard, (seed, shard)
        self.max_examples, self.vocab_size = max_examples, vocab_size
        # The dtype of inputs and targets; `provenance` changes it for its token ids.
        self.dtype: Any = np.int32

    def __iter__(self) -> RowsIterator:
        return RowsIterator(self)

    def __str__(self) -> str:
        return f"Rows(shard={self.shard})"

    def settings(self) -> dict[str, storage.Json]:
        """The settings that determine the rows, except for the shard."""
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
    """The state of rows that begin at the documents' state `place`."""
    state = {"skip": 0, "used": 0, "chapter": 0, "ended": False, "row": 0}
    return {cursors.FROM: [[place, 0]], **state}


class _Group(NamedTuple):
    """Documents that were read together.

    Attributes:
      place: the state from which the documents were read.
      reads_on: whether `place` is where the previous group ended.
      held: the documents.
    """

    place: Any
    reads_on: bool
    held: Held


class RowsIterator(grain.DatasetIterator[Row]):
    """The rows of `Rows`; `FORMAT.md` describes the state."""

    def __init__(self, rows: Rows) -> None:
        (parent,) = shard_steps.parents(rows)
        self.documents = iter(parent)
        super().__init__(self.documents)
        self.of = rows
        self._is_cut = rows.packing == CONCAT_THEN_SPLIT
        self._hold(skip=0, used=0, chapter=0)

    def _hold(self, *, skip: int, used: int, chapter: int) -> None:
        self._groups: list[_Group] = []
        self._reads_on = False
        self._skip, self._used, self._number = skip, used, chapter
        # The current chapter: its state, documents and rows.
        self._begin: dict[str, Any] = {}
        self._held = _NOTHING
        self._rows: list[list[Piece]] = []
        self._next = 0

    def __next__(self) -> Row:
        return {name: each[0] for name, each in self.made([self.unmade()]).items()}

    def unmade(self) -> Unmade:
        """The next row without its arrays, which `made` builds."""
        while self._next == len(self._rows):
            self._read_chapter()
        self._next += 1
        return Unmade(self._held, self._rows[self._next - 1])

    def made(self, rows: Sequence[Unmade | None]) -> Row:
        """Builds the arrays of rows, `[rows, length, ...]`; None is a row of zeros."""
        shape = len(rows), self.of.length
        inputs, targets = np.zeros((2, *shape), self.of.dtype)
        sizes: list[int] = []
        numbers: list[int] = []
        for number, row in enumerate(rows):
            held, pieces = row or NONE
            of_row = [size for _, size in pieces]
            sizes += [*of_row, self.of.length - sum(of_row)]
            numbers += [*range(1, len(pieces) + 1), 0]
            # Joining bytes is twice as fast as concatenating arrays.
            tokens = held.arrays["tokens"]
            for first, out in enumerate((inputs[number], targets[number])):
                some = tokens[first:].data
                joined = b"".join([some[at : at + size] for at, size in pieces])
                out[: sum(of_row)] = np.frombuffer(joined, tokens.dtype)
        ends = np.cumsum(sizes, dtype=np.int32)
        segments = np.repeat(np.array(numbers, np.int32), sizes)
        positions = np.arange(len(segments), dtype=np.int32)
        positions -= np.repeat(ends - sizes, sizes)
        positions *= segments > 0
        segments, positions = segments.reshape(shape), positions.reshape(shape)
        made = {
            "inputs": inputs,
            "targets": targets,
            "inputs_segmentation": segments,
            "targets_segmentation": segments.copy(),
            "inputs_position": positions,
            "targets_position": positions.copy(),
        }
        if min(inputs.min(), targets.min()) < 0:
            np.copyto(inputs, ~inputs, where=inputs < 0)
            made["targets_segmentation"][targets < 0] = 0
            targets[targets < 0] = token_numbers.PAD
        if self.of.vocab_size and self.of.dtype == np.int32:
            _check_vocabulary(self.of.vocab_size, inputs, targets)
        return made | self.more(rows)

    def get_state(self) -> dict[str, Any]:
        """See `grain.DatasetIterator`."""
        if self._next == len(self._rows):
            return self._state(self._all_held(), ended=False)
        return {**self._begin, "row": self._next}

    def set_state(self, state: dict[str, Any]) -> None:
        """See `grain.DatasetIterator`."""
        self._hold(skip=state["skip"], used=state["used"], chapter=state["chapter"])
        for place, num_documents in state[cursors.FROM]:
            self.documents.set_state(place)
            self._reads_on = False
            self._read(num_documents)
        digest = self._digest(self._all_held())
        if self.of.dtype == np.int32 and digest != state.get("digest", ""):
            raise errors.DataError(
                f"logical shard {self.of.shard}: the documents that the saved state"
                " refers to have changed; make_shard must create the same document from"
                " a record each time, so seed its random functions; if you changed the"
                " documents on purpose, also change pipeline="
            )
        if state["row"]:
            self._make_rows(ended=state["ended"])
            self._next = state["row"]

    @property
    def chapter(self) -> int:
        """The index of the next chapter."""
        return self._number

    def renew(self) -> bool:
        """See `mixing.renew`; weights change with the next chapter."""
        return False

    def rest(self) -> list[Document]:
        """The documents, or parts of them, that were read but are not in a row yet."""
        left = [
            self.cut(self._held, at, at + size + 1)
            for row in self._rows[self._next :]
            for at, size in row
        ]
        after = self._all_held()
        starts = after.starts
        ends = starts + after.lengths
        starts[:1] += self._used
        places = zip(starts.tolist(), ends.tolist(), strict=True)
        return left + [
            self.cut(after, *place) for place in places if place[1] - place[0] > 1
        ]

    def hold(self, documents: list[Document]) -> Held:
        """Checks and concatenates documents.

        Raises:
          DataError: if a document does not have the form that `Rows` describes.
        """
        lists = {"tokens": documents}
        if self.of.features:
            lists = {name: [] for name in ("tokens", *self.of.features)}
            for document in documents:
                _check_features(document, lists)
                for name, of_name in lists.items():
                    of_name.append(document[name])
        tokens = lists.pop("tokens")
        arrays = {"tokens": _flat(tokens, self.of.dtype)}
        arrays |= {name: np.concatenate(each) for name, each in lists.items()}
        return Held(arrays, np.array(list(map(len, tokens)), np.int64), [])

    def cut(self, held: Held, first: int, stop: int) -> Document:
        """A range of tokens and their features as a document."""
        some = {name: values[first:stop] for name, values in held.arrays.items()}
        return some if self.of.features else some["tokens"]

    def costs(self, held: Held, at: np.ndarray) -> list[tuple[int, ...]]:
        """How much of each of the `limits` each piece that begins at `at` uses."""
        del held
        return [(1,) if self.of.max_examples else ()] * len(at)

    def limits(self) -> tuple[int, ...]:
        """A row's limits other than its number of tokens."""
        return (self.of.max_examples,) if self.of.max_examples else ()

    def more(self, rows: Sequence[Unmade | None]) -> Row:
        """The additional features of some rows."""
        more: Row = {}
        for name in self.of.features:
            like = next(row for row in rows if row).held.arrays[name]
            more[name] = np.zeros(
                (len(rows), self.of.length, *like.shape[1:]), like.dtype
            )
            for out, row in zip(more[name], rows, strict=True):
                if row:
                    values = row.held.arrays[name]
                    joined = [values[at : at + size] for at, size in row.pieces]
                    np.concatenate(joined, out=out[: sum(map(len, joined))])
        return more

    def _state(self, held: Held, *, ended: bool) -> dict[str, Any]:
        places: list[list[Any]] = []
        for group in self._groups:
            if places and group.reads_on:
                places[-1][1] += len(group.held.lengths)
            else:
                places.append([group.place, len(group.held.lengths)])
        return {
            cursors.FROM: places or [[self.documents.get_state(), 0]],
            "skip": self._skip,
            "used": self._used,
            "chapter": self._number,
            "ended": ended,
            "row": 0,
            "digest": self._digest(held),
        }

    def _digest(self, held: Held) -> str:
        if not len(held.lengths) or self.of.dtype != np.int32:
            return ""
        digest = xxhash.xxh3_64(held.lengths.data)
        tokens = held.arrays["tokens"].astype(np.int32, copy=False)
        for values in (held.arrays | {"tokens": tokens}).values():
            if not values.dtype.hasobject:
                digest.update(
                    np.ascontiguousarray(values).reshape(-1).view(np.uint8).data
                )
        return digest.hexdigest()

    def _all_held(self) -> Held:
        # The documents that are not used up.
        groups, skip = [group.held for group in self._groups], self._skip
        if not groups:
            return _NOTHING
        lengths = _joined([each.lengths for each in groups])
        begin = int(lengths[:skip].sum())
        arrays = {
            name: _joined([each.arrays[name] for each in groups])[begin:]
            for name in groups[0].arrays
        }
        documents = [each for group in groups for each in group.documents]
        return Held(arrays, lengths[skip:], documents[skip:])

    def _read(self, num_documents: int) -> int:
        # Returns the number of documents read; 0 at the end.
        place = self.documents.get_state()
        try:
            some = shard_steps.take(self.documents, num_documents)
            held = self.hold(some) if some else _NOTHING
        except Exception:
            # The next call rereads the documents before the error.
            self.documents.set_state(place)
            self._reads_on = False
            raise
        if not some:
            return 0
        self._groups.append(_Group(place, self._reads_on, held))
        self._reads_on = True
        return len(some)

    def _sizes(self) -> np.ndarray:
        # The number of inputs in each document that is not used up.
        lengths = [each.held.lengths for each in self._groups] or [_NOTHING.lengths]
        most = self.of.length if self.of.truncate else _ENDLESS
        sizes = np.clip(np.concatenate(lengths)[self._skip :] - 1, 0, most)
        sizes[:1] -= self._used
        return sizes

    def _read_chapter(self) -> None:
        if mixing.renew(self.documents):
            self._reads_on = False
        # Chapters start small, because the first batch waits for the first chapters of
        # all shards: one or two rows, depending on a bit of the shard index, then two
        # or four, and so on. So a similar number of shards begins a chapter in each
        # batch.
        level = min(self._number, _LATER)
        wanted = (1 + (self.of.key[1] >> level & 1)) << level
        is_fitted = self.of.packing in (FIRST_FIT, BEST_FIT)
        fitted_tokens = _FITTED_TOKENS // (self.of.num_shards or 1)
        most = fitted_tokens if is_fitted else _OTHER_TOKENS
        num_rows = min(max(most // self.of.length, _LEAST_ROWS), _MOST_ROWS, wanted)
        ended, num_before = False, 0
        while not ended:
            sizes = self._sizes()
            num_documents, num_inputs = len(sizes), int(sizes.sum())
            missing = num_rows * self.of.length - num_inputs
            if missing <= 0 and num_documents >= self.of.window:
                break
            if num_inputs > num_before:
                records.note_progress()
            num_before = num_inputs
            # Extrapolates from the documents read so far, within limits.
            group = -(-missing * num_documents // max(num_inputs, 1))
            group = min(group, max(8 * num_rows, num_documents))
            group = max(group, num_rows, self.of.window - num_documents)
            ended = not self._read(min(group, _GROUP))
        self._make_rows(ended=ended)
        if ended and not self._rows:
            raise StopIteration

    def _make_rows(self, *, ended: bool) -> None:
        length = self.of.length
        held = self._held = self._all_held()
        self._begin = self._state(held, ended=ended)
        at, sizes = held.starts, self._sizes()
        at[:1] += self._used
        num_whole = len(sizes)
        if self.of.packing and not ended:
            # What would begin one more row goes to the next chapter.
            ends = np.cumsum(sizes)
            kept = int(ends[-1]) // length * length
            if self._is_cut:
                num_whole = int(np.searchsorted(ends, kept, side="right"))
                sizes = np.diff(np.minimum(ends, kept), prepend=0)
            else:
                kept -= int(_FREE * length)
                num_whole = max(1, int(np.searchsorted(ends, kept, side="right")))
                at, sizes = at[:num_whole], sizes[:num_whole]
        used = int(sizes[num_whole:].sum()) + (0 if num_whole else self._used)
        at, sizes = _split(at, sizes, _ENDLESS if self._is_cut else length)
        if self.of.window:
            generator = np.random.default_rng([*self.of.key, self._number])
            order = generator.permutation(len(at))
            at, sizes = at[order], sizes[order]
        if self._is_cut:
            self._rows = _concatenated(at, sizes, length)
        elif self.of.packing:
            self._rows = fitted(
                _pieces(at, sizes),
                self.costs(held, at),
                self.limits(),
                length=length,
                is_best=self.of.packing == BEST_FIT,
            )
        else:
            self._rows = [[piece] for piece in _pieces(at, sizes)]
        self._next = 0
        # The end does not count as a chapter, however often a shard reaches it.
        self._number += bool(self._rows)
        self._skip, self._used = self._skip + num_whole, used
        groups = self._groups
        while groups and self._skip >= len(groups[0].held.lengths):
            self._skip -= len(groups.pop(0).held.lengths)


def _joined(arrays: Sequence[np.ndarray]) -> np.ndarray:
    # Avoids a copy of megabytes in the common case of one group.
    return np.concatenate(arrays) if arrays[1:] else arrays[0]


def _check_features(document: Any, names: Collection[str]) -> None:
    if not isinstance(document, dict) or document.keys() != {*names}:
        found = sorted(document) if isinstance(document, dict) else type(document)
        raise errors.DataError(
            f"a document to pack has {found}, but Rows expects a dict of"
            f" {', '.join(names)}; list other features in its features=, or drop them"
            " before Rows"
        )
    lengths = {name: len(values) for name, values in document.items()}
    if len({*lengths.values()}) > 1:
        raise errors.DataError(
            f"a document to pack has features of different lengths, {lengths}; each"
            " feature needs one value per token"
        )


def _flat(tokens: list[Any], dtype: Any) -> np.ndarray:
    kinds = {*map(type, tokens)}
    others = [kind for kind in kinds if not issubclass(kind, np.ndarray)]
    if not others and {each.ndim for each in tokens} == {1}:
        flat = np.concatenate(tokens)
        if flat.dtype in (np.int32, np.uint16, dtype):
            return flat
        if np.issubdtype(flat.dtype, np.integer):
            return token_numbers.narrowed(flat, place="a document to pack")
    raise errors.DataError(
        f"a document to pack is of type {[*others, *kinds][0].__name__}; Rows accepts"
        " only one-dimensional arrays of integers, [tokens]"
    )


def _split(
    at: np.ndarray, sizes: np.ndarray, longest: int
) -> tuple[np.ndarray, np.ndarray]:
    # Splits documents into pieces of at most `longest` inputs.
    counts = -(-sizes // longest)
    of = np.repeat(np.arange(len(sizes)), counts)
    first = (np.arange(len(of)) - (np.cumsum(counts) - counts)[of]) * longest
    return at[of] + first, np.minimum(sizes[of] - first, longest)


def _pieces(at: np.ndarray, sizes: np.ndarray) -> list[Piece]:
    return list(zip(at.tolist(), sizes.tolist(), strict=True))


def _concatenated(at: np.ndarray, sizes: np.ndarray, length: int) -> list[list[Piece]]:
    # Pieces end at row ends and document ends.
    ends = np.cumsum(sizes)
    begins, rows = ends - sizes, np.arange(0, sizes.sum(), length)
    cuts = np.union1d(begins, rows)
    of = np.searchsorted(begins, cuts, side="right") - 1
    pieces = _pieces(at[of] + cuts - begins[of], np.diff(cuts, append=ends[-1:]))
    bounds = [*np.searchsorted(cuts, rows).tolist(), len(cuts)]
    return [pieces[begin:end] for begin, end in itertools.pairwise(bounds)]


def fitted(
    pieces: Iterable[Piece],
    costs: Iterable[tuple[int, ...]],
    limits: tuple[int, ...],
    *,
    length: int,
    is_best: bool,
) -> list[list[Piece]]:
    """Fits each piece into the first or the fullest row that has room.

    Args:
      pieces: pieces of at most `length` inputs.
      costs: how much of each limit each piece uses.
      limits: the limits of a row.
      length: the number of inputs per row.
      is_best: whether to use the fullest row instead of the first.
    """
    rows: list[list[Piece]] = []
    left: list[tuple[int, ...]] = []
    # The free space and index of each row that is not full; sorted if `is_best`.
    free: list[tuple[int, int]] = []
    for piece, cost in zip(pieces, costs, strict=True):
        size = piece[1]
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
        is_wrong = numbers >= vocab_size
        if is_wrong.any():
            raise errors.DataError(
                f"a document contains token {numbers[is_wrong][0]}, but the model's"
                f" vocabulary has only tokens from 0 to {vocab_size - 1}; set"
                " vocab_size to the vocabulary size of the tokenizer that created the"
                " tokens"
            )
