"""The memory of a node that was replaced is filled from its peers.

    python -m elastic_ckpt.checkpoint.host.node_refill DIRECTORY

The agent of a node runs this for the directory of a run when a new world has been noted
there (`tiers.peers.world_record`), while the pods of that world start. If the machine
holds no step of the run, it takes the copies that placement gives to its hosts, so
that the newest complete step has all of its copies before a host restores it, or if the
world ends before one does. The hosts write their slots themselves, so the copies are in
slot `SLOT`; they are removed like those of any slot without a process.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from elastic_ckpt.checkpoint.host import replication, verified_read
from elastic_ckpt.core import errors
from elastic_ckpt.steps import placement
from elastic_ckpt.tiers import find
from elastic_ckpt.tiers.peers import (
    known_agents,
    peer,
    peer_client,
    secret,
    world_record,
)
from elastic_ckpt.tiers.ram import local, ram_disk

# Beyond the number of hosts of any machine.
SLOT = 1_000_000
# Each replaced node asks all agents of the run. Larger worlds make copies themselves,
# after their restore.
MOST_AGENTS = 256


def refill(root: str) -> replication.Taken | None:
    """Takes the copies that a machine should hold, if it holds no step of the run.

    Args:
      root: of the run's RAM disk.

    Returns:
      None if nothing was to be copied.

    Raises:
      CheckpointError: if the copies do not fit.
      ConfigError: if the certificates of peers cannot be verified.
      RunError: if another process does this now.
    """
    record = world_record.read(root)
    if record is None or not record.policy.copies:
        return None
    disk = ram_disk.RamDisk(root, run=record.run, limit_bytes=record.limit_bytes)
    agents = known_agents.read(root)
    agents.pop(disk.machine, None)
    if disk.known_saves() or not 0 < len(agents) <= MOST_AGENTS:
        return None
    client = peer_client.PeerClient(
        secret.read(secret.path(root)),
        tls_ca=record.tls_ca,
        timeout_secs=record.timeout_secs,
        max_bytes_per_sec=record.max_bytes_per_sec,
    )
    with contextlib.closing(client):
        step_found = _newest(agents, client, record.run)
        if step_found is None:
            return None
        return _take(step_found, record, disk)


def main(arguments: Sequence[str]) -> int:
    """Fills one directory, and prints a line if that changed anything."""
    (root,) = arguments
    try:
        taken = refill(root)
    except (errors.ElasticCkptError, OSError) as error:
        print(f"copies for this node were not made: {error}", file=sys.stderr)
        return 1
    if taken is not None:
        print(f"copied {taken.copies} parts ({taken.num_bytes} bytes) from peers")
        for problem in taken.problems:
            print(problem, file=sys.stderr)
    return 0


def _newest(
    agents: Mapping[str, Mapping[str, Any]], client: peer_client.PeerClient, run: str
) -> find.FoundStep | None:
    peers = [
        peer.Peer(
            agent["url"],
            client,
            run,
            certificate_sha256=agent.get("certificate_sha256"),
        )
        for agent in agents.values()
    ]
    return find.Search([peer.Peers(peers)]).newest().found_step


def _take(
    step_found: find.FoundStep,
    record: world_record.WorldRecord,
    disk: ram_disk.RamDisk,
) -> replication.Taken | None:
    holdings = step_found.step.holdings
    placed = placement.place(holdings, record.hosts, record.policy)
    on_machine = [
        host for host in record.hosts if host.id.rpartition(".")[0] == disk.machine
    ]
    items = [each for host in on_machine for each in replication.incoming(placed, host)]
    if not items:
        return None
    own = local.LocalHost(
        disk,
        slot=SLOT,
        domains=on_machine[0].domains,
        number=on_machine[0].number,
    )
    with contextlib.closing(own):
        num_bytes = int(holdings.stored_bytes[[item for item, _ in items]].sum())
        # As much again has to be free for the copies that the hosts will make.
        writer = own.copy_writer(
            step_found.step.step_id,
            holdings.contents,
            num_bytes=2 * num_bytes,
        )
        reader = verified_read.VerifiedReader(step_found.sources)
        taken = replication.take(holdings, items, reader, writer)
        if taken.copies:
            writer.commit()
        else:
            writer.abandon()
    return taken


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
