"""The stream of rows of a run: where the batch of each step lies in it.

The step log has the batches of all attempts, those that were trained again included.
With the rows that an attempt left out, they place each batch in the stream of rows. The
sizes of the batches so far determine the rows of each logical shard (`data.rows`), and
the pipeline of the attempt and stage of its step makes them.
"""

from __future__ import annotations

import collections
import dataclasses
import json
from collections.abc import Callable, Sequence
from typing import TypeAlias

from elastic_ckpt.core import errors
from elastic_ckpt.data import elastic_data, rows, sharded_data, stages
from elastic_ckpt.training import step_log
from elastic_ckpt.training.step_record import StepRecord

# What identifies a pipeline: the settings of the data, the first step of the stage, and
# the rows of a batch.
Pipeline: TypeAlias = tuple[str, int, int]
# The pipelines that made the stream of rows: the row from which on each is used.
History: TypeAlias = tuple[tuple[int, Pipeline], ...]
# The position of the next batch that was trained on, given that after the last one.
After: TypeAlias = Callable[[History, int, int], int]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trained:
    """A step that an attempt trained, and its place in the stream of rows.

    Attributes:
      record: of the step.
      position: the number of rows before it in the stream.
      history: the pipelines up to there.
      is_current: whether it is a part of the run as it is now.
    """

    record: StepRecord
    position: int
    history: History
    is_current: bool

    @property
    def stop(self) -> int:
        """The position after it."""
        return self.position + self.record.num_rows


