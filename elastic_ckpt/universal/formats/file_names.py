"""The names of files that a checkpoint may name: they lie beside the one that does."""

from __future__ import annotations

import re
from typing import TypeGuard

_PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")


def is_plain(name: object) -> TypeGuard[str]:
    """Whether a value is the name of a file that leads to no other directory."""
    return isinstance(name, str) and _PLAIN_NAME.fullmatch(name) is not None
