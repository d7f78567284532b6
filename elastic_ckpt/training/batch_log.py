"""Logs the batches of a loop that computes its steps elsewhere.

The reference trainer's step returns the ids and digests of its rows. Any other loop
gives its batches to a `BatchLog`, which computes both on the devices, and writes them
while the next step is computed.
"""

from __future__ import annotations

import dataclasses
import threading

import jax
import jax.numpy as jnp
from etils import epath
from jax.sharding import NamedSharding, PartitionSpec

from elastic_ckpt.core import digest, errors, storage, topology
from elastic_ckpt.data import elastic_data, state
from elastic_ckpt.training import step_log, step_record

# Losses of this many steps may be late.
_MAX_PENDING = 3


@dataclasses.dataclass(kw_only=True)
class _Pending:
    step: int
    example_ids: jax.Array
    row_digests: jax.Array
    loss: float | jax.Array | None = None


class BatchLog:
    """Writes the step log of a loop, on the primary host; the others take part.

    Every host of the world makes one and takes the same steps.

    Args:
      directory: of the run.
      world: the topology of the loop.
      data: the configuration of the loop's data, by key; empty if there is none.
      detail: of each step, see `step_record.line`.
    """

    def __init__(
        self,
        directory: epath.PathLike,
        *,
        world: topology.Topology,
        data: dict[str, storage.Json],
        detail: str = step_record.PROOF,
    ) -> None:
        self._directory = directory
        self._world = world
        self._data = data
        self._detail = detail
        self._log: step_log.StepLog | None = None
        self._pending: list[_Pending] = []
        self._next: int | None = None
        # Saves may be announced by another thread.
        self._lock = threading.Lock()

    def begin(self, step: int, *, left_out: state.Ranges = ()) -> None:
        """Begins an attempt, whose first step is `step`, from 0."""
        self.close()
        with self._lock:
            self._next = step
            if topology.is_primary():
                start = step_log.Start(
                    step=step, world=self._world, data=self._data, left_out=left_out
                )
                self._log = step_log.StepLog(
                    self._directory, start, detail=self._detail
                )

    @property
    def next_step(self) -> int | None:
        """The step that follows the one that was taken last; None before `begin`."""
        return self._next

    def take(
        self, batch: elastic_data.Batch, *, loss: float | jax.Array | None = None
    ) -> int:
        """Takes the batch of the next step, and returns the number of the step.

        Args:
          batch: global, with `example_id` and all of its features.
          loss: of the step, a scalar that may still be computed; see `note_loss`.

        Raises:
          ConfigError: if the batch is not from `ec.batches`.
        """
        if elastic_data.EXAMPLE_ID not in batch:
            raise errors.ConfigError(
                f"the batch to log has no {elastic_data.EXAMPLE_ID!r}, but"
                f" {', '.join(sorted(batch))}; log what ec.batches yields, before"
                " anything is taken out of it"
            )
        sharding = batch[elastic_data.EXAMPLE_ID].sharding
        assert isinstance(sharding, NamedSharding)
        replicated = NamedSharding(sharding.mesh, PartitionSpec())
        ids, digests = _digested(replicated)(batch)
        with self._lock:
            step = self._next
            assert step is not None
            self._next = step + 1
            self._pending.append(
                _Pending(step=step, example_ids=ids, row_digests=digests, loss=loss)
            )
            while len(self._pending) > 1 and (
                self._pending[0].loss is not None or len(self._pending) > _MAX_PENDING
            ):
                self._write(self._pending.pop(0))
        return step

    def note_loss(self, step: int, loss: float | jax.Array) -> None:
        """Adds the loss of a step, unless the step has been written without it."""
        with self._lock:
            for each in self._pending:
                if each.step == step:
                    each.loss = loss

    def sync(self) -> str | None:
        """Writes all steps, before they are saved; see `StepLog.sync`."""
        with self._lock:
            self._flush()
            return self._log.sync() if self._log else None

    def close(self) -> None:
        """Writes all steps, and ends the attempt; see `StepLog.close`."""
        with self._lock:
            self._flush()
            log, self._log = self._log, None
        if log is not None:
            log.close()

    def _flush(self) -> None:
        while self._pending:
            self._write(self._pending.pop(0))

    def _write(self, pending: _Pending) -> None:
        if self._log is None:
            return
        loss = None if pending.loss is None else float(pending.loss)
        self._log.append_rows(
            pending.step, loss, pending.example_ids, pending.row_digests
        )


_JITTED: dict[NamedSharding, jax.stages.Wrapped] = {}


def _digested(replicated: NamedSharding) -> jax.stages.Wrapped:
    if replicated not in _JITTED:
        _JITTED[replicated] = jax.jit(_ids_and_digests, out_shardings=replicated)
    return _JITTED[replicated]


def _ids_and_digests(batch: elastic_data.Batch) -> tuple[jax.Array, jax.Array]:
    tokens = jnp.concatenate(digest.row_features(batch), axis=1)
    return batch[elastic_data.EXAMPLE_ID], digest.row_digests(tokens)
