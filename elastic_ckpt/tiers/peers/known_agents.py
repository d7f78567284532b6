"""Agents that a machine has heard of: how a new world finds those of idle machines.

`<root>/agents.json` lists them, by the id of the machine's memory. It is a hint: an
agent that does not answer, or that turns out to serve other memory, is left out.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any

from etils import epath

from elastic_ckpt.core import storage

FILE = "agents.json"
# Machines come and go; more than this many are not remembered.
_MOST = 100_000


def read(root: epath.PathLike) -> dict[str, dict[str, Any]]:
    """By machine, the `url` and `certificate_sha256` of its agent; empty at first."""
    try:
        found = json.loads(pathlib.Path(root, FILE).read_bytes())
    except (FileNotFoundError, ValueError):
        return {}
    return dict(found) if isinstance(found, dict) else {}


def write(root: epath.PathLike, agents: Mapping[str, Mapping[str, Any]]) -> None:
    """Notes `agents`, for the next world."""
    kept = dict(list(agents.items())[-_MOST:])
    storage.write_atomic(
        pathlib.Path(root, FILE),
        storage.canonical_json({k: dict(v) for k, v in kept.items()}),
    )


def joined(
    heard: Iterable[Mapping[str, Any]], present: Mapping[str, Any]
) -> dict[str, Any]:
    """All agents that hosts have heard of; those that are `present` know best."""
    found: dict[str, Any] = {}
    for agents in heard:
        found.update(agents)
    found.update(present)
    return found
