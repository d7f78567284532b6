"""The version of the protocol between agents and their clients.

The agent of a node is upgraded separately from the programs that it serves. Therefore
both sides send their version with each request and response, and work with one version
older or newer. A side without the header speaks version 1.
"""

from __future__ import annotations

import re

VERSION = 2
HEADER = "Elastic-Ckpt-Protocol"
# The status of a response to a client whose version is too far away.
STATUS = 426
_FIRST = 1
_NUMBER = re.compile(r"[1-9][0-9]{0,8}")


def problem(version: str | None) -> str | None:
    """Returns why this program cannot work with the other side; None if it can.

    Args:
      version: the value of the other side's header; None without one.
    """
    text = str(_FIRST) if version is None else version
    if _NUMBER.fullmatch(text) and abs(int(text) - VERSION) <= 1:
        return None
    return (
        f"speaks version {text:.20} of the agents' protocol, and this program"
        f" version {VERSION}, which works with {VERSION - 1} to {VERSION + 1}; upgrade"
        " the older of the two"
    )
