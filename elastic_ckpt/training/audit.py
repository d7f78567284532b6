"""Compares the batches of a run with the batches of the same run on one host.

For each step, the log has the data rows in its batch and a digest of these rows. Sorted
by rows, the batches show which rows no step used and which rows more than one step
used. The one-host run executes the same pipeline again, with the same batch sizes. Its
batches must have the same digests: the same examples with the same values in the same
rows. The audit does not report data that the pipeline itself drops (filters,
truncation, rows of an incomplete batch), because it is missing in both runs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import json
import os
import pkgutil
import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

from elastic_ckpt.checkpoint import foreign_steps
from elastic_ckpt.core import digest, errors, sections
from elastic_ckpt.data import (
    data_keys,
    elastic_data,
    rows,
    stages,
)
from elastic_ckpt.data.lm import pipeline
from elastic_ckpt.inspect import run_files
from elastic_ckpt.training import step_log
from elastic_ckpt.training.step_log import Attempt, StepRecord

# Returns a step's data, in its stage; the same for steps with the same data.
DataOf: TypeAlias = Callable[[StepRecord], elastic_data.ElasticData]
_NO_DIGEST = "00" * 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class Audit:
    """The outcome of an audit.

    Attributes:
      num_steps: steps in the run's lineage.
      num_examples: rows of these steps, excluding padding.
      num_lost: rows before the last step that no step used and the run did not skip.
      num_repeated: rows that steps used again.
      num_identical_steps: steps with the same batch as in the one-host run.
      num_redone_steps: steps that were retrained after a crash or rollback.
      num_left_out: rows that the run skipped after rollbacks.
      hosts: the number of hosts in each attempt.
      first_difference: a description of the first step that differs; empty if none
        does.
      missing_checkpoint: a description of a checkpoint that was due but is not in
        storage; empty if none is missing.
    """

    num_steps: int
    num_examples: int
    num_lost: int
    num_repeated: int
    num_identical_steps: int
    num_redone_steps: int
    num_left_out: int
    hosts: tuple[int, ...]
    first_difference: str
    missing_checkpoint: str

    @property
    def passed(self) -> bool:
        """Whether all steps match the one-host run and nothing is missing."""
        return not (self.first_difference or self.missing_checkpoint)


class Batch(NamedTuple):
    """A batch that a run has read.

    Attributes:
      record: the record of the batch's step; without a digest if no step was trained on
        the batch.
      first: the first row that no earlier batch has.
      is_used: whether the batch belongs to a step of the run's lineage. Otherwise the
        run trained on it before a rollback, or read it but never trained on it.
    """

    record: StepRecord
    first: int
    is_used: bool


def stream(attempts: Sequence[Attempt], data_of: DataOf) -> Iterator[Batch]:
    """The batches of the run's lineage and the batches it skipped, in row order."""
    trained: dict[int, StepRecord] = {}
    for attempt in attempts:
        if attempt.records:
            # This attempt trained on the rows after its start in different batches.
            row = attempt.records[0].row
            trained = {n: each for n, each in trained.items() if each.stop <= row}
        trained |= {each.row: each for each in attempt.records}
    current = step_log.lineage(attempts).values()
    position, last = 0, None
    for record in sorted(current, key=lambda each: (each.row, each.step)):
        while position < record.row:
            batch = trained.get(position)
            if batch is None or batch.stop > record.row:
                # A batch that belongs to no step, after the last batch.
                last = last or dataclasses.replace(record, step=-1)
                batch = dataclasses.replace(
                    last, step=last.step + 1, row=position, digest=_NO_DIGEST
                )
                course = stages.Course(data=data_of(batch), base_size=last.rows)
                size = min(course.size, record.row - position)
                batch = dataclasses.replace(batch, rows=size)
            yield Batch(batch, position, is_used=False)
            position, last = batch.stop, batch
        yield Batch(record, min(position, record.stop), is_used=True)
        position, last = max(position, record.stop), record


def one_host_run(
    batches: Iterable[Batch], data_of: DataOf
) -> Generator[tuple[Batch, np.ndarray, str], None, None]:
    """Reads a run's rows again, on one host.

    Yields:
      Each batch; the ids of its rows that no earlier batch has, excluding padding; and
      the digest of these rows.
    """
    made_by, opened = None, None
    try:
        for batch in batches:
            size = batch.record.stop - batch.first
            if not size:
                yield batch, np.empty(0, np.uint64), _NO_DIGEST
                continue
            makes = data_of(batch.record), size
            if opened is None or made_by != makes:
                opened, made_by = _continued(opened, *makes), makes
            content = next(opened)
            ids = elastic_data.join_ids(content[elastic_data.EXAMPLE_ID])
            found = step_log.batch_digest(ids, digest.row_digests(content))
            yield batch, ids[ids != np.uint64(elastic_data.NO_ID)], found
    finally:
        if opened is not None:
            opened.close()


