"""The version of the protocol between agents and their clients.

The agent of a node is upgraded separately from the programs that it serves. Therefore
both sides send their version with each request and response; one that sends none, such
as curl, speaks version 1.
"""

from __future__ import annotations

VERSION = 1
HEADER = "Elastic-Ckpt-Protocol"
# The status of a response to a client of another version.
STATUS = 426


def problem(version: str | None) -> str | None:
    """Returns why this program cannot work with the other side; None if it can.

    Args:
      version: the value of the other side's header; None without one.
    """
    if version in (None, str(VERSION)):
        return None
    return (
        f"speaks version {version:.20} of the agents' protocol, and this program"
        f" version {VERSION}; upgrade the older of the two"
    )
