"""The places of a run's files, and how the run was started.

A run of `elastic-ckpt train` or `maxtext` keeps its configuration in `config.json`. A
loop of the user's own has none: `loop.json` names its tiers (`own_loop`).
"""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import tempfile
from typing import Any

from elastic_ckpt.core import append_log, errors, events, storage
from elastic_ckpt.training import keys, load, schema

CONFIG = "config.json"
LOOP = "loop.json"
EVENTS = "events.jsonl"
LOCK = "run.lock"
LOGS = "logs"
METRICS = "metrics"
TENSORBOARD = "tensorboard"


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
    from elastic_ckpt.steps import layout

    return os.path.join(directory, layout.STEPS)


def read_events(
    directory: str, *, last_bytes: int | None = None
) -> list[dict[str, Any]]:
    """The events of a run, without those of starts after another one has replaced them.

    Args:
      directory: of the run.
      last_bytes: see `append_log.read`.

    Raises:
      FileNotFoundError: if there are none.
      DataError: if the file was changed after it was written.
    """
    path = storage.absolute(directory) / EVENTS
    return events.counted(append_log.read(path, last_bytes=last_bytes))


def write_config(directory: str, config: schema.Config) -> None:
    """Keeps the configuration of a run with its files."""
    content = json.dumps(keys.values(config), indent=2).encode()
    storage.write_atomic(os.path.join(directory, CONFIG), content)


def read_config(directory: str) -> schema.Config:
    """The configuration that the run in `directory` was last started with.

    Raises:
      RunError: if there is no run in `directory`.
      ConfigError: if its configuration cannot be read.
    """
    path = storage.absolute(directory) / CONFIG
    try:
        values = json.loads(path.read_text())
    except FileNotFoundError:
        raise errors.RunError(
            f"{directory} is not the directory of a run (it contains no {CONFIG});"
            " give base_output_directory/run_name, or the directory of an"
            " ec.RunDirectory"
        ) from None
    except ValueError as error:
        raise errors.ConfigError(
            f"{path} is not valid JSON ({error}); restore it from a copy, or start the"
            " run again, which rewrites it"
        ) from None
    return load.from_values(values, place=str(path))


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


_LOOP_VERSION = 1


def write_loop(directory: str, own: OwnLoop) -> None:
    """Keeps what is known of a loop of the user's own with its files."""
    from elastic_ckpt.core import checked_json

    fields: dict[str, storage.Json] = {**dataclasses.asdict(own)}
    content = checked_json.to_bytes(fields, version=_LOOP_VERSION)
    storage.write_atomic(os.path.join(directory, LOOP), content)


def read_loop(directory: str) -> OwnLoop | None:
    """What was kept of a loop of the user's own; None if the run is no such loop.

    Raises:
      DataError: if it cannot be read.
    """
    from elastic_ckpt.core import checked_json

    path = storage.absolute(directory) / LOOP
    if not path.exists():
        return None
    fields = checked_json.read(path, what="record of a loop", version=_LOOP_VERSION)
    return OwnLoop(
        **{each.name: fields[each.name] for each in dataclasses.fields(OwnLoop)}
    )


def run_of(directory: str) -> str:
    """The name of the run in `directory`.

    Raises:
      RunError: if there is no run.
    """
    own = read_loop(directory)
    return own.run if own else read_config(directory).run.run_name


def saved_steps_of(directory: str) -> str:
    """The directory of the steps in storage of the run in `directory`."""
    own = read_loop(directory)
    return own.persistent if own and own.persistent else steps_of(directory)


def is_alive(directory: str) -> bool | None:
    """Whether the process that holds the run's lock lives; None if it is elsewhere."""
    path = os.path.join(directory, LOCK)
    if not storage.is_local(path) or not os.path.exists(path):
        return None
    with open(path) as file:
        words = file.read().split()
    # "process 17 on machine"
    if len(words) != 4 or words[3] != socket.gethostname():
        return None
    return os.path.exists(f"/proc/{words[1]}")


def is_finished(directory: str) -> bool:
    """Whether the last start of the run in `directory` came to its end."""
    try:
        log = read_events(directory)
    except FileNotFoundError:
        return False
    return bool(log) and log[-1]["event"] == "run_finished"