def _continued(
    before: elastic_data.HostBatches | None, data: elastic_data.ElasticData, size: int
) -> elastic_data.HostBatches:
    # Opens batches of `size` rows where the previous pipeline stopped, or at the start.
    batches = data.host_batches(rows.in_order(1, size)[0])
    if before is not None:
        position, cursors = before.get_state()
        batches.go_to(position, lambda _: cursors)
        before.close()
    return batches


def audit(
    attempts: Sequence[Attempt],
    data_of: DataOf,
    *,
    num_saved_steps: int = 0,
    missing_checkpoint: str = "",
    num_attempts: int = 0,
    newest_world: int = 0,
    first_step: int = 0,
) -> Audit:
    """Compares the lineage of `attempts` with a one-host run over the same data.

    Args:
      attempts: the step log.
      data_of: a function that returns the data of a step.
      num_saved_steps: the number of steps up to the run's newest checkpoint; a log with
        fewer steps has lost its last ones.
      missing_checkpoint: see `Audit`.
      num_attempts: a lower bound on the number of attempts that the run has begun.
      newest_world: the newest claimed world that has saved a step; 0 if none has.
      first_step: the number that descriptions give to the run's first step; the log
        counts from 0.
    """
    # The last attempt also lists the rows that earlier attempts skipped.
    left_out = attempts[-1].left_out
    differences: dict[int, str] = {}

    def differs(record: StepRecord, what: str) -> None:
        place = f"rows {record.row:,} to {record.stop - 1:,} of the data"
        text = f"step {record.step + first_step} ({place}): {what}"
        differences.setdefault(record.step, text)

    num_examples = num_lost = num_repeated = num_left_out = 0
    # The step that should use the next rows.
    expected = attempts[0].start_step
    with contextlib.closing(
        one_host_run(stream(attempts, data_of), data_of)
    ) as one_host:
        for batch, ids, wanted in one_host:
            record = batch.record
            noted = sum(
                int(np.count_nonzero((start <= ids) & (ids < stop)))
                for start, stop in left_out
            )
            if not batch.is_used:
                num_left_out += noted
                num_lost += len(ids) - noted
                expected += noted < len(ids)
                continue
            repeated = batch.first - record.row
            num_repeated += repeated
            num_examples += repeated + len(ids)
            if repeated:
                hint = "; was the data state restored?" * (record.row == 0)
                differs(record, f"other steps have used {repeated} of them{hint}")
            elif record.step != expected:
                differs(record, f"they belong to step {expected + first_step}")
            expected += repeated < record.rows
            if noted:
                differs(record, f"{noted} of them are logged as skipped")
            if record.digest != wanted:
                differs(
                    record,
                    "the batch of the one-host run has different examples or values, or"
                    f" a different order (digest {wanted}, not {record.digest})",
                )
    lineage = step_log.lineage(attempts)
    start_step, num_steps = attempts[0].start_step, len(lineage)
    num_identical, logged = num_steps - len(differences), start_step + num_steps
    for step in {*range(start_step, max(logged, num_saved_steps))} - lineage.keys():
        differences[step] = f"step {step + first_step} is missing from the step log"
        if step >= logged:
            differences[step] += (
                f", which lost its end: checkpoint {num_saved_steps} was saved later"
            )
    first_difference = differences[min(differences)] if differences else ""
    return Audit(
        num_steps=num_steps,
        num_examples=num_examples,
        num_lost=num_lost,
        num_repeated=num_repeated,
        num_identical_steps=num_identical,
        num_redone_steps=sum(len(each.records) for each in attempts) - num_steps,
        num_left_out=num_left_out,
        hosts=tuple(attempt.hosts for attempt in attempts),
        first_difference=_lost_file(attempts, num_attempts, newest_world)
        or first_difference,
        missing_checkpoint=missing_checkpoint,
    )


def _lost_file(
    attempts: Sequence[Attempt], num_attempts: int, newest_world: int
) -> str:
    # Attempts have consecutive numbers, and each world that saves a step has one.
    numbers = {each.attempt for each in attempts}
    absent = set(range(1, max(*numbers, num_attempts) + 1)) - numbers
    world = max(each.world for each in attempts)
    problems = [f"attempt {number} is missing" for number in sorted(absent)]
    if newest_world > world:
        problems.append(
            f"world {newest_world} saved steps, but the latest attempt belongs to"
            f" world {world}"
        )
    if not problems:
        return ""
    return f"the step log is incomplete: {problems[0]}; restore it from a good copy"


