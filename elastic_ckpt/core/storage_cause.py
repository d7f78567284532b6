"""The causes of storage failures: their names in events, and what to do.

Storage fails in only a few ways, but the operating system, TensorStore, bucket clients
and other hosts each describe them differently. Errors cross process boundaries as text,
so the cause is identified from the message text.
"""

from __future__ import annotations

import os
import re

from elastic_ckpt.core import bucket_clients, errors, events

# A bare number could be a step number.
_HTTP = r"(?:[Ss]tatus|HTTP|[Cc]ode|[Ee]rror)[^0-9;]{0,20}"
# For each cause, by its name in events: advice for the user, and a pattern that matches
# messages. The first match applies.
_CAUSES = {
    "full": (
        "free up space there, or keep fewer steps",
        "No space left|Disk quota exceeded|bytes in .* are free; raise",
    ),
    "read_only": ("remount it as writable", "Read-only file system"),
    # The component waited for something other than step storage.
    "component": (
        "fix the component that failed",
        "components were not written",
    ),
    "refused": (
        "check the credentials and the write permissions there",
        "Permission denied|PermissionError|PERMISSION_DENIED|Operation not permitted"
        "|UNAUTHENTICATED|Forbidden|Unauthorized|Access ?Denied"
        f"|does not (?:take|accept) the (?:run's )?secret|{_HTTP}40[13]\\b",
    ),
    # The message itself says what to add.
    "too_few": ("", "parts lack (copies|a distant holder)"),
    "damaged": (
        "look for faulty memory; `elastic-ckpt verify` checks every copy",
        "digest differs|has different values|different values at",
    ),
    "slow": (
        "save less often, or use faster storage",
        "[Tt]imed out|DEADLINE_EXCEEDED|Timeout|(is|are) not done(?!: )",
    ),
    "unreachable": (
        "restore access to it; the run then stores the steps that are due",
        "UNAVAILABLE|[Uu]nreachable|Connection|Stale file handle|Input/output error"
        f"|out of reach|cannot be read: http|{_HTTP}(429|5[0-9][0-9])\\b",
    ),
    "missing": ("check the path", "No such file|Not a directory|NOT_FOUND"),
    "other": ("", ""),
}


def of_message(message: str) -> str:
    """The name of the cause that a failure's message indicates; `other` if none."""
    return next(name for name in _CAUSES if re.search(_CAUSES[name][1], message))


def of_error(error: Exception) -> str:
    """The name of a failure's cause, by its type and its errno or message."""
    number = error.errno if isinstance(error, OSError) else None
    # A message may contain file names, which could match any pattern.
    what = error if number is None else os.strerror(number)
    return of_message(f"{type(error).__name__}: {what}")


def advice(message: str) -> str:
    """Advice for the user about a failure; empty if `message` needs no advice."""
    return _CAUSES[of_message(message)][0]


def report(emit: events.Emit, tier: str, step: int, why: str) -> None:
    """Emits `degraded`, a failure that the run survives, with its cause."""
    emit("degraded", tier=tier, step=step, cause=of_message(why), why=why)


# The roles and permissions that a run needs in a bucket, by protocol.
_GRANTS = {
    "gs": "grant this account roles/storage.objectAdmin on",
    "s3": "grant this account s3:ListBucket, s3:GetObject, s3:PutObject and"
    " s3:DeleteObject on",
}
_MAX_REASON = 300


def explained(error: Exception, place: str) -> errors.ElasticCkptError | None:
    """Explains one of `bucket_clients.failures` to the user.

    `place` is the storage that was in use, for failures that do not name a file.

    Returns:
      The error to raise, a ConfigError if a restart would fail in the same way; None if
      the failure is a bug.
    """
    reason = str(error).partition("\n")[0][:_MAX_REASON] or type(error).__name__
    cause = of_error(error)
    remedy = _CAUSES[cause][0]
    if isinstance(error, OSError) and error.filename is not None:
        place, reason = os.fspath(error.filename), error.strerror or reason
    if isinstance(error, NotADirectoryError | FileExistsError):
        return errors.ConfigError(
            f"{place}: there is a file where a directory should be; remove or rename"
            " the file, or choose a different directory"
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
            " credentials and the bucket name"
        )
    return None
