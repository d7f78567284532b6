"""The causes of failures of storage: their names in events, and what to do.

Storage fails in a few ways, and each client words them in its own way: an operating
system, TensorStore, clients of buckets, another host. The messages cross processes as
text, so a cause is recognised by what all of them write.
"""

from __future__ import annotations

import os
import re
from typing import NamedTuple

from elastic_ckpt.core import bucket_clients, errors, events


class Cause(NamedTuple):
    """Why a tier did not take a step.

    Attributes:
      name: in events.
      advice: what a person can do; empty if that depends on the message.
    """

    name: str
    advice: str


FULL = Cause("full", "make room there, or keep fewer steps")
READ_ONLY = Cause("read_only", "mount it so that it can be written to")
REFUSED = Cause("refused", "check who may write there, and that credentials are valid")
COMPONENT = Cause("component", "correct the component whose error this is")
SLOW = Cause("slow", "save less often, or use faster storage")
UNREACHABLE = Cause("unreachable", "bring it back: what waits is stored by itself")
MISSING = Cause("missing", "check the path")
DAMAGED = Cause("damaged", "look for faulty memory: `elastic-ckpt verify` reads all")
TOO_FEW = Cause("too_few", "add machines or slices, or ask for fewer copies")
OTHER = Cause("other", "")

# The first that matches counts. Numbers alone could be those of steps.
_HTTP = r"(?:[Ss]tatus|HTTP|[Cc]ode|[Ee]rror)[^0-9;]{0,20}"
_SIGNS = tuple(
    (cause, re.compile("|".join(signs)))
    for cause, signs in (
        (FULL, ("No space left", "quota exceeded", "bytes in .* are free; raise")),
        (READ_ONLY, ("Read-only file system",)),
        # Whatever a component has waited for, it is not the storage of steps.
        (COMPONENT, ("components were not written",)),
        (
            REFUSED,
            (
                "Permission denied",
                "Operation not permitted",
                "PERMISSION_DENIED",
                "UNAUTHENTICATED",
                "Forbidden",
                "Unauthorized",
                "Access ?Denied",
                "does not take the run's secret",
                f"{_HTTP}40[13]",
            ),
        ),
        (TOO_FEW, ("items lack (copies|a distant holder)",)),
        (DAMAGED, ("digest differs", "has different values", "different values at")),
        (SLOW, ("[Tt]imed out", "DEADLINE_EXCEEDED", "Timeout", "(is|are) not done")),
        (
            UNREACHABLE,
            (
                "UNAVAILABLE",
                "[Uu]nreachable",
                "Connection",
                "Stale file handle",
                "Input/output error",
                "out of reach",
                "cannot be read: http",
                f"{_HTTP}(429|5[0-9][0-9])",
            ),
        ),
        (MISSING, ("No such file", "Not a directory", "NOT_FOUND")),
    )
)


def of_message(message: str) -> Cause:
    """The cause that the message of a failure shows; `OTHER` if it shows none."""
    return next((cause for cause, signs in _SIGNS if signs.search(message)), OTHER)


def report(emit: events.Emit, tier: str, step: int, why: str) -> None:
    """Emits `degraded`, with the cause that `why` shows: a failure that a run survives.

    Args:
      emit: called with the event.
      tier: that has failed.
      step: with which it has.
      why: the message of the failure.
    """
    cause = of_message(why).name
    emit("degraded", tier=tier, step=step, cause=cause, why=why)


# The roles and permissions that a run needs in a bucket, by its protocol.
_GRANTS = {
    "gs": "grant this account roles/storage.objectAdmin on",
    "s3": "grant this account s3:ListBucket, s3:GetObject, s3:PutObject and"
    " s3:DeleteObject on",
}
# Of those a person has to change something, and another start would not help.
_LASTING = (REFUSED, READ_ONLY)
_MAX_REASON = 300


def explained(error: Exception, place: str) -> errors.ElasticCkptError | None:
    """One of `bucket_clients.failures` as an error for a person; None if it is a bug.

    Args:
      error: the failure.
      place: what the program was reading and writing, unless the failure names a file.

    Returns:
      A ConfigError if another start would fail in the same way.
    """
    reason = str(error).partition("\n")[0][:_MAX_REASON] or type(error).__name__
    cause = of_message(f"{type(error).__name__}: {error}")
    if isinstance(error, OSError) and error.filename is not None:
        place, reason = os.fspath(error.filename), error.strerror or reason
    if isinstance(error, NotADirectoryError | FileExistsError):
        return errors.ConfigError(
            f"{place}: a file is where a directory has to be; remove or rename it, or"
            " choose another directory"
        )
    if isinstance(error, PermissionError):
        cause = REFUSED
    if cause in _LASTING:
        protocol, _, path = place.partition("://")
        advice = cause.advice
        if protocol in _GRANTS and cause is REFUSED:
            bucket = path.partition("/")[0]
            advice = f"{_GRANTS[protocol]} {protocol}://{bucket}"
        return errors.ConfigError(f"{place}: {reason}; {advice}")
    if cause is FULL:
        return errors.RunError(f"{place}: {reason}; {cause.advice}")
    if bucket_clients.is_connection_failure(error) or not isinstance(error, OSError):
        return errors.RunError(
            f"{place}: storage cannot be reached: {reason}; check the network, the"
            " credentials and the name of the bucket"
        )
    return None
