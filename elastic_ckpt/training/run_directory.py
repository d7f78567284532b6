"""The places in a run's directory; `inspect.run_files` reads what is there."""

from __future__ import annotations

import os
import tempfile

from elastic_ckpt.core import storage
from elastic_ckpt.inspect import run_files
from elastic_ckpt.steps import layout
from elastic_ckpt.training import load, schema


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
        return os.path.join(directory, run_files.LOGS)
    return tempfile.mkdtemp(prefix=f"{config.run.run_name}-{run_files.LOGS}-")


def steps_of(directory: str) -> str:
    """The directory of a run's steps in persistent storage."""
    return os.path.join(directory, layout.STEPS)


def read_config(directory: str) -> schema.Config:
    """The configuration that the run in `directory` was last started with.

    Raises:
      RunError: if there is no run in `directory`.
      ConfigError: if its configuration is not of this program.
    """
    settings = run_files.read(directory).settings
    return load.from_values(settings, place=os.path.join(directory, run_files.RECORD))
