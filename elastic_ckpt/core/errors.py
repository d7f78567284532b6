"""The errors that users see: what is wrong, where, and what to do next.

An `ElasticCkptError` is a message for the person who runs the job: the command line
prints it without a traceback and exits with 1, or for a wrong configuration of a run
with 78. Anything else is a bug, of ours or of a library below, and keeps its traceback.
"""

from __future__ import annotations

import copyreg
import itertools
from collections.abc import Iterable, Mapping
from typing import Any

# The exit status of a run that ends with a ConfigError: EX_CONFIG of sysexits.h. A
# launcher need not start it again.
CONFIG_EXIT_CODE = 78
# How many names a message lists.
MOST_NAMED = 5


class ElasticCkptError(Exception):
    """The base class of every error whose message contains a remedy.

    Each can be pickled, whatever its `__init__` takes: an error of a worker arrives in
    the process that waits for it as it is.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        # As pickle makes objects of its own accord.
        # pyrefly: ignore[missing-attribute]
        return copyreg.__newobj__, (type(self), *self.args), self.__dict__


class ConfigError(ElasticCkptError):
    """An invalid configuration, such as an unknown key or a value of a wrong type."""


class DataError(ElasticCkptError):
    """Data that is missing, empty or changed, or a data state that cannot be read."""


class CheckpointError(ElasticCkptError):
    """A checkpoint that does not belong to this run, or lacks one of its parts."""


class HostsFailedError(CheckpointError):
    """A call failed on some hosts.

    Attributes:
      of_host: by the number of a host, its message.
    """

    def __init__(self, of_host: Mapping[int, str]) -> None:
        self.of_host = dict(of_host)
        failed = sorted(of_host.items())
        problems = [f"host {n}: {why}" for n, why in failed[:MOST_NAMED]]
        if more := failed[MOST_NAMED:]:
            problems.append(f"and {len(more)} more hosts")
        super().__init__("; ".join(problems))


class NotStoredError(CheckpointError):
    """A step that was due in persistent storage and is not there.

    The death of another host may be the reason.
    """


class OtherModelError(CheckpointError):
    """A checkpoint whose tree is not the one that was requested."""


class RunError(ElasticCkptError):
    """A run that cannot start or continue, such as after the failure of a host."""


class ReplacedError(RunError):
    """A run that another start has continued; nothing that this one saves counts."""


class DivergedError(RunError):
    """A run that a callback has ended, such as after a divergence."""


class StoppedError(RunError):
    """A run that received SIGTERM and could not save before it ended."""


def first_of(names: Iterable[str]) -> str:
    """The first few names, for a message; `...` stands for the others."""
    first = list(itertools.islice(names, MOST_NAMED + 1))
    return ", ".join([*first[:MOST_NAMED], *(["..."] if first[MOST_NAMED:] else [])])
