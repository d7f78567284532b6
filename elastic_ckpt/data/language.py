"""From documents to examples of a language model: pairs of inputs and targets.

A document of n tokens is the pair of its first n - 1 and its last n - 1, so that a
target is always the token after its input, however pairs are then cut, shuffled and
packed.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import grain
import numpy as np
from grain import experimental

from elastic_ckpt.core import errors
from elastic_ckpt.data import packing as packing_rows
from elastic_ckpt.data import tokenizers
from elastic_ckpt.data import tokens as token_numbers

Example = dict[str, np.ndarray]
# A document's text, its tokens if it has them already, or None.
Value = str | bytes | np.ndarray | None

_BYTES = tokenizers.Bytes()
_NO_TOKENS = np.empty(0, np.int32)

FIRST_FIT = "first_fit"
BEST_FIT = "best_fit"
CONCAT_THEN_SPLIT = "concat_then_split"
PACKINGS = (FIRST_FIT, BEST_FIT, CONCAT_THEN_SPLIT)

# Rows that a fitting packer has in hand: 16 are filled to 97 %.
PACKING_BINS = 16

_FEATURES = ("inputs", "targets")
# What packers call the features of a row, and MaxText.
_ROW_NAMES = {
    feature + theirs: feature + ours
    for feature in _FEATURES
    for theirs, ours in (
        ("", ""),
        ("_segment_ids", "_segmentation"),
        ("_positions", "_position"),
    )
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Documents:
    """How the records of a source are made tokens.

    Attributes:
      column: the column that has the text, or the tokens.
      tokenizer: makes the tokens; None if the column has them.
      add_begin: whether a text begins with the tokenizer's begin token.
      add_end: whether it ends with the end token.
    """

    column: str = "text"
    tokenizer: tokenizers.Tokenizer | None = _BYTES
    add_begin: bool = True
    add_end: bool = True

    @property
    def is_parallel(self) -> bool:
        """Whether threads tokenise faster than one."""
        return self.tokenizer is not None and self.tokenizer.is_parallel

    def value(self, element: dict[str, Any]) -> Value:
        """The text of a record, or its tokens, int32 `[tokens]`; None if it has none.

        Raises:
          DataError: if the column is missing or has something else.
        """
        if self.column not in element:
            raise errors.DataError(
                f"a record has no column {self.column!r} but {sorted(element)}; set"
                " train_data_columns"
            )
        value = element[self.column]
        if value is None:
            return None
        if self.tokenizer is None:
            found = np.asarray(value)
            if found.ndim != 1 or not np.issubdtype(found.dtype, np.integer):
                raise errors.DataError(
                    f"column {self.column!r} has {found.dtype}{list(found.shape)}, not"
                    " a list of tokens; set tokenize_train_data=true if it is text"
                )
            return token_numbers.narrowed(found, place=f"column {self.column!r}")
        if not isinstance(value, str | bytes):
            raise errors.DataError(
                f"column {self.column!r} has a {type(value).__name__}, not text; set"
                " tokenize_train_data=false if these are tokens"
            )
        return value

    def tokens(self, values: Sequence[Value]) -> list[np.ndarray]:
        """The tokens of each value, int32 `[tokens]`; those of None are none."""
        found: list[Any] = [_NO_TOKENS if value is None else value for value in values]
        places = [n for n, value in enumerate(values) if isinstance(value, str | bytes)]
        if self.tokenizer and places:
            begin = _as_tokens(self.tokenizer.begin if self.add_begin else None)
            end = _as_tokens(self.tokenizer.end if self.add_end else None)
            encoded = self.tokenizer.encode_batch([found[n] for n in places])
            for place, tokens in zip(places, encoded, strict=True):
                found[place] = np.concatenate([begin, tokens, end])
        return found


def _as_tokens(token: int | None) -> np.ndarray:
    return _NO_TOKENS if token is None else np.array([token], np.int32)


class Examples(grain.IterDataset[Example]):
    """Pairs of at most L tokens from documents.

    A document of less than two tokens makes no example.

    Args:
      parent: documents as arrays of tokens.
      length: L.
      truncate: whether a longer document is trimmed to L; if not, it makes several
        examples, one after the other.
    """

    def __init__(
        self, parent: grain.IterDataset, *, length: int, truncate: bool
    ) -> None:
        super().__init__(parent)
        self._length = length
        self._truncate = truncate

    def __iter__(self) -> grain.DatasetIterator[Example]:
        return _ExamplesIterator(
            iter(self._parent), self._length, max_chunks=1 if self._truncate else None
        )


class _ExamplesIterator(grain.DatasetIterator[Example]):
    """Keeps the parent's state before the document, and the chunks taken of it."""

    def __init__(
        self, parent: grain.DatasetIterator, length: int, *, max_chunks: int | None
    ) -> None:
        super().__init__(parent)
        self._length = length
        self._max_chunks = max_chunks
        self._before = parent.get_state()
        # The parent's state now, if it was asked for since the last document.
        self._now: Any = None
        self._chunks: list[Example] = []
        self._taken = 0

    def __next__(self) -> Example:
        while self._taken == len(self._chunks):
            if self._max_chunks != 1:
                # Else no state is ever taken in the middle of a document.
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
        # A packer asks for it before each document, and so does this.
        if self._now is None:
            self._now = self._parent.get_state()
        return self._now


def pair(tokens: np.ndarray) -> Example:
    """Inputs and targets of a run of n tokens, each `[n - 1]`."""
    return {"inputs": tokens[:-1], "targets": tokens[1:]}


def chunks(tokens: np.ndarray, length: int) -> Iterator[Example]:
    """The pairs of at most `length` that hold each target of `tokens` once."""
    for first in range(0, len(tokens) - 1, length):
        yield pair(tokens[first : first + length + 1])


def padded(example: Example, length: int) -> Example:
    """`example` as a row of `length` tokens, with segmentation and position.

    Segmentation is 1 where a token is, and 0 in the padding.
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
) -> grain.IterDataset:
    """Rows of `length` tokens, of several examples each, by one of `PACKINGS`.

    The segmentation counts the examples of a row from 1, and is 0 in the padding; the
    position counts the tokens of an example from 0.

    Args:
      parent: examples.
      packing: how rows are filled.
      length: tokens of a row.
      seed: of the order in which a fitting packer gives its rows.
      max_examples: of a row of a fitting packer; 0 sets no limit.
    """
    lengths = dict.fromkeys(_FEATURES, length)
    if packing == CONCAT_THEN_SPLIT:
        rows = packing_rows.ConcatThenSplit(parent, features=_FEATURES, length=length)
    else:
        packer = (
            experimental.FirstFitPackIterDataset
            if packing == FIRST_FIT
            else experimental.BestFitPackIterDataset
        )
        rows = packer(
            parent,
            length_struct=lengths,
            num_packing_bins=PACKING_BINS,
            seed=seed,
            max_sequences_per_bin=max_examples or None,
        )
    return _MaxTextRows(rows)


class _MaxTextRows(grain.IterDataset[Example]):
    """Packed rows with MaxText's names; Grain's `map` takes ten times as long."""

    def __iter__(self) -> grain.DatasetIterator[Example]:
        return _MaxTextRowsIterator(iter(self._parent))


class _MaxTextRowsIterator(grain.DatasetIterator[Example]):
    def __next__(self) -> Example:
        row = next(self._parent)
        return {name: row[packers] for packers, name in _ROW_NAMES.items()}

    def get_state(self) -> dict[str, Any]:
        return self._parent.get_state()

    def set_state(self, state: dict[str, Any]) -> None:
        self._parent.set_state(state)
