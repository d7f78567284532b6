"""Compares the batches of a run with those of the same run on one host.

The batch of a step is the examples that it was computed from, with their tokens; most
pipelines also guarantee the order of its rows. The one-host run executes the same
pipeline again: examples that the pipeline itself leaves out (filters, truncation, rows
of an incomplete batch) are missing in both, and the audit does not report them. It
leaves out what the run has left out when it went back to an older step, as the step log
has it.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from elastic_ckpt.core import digest
from elastic_ckpt.data import delivery, elastic_data, example_id, rows, state
from elastic_ckpt.training import step_log


@dataclasses.dataclass(frozen=True, kw_only=True)
class Audit:
    """The outcome of an audit.

    Attributes:
      num_steps: steps in the run's lineage.
      num_examples: rows of these steps, including repeats in later epochs.
      num_epochs: passes over the data, including a partial last one; None if an
        example is not a record.
      num_lost: examples of the one-host run's steps that the run did not use.
      num_repeated: examples that the run used more often than the one-host run.
      num_batch_identical_steps: steps with the batch of the one-host run.
      num_row_identical_steps: those of them with its order of rows.
      num_row_promised_steps: steps whose pipeline guarantees that order.
      num_redone_steps: steps that were trained again, after a crash or because the run
        went back (and count once).
      num_left_out: positions that the run left out after it went back.
      hosts: the number of hosts of each attempt.
      first_difference: a description of the first step that differs; empty if none
        does.
      missing_checkpoint: a description of a checkpoint that was due but is not in
        storage; empty if none is missing.
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
    num_left_out: int
    hosts: tuple[int, ...]
    first_difference: str
    missing_checkpoint: str

    @property
    def passed(self) -> bool:
        """Whether each step had the batch of the one-host run, in the promised order.

        A run with a missing checkpoint does not pass.
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

    Each batch must have the same examples with the same tokens, and in the same rows
    if the pipeline guarantees that. The one-host run reads the files again.

    Args:
      attempts: the step log.
      data_of: returns the configured data of an attempt, given its number.
      is_in_order: returns whether these data guarantee the order of rows.
      num_records: the number of records in an epoch, if each of them is an example.
      num_saved_steps: the run's newest checkpoint; if the log ends before it, its last
        steps were lost.
      missing_checkpoint: see `Audit`.
    """
    lineage = step_log.lineage(attempts)
    steps = [lineage[step] for step in sorted(lineage)]
    used: collections.Counter[int] = collections.Counter()
    expected: collections.Counter[int] = collections.Counter()
    compared: list[_Compared] = []
    oracle = _OneHost(data_of, {each.attempt: each.left_out for each in attempts})
    # It may go on from the checkpoint of another program.
    start = attempts[0].start_step
    for number, record in enumerate(steps, start=start):
        one_host = oracle.next(record)
        expected.update(row for row, _ in one_host)
        used.update(record.ids)
        in_order = is_in_order(record.attempt)
        compared.append(_compared(number, record, one_host, in_order=in_order))
    oracle.close()
    difference = next(filter(None, (each.difference for each in compared)), "")
    difference = difference or _lost_end(start + len(steps), num_saved_steps)
    for padding in (used, expected):
        del padding[example_id.NONE]
    num_examples = sum(used.values())
    return Audit(
        num_steps=len(steps),
        num_examples=num_examples,
        num_epochs=num_examples / num_records if num_records else None,
        num_lost=(expected - used).total(),
        num_repeated=(used - expected).total(),
        num_batch_identical_steps=sum(not each.in_batch for each in compared),
        num_row_identical_steps=sum(not each.in_rows for each in compared),
        num_row_promised_steps=sum(each.is_in_order for each in compared),
        num_redone_steps=sum(len(each.records) for each in attempts) - len(steps),
        num_left_out=oracle.num_left_out,
        hosts=tuple(attempt.hosts for attempt in attempts),
        first_difference=difference,
        missing_checkpoint=missing_checkpoint,
    )


def _lost_end(logged: int, saved: int) -> str:
    # Describes the first step that is missing, if the log ends before the checkpoint.
    if saved <= logged:
        return ""
    return (
        f"step {logged} is missing from the step log, whose end was lost: checkpoint"
        f" {saved} was saved after it"
    )


