"""Readers of a host's rows: in the caller, or in worker processes that share shards.

The processes are Grain's. They return each share of a batch with the cursors of its
shards, so the state does not depend on the kind of reader.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import threading
from collections.abc import Mapping
from multiprocessing import connection, parent_process
from typing import Protocol

import grain
import numpy as np
from absl import flags
from grain import experimental

from elastic_ckpt.data import cursors, elastic_data, shard_rows


class Reader(Protocol):
    """Reads a task: the rows of one host."""

    def __next__(self) -> shard_rows.Loaded:
        """The rows of the next batch, without cursors."""

    def changed(self) -> Mapping[int, cursors.Lazy]:
        """The cursors of the shards that yielded rows since the last call."""

    def close(self) -> None:
        """Ends processes, and closes pipelines."""


def reader(task: shard_rows.Task, *, num_workers: int, per_worker: int) -> Reader:
    """A reader of `task`.

    Args:
      task: what to read.
      num_workers: worker processes that share the shards; 0 reads in the caller.
      per_worker: batches that each worker prepares in advance.
    """
    num_workers = min(num_workers, len(task.start))
    # A worker process of a PyTorch loader cannot have processes of its own.
    if num_workers and not multiprocessing.current_process().daemon:
        return _Workers(task, num_workers, max(per_worker, 1))
    return shard_rows.ShardRowsIterator(task)


class _Workers:
    """Worker processes that each run every n-th shard; combines their rows."""

    def __init__(
        self, task: shard_rows.Task, num_workers: int, per_worker: int
    ) -> None:
        if not flags.FLAGS.is_parsed():
            # Grain reads absl's flags even if the program does not use absl.
            flags.FLAGS.mark_as_parsed()
        tracked = shard_rows.ShardRows(dataclasses.replace(task, track=True))
        # Rows pass through pipes: shared memory would outlive a host that is killed.
        in_pipes = experimental.WithOptionsIterDataset(
            tracked, experimental.DatasetOptions(min_shm_size=2**62)
        )
        workers = in_pipes.mp_prefetch(
            grain.MultiprocessingOptions(
                num_workers=num_workers, per_worker_buffer_size=per_worker
            ),
            worker_init_fn=_end_with_parent,
        )
        self._task = task
        self._shares = [sorted(task.start)[w::num_workers] for w in range(num_workers)]
        self._position = task.position + task.skips * task.batch.global_batch_size
        self._loaded = iter(workers)
        self._changed: dict[int, cursors.Cursor] = {}

    def __next__(self) -> shard_rows.Loaded:
        shards, keep = self._task.row_shards(self._position)
        kept = shards[keep]
        row_numbers, parts, over = [], [], False
        for share in self._shares:
            loaded = next(self._loaded)
            self._changed.update(loaded.cursors)
            over |= loaded.over
            if loaded.rows is not None:
                row_numbers.append(np.flatnonzero(np.isin(kept, share)))
                parts.append(loaded.rows)
        self._position += self._task.turns * self._task.batch.global_batch_size
        order = np.argsort(np.concatenate(row_numbers))
        rows = {
            name: np.concatenate([part[name] for part in parts])[order]
            for name in parts[0]
        }
        if over:
            rows[elastic_data.MASK][:] = False
        return shard_rows.Loaded(rows=rows, cursors={}, over=over)

    def changed(self) -> Mapping[int, cursors.Lazy]:
        changed, self._changed = self._changed, {}
        return changed

    def close(self) -> None:
        self._loaded.close()


def _end_with_parent(worker: int, num_workers: int) -> None:
    # A worker watches its host, because a host that is killed cannot end its workers.
    del worker, num_workers
    parent = parent_process()
    assert parent is not None

    def watch() -> None:
        connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
