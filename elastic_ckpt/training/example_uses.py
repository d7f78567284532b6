"""Counts the examples that a run lost or repeated, over the steps that differ.

A step with the examples of the one-host run changes neither number, so only the others
are counted, and the memory does not grow with the run. If a step lists no ids, its
blocks of rows are counted in place of its examples.
"""

from __future__ import annotations

import collections

import numpy as np

from elastic_ckpt.core import digest
from elastic_ckpt.data import example_id
from elastic_ckpt.training import batch_digests
from elastic_ckpt.training.one_host_run import Rows
from elastic_ckpt.training.step_record import StepRecord

# An example id, or the digest of a block of rows.
_Counter = collections.Counter[int | str]


class ExampleUses:
    """The examples of steps that differ, in the run and in the one-host run.

    Attributes:
      num_examples: rows of all steps, less those of padding.
    """

    def __init__(self) -> None:
        self.num_examples = 0
        self._used: _Counter = collections.Counter()
        self._expected: _Counter = collections.Counter()
        self._has_blocks = False
        self._has_summaries = False
        # The difference of the sums of hashed ids, used less expected.
        self._sum = 0

    def add(self, record: StepRecord, one_host: Rows, *, is_different: bool) -> None:
        """Adds a step, with the batch of the one-host run and whether it differs."""
        self.num_examples += _num_examples(record, one_host)
        if not is_different:
            return
        expected = batch_digests.digests(one_host.ids, one_host.digests)
        self._sum -= batch_digests.example_sum(one_host.ids)
        if record.runs:
            self._used.update(record.ids)
            self._expected.update(one_host.ids.tolist())
            self._sum += batch_digests.example_sum(np.array(record.ids, np.uint64))
        elif record.digests:
            self._has_blocks = True
            _add_blocks(self._used, record.digests, record.num_rows)
            _add_blocks(self._expected, expected, record.num_rows)
            self._sum += int(record.digests.examples, 16)
        else:
            self._has_summaries = True
            whole = digest.batch_digest(
                one_host.ids, one_host.digests, num_bytes=len(record.digest) // 2
            )
            self._used[record.digest] += record.num_rows
            self._expected[whole] += record.num_rows

    def counted(self) -> tuple[int, int, bool]:
        """The numbers of lost and of repeated examples, and whether they are exact.

        Otherwise they are limits from above.
        """
        has_digests = self._has_blocks or self._has_summaries
        if has_digests and not self._has_summaries and self._sum % 2**64 == 0:
            # The same examples in other steps, or with other tokens.
            return 0, 0, True
        for padding in (self._used, self._expected):
            del padding[example_id.NONE]
        num_lost = (self._expected - self._used).total()
        num_repeated = (self._used - self._expected).total()
        return num_lost, num_repeated, not has_digests


def _add_blocks(
    counter: _Counter, digests: batch_digests.BatchDigests, num_rows: int
) -> None:
    size = batch_digests.block_rows(num_rows)
    for number, block in enumerate(digests.block_digests):
        counter[block] += min(size, num_rows - number * size)


def _num_examples(record: StepRecord, one_host: Rows) -> int:
    # If the ids are not listed, the padding is taken to be that of the one-host run.
    if record.runs:
        return record.num_rows - record.ids.count(example_id.NONE)
    return int(np.count_nonzero(one_host.ids != np.uint64(example_id.NONE)))
