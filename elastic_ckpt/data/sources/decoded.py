"""Decoded blocks, shared by the shards of a process.

The most recently used blocks of all files and datasets are cached within a memory
budget. A file whose blocks can only be read in sequence stays open between blocks.
"""

from __future__ import annotations

import bisect
import collections
import functools
import itertools
import os
from collections.abc import Callable, Hashable, Iterator

import numpy as np

from elastic_ckpt.data.sources import files, kept, source

# Maximum memory for a process's cached blocks.
BUDGET_BYTES = 256 * 2**20
# Maximum number of files kept open between blocks of a chain.
_MAX_OPEN = 256


_KEPT: kept.Kept[source.Block] = kept.Kept(
    lambda: BUDGET_BYTES, lambda block: block.num_bytes
)
files.register_cache(_KEPT.begin)


class Blocks:
    """The blocks of a source, numbered over all of its files.

    Attributes:
      sizes: the number of records in each block, int64 `[blocks]`.
      is_chained: whether each block follows its predecessor even when shuffled.
      num_bytes: the size of all files.
      first_records: the index of each file's first record, counted over all files.
    """

    def __init__(self, of: source.Source) -> None:
        self._of, self._indexes = of, source.indexes(of)
        self.sizes = np.concatenate([index.block_records for index in self._indexes])
        self.is_chained = np.concatenate(
            [np.diff(index.chains, prepend=-1) == 0 for index in self._indexes]
        )
        self.num_bytes = sum(index.content.num_bytes for index in self._indexes)
        records = np.cumsum([0, *(index.num_records for index in self._indexes)])
        self.first_records = records[:-1]
        counts = (len(index.block_records) for index in self._indexes)
        self._first = [0, *itertools.accumulate(counts)]

    def get(self, number: int, following: int | None) -> source.Block:
        """Decodes a block and, from an object store, requests the `following` one."""
        file, block = self._place(number)
        path = self._of.files[file]

        def decode() -> source.Block:
            if following is not None:
                ahead, number = self._place(following)
                files.read_ahead(
                    self._of.files[ahead], *self._indexes[ahead].span(number)
                )
            read = functools.partial(self._of.decode, file, block)
            try:
                return files.retried(read, f"{path}, block {block}")
            except source.CorruptError as error:
                return source.LostBlock(error)

        return _KEPT.get((path, block, self._of.key), decode).result()

    def _place(self, number: int) -> tuple[int, int]:
        # If more than one file begins at this block, only the last is not empty.
        file = bisect.bisect_right(self._first, number) - 1
        return file, number - self._first[file]


@functools.cache
def blocks(of: source.Source) -> Blocks:
    """The blocks of a source."""
    return Blocks(of)


files.register_cache(blocks.cache_clear)


# Files kept open between blocks of a chain, the least recently used first.
_OPEN: collections.OrderedDict[Hashable, Iterator[source.Block]]
_OPEN = collections.OrderedDict()
files.register_cache(_OPEN.clear)
# A forked process shares the files' offsets with its parent.
os.register_at_fork(after_in_child=_OPEN.clear)


def in_sequence(
    of: source.Source,
    file: int,
    block: int,
    begin: Callable[[], Iterator[source.Block]],
) -> source.Block:
    """Reads a block that can only be read after its predecessors.

    `begin` returns an iterator over the blocks of the chain, starting with the first.
    After a `CorruptError`, the rest of the chain is lost.
    """
    chain = source.indexes(of)[file].chain(block)
    place = of.files[file], of.key
    opened = _OPEN.pop((*place, block), None)
    if opened is None:
        opened = itertools.islice(begin(), block - chain.start, None)
    try:
        found = next(opened)
    except source.CorruptError as error:
        found = source.LostBlock(error)
        opened = itertools.repeat(found)
    if block + 1 in chain:
        _OPEN[(*place, block + 1)] = opened
        while len(_OPEN) > _MAX_OPEN:
            _OPEN.popitem(last=False)
    return found
