"""The errors that a person sees: each says what, where, and what to do next.

An `ElasticCkptError` is a message for the person who runs the job: the command line
prints it without a traceback and exits with 1. Anything else is a bug, of ours or of a
library below, and keeps its traceback.
"""

from __future__ import annotations


class ElasticCkptError(Exception):
    """The base of every error that names its own remedy."""


class ConfigError(ElasticCkptError):
    """An invalid configuration: an unknown key, a value of a wrong type."""


class DataError(ElasticCkptError):
    """Data that is missing, empty or changed, or a data state that cannot be read."""


class CheckpointError(ElasticCkptError):
    """A checkpoint that does not belong to this run, or lacks one of its parts."""


class RunError(ElasticCkptError):
    """A run that cannot start or go on: its directory is taken, a host has failed."""


class StoppedError(RunError):
    """A run that was asked to end by SIGTERM, and could not save before it ended."""
