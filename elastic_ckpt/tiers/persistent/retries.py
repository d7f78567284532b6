"""Retries of writes while storage is unavailable, and errors that no retry can solve.

Persistent storage fails temporarily: tokens expire, NFS servers restart, object stores
limit rates. Each write is retried at growing intervals, and each failure is logged; a
permanent error is raised at once.
"""

from __future__ import annotations

import dataclasses
import errno
import random
import re
from collections.abc import Callable
from typing import TypeVar

from absl import logging

from elastic_ckpt.core import bucket_clients, clock, errors, storage_cause
from elastic_ckpt.tiers.persistent import records

Result = TypeVar("Result")

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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Retries:
    """How often and how long failed writes are retried.

    Attributes:
      attempts: of each write, in all, at least 1.
      first_secs: the longest wait before the second attempt; it doubles from then on.
      longest_secs: the most that is ever waited at once.
    """

    attempts: int = 8
    first_secs: float = 0.5
    longest_secs: float = 30.0

    def call(self, what: str, act: Callable[[], Result]) -> Result:
        """Calls `act` until it succeeds, and returns its result.

        Args:
          what: what is done, and where: the begin of messages, such as `writing /a/b`.
          act: may be done again after it failed half way.

        Raises:
          CheckpointError: if the last attempt failed too, or one failed for good.
        """
        for attempt in range(1, self.attempts + 1):
            try:
                return act()
            except (
                *bucket_clients.failures(),
                ValueError,
                records.OutOfReachError,
            ) as error:
                is_permanent = _is_permanent(error)
                if is_permanent is None:
                    raise
                if is_permanent or attempt == self.attempts:
                    advice = storage_cause.advice(str(error)) or _ADVICE
                    raise errors.CheckpointError(
                        f"{what} failed, attempt {attempt} of {self.attempts}: {error};"
                        f" {advice}; a run tries again with its next backup"
                    ) from error
                longest = min(self.longest_secs, self.first_secs * 2 ** (attempt - 1))
                # Ten thousand hosts that failed together do not come back together.
                secs = random.uniform(longest / 2, longest)
                logging.warning(
                    "%s failed, attempt %d of %d, the next in %.1f s: %s",
                    what,
                    attempt,
                    self.attempts,
                    secs,
                    error,
                )
                clock.sleep(secs)
        raise AssertionError("attempts is at least 1")


PATIENT = Retries()


def _is_permanent(error: Exception) -> bool | None:
    # None if the error is not one of storage.
    if isinstance(error, records.OutOfReachError):
        return isinstance(error.__cause__, OSError) and _is_permanent(error.__cause__)
    is_lasting = storage_cause.of_error(error) in _PERMANENT
    if isinstance(error, OSError):
        return is_lasting or error.errno in _PERMANENT_ERRNOS
    # What other clients raise may pass: tokens expire.
    if not isinstance(error, ValueError):
        return False
    status = _STATUS.match(str(error))
    return status and (is_lasting or status[1] in _PERMANENT_STATUSES)
