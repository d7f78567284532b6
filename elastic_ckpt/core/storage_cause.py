"""The causes of failures of storage: their names in events, and what to do.

Storage fails in a few ways, and each client words them in its own way: an operating
system, TensorStore, clients of buckets, another host. The messages cross processes as
text, so a cause is recognised by what all of them write.
"""

from __future__ import annotations

import os
import re

from elastic_ckpt.core import bucket_clients, errors, events

# Numbers alone could be those of steps.
_HTTP = r"(?:[Ss]tatus|HTTP|[Cc]ode|[Ee]rror)[^0-9;]{0,20}"
# The name of each cause in events, what a person can do, and what messages have. The
# first that matches counts.
_CAUSES = {
    "full": (
        "make room there, or keep fewer steps",
        "No space left|Disk quota exceeded|bytes in .* are free; raise",
    ),
    "read_only": ("mount it so that it can be written to", "Read-only file system"),
    # Whatever a component has waited for, it is not the storage of steps.
    "component": (
        "correct the component whose error this is",
        "components were not written",
    ),
    "refused": (
        "check who may write there, and that credentials are valid",
        "Permission denied|PermissionError|PERMISSION_DENIED|Operation not permitted"
        "|UNAUTHENTICATED|Forbidden|Unauthorized|Access ?Denied"
        f"|does not take the (?:run's )?secret|{_HTTP}40[13]\\b",
    ),
    # The message itself says what to add.
    "too_few": ("", "parts lack (copies|a distant holder)"),
    "damaged": (
        "look for faulty memory: `elastic-ckpt verify` reads all",
        "digest differs|has different values|different values at",
    ),
    "slow": (
        "save less often, or use faster storage",
        "[Tt]imed out|DEADLINE_EXCEEDED|Timeout|(is|are) not done(?!: )",
    ),
    "unreachable": (
        "bring it back: what waits is stored by itself",
        "UNAVAILABLE|[Uu]nreachable|Connection|Stale file handle|Input/output error"
        f"|out of reach|cannot be read: http|{_HTTP}(429|5[0-9][0-9])\\b",
    ),
    "missing": ("check the path", "No such file|Not a directory|NOT_FOUND"),
    "other": ("", ""),
}


def of_message(message: str) -> str:
    """The name of the cause that the message of a failure shows; `other` if none."""
    return next(name for name in _CAUSES if re.search(_CAUSES[name][1], message))


def of_error(error: Exception) -> str:
    """The name of the cause of a failure, by its type, and its number or message."""
    number = error.errno if isinstance(error, OSError) else None
    # A message may name files, whose names may look like anything.
    what = error if number is None else os.strerror(number)
    return of_message(f"{type(error).__name__}: {what}")


def advice(message: str) -> str:
    """What a person can do about a failure; empty if only its message tells."""
    return _CAUSES[of_message(message)][0]


def report(emit: events.Emit, tier: str, step: int, why: str) -> None:
    """Emits `degraded`, with the cause that `why` shows: a failure that a run survives.

    Args:
      emit: called with the event.
      tier: that has failed.
      step: with which it has.
      why: the message of the failure.
    """
    emit("degraded", tier=tier, step=step, cause=of_message(why), why=why)


# The roles and permissions that a run needs in a bucket, by its protocol.
_GRANTS = {
    "gs": "grant this account roles/storage.objectAdmin on",
    "s3": "grant this account s3:ListBucket, s3:GetObject, s3:PutObject and"
    " s3:DeleteObject on",
}
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
    cause = of_error(error)
    remedy = _CAUSES[cause][0]
    if isinstance(error, OSError) and error.filename is not None:
        place, reason = os.fspath(error.filename), error.strerror or reason
    if isinstance(error, NotADirectoryError | FileExistsError):
        return errors.ConfigError(
            f"{place}: a file is where a directory has to be; remove or rename it, or"
            " choose another directory"
        )
    protocol, _, path = place.partition("://")
    if cause == "refused" and protocol in _GRANTS:
        remedy = f"{_GRANTS[protocol]} {protocol}://{path.partition('/')[0]}"
    if cause in ("refused", "read_only", "full"):
        kind = errors.RunError if cause == "full" else errors.ConfigError
        return kind(f"{place}: {reason}; {remedy}")
    if bucket_clients.is_connection_failure(error) or not isinstance(error, OSError):
        return errors.RunError(
            f"{place}: storage cannot be reached: {reason}; check the network, the"
            " credentials and the name of the bucket"
        )
    return None
