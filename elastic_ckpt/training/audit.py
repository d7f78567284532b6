"""Compares the batches of a run with those of the same run on one host.

The batch of a step is the examples that it was computed from, with their tokens; most
pipelines also guarantee the order of its rows. The one-host run executes the same
pipeline again: examples that the pipeline itself leaves out (filters, truncation, rows
of an incomplete batch) are missing in both, and the audit does not report them. It
leaves out what the run has left out when it went back to an older step, as the step log
has it.

A step whose ids are not listed is compared by its digests ([STEP_LOG.md](STEP_LOG.md)):
if they are equal, so are its batch and, by `digest`, the order of its rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from elastic_ckpt.data import elastic_data, stages
from elastic_ckpt.training import (
    batch_comparison,
    example_uses,
    one_host_run,
    step_log,
)
from elastic_ckpt.training.step_record import StepRecord


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
      num_row_promised_steps: steps whose pipeline guarantees that order.
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
    num_row_promised_steps: int
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
    is_in_order: Callable[[int], bool],
    num_records: int | None = None,
    num_saved_steps: int = 0,
    missing_checkpoint: str = "",
    first_step: int = 0,
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
      first_step: the number of a run's first step in descriptions; the log has 0.
    """
    lineage = step_log.lineage(attempts)
    steps = [lineage[step] for step in sorted(lineage)]
    uses = example_uses.ExampleUses()
    compared: list[batch_comparison.Compared] = []
    oracle = one_host_run.OneHostRun(data_of, attempts)
    # It may go on from the checkpoint of another program.
    start = attempts[0].start_step
    of_stages = stages.of(data_of(attempts[-1].attempt))
    for number, record in enumerate(steps, start=start):
        one_host = oracle.next(record)
        in_order = is_in_order(record.attempt)
        step = batch_comparison.compare(
            number + first_step,
            dataclasses.replace(record, step=record.step + first_step),
            one_host,
            in_order=in_order,
        )
        uses.add(record, one_host, is_different=bool(step.in_batch))
        compared.append(step)
    oracle.close()
    difference = next(
        (
            each.difference + _hint(record, steps[0], attempts)
            for each, record in zip(compared, steps, strict=True)
            if each.difference
        ),
        "",
    ) or _lost_end(start + len(steps), num_saved_steps, first_step=first_step)
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
        num_row_promised_steps=sum(each.is_in_order for each in compared),
        num_redone_steps=sum(len(each.records) for each in attempts) - len(steps),
        num_left_out=oracle.num_left_out,
        hosts=tuple(attempt.hosts for attempt in attempts),
        stage_steps=tuple(
            each.begin + first_step for each in (of_stages.stages if of_stages else ())
        ),
        first_difference=difference,
        missing_checkpoint=missing_checkpoint,
    )


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


def _lost_end(logged: int, saved: int, *, first_step: int) -> str:
    # Describes the first step that is missing, if the log ends before the checkpoint.
    if saved <= logged:
        return ""
    return (
        f"step {logged + first_step} is missing from the step log, whose end was lost:"
        f" checkpoint {saved} was saved after it"
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
