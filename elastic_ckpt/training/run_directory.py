"""What the start of a run keeps in its directory; `inspect.run_files` reads it.

A run of `elastic-ckpt train` or `maxtext` keeps its configuration in `config.json`. A
loop of the user's own has none: `loop.json` names its tiers (`own_loop`).
"""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile

from etils import epy

from elastic_ckpt.core import storage
from elastic_ckpt.inspect.run_files import (
    CONFIG,
    EVENTS,
    LOCK,
    LOGS,
    LOOP,
    LOOP_VERSION,
    METRICS,
    TENSORBOARD,
    RunFiles,
)
from elastic_ckpt.training import keys, load, schema

with epy.lazy_imports():
    from elastic_ckpt.core import checked_json
    from elastic_ckpt.steps import layout

__all__ = [
    "CONFIG",
    "EVENTS",
    "LOCK",
    "METRICS",
    "TENSORBOARD",
    "OwnLoop",
    "logs_of",
    "path_of",
    "read_config",
    "steps_of",
    "write_config",
    "write_loop",
]


def path_of(config: schema.Config) -> str:
    """The directory of the run that `config` describes."""
    return os.path.join(config.run.base_output_directory, config.run.run_name)


def logs_of(config: schema.Config) -> str:
    """The directory for the output of the hosts of this machine.

    Processes append to their logs, which an object store cannot do: the logs of a run
    in a bucket are in a new temporary directory of this machine.
    """
    directory = path_of(config)
    if storage.is_local(directory):
        return os.path.join(directory, LOGS)
    return tempfile.mkdtemp(prefix=f"{config.run.run_name}-{LOGS}-")


def steps_of(directory: str) -> str:
    """The directory of a run's steps in persistent storage."""
    return os.path.join(directory, layout.STEPS)


def write_config(
    directory: str, config: schema.Config, *, program: str = "train"
) -> None:
    """Keeps the configuration of a run, and its verb, with its files."""
    content = json.dumps({"program": program, **keys.values(config)}, indent=2).encode()
    storage.write_atomic(os.path.join(directory, CONFIG), content)


def read_config(directory: str) -> schema.Config:
    """The configuration that the run in `directory` was last started with.

    Raises:
      RunError: if there is no run in `directory`.
      ConfigError: if its configuration cannot be read.
    """
    settings = dict(RunFiles.read(directory).settings)
    settings.pop("program", None)
    return load.from_values(settings, place=os.path.join(directory, CONFIG))


@dataclasses.dataclass(frozen=True, kw_only=True)
class OwnLoop:
    """What a run directory keeps of a loop of the user's own.

    Attributes:
      run: its name.
      persistent: the directory of its steps in storage; empty if it has none.
      every: the steps between two of them; None if something else decides.
      local: its directory in RAM; empty if it has none.
    """

    run: str
    persistent: str
    every: int | None
    local: str


def write_loop(directory: str, own: OwnLoop) -> None:
    """Keeps what is known of a loop of the user's own with its files."""
    fields: dict[str, storage.Json] = {**dataclasses.asdict(own)}
    content = checked_json.to_bytes(fields, version=LOOP_VERSION)
    storage.write_atomic(os.path.join(directory, LOOP), content)
