"""Tokenises documents in blocks, ahead of the consumer.

`Tokens` reads a block of documents from its parent, submits it to threads of the
process, and reads the next block when half of the documents are taken. All pipelines of
a process share the threads, so many logical shards keep many cores busy while the
consumer reads and packs. The threads start with the first block, never before a fork.

The state is that of the parent before the block, and the number of documents taken from
the block. At a resume these documents are read again, but not tokenised.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence
from concurrent import futures
from typing import Any, NamedTuple

import grain
import numpy as np

from elastic_ckpt.data import blocks, records
from elastic_ckpt.data.lm import language
from elastic_ckpt.data.sources import kept_blocks

# A block ends at the first of these limits. 32,768 characters take about 5 ms.
_MAX_DOCUMENTS = 16
_MAX_CHARACTERS = 32_768
# The documents of one task, so that several threads share a block.
_DOCUMENTS_AT_A_TIME = 8

# The number of processes on this machine; `torchrun` and our launcher set it.
LOCAL_HOSTS_VARIABLE = "LOCAL_WORLD_SIZE"

Tokenize = Callable[[Sequence[language.Value]], list[np.ndarray]]
Renumber = Callable[[blocks.Block, np.ndarray], blocks.Block]


def num_threads(asked: int, *, num_processes: int = 1) -> int:
    """The number of threads for each of the processes that read a host's data.

    Args:
      asked: the configured threads of a host; 0 takes the cores that this process may
        use, divided by the number of hosts on this machine.
      num_processes: the number of processes that share them.
    """
    hosts = int(os.environ.get(LOCAL_HOSTS_VARIABLE) or 1)
    return max(1, (asked or _num_cores() // hosts) // num_processes)


class Tokens(grain.IterDataset[np.ndarray]):
    """Tokenises documents: an element is the tokens of one, int32 `[tokens]`.

    Threads work ahead of the consumer; an error in a document is raised when that
    document is due.

    Args:
      parent: records, dicts of columns.
      documents: how a record becomes tokens.
      num_threads: threads of this process that tokenise; 0 tokenises in the caller.
        Neither the tokens nor the state depend on it.
    """

    # Of single elements, if its parent has no blocks.
    makes_blocks = True

    @property
    def block_tokens(self) -> int:
        """How many tokens are drawn together: few if they take long to make."""
        return 2**16 if self._documents.tokenizer is None else 2**13

    def __init__(
        self,
        parent: grain.IterDataset,
        *,
        documents: language.Encoder,
        num_threads: int = 0,
    ) -> None:
        super().__init__(parent)
        self._documents = self._of_column = documents
        self._num_threads = num_threads
        self._renumbered: Renumber | None = None

    def __iter__(self) -> grain.DatasetIterator[np.ndarray]:
        return _TokensIterator(self, iter(self._parent))

    def blocks(self) -> blocks.Blocks:
        """The documents in blocks."""
        parent, column = self._parent, self._documents.column
        if (
            self._documents.tokenizer is None
            and isinstance(parent, records.Records)
            and column != records.RECORD
            and (batches := parent.batches(tokens=column)) is not None
        ):
            return _ColumnBlocks(batches, self._of_column, self._renumbered)
        return _TokenizedBlocks(_TokensIterator(self, iter(parent)))


def follow(
    tokens: Tokens,
    make: Callable[[language.Encoder], language.Encoder],
    renumbered: Renumber,
) -> None:
    """Replaces each token by a number that names it; see `provenance`.

    Args:
      tokens: not iterated over before.
      make: returns what makes these numbers of records, given what makes the tokens.
      renumbered: returns a block of a column with these numbers, given those of its
        records, int64.
    """
    tokens._documents, tokens._renumbered = make(tokens._documents), renumbered


class _TokensIterator(grain.DatasetIterator[np.ndarray]):
    def __init__(self, dataset: Tokens, parent: grain.DatasetIterator) -> None:
        super().__init__(parent)
        self._documents, self._num_threads = dataset._documents, dataset._num_threads
        self._block: _Block | None = None
        self._next_block: _Block | None = None
        # The parent's state before the block, and the documents taken from the block.
        self._before: Any = None
        self._taken = 0

    def __next__(self) -> np.ndarray:
        block = self._with_documents()
        is_half_taken = 2 * (self._taken + 1) >= block.num_documents
        if is_half_taken:
            self._read_ahead(block)
        part, number = divmod(self._taken - block.first, _DOCUMENTS_AT_A_TIME)
        tokens = block.parts[part].tokens()[number]
        self._taken += 1
        return tokens

    def rest(self) -> tuple[list[np.ndarray], TokenPlaces]:
        """The rest of the current block, or the next one, and its places."""
        block = self._with_documents()
        self._read_ahead(block)
        tokens = [each for part in block.parts for each in part.tokens()]
        first, self._taken = self._taken, block.num_documents
        return tokens[first - block.first :], TokenPlaces(block.before, first)

    def _with_documents(self) -> _Block:
        block = self._current()
        if self._taken == block.num_documents:
            assert block.end is not None
            if isinstance(block.end, StopIteration):
                raise StopIteration
            # The next call tries the parent again.
            self.set_state(self.get_state())
            raise block.end
        return block

    def _read_ahead(self, block: _Block) -> None:
        if self._num_threads and not block.end:
            self._next_block = self._next_block or self._read()

    def get_state(self) -> dict[str, Any]:
        if self._block and self._block.is_used_up(self._taken):
            following = self._next_block
            before = following.before if following else self._parent.get_state()
            return {"parent": before, "document": 0}
        before = self._parent.get_state() if self._before is None else self._before
        return {"parent": before, "document": self._taken}

    def set_state(self, state: dict[str, Any]) -> None:
        self._cancel()
        self._before, self._taken = state["parent"], state["document"]
        self._parent.set_state(self._before)
        self._block = self._next_block = None

    def close(self) -> None:
        self._cancel()
        super().close()

    def _cancel(self) -> None:
        for block in filter(None, (self._block, self._next_block)):
            for part in block.parts:
                part.cancel()

    def _current(self) -> _Block:
        if self._block is None:
            self._block = self._read(self._taken)
        elif self._block.is_used_up(self._taken):
            following = self._next_block or self._read()
            self._block, self._next_block, self._taken = following, None, 0
        self._before = self._block.before
        return self._block

    def _read(self, first: int = 0) -> _Block:
        # A block without the documents before `first`, which are not needed again.
        before = self._parent.get_state()
        values: list[language.Value] = []
        num_documents, num_characters, end = 0, 0, None
        while num_documents <= first or (
            num_documents < _MAX_DOCUMENTS and num_characters < _MAX_CHARACTERS
        ):
            try:
                value = self._documents.value(next(self._parent))
            except Exception as error:  # raised when the document is due
                if num_documents < first:
                    raise  # it was due before
                end = error
                break
            num_documents += 1
            num_characters += 0 if value is None else len(value)
            if num_documents > first:
                values.append(value)
        return _Block(
            before=before,
            first=first,
            num_documents=num_documents,
            parts=[
                _Part(
                    values[n : n + _DOCUMENTS_AT_A_TIME],
                    self._documents.tokens,
                    num_threads=self._num_threads,
                )
                for n in range(0, len(values), _DOCUMENTS_AT_A_TIME)
            ],
            end=end,
        )


@dataclasses.dataclass(frozen=True, slots=True)
class TokenPlaces:
    """The states before each document of a block, or of the rest of one."""

    before: Any
    first: int

    def state(self, number: int, read: blocks.Place | None = None) -> dict[str, Any]:
        """See `Places`."""
        del read
        return {"parent": self.before, "document": self.first + number}

    def read(self, number: int) -> blocks.Place:
        """See `Places`; no buffer is below."""
        return blocks.Place(self, number)


class _TokenizedBlocks:
    """Documents that threads tokenise, in their blocks."""

    def __init__(self, tokens: _TokensIterator) -> None:
        self._tokens = tokens
        self.get_state, self.set_state = tokens.get_state, tokens.set_state
        self.close = tokens.close

    def read(self, at_most: int) -> blocks.Block:
        """See `Blocks`."""
        del at_most
        return _joined(*self._tokens.rest())

    def end(self) -> blocks.Place:
        """See `Blocks`."""
        return blocks.Place(blocks.Fixed(self.get_state()), 0)


class _ColumnBlocks:
    """Documents that are lists of tokens in a column."""

    def __init__(
        self,
        batches: records.RecordBatches,
        documents: language.Encoder,
        renumbered: Renumber | None,
    ) -> None:
        self._batches = batches
        self._documents = documents
        self._renumbered = renumbered

    def read(self, at_most: int) -> blocks.Block:
        """See `Blocks`."""
        picked, places = self._batches.read(at_most)
        lists = picked.lists(self._documents.column)
        if lists is not None:
            block = _block(*lists, _ColumnPlaces(places))
        else:
            block = self._one_by_one(picked, places)
        if self._renumbered is None:
            return block
        return self._renumbered(block, places.numbers()[: len(block)])

    def end(self) -> blocks.Place:
        """See `Blocks`."""
        return blocks.Place(blocks.Fixed(self.get_state()), 0)

    def get_state(self) -> dict[str, Any]:
        """See `Blocks`."""
        return {"parent": self._batches.get_state(), "document": 0}

    def set_state(self, state: dict[str, Any]) -> None:
        """See `Blocks`."""
        self._batches.set_state(state["parent"])
        # The documents that were taken one by one; see `Tokens`.
        number = state["document"]
        while number:
            batch, places = self._batches.read(number)
            num_taken = min(number, batch.num_rows)
            self._batches.set_state(places.state(num_taken))
            number -= num_taken

    def close(self) -> None:
        """See `Blocks`."""

    def _one_by_one(
        self, picked: kept_blocks.Picked, places: records.RecordPlaces
    ) -> blocks.Block:
        # The documents before the first one that has an error.
        found: list[language.Value] = []
        for element in picked.elements():
            try:
                found.append(self._documents.value(element))
            except Exception:
                self._batches.set_state(places.state(len(found)))
                if not found:
                    raise
                break
        return _joined(self._documents.tokens(found), _ColumnPlaces(places))


@dataclasses.dataclass(frozen=True, slots=True)
class _ColumnPlaces:
    records: records.RecordPlaces

    def state(self, number: int, read: blocks.Place | None = None) -> dict[str, Any]:
        del read
        return {"parent": self.records.state(number), "document": 0}

    def read(self, number: int) -> blocks.Place:
        return blocks.Place(self, number)


def _joined(tokens: Sequence[np.ndarray], places: blocks.Places) -> blocks.Block:
    length = np.array([len(each) for each in tokens], np.int64)
    return _block(np.concatenate(tokens), np.cumsum(length) - length, length, places)


def _block(
    values: np.ndarray, start: np.ndarray, length: np.ndarray, places: blocks.Places
) -> blocks.Block:
    return blocks.Block(
        values=values,
        start=start,
        length=length,
        runs=((0, blocks.Place(places, 0)),),
    )


class _Block(NamedTuple):
    """Consecutive documents, and the error or the end of the data after them."""

    before: Any
    first: int
    num_documents: int
    parts: list[_Part]
    end: Exception | None

    def is_used_up(self, taken: int) -> bool:
        at_end = self.end is None or isinstance(self.end, StopIteration)
        return taken == self.num_documents and at_end


class _Part:
    """Some documents of a block, and their tokens once a thread has made them."""

    def __init__(
        self, values: Sequence[language.Value], tokenize: Tokenize, *, num_threads: int
    ) -> None:
        self._values = values
        self._tokenize = tokenize
        self._process = os.getpid()
        self._tokens: list[np.ndarray] | None = None
        self._future: futures.Future[list[np.ndarray]] | None = None
        if num_threads:
            self._future = _pool(num_threads).submit(tokenize, values)

    def tokens(self) -> list[np.ndarray]:
        if self._tokens is None:
            # A forked process does not have the threads, so it tokenises by itself.
            future = self._future if self._process == os.getpid() else None
            self._tokens = future.result() if future else self._tokenize(self._values)
        return self._tokens

    def cancel(self) -> None:
        if self._future:
            self._future.cancel()


# The tokenizer threads of this process, by their number, started with the first task.
_pools: dict[int, futures.ThreadPoolExecutor] = {}
os.register_at_fork(after_in_child=_pools.clear)


def _pool(num_threads: int) -> futures.ThreadPoolExecutor:
    if num_threads not in _pools:
        pool = futures.ThreadPoolExecutor(num_threads, "elastic_ckpt-tokens")
        _pools.setdefault(num_threads, pool)
    return _pools[num_threads]


def _num_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
