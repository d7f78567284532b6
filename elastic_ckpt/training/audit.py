"""Compares the batches of a run with those of the same run on one host.

Each step has logged which rows of the data its batch has, and a digest of them. Sorted
by rows, the batches show which rows no step used, and which several used. The one-host
run executes the same pipeline again, with the same sizes of batches, and its batches
have to have the same digests: the same examples with the same tokens in the same rows.
What the pipeline itself leaves out (filters, truncation, rows of an incomplete batch)
is missing in both, and the audit does not report it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import inspect
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np

from elastic_ckpt.checkpoint import foreign_steps
from elastic_ckpt.core import digest, errors, sections
from elastic_ckpt.data import (
    data_keys,
    elastic_data,
    example_id,
    positional_data,
    rows,
    stages,
    state,
)
from elastic_ckpt.data.lm import pipeline
from elastic_ckpt.inspect import run_files
from elastic_ckpt.training import step_log
from elastic_ckpt.training.step_log import Attempt, Record

# Returns the configured data of an attempt, given its number: the same object for
# attempts with the same settings.
DataOf: TypeAlias = Callable[[int], elastic_data.ElasticData]
_NO_DIGEST = "00" * 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class Audit:
    """The outcome of an audit.

    Attributes:
      num_steps: steps in the run's lineage.
      num_examples: rows of these steps, without padding.
      num_epochs: passes over the data, including a partial last one; None if an
        example is not a record.
      num_lost: rows before the last step that no step used, and that were not left out.
      num_repeated: rows that steps used again.
      num_identical_steps: steps with the batch of the one-host run.
      num_redone_steps: steps that were trained again, after a crash or because the run
        went back (and count once).
      num_left_out: rows that the run left out after it went back.
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
    num_identical_steps: int
    num_redone_steps: int
    num_left_out: int
    hosts: tuple[int, ...]
    stage_steps: tuple[int, ...]
    first_difference: str
    missing_checkpoint: str

    @property
    def passed(self) -> bool:
        """Whether each step had the batch of the one-host run, and none is missing.

        A run with a missing checkpoint does not pass.
        """
        return not (self.first_difference or self.missing_checkpoint)


def stream(
    attempts: Sequence[Attempt], data_of: DataOf
) -> Iterator[tuple[list[Record], Record]]:
    """The steps of the run as it is, by their rows, with the batches before each.

    Those are batches that no step of it has used: steps of an attempt that went back,
    or a batch that was read and never trained on. A step that uses rows again begins
    before the end of the step before it.
    """
    trained: dict[int, Record] = {}
    for attempt in attempts:
        if attempt.records:
            # What follows the place where it began was trained in its batches.
            row = attempt.records[0].row
            trained = {n: each for n, each in trained.items() if each.stop <= row}
        trained |= {each.row: each for each in attempt.records}
    current = step_log.lineage(attempts).values()
    position, last = 0, None
    for record in sorted(current, key=lambda each: (each.row, each.step)):
        unused = []
        while position < record.row:
            between = trained.get(position)
            if between is None or between.stop > record.row:
                after = last or dataclasses.replace(record, step=-1)
                between = _after(after, position, record.row, data_of)
            unused.append(between)
            position, last = between.stop, between
        yield unused, record
        position, last = max(position, record.stop), record


def _after(last: Record, row: int, stop: int, data_of: DataOf) -> Record:
    # The batch of no step after another one.
    step = last.step + 1
    data = stages.at(data_of(last.attempt), step)
    size = stages.Course(data=data, base_size=last.rows).size
    size = min(size, stop - row)
    return dataclasses.replace(last, step=step, row=row, rows=size, digest=_NO_DIGEST)


def pipeline_of(
    record: Record, data_of: DataOf
) -> tuple[Any, elastic_data.ElasticData]:
    """What made a batch: a key that two batches of the same have, and the data."""
    whole = data_of(record.attempt)
    data = stages.at(whole, record.step)
    of_stages = stages.of(data)
    return (id(whole), of_stages.number if of_stages else 0), data


