"""The files in a run directory, regardless of the program that trains.

Each launch writes `record.json`, which has plain values, so readers need not know any
program's keys. The event and metric files grow while the run is alive.
"""

from __future__ import annotations

import dataclasses
import os
import socket
from typing import Any

from etils import epath

from elastic_ckpt.core import (
    bucket_clients,
    checked_json,
    codec,
    errors,
    events,
    jsonlog,
    storage,
)

RECORD = "record.json"
EVENTS = "events.jsonl"
LOCK = "run.lock"
LOGS = "logs"
METRICS = "metrics"
TENSORBOARD = "tensorboard"
_VERSION = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunRecord:
    """The record of a run's latest launch.

    Attributes:
      run: the run name.
      program: `train` (the reference trainer), `maxtext`, or `loop` (the user's own).
      steps_directory: the run's steps directory in storage. If it is inside the run
        directory, the file has the relative path, so that a run can be moved.
      every: the number of steps between saves in storage; 0 if none are saved there,
        None if something else determines it.
      at_end: whether the last step is also stored.
      ram: the directories that the run may use in a machine's RAM.
      first_step: the number of the first step: 1, or 0 under MaxText.
      data: the settings needed to reread the data; None if the program defines the
        data.
      settings: all settings; empty for the user's own loop.
    """

    run: str
    program: str
    steps_directory: str
    every: int | None
    at_end: bool
    ram: tuple[str, ...]
    first_step: int
    data: dict[str, Any] | None
    settings: dict[str, Any]


def write(directory: epath.PathLike, record: RunRecord) -> None:
    """Records a run's launch in the run directory."""
    root = f"{storage.absolute(directory)}/"
    steps = f"{storage.absolute(record.steps_directory)}/"
    if steps.startswith(root):
        record = dataclasses.replace(record, steps_directory=steps[len(root) : -1])
    content = checked_json.to_bytes(vars(record), version=_VERSION)
    storage.write_atomic(f"{root}{RECORD}", content)


def read(directory: epath.PathLike) -> RunRecord:
    """The record of the run in `directory`.

    Raises:
      RunError: if `directory` is not a run directory.
      DataError: if the record cannot be read.
    """
    path = storage.absolute(directory) / RECORD
    try:
        fields = checked_json.parse(
            path.read_bytes(), what="run record", version=_VERSION
        )
        record = codec.decode(RunRecord, fields)
    except FileNotFoundError:
        raise errors.RunError(
            f"{directory} is not a run directory (it contains no {RECORD}); specify"
            " base_output_directory/run_name, or the directory of an ec.RunDirectory"
        ) from None
    except ValueError as error:
        raise errors.DataError(
            f"{path} {error}; restore it from a good copy, or restart the run, which"
            " rewrites this file"
        ) from None
    if "://" in record.steps_directory:
        return record
    steps = os.path.join(directory, record.steps_directory)
    return dataclasses.replace(record, steps_directory=steps)


def is_run(directory: epath.PathLike) -> bool:
    """Whether `directory` is a run directory.

    Raises:
      RunError: if the directory cannot be read.
    """
    try:
        return (storage.absolute(directory) / RECORD).exists()
    except bucket_clients.failures() as error:
        raise errors.RunError(
            f"{directory} cannot be read ({error}); check the path, the network and the"
            " read permissions"
        ) from error


def is_alive(directory: epath.PathLike) -> bool | None:
    """Whether a process holds the run's lock; None if unknown."""
    path = os.path.join(directory, LOCK)
    if not storage.is_local(path) or not os.path.exists(path):
        return None
    if storage.is_locked(path):
        return True
    # Another machine's lock may be invisible here.
    here = f" on {socket.gethostname()}\n".encode()
    return False if storage.read_bytes(path).endswith(here) else None


def read_events(
    directory: epath.PathLike, *, last_bytes: int | None = None
) -> list[dict[str, Any]]:
    """The events of a run, without those that a launch wrote after it was replaced.

    For `last_bytes`, see `jsonlog.read`.

    Raises:
      DataError: if the file was changed after it was written.
    """
    path = storage.absolute(directory) / EVENTS
    try:
        return events.counted(jsonlog.read(path, last_bytes=last_bytes))
    except FileNotFoundError:
        return []


def read_metrics(
    directory: epath.PathLike, *, last_bytes: int | None = None
) -> dict[str, list[dict[str, Any]]]:
    """The metrics in `directory` by file name; empty if the directory is missing.

    Metrics that a launch wrote after it was replaced are excluded. For `last_bytes`,
    see `jsonlog.read`.

    Raises:
      DataError: if a file was changed after it was written.
    """
    root = storage.absolute(directory)
    files = sorted(root.glob("*.jsonl")) if root.exists() else []
    logs = {file.stem: jsonlog.read(file, last_bytes=last_bytes) for file in files}
    return {name: events.counted(log) for name, log in logs.items()}
