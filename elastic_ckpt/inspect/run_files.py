"""The directory of a run, as all read it who look at the run, whatever its program.

A run of `elastic-ckpt train` or `maxtext` keeps its settings in `config.json`. A loop
of the user's own has none: `loop.json` names its tiers.
"""

from __future__ import annotations

import dataclasses
import json
import os
import socket
from collections.abc import Mapping
from typing import Any

from etils import epath, epy

from elastic_ckpt.core import bucket_clients, errors, events, jsonlog, storage

with epy.lazy_imports():
    from elastic_ckpt.core import checked_json
    from elastic_ckpt.steps import layout

CONFIG = "config.json"
LOOP = "loop.json"
EVENTS = "events.jsonl"
LOCK = "run.lock"
LOGS = "logs"
METRICS = "metrics"
TENSORBOARD = "tensorboard"
# Of `LOOP`.
LOOP_VERSION = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunFiles:
    """What a run has written into its directory.

    Attributes:
      directory: of the run.
      settings: of `config.json` or `loop.json`, by key.
      is_own_loop: whether it is a loop of the user's own.
    """

    directory: str
    settings: Mapping[str, Any]
    is_own_loop: bool

    @classmethod
    def read(cls, directory: str) -> RunFiles:
        """Reads what was kept of the run's start.

        Raises:
          RunError: if there is no run in `directory`.
          ConfigError: if `config.json` cannot be read.
          DataError: if `loop.json` cannot be read.
        """
        path = storage.absolute(directory)
        if (path / LOOP).exists():
            loop = checked_json.read(
                path / LOOP, what="record of a loop", version=LOOP_VERSION
            )
            return cls(directory=directory, settings=loop, is_own_loop=True)
        try:
            settings = json.loads((path / CONFIG).read_text())
        except FileNotFoundError:
            raise errors.RunError(
                f"{directory} is not the directory of a run (it contains no {CONFIG});"
                " give base_output_directory/run_name, or the directory of an"
                " ec.RunDirectory"
            ) from None
        except ValueError as error:
            raise errors.ConfigError(
                f"{path / CONFIG} is not valid JSON ({error}); restore it from a copy,"
                " or start the run again, which rewrites it"
            ) from None
        return cls(directory=directory, settings=settings, is_own_loop=False)

    @property
    def run(self) -> str:
        """The name of the run."""
        return self.settings["run" if self.is_own_loop else "run_name"]

    @property
    def steps(self) -> str:
        """The directory of its steps in persistent storage."""
        own = self.settings["persistent"] if self.is_own_loop else ""
        return own or os.path.join(self.directory, layout.STEPS)

    @property
    def ram(self) -> list[str]:
        """The directories that it may have in the RAM of this machine."""
        if self.is_own_loop:
            return [self.settings["local"]] if self.settings["local"] else []
        if not self.settings.get("enable_multi_tier_checkpointing"):
            return []
        base = self.settings["local_checkpoint_directory"]
        slices = range(self.settings.get("slices", 1))
        bases = [base, *(layout.slice_directory(base, number) for number in slices)]
        return [os.path.join(each, self.run) for each in bases]

    @property
    def from_zero(self) -> bool:
        """Whether saved steps are numbered from 0, as MaxText does."""
        return self.settings.get("program") == "maxtext"

    @property
    def storage_period(self) -> int | None:
        """The steps between two in storage; 0 for none, None if time decides."""
        if self.is_own_loop:
            return self.settings["every"] if self.settings["persistent"] else 0
        if not self.settings.get("enable_checkpointing", True):
            return 0
        key = "checkpoint_period"
        if self.settings.get("enable_multi_tier_checkpointing"):
            key = "multi_tier_checkpointing_backup_interval_steps"
        return self.settings.get(key) or None

    def events(self, *, last_bytes: int | None = None) -> list[dict[str, Any]]:
        """The events; see `read_events`."""
        return read_events(self.directory, last_bytes=last_bytes)

    def metrics(
        self, *, last_bytes: int | None = None
    ) -> dict[str, list[dict[str, Any]]]:
        """The lines of metrics, by the name of their file; see `read_metrics`."""
        path = storage.absolute(self.directory) / METRICS
        return read_metrics(path, last_bytes=last_bytes)

    @property
    def is_finished(self) -> bool:
        """Whether the last start of the run came to its end."""
        return [e["event"] for e in self.events()[-1:]] == ["run_finished"]

    @property
    def is_alive(self) -> bool | None:
        """Whether the process that holds its lock lives; None if it is elsewhere."""
        path = os.path.join(self.directory, LOCK)
        if not storage.is_local(path) or not os.path.exists(path):
            return None
        with open(path) as file:
            words = file.read().split()
        # "process 17 on machine"
        if len(words) != 4 or words[3] != socket.gethostname():
            return None
        return os.path.exists(f"/proc/{words[1]}")


def is_run(directory: str) -> bool:
    """Whether it is the directory of a run.

    Raises:
      RunError: if it cannot be read.
    """
    path = storage.absolute(directory)
    try:
        return any((path / name).exists() for name in (CONFIG, LOOP))
    except bucket_clients.failures() as error:
        raise errors.RunError(
            f"{directory} cannot be read ({error}); check the path, the network and who"
            " may read there"
        ) from error


def read_events(
    directory: str, *, last_bytes: int | None = None
) -> list[dict[str, Any]]:
    """The events of a run, without those of starts after another one replaced them.

    Args:
      directory: of the run.
      last_bytes: see `jsonlog.read`.

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
    """The lines of all files in `directory`, by the name of the file; none if absent.

    Without those of starts after another one has replaced them.

    Args:
      directory: of files that `monitoring.jsonl` wrote.
      last_bytes: see `jsonlog.read`.

    Raises:
      DataError: if a file was changed after it was written.
    """
    root = storage.absolute(directory)
    files = sorted(root.glob("*.jsonl")) if root.exists() else []
    logs = {file.stem: jsonlog.read(file, last_bytes=last_bytes) for file in files}
    return {name: events.counted(log) for name, log in logs.items()}
