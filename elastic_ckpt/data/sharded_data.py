"""The sharded engine: S logical shards, each a complete and independent pipeline.

A shard may filter, tokenize, chunk, shuffle and pack in any way, because nothing inside
it depends on hosts or batches. Rows are taken from the shards round-robin
(`data.rows`). A host runs the shards of its rows, in its own process or in worker
processes; the saved state is the same either way.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import weakref
from typing import Protocol, runtime_checkable

import grain
import numpy as np

from elastic_ckpt.core import errors, storage
from elastic_ckpt.data import (
    cursors,
    elastic_data,
    mixing,
    rows,
    shard_rows,
    shard_steps,
    state,
    worker,
)

MakeShard = shard_steps.MakeShard
_Reader = shard_rows.ShardRows | worker.Workers


@runtime_checkable
class Configured(Protocol):
    """A `make_shard` built from a configuration."""

    def __call__(self, shard: int) -> grain.IterDataset:
        """The pipeline of a shard."""

    def dealt(self, dealing: str) -> Configured:
        """The same `make_shard` with a different way to deal records to shards."""

    def identity(self) -> dict[str, storage.Json]:
        """The settings, by configuration key, that determine the order of rows."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShardedData:
    """Elastic data with a pipeline for each logical shard; `sharded` creates it.

    Attributes:
      make_shard: see `sharded`.
      num_shards: S, fixed for the whole run.
      pipeline: JSON that identifies `make_shard`: for a configuration, its settings by
        key.
      end: how the data ends. Batches of finite data have the feature `mask`, bool
        `[B]`. Rows of a shard that has ended are zeros, and their `example_id` marks
        padding.
      num_workers: see `sharded`; None runs shards in the host's own process, with a
        warning if they slow the loop down.
      per_worker_batches: see `sharded`.
    """

    make_shard: MakeShard
    num_shards: int
    pipeline: storage.Json = ""
    end: elastic_data.End = elastic_data.End.NEVER
    num_workers: int | None = None
    per_worker_batches: int = 1
    engine = "sharded"

    def __post_init__(self) -> None:
        if self.num_shards < 1:
            raise errors.ConfigError(
                f"num_shards={self.num_shards} is invalid; use at least 1 logical shard"
            )

    def identity(self) -> dict[str, storage.Json]:
        """The settings that determine the order of examples."""
        settings: dict[str, storage.Json] = {"num_logical_shards": self.num_shards}
        if isinstance(self.make_shard, shard_steps.CheckedShards):
            settings[state.STEPS] = [*shard_steps.step_descriptions(self.make_shard(0))]
        elif isinstance(self.pipeline, dict):
            return settings | self.pipeline
        return settings | {"pipeline": self.pipeline}

    def dealt(self, dealing: str) -> ShardedData:
        """This data with a different way to deal records to shards, if supported."""
        if not isinstance(self.make_shard, Configured):
            return self
        made = self.make_shard.dealt(dealing)
        return dataclasses.replace(self, make_shard=made, pipeline=made.identity())

    def host_batches(self, placement: rows.Placement) -> elastic_data.HostBatches:
        """The rows of each global batch that one host loads."""
        return _HostBatches(self, placement)


