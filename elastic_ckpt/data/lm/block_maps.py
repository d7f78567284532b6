"""Applies a user's function to blocks of tokenized documents.

A function of single documents, such as Grain's `.map` and `.filter` call, costs a call
of Python for each. `BlockMap` calls it for each block that arrives, so that documents
stay in blocks up to the packer. Its state is its parent's, as that of Grain's two is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import grain
import numpy as np

from elastic_ckpt.core import errors, storage
from elastic_ckpt.data import blocks, shard_steps
from elastic_ckpt.data import tokens as token_numbers
from elastic_ckpt.data.lm import language


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class TokenBlock:
    """Documents of tokens: those of all in a row, and where each document begins.

    Document n is `values[offsets[n] : offsets[n + 1]]`. The arrays are read-only.

    Attributes:
      values: the tokens, int32 `[tokens]`; any integers that fit are taken.
      offsets: int64 `[documents + 1]`, from 0 to the number of tokens, ascending.

    Raises:
      DataError: if the arrays are not like that.
    """

    values: np.ndarray
    offsets: np.ndarray

    def __post_init__(self) -> None:
        values, offsets = np.asarray(self.values), np.asarray(self.offsets)
        for name, array in (("values", values), ("offsets", offsets)):
            if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
                raise errors.DataError(
                    f"TokenBlock: {name} are {array.dtype}{list(array.shape)}, not a"
                    " 1-D array of integers"
                )
        offsets = offsets.astype(np.int64, copy=False)
        ends = offsets[[0, -1]].tolist() if len(offsets) else []
        if ends != [0, len(values)] or (np.diff(offsets) < 0).any():
            raise errors.DataError(
                f"TokenBlock: offsets {offsets} of {len(values)} tokens; give where"
                " each document begins and the last one ends, ascending from 0 to the"
                " number of tokens"
            )
        values = token_numbers.narrowed(values, place="TokenBlock: values")
        for name, array in (("values", values), ("offsets", offsets)):
            view = array.view()
            view.flags.writeable = False
            object.__setattr__(self, name, view)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> np.ndarray:
        """The number of tokens of each document, int64 `[documents]`."""
        return np.diff(self.offsets)

    def keep_documents(self, is_kept: np.ndarray) -> TokenBlock:
        """The same, with no tokens in other documents.

        Args:
          is_kept: bool `[documents]`.

        Raises:
          DataError: if it is something else.
        """
        _check_mask(is_kept, len(self), "document")
        lengths = self.lengths
        offsets = np.concatenate([[0], np.cumsum(np.where(is_kept, lengths, 0))])
        return TokenBlock(self.values[np.repeat(is_kept, lengths)], offsets)

    def keep_tokens(self, is_kept: np.ndarray) -> TokenBlock:
        """The same without other tokens.

        Args:
          is_kept: bool `[tokens]`.

        Raises:
          DataError: if it is something else.
        """
        _check_mask(is_kept, len(self.values), "token")
        kept = np.flatnonzero(is_kept)
        return TokenBlock(self.values[kept], np.searchsorted(kept, self.offsets))


def _check_mask(is_kept: np.ndarray, number: int, each: str) -> None:
    if is_kept.dtype != bool or is_kept.shape != (number,):
        raise errors.DataError(
            f"TokenBlock: keep_{each}s={is_kept.dtype}{list(is_kept.shape)}; give"
            f" bool[{number}], one for each {each}"
        )


BlockFunction = Callable[[TokenBlock], TokenBlock]


class BlockMap(shard_steps.Step[np.ndarray]):
    """Maps blocks of tokenized documents: changes documents, or leaves some out.

    The result is the same as if Grain's `.map` called the function for each document,
    and `.filter` then left out those without tokens; but documents reach the packer in
    blocks, and the function is called once for each.

    Blocks have any number of documents, and are cut differently at each resume. So the
    function must be pure, and treat each document on its own, whatever its neighbours
    are. It returns a document for each that it gets, in their order; one without tokens
    is left out. An error is raised when the document that causes it is due.

    Args:
      parent: documents, as `Tokens` yields them, or a `Mixture` or a `WindowShuffle` of
        those. Tokens of `Conversations` that do not count are `~token`.
      function: `TokenBlock -> TokenBlock`.

    Raises:
      ConfigError: if the parent has examples, not documents.
    """

    runs_own_code = True

    def __init__(self, parent: grain.IterDataset, function: BlockFunction) -> None:
        super().__init__(parent)
        self._function = function
        if any(isinstance(s, language.Examples) for s in shard_steps.datasets(parent)):
            raise errors.ConfigError(
                f"{self}: it maps documents, and Examples has cut them into inputs and"
                " targets; apply it before Examples"
            )

    def __iter__(self) -> grain.DatasetIterator[np.ndarray]:
        return iter(self._parent.map(self._alone).filter(_has_tokens))

    def blocks(self) -> blocks.Blocks | None:
        """The documents in blocks, if those of the parent are."""
        parent = blocks.of(self._parent)
        return None if parent is None else _MappedBlocks(self, parent)

    def __str__(self) -> str:
        name = getattr(self._function, "__name__", repr(self._function))
        return f"BlockMap({name})"

    def settings(self) -> dict[str, storage.Json]:
        """None; only the name of the pipeline identifies the function."""
        return {}

    def _alone(self, document: Any) -> np.ndarray:
        if not isinstance(document, np.ndarray):
            raise errors.DataError(
                f"{self}: the parent yields a {type(document).__name__}, not the tokens"
                " of a document; apply it after ec.data.lm.Tokens"
            )
        given = TokenBlock(document, np.array([0, len(document)]))
        made = self._function(given)
        self._check(made, given)
        return made.values

    def _check(self, made: Any, given: TokenBlock) -> None:
        if not isinstance(made, TokenBlock):
            raise errors.DataError(
                f"{self} returned a {type(made).__name__}; return an"
                " ec.data.lm.TokenBlock"
            )
        if len(made) != len(given):
            raise errors.DataError(
                f"{self} returned {len(made)} documents for {len(given)}; return one"
                " for each, in their order: one without tokens is left out"
            )

    def _check_last(self, made: TokenBlock, given: TokenBlock) -> None:
        # Whether the last document is the same without those before it.
        first, first_made = int(given.offsets[-2]), int(made.offsets[-2])
        alone = self._alone(given.values[first:])
        if not np.array_equal(alone, made.values[first_made:]):
            raise errors.DataError(
                f"{self} returned other tokens for document {len(given) - 1} of a block"
                " than for the same document alone; blocks have any number of"
                " documents, so treat each on its own"
            )


def _has_tokens(document: np.ndarray) -> bool:
    return len(document) > 0


class _MappedBlocks:
    def __init__(self, dataset: BlockMap, parent: blocks.Blocks) -> None:
        self._dataset = dataset
        self._parent = parent
        self._begin()

    def read(self, at_most: int) -> blocks.Block:
        while True:
            if not self._held:
                self._held = [self._parent.read(at_most)]
            documents = self._held[0]
            given = TokenBlock(
                blocks.in_a_row(documents),
                np.concatenate([[0], np.cumsum(documents.length)]),
            )
            try:
                made = self._dataset._function(given)
                self._dataset._check(made, given)
            except Exception:
                # It is raised by a single document, after those before it.
                half = len(documents) // 2
                if not half:
                    raise
                self._held[:1] = (
                    documents.cut(0, half),
                    documents.cut(half, len(documents)),
                )
                continue
            if not self._is_checked and len(given) > 1:
                self._dataset._check_last(made, given)
                self._is_checked = True
            del self._held[0]
            length = made.lengths
            kept = np.flatnonzero(length)
            before = self._before or documents.place(0)
            places = _KeptPlaces(documents.without_values(), kept, before)
            self._before = places.read(len(kept))
            if not len(kept):
                continue
            return blocks.Block(
                values=made.values,
                start=made.offsets[kept],
                length=length[kept],
                runs=((0, blocks.Place(places, 0)),),
            )

    def end(self) -> blocks.Place:
        end = self._parent.end()
        return blocks.Place(_KeptPlaces(_NO_DOCUMENTS, _NONE, end), 0)

    def get_state(self) -> Any:
        return self._parent.get_state()

    def set_state(self, state: Any) -> None:
        self._parent.set_state(state)
        self._begin()

    def close(self) -> None:
        self._parent.close()

    def _begin(self) -> None:
        # Documents that were read, and wait for an error before them.
        self._held: list[blocks.Block] = []
        # The parent's place after the last document that was not left out.
        self._before: blocks.Place | None = None
        self._is_checked = False


@dataclasses.dataclass(frozen=True, slots=True)
class _KeptPlaces:
    # The parent's documents without their tokens, the numbers of those that are kept,
    # and the place before these.
    documents: blocks.Block
    kept: np.ndarray
    before: blocks.Place

    def state(self, number: int, read: blocks.Place) -> Any:
        return self.read(number).state(read.parent())

    def read(self, number: int) -> blocks.Place:
        if not number:
            return self.before
        return self.documents.place(int(self.kept[number - 1]) + 1)


_NONE = np.empty(0, np.int64)
_NO_DOCUMENTS = blocks.Block(blocks.NO_VALUES, _NONE, _NONE, ())
