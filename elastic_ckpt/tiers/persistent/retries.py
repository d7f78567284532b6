"""Retries writes while storage is unavailable.

Persistent storage fails temporarily: tokens expire, NFS servers restart, object stores
limit rates. Each write is retried at growing intervals, and each failure is logged.
Permanent errors are raised immediately.
"""

from __future__ import annotations

import errno
import random
import re
from collections.abc import Callable
from typing import Any, TypeVar

from absl import logging

from elastic_ckpt.core import bucket_clients, clock, errors, storage_cause
from elastic_ckpt.tiers.persistent.records import OutOfReachError

Result = TypeVar("Result")

# Attempts per write.
_ATTEMPTS = 8
# Upper bounds of the first wait, which then doubles, and of the longest wait.
_FIRST_SECS, _LONGEST_SECS = 0.5, 30.0
# A later backup may succeed, but retrying this backup will not help.
_PERMANENT = ("full", "read_only", "refused")
_PERMANENT_ERRNOS = (
    errno.EISDIR,
    errno.EINVAL,
    errno.ENAMETOOLONG,
    errno.ENOTDIR,
    errno.ENOTEMPTY,
)
# TensorStore raises ValueErrors that begin with an Abseil status name; see
# https://abseil.io/docs/cpp/guides/status-codes
_STATUS = re.compile(r"([A-Z_]+): ")
_PERMANENT_STATUSES = ("FAILED_PRECONDITION", "INVALID_ARGUMENT", "UNIMPLEMENTED")
_ADVICE = "check the path, its free space and its permissions"


def call(what: str, act: Callable[[], Result]) -> Result:
    """Calls `act` until it succeeds and returns its result.

    Args:
      what: the beginning of messages, such as `writing /a/b`.
      act: a function that can be called again after it fails halfway.

    Raises:
      CheckpointError: if the last attempt fails, or an attempt fails permanently.
    """
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            return act()
        except (*bucket_clients.failures(), ValueError, OutOfReachError) as error:
            is_permanent = _is_permanent(error)
            if is_permanent is None:
                raise
            failed = f"{what} failed, attempt {attempt} of {_ATTEMPTS}: {error}"
            if is_permanent or attempt == _ATTEMPTS:
                advice = storage_cause.advice(str(error)) or _ADVICE
                raise errors.CheckpointError(
                    f"{failed}; {advice}; the run will try again with its next backup"
                ) from error
            # Ten thousand hosts that failed together must not retry together.
            secs = min(_LONGEST_SECS, _FIRST_SECS * 2 ** (attempt - 1))
            secs *= random.uniform(0.5, 1)
            logging.warning("%s; trying again in %.1f s", failed, secs)
            clock.sleep(secs)
    raise AssertionError("the last attempt returns or raises")


def _is_permanent(error: Any) -> bool | None:
    # None if the error did not come from storage.
    if isinstance(error, OutOfReachError):
        error = error.__cause__
    is_lasting = storage_cause.of_error(error) in _PERMANENT
    if isinstance(error, ValueError):
        status = _STATUS.match(str(error))
        return status and (is_lasting or status[1] in _PERMANENT_STATUSES)
    # Bucket client errors may be temporary: tokens expire.
    return isinstance(error, OSError) and (
        is_lasting or error.errno in _PERMANENT_ERRNOS
    )
