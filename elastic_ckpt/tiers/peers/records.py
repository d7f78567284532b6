"""The records by which the programs and agents of a machine know of each other.

    <root>/agent.json        the address of the agent that serves a RAM disk (`agent`)
    <root>/agents.json       those of the machines that a run has had (`known_agents`)
    <root>/world.json        the world that the machine is in (`world_record`)
    <root>/request.json      the memory that a run asks its node for (`node_record`)
    <root>/backup_host       how a backup host fetches parts (`backup_directory`)
    <directory>/node.json    the addresses of a node's runs (`node_record`)

They are JSON, and hints: one that is missing or spoilt is none. The programs may be of
different versions, so fields that only one of them has are left out.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any, TypeVar

from etils import epath

from elastic_ckpt.core import storage

Kind = TypeVar("Kind")


def write(directory: epath.PathLike, file: str, fields: Any) -> None:
    """Writes a record in place of the one before."""
    storage.write_atomic(os.path.join(directory, file), storage.canonical_json(fields))


def read(directory: epath.PathLike, file: str) -> Any:
    """What was written last; None if that is nothing, or spoilt."""
    try:
        return json.loads(pathlib.Path(directory, file).read_bytes())
    except (FileNotFoundError, ValueError, RecursionError):
        return None


def decoded(kind: type[Kind], fields: Mapping[str, Any]) -> Kind:
    """A dataclass of those fields that it has."""
    names = {field.name for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    return kind(**{name: fields[name] for name in names & fields.keys()})
