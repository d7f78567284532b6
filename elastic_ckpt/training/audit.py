"""Compares what a run trained on with what one host would have trained on.

The batch of a step is the examples that it was computed from, with their tokens; most
pipelines promise the order of its rows too. The one-host run goes through the same
pipeline, anew: what that leaves out by itself (filters, truncation, rows that fill no
batch) is left out of both, and an audit does not judge it.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable

import numpy as np

from elastic_ckpt.core import digest
from elastic_ckpt.data import delivery, elastic_data, example_id, rows
from elastic_ckpt.training import step_log


@dataclasses.dataclass(frozen=True, kw_only=True)
class Audit:
    """The outcome of an audit.

    Attributes:
      num_steps: steps in the run's lineage.
      num_examples: rows that these steps took, repeats of later epochs counted.
      num_epochs: passes over the data, the last one perhaps in part; None where an
        example is not a record.
      num_lost: examples that the one-host run used up to here, and the run did not.
      num_repeated: examples that the run used more often than the one-host run.
      num_batch_identical_steps: steps with the batch of the one-host run.
      num_row_identical_steps: those of them with its order of rows.
      num_row_promised_steps: steps whose pipeline promises that order.
      num_redone_steps: steps that were trained again after a crash (and count once).
      hosts: hosts of each attempt.
      first_difference: the first step that differs, in words; empty if none does.
      missing_checkpoint: which checkpoint did not reach storage though it was due, in
        words; empty if none is missing.
    """

    num_steps: int
    num_examples: int
    num_epochs: float | None
    num_lost: int
    num_repeated: int
    num_batch_identical_steps: int
    num_row_identical_steps: int
    num_row_promised_steps: int
    num_redone_steps: int
    hosts: tuple[int, ...]
    first_difference: str
    missing_checkpoint: str

    @property
    def passed(self) -> bool:
        """Whether each step had the batch of the one-host run, in order if promised.

        A run whose checkpoints did not reach storage does not pass.
        """
        problem = self.first_difference or self.missing_checkpoint
        return not (problem or self.num_lost or self.num_repeated)


def audit(
    attempts: list[step_log.Attempt],
    data_of: Callable[[int], elastic_data.ElasticData],
    *,
    is_in_order: Callable[[int], bool],
    num_records: int | None = None,
    num_saved_steps: int = 0,
    missing_checkpoint: str = "",
) -> Audit:
    """Compares the lineage of `attempts` with a one-host run over the same data.

    Batch for batch, the same examples with the same tokens have to be there, and in the
    same rows where that is promised. The one-host run is read anew from the files.

    Args:
      attempts: the step log.
      data_of: the data that an attempt was configured to train on, by its number.
      is_in_order: whether these data promise the order of rows, by the same number.
      num_records: records of an epoch, if each of them is an example.
      num_saved_steps: the run's newest checkpoint; a log that ends before it has lost
        steps that were trained.
      missing_checkpoint: see `Audit`.
    """
    lineage = step_log.lineage(attempts)
    steps = [lineage[step] for step in sorted(lineage)]
    used: collections.Counter[int] = collections.Counter()
    expected: collections.Counter[int] = collections.Counter()
    compared = _Compared()
    oracle = _OneHost(data_of)
    for number, record in enumerate(steps):
        one_host = oracle.next(record)
        expected.update(row for row, _ in one_host)
        used.update(record.ids)
        compared.add(number, record, one_host, in_order=is_in_order(record.attempt))
    oracle.close()
    if not compared.difference and num_saved_steps > len(steps):
        compared.difference = (
            f"step {len(steps)} is missing from the step log, whose end was lost:"
            f" checkpoint {num_saved_steps} was saved after it"
        )
    for padding in (used, expected):
        del padding[example_id.NONE]
    num_logged = sum(len(attempt.records) for attempt in attempts)
    num_examples = sum(used.values())
    return Audit(
        num_steps=len(steps),
        num_examples=num_examples,
        num_epochs=num_examples / num_records if num_records else None,
        num_lost=(expected - used).total(),
        num_repeated=(used - expected).total(),
        num_batch_identical_steps=compared.num_batch_identical,
        num_row_identical_steps=compared.num_row_identical,
        num_row_promised_steps=compared.num_row_promised,
        num_redone_steps=num_logged - len(steps),
        hosts=tuple(attempt.hosts for attempt in attempts),
        first_difference=compared.difference,
        missing_checkpoint=missing_checkpoint,
    )


def missing_checkpoint(
    *, period: int | None, at_end: bool, finished: bool, num_steps: int, saved: int
) -> str:
    """The checkpoint of a run that is not in storage though it was due, in words.

    The last steps of a run that was killed, or still runs, may be on their way there:
    of these runs only one that has saved nothing is looked at.

    Args:
      period: steps between two checkpoints in storage; None if time alone counts.
      at_end: whether the last step is saved as well.
      finished: whether the run came to its end.
      num_steps: that were trained.
      saved: the newest step in storage; 0 if there is none.
    """
    due = 0
    if finished and at_end:
        due = num_steps
    elif finished and period:
        due = num_steps - num_steps % period
    elif period and num_steps >= 2 * period:
        due = period
    if saved >= due:
        return ""
    newest = f"the newest is {saved}" if saved else "there is none"
    return (
        f"checkpoint {due} was due in storage, and {newest}: a loss of the hosts would"
        " take the run with it; look for `degraded` in its events"
    )


class _Compared:
    """The steps so far, compared with those of the one-host run."""

    def __init__(self) -> None:
        self.num_batch_identical = 0
        self.num_row_identical = 0
        self.num_row_promised = 0
        self.difference = ""

    def add(
        self,
        number: int,
        record: step_log.StepRecord,
        one_host: list[tuple[int, int]],
        *,
        in_order: bool,
    ) -> None:
        """Compares step `number` of the one-host run with the record in its place."""
        of_batch, of_rows = _difference(record, one_host), _misplaced(record, one_host)
        self.num_batch_identical += not of_batch
        self.num_row_identical += not (of_batch or of_rows)
        self.num_row_promised += in_order
        if self.difference:
            return
        if record.step != number:
            self.difference = f"step {number} is missing from the step log"
        else:
            self.difference = of_batch or (of_rows if in_order else "")


class _OneHost:
    """The run of one host; sizes and data change where those of the run did."""

    def __init__(self, data_of: Callable[[int], elastic_data.ElasticData]) -> None:
        self._data_of = data_of
        self._of: tuple[int, int] | None = None
        self._batches: elastic_data.HostBatches | None = None
        # Batches without a real row that may come before one that has some.
        self._passed_over = 0

    def next(self, record: step_log.StepRecord) -> list[tuple[int, int]]:
        """The batch of a step: example id and row digest of each row, in order."""
        if self._of != (record.attempt, len(record.ids)):
            self._batches = self._continued(record)
            self._of = record.attempt, len(record.ids)
        assert self._batches is not None
        batch = next(self._batches)
        for _ in range(self._passed_over):
            if batch[elastic_data.MASK].any():
                break
            batch = next(self._batches)
        tokens = np.concatenate(digest.row_features(batch), axis=1)
        digests = digest.row_digests(tokens).tolist()
        return list(zip(example_id.join(batch["example_id"]), digests, strict=True))

    def close(self) -> None:
        """Ends what reads ahead."""
        if self._batches:
            self._batches.close()

    def _continued(self, record: step_log.StepRecord) -> elastic_data.HostBatches:
        placement = rows.Placement.in_order(
            0, num_hosts=1, global_batch_size=len(record.ids)
        )
        data = self._data_of(record.attempt)
        self._passed_over = delivery.batches_of_end(data, len(record.ids)) - 1
        continued = data.host_batches(placement)
        if self._batches:
            cursors = self._batches.shard_cursors()
            continued.go_to(
                self._batches.position(),
                lambda shards: {shard: cursors[shard] for shard in shards},
            )
            self._batches.close()
        return continued


def _difference(record: step_log.StepRecord, one_host: list[tuple[int, int]]) -> str:
    used = collections.Counter(record.ids)
    expected = collections.Counter(row for row, _ in one_host)
    if used != expected:
        row, wrong = next(
            (row, id_)
            for row, id_ in enumerate(record.ids)
            if used[id_] > expected[id_]
        )
        return (
            f"step {record.step}, row {row}: example {wrong} was used; the one-host run"
            f" has {sorted((expected - used).elements())} in this batch instead of"
            f" {sorted((used - expected).elements())}"
        )
    tokens = dict(one_host)
    if digest.batch_digest(record.ids, (tokens[id_] for id_ in record.ids)) != (
        record.digest
    ):
        return (
            f"step {record.step}: the examples are those of the one-host run, but their"
            f" tokens are not (digest {record.digest})"
        )
    return ""


def _misplaced(record: step_log.StepRecord, one_host: list[tuple[int, int]]) -> str:
    for row, (used, (expected, _)) in enumerate(zip(record.ids, one_host, strict=True)):
        if used != expected:
            return (
                f"step {record.step}, row {row}: example {used} is in the row that the"
                f" one-host run has for {expected}, and the pipeline promises the order"
                " of rows"
            )
    return ""