def missing_checkpoint(
    *,
    period: int | None,
    at_end: bool,
    finished: bool,
    num_steps: int,
    saved: int,
    start_step: int = 0,
) -> str:
    """Describes a checkpoint that was due but is not in storage; empty if none.

    If a run was killed or is still running, an upload may have been in progress: such a
    run is reported only if it has saved nothing.

    Args:
      period: steps between two checkpoints in storage; None if only time determines
        them.
      at_end: whether the last step is saved, too.
      finished: whether the run has finished.
      num_steps: the number of trained steps, with those before the run.
      saved: the newest step in storage; 0 if there is none.
      start_step: the number of steps before the run.
    """
    due = 0
    if finished and at_end:
        due = num_steps
    elif finished and period:
        due = num_steps - num_steps % period
    elif period:
        first = start_step - start_step % period + period
        due = first if num_steps >= first + period else 0
    if saved >= due or due <= start_step:
        return ""
    newest = f"the newest is {saved}" if saved else "there is none"
    return (
        f"checkpoint {due} was due in storage, but {newest}: losing the hosts would"
        " lose the run; look for `degraded` in its events"
    )


class _Compared(NamedTuple):
    """A step, compared with that of the one-host run.

    The first two fields describe how the batch or its rows differ; empty if not.
    """

    in_batch: str
    in_rows: str
    is_in_order: bool
    difference: str


def _compared(
    number: int,
    record: step_log.StepRecord,
    one_host: list[tuple[int, int]],
    *,
    in_order: bool,
) -> _Compared:
    # Compares step `number` of the one-host run with the record in its place.
    in_batch = _difference(record, one_host)
    in_rows = in_batch or _misplaced(record, one_host)
    difference = in_rows if in_order else in_batch
    if record.step != number:
        difference = f"step {number} is missing from the step log"
    return _Compared(in_batch, in_rows, in_order, difference)


class _OneHost:
    """The run on one host, whose batch size and data change at the same steps.

    It leaves out the same positions.
    """

    def __init__(
        self,
        data_of: Callable[[int], elastic_data.ElasticData],
        left_out: Mapping[int, state.Ranges],
    ) -> None:
        self.num_left_out = 0
        self._data_of = data_of
        self._left_out = left_out
        self._attempt_and_size: tuple[int, int] | None = None
        self._batches: elastic_data.HostBatches | None = None
        # How many batches without a real row may come before one that has some.
        self._max_empty = 0

    def next(self, record: step_log.StepRecord) -> list[tuple[int, int]]:
        """The batch of a step: example id and row digest of each row, in order."""
        self._leave_out(record)
        batches = self._of_size(record.attempt, len(record.ids))
        batch = next(batches)
        for _ in range(self._max_empty):
            if batch[elastic_data.MASK].any():
                break
            batch = next(batches)
        tokens = np.concatenate(digest.row_features(batch), axis=1)
        digests = digest.row_digests(tokens).tolist()
        return list(zip(example_id.join(batch["example_id"]), digests, strict=True))

    def close(self) -> None:
        """Stops reading ahead."""
        if self._batches:
            self._batches.close()

    def _leave_out(self, record: step_log.StepRecord) -> None:
        # Ranges of the attempt that begin here; each may have batches of other sizes.
        for start, stop in self._left_out[record.attempt]:
            position = start
            while self._position() == position < stop:
                size = min(len(record.ids), stop - position)
                next(self._of_size(record.attempt, size))
                self.num_left_out += size
                position += size

    def _position(self) -> int:
        return state.row_of(self._batches.position()) if self._batches else 0

    def _of_size(self, attempt: int, size: int) -> elastic_data.HostBatches:
        if self._batches is None or self._attempt_and_size != (attempt, size):
            self._batches = self._continued(attempt, size)
            self._attempt_and_size = attempt, size
        return self._batches

    def _continued(self, attempt: int, size: int) -> elastic_data.HostBatches:
        placement = rows.Placement.in_order(0, num_hosts=1, global_batch_size=size)
        data = self._data_of(attempt)
        self._max_empty = delivery.batches_of_end(data, size) - 1
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
                f"step {record.step}, row {row}: example {used} is in the row of"
                f" example {expected} in the one-host run, but the pipeline guarantees"
                " the order of rows"
            )
    return ""