def sharded(
    make_shard: MakeShard,
    *,
    num_shards: int | None = None,
    pipeline: storage.Json = "",
    end: elastic_data.End | str = elastic_data.End.NEVER,
    num_workers: int | None = None,
    per_worker_batches: int = 1,
) -> ShardedData:
    """Elastic data of S logical shards, each with its own Grain pipeline.

    Rows are taken from the shards round-robin, regardless of the number of hosts. When
    that number changes, shards move between hosts. A shard may filter, tokenize,
    shuffle and pack in any way.

        def make_shard(shard):
            records = ec.data.Records(
                ec.data.Parquet(files=files), shard=shard, num_shards=64
            )
            return records.map(decode)

        data = ec.data.sharded(make_shard, pipeline="decoded images, version 1")

    A state can be loaded if it was saved from the same files with the same settings for
    the pipeline's `ec.data` steps. Grain's steps and your own functions are not
    compared; `pipeline` identifies them.

    Args:
      make_shard: a pure function, picklable by cloudpickle, that takes the shard number
        and builds the shard's pipeline: a `grain.IterDataset` of dicts of arrays with
        the same shapes in every example. Batches have an additional feature,
        `example_id`, uint32 `[B, 2]`: the number of rows before this row in the run.
        Examples must not use this name.
      num_shards: S, fixed for the whole run; only needed if the pipeline does not begin
        with `ec.data.Records`.
      pipeline: a name and version, as JSON, for the steps in `make_shard` that are not
        from `ec.data`; required if there are any. Change it when the examples change.
      end: how the data ends, an `ec.data.End` or its name. Finite data has the feature
        `mask`, bool `[B]`, which is false for padding rows.
      num_workers: the number of worker processes that run shards on each host. 0 runs
        the shards in the host's own process. The default also does so, but warns if the
        shards keep a read-ahead thread busy for more than 5% of the time. The state
        does not depend on the number of workers.
      per_worker_batches: the number of batches that each worker process prepares in
        advance.

    Raises:
      ConfigError: if S is missing or inconsistent, if `make_shard` reads a shard other
        than the requested one or the whole source for each shard, or if `pipeline` is
        missing.
    """
    checked = shard_steps.CheckedShards(make_shard)
    first = checked(0)
    steps = shard_steps.datasets(first)
    own = [step for step in steps if isinstance(step, shard_steps.Step)]
    given = {
        each
        for each in (num_shards, *(step.num_shards for step in own))
        if each is not None
    }
    if len(given) != 1:
        raise errors.ConfigError(
            "sharded: num_shards must have exactly one value, but has"
            f" {' and '.join(map(str, sorted(given))) or 'none'}; set it only in"
            " make_shard's ec.data.Records or, if you do not use Records, only in"
            " sharded"
        )
    code = [
        step
        for step in steps
        if not (isinstance(step, shard_steps.Step) or shard_steps.passes_on(step))
    ]
    if code and pipeline in ("", None):
        raise errors.ConfigError(
            "sharded: make_shard has steps that cannot be compared with a saved state"
            f' ({", ".join(map(shard_steps.shown, code))}); pass pipeline="a name,'
            ' version 1", and change it when the examples change'
        )
    (number,) = given
    checked = dataclasses.replace(checked, num_shards=number)
    data = ShardedData(
        make_shard=checked,
        num_shards=number,
        pipeline=pipeline,
        end=elastic_data.End(end),
        num_workers=num_workers,
        per_worker_batches=per_worker_batches,
    )
    repeated = shard_steps.unsliced(first, checked(number - 1))
    if repeated and number > 1:
        raise errors.ConfigError(
            f"sharded: each of the {number} shards would read all of"
            f" {', '.join(repeated)}, so batches would repeat every example"
            f" {number} times; in make_shard, read only the shard's own part, for"
            f" example source[shard::{number}]"
        )
    return data


class _HostBatches:
    """One host's rows, from its shards round-robin."""

    def __init__(self, data: ShardedData, placement: rows.Placement) -> None:
        self._data = data
        self._placement = placement
        self.in_process_by_default = data.num_workers is None
        self._reader: _Reader | None = None
        self.go_to(state.position_of(()), dict.fromkeys)

    def __next__(self) -> dict[str, np.ndarray]:
        size, history = self._placement.global_batch_size, self._history
        if self._skips:
            history = rows.after(history, size, self._skips)
        try:
            loaded = next(self._reading())
            assert loaded.rows is not None
            ids = rows.num_rows(history) + self._placement.held
            batch = shard_rows.with_ids(loaded.rows, ids)
            after = rows.after(history, size), {**self._cursors, **loaded.cursors}
        except BaseException:  # Ctrl-C too
            # Part of the batch was already taken, so the next call rereads all of it.
            self.close()
            raise
        self._history, self._cursors = after
        self._skips = self._placement.every - 1
        return batch

    def get_state(self) -> cursors.HostState:
        return state.position_of(self._history), self._cursors

    def go_to(self, position: cursors.Position, read: elastic_data.ReadCursors) -> None:
        history = state.history_of(position)
        placement = self._placement
        number = rows.batches_of(history, placement.global_batch_size)
        shards = placement.shards(self._data.num_shards, number)
        start = dict(read(shards.tolist()))
        if any(mixing.gone(cursor, ()) for cursor in start.values()):
            names = mixing.names(self._data.make_shard(0))
            for shard, cursor in start.items():
                # Rejects a missing dataset now, not when the shard's row is due.
                if mixing.gone(cursor, names):
                    made, row = self._data.make_shard(shard), cursors.row_of(cursor)
                    shard_rows.iterator(made, cursor, row).close()
        self.close()
        self._history, self._skips = history, placement.first
        self._cursors: cursors.Cursors = start

    def close(self) -> None:
        if self._reader:
            self._close_reader()
        self._reader = None

    def _reading(self) -> _Reader:
        if self._reader is None:
            data, placement = self._data, self._placement
            task = shard_rows.Task(
                make_shard=data.make_shard,
                num_shards=data.num_shards,
                size=placement.global_batch_size,
                keep=placement.held,
                history=self._history,
                start=self._cursors,
                finite=data.end is not elastic_data.End.NEVER,
                every=placement.every,
                first=self._skips,
            )
            num_workers = min(data.num_workers or 0, len(task.start))
            # A worker process of a PyTorch loader cannot start processes.
            if num_workers and not multiprocessing.current_process().daemon:
                self._reader = worker.Workers(
                    task,
                    num_workers=num_workers,
                    num_ahead=max(data.per_worker_batches, 1),
                )
            else:
                self._reader = shard_rows.ShardRows(task)
            # Also runs when the program exits, before modules are unloaded.
            self._close_reader = weakref.finalize(self, self._reader.close)
        return self._reader
