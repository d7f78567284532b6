"""Units of work, and their assignment to shards, as pure functions of numbers.

Each epoch has its own order of units, a keyed permutation that is computed one number
at a time. The epochs together form one endless list, and shard `s` of S reads entries
`s`, `s + S`, `s + 2S` and so on. Thus each unit is read once in an epoch, and all
shards read the same number of units, whatever the number of units.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

# The number of blocks per shard from which differences in their sizes average out.
_ENOUGH_BLOCKS = 4

_MASK = 2**64 - 1
_ROUNDS = 6


@dataclasses.dataclass(frozen=True, kw_only=True)
class Unit:
    """A run of records in one block of one file.

    Attributes:
      file: the file's number.
      block: the block's number in the file.
      first: the number of the first record in its block.
      num_records: the number of records.
      block_records: the number of records in the whole block.
      record: the number of the first record over all files.
    """

    file: int
    block: int
    first: int
    num_records: int
    block_records: int
    record: int


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Units:
    """Units in the order of their records, each field an int64 `[units]`."""

    file: np.ndarray
    block: np.ndarray
    first: np.ndarray
    num_records: np.ndarray
    block_records: np.ndarray
    record: np.ndarray

    def __len__(self) -> int:
        return len(self.file)

    def __getitem__(self, number: int) -> Unit:
        fields = dataclasses.fields(self)
        return Unit(**{f.name: int(getattr(self, f.name)[number]) for f in fields})

    @property
    def total_records(self) -> int:
        """Records of an epoch."""
        return int(self.num_records.sum())


def cut(
    block_records: Sequence[np.ndarray],
    num_shards: int,
    *,
    whole: Sequence[bool] | None = None,
) -> Units:
    """The units of files whose blocks have the given numbers of records.

    A unit is a block. If shards would get too few blocks to have similar sizes, blocks
    are cut into parts of sizes as equal as possible, and S divides their number. No
    unit is empty.

    Args:
      block_records: for each file, the number of records in each block.
      num_shards: S.
      whole: for each file, whether its blocks are not cut; by default all may be.
    """
    records = np.concatenate([np.asarray(b, np.int64) for b in block_records])
    counts = np.array([len(blocks) for blocks in block_records])
    file = np.repeat(np.arange(len(counts)), counts)
    block = np.arange(len(records)) - np.repeat(np.cumsum(counts) - counts, counts)
    filled = records > 0
    file, block, records = file[filled], block[filled], records[filled]
    may_cut = ~np.array(whole or [False] * len(counts), bool)[file]
    first, num_records = np.zeros_like(records), records
    if len(records) < _ENOUGH_BLOCKS * num_shards:
        parts = np.ones_like(records)
        required = num_shards * -(-len(records) // num_shards) - np.sum(~may_cut)
        if may_cut.any():
            parts[may_cut] = _parts(records[may_cut], max(int(required), 1))
        # Part i of a block of n records begins at record i * n // parts.
        of_block = np.repeat(np.arange(len(records)), parts)
        part = np.arange(len(of_block)) - np.repeat(np.cumsum(parts) - parts, parts)
        file, block, records = file[of_block], block[of_block], records[of_block]
        first = part * records // parts[of_block]
        num_records = (part + 1) * records // parts[of_block] - first
    return Units(
        file=file,
        block=block,
        first=first,
        num_records=num_records,
        block_records=records,
        record=np.cumsum(num_records) - num_records,
    )


def _parts(records: np.ndarray, required: int) -> np.ndarray:
    # Into how many parts each block is cut for about so many in all.
    required = min(max(required, len(records)), int(records.sum()))
    # Finds the smallest size of a part that does not result in too many parts.
    low, high = 0, int(records.max())
    while high - low > 1:
        size = (low + high) // 2
        fits = (-(-records // size)).sum() <= required
        low, high = (low, size) if fits else (size, high)
    parts = -(-records // high)
    while rest := required - int(parts.sum()):
        sizes = records / parts
        parts[np.flatnonzero(sizes == sizes.max())[:rest]] += 1
    return parts


def dealt(turn: int, *, shard: int, num_shards: int, num_units: int) -> tuple[int, int]:
    """The epoch, and the index in its order, of the unit `shard` reads at `turn`."""
    return divmod(turn * num_shards + shard, num_units)


def permuted(place: int, *, length: int, key: tuple[int, ...]) -> int:
    """The number at index `place` of a keyed permutation of `range(length)`.

    A Feistel network over the smallest square that contains the range, applied until
    the result is in the range (Black and Rogaway 2002). It needs no storage.
    """
    bits, seed = _network(length, key)
    half = (1 << bits) - 1
    while True:
        left, right = place >> bits, place & half
        for turn in range(_ROUNDS):
            left, right = right, left ^ (mixed(seed + (turn << 56) + right) & half)
        place = left << bits | right
        if place < length:
            return place


def place_of(number: int, *, length: int, key: tuple[int, ...]) -> int:
    """The index at which `permuted` has `number`: the network, run backwards."""
    bits, seed = _network(length, key)
    half = (1 << bits) - 1
    while True:
        left, right = number >> bits, number & half
        for turn in reversed(range(_ROUNDS)):
            left, right = right ^ (mixed(seed + (turn << 56) + left) & half), left
        number = left << bits | right
        if number < length:
            return number


def _network(length: int, key: tuple[int, ...]) -> tuple[int, int]:
    # The bits of half a number, and the seed of the rounds.
    seed = 0
    for part in key:
        seed = mixed(seed ^ part)
    return max(1, (length - 1).bit_length() + 1 >> 1), seed


def mixed(number: int) -> int:
    """A 64-bit hash of a number: SplitMix64's finaliser (Steele et al. 2014)."""
    number = (number + 0x9E3779B97F4A7C15) & _MASK
    number = (number ^ number >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    number = (number ^ number >> 27) * 0x94D049BB133111EB & _MASK
    return number ^ number >> 31