class Stream:
    """The streams of rows of all attempts, which differ after a rollback.

    Args:
      attempts: the step log.
      data_of: returns the configured data of an attempt, given its number.

    Attributes:
      trained: all steps of all attempts, in the order of training, once placed.
      ends: the end of the rows that were trained on, by the pipelines that made them.
      keys: what identifies the data of each attempt.
    """

    def __init__(
        self,
        attempts: Sequence[step_log.Attempt],
        data_of: Callable[[int], elastic_data.ElasticData],
    ) -> None:
        self._attempts = attempts
        self._data: dict[str, elastic_data.ElasticData] = {}
        self.trained: list[Trained] = []
        self.ends: dict[History, int] = collections.defaultdict(int)
        self.keys: dict[int, str] = {}
        by_settings: dict[str, str] = {}
        for attempt in attempts:
            settings = json.dumps(attempt.data, sort_keys=True)
            if settings not in by_settings:
                data = data_of(attempt.attempt)
                key = json.dumps(data.identity(), sort_keys=True)
                self._data.setdefault(key, data)
                by_settings[settings] = key
            self.keys[attempt.attempt] = by_settings[settings]

    def place(
        self,
        *,
        after: After | None = None,
        first_step: int | None = None,
    ) -> None:
        """Places the steps.

        Args:
          after: skips batches that no step has.
          first_step: the number of a run's first step, for messages; None goes on where
            the step log lacks a step.

        Raises:
          DataError: if the step log lacks a step, or has none.
        """
        lineage = step_log.lineage(list(self._attempts))
        # The steps of the run as it was before each attempt.
        before: dict[int, Trained] = {}
        for attempt in self._attempts:
            before = {n: t for n, t in before.items() if n < attempt.start_step}
            position, history = 0, ()
            if attempt.start_step > self._attempts[0].start_step:
                last = before.get(attempt.start_step - 1)
                if last is None and first_step is not None:
                    raise errors.DataError(
                        f"step {attempt.start_step - 1 + first_step} is missing from"
                        " the step log, so the rows of later steps are not known; run"
                        " `elastic-ckpt audit` to see what else is missing"
                    )
                if last is None and before:
                    last = before[max(before)]
                if last is not None:
                    position, history = last.stop, last.history
            key = self.keys[attempt.attempt]
            for record in attempt.records:
                for start, stop in attempt.left_out:
                    if position == start:
                        history = self._left_out(
                            history, start, stop, key=key, record=record
                        )
                        position = stop
                pipeline = self._of_step(key, record.step, record.num_rows)
                history = _continued(history, position, pipeline)
                if after is not None:
                    position = after(history, position, record.num_rows)
                trained = Trained(
                    record=record,
                    position=position,
                    history=history,
                    is_current=lineage.get(record.step) is record,
                )
                self.trained.append(trained)
                before[record.step] = trained
                position = trained.stop
        if first_step is not None and not self.trained:
            raise errors.DataError("the step log has no step; the run trained none yet")
        for trained in self.trained:
            end = max(self.ends[trained.history], trained.stop)
            self.ends[trained.history] = end

    def _left_out(
        self, history: History, start: int, stop: int, *, key: str, record: StepRecord
    ) -> History:
        # The pipelines up to `stop`, given those up to `start`, of rows that the run
        # had taken when it went back. Steps that were not logged follow the last one.
        position, step, size = start, record.step, record.num_rows
        for last in reversed(self.trained):
            if start <= last.stop <= stop and until(last.history, start) == history:
                size = last.record.num_rows
                if last.stop > start:
                    key = key_at(last.history, last.position)[0]
                    history, position = last.history, last.stop
                    step = last.record.step + 1
                break
        while position < stop:
            now = stages.at(self._data[key], step)
            size = stages.Course(data=now, base_size=size).size
            pipeline = self._of_step(key, step, size)
            history = _continued(history, position, pipeline)
            position += size
            step += 1
        return history

    def _of_step(self, key: str, step: int, size: int) -> Pipeline:
        # The pipeline of a step of the data of a key.
        of_stages = stages.of(stages.at(self._data[key], step))
        return key, of_stages.current.begin if of_stages else 0, size

    def histories(self) -> dict[History, list[Trained]]:
        """The different streams of rows, each with the steps that have its rows."""
        streams: dict[History, list[Trained]] = {}
        by_length = sorted(self.ends.items(), key=lambda each: -len(each[0]))
        for history, end in by_length:
            if not any(until(other, end) == history for other in streams):
                streams[history] = [
                    trained
                    for trained in self.trained
                    if until(history, trained.stop) == trained.history
                ]
        return streams

    def data(self, key: str) -> elastic_data.ElasticData:
        """The data of a key of `keys`."""
        return self._data[key]

    def data_at(self, history: History, position: int) -> elastic_data.ElasticData:
        """The data that made the row at a position, in its stage."""
        key, step, _ = key_at(history, position)
        return stages.at(self._data[key], step)

    def sharded(self, history: History, position: int) -> sharded_data.ShardedData:
        """The data that made the row at a position, with logical shards."""
        return sharded(self.data_at(history, position))


def until(history: History, position: int) -> History:
    """The pipelines of the rows before a position."""
    return tuple(each for each in history if each[0] < position)


def batches(history: History, position: int) -> rows.History:
    """The sizes of the batches before a position."""
    ends = [start for start, _ in history[1:]] + [position]
    so_far: rows.History = ()
    for (start, (_, _, size)), end in zip(history, ends, strict=False):
        number = (min(end, position) - start) // size
        if number > 0:
            so_far = rows.after(so_far, size, number)
    return so_far


def key_at(history: History, position: int) -> Pipeline:
    """The pipeline of the row at a position."""
    return [key for start, key in history if start <= position][-1]


def sharded(data: elastic_data.ElasticData) -> sharded_data.ShardedData:
    """The data, or that of the stage that it is in, with logical shards.

    Raises:
      DataError: if it has none.
    """
    of_stages = stages.of(data)
    if of_stages is not None:
        return of_stages.sharded()
    if not isinstance(data, sharded_data.ShardedData):
        raise errors.DataError(
            f"the documents of {type(data).__name__} cannot be told; use"
            " ec.data.sharded or ec.data.from_config"
        )
    return data


def _continued(history: History, position: int, key: Pipeline) -> History:
    before = until(history, position)
    if before and before[-1][1] == key:
        return before
    return (*before, (position, key))
