"""Compares the logged batch of a step with that of the one-host run."""

from __future__ import annotations

import collections
from typing import NamedTuple

import numpy as np

from elastic_ckpt.core import digest
from elastic_ckpt.training import batch_digests
from elastic_ckpt.training.one_host_run import Rows
from elastic_ckpt.training.step_record import StepRecord

_MAX_NAMED_IDS = 8


class Compared(NamedTuple):
    """A step, compared with that of the one-host run.

    The first two fields describe how the batch or its rows differ; empty if not.

    Attributes:
      in_batch: in its examples or tokens, in any order.
      in_rows: in these or in their order.
      is_in_order: whether the pipeline guarantees the order.
      difference: the one of them that counts.
    """

    in_batch: str
    in_rows: str
    is_in_order: bool
    difference: str


def compare(
    number: int, record: StepRecord, one_host: Rows, *, in_order: bool
) -> Compared:
    """Compares step `number` of the one-host run with the record in its place.

    Args:
      number: of the step.
      record: of the run.
      one_host: the batch of the one-host run.
      in_order: whether the pipeline guarantees the order of rows.
    """
    if record.runs:
        in_batch = _listed_difference(record, one_host)
        in_rows = in_batch or _misplaced(record, one_host)
    elif _digest(record, one_host) == record.digest:
        in_batch = in_rows = ""
    elif record.digests:
        expected = batch_digests.digests(one_host.ids, one_host.digests)
        in_batch = _batch_difference(record, record.digests, expected, one_host)
        in_rows = in_batch or (
            f"step {record.step}{_rows(record, expected)}: its examples are in other"
            " rows than in the one-host run, but the pipeline guarantees their order"
        )
    else:
        in_batch = in_rows = _summary_difference(record, in_order=in_order)
    difference = in_rows if in_order else in_batch
    if record.step != number:
        difference = f"step {number} is missing from the step log"
    return Compared(in_batch, in_rows, in_order, difference)


def _digest(record: StepRecord, rows: Rows) -> str:
    # Versions have digests of other sizes.
    return digest.batch_digest(
        rows.ids, rows.digests, num_bytes=len(record.digest) // 2
    )


def _listed_difference(record: StepRecord, one_host: Rows) -> str:
    ids = record.ids
    used = collections.Counter(ids)
    expected = collections.Counter(one_host.ids.tolist())
    if used != expected:
        row, wrong = next(
            (row, id_) for row, id_ in enumerate(ids) if used[id_] > expected[id_]
        )
        return (
            f"step {record.step}, row {row}: example {wrong} was used; the one-host run"
            f" has [{_ranges(expected - used)}] in this batch instead of"
            f" [{_ranges(used - expected)}]"
        )
    tokens = dict(zip(one_host.ids.tolist(), one_host.digests.tolist(), strict=True))
    as_used = Rows(
        ids=np.array(ids, np.uint64),
        digests=np.array([tokens[id_] for id_ in ids], np.uint32),
    )
    if _digest(record, as_used) != record.digest:
        return (
            f"step {record.step}: the examples are those of the one-host run, but their"
            f" tokens are not (digest {record.digest})"
        )
    return ""


def _ranges(ids: collections.Counter[int]) -> str:
    # The ids, ascending: `0-239, 300`.
    ranges: list[list[int]] = []
    for each in sorted(ids.elements()):
        if ranges and each == ranges[-1][-1] + 1:
            ranges[-1][1:] = [each]
        else:
            ranges.append([each])
    named = ["-".join(map(str, each)) for each in ranges[:_MAX_NAMED_IDS]]
    return ", ".join([*named, *["..."] * (len(ranges) > _MAX_NAMED_IDS)])


def _misplaced(record: StepRecord, one_host: Rows) -> str:
    pairs = zip(record.ids, one_host.ids.tolist(), strict=True)
    for row, (used, expected) in enumerate(pairs):
        if used != expected:
            return (
                f"step {record.step}, row {row}: example {used} is in the row of"
                f" example {expected} in the one-host run, but the pipeline guarantees"
                " the order of rows"
            )
    return ""


def _batch_difference(
    record: StepRecord,
    used: batch_digests.BatchDigests,
    expected: batch_digests.BatchDigests,
    one_host: Rows,
) -> str:
    place = f"step {record.step}{_rows(record, expected)}"
    if used.examples != expected.examples:
        first = next(iter(_differing_blocks(used, expected)), 0)
        start = first * batch_digests.block_rows(record.num_rows)
        ids = one_host.ids[start : start + _MAX_NAMED_IDS].tolist()
        return (
            f"{place}: other examples were used than those of the one-host run, which"
            f" has {', '.join(map(str, ids))} ... from row {start} on"
        )
    if used.contents != expected.contents:
        return (
            f"{place}: the examples are those of the one-host run, but their tokens are"
            f" not (digest {record.digest})"
        )
    return ""


def _summary_difference(record: StepRecord, *, in_order: bool) -> str:
    place = (
        f"step {record.step}: its batch has digest {record.digest}, not that of the"
        " one-host run"
    )
    if in_order:
        return f"{place}; the log is a summary, which cannot show the rows that differ"
    return (
        f"{place}; it may have the same rows in another order, which the pipeline"
        " permits, but the log is a summary and cannot show it: use step_log=proof"
    )


def _differing_blocks(
    used: batch_digests.BatchDigests, expected: batch_digests.BatchDigests
) -> list[int]:
    pairs = zip(used.block_digests, expected.block_digests, strict=True)
    return [number for number, (one, other) in enumerate(pairs) if one != other]


def _rows(record: StepRecord, expected: batch_digests.BatchDigests) -> str:
    # The rows of the first block that differs, and how many others do.
    assert record.digests is not None
    blocks = _differing_blocks(record.digests, expected)
    if not blocks:
        return ""
    size = batch_digests.block_rows(record.num_rows)
    first = blocks[0] * size
    last = min(first + size, record.num_rows) - 1
    others = f" and {len(blocks) - 1} other blocks" if len(blocks) > 1 else ""
    return f", rows {first} to {last}{others}"
