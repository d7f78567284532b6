"""Decoded blocks, which the shards of a process share.

The blocks that were used last, of all files and datasets of the process, have a budget
of memory. A file whose blocks can only be read one after the other stays open between
two of them.
"""

from __future__ import annotations

import bisect
import collections
import functools
import itertools
import os
import threading
from collections.abc import Callable, Hashable, Iterator

import numpy as np

from elastic_ckpt.data.sources import files, source

# The memory of all blocks that are kept in a process.
BUDGET_BYTES = 256 * 2**20
# The most files that are open between two blocks of a chain.
_MAX_OPEN = 256


class _Kept:
    """The decoded blocks that were used last."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Keeps none; also after a fork, when another thread may hold the lock."""
        self._lock = threading.Lock()
        self._blocks: collections.OrderedDict[Hashable, source.Block]
        self._blocks = collections.OrderedDict()
        # Held while a block is decoded, so that others wait for it.
        self._decoding: dict[Hashable, threading.Lock] = {}
        self.num_bytes = 0

    def get(self, key: Hashable, decode: Callable[[], source.Block]) -> source.Block:
        """The block of a key, decoded if it is not kept."""
        found = self._find(key)
        if found is not None:
            return found
        with self._lock:
            decoding = self._decoding.setdefault(key, threading.Lock())
        with decoding:
            found = self._find(key)
            if found is not None:
                return found
            block = decode()
            with self._lock:
                self._blocks[key] = block
                self.num_bytes += block.num_bytes
                while self.num_bytes > BUDGET_BYTES and len(self._blocks) > 1:
                    self.num_bytes -= self._blocks.popitem(last=False)[1].num_bytes
                self._decoding.pop(key, None)
        return block

    def _find(self, key: Hashable) -> source.Block | None:
        with self._lock:
            found = self._blocks.get(key)
            if found is not None:
                self._blocks.move_to_end(key)
            return found


_KEPT = _Kept()
files.register_cache(_KEPT.begin)
os.register_at_fork(after_in_child=_KEPT.begin)


class Blocks:
    """The blocks of a source, numbered over all of its files.

    Attributes:
      sizes: the number of records of each, int64 `[blocks]`.
      is_chained: of each, whether it follows the one before it in any order.
      num_bytes: of all files.
      first_records: the number of the first record of each file.
    """

    def __init__(self, of: source.Source) -> None:
        self._of, self._indexes = of, source.indexes(of)
        self.sizes = np.concatenate([index.block_records for index in self._indexes])
        self.is_chained = np.concatenate(
            [
                np.zeros(len(index.block_records), bool)
                if index.is_chained is None
                else index.is_chained
                for index in self._indexes
            ]
        )
        self.num_bytes = sum(index.content.num_bytes for index in self._indexes)
        records = np.cumsum([0, *(index.num_records for index in self._indexes)])
        self.first_records = records[:-1]
        counts = (len(index.block_records) for index in self._indexes)
        self._first = [0, *itertools.accumulate(counts)]

    def get(self, number: int, following: int | None) -> source.Block:
        """A block, decoded; requests the one that follows if it is in a store."""
        file, block = self._place(number)
        path = self._of.files[file]

        def decode() -> source.Block:
            if following is not None:
                self._request(*self._place(following))
            read = functools.partial(self._of.decode, file, block)
            return files.retried(read, f"{path}, block {block}")

        return _KEPT.get((path, block, self._of.key), decode)

    def _place(self, number: int) -> tuple[int, int]:
        # Of the files that begin there, all but the last are empty.
        file = bisect.bisect_right(self._first, number) - 1
        return file, number - self._first[file]

    def _request(self, file: int, block: int) -> None:
        index = self._indexes[file]
        if index.block_bytes is not None:
            files.read_ahead(self._of.files[file], *index.span(block))


@functools.cache
def blocks(of: source.Source) -> Blocks:
    """The blocks of a source."""
    return Blocks(of)


files.register_cache(blocks.cache_clear)


class _Chains:
    """Files that are open between two blocks of a chain, the least recent first."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Keeps none; also after a fork, as the parent reads on in the same files."""
        self._lock = threading.Lock()
        self._open: collections.OrderedDict[Hashable, Iterator[source.Block]]
        self._open = collections.OrderedDict()

    def get(
        self,
        key: Hashable,
        chain: range,
        block: int,
        begin: Callable[[], Iterator[source.Block]],
    ) -> source.Block:
        with self._lock:
            opened = self._open.pop((key, block), None)
        if opened is None:
            opened = itertools.islice(begin(), block - chain.start, None)
        found = next(opened)
        if block + 1 in chain:
            with self._lock:
                self._open[key, block + 1] = opened
                while len(self._open) > _MAX_OPEN:
                    self._open.popitem(last=False)
        return found


_CHAINS = _Chains()
files.register_cache(_CHAINS.begin)
os.register_at_fork(after_in_child=_CHAINS.begin)


def in_turn(
    of: source.Source,
    file: int,
    block: int,
    begin: Callable[[], Iterator[source.Block]],
) -> source.Block:
    """A block that can only be read after those before it.

    Args:
      of: the source.
      file: the number of the file.
      block: that of the block.
      begin: returns the blocks of its chain, from the first one on.
    """
    chain = source.indexes(of)[file].chain(block)
    return _CHAINS.get((of.files[file], of.key), chain, block, begin)
