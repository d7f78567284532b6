"""Parts of steps that a RAM disk lacks are brought from peers.

    python -m elastic_ckpt.checkpoint.host.refill DIRECTORY

An agent runs this for a directory whose needs are new (`tiers.peers.refills`):

* The memory of a node that was replaced. A new world has been noted in the directory
  of a run (`tiers.peers.world_record`), whose pods start meanwhile. If the machine
  holds no step of the run, it takes the copies that placement gives to its hosts, so
  that the newest complete step has all of its copies before a host restores it, or if
  the world ends before one does. The hosts write their slots themselves, so the copies
  are in slot `SLOT`; they are removed like those of any slot without a process.
* A backup host: a machine without accelerators, in no world, that holds copies for the
  others. Host 0 of the world sends it a request after each save (`HostCopies`), with
  the parts to fetch and their holders. They are committed when all are there. Besides
  the newest step it keeps the newest one of which all backup hosts have their parts.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence

from elastic_ckpt.checkpoint.host import replication
from elastic_ckpt.checkpoint.host.answers import Replicated
from elastic_ckpt.core import checked_json, errors
from elastic_ckpt.steps import owners, part_message
from elastic_ckpt.steps.manifest import Host
from elastic_ckpt.steps.part_table import Holder
from elastic_ckpt.steps.step_id import StepId
from elastic_ckpt.tiers import find
from elastic_ckpt.tiers.peers import (
    backup_directory,
    known_agents,
    peer,
    peer_client,
    secret,
    world_record,
)
from elastic_ckpt.tiers.ram import file_repair, local, ram_disk
from elastic_ckpt.tiers.source import Source

# Beyond the number of hosts of any machine.
SLOT = 1_000_000
# Each replaced node asks all agents of the run. Larger worlds make copies themselves,
# after their restore.
MOST_AGENTS = 256
# The kind of failure domain that a backup host is in, and other hosts are not.
KIND = "backup"


def refill(root: str) -> tuple[StepId, Replicated] | None:
    """Brings the parts that a RAM disk is to hold and does not.

    Args:
      root: of the RAM disk.

    Returns:
      What was brought of which step; None if nothing was to be.

    Raises:
      CheckpointError: if the parts do not fit; of a backup host also if a request
        cannot be read, or parts cannot be fetched. The steps that are there stay.
      ConfigError: if the certificates of peers cannot be verified.
      RunError: if another process does this now.
    """
    options = backup_directory.read(root)
    if options is None:
        return _placed(root)
    content = backup_directory.take_request(root)
    if content is None:
        return None
    try:
        with contextlib.closing(
            peer_client.PeerClient(secret.read(secret.path(root)), **options)
        ) as client:
            return _requested(root, content, client)
    except (errors.ElasticCkptError, OSError) as error:
        # Who sent it waits for the parts.
        backup_directory.refuse(root, content, str(error))
        raise


def main(arguments: Sequence[str]) -> int:
    """Fills one directory, and prints a line if that changed anything."""
    (root,) = arguments
    try:
        brought = refill(root)
    except (errors.ElasticCkptError, OSError) as error:
        print(f"copies for this node were not made: {error}", file=sys.stderr)
        return 1
    if brought is not None:
        step_id, taken = brought
        print(
            f"fetched step {step_id.step}: {taken.copies} parts, {taken.num_bytes}"
            " bytes"
        )
        for problem in taken.problems:
            print(problem, file=sys.stderr)
    return 0


def backup_host(machine: str, *, number: int) -> Host:
    """The backup host on a machine, as manifests name it."""
    return Host(id=f"{machine}.0", number=number, domains={"host": machine, KIND: KIND})


def order(saved: StepId) -> tuple[str, int]:
    """The order of the saves of steps in time."""
    return saved.save, saved.step


def _placed(root: str) -> tuple[StepId, Replicated] | None:
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
        urls = known_agents.urls(agents).values()
        peers = [peer.Peer(each, client, record.run) for each in urls]
        step_found = find.Search([peer.Peers(peers)]).newest().found_step
        if step_found is None:
            return None
        holdings = step_found.step.holdings
        placed = owners.Owners(record.hosts, record.policy).place(
            holdings.holder_sets(record.hosts), holdings.stored_bytes
        )
        hosts = [host for host in record.hosts if host.machine == disk.machine]
        items = [
            (item, record.hosts[source])
            for item, source, target in zip(
                placed.item.tolist(), placed.source, placed.target, strict=True
            )
            if record.hosts[target] in hosts
        ]
        if not items:
            return None
        own = local.LocalHost(
            disk, slot=SLOT, domains=hosts[0].domains, number=hosts[0].number
        )
        with contextlib.closing(own):
            # As much again has to be free for the copies that the hosts will make.
            sources = {each: step_found.sources[each] for each in holdings.offers}
            taken = replication.fetch(own, sources, items, spare=1)
    return step_found.step.step_id, taken


def _requested(
    root: str, content: bytes, client: peer_client.PeerClient
) -> tuple[StepId, Replicated]:
    try:
        message = part_message.parse(content)
    except checked_json.UnreadableError as error:
        raise errors.CheckpointError(f"a request {error}") from None
    saved = message.tables[0].saved
    disk = ram_disk.RamDisk(root, run=saved.run)
    host = backup_host(disk.machine, number=0)
    own = local.LocalHost(disk, slot=0, domains=host.domains, number=0)
    with contextlib.closing(own):
        # The newest one here may be on all backup hosts by now.
        held = own.held()
        newest = [max(held, key=order)] if held else []
        with file_repair.held_off(disk.host_directory(own.slot)):
            own.clean()
            for each in set(held) - {saved.step_id, *newest, *message.saves}:
                own.remove(each)
        sources = {
            offer: _source(holder, saved.step_id, client)
            for table in message.tables
            for holder, offer in zip(
                table.holders, table.offers(named=True), strict=True
            )
        }
        taken = replication.fetch(own, sources, is_partial=False)
    return saved.step_id, taken


def _source(holder: Holder, step_id: StepId, client: peer_client.PeerClient) -> Source:
    endpoint = client.endpoint(holder.url)
    return peer.PeerSource(endpoint, f"{holder.host.slot}/{step_id}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
