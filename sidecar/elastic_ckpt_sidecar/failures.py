"""Errors of a worker, on their way to the head.

An exception crosses from one process to another as text alone, and its class may be the
runtime's own by then. So a worker raises JSON behind a mark, wherever it runs, and the
head makes of it one error that names the host and has the traceback.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping

from elastic_ckpt.core import allgather, errors
from elastic_ckpt.data import compatibility

_MARK = "elastic_ckpt worker failed: "
# Errors whose messages are sufficient; any other one is shown with its traceback.
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
    """An exception of a worker, as text that survives any transport."""


@contextlib.contextmanager
def reported() -> Iterator[None]:
    """Raises what fails on a worker so that the head can raise it; also a decorator."""
    try:
        yield
    except Exception as error:
        told = {"host": compatibility.host_name(), **allgather.failed(error)}
        raise WorkerFailure(_MARK + json.dumps(told)) from error


@contextlib.contextmanager
def reaching_the_head() -> Iterator[None]:
    """Raises what a worker failed with as an error of the head.

    Raises:
      ElasticCkptError: of the worker's class if it was one, else a DataError.
    """
    try:
        yield
    except Exception as error:
        _, _, told = str(error).partition(_MARK)
        # What no worker has reported passes as it is.
        with contextlib.suppress(json.JSONDecodeError):
            failure, _ = json.JSONDecoder().raw_decode(told)
            raise of_host(failure) from error.__cause__
        raise


def of_host(failure: Mapping[str, str]) -> errors.ElasticCkptError:
    """The error of the head for a failed outcome of a host, with the host's name."""
    own = _OWN.get(failure["kind"], errors.DataError)
    return own(f"{failure['host']}: {failure['failed']}")
