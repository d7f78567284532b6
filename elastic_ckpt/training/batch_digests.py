"""Digests of a batch that describe its rows without listing them.

They are sums, modulo 2**64, of a 64-bit hash of each row (`core.digest.mixed`). Two of
them cover the whole batch in any order of rows, so that a batch with the same rows in
other places is recognised. Those of blocks of rows depend on the order in the block;
they limit a difference to some rows.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from elastic_ckpt.core import digest

MAX_BLOCKS = 32
_HEX = 16


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

    @property
    def block_digests(self) -> list[str]:
        """The digest of each block."""
        starts = range(0, len(self.blocks), _HEX)
        return [self.blocks[start : start + _HEX] for start in starts]

    @property
    def line(self) -> dict[str, str]:
        """The fields of a line of the step log."""
        return {
            "examples": self.examples,
            "contents": self.contents,
            "blocks": self.blocks,
        }


def block_rows(num_rows: int) -> int:
    """The rows of a block, of which the last one may have fewer."""
    return max(1, -(-num_rows // MAX_BLOCKS))


def digests(ids: np.ndarray, row_digests: np.ndarray) -> BatchDigests:
    """The digests of a batch.

    Args:
      ids: example ids in row order, uint64 `[rows]`, one row or more.
      row_digests: of the tokens of the rows, uint32 `[rows]`.
    """
    rows = block_rows(len(ids))
    place = np.arange(len(ids)) % rows
    blocks = np.add.reduceat(
        digest.mixed(place, ids, row_digests), np.arange(0, len(ids), rows)
    )
    return BatchDigests(
        examples=_hex(example_sum(ids)),
        contents=_hex(int(digest.mixed(ids, row_digests).sum(dtype=np.uint64))),
        blocks="".join(_hex(block) for block in blocks.tolist()),
    )


def example_sum(ids: np.ndarray) -> int:
    """The number that `BatchDigests.examples` writes in hex digits."""
    return int(digest.mixed(ids).sum(dtype=np.uint64))


def parse(line: dict[str, str], num_rows: int) -> BatchDigests:
    """The inverse of `BatchDigests.line` for a batch of `num_rows` rows.

    Raises:
      KeyError, ValueError: if it has not the digests of such a batch.
    """
    parsed = BatchDigests(
        **{name: line[name] for name in ("examples", "contents", "blocks")}
    )
    num_blocks = -(-num_rows // block_rows(num_rows))
    digits = [len(bytes.fromhex(text)) * 2 for text in parsed.line.values()]
    if digits != [_HEX, _HEX, num_blocks * _HEX]:
        raise ValueError(f"digests of {digits} hex digits for {num_rows} rows")
    return parsed


def _hex(value: int) -> str:
    return f"{value:016x}"
