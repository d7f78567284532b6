"""Errors of a worker, on their way to the head.

An exception crosses from one process to another as text alone, and its class may be the
runtime's own by then. So a worker raises JSON behind a mark, wherever it runs, and the
head makes of it one error that names the host and has the traceback.
"""

from __future__ import annotations

import contextlib
import functools
import json
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from elastic_ckpt.core import errors
from elastic_ckpt.data import compatibility

Method = TypeVar("Method", bound=Callable[..., Any])

_MARK = "elastic_ckpt worker failed: "
# The classes that say all there is to say; anything else is shown with its traceback.
_OWN = {
    of.__name__: of
    for of in (
        errors.ConfigError,
        errors.DataError,
        errors.CheckpointError,
        errors.RunError,
    )
}


class WorkerFailure(Exception):
    """An exception of a worker, as text that survives any transport."""


def told(method: Method) -> Method:
    """A worker's method, whose exceptions `reaching_the_head` understands."""

    @functools.wraps(method)
    def call(*arguments: Any) -> Any:
        try:
            return method(*arguments)
        except Exception as error:
            raise WorkerFailure(_MARK + json.dumps(account(error))) from error

    return call  # pyrefly: ignore[bad-return]


def account(error: Exception) -> dict[str, str]:
    """What there is to tell of an error of this host, as JSON."""
    # Reads an error even if its own `__str__` fails.
    shown = traceback.TracebackException.from_exception(error)
    return {
        "host": compatibility.host_name(),
        "kind": type(error).__name__,
        "message": str(shown),
        "traceback": "".join(shown.format()),
    }


def in_words(told: Mapping[str, str]) -> str:
    """An account in words: of our own errors the message, of others all there is."""
    if told["kind"] in _OWN:
        return told["message"]
    return (
        f"{told['host']} failed with {told['kind']}: {told['message']}\n\n"
        f"Its traceback:\n{told['traceback']}"
    )


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
        found = _read(str(error))
        if found is None:
            raise
        raise found from error.__cause__


def _read(text: str) -> errors.ElasticCkptError | None:
    _, mark, rest = text.partition(_MARK)
    if not mark:
        return None
    try:
        told, _ = json.JSONDecoder().raw_decode(rest)
    except json.JSONDecodeError:
        return None
    own = _OWN.get(told["kind"])
    if own:
        return own(f"{told['host']}: {in_words(told)}")
    return errors.DataError(in_words(told))