class OneHostRun:
    """The run on one host: it reads a batch in the place of each one of the run.

    Args:
      data_of: the data of the run.
    """

    def __init__(self, data_of: DataOf) -> None:
        self._data_of = data_of
        # What makes the batches, and their rows.
        self._made_by: tuple[Any, int] | None = None
        self._batches: elastic_data.HostBatches | None = None

    def read(self, record: Record) -> tuple[np.ndarray, str]:
        """The ids of the next rows, without padding, and the digest of their batch."""
        key, data = pipeline_of(record, self._data_of)
        made_by = key, record.rows
        if self._batches is None or self._made_by != made_by:
            self._made_by, self._batches = made_by, self._opened(data, record.rows)
        batch = next(self._batches)
        ids = example_id.joined(batch[elastic_data.EXAMPLE_ID])
        tokens = np.concatenate(digest.row_features(batch), axis=1)
        found = step_log.batch_digest(ids, digest.row_digests(tokens))
        return ids[ids != np.uint64(example_id.NONE)], found

    def close(self) -> None:
        """Stops reading ahead."""
        if self._batches:
            self._batches.close()

    def _opened(
        self, data: elastic_data.ElasticData, size: int
    ) -> elastic_data.HostBatches:
        placement = rows.Placement.in_order(0, num_hosts=1, global_batch_size=size)
        batches = data.host_batches(placement)
        if self._batches:
            cursors = self._batches.shard_cursors()
            batches.go_to(
                self._batches.position(),
                lambda shards: {shard: cursors[shard] for shard in shards},
            )
        self.close()
        return batches


def audit(
    attempts: Sequence[Attempt],
    data_of: DataOf,
    *,
    num_records: int | None = None,
    num_saved_steps: int = 0,
    missing_checkpoint: str = "",
    newest_world: int = 0,
    first_step: int = 0,
) -> Audit:
    """Compares the lineage of `attempts` with a one-host run over the same data.

    Each batch must have the same examples with the same tokens in the same rows. The
    one-host run reads the files again.

    Args:
      attempts: the step log.
      data_of: of the run.
      num_records: the number of records in an epoch, if each of them is an example.
      num_saved_steps: the run's newest checkpoint; if the log ends before it, its last
        steps were lost.
      missing_checkpoint: see `Audit`.
      newest_world: the newest claimed world that has saved a step; 0 if none has.
      first_step: the number of a run's first step in descriptions; the log has 0.
    """
    starts = {each.attempt: each.start_step for each in attempts}
    # A later attempt has noted what those before it left out, too.
    left_out = attempts[-1].left_out
    differences: dict[int, str] = {}

    def differs(record: Record, what: str) -> None:
        place = f"rows {record.row:,} to {record.stop - 1:,} of the data"
        text = f"step {record.step + first_step} ({place}): {what}"
        differences.setdefault(record.step, text)

    num_examples = num_lost = num_repeated = num_left_out = position = 0
    # The step that should have used the next rows.
    expected = attempts[0].start_step
    with contextlib.closing(OneHostRun(data_of)) as one_host:
        for unused, record in stream(attempts, data_of):
            for batch in unused:
                ids, _ = one_host.read(batch)
                noted = _num_within(ids, left_out)
                num_left_out += noted
                num_lost += len(ids) - noted
                expected += noted < len(ids)
            position = max(position, record.row)
            if position > record.row:
                repeated = min(position, record.stop) - record.row
                num_repeated += repeated
                num_examples += repeated
                is_start = (record.row, record.step) == (0, starts[record.attempt])
                hint = "; was the data loaded at the resume?" * is_start
                differs(record, f"other steps have used {repeated} of them{hint}")
            elif record.step != expected:
                differs(record, f"they are those of step {expected + first_step}")
            if position < record.stop:
                expected += 1
                size = record.stop - position
                rest = dataclasses.replace(record, row=position, rows=size)
                position = record.stop
                ids, wanted = one_host.read(rest)
                num_examples += len(ids)
                if noted := _num_within(ids, left_out):
                    differs(record, f"{noted} of them were noted as left out")
                if record.digest != wanted:
                    differs(
                        record,
                        "the batch of the one-host run has other examples, tokens or"
                        f" another order (digest {wanted}, not {record.digest})",
                    )
    lineage = step_log.lineage(attempts)
    start_step, num_steps = attempts[0].start_step, len(lineage)
    num_identical, logged = num_steps - len(differences), start_step + num_steps
    missing = set(range(start_step, logged)) - lineage.keys()
    if num_saved_steps > logged and not missing:
        missing.add(logged)
    for step in missing:
        text = f"step {step + first_step} is missing from the step log"
        if step == logged:
            text += (
                f", whose end was lost: checkpoint {num_saved_steps} was saved after it"
            )
        differences[step] = text
    first_difference = differences[min(differences)] if differences else ""
    of_stages = stages.of(data_of(attempts[-1].attempt))
    begins = [each.begin for each in of_stages.stages] if of_stages else []
    return Audit(
        num_steps=num_steps,
        num_examples=num_examples,
        num_epochs=num_examples / num_records if num_records else None,
        num_lost=num_lost,
        num_repeated=num_repeated,
        num_identical_steps=num_identical,
        num_redone_steps=sum(len(each.records) for each in attempts) - num_steps,
        num_left_out=num_left_out,
        hosts=tuple(attempt.hosts for attempt in attempts),
        stage_steps=tuple(begin + first_step for begin in begins),
        first_difference=_lost_file(attempts, newest_world) or first_difference,
        missing_checkpoint=missing_checkpoint,
    )


