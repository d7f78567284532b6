"""Retries of writes while storage is unavailable, and errors that no retry can solve.

Persistent storage fails temporarily: tokens expire, NFS servers restart, object stores
limit rates. Each write is retried at growing intervals, and each failure is logged; a
permanent error is raised at once.
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

# Of each write, in all.
_ATTEMPTS = 8
# The longest wait before the second attempt, which doubles from there, and any wait.
_FIRST_SECS, _LONGEST_SECS = 0.5, 30.0
# There may be room at the next backup; until then nothing waits for it.
_PERMANENT = ("full", "read_only", "refused")
_PERMANENT_ERRNOS = (
    errno.EISDIR,
    errno.EINVAL,
    errno.ENAMETOOLONG,
    errno.ENOTDIR,
    errno.ENOTEMPTY,
)
# TensorStore raises ValueErrors that begin with the name of an Abseil status, see
# https://abseil.io/docs/cpp/guides/status-codes
_STATUS = re.compile(r"([A-Z_]+): ")
_PERMANENT_STATUSES = ("FAILED_PRECONDITION", "INVALID_ARGUMENT", "UNIMPLEMENTED")
_ADVICE = "check the path, its free space and who may write there"


def call(what: str, act: Callable[[], Result]) -> Result:
    """Calls `act` until it succeeds, and returns its result.

    Args:
      what: what is done, and where: the beginning of messages, such as `writing /a/b`.
      act: may be done again after it failed half way.

    Raises:
      CheckpointError: if the last attempt failed too, or one failed for good.
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
                    f"{failed}; {advice}; a run tries again with its next backup"
                ) from error
            # Ten thousand hosts that failed together do not come back together.
            secs = min(_LONGEST_SECS, _FIRST_SECS * 2 ** (attempt - 1))
            secs *= random.uniform(0.5, 1)
            logging.warning("%s; the next is in %.1f s", failed, secs)
            clock.sleep(secs)
    raise AssertionError("the last attempt returns or raises")


def _is_permanent(error: Any) -> bool | None:
    # None if the error is not one of storage.
    if isinstance(error, OutOfReachError):
        error = error.__cause__
    is_lasting = storage_cause.of_error(error) in _PERMANENT
    if isinstance(error, ValueError):
        status = _STATUS.match(str(error))
        return status and (is_lasting or status[1] in _PERMANENT_STATUSES)
    # What clients of buckets raise may pass: tokens expire.
    return isinstance(error, OSError) and (
        is_lasting or error.errno in _PERMANENT_ERRNOS
    )
