"""The run on one host that an audit compares with: the same pipeline, read again."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from elastic_ckpt.core import digest
from elastic_ckpt.data import delivery, elastic_data, example_id, rows, stages, state
from elastic_ckpt.training.step_log import Attempt
from elastic_ckpt.training.step_record import Rows, StepRecord


class OneHostRun:
    """The run on one host, whose batch size and data change at the same steps.

    It leaves out the same positions.

    Args:
      data_of: returns the configured data of an attempt, given its number.
      attempts: the step log.

    Attributes:
      num_left_out: positions that it has left out so far.
    """

    def __init__(
        self,
        data_of: Callable[[int], elastic_data.ElasticData],
        attempts: Sequence[Attempt],
    ) -> None:
        self.num_left_out = 0
        self._configured = data_of
        # The data of attempts so far, each with the names of the one before.
        self._data: dict[int, elastic_data.ElasticData] = {}
        self._left_out = {each.attempt: each.left_out for each in attempts}
        self._taken = _taken(attempts)
        # The attempt, size and stage of the batches.
        self._now: tuple[int, int, int] | None = None
        self._batches: elastic_data.HostBatches | None = None
        # How many batches without a real row may come before one that has some.
        self._max_empty = 0

    def next(self, record: StepRecord) -> Rows:
        """The batch of the step of `record`."""
        self._leave_out(record)
        batches = self._of_size(record.attempt, record.num_rows, record.step)
        batch = next(batches)
        for _ in range(self._max_empty):
            if batch[elastic_data.MASK].any():
                break
            batch = next(batches)
        tokens = np.concatenate(digest.row_features(batch), axis=1)
        return Rows(
            ids=example_id.joined(batch["example_id"]),
            digests=digest.row_digests(tokens),
        )

    def close(self) -> None:
        """Stops reading ahead."""
        if self._batches:
            self._batches.close()

    def _leave_out(self, record: StepRecord) -> None:
        # Ranges of the attempt that begin here, in the batches that the run once took.
        for start, stop in self._left_out[record.attempt]:
            position, attempt, step = start, record.attempt, record.step
            size = record.num_rows
            while self._position() == position < stop:
                logged = self._taken.get(position)
                if logged is not None:
                    attempt, step, size = logged.attempt, logged.step, logged.num_rows
                else:
                    # Batches that were not logged follow the last one.
                    data = stages.at(self._data_of(attempt), step)
                    size = stages.size(data, size)
                size = min(size, stop - position)
                next(self._of_size(attempt, size, step))
                self.num_left_out += size
                position += size
                step += 1

    def _data_of(self, attempt: int) -> elastic_data.ElasticData:
        if attempt not in self._data:
            data = self._configured(attempt)
            if self._data:
                before = next(reversed(self._data.values()))
                data = data.continuing(before.identity())
            self._data[attempt] = data
        return self._data[attempt]

    def _position(self) -> int:
        return state.row_of(self._batches.position()) if self._batches else 0

    def _of_size(self, attempt: int, size: int, step: int) -> elastic_data.HostBatches:
        data = stages.at(self._data_of(attempt), step)
        of_stages = stages.of(data)
        now = attempt, size, of_stages.number if of_stages else 0
        if self._batches is None or self._now != now:
            self._batches = self._continued(data, size)
            self._now = now
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


def _taken(attempts: Sequence[Attempt]) -> dict[int, StepRecord]:
    # The newest batch at each position of the stream, with those that were left out.
    taken: dict[int, StepRecord] = {}
    # The position after each step.
    stops: dict[int, int] = {}
    for attempt in attempts:
        position = 0
        if attempt.start_step > attempts[0].start_step:
            if attempt.start_step - 1 not in stops:
                continue
            position = stops[attempt.start_step - 1]
        for start, stop in attempt.left_out:
            if start == position:
                position = stop
        # What the attempt has not left out, it has read again.
        taken = {at: record for at, record in taken.items() if at < position}
        for record in attempt.records:
            taken[position] = record
            position += record.num_rows
            stops[record.step] = position
    return taken