def _lost_file(attempts: Sequence[Attempt], newest_world: int) -> str:
    # Attempts are numbered in a row, and each world that saves a step has one.
    numbers = {each.attempt for each in attempts}
    absent = sorted(set(range(1, max(numbers))) - numbers)
    world = max(each.world for each in attempts)
    if absent:
        what = f"attempt {absent[0]} is missing"
    elif newest_world > world:
        what = f"world {newest_world} saved steps, but the newest attempt is of {world}"
    else:
        return ""
    return f"the step log is incomplete: {what}; restore its files from a copy"


def _num_within(ids: np.ndarray, ranges: state.Ranges) -> int:
    return sum(
        int(np.count_nonzero((ids >= start) & (ids < stop))) for start, stop in ranges
    )


class RunAudit:
    """A run that was recorded in a directory, and its data.

    Args:
      directory: of the run.
      data: `MODULE:NAME` of the data, if a loop of the user's own has trained on it.

    Attributes:
      record: of the run.
      attempts: the step log.

    Raises:
      RunError: if there is no run.
      ConfigError: if its data is not named, or is named and in its step log.
      DataError: if it has trained nothing, or its data cannot be read.
    """

    def __init__(self, directory: str, *, data: str | None = None) -> None:
        self._directory = directory
        self.record = run_files.read(directory)
        self.attempts = step_log.read(directory)
        if self.record.data is None and data is None:
            raise errors.ConfigError(
                f"{directory} was recorded by your own training loop, whose data is"
                " defined in its program; name it with --data MODULE:NAME"
            )
        if data is not None and self.record.data is not None:
            raise errors.ConfigError(
                f"--data: the data of {directory} is in its configuration; leave"
                " --data out"
            )
        self._own = None if data is None else _named(data)
        # The same for attempts with the same settings.
        self._configured = functools.cache(_configured)
        self._settings = {each.attempt: each.data for each in self.attempts}

    def data_of(self, attempt: int) -> elastic_data.ElasticData:
        """The configured data of an attempt."""
        if self._own is not None:
            return self._own
        return self._configured(json.dumps(self._settings[attempt], sort_keys=True))

    def outcome(self) -> Audit:
        """Compares the run with one host that reads its data."""
        record, attempts = self.record, self.attempts
        saved = max(foreign_steps.steps(record.steps_directory), default=None)
        events = run_files.read_events(self._directory)
        last = self.data_of(attempts[-1].attempt)
        is_text = isinstance(last, positional_data.TextData)
        start_step = attempts[0].start_step
        done = start_step + len(step_log.lineage(attempts))
        # The reference trainer claims its world before it begins an attempt; a loop of
        # the user's own may claim it with the first save.
        worlds = [
            event.get("claim", 0)
            for event in events
            if event["event"] == "save_started" and record.program == "train"
        ]
        return audit(
            attempts,
            self.data_of,
            num_records=last.num_records if is_text else None,
            num_saved_steps=0 if saved is None else saved + 1 - record.first_step,
            newest_world=max(worlds, default=0),
            first_step=record.first_step,
            missing_checkpoint=missing_checkpoint(
                period=record.every,
                at_end=record.at_end,
                finished=[e["event"] for e in events[-1:]] == ["run_finished"],
                num_steps=done - 1 + record.first_step,
                saved=saved or 0,
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


def _named(name: str) -> elastic_data.ElasticData:
    module, _, attribute = name.partition(":")
    # As `python -m` does. The module may change sys.path, too.
    own = os.getcwd()
    sys.path.insert(0, own)
    try:
        data = getattr(importlib.import_module(module), attribute)
        if callable(data):
            inspect.signature(data).bind()
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise errors.ConfigError(
            f"--data {name}: {error}; write MODULE:NAME, of a module that can be"
            " imported here, and of the data as ec.batches was given it, or of a"
            " function without arguments that returns it"
        ) from error
    finally:
        if own in sys.path:
            sys.path.remove(own)
    if callable(data):
        data = data()
    elastic_data.check(data, caller=f"--data {name}")
    return data
