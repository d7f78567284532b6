"""Carries errors from a worker to the head.

An exception reaches another process only as text, possibly in one of the runtime's own
exception classes. So a worker raises a mark followed by JSON, and the head converts the
JSON to an error with the host name and the traceback.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping

from elastic_ckpt.core import allgather, errors
from elastic_ckpt.data import compatibility

_MARK = "elastic_ckpt worker failed: "
# Errors whose message suffices; other errors are shown with their traceback.
_OWN = {
    each.__name__: each
    for each in (
        errors.ConfigError,
        errors.DataError,
        errors.CheckpointError,
        errors.RunError,
        errors.ReplacedError,
    )
}


class WorkerFailure(Exception):
    """A worker's exception, as text that survives any transport."""


@contextlib.contextmanager
def reported() -> Iterator[None]:
    """Converts a worker's errors for the head, which raises them; also a decorator."""
    try:
        yield
    except Exception as error:
        told = {"host": compatibility.host_name(), **allgather.failed(error)}
        raise WorkerFailure(_MARK + json.dumps(told)) from error


@contextlib.contextmanager
def reaching_the_head() -> Iterator[None]:
    """Raises a worker's error in the head.

    Raises:
      ElasticCkptError: an error of the same class if the class is one of ours,
        otherwise a DataError.
    """
    try:
        yield
    except Exception as error:
        _, _, told = str(error).partition(_MARK)
        # Errors that no worker reported pass unchanged.
        with contextlib.suppress(json.JSONDecodeError):
            failure, _ = json.JSONDecoder().raw_decode(told)
            raise of_host(failure) from error.__cause__
        raise


def of_host(failure: Mapping[str, str]) -> errors.ElasticCkptError:
    """The error to raise in the head for a host's failed outcome."""
    own = _OWN.get(failure["kind"], errors.DataError)
    return own(f"{failure['host']}: {failure['failed']}")
