"""The causes of failures of storage: their names in events, and what to do.

Storage fails in a few ways, and each client words them in its own way: an operating
system, TensorStore, clients of buckets, another host. The messages cross processes as
text, so a cause is recognised by what all of them write.
"""

from __future__ import annotations

import re
from typing import NamedTuple


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
