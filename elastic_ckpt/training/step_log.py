"""The step log: a record of the examples that each step was computed from.

A run has one file per start, and after each time that it goes back to an older step,
`step_log/attempt-00001.jsonl` and so on. Version 4 of the file is JSON lines. The first
line describes the attempt, with the configuration of its data (`data`, which version 1
lacks), the number of the claimed world (`world`, which versions 1 and 2 lack; 0 if none
is claimed), and the ranges of positions that the run has left out before the attempt
(`left_out`, which versions 1 to 3 lack; see `data.state`):

    {"version":4,"attempt":1,"start_step":0,"hosts":4,"slices":2,"devices":8,"data":{},
     "world":1,"left_out":[]}

(on one line in the file).
Each further line describes a step, in order:

    {"step":0,"loss":5.6,"digest":"9c1f00de12345678","ids":[12,7]}

`ids` are the example ids of the global batch in row order, `digest` covers them and the
tokens of their rows (`core.digest.batch_digest`). Both are outputs of the jitted step,
computed from the same arrays as the gradient.

A killed run may have logged steps after its last checkpoint. The next attempt starts at
that checkpoint and repeats them; `lineage` selects the last record of each step. A
start that another one has replaced may still log steps: its world is the older one.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import numpy as np
from etils import epath

from elastic_ckpt.core import digest, errors, storage, topology
from elastic_ckpt.data import example_id, state
from elastic_ckpt.training import train_step

DIRECTORY = "step_log"
VERSION = 4
_READABLE = (1, 2, 3, 4)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One step of a run.

    Attributes:
      step: its number, from 0.
      loss: over the global batch, before the update.
      digest: of ids and tokens, `core.digest.batch_digest`.
      ids: example ids in row order.
      attempt: the number of the attempt that logged it.
    """

    step: int
    loss: float
    digest: str
    ids: tuple[int, ...]
    attempt: int


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


class StepLog:
    """Writes the log of a new attempt; used only on the primary host.

    Args:
      run_directory: the run's directory.
      start_step: the first step of this attempt.
      world: its hosts, slices and devices.
      data: the configuration of its data, by key.
      number: of the claimed world; 0 if none is claimed.
      left_out: the positions that were left out so far.
    """

    def __init__(
        self,
        run_directory: epath.PathLike,
        *,
        start_step: int,
        world: topology.Topology,
        data: dict[str, storage.Json],
        number: int = 0,
        left_out: state.Ranges = (),
    ) -> None:
        directory = storage.absolute(run_directory) / DIRECTORY
        header: dict[str, Any] = {
            "version": VERSION,
            "attempt": 1 + max(map(_attempt_number, _files(run_directory)), default=0),
            "start_step": start_step,
            **dataclasses.asdict(world),
            "data": data,
            "world": number,
            "left_out": [list(each) for each in left_out],
        }
        # Another start may create its file at the same time.
        while not storage.create(_path(directory, header), _first_line(header)):
            header["attempt"] += 1
        self._log = storage.AppendLog(_path(directory, header))

    def append(self, step: int, report: train_step.StepReport) -> float:
        """Logs `step`, waiting until it is computed, and returns its loss."""
        loss = float(report.loss)
        ids = example_id.join(np.asarray(report.example_id))
        rows = np.asarray(report.row_digests).tolist()
        self._log.append(
            {
                "step": step,
                "loss": loss,
                "digest": digest.batch_digest(ids, rows),
                "ids": ids,
            }
        )
        return loss

    def sync(self) -> None:
        """Makes every step so far durable; called before a checkpoint is saved."""
        self._log.sync()

    def close(self) -> None:
        """Syncs and closes the file."""
        self._log.close()


def read(run_directory: epath.PathLike) -> list[Attempt]:
    """Every attempt of a run, in the order of their worlds.

    Raises:
      DataError: if there is none, or a file is not a step log of a readable version.
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
    directory = epath.Path(run_directory) / DIRECTORY
    return sorted(directory.glob("attempt-*.jsonl"), key=_attempt_number)


def _path(directory: epath.Path, header: dict[str, Any]) -> epath.Path:
    return directory / f"attempt-{header['attempt']:05d}.jsonl"


def _first_line(header: dict[str, Any]) -> bytes:
    return json.dumps(header, separators=(",", ":")).encode() + b"\n"


def _attempt_number(path: epath.Path) -> int:
    return int(path.stem.removeprefix("attempt-"))


def _read_attempt(path: epath.Path) -> Attempt | None:
    lines = storage.read_log(path)
    if not lines:
        # The attempt was killed while it wrote its first line: it trained nothing.
        return None
    header: dict[str, Any] = lines[0]
    version = header.pop("version", None)
    if version not in _READABLE:
        raise errors.DataError(
            f"{path} has version {version!r}, and this program reads versions"
            f" {_READABLE[0]} to {VERSION}; audit the run with the program that wrote"
            " it"
        )
    header.setdefault("data", {})
    left_out = header.pop("left_out", ())
    try:
        return Attempt(
            records=tuple(
                StepRecord(
                    step=line["step"],
                    loss=line["loss"],
                    digest=line["digest"],
                    ids=tuple(line["ids"]),
                    attempt=header["attempt"],
                )
                for line in lines[1:]
            ),
            left_out=tuple((start, stop) for start, stop in left_out),
            **header,
        )
    except (KeyError, TypeError) as error:
        raise errors.DataError(
            f"{path}: not a step log ({error!r}); restore it from a copy"
        ) from None
