"""Pure functions that determine which records each shard reads.

In each epoch, a keyed permutation of the blocks defines an order of records. Shards
read equal `share`s of this order: over any number of epochs, the record counts of two
shards differ by at most one. A share is a run of consecutive records, or every g-th
record of a run that a group of g shards reads together.
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Sequence

import numpy as np

# Limits of a small dataset, which each host may have to read completely: records per
# block, total records and total bytes.
_SMALL_BLOCK_RECORDS = 4096
_SMALL_RECORDS = 2**20
_SMALL_BYTES = 2**30
# Maximum number of cached block shuffles, of up to 8 KiB each.
_MOST_SHUFFLED = 1024
# Maximum number of shards that read the same blocks together.
GROUP_SHARDS = 256
# Chains of blocks per group. A group may read only part of the chain at each end.
_CHAINS_OF_GROUP = 2
# Minimum number of cached epochs, because shards are in different epochs. With few
# blocks, a shard that opens skips through many epochs.
_LEAST_EPOCHS = 3
_MOST_ORDERED = 2**15

_ROUNDS = 6


class Order:
    """The order in which shards read a dataset's records in each epoch.

    Shards share the blocks of a small dataset, whose records are shuffled within each
    block. If there are few chains of blocks, shards also share them. Otherwise, many
    shards would begin within a chain and would have to read it from its start.

    Args:
      sizes: the number of records in each block, int64 `[blocks]`.
      is_chained: whether each block can only be read after its predecessor.
      num_bytes: the size of the dataset.
      num_shards: the number of shards.
      seed: the seed of the permutations; None leaves blocks and records in file order.
      lead: the first shard that reads an extra record in the first epoch.

    Attributes:
      first: the record number at which each block begins.
      num_records: the number of records in an epoch.
      is_shared: whether multiple shards read the same blocks.
    """

    def __init__(
        self,
        sizes: np.ndarray,
        is_chained: np.ndarray,
        *,
        num_bytes: int,
        num_shards: int,
        seed: int | None,
        lead: int = 0,
    ) -> None:
        self._sizes, self._seed = sizes, seed
        self.first = np.cumsum(sizes) - sizes
        self.num_records = int(sizes.sum())
        # The first block and the length of each chain.
        self._begin = np.flatnonzero(~is_chained)
        self._length = np.diff(self._begin, append=len(sizes))
        is_small = (
            int(sizes.max()) <= _SMALL_BLOCK_RECORDS
            and self.num_records <= _SMALL_RECORDS
            and num_bytes <= _SMALL_BYTES
        )
        group = 1
        if is_small:
            group = num_shards
        elif is_chained.any():
            group = -(-_CHAINS_OF_GROUP * num_shards // len(self._begin))
        self.is_shared = group > 1
        self._shuffles = is_small and seed is not None
        self._sharing = {
            "num_shards": num_shards,
            "num_records": self.num_records,
            "group": min(group, num_shards, GROUP_SHARDS),
            "lead": lead,
        }
        num_epochs = max(_LEAST_EPOCHS, _MOST_ORDERED // len(sizes))
        self._epoch = functools.lru_cache(num_epochs)(self._blocks_in)

    def share(self, shard: int, epoch: int) -> range:
        """The positions in an epoch of the records that a shard reads; see `share`."""
        return share(shard, epoch=epoch, **self._sharing)

    def next_in_block(
        self, epoch: int, positions: range
    ) -> tuple[int, Sequence[int], int | None]:
        """Returns the records at the first `positions`, up to the end of their block.

        Returns:
          The block, the record numbers in the block, and the next block of the epoch.
        """
        number, start = self._epoch(epoch)
        index = bisect.bisect_right(start, positions[0]) - 1
        begin, end = start[index], start[index + 1]
        some = positions[: -(-(end - positions[0]) // positions.step)]
        block = int(number[index])
        rows = range(some.start - begin, some.stop - begin, some.step)
        numbers: Sequence[int] = rows
        if self._shuffles:
            shuffled = self._rows(epoch, block)
            numbers = shuffled[rows.start : rows.stop : rows.step].tolist()
        following = int(number[index + 1]) if index + 1 < len(number) else None
        return block, numbers, following

    def find(self, record: int, epoch: int) -> tuple[int, int]:
        """The shard that reads a record, and how many records it reads before it."""
        block = int(np.searchsorted(self.first, record, side="right")) - 1
        number, start = self._epoch(epoch)
        row = record - int(self.first[block])
        if self._shuffles:
            row = int(np.flatnonzero(self._rows(epoch, block) == row)[0])
        position = start[int(np.flatnonzero(number == block)[0])] + row
        shares = (self.share(n, epoch) for n in range(self._sharing["num_shards"]))
        return next(
            (n, of.index(position)) for n, of in enumerate(shares) if position in of
        )

    def _blocks_in(self, epoch: int) -> tuple[np.ndarray, Sequence[int]]:
        # The blocks in an epoch's order, and the number of records before each.
        chain = np.arange(len(self._begin))
        if self._seed is not None:
            chain = permuted(chain, length=len(chain), key=(self._seed, epoch))
        begin, length = self._begin[chain], self._length[chain]
        before = np.cumsum(length) - length
        number = np.arange(len(self._sizes)) + np.repeat(begin - before, length)
        start = np.zeros(len(number) + 1, np.int64)
        np.cumsum(self._sizes[number], out=start[1:])
        return number, memoryview(start.data)

    def _rows(self, epoch: int, block: int) -> np.ndarray:
        assert self._seed is not None
        return _shuffled(int(self._sizes[block]), self._seed % 2**64, epoch, block)


# Shared by all datasets: shards read the same blocks at about the same time.
@functools.lru_cache(maxsize=_MOST_SHUFFLED)
def _shuffled(size: int, *key: int) -> np.ndarray:
    return np.random.default_rng(key).permutation(size).astype(np.uint16)


def share(
    shard: int,
    *,
    num_shards: int,
    num_records: int,
    epoch: int,
    group: int = 1,
    lead: int = 0,
) -> range:
    """The positions, in the order of an epoch, of the records that a shard reads.

    The extra records rotate over the shards: after N records of any number of epochs,
    the N modulo S shards from `lead` on have read one more than the others.

    Args:
      shard: the shard, from 0.
      num_shards: the number of shards, S.
      num_records: the number of records in an epoch.
      epoch: the epoch, from 0.
      group: the number of shards that read one run of records round-robin.
      lead: the first shard that reads an extra record in the first epoch.
    """
    least, rest = divmod(num_records, num_shards)
    # `rest` shards from `first_more` on, modulo S, read an extra record.
    first_more = (epoch * rest + lead) % num_shards

    def num_more(shard: int) -> int:
        # The number of shards before this one that read an extra record.
        end = first_more + rest
        return max(0, min(shard, end) - first_more) + max(
            0, min(shard, end - num_shards)
        )

    begin = shard - shard % group
    step = min(group, num_shards - begin)
    first = begin * least + num_more(begin)
    num = least + num_more(shard + 1) - num_more(shard)
    # Within the group, the shards with an extra record come first.
    before = first_more - begin
    if not 0 <= before < step:
        before = 0
    first += (shard - begin - before) % step
    return range(first, first + num * step, step)


def permuted(place: np.ndarray, *, length: int, key: tuple[int, ...]) -> np.ndarray:
    """Evaluates a keyed permutation of `range(length)` at the given indexes.

    A Feistel network over the smallest square that contains the range, applied until
    the result is in the range (Black and Rogaway 2002). It needs no storage.

    Args:
      place: the indexes, of any shape.
      length: the length of the permutation.
      key: integers; only their low 64 bits are used.

    Returns:
      The permuted indexes, int64, of the same shape.
    """
    seed = np.zeros(1, np.uint64)
    for number in key:
        seed = _mixed(seed ^ np.uint64(number % 2**64))
    # The number of bits in each half of a number.
    num_bits = max(1, (length - 1).bit_length() + 1 >> 1)
    bits, half = np.uint64(num_bits), np.uint64((1 << num_bits) - 1)
    number = place.astype(np.uint64)
    outside = np.ones(number.shape, bool)
    while outside.any():
        left, right = number[outside] >> bits, number[outside] & half
        for turn in range(_ROUNDS):
            start = seed + np.uint64(turn << 56)
            left, right = right, left ^ (_mixed(start + right) & half)
        number[outside] = left << bits | right
        outside &= number >= length
    return number.astype(np.int64)


def _mixed(number: np.ndarray) -> np.ndarray:
    # SplitMix64's finalizer (Steele et al. 2014), on uint64.
    number = number + np.uint64(0x9E3779B97F4A7C15)
    number = (number ^ number >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    number = (number ^ number >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return number ^ number >> np.uint64(31)
