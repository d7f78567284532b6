"""Readers of a host's rows: in the caller, or in worker processes that share shards.

Cursors do not depend on the kind of reader.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
from typing import Protocol

import numpy as np

from elastic_ckpt.data import cursors, shard_rows, worker_process


class Reader(Protocol):
    """Reads a task: the rows of one host."""

    def __next__(self) -> shard_rows.Loaded:
        """The rows of the next batch, and the cursors noted."""

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
    return shard_rows.ShardRows(task)


class _Workers:
    """Worker processes that each run every n-th shard; combines their rows."""

    def __init__(
        self, task: shard_rows.Task, num_workers: int, per_worker: int
    ) -> None:
        shards = sorted(task.start)
        self._task = task
        self._shares = [shards[worker::num_workers] for worker in range(num_workers)]
        self._number = task.number + task.first
        self._workers: list[worker_process.WorkerProcess] = []
        for worker, share in enumerate(self._shares):
            start = {shard: task.start[shard] for shard in share}
            self._workers.append(
                worker_process.WorkerProcess(
                    f"worker process {worker} of {num_workers}",
                    dataclasses.replace(task, start=start),
                    num_ahead=per_worker,
                )
            )

    def __next__(self) -> shard_rows.Loaded:
        shards, keep = self._task.row_shards(self._number)
        kept = shards[keep]
        row_numbers, parts = [], []
        noted: dict[int, cursors.Cursor] = {}
        for share, worker in zip(self._shares, self._workers, strict=True):
            loaded = next(worker)
            noted |= loaded.cursors
            if loaded.rows is not None:
                row_numbers.append(np.flatnonzero(np.isin(kept, share)))
                parts.append(loaded.rows)
        self._number += self._task.every
        rows = parts[0]
        if len(parts) > 1:
            order = np.argsort(np.concatenate(row_numbers))
            rows = {
                name: np.concatenate([part[name] for part in parts])[order]
                for name in rows
            }
        return shard_rows.Loaded(rows=rows, cursors=noted)

    def close(self) -> None:
        for worker in self._workers:
            worker.close()
