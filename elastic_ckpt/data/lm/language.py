"""Converts documents to examples of a language model: pairs of inputs and targets.

A document of n tokens becomes the pair of its first n - 1 and its last n - 1 tokens, so
that a target is always the token after its input, even if pairs are then cut, shuffled
and packed.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import grain
import numpy as np
from grain import experimental

from elastic_ckpt.core import errors, storage
from elastic_ckpt.data import blocks, shard_steps
from elastic_ckpt.data import tokens as token_numbers
from elastic_ckpt.data.lm import packing as packing_rows
from elastic_ckpt.data.lm import row_blocks, tokenizers
from elastic_ckpt.data.sources import files

Example = dict[str, np.ndarray]
# A document's text, its tokens if it is already tokenized, or None.
Value = str | bytes | np.ndarray | None

_BYTES = tokenizers.Bytes()
_NO_TOKENS = np.empty(0, np.int32)

FIRST_FIT = "first_fit"
BEST_FIT = "best_fit"
CONCAT_THEN_SPLIT = "concat_then_split"
# The packers that keep examples whole.
FITTING = {
    FIRST_FIT: experimental.FirstFitPackIterDataset,
    BEST_FIT: experimental.BestFitPackIterDataset,
}
PACKINGS = (*FITTING, CONCAT_THEN_SPLIT)

# The number of rows that a fitting packer fills at a time: 16 become 97 % full.
PACKING_BINS = 16

_FEATURES = ("inputs", "targets")
# The names of a row's features in packers, and in MaxText.
ROW_NAMES = {
    feature + theirs: feature + ours
    for feature in _FEATURES
    for theirs, ours in (
        ("", ""),
        ("_segment_ids", "_segmentation"),
        ("_positions", "_position"),
    )
}


class Encoder(Protocol):
    """How records become what `Tokens` yields, such as `Documents`."""

    @property
    def column(self) -> str:
        """The column that it reads, for messages."""

    @property
    def tokenizer(self) -> tokenizers.Tokenizer | None:
        """The tokenizer; None if records have tokens."""

    @property
    def is_parallel(self) -> bool:
        """Whether several threads encode faster than one thread."""

    def identity(self) -> dict[str, storage.Json]:
        """The settings that determine the tokens, by configuration key."""

    def value(self, element: dict[str, Any]) -> Any:
        """What is encoded of a record; its length is that of its text.

        Raises:
          DataError: if the record lacks it.
        """

    def tokens(self, values: Sequence[Any]) -> list[Any]:
        """The tokens of each value; called in threads."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Documents:
    """How records become documents of tokens, for `Tokens`.

    Attributes:
      column: the column with the text, or with the tokens.
      tokenizer: the tokenizer; None if the column contains tokens.
      add_begin: whether each text begins with the tokenizer's begin token.
      add_end: whether each text ends with its end token.
    """

    column: str = "text"
    tokenizer: tokenizers.Tokenizer | None = _BYTES
    add_begin: bool = True
    add_end: bool = True

    def __post_init__(self) -> None:
        if self.tokenizer is None:
            return
        for field, key, token, what in (
            ("add_begin", "add_bos", self.tokenizer.begin, "begins"),
            ("add_end", "add_eos", self.tokenizer.end, "ends"),
        ):
            if getattr(self, field) and token is None:
                raise errors.ConfigError(
                    f"Documents: {field}=True ({key}=true in a configuration), but the"
                    f" tokenizer has no token that {what} a text; set {key}=false, or"
                    " use a tokenizer with such a token"
                )

    @property
    def is_parallel(self) -> bool:
        """Whether several threads tokenise faster than one thread."""
        return self.tokenizer is not None and self.tokenizer.is_parallel

    def identity(self) -> dict[str, storage.Json]:
        """The settings that determine the tokens, by configuration key."""
        return {
            "tokenizer": self.tokenizer.identity() if self.tokenizer else None,
            "train_data_columns": self.column,
            "add_bos": self.add_begin,
            "add_eos": self.add_end,
        }

    def value(self, element: dict[str, Any]) -> Value:
        """The text of a record, or its tokens, int32 `[tokens]`; None for a null value.

        Raises:
          DataError: if the column is missing or of another type.
        """
        if self.column not in element:
            raise errors.DataError(
                f"a record has no column {self.column!r}, only {sorted(element)}; name"
                " the column (train_data_columns in a configuration)"
            )
        value = element[self.column]
        if value is None:
            return None
        if self.tokenizer is None:
            numbers = np.asarray(value)
            if isinstance(value, list) and not value:
                return _NO_TOKENS
            if numbers.ndim != 1 or not np.issubdtype(numbers.dtype, np.integer):
                raise errors.DataError(
                    f"column {self.column!r} has {numbers.dtype}{list(numbers.shape)},"
                    " not a list of tokens; give a tokenizer if it is text"
                    " (tokenize_train_data=true in a configuration)"
                )
            return token_numbers.narrowed(numbers, place=f"column {self.column!r}")
        if not isinstance(value, str | bytes):
            raise errors.DataError(
                f"column {self.column!r} has a {type(value).__name__}, not text; set"
                " tokenizer=None if these are tokens (tokenize_train_data=false in a"
                " configuration)"
            )
        return value

    def tokens(self, values: Sequence[Value]) -> list[np.ndarray]:
        """The tokens of each value, int32 `[tokens]`; an empty array for None."""
        result: list[Any] = [_NO_TOKENS if value is None else value for value in values]
        texts = [n for n, value in enumerate(values) if isinstance(value, str | bytes)]
        if self.tokenizer and texts:
            begin = _as_tokens(self.tokenizer.begin if self.add_begin else None)
            end = _as_tokens(self.tokenizer.end if self.add_end else None)
            encoded = self.tokenizer.encode_batch([result[n] for n in texts])
            for number, tokens in zip(texts, encoded, strict=True):
                result[number] = np.concatenate([begin, tokens, end])
        return result


