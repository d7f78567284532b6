"""The step log: which data rows each step was computed from.

A run has one log per attempt. A launch begins an attempt, and so does a rollback to an
older step. [STEP_LOG.md](STEP_LOG.md) describes the files: each attempt has a log
(`core.jsonlog`) that grows by one line per step. The ids and digests of the rows are
computed on the devices, from the same arrays as the gradient.

A killed run may have logged steps after its last checkpoint. The next attempt starts at
that checkpoint and repeats these steps; `lineage` selects the last record of each step.
A replaced launch may still log steps, but its world number is lower.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from etils import epath
from jax.sharding import NamedSharding, PartitionSpec

from elastic_ckpt.core import (
    bucket_clients,
    codec,
    digest,
    errors,
    jsonlog,
    storage,
    storage_cause,
    topology,
)
from elastic_ckpt.data import elastic_data, state

DIRECTORY = "step_log"
VERSION = 1
# BLAKE2b-128.
_DIGEST_BYTES = 16
# The maximum number of rows in a batch: a damaged file must not exhaust a reader's
# memory.
_MAX_ROWS = 2**24


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StepRecord:
    """A step and the batch that it was computed from.

    Attributes:
      step: the step number, from 0.
      row: the number of data rows before the batch.
      rows: the number of rows in the global batch.
      digest: the digest of the rows' ids and tokens, in order; 32 hex digits.
      loss: the loss of the batch before the update; NaN if it was not logged.
      attempt: the number of the attempt that logged the step.
    """

    step: int
    row: int
    rows: int
    digest: str
    loss: float = math.nan
    attempt: int = 0

    def __post_init__(self) -> None:
        if self.row < 0 or not 0 < self.rows <= _MAX_ROWS:
            raise ValueError(
                f"a batch of {self.rows} rows cannot follow row {self.row}"
            )
        if len(bytes.fromhex(self.digest)) != _DIGEST_BYTES:
            raise ValueError(f"digest {self.digest} has the wrong length")

    @property
    def stop(self) -> int:
        """The number of data rows before the next batch."""
        return self.row + self.rows


@dataclasses.dataclass(frozen=True, kw_only=True)
class Attempt:
    """An attempt and the steps that it logged.

    Attributes:
      attempt: the attempt number, from 1.
      start_step: the first step of the attempt.
      hosts: the number of hosts in the attempt's world.
      slices: the number of slices in that world.
      devices: the number of devices in that world.
      data: the data settings, keyed by name; empty if unknown.
      world: the claimed world's number; 0 if none is claimed.
      left_out: the rows that the run skipped before the attempt's first step.
      records: the records of the attempt's steps.
    """

    attempt: int
    start_step: int
    hosts: int
    slices: int
    devices: int
    data: dict[str, Any]
    world: int
    left_out: state.Ranges
    records: tuple[StepRecord, ...] = ()


class StepLog:
    """Writes the log of a new attempt; used only on the primary host.

    Args:
      step: the first step of the attempt, from 0.
      world: the topology of the attempt's world.
      data: the data settings, keyed by name; empty if unknown.
      claim: the claimed world's number; 0 if none is claimed.
      left_out: the rows that the run has skipped so far.
    """

    def __init__(
        self,
        run_directory: epath.PathLike,
        step: int,
        *,
        world: topology.Topology,
        data: dict[str, storage.Json],
        claim: int = 0,
        left_out: state.Ranges = (),
    ) -> None:
        directory = storage.absolute(run_directory) / DIRECTORY
        newest = max(map(_attempt_number, _files(run_directory)), default=0)
        # Another launch may create its file at the same time.
        for number in itertools.count(newest + 1):
            self._path = directory / f"attempt-{number:05d}.jsonl"
            header: dict[str, Any] = {
                "version": VERSION,
                "attempt": number,
                "start_step": step,
                **dataclasses.asdict(world),
                "data": data,
                "world": claim,
                "left_out": [list(each) for each in left_out],
            }
            if jsonlog.create(self._path, header):
                break
        self._log = jsonlog.writer(self._path)

    def write(
        self,
        step: int,
        example_ids: jax.Array,
        row_digests: jax.Array,
        loss: float | jax.Array | None,
    ) -> None:
        """Logs a step; waits until the arrays are computed.

        Args:
          step: the step number, from 0.
          example_ids: the ids of the rows in the batch, uint32 `[B, 2]`.
          row_digests: the digests of the rows, uint32 `[B]`.
          loss: the loss of the batch; None if unknown.
        """
        ids = elastic_data.join_ids(np.asarray(example_ids))
        fields: dict[str, storage.Json] = {
            "step": step,
            "row": first_row(ids),
            "rows": len(ids),
            "digest": batch_digest(ids, np.asarray(row_digests)),
        }
        self._log.append(fields if loss is None else fields | {"loss": float(loss)})

    def sync(self) -> str | None:
        """Makes every step so far durable; called before a checkpoint is saved.

        Returns:
          None if the steps are durable; otherwise, the reason that the disk or object
          store rejects them. Rejected steps stay in memory, and each later step retries
          the write.

        Raises:
          OSError: if a disk accepted the steps but cannot be flushed: the steps may be
            lost.
          RunError: if the log file has been removed.
        """
        self._log.check()
        return self._why_late(self._log.sync)

    def close(self) -> None:
        """Syncs and closes the file.

        Raises:
          OSError: if the steps cannot be flushed to the disk.
          RunError: if the disk or object store rejects the steps.
        """
        why = self._why_late(self._log.close)
        if why is not None:
            advice = storage_cause.advice(why) or "restore access to the storage"
            raise errors.RunError(
                f"{self._path}: the steps since the last checkpoint in storage cannot"
                f" be logged: {why}; {advice}, then restart the run"
            )

    def _why_late(self, take: Callable[[], None]) -> str | None:
        try:
            take()
        except bucket_clients.failures() as error:
            # A disk that accepted lines but cannot flush them may have lost them.
            if not self._log.late_bytes:
                raise
            return " ".join(str(error).split())
        return None


def digested(batch: elastic_data.Batch) -> tuple[jax.Array, jax.Array]:
    """The row ids and row digests of a global batch, replicated on every host.

    Raises:
      ConfigError: if the batch is not from `ec.batches`.
    """
    if elastic_data.EXAMPLE_ID not in batch:
        raise errors.ConfigError(
            f"the batch to log has no {elastic_data.EXAMPLE_ID!r}; it has only"
            f" {', '.join(sorted(batch))}. Log the batch that ec.batches returned,"
            " before you remove anything from it"
        )
    sharding = batch[elastic_data.EXAMPLE_ID].sharding
    assert isinstance(sharding, NamedSharding)
    return _jitted(NamedSharding(sharding.mesh, PartitionSpec()))(batch)


@functools.lru_cache(maxsize=8)
def _jitted(replicated: NamedSharding) -> jax.stages.Wrapped:
    def ids_and_digests(batch: elastic_data.Batch) -> tuple[jax.Array, jax.Array]:
        return batch[elastic_data.EXAMPLE_ID], digest.row_digests(batch)

    return jax.jit(ids_and_digests, out_shardings=replicated)


def first_row(ids: np.ndarray) -> int:
    """The number of data rows before a batch, computed from its row ids, uint64 `[B]`.

    Uses the median, because padding rows have no row number and a damaged batch may
    have misplaced rows.
    """
    (places,) = np.nonzero(ids != np.uint64(elastic_data.NO_ID))
    first = np.sort(ids[places].astype(np.int64) - places)
    return max(0, int(first[len(first) // 2])) if len(first) else 0


def batch_digest(ids: np.ndarray, row_digests: np.ndarray) -> str:
    """The digest of a batch, as in its record."""
    return digest.batch_digest(ids, row_digests, num_bytes=_DIGEST_BYTES)


def read(run_directory: epath.PathLike) -> list[Attempt]:
    """All attempts of a run, ordered by world.

    Raises:
      DataError: if there are no attempts or a file is not a step log of this version.
    """
    found = map(_read_attempt, _files(run_directory))
    attempts = [attempt for attempt in found if attempt is not None]
    if not attempts:
        raise errors.DataError(
            f"{run_directory} contains no step log; pass a run directory, which is"
            " base_output_directory/run_name"
        )
    # An attempt that claimed no world comes after all earlier attempts.
    newest = itertools.accumulate((each.world for each in attempts), max)
    keys = {
        each.attempt: each.world or world
        for each, world in zip(attempts, newest, strict=True)
    }
    return sorted(attempts, key=lambda each: (keys[each.attempt], each.attempt))


def lineage(attempts: Sequence[Attempt]) -> dict[int, StepRecord]:
    """The valid record of each step: later attempts override earlier ones.

    Each attempt discards earlier records from its first step on, even if the attempt
    itself did not get as far.
    """
    steps: dict[int, StepRecord] = {}
    for attempt in attempts:
        steps = {n: r for n, r in steps.items() if n < attempt.start_step}
        steps |= {record.step: record for record in attempt.records}
    return steps


def _files(run_directory: epath.PathLike) -> list[epath.Path]:
    directory = storage.absolute(run_directory) / DIRECTORY
    return sorted(directory.glob("attempt-*.jsonl"), key=_attempt_number)


def _attempt_number(path: epath.Path) -> int:
    return int(path.stem.removeprefix("attempt-"))


def _read_attempt(path: epath.Path) -> Attempt | None:
    lines = jsonlog.read(path)
    if not lines:
        # The attempt was killed while it wrote its first line: it trained nothing.
        return None
    header, *steps = lines
    version = header.get("version")
    if version != VERSION:
        raise errors.DataError(
            f"{path} has version {version!r}, but this program reads version {VERSION};"
            " audit the run with the version of elastic_ckpt that wrote the log"
        )
    own = {"attempt": header.get("attempt")}
    try:
        return codec.decode(Attempt, {**header, "records": [s | own for s in steps]})
    except ValueError as error:
        raise errors.DataError(
            f"{path} is not a step log ({error}); restore it from a good copy"
        ) from None
