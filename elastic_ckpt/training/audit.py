"""Compares the batches of a run with those of the same run on one host.

The batch of a step is the examples that it was computed from, with their tokens, row by
row. The one-host run executes the same
pipeline again: examples that the pipeline itself leaves out (filters, truncation, rows
of an incomplete batch) are missing in both, and the audit does not report them. It
leaves out what the run has left out when it went back to an older step, as the step log
has it.

The batch of the one-host run is described as the step log describes the one in its
place, by ids or digests ([STEP_LOG.md](STEP_LOG.md)), and the two are compared.
Examples that were lost or repeated are counted over the steps that differ: the others
change neither number, so the memory does not grow with the run.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np

from elastic_ckpt.core import digest
from elastic_ckpt.data import delivery, elastic_data, example_id, rows, stages
from elastic_ckpt.training import step_log
from elastic_ckpt.training.step_record import Rows, StepRecord, block_rows
from elastic_ckpt.training.stream import History, Pipeline, Stream, Trained, key_at

_MAX_NAMED_IDS = 8


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
      is_count_exact: whether these two numbers are exact. They are upper limits if a
        step that differs has digests of blocks of rows in place of its ids.
      num_batch_identical_steps: steps with the batch of the one-host run.
      num_row_identical_steps: those of them with its order of rows.
      num_redone_steps: steps that were trained again, after a crash or because the run
        went back (and count once).
      num_left_out: positions that the run left out after it went back.
      hosts: the number of hosts of each attempt.
      stage_steps: the steps at which the stages of the newest attempt's data begin;
        empty if it has none.
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
    is_count_exact: bool
    num_batch_identical_steps: int
    num_row_identical_steps: int
    num_redone_steps: int
    num_left_out: int
    hosts: tuple[int, ...]
    stage_steps: tuple[int, ...]
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
    num_records: int | None = None,
    num_saved_steps: int = 0,
    missing_checkpoint: str = "",
    first_step: int = 0,
) -> Audit:
    """Compares the lineage of `attempts` with a one-host run over the same data.

    Each batch must have the same examples with the same tokens in the same rows. The
    one-host run reads the files again.

    Args:
      attempts: the step log.
      data_of: returns the configured data of an attempt, given its number.
      num_records: the number of records in an epoch, if each of them is an example.
      num_saved_steps: the run's newest checkpoint; if the log ends before it, its last
        steps were lost.
      missing_checkpoint: see `Audit`.
      first_step: the number of a run's first step in descriptions; the log has 0.
    """
    stream = Stream(attempts, data_of)
    stream.place()
    current = [trained for trained in stream.trained if trained.is_current]
    current.sort(key=lambda trained: trained.record.step)
    steps = [trained.record for trained in current]
    oracle = OneHostRun(stream)
    # It may go on from the checkpoint of another program.
    start = attempts[0].start_step
    of_stages = stages.of(data_of(attempts[-1].attempt))
    uses = _Uses()
    compared: list[_Compared] = []
    difference = ""
    for number, trained in enumerate(current, start=start):
        record, one_host = trained.record, oracle.next(trained)
        named = dataclasses.replace(record, step=record.step + first_step)
        step = _compare(named, one_host)
        uses.add(record, one_host, is_different=bool(step.in_batch))
        compared.append(step)
        found = step.in_rows
        if record.step != number:
            found = f"step {number + first_step} is missing from the step log"
        if found and not difference:
            difference = found + _hint(record, steps[0], attempts)
    oracle.close()
    logged = start + len(steps)
    if not difference and num_saved_steps > logged:
        difference = (
            f"step {logged + first_step} is missing from the step log, whose end was"
            f" lost: checkpoint {num_saved_steps} was saved after it"
        )
    num_lost, num_repeated, is_exact = uses.counted()
    return Audit(
        num_steps=len(steps),
        num_examples=uses.num_examples,
        num_epochs=uses.num_examples / num_records if num_records else None,
        num_lost=num_lost,
        num_repeated=num_repeated,
        is_count_exact=is_exact,
        num_batch_identical_steps=sum(not each.in_batch for each in compared),
        num_row_identical_steps=sum(not each.in_rows for each in compared),
        num_redone_steps=sum(len(each.records) for each in attempts) - len(steps),
        num_left_out=oracle.num_left_out,
        hosts=tuple(attempt.hosts for attempt in attempts),
        stage_steps=tuple(
            each.begin + first_step for each in (of_stages.stages if of_stages else ())
        ),
        first_difference=difference,
        missing_checkpoint=missing_checkpoint,
    )


class OneHostRun:
    """The run on one host, whose batch size and data change at the same steps.

    It leaves out the same positions.

    Args:
      stream: of the run.

    Attributes:
      num_left_out: positions that it has left out so far.
    """

    def __init__(self, stream: Stream) -> None:
        self.num_left_out = 0
        self._stream = stream
        # The rows so far, without batches of padding that no step has.
        self._position = 0
        # The pipeline and the size of the batches.
        self._now: tuple[Pipeline, int] | None = None
        self._data: elastic_data.ElasticData | None = None
        self._batches: elastic_data.HostBatches | None = None
        # How many batches without a real row may come before one that has some.
        self._max_empty = 0

    def next(self, trained: Trained) -> Rows:
        """The batch in the place of one that was trained on."""
        while self._position < trained.position:
            # Left out; another pipeline may have made the rest of it.
            size = key_at(trained.history, self._position)[-1]
            starts = [start for start, _ in trained.history if start > self._position]
            stop = min(*starts, trained.position, self._position + size)
            next(self._of_size(trained.history, stop - self._position))
            self.num_left_out += stop - self._position
            self._position = stop
        size = trained.record.num_rows
        batches = self._of_size(trained.history, size)
        batch = next(batches)
        for _ in range(self._max_empty):
            if batch[elastic_data.MASK].any():
                break
            batch = next(batches)
        self._position += size
        tokens = np.concatenate(digest.row_features(batch), axis=1)
        return Rows(
            ids=example_id.joined(batch["example_id"]),
            digests=digest.row_digests(tokens),
        )

    def close(self) -> None:
        """Stops reading ahead."""
        if self._batches:
            self._batches.close()

    def _of_size(self, history: History, size: int) -> elastic_data.HostBatches:
        now = key_at(history, self._position), size
        if self._batches is None or self._now != now:
            data = self._data
            if data is None or self._now is None or self._now[0] != now[0]:
                data = self._stream.data_at(history, self._position)
            self._batches = self._continued(data, size)
            self._now, self._data = now, data
        return self._batches

    def _continued(
        self, data: elastic_data.ElasticData, size: int
    ) -> elastic_data.HostBatches:
        placement = rows.Placement.in_order(0, num_hosts=1, global_batch_size=size)
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


class _Compared(NamedTuple):
    """A step, compared with that of the one-host run.

    Attributes:
      in_batch: how its examples or tokens differ, in any order; empty if not.
      in_rows: how these or their order differ.
    """

    in_batch: str
    in_rows: str


def _compare(record: StepRecord, one_host: Rows) -> _Compared:
    expected = record.of_rows(one_host)
    place = f"step {record.step}"
    if record.digest == expected.digest and record.ids == expected.ids:
        in_batch = in_rows = ""
    elif record.runs:
        in_batch = _listed_difference(record, expected, one_host)
        in_rows = in_batch or _misplaced(record, expected)
    elif record.digests is not None and expected.digests is not None:
        used, wanted = record.digests, expected.digests
        pairs = zip(used.block_digests, wanted.block_digests, strict=True)
        blocks = [number for number, (one, two) in enumerate(pairs) if one != two]
        size = block_rows(record.num_rows)
        first = blocks[0] * size if blocks else 0
        if blocks:
            others = f" and {len(blocks) - 1} other blocks" if len(blocks) > 1 else ""
            last = min(first + size, record.num_rows) - 1
            place += f", rows {first} to {last}{others}"
        in_batch = ""
        if used.examples != wanted.examples:
            ids = one_host.ids[first : first + _MAX_NAMED_IDS].tolist()
            in_batch = (
                f"{place}: other examples were used than those of the one-host run,"
                f" which has {', '.join(map(str, ids))} ... from row {first} on"
            )
        elif used.contents != wanted.contents:
            in_batch = f"{place}: {_other_tokens(record)}"
        in_rows = in_batch or (
            f"{place}: its examples are in other rows than in the one-host run"
        )
    else:
        in_batch = in_rows = (
            f"{place}: its batch has digest {record.digest}, not that of the one-host"
            " run; the log is a summary, which cannot show the rows that differ"
        )
    return _Compared(in_batch, in_rows)


def _listed_difference(record: StepRecord, expected: StepRecord, one_host: Rows) -> str:
    used, wanted = collections.Counter(record.ids), collections.Counter(expected.ids)
    if used != wanted:
        row, wrong = next(
            (row, id_) for row, id_ in enumerate(record.ids) if used[id_] > wanted[id_]
        )
        return (
            f"step {record.step}, row {row}: example {wrong} was used; the one-host run"
            f" has [{_ranges((wanted - used).elements())}] in this batch instead of"
            f" [{_ranges((used - wanted).elements())}]"
        )
    tokens = dict(zip(expected.ids, one_host.digests.tolist(), strict=True))
    in_order = Rows(
        ids=np.array(record.ids, np.uint64),
        digests=np.array([tokens[id_] for id_ in record.ids], np.uint32),
    )
    if record.of_rows(in_order).digest != record.digest:
        return f"step {record.step}: {_other_tokens(record)}"
    return ""


def _other_tokens(record: StepRecord) -> str:
    return (
        "the examples are those of the one-host run, but their tokens are not (digest"
        f" {record.digest})"
    )


def _ranges(ids: Iterable[int]) -> str:
    # The ids, ascending: `0-239, 300`.
    ranges: list[list[int]] = []
    for each in sorted(ids):
        if ranges and each == ranges[-1][-1] + 1:
            ranges[-1][1:] = [each]
        else:
            ranges.append([each])
    named = ["-".join(map(str, each)) for each in ranges[:_MAX_NAMED_IDS]]
    return ", ".join([*named, *["..."] * (len(ranges) > _MAX_NAMED_IDS)])


def _misplaced(record: StepRecord, expected: StepRecord) -> str:
    for row, (used, wanted) in enumerate(zip(record.ids, expected.ids, strict=True)):
        if used != wanted:
            return (
                f"step {record.step}, row {row}: example {used} is in the row of"
                f" example {wanted} in the one-host run"
            )
    return ""


class _Uses:
    """The examples of steps that differ, in the run and in the one-host run.

    If a step lists no ids, its blocks of rows are counted in place of its examples.
    """

    def __init__(self) -> None:
        # The rows of all steps, less those of padding.
        self.num_examples = 0
        self._used: collections.Counter[int | str] = collections.Counter()
        self._expected: collections.Counter[int | str] = collections.Counter()
        # Whether all examples are listed, and whether each step has a sum of them.
        self._is_listed = self._has_sums = True
        # The difference of the sums of hashed ids, used less expected.
        self._sum = 0

    def add(self, record: StepRecord, one_host: Rows, *, is_different: bool) -> None:
        """Adds a step, with the batch of the one-host run and whether it differs."""
        # If ids are not listed, the padding is taken to be that of the one-host run.
        padding = np.uint64(example_id.NONE)
        self.num_examples += (
            record.num_rows - record.ids.count(example_id.NONE)
            if record.runs
            else int(np.count_nonzero(one_host.ids != padding))
        )
        if not is_different:
            return
        expected = record.of_rows(one_host)
        self._used.update(record.parts())
        self._expected.update(expected.parts())
        self._sum += record.example_sum - expected.example_sum
        self._is_listed = self._is_listed and bool(record.runs)
        self._has_sums = self._has_sums and bool(record.runs or record.digests)

    def counted(self) -> tuple[int, int, bool]:
        """The numbers of lost and of repeated examples, and whether they are exact.

        Otherwise they are limits from above.
        """
        if self._has_sums and not self._is_listed and self._sum % 2**64 == 0:
            # The same examples in other steps, or with other tokens.
            return 0, 0, True
        for counter in (self._used, self._expected):
            del counter[example_id.NONE]
        lost, repeated = self._expected - self._used, self._used - self._expected
        return lost.total(), repeated.total(), self._is_listed


def _hint(
    record: StepRecord, first: StepRecord, attempts: list[step_log.Attempt]
) -> str:
    # Whether a start that continues the run has begun with the rows of its first step.
    starts = {each.attempt: each.start_step for each in attempts}
    if record.step == first.step or record.step != starts[record.attempt]:
        return ""
    num_rows = min(record.num_rows, first.num_rows)
    is_repeated = record.runs and record.ids[:num_rows] == first.ids[:num_rows]
    hint = "; these are the rows of the first step: was the data loaded at the resume?"
    return hint if is_repeated or record.digest == first.digest else ""


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
