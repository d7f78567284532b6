"""Tokens of documents, a block at a time and ahead of the consumer.

`Tokens` reads a block of documents from its parent, has threads of the process tokenise
it, and reads the next block when half of it is taken. All pipelines of a process share
the threads, so many logical shards keep many cores busy, and the consumer reads and
packs meanwhile. The threads start with the first block, never before a fork.

The state is that of the parent before the block, and how many documents of the block
were taken. At a resume these documents are read again, but not tokenised.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent import futures
from typing import Any, NamedTuple

import grain
import numpy as np

from elastic_ckpt.data import language

# A block ends with whichever comes first. 32,768 characters are tokenised in some 5 ms.
_MAX_DOCUMENTS = 16
_MAX_CHARACTERS = 32_768
# What a thread tokenises at a time, so that a block is spread over several.
_DOCUMENTS_AT_A_TIME = 8

# How many processes a launcher started on this machine; `torchrun` and ours set it.
LOCAL_HOSTS_VARIABLE = "LOCAL_WORLD_SIZE"

Tokenize = Callable[[Sequence[language.Value]], list[np.ndarray]]


def num_threads(asked: int, *, num_processes: int = 1) -> int:
    """Threads for each of the processes that read a host's data.

    Args:
      asked: threads of the host; 0 takes the cores that this process may use, divided
        by the hosts on this machine.
      num_processes: processes that share them.
    """
    hosts = int(os.environ.get(LOCAL_HOSTS_VARIABLE) or 1)
    return max(1, (asked or _num_cores() // hosts) // num_processes)


class Tokens(grain.IterDataset[np.ndarray]):
    """The tokens of each document, int32 `[tokens]`.

    An error of the parent, or of a document, is raised when that document is due.

    Args:
      parent: records as dicts of columns.
      documents: how a record is made tokens.
      num_threads: threads of this process that tokenise; 0 tokenises in the caller. The
        tokens and the state do not depend on it.
    """

    def __init__(
        self,
        parent: grain.IterDataset,
        *,
        documents: language.Documents,
        num_threads: int = 0,
    ) -> None:
        super().__init__(parent)
        self._documents = documents
        self._num_threads = num_threads

    def __iter__(self) -> grain.DatasetIterator[np.ndarray]:
        return _TokensIterator(iter(self._parent), self._documents, self._num_threads)


class _TokensIterator(grain.DatasetIterator[np.ndarray]):
    def __init__(
        self,
        parent: grain.DatasetIterator,
        documents: language.Documents,
        num_threads: int,
    ) -> None:
        super().__init__(parent)
        self._documents = documents
        self._num_threads = num_threads
        self._block: _Block | None = None
        self._next_block: _Block | None = None
        # The parent's state before the block, and the documents taken of it.
        self._before: Any = None
        self._taken = 0

    def __next__(self) -> np.ndarray:
        block = self._current()
        if self._taken == block.num_documents:
            assert block.end is not None
            if isinstance(block.end, StopIteration):
                raise StopIteration
            # Asked again, the parent tries again.
            self.set_state(self.get_state())
            raise block.end
        is_half_taken = 2 * (self._taken + 1) >= block.num_documents
        if self._num_threads and is_half_taken and not block.end:
            self._next_block = self._next_block or self._read()
        number, place = divmod(self._taken - block.first, _DOCUMENTS_AT_A_TIME)
        tokens = block.parts[number].tokens()[place]
        self._taken += 1
        return tokens

    def get_state(self) -> dict[str, Any]:
        if self._block and self._block.is_used_up(self._taken):
            following = self._next_block
            before = following.before if following else self._parent.get_state()
            return {"parent": before, "document": 0}
        before = self._parent.get_state() if self._before is None else self._before
        return {"parent": before, "document": self._taken}

    def set_state(self, state: dict[str, Any]) -> None:
        self._cancel()
        # States from before there were blocks are those of the parent.
        before = state["parent"] if "document" in state else state
        self._parent.set_state(before)
        self._block = self._next_block = None
        self._before, self._taken = before, state.get("document", 0)

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
        # A block of which the documents before `first` are not needed again.
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


class _Block(NamedTuple):
    """Documents that follow each other, and the error or end of data after them."""

    before: Any
    first: int
    num_documents: int
    parts: list[_Part]
    end: Exception | None

    def is_used_up(self, taken: int) -> bool:
        at_end = self.end is None or isinstance(self.end, StopIteration)
        return taken == self.num_documents and at_end


class _Part:
    """Documents of a block, and their tokens when a thread has made them."""

    def __init__(
        self, values: Sequence[language.Value], tokenize: Tokenize, *, num_threads: int
    ) -> None:
        self._values = values
        self._tokenize = tokenize
        self._threads = _threads
        self._tokens: list[np.ndarray] | None = None
        self._future: futures.Future[list[np.ndarray]] | None = None
        if num_threads:
            self._future = _threads.pool(num_threads).submit(tokenize, values)

    def tokens(self) -> list[np.ndarray]:
        if self._tokens is None:
            # A process that was forked has none of the threads that would make them.
            future = self._future if self._threads is _threads else None
            self._tokens = future.result() if future else self._tokenize(self._values)
        return self._tokens

    def cancel(self) -> None:
        if self._future:
            self._future.cancel()


class _Threads:
    """The threads of this process, which start with the first task."""

    def __init__(self) -> None:
        self._pools: dict[int, futures.ThreadPoolExecutor] = {}

    def pool(self, num_threads: int) -> futures.ThreadPoolExecutor:
        if num_threads not in self._pools:
            pool = futures.ThreadPoolExecutor(num_threads, "elastic_ckpt-tokens")
            self._pools.setdefault(num_threads, pool)
        return self._pools[num_threads]


_threads = _Threads()


def _begin_anew() -> None:
    global _threads
    _threads = _Threads()


os.register_at_fork(after_in_child=_begin_anew)


def _num_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
