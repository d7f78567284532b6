"""The step log: a record of the examples that each step was computed from.

A run has one log per start, and after each time that it goes back to an older step.
[STEP_LOG.md](STEP_LOG.md) describes the files: an attempt is a log (`core.jsonlog`)
that grows by a line a step. The ids and digests are outputs of the jitted step,
computed from the same arrays as the gradient.

A killed run may have logged steps after its last checkpoint. The next attempt starts at
that checkpoint and repeats them; `lineage` selects the last record of each step. A
start that another one has replaced may still log steps: its world is the older one.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
from etils import epath

from elastic_ckpt.core import (
    bucket_clients,
    errors,
    jsonlog,
    storage,
    storage_cause,
    topology,
)
from elastic_ckpt.data import example_id, state
from elastic_ckpt.training import model, step_record
from elastic_ckpt.training.step_record import StepRecord

DIRECTORY = "step_log"
VERSION = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Attempt:
    """One start of a run, and the steps that it logged.

    Attributes:
      attempt: its number, from 1.
      start_step: its first step.
      hosts: the number of hosts in its world; slices and devices likewise.
      data: the configuration of its data, by key; empty if unknown.
      records: its steps.
      world: the number of the claimed world; 0 if none is claimed.
      left_out: the positions that were left out up to its first step.
    """

    attempt: int
    start_step: int
    hosts: int
    slices: int
    devices: int
    data: dict[str, storage.Json]
    records: tuple[StepRecord, ...]
    world: int = 0
    left_out: state.Ranges = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Start:
    """The start of an attempt.

    Attributes:
      step: its first step.
      world: its hosts, slices and devices.
      data: the configuration of its data, by key.
      number: of the claimed world; 0 if none is claimed.
      left_out: the positions that were left out so far.
    """

    step: int
    world: topology.Topology
    data: dict[str, storage.Json]
    number: int = 0
    left_out: state.Ranges = ()


class StepLog:
    """Writes the log of a new attempt; used only on the primary host.

    Args:
      run_directory: the run's directory.
      start: of the attempt.
      detail: of each step, see `step_record.line`.
    """

    def __init__(
        self,
        run_directory: epath.PathLike,
        start: Start,
        *,
        detail: str = step_record.PROOF,
    ) -> None:
        directory = storage.absolute(run_directory) / DIRECTORY
        header: dict[str, Any] = {
            "version": VERSION,
            "attempt": 1 + max(map(_attempt_number, _files(run_directory)), default=0),
            "start_step": start.step,
            **dataclasses.asdict(start.world),
            "data": start.data,
            "world": start.number,
            "left_out": [list(each) for each in start.left_out],
        }
        # Another start may create its file at the same time.
        while not jsonlog.create(_path(directory, header), header):
            header["attempt"] += 1
        self._path = _path(directory, header)
        self._detail = detail
        self._log = jsonlog.writer(self._path)

    def append(self, step: int, report: model.StepReport) -> float:
        """Logs `step`, waiting until it is computed, and returns its loss."""
        loss = float(report.loss)
        self.append_rows(step, loss, report.example_id, report.row_digests)
        return loss

    def append_rows(
        self,
        step: int,
        loss: float | None,
        example_ids: jax.Array,
        row_digests: jax.Array,
    ) -> None:
        """Logs `step`, given the ids and digests of its rows as in `StepReport`."""
        rows = step_record.Rows(
            ids=example_id.joined(np.asarray(example_ids)),
            digests=np.asarray(row_digests),
        )
        self._log.append(step_record.line(step, loss, rows, detail=self._detail))

    def sync(self) -> str | None:
        """Makes every step so far durable; called before a checkpoint is saved.

        Returns:
          Why the disk or object store does not take them now: they stay in memory, and
          each step tries again. None if they are durable.

        Raises:
          OSError: if a disk took them, and cannot be flushed: none may be left.
          RunError: if the file was removed meanwhile.
        """
        self._log.check()
        try:
            self._log.sync()
        except bucket_clients.failures() as error:
            self._check(error)
            return " ".join(str(error).split())
        return None

    def close(self) -> None:
        """Syncs and closes the file.

        Raises:
          OSError: if they cannot be flushed to the disk.
          RunError: if the disk or object store does not take them.
        """
        try:
            self._log.close()
        except bucket_clients.failures() as error:
            self._check(error)
            why = " ".join(str(error).split())
            advice = storage_cause.advice(why) or "bring the storage back"
            raise errors.RunError(
                f"{self._path}: the steps since the last checkpoint in storage cannot"
                f" be logged: {why}; {advice}, and start the run once more"
            ) from error

    def _check(self, error: Exception) -> None:
        # Raises the error of a disk that has taken all lines.
        if not self._log.late_bytes:
            raise error


def read(run_directory: epath.PathLike) -> list[Attempt]:
    """Every attempt of a run, in the order of their worlds.

    Raises:
      DataError: if there is none, or a file is not a step log of this version.
    """
    attempts = [
        attempt
        for path in _files(run_directory)
        if (attempt := _read_attempt(path)) is not None
    ]
    if not attempts:
        raise errors.DataError(
            f"{run_directory}: no step log in it; give the directory of a run,"
            " base_output_directory/run_name"
        )
    newest = 0
    keys: dict[int, tuple[int, int]] = {}
    for attempt in attempts:
        newest = max(newest, attempt.world)
        keys[attempt.attempt] = (attempt.world or newest, attempt.attempt)
    return sorted(attempts, key=lambda attempt: keys[attempt.attempt])


def lineage(attempts: list[Attempt]) -> dict[int, StepRecord]:
    """The valid record of each step: later attempts override earlier ones.

    Earlier records from an attempt's first step on are discarded, even if the attempt
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


def _path(directory: epath.Path, header: dict[str, Any]) -> epath.Path:
    return directory / f"attempt-{header['attempt']:05d}.jsonl"


def _attempt_number(path: epath.Path) -> int:
    return int(path.stem.removeprefix("attempt-"))


def _read_attempt(path: epath.Path) -> Attempt | None:
    lines = jsonlog.read(path)
    if not lines:
        # The attempt was killed while it wrote its first line: it trained nothing.
        return None
    header: dict[str, Any] = lines[0]
    version = header.pop("version", None)
    if version != VERSION:
        raise errors.DataError(
            f"{path} has version {version!r}, and this program reads version {VERSION};"
            " audit the run with the program that wrote it"
        )
    try:
        left_out = header.pop("left_out")
        return Attempt(
            records=tuple(
                step_record.parse(line, attempt=header["attempt"]) for line in lines[1:]
            ),
            left_out=tuple((start, stop) for start, stop in left_out),
            **header,
        )
    except (KeyError, TypeError, ValueError) as error:
        raise errors.DataError(
            f"{path}: not a step log ({error!r}); restore it from a copy"
        ) from None