def _as_tokens(token: int | None) -> np.ndarray:
    return _NO_TOKENS if token is None else np.array([token], np.int32)


class Examples(grain.IterDataset[Example]):
    """Makes examples of documents: `inputs`, and `targets`, which are one token ahead.

    A document of fewer than two tokens makes none.

    Args:
      parent: documents, arrays of tokens.
      length: the most tokens of an example; None if it may be split.
      truncate: whether the rest of a longer document is dropped; otherwise it makes
        further examples.
    """

    def __init__(
        self, parent: grain.IterDataset, *, length: int, truncate: bool
    ) -> None:
        super().__init__(parent)
        self.length, self.truncate = length, truncate

    def __iter__(self) -> grain.DatasetIterator[Example]:
        return _ExamplesIterator(self, iter(self._parent))

    def blocks(self) -> blocks.Blocks | None:
        """The examples in blocks, if the documents are; lengths are those of inputs."""
        parent = blocks.of(self._parent)
        if parent is None:
            return None
        return _ExampleBlocks(parent, self.length, truncate=self.truncate)


class _ExamplesIterator(grain.DatasetIterator[Example]):
    """Keeps the parent's state before the document, and the number of chunks taken."""

    def __init__(self, dataset: Examples, parent: grain.DatasetIterator) -> None:
        super().__init__(parent)
        self._length = dataset.length
        self._max_chunks = 1 if dataset.truncate else None
        self._before = parent.get_state()
        # The parent's current state, if it was computed since the last document.
        self._now: Any = None
        self._chunks: list[Example] = []
        self._taken = 0

    def __next__(self) -> Example:
        while self._taken == len(self._chunks):
            if self._max_chunks != 1:
                # With one chunk for each document no state is in the middle of one.
                self._before = self._parent_state()
            self._now = None
            made = chunks(next(self._parent), self._length)
            self._chunks = list(itertools.islice(made, self._max_chunks))
            self._taken = 0
        self._taken += 1
        return self._chunks[self._taken - 1]

    def get_state(self) -> dict[str, Any]:
        if self._taken == len(self._chunks):
            return {"parent": self._parent_state(), "chunk": 0}
        return {"parent": self._before, "chunk": self._taken}

    def set_state(self, state: dict[str, Any]) -> None:
        self._now = None
        self._parent.set_state(state["parent"])
        self._chunks, self._taken = [], 0
        for _ in range(state["chunk"]):
            next(self)

    def _parent_state(self) -> Any:
        # Both a packer and this iterator need it before each document.
        if self._now is None:
            self._now = self._parent.get_state()
        return self._now


