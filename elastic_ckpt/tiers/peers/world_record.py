"""The world that a machine is in, as a host of it notes it for the agent of the node.

`<root>/world.json` has what `Owners` needs: the hosts, and the policy of copies.
With it the agent of a node that was replaced can copy what the machine should hold
(`host.refill`). It is a hint, like `agents.json`.
"""

from __future__ import annotations

import dataclasses
import typing

from etils import epath

from elastic_ckpt.tiers.peers import records

if typing.TYPE_CHECKING:
    from elastic_ckpt.steps import owners
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
    policy: owners.Policy
    limit_bytes: int | None
    tls_ca: str | None = None
    max_bytes_per_sec: float | None = None
    timeout_secs: float = 10.0


def write(root: epath.PathLike, record: WorldRecord) -> None:
    """Notes the world of the RAM disk at `root`."""
    records.write(root, FILE, dataclasses.asdict(record))


def read(root: epath.PathLike) -> WorldRecord | None:
    """The world that was noted last; None if there is none, or it is malformed.

    The agent of a node may be older or newer than the program that noted it: fields
    that only one of them has are left out.
    """
    # Agents import this module, and need no NumPy.
    from elastic_ckpt.steps import owners
    from elastic_ckpt.steps.manifest import Host

    try:
        fields = dict(records.read(root, FILE))
        fields["hosts"] = tuple(records.decoded(Host, host) for host in fields["hosts"])
        fields["policy"] = records.decoded(owners.Policy, fields["policy"])
        return records.decoded(WorldRecord, fields)
    except _MALFORMED:
        return None