class RunAudit:
    """A run that was recorded in a directory, and its data.

    Args:
      directory: the run directory.
      data: `MODULE:NAME` of the data, for a run of the user's own training loop.

    Attributes:
      attempts: the step log.

    Raises:
      RunError: if there is no run in `directory`.
      ConfigError: if `data` is missing or contradicts the data in the step log.
      DataError: if the run has trained nothing or its data cannot be read.
    """

    def __init__(self, directory: str, *, data: str | None = None) -> None:
        self._directory = directory
        self.record = run_files.read(directory)
        self.attempts = step_log.read(directory)
        if self.record.data is None and data is None:
            raise errors.ConfigError(
                f"{directory} was recorded by your own training loop, which defines the"
                " data in its code; specify the data with --data MODULE:NAME"
            )
        if data is not None and self.record.data is not None:
            raise errors.ConfigError(
                f"the configuration of {directory} defines its data; omit --data"
            )
        self._own = None if data is None else _named(data)
        # Cached, because attempts with the same settings share their data.
        self._configured = functools.cache(_configured)
        self._settings = {each.attempt: each.data for each in self.attempts}

    def data_of(self, record: StepRecord) -> elastic_data.ElasticData:
        """The data of a step, in its stage."""
        data = self._own
        if data is None:
            settings = self._settings[record.attempt]
            data = self._configured(json.dumps(settings, sort_keys=True))
        return stages.at(data, record.step)

    def outcome(self) -> Audit:
        """Compares the run with a one-host run over its data."""
        record, attempts = self.record, self.attempts
        steps = foreign_steps.steps(record.steps_directory)
        saved = max(steps, default=record.first_step - 1)
        events = run_files.read_events(self._directory)
        start_step = attempts[0].start_step
        done = start_step + len(step_log.lineage(attempts))
        # The reference trainer claims its world before it begins an attempt. A user's
        # loop begins its attempt first and may claim the world at the first save.
        is_own = record.program != "train"
        started = [e for e in events if e["event"] == "run_started"]
        told = [e for e in events if e["event"] in ("world_claimed", "save_started")]
        saving = [
            one["world"]
            for one, other in itertools.pairwise(told)
            if (one["event"], other["event"]) == ("world_claimed", "save_started")
        ]
        return audit(
            attempts,
            self.data_of,
            num_saved_steps=saved + 1 - record.first_step,
            num_attempts=len(started) if is_own else 0,
            newest_world=0 if is_own else max(saving, default=0),
            first_step=record.first_step,
            missing_checkpoint=missing_checkpoint(
                period=record.every,
                at_end=record.at_end,
                finished=[e["event"] for e in events[-1:]] == ["run_finished"],
                num_steps=done - 1 + record.first_step,
                saved=max(saved, 0),
                start_step=start_step,
            ),
        )


def _configured(settings: str) -> elastic_data.ElasticData:
    given = {
        name: sections.Setting(value=value, place="the step log")
        for name, value in json.loads(settings).items()
    }
    return pipeline.from_config(data_keys.changed(data_keys.DataKeys(), given))


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

    A run that was killed or is still running is reported only if it has saved nothing:
    an upload may have been in progress.

    Args:
      period: steps between checkpoints in storage; None if checkpoints depend only
        on time.
      at_end: whether the last step is also saved.
      finished: whether the run has finished.
      num_steps: the number of trained steps, including those before the run.
      saved: the newest step in storage; 0 if there is none.
      start_step: the number of steps before the run.
    """
    due = 0
    if finished and at_end:
        due = num_steps
    elif period:
        newest = num_steps - num_steps % period
        first = start_step - start_step % period + period
        due = newest if finished else min(first, newest - period)
    if saved >= due or due <= start_step:
        return ""
    newest = f"the newest is {saved}" if saved else "there is none"
    return (
        f"checkpoint {due} was due to be saved to storage, but {newest}: losing the"
        " hosts would lose the run; look for `degraded` in the run's events"
    )


def _named(name: str) -> elastic_data.ElasticData:
    # Imports from the working directory, like `python -m`. The module may also change
    # sys.path.
    own = os.getcwd()
    sys.path.insert(0, own)
    try:
        data = pkgutil.resolve_name(name)
        data = data() if callable(data) else data
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise errors.ConfigError(
            f"--data {name}: {error}; use MODULE:NAME, where MODULE can be imported"
            " here and NAME is either the data passed to ec.batches or a function"
            " that takes no arguments and returns it"
        ) from error
    finally:
        if own in sys.path:
            sys.path.remove(own)
    elastic_data.check(data, caller=f"--data {name}")
    return data