class _ExampleBlocks:
    def __init__(self, parent: blocks.Blocks, length: int, *, truncate: bool) -> None:
        self._parent = parent
        self._length = length
        self._truncate = truncate
        # The chunks of the next document that were taken.
        self._taken = 0
        # The parent's place after the last document that made examples.
        self._before: blocks.Place | None = None

    def read(self, at_most: int) -> blocks.Block:
        while True:
            block = self._of(self._parent.read(at_most))
            first, self._taken = self._taken, 0
            if len(block) > first:
                return block.cut(first, len(block)) if first else block

    def _of(self, documents: blocks.Block) -> blocks.Block:
        # A document of n tokens has n - 1 pairs.
        num_pairs = documents.length - 1
        if self._truncate:
            document = np.flatnonzero(num_pairs > 0)
            chunk = np.zeros(len(document), np.int64)
        else:
            num_chunks = np.maximum(-(-num_pairs // self._length), 0)
            document = np.repeat(np.arange(len(documents)), num_chunks)
            chunk = np.arange(len(document))
            chunk -= np.repeat(np.cumsum(num_chunks) - num_chunks, num_chunks)
        first = chunk * self._length
        places = _ExamplePlaces(
            documents.without_values(),
            document,
            chunk,
            self._before or documents.place(0),
        )
        self._before = places.read(len(document))
        return blocks.Block(
            values=documents.values,
            start=documents.start[document] + first,
            length=np.minimum(num_pairs[document] - first, self._length),
            runs=((0, blocks.Place(places, 0)),),
        )

    def end(self) -> blocks.Place:
        return blocks.Place(_AtEnd(self._parent.end()), 0)

    def get_state(self) -> dict[str, Any]:
        return {"parent": self._parent.get_state(), "chunk": self._taken}

    def set_state(self, state: dict[str, Any]) -> None:
        self._parent.set_state(state["parent"])
        self._taken = state["chunk"]
        self._before = None

    def close(self) -> None:
        self._parent.close()


@dataclasses.dataclass(frozen=True, slots=True)
class _ExamplePlaces:
    # The documents without their tokens; of each example, its document and chunk; and
    # the place before the first example.
    documents: blocks.Block
    document: np.ndarray
    chunk: np.ndarray
    before: blocks.Place

    def state(self, number: int, read: blocks.Place) -> dict[str, Any]:
        is_within = number < len(self.chunk) and self.chunk[number] > 0
        if is_within:
            before = self.documents.place(int(self.document[number]))
            chunk = int(self.chunk[number])
        else:
            before, chunk = self.read(number), 0
        return {"parent": before.state(read.parent()), "chunk": chunk}

    def read(self, number: int) -> blocks.Place:
        if not number:
            return self.before
        return self.documents.place(int(self.document[number - 1]) + 1)


@dataclasses.dataclass(frozen=True, slots=True)
class _AtEnd:
    # The only place of an iterator that has ended with its parent.
    parent: blocks.Place

    def state(self, number: int, read: blocks.Place) -> dict[str, Any]:
        del number, read
        return {"parent": self.parent.state(), "chunk": 0}

    def read(self, number: int) -> blocks.Place:
        del number
        return self.parent


def pair(tokens: np.ndarray) -> Example:
    """Inputs and targets of n consecutive tokens, each `[n - 1]`."""
    return {"inputs": tokens[:-1], "targets": tokens[1:]}


def chunks(tokens: np.ndarray, length: int) -> Iterator[Example]:
    """Pairs of at most `length` tokens that contain each target of `tokens` once."""
    for first in range(0, len(tokens) - 1, length):
        yield pair(tokens[first : first + length + 1])


def padded(example: Example, length: int) -> Example:
    """`example` as a row of `length` tokens, with segmentation and position.

    Segmentation is 1 for tokens and 0 for padding.
    """
    row = {}
    for name, tokens in example.items():
        row[name] = np.pad(tokens, (0, length - len(tokens)))
        row[f"{name}_segmentation"] = (np.arange(length) < len(tokens)).astype(np.int32)
        row[f"{name}_position"] = np.arange(length, dtype=np.int32)
    return row


def packed(
    parent: grain.IterDataset,
    *,
    packing: str,
    length: int,
    seed: int,
    max_examples: int = 0,
    features: Sequence[str] = (),
) -> grain.IterDataset:
    """Packs several examples into each row of `length` tokens.

    A row has `inputs`, `targets`, their `inputs_segmentation` and
    `targets_segmentation`, which number the examples of the row from 1 and are 0 for
    padding, and their `inputs_position` and `targets_position`, which number the tokens
    of each example from 0; all int32 `[length]`.

    Args:
      parent: examples, dicts of `inputs`, `targets` and `features`, each of which has a
        value for each token. Another feature is an error.
      packing: `"first_fit"` or `"best_fit"`, which keep examples whole and pad rows, or
        `"concat_then_split"`, which fills rows and splits examples at their ends.
      length: tokens of a row.
      seed: the seed of the order in which the two that fit examples yield rows.
      max_examples: the most examples in a row of these two; 0 sets no limit.
      features: further features to pack, such as `("loss_mask",)`; 0 in padding.

    Raises:
      ConfigError: if `packing` is unknown, or `features` has one of the names above.
    """
    more = files.names(features, argument="packed: features")
    if packing not in PACKINGS:
        raise errors.ConfigError(
            f"packed: packing={packing!r}; choose one of {', '.join(PACKINGS)}"
        )
    clashing = {*_FEATURES, *ROW_NAMES.values()} & {*more}
    if clashing:
        raise errors.ConfigError(
            f"packed: features={more!r}: rows have {sorted(clashing)} in any case; name"
            " only further features, or rename these"
        )
    longest = None if packing == CONCAT_THEN_SPLIT else length
    checked = _WithFeatures(parent, more, longest)
    lengths = dict.fromkeys((*_FEATURES, *more), length)
    make_rows: _MakeRows
    if packing == CONCAT_THEN_SPLIT:
        rows = packing_rows.ConcatThenSplit(
            checked, features=tuple(lengths), length=length
        )
        make_rows = functools.partial(row_blocks.Concatenated, length=length)
    else:
        rows = FITTING[packing](
            checked,
            length_struct=lengths,
            num_packing_bins=PACKING_BINS,
            seed=seed,
            max_sequences_per_bin=max_examples or None,
            meta_features=more,
        )
        make_rows = functools.partial(
            row_blocks.Fitted,
            length=length,
            num_bins=PACKING_BINS,
            seed=seed,
            max_examples=max_examples,
            is_best=packing == BEST_FIT,
        )
    if more:
        return MaxTextRows(rows, more)
    return MaxTextRows(rows, more, examples=parent, make_rows=make_rows)


class Padded(shard_steps.Step[Example]):
    """Pads each example to a row of `length` tokens; see `padded`.

    Args:
      parent: examples.
      length: tokens of a row.
    """

    def __init__(self, parent: grain.IterDataset, *, length: int) -> None:
        super().__init__(parent)
        self._length = length

    def __iter__(self) -> grain.DatasetIterator[Example]:
        examples = blocks.of(self._parent)
        if examples is not None:
            return row_blocks.Padded(examples, self._length)
        return iter(self._parent.map(functools.partial(padded, length=self._length)))

    def settings(self) -> dict[str, storage.Json]:
        """The length of a row."""
        return {"length": self._length}


_MakeRows = Callable[[blocks.Blocks], grain.DatasetIterator[Example]]


class Mapped(grain.DatasetIterator[Example]):
    """Elements of an iterator after a function; the states are the iterator's."""

    def __init__(
        self, elements: grain.DatasetIterator, function: Callable[[Example], Example]
    ) -> None:
        super().__init__(elements)
        self._elements, self._function = elements, function
        if hasattr(elements, "mark"):
            self.mark = elements.mark

    def __next__(self) -> Example:
        return self._function(next(self._elements))

    def get_state(self) -> Any:
        """See `grain.DatasetIterator`."""
        return self._elements.get_state()

    def set_state(self, state: Any) -> None:
        """See `grain.DatasetIterator`."""
        self._elements.set_state(state)


class InVocabulary(grain.IterDataset[Example]):
    """Rows, checked to have no token that the model's vocabulary lacks.

    Args:
      parent: the rows.
      column: of the tokens, for the error.
      vocab_size: rows of the model's embedding.
    """

    passes_on = True

    def __init__(
        self, parent: grain.IterDataset, *, column: str, vocab_size: int
    ) -> None:
        super().__init__(parent)
        self._column = column
        self._vocab_size = vocab_size

    def __iter__(self) -> grain.DatasetIterator[Example]:
        return Mapped(iter(self._parent), self._checked)

    def _checked(self, row: Example) -> Example:
        for name in _FEATURES:
            if row[name].dtype == np.int64:
                # They name their documents; see `provenance`.
                continue
            # Viewed as unsigned numbers, negative ones are the largest.
            numbers = row[name].view(np.uint32)
            if numbers.max() >= self._vocab_size:
                wrong = row[name][numbers >= self._vocab_size][0]
                raise errors.DataError(
                    f"column {self._column!r} has the token {wrong}, but the model's"
                    f" vocabulary has tokens from 0 to {self._vocab_size - 1}; set"
                    " vocab_size to that of the tokenizer that made the tokens"
                )
        return row


class _WithFeatures(grain.IterDataset[Example]):
    """Checks that examples have the features to pack, no others, and fit into a row.

    Args:
      parent: examples.
      more: further features.
      length: the most tokens of an example; None if it may be split.
    """

    passes_on = True

    def __init__(
        self, parent: grain.IterDataset, more: tuple[str, ...], length: int | None
    ) -> None:
        super().__init__(parent)
        self._expected = dict.fromkeys((*_FEATURES, *more))
        self._length = length

    def __iter__(self) -> grain.DatasetIterator[Example]:
        return Mapped(iter(self._parent), self._checked)

    def _checked(self, example: Example) -> Example:
        if example.keys() != self._expected.keys():
            expected = ", ".join(self._expected)
            raise errors.DataError(
                f"an example to pack has the features {', '.join(sorted(example))};"
                f" packed expects {expected}: name further ones in its features=, or"
                " leave them out before"
            )
        if len({len(values) for values in example.values()}) > 1:
            lengths = {name: len(values) for name, values in example.items()}
            raise errors.DataError(
                f"an example to pack has features of several lengths, {lengths}; give"
                " each a value for each token of inputs"
            )
        num_tokens = len(example["inputs"])
        if self._length is not None and num_tokens > self._length:
            raise row_blocks.too_long(num_tokens, self._length)
        return example


class MaxTextRows(grain.IterDataset[Example]):
    """Rows with MaxText's names, made of examples or, if there are any, of blocks.

    Args:
      parent: rows with a packer's names, made of single examples.
      more: further features.
      examples: of which the packer makes the rows.
      make_rows: makes the same rows of blocks of examples.
    """

    def __init__(
        self,
        parent: grain.IterDataset,
        more: tuple[str, ...],
        *,
        examples: grain.IterDataset | None = None,
        make_rows: _MakeRows | None = None,
    ) -> None:
        super().__init__(parent)
        self._names = ROW_NAMES | dict(zip(more, more, strict=True))
        self._examples, self._make_rows = examples, make_rows

    def __iter__(self) -> grain.DatasetIterator[Example]:
        if self._examples is not None and self._make_rows is not None:
            examples = blocks.of(self._examples)
            if examples is not None:
                return self._make_rows(examples)
        return Mapped(iter(self._parent), self._renamed)

    def _renamed(self, row: Example) -> Example:
        return {name: row[packers] for packers, name in self._names.items()}
