"""Errors of a worker, on their way to the head.

An exception crosses from one process to another as text alone, and its class may be the
runtime's own by then. So a worker raises JSON behind a mark, wherever it runs, and the
head makes of it one error that names the host and has the traceback.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from elastic_ckpt.core import allgather, errors
from elastic_ckpt.data import compatibility

Method = TypeVar("Method", bound=Callable[..., Any])

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


def reported(method: Method) -> Method:
    """Decorates a worker's method so that the head can raise its exceptions."""

    @functools.wraps(method)
    def call(*arguments: Any) -> Any:
        try:
            return method(*arguments)
        except Exception as error:
            told = {"host": compatibility.host_name(), **allgather.failed(error)}
            raise WorkerFailure(_MARK + json.dumps(told)) from error

    return call  # pyrefly: ignore[bad-return]


@contextlib.contextmanager
def reaching_the_head() -> Iterator[None]:
    """Raises what a worker failed with as an error of the head.

    Raises:
      ElasticCkptError: of the worker's class if it was one, else a DataError.
    """
    try:
        yield
    except errors.ElasticCkptError:
        raise
    except Exception as error:
        reported_error = _read(str(error))
        if reported_error is None:
            raise
        raise reported_error from error.__cause__


def _read(raised: str) -> errors.ElasticCkptError | None:
    _, mark, rest = raised.partition(_MARK)
    if not mark:
        return None
    try:
        failure, _ = json.JSONDecoder().raw_decode(rest)
    except json.JSONDecodeError:
        return None
    own = _OWN.get(failure["kind"], errors.DataError)
    return own(f"{failure['host']}: {failure['failed']}")
