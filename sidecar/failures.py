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
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from elastic_ckpt.core import errors
from elastic_ckpt.data import first_contact

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
            # Reads an error even if its own `__str__` fails.
            shown = traceback.TracebackException.from_exception(error)
            text = {
                "host": first_contact.host_name(),
                "kind": type(error).__name__,
                "message": str(shown),
                "traceback": "".join(shown.format()),
            }
            raise WorkerFailure(_MARK + json.dumps(text)) from error

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
        found = _read(str(error))
        if found is None:
            raise
        raise found from error.__cause__


def _read(text: str) -> errors.ElasticCkptError | None:
    _, mark, rest = text.partition(_MARK)
    if not mark:
        return None
    try:
        failure, _ = json.JSONDecoder().raw_decode(rest)
    except json.JSONDecodeError:
        return None
    where = failure["host"]
    own = _OWN.get(failure["kind"])
    if own:
        return own(f"{where}: {failure['message']}")
    return errors.DataError(
        f"{where} failed with {failure['kind']}: {failure['message']}\n\n"
        f"Its traceback:\n{failure['traceback']}"
    )
