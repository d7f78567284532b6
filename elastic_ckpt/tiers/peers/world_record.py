"""The world that a machine is in, as a host of it notes it for the agent of the node.

`<root>/world.json` has what placement requires: the hosts, and the policy of copies.
With it the agent of a node that was replaced can copy what the machine should hold
(`host.refill`). It is a hint, like `agents.json`.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import typing
from collections.abc import Mapping
from typing import Any

from etils import epath

from elastic_ckpt.core import storage

if typing.TYPE_CHECKING:
    from elastic_ckpt.steps import placement
    from elastic_ckpt.steps.manifest import Host

FILE = "world.json"
# Raised by fields that are missing, or of another kind.
_MALFORMED = (AttributeError, KeyError, TypeError, ValueError)


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorldRecord:
    """The hosts of a world, and the copies that they keep.

    Attributes:
      run: the identity of the run.
      hosts: by number.
      policy: of copies in the memory of peers.
      limit_bytes: of the RAM disk; None leaves it to the file system.
      tls_ca: a PEM file with the authority of the agents' certificates; None without.
      max_bytes_per_sec: from all peers together; None without a bound.
      timeout_secs: of peers.
    """

    run: str
    hosts: tuple[Host, ...]
    policy: placement.Policy
    limit_bytes: int | None
    tls_ca: str | None = None
    max_bytes_per_sec: float | None = None
    timeout_secs: float = 10.0


def write(root: epath.PathLike, record: WorldRecord) -> None:
    """Notes the world of the RAM disk at `root`."""
    fields = dataclasses.asdict(record)
    storage.write_atomic(pathlib.Path(root, FILE), storage.canonical_json(fields))


def read(root: epath.PathLike) -> WorldRecord | None:
    """The world that was noted last; None if there is none, or it is malformed.

    The agent of a node may be older or newer than the program that noted it: fields
    that only one of them has are left out.
    """
    # Agents import this module, and need no NumPy.
    from elastic_ckpt.steps import placement
    from elastic_ckpt.steps.manifest import Host

    try:
        fields: dict[str, Any] = json.loads(pathlib.Path(root, FILE).read_bytes())
        return WorldRecord(
            run=fields["run"],
            hosts=tuple(Host(**_known(Host, host)) for host in fields["hosts"]),
            policy=placement.Policy(**_known(placement.Policy, fields["policy"])),
            limit_bytes=fields["limit_bytes"],
            tls_ca=fields.get("tls_ca"),
            max_bytes_per_sec=fields.get("max_bytes_per_sec"),
            timeout_secs=float(fields.get("timeout_secs", 10.0)),
        )
    except (FileNotFoundError, RecursionError, *_MALFORMED):
        return None


def _known(kind: type[Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    names = {field.name for field in dataclasses.fields(kind)}
    return {name: value for name, value in fields.items() if name in names}
