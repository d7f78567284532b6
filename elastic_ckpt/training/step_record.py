"""What a step was computed from, and its line in the step log; see STEP_LOG.md.

A batch is its rows: their example ids, and digests of their tokens. A line has a digest
of all rows in order and, in a proof, the ids. They are listed as runs, `[5, [100, 4,
2]]` is 5, 100, 102, 104, 106: ids of data in the order of its files are few runs. If
the ids take too much space, as those of a large shuffled batch do, digests describe
them.

These digests are sums, modulo 2**64, of a 64-bit hash of each row
(`core.digest.mixed`). Two of them cover the whole batch in any order of rows, so that a
batch with the same rows in other places is recognised. Those of blocks of rows depend
on the order in the block; they limit a difference to some rows.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import math
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

from elastic_ckpt.core import digest, storage

PROOF = "proof"
SUMMARY = "summary"
# BLAKE2b-128.
_DIGEST_BYTES = 16
# The most rows of a batch: a damaged file must not exhaust the memory of a reader.
_MAX_ROWS = 2**24
# The most JSON text of the ids of a step; if it is longer, they are not listed.
MAX_ID_BYTES = 1600
# A shorter run takes no less space than its ids.
_LEAST_COUNT = 4
MAX_BLOCKS = 32
_HEX = 16

Items = Sequence[int | list[int]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rows:
    """The rows of a batch, in order.

    Attributes:
      ids: their example ids, uint64 `[rows]`.
      digests: of their tokens, uint32 `[rows]`.
    """

    ids: np.ndarray
    digests: np.ndarray

    def digest(self) -> str:
        """The digest of ids and tokens in row order, in hex digits."""
        return digest.batch_digest(self.ids, self.digests, num_bytes=_DIGEST_BYTES)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BatchDigests:
    """The digests of a batch, each of 16 hex digits.

    Attributes:
      examples: of the example ids of all rows, in any order.
      contents: of the ids and tokens of all rows, in any order.
      blocks: those of all blocks of `block_rows` rows, joined. The digest of a block
        covers its ids and tokens in order; equal blocks have equal digests, in any
        place of any batch.
    """

    examples: str
    contents: str
    blocks: str

    @classmethod
    def of_rows(cls, rows: Rows) -> BatchDigests:
        """The digests of one row or more."""
        size = block_rows(len(rows.ids))
        place = np.arange(len(rows.ids))
        blocks = np.add.reduceat(
            digest.mixed(place % size, rows.ids, rows.digests), place[::size]
        )
        contents = digest.mixed(rows.ids, rows.digests).sum(dtype=np.uint64)
        return cls(
            examples=_hex(example_sum(rows.ids)),
            contents=_hex(int(contents)),
            blocks="".join(map(_hex, blocks.tolist())),
        )

    @property
    def block_digests(self) -> list[str]:
        """The digest of each block."""
        starts = range(0, len(self.blocks), _HEX)
        return [self.blocks[start : start + _HEX] for start in starts]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StepRecord:
    """One step of a run.

    Attributes:
      step: its number, from 0.
      loss: over the global batch, before the update; NaN if it was not logged.
      digest: of ids and tokens in row order; 32 hex digits.
      num_rows: of the global batch.
      attempt: the number of the attempt that logged it.
      runs: example ids in row order; empty if they are not listed.
      digests: of the batch and of blocks of its rows; None if the ids are listed, and
        in a summary.
    """

    step: int
    loss: float
    digest: str
    num_rows: int
    attempt: int
    runs: Items = ()
    digests: BatchDigests | None = None

    @property
    def ids(self) -> tuple[int, ...]:
        """Example ids in row order; empty if they are not listed."""
        return decoded(self.runs)

    def of_rows(self, rows: Rows) -> StepRecord:
        """The record that these rows would have in its place, in the same detail."""
        return dataclasses.replace(
            self,
            digest=rows.digest(),
            num_rows=len(rows.ids),
            runs=rows.ids.tolist() if self.runs else (),
            digests=BatchDigests.of_rows(rows) if self.digests else None,
        )

    def parts(self) -> collections.Counter[int | str]:
        """The rows by the smallest thing that is known of them: an id, or a digest."""
        if self.runs:
            return collections.Counter(self.ids)
        parts: collections.Counter[int | str] = collections.Counter()
        if self.digests is None:
            parts[self.digest] = self.num_rows
            return parts
        size = block_rows(self.num_rows)
        for number, block in enumerate(self.digests.block_digests):
            parts[block] += min(size, self.num_rows - number * size)
        return parts

    @property
    def example_sum(self) -> int:
        """The sum of the hashed ids; 0 if nothing is known of them."""
        if self.runs:
            return example_sum(np.array(self.ids, np.uint64))
        return int(self.digests.examples, 16) if self.digests else 0


def block_rows(num_rows: int) -> int:
    """The rows of a block, of which the last one may have fewer."""
    return max(1, -(-num_rows // MAX_BLOCKS))


def example_sum(ids: np.ndarray) -> int:
    """The number that `BatchDigests.examples` writes in hex digits."""
    return int(digest.mixed(ids).sum(dtype=np.uint64))


def encoded(ids: np.ndarray) -> Items | None:
    """The ids, uint64 `[rows]`, as runs; None if they take over `MAX_ID_BYTES`."""
    strides = np.diff(ids.view(np.int64))
    # The last id of each stretch with one stride. A stretch may yield no item, but then
    # the next one does, and an item takes two bytes or more.
    ends = np.flatnonzero(strides[1:] != strides[:-1]) + 1
    if len(ends) > MAX_ID_BYTES:
        return None
    items: list[int | list[int]] = []
    position = 0
    numbers = ids.tolist()
    for end in [*ends.tolist(), len(numbers) - 1]:
        length = end - position + 1
        if length < _LEAST_COUNT:
            items += numbers[position:end]
            position = max(position, end)
        else:
            items.append([numbers[position], length, int(strides[position])])
            position = end + 1
    items += numbers[position:]
    size = len(json.dumps(items, separators=(",", ":")))
    return items if size <= MAX_ID_BYTES else None


def decoded(items: Items) -> tuple[int, ...]:
    """The inverse of `encoded`; also accepts a plain list of ids."""
    ids: list[int] = []
    for item in items:
        if isinstance(item, int):
            ids.append(item % 2**64)
        else:
            start, count, stride = item
            ids += [(start + number * stride) % 2**64 for number in range(count)]
    return tuple(ids)


def line(
    step: int, loss: float | None, rows: Rows, *, detail: str
) -> dict[str, storage.Json]:
    """The line of a step, at most 2,000 bytes.

    Args:
      step: its number.
      loss: over its batch; None if it is not known.
      rows: of the batch.
      detail: `PROOF` lists the ids, or has digests of blocks of rows if the ids take
        too much space; `SUMMARY` has neither.
    """
    fields: dict[str, Any] = {"step": step}
    if loss is not None:
        fields["loss"] = loss
    fields |= {"digest": rows.digest(), "rows": len(rows.ids)}
    if detail == PROOF:
        runs = encoded(rows.ids)
        if runs is not None:
            fields["ids"] = runs
        else:
            fields |= dataclasses.asdict(BatchDigests.of_rows(rows))
    return fields


def parse(line: dict[str, Any], *, attempt: int) -> StepRecord:
    """The record of a line.

    Raises:
      KeyError, TypeError, ValueError: if it is not the line of a step.
    """
    runs = line.get("ids", [])
    num_ids = sum(map(_count, runs))
    num_rows = line["rows"]
    if "ids" in line and num_rows != num_ids:
        raise ValueError(f"{num_ids} ids of {num_rows} rows")
    if not 0 < num_rows <= _MAX_ROWS:
        raise ValueError(f"a batch of {num_rows} rows")
    if len(bytes.fromhex(line["digest"])) != _DIGEST_BYTES:
        raise ValueError(f"digest {line['digest']}")
    return StepRecord(
        step=line["step"],
        loss=line.get("loss", math.nan),
        digest=line["digest"],
        num_rows=num_rows,
        attempt=attempt,
        runs=runs,
        digests=_parsed_digests(line, num_rows) if "blocks" in line else None,
    )


def _count(item: int | list[int]) -> int:
    if isinstance(item, int):
        return 1
    _, count, _ = map(operator.index, item)
    if count < 1:
        raise ValueError(f"a run of {count} ids")
    return count


def _parsed_digests(line: dict[str, Any], num_rows: int) -> BatchDigests:
    names = [field.name for field in dataclasses.fields(BatchDigests)]
    texts = {name: line[name] for name in names}
    num_blocks = -(-num_rows // block_rows(num_rows))
    digits = [len(bytes.fromhex(text)) * 2 for text in texts.values()]
    if digits != [_HEX, _HEX, num_blocks * _HEX]:
        raise ValueError(f"digests of {digits} hex digits for {num_rows} rows")
    return BatchDigests(**texts)


def _hex(value: int) -> str:
    return f"{value:016x}"
