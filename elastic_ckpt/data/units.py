"""Which records each shard reads, as pure functions of numbers.

Each epoch has its own order of blocks, or of parts of them: a keyed permutation. It is
also an order of records, and shards have equal `share`s of it: the numbers of records
that two shards read in any number of epochs differ by one at most. A share is a run of
the order, or every g-th record of one, where g shards read small blocks together.

Data whose blocks can only be read as a whole has units `dealt` instead: the epochs
together form one endless list of units, and shard `s` of S reads entries `s`, `s + S`,
`s + 2S` and so on.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
from collections.abc import Sequence

import numpy as np

# The number of blocks per shard from which differences in their sizes average out.
_ENOUGH_BLOCKS = 4

# Shards read blocks together if none has more records than this, and all blocks not
# more than that: each host may have to read all of them.
_SMALL_BLOCK_RECORDS = 4096
_SMALL_RECORDS = 2**20
# The most blocks whose records are kept shuffled, of 8 KiB at most.
_MOST_SHUFFLED = 1024
# The most shards that read the same blocks together.
GROUP_SHARDS = 256

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
        return Unit(
            file=int(self.file[number]),
            block=int(self.block[number]),
            first=int(self.first[number]),
            num_records=int(self.num_records[number]),
            block_records=int(self.block_records[number]),
            record=int(self.record[number]),
        )

    @functools.cached_property
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


def are_small(blocks: Units) -> bool:
    """Whether shards read blocks together, a few records of each at a time."""
    largest = int(blocks.block_records.max())
    return largest <= _SMALL_BLOCK_RECORDS and blocks.total_records <= _SMALL_RECORDS


# Of all datasets: shards read the same units at about the same time.
@functools.lru_cache(maxsize=_MOST_SHUFFLED)
def _shuffled(size: int, *key: int) -> np.ndarray:
    return np.random.default_rng(key).permutation(size).astype(np.uint16)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Order:
    """The order of the records of an epoch.

    Attributes:
      units: the units, in the order of the files.
      number: the numbers of units in the order of the epoch, int64 `[units]`.
      start: how many records are before each of those, and in all, `[units + 1]`.
      shuffled_by: a seed and the number of the epoch, if records are shuffled within
        units; None if they are not.
    """

    units: Units
    number: np.ndarray
    start: Sequence[int]
    shuffled_by: tuple[int, int] | None

    @classmethod
    def of(
        cls, units: Units, key: tuple[int, int] | None, *, with_rows: bool = False
    ) -> Order:
        """The order of an epoch.

        Args:
          units: to be ordered.
          key: a seed and the number of the epoch; None leaves units and records in the
            order of the files.
          with_rows: whether records are shuffled within units, too; units then have at
            most 2**16 records.
        """
        number = np.arange(len(units))
        if key is not None:
            number = permuted(number, length=len(units), key=key)
        start = np.zeros(len(units) + 1, np.int64)
        np.cumsum(units.num_records[number], out=start[1:])
        return cls(
            units=units,
            number=number,
            start=memoryview(start.data),
            shuffled_by=key if with_rows else None,
        )

    def at(self, place: int) -> tuple[int, int, int]:
        """The number of the unit at a place, and the places of its begin and end."""
        index = bisect.bisect_right(self.start, place) - 1
        return int(self.number[index]), self.start[index], self.start[index + 1]

    def rows(self, index: int) -> np.ndarray:
        """The records of a unit in the order of the epoch.

        Args:
          index: the unit's place in the order.

        Returns:
          Their numbers in the unit, uint16 `[records]` if they are shuffled, or int64.
        """
        number = self.number[index]
        size = int(self.units.num_records[number])
        if self.shuffled_by is None:
            return np.arange(size)
        seed, epoch = self.shuffled_by
        return _shuffled(size, seed % 2**64, epoch, int(self.units.record[number]))

    def picked(self, places: range) -> list[tuple[int, np.ndarray]]:
        """The records at ascending places: the number of each unit, and those of it."""
        picked: list[tuple[int, np.ndarray]] = []
        number = 0
        while number < len(places):
            index = bisect.bisect_right(self.start, places[number]) - 1
            begin, end = self.start[index], self.start[index + 1]
            until = min(len(places), -(-(end - places.start) // places.step))
            some = places[number:until]
            rows = self.rows(index)[some.start - begin : some.stop - begin : some.step]
            picked.append((int(self.number[index]), rows))
            number = until
        return picked


def share(
    shard: int,
    *,
    num_shards: int,
    num_records: int,
    epoch: int,
    group: int = 1,
    lead: int = 0,
) -> range:
    """The places, in the order of an epoch, of the records that a shard reads.

    Shards that read one record more are others in each epoch, in turn: after any number
    of epochs with N records together, they are the N modulo S shards from `lead` on.

    Args:
      shard: its number, from 0.
      num_shards: S.
      num_records: of the epoch.
      epoch: its number, from 0.
      group: how many shards take the records of one run in turn.
      lead: the first shard that reads one record more in the first epoch.
    """
    least, rest = divmod(num_records, num_shards)
    # The shards from `first_more` on, modulo S, read one record more.
    first_more = (epoch * rest + lead) % num_shards

    if group == num_shards:
        place = (shard - first_more) % num_shards
        return range(place, num_records, num_shards)

    def num_more(shard: int) -> int:
        # How many of the shards before this one read one record more.
        end = first_more + rest
        return max(0, min(shard, end) - first_more) + max(
            0, min(shard, end - num_shards)
        )

    begin = shard - shard % group
    step = min(group, num_shards - begin)
    first = begin * least + num_more(begin)
    num = least + num_more(shard + 1) - num_more(shard)
    # Within the group, the shards that read more come first.
    before = first_more - begin
    if not 0 <= before < step:
        before = 0
    first += (shard - begin - before) % step
    return range(first, first + num * step, step)


def reader(
    place: int,
    *,
    num_shards: int,
    num_records: int,
    epoch: int,
    group: int = 1,
    lead: int = 0,
) -> tuple[int, int]:
    """The shard whose `share` has a place, and how many of the share come before."""

    def of(shard: int) -> range:
        return share(
            shard,
            num_shards=num_shards,
            num_records=num_records,
            epoch=epoch,
            group=group,
            lead=lead,
        )

    # The last group that begins at the place or before it.
    low, high = 0, -(-num_shards // group)
    while high - low > 1:
        middle = (low + high) // 2
        shards = range(middle * group, min((middle + 1) * group, num_shards))
        first = min(of(shard).start for shard in shards)
        low, high = (middle, high) if first <= place else (low, middle)
    shard = next(
        shard
        for shard in range(low * group, min((low + 1) * group, num_shards))
        if place in of(shard)
    )
    return shard, of(shard).index(place)


def dealt(turn: int, *, shard: int, num_shards: int, num_units: int) -> tuple[int, int]:
    """The epoch, and the index in its order, of the unit `shard` reads at `turn`."""
    return divmod(turn * num_shards + shard, num_units)


def permuted(place: np.ndarray, *, length: int, key: tuple[int, ...]) -> np.ndarray:
    """The numbers at indexes of a keyed permutation of `range(length)`.

    A Feistel network over the smallest square that contains the range, applied until
    the result is in the range (Black and Rogaway 2002). It needs no storage.

    Args:
      place: the indexes, of any shape.
      length: of the permutation.
      key: numbers of 64 bits.

    Returns:
      int64 of the same shape.
    """
    seed = 0
    for part in key:
        seed = mixed(seed ^ part)
    # Of half a number.
    num_bits = max(1, (length - 1).bit_length() + 1 >> 1)
    bits, half = np.uint64(num_bits), np.uint64((1 << num_bits) - 1)
    number = place.astype(np.uint64)
    outside = np.ones(number.shape, bool)
    while outside.any():
        left, right = number[outside] >> bits, number[outside] & half
        for turn in range(_ROUNDS):
            start = np.uint64((seed + (turn << 56)) & _MASK)
            left, right = right, left ^ (_all_mixed(start + right) & half)
        number[outside] = left << bits | right
        outside &= number >= length
    return number.astype(np.int64)


def mixed(number: int) -> int:
    """A 64-bit hash of a number: SplitMix64's finaliser (Steele et al. 2014)."""
    number = (number + 0x9E3779B97F4A7C15) & _MASK
    number = (number ^ number >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    number = (number ^ number >> 27) * 0x94D049BB133111EB & _MASK
    return number ^ number >> 31


def _all_mixed(number: np.ndarray) -> np.ndarray:
    # `mixed` of each number, uint64.
    number = number + np.uint64(0x9E3779B97F4A7C15)
    number = (number ^ number >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    number = (number ^ number >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return number ^ number >> np.uint64(31)
