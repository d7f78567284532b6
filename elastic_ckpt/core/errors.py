"""The errors that users see: what is wrong, where, and what to do next.

An `ElasticCkptError` is a message for the person who runs the job: the command line
prints it without a traceback and exits with 1, or with 78 if a run's configuration is
invalid. Any other exception is a bug in elastic_ckpt or a library, and its traceback is
printed.
"""

from __future__ import annotations

import copyreg
import errno
import itertools
import os
import resource
from collections.abc import Iterable, Mapping
from typing import Any

# The exit status of a run that fails with a ConfigError: EX_CONFIG in sysexits.h.
# Restarting does not help.
CONFIG_EXIT_CODE = 78
# Maximum number of names in a message.
MOST_NAMED = 5


class ElasticCkptError(Exception):
    """The base class of all errors whose message contains a remedy.

    Errors can be pickled regardless of the arguments of their `__init__`, so a worker's
    error reaches the waiting process unchanged.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        # Pickles like a plain object: exceptions would call `__init__` with `args`.
        # pyrefly: ignore[missing-attribute]
        return copyreg.__newobj__, (type(self), *self.args), self.__dict__


class ConfigError(ElasticCkptError):
    """An invalid configuration, such as an unknown key or a value of a wrong type."""


class DataError(ElasticCkptError):
    """Data that is missing, empty or changed, or a data state that cannot be read."""


class CheckpointError(ElasticCkptError):
    """A checkpoint that does not belong to this run or that lacks one of its parts."""


class HostsFailedError(CheckpointError):
    """A call failed on some hosts.

    Attributes:
      of_host: the message of each failed host, keyed by host index.
    """

    def __init__(self, of_host: Mapping[int, str]) -> None:
        self.of_host = dict(of_host)
        failed = sorted(of_host.items())
        problems = [f"host {n}: {why}" for n, why in failed[:MOST_NAMED]]
        if more := failed[MOST_NAMED:]:
            problems.append(f"and {len(more)} more hosts")
        super().__init__("; ".join(problems))


class NotStoredError(CheckpointError):
    """A step due to be saved to storage is missing, perhaps because a host died."""


class OtherModelError(CheckpointError):
    """A checkpoint whose tree differs from the requested tree."""


class RunError(ElasticCkptError):
    """A run that cannot start or continue, such as after the failure of a host."""


class ReplacedError(RunError):
    """A run that a later launch has continued; nothing that this one saves is used."""


class OpenFilesError(RunError):
    """The process could not open one more file, which may be as good as any."""


class DivergedError(RunError):
    """A run that a callback has stopped, such as after a divergence."""


class StoppedError(RunError):
    """A run that received SIGTERM and could not save before it stopped."""


def check_open_files(error: Exception) -> None:
    """Raises an OpenFilesError if `error` says that too many files are open."""
    # TensorStore's errors have no number.
    if os.strerror(errno.EMFILE) in str(error):
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        raise OpenFilesError(
            f"this process could open no more files ({error}), of which it may have"
            f" {limit}; raise the limit (ulimit -n), and restart the run"
        ) from error


def first_of(names: Iterable[str]) -> str:
    """The first few names, for a message; `...` stands for the others."""
    first = list(itertools.islice(names, MOST_NAMED + 1))
    return ", ".join([*first[:MOST_NAMED], *(["..."] if first[MOST_NAMED:] else [])])
