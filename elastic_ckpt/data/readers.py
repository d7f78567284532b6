"""Who reads a host's rows: the caller, or worker processes that share its shards.

The processes are Grain's. Each share of a batch comes with the cursors of the shards
that gave it rows, so that the state does not tell who read.
"""

from __future__ import annotations

import dataclasses
import os
import threading
import weakref
from multiprocessing import connection, parent_process
from typing import Protocol

import grain
import numpy as np
from absl import flags
from grain import experimental

from elastic_ckpt.data import cursors, elastic_data, shard_rows


class Reader(Protocol):
    """Reads a task: the rows of one host."""

    def __next__(self) -> shard_rows.Rows:
        """The rows of the next batch."""

    def changed(self) -> cursors.Cursors:
        """The cursors of the shards that gave rows since the last call."""

    def close(self) -> None:
        """Ends processes, and closes pipelines."""


def reader(task: shard_rows.Task, *, num_workers: int, per_worker: int) -> Reader:
    """A reader of `task`.

    Args:
      task: what to read.
      num_workers: processes that share the task's shards; 0 reads in the caller.
      per_worker: batches that each of them has ready.
    """
    num_workers = min(num_workers, len(task.start))
    if num_workers:
        return _Workers(task, num_workers, max(per_worker, 1))
    return _InCaller(task)


class _InCaller:
    def __init__(self, task: shard_rows.Task) -> None:
        self._rows = shard_rows.ShardRowsIterator(task)
        # Also at the end of the program, before the modules are gone.
        self._close = weakref.finalize(self, self._rows.close)

    def __next__(self) -> shard_rows.Rows:
        found = next(self._rows).rows
        assert found is not None
        return found

    def changed(self) -> cursors.Cursors:
        return self._rows.changed()

    def close(self) -> None:
        self._close()


class _Workers:
    """Processes that each run every n-th shard; their shares make up the batch."""

    def __init__(
        self, task: shard_rows.Task, num_workers: int, per_worker: int
    ) -> None:
        if not flags.FLAGS.is_parsed():
            # Grain asks absl for its flags, also in programs that have no use for any.
            flags.FLAGS.mark_as_parsed()
        tracked = shard_rows.ShardRows(dataclasses.replace(task, track=True))
        # Through pipes: shared memory would outlive a host that is killed.
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
        self._position = task.position
        self._loaded = iter(workers)
        self._close = weakref.finalize(self, self._loaded.close)
        self._changed: dict[int, cursors.Cursor] = {}

    def __next__(self) -> shard_rows.Rows:
        shards, keep = self._task.wanted(self._position)
        kept = shards[keep]
        places, found, over = [], [], False
        for share in self._shares:
            loaded = next(self._loaded)
            self._changed.update(loaded.cursors)
            over |= loaded.over
            if loaded.rows is not None:
                places.append(np.flatnonzero(np.isin(kept, share)))
                found.append(loaded.rows)
        self._position += self._task.batch.global_batch_size
        order = np.argsort(np.concatenate(places))
        rows = {
            name: np.concatenate([part[name] for part in found])[order]
            for name in found[0]
        }
        if over:
            rows[elastic_data.MASK][:] = False
        return rows

    def changed(self) -> cursors.Cursors:
        changed, self._changed = self._changed, {}
        return changed

    def close(self) -> None:
        self._close()


def _end_with_parent(worker: int, num_workers: int) -> None:
    # A host that is killed cannot tell its workers to end.
    del worker, num_workers
    parent = parent_process()
    assert parent is not None

    def watch() -> None:
        connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
