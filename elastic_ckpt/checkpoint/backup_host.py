"""A backup host: a machine outside the run's worlds with a share of a step in its RAM.

It follows the run: `agents.json`, next to the run's steps in storage, lists the
machines. The backup host copies its share from their RAM; a `hold` at one agent keeps
the step there in the meantime. Together, a run's backup hosts have a whole copy only if
they all copy the same step. So a backup host that is behind copies the newest step of
any other backup host, and none copies a newer step before all that respond have this
one.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Sequence

import numpy as np
from etils import epath

from elastic_ckpt.checkpoint.host import copies
from elastic_ckpt.core import errors, storage
from elastic_ckpt.steps import owners
from elastic_ckpt.steps.step import StepId
from elastic_ckpt.tiers import find
from elastic_ckpt.tiers.peers import agent, secret
from elastic_ckpt.tiers.peers.peer import Peer
from elastic_ckpt.tiers.peers.peer_client import PeerClient
from elastic_ckpt.tiers.persistent import run_files
from elastic_ckpt.tiers.ram import local, ram_disk
from elastic_ckpt.tiers.source import RepairError

# How often to look at the record in storage, and at an agent.
_POLL_SECS = 2.0
# A step ID older than all others.
_NONE = StepId(-1, "")
# The minimum time for which the run keeps a step for this host, and the minimum copy
# rate, which extends that time.
_HOLD_SECS, _LEAST_BYTES_PER_SEC = 60.0, 2**24


def open_disk(root: epath.PathLike, *, run: str) -> local.LocalHost:
    """Opens the RAM disk of a backup host, which an agent serves.

    Raises:
      RunError: if another process is storing steps on the RAM disk.
    """
    disk = ram_disk.RamDisk(root, run=run)
    domains = {"host": disk.machine, "backup": "backup"}
    own = local.LocalHost(disk, slot=0, domains=domains, number=0)
    own.clean()
    return own


def follow(
    own: local.LocalHost,
    *,
    agents: Sequence[str],
    backups: Sequence[str],
    client: PeerClient,
) -> tuple[StepId, copies.Replicated] | None:
    """Copies this host's share of one step.

    Args:
      own: this host's RAM disk and its steps.
      agents: the URLs of the run's agents.
      backups: the URLs of all backup hosts' agents, in the same order on every backup
        host.
      client: a client that reads from agents.

    Returns:
      The step and the parts that were copied; None if there is no step to copy.

    Raises:
      CheckpointError: if the share does not fit into RAM or cannot be read; existing
        steps stay.
      RunError: if this host is not among the backup hosts.
    """
    held, disk = own.held(), own.disk
    disk.put_back()
    newest = max(held, key=_order, default=_NONE)
    hosts = [Peer(url, client, disk.run) for url in backups]
    # The steps of all backup hosts that respond, possibly including this one.
    others = [set(each.known_saves()) for each in hosts if not each.listing().problem]
    ahead = [each for each in set().union(*others) if _order(each) > _order(newest)]
    if held and not ahead and any(newest not in saves for saves in others):
        _hold(newest, _HOLD_SECS, agents, client)
        return None
    # One agent is enough, because each has parts of every step.
    listed = ahead or Peer(random.choice(agents), client, disk.run).known_saves()
    if not any(_order(each) > _order(newest) for each in listed):
        return None
    search, found = find.search([Peer(url, client, disk.run) for url in agents]), None
    if ahead:
        # The run may no longer have that step.
        with contextlib.suppress(errors.CheckpointError):
            found = search.of_step(*max(ahead, key=_order))
    found = found or search.newest().found
    if found is None or _order(found.step_id) <= _order(newest):
        return None
    # This host is the one whose agent serves this RAM disk.
    machines = [each.listing().machine for each in hosts]
    if disk.machine not in machines:
        raise errors.RunError(
            f"none of the backup hosts {backups} is this host, whose RAM disk is"
            f" {disk.root}; pass the same URLs to every backup host, and make sure that"
            " each host can reach its own URL"
        )
    common = set(held).intersection(*others)
    for each in {*held} - {newest, max(common, key=_order, default=_NONE)}:
        own.remove(each)
    sizes, everyone = found.table.num_bytes, tuple(range(len(machines)))
    taker = np.array(owners.assign_holders([everyone] * len(sizes), sizes), int)
    mine = np.flatnonzero(taker == machines.index(disk.machine)).tolist()
    secs = _HOLD_SECS + int(sizes[mine].sum()) / _LEAST_BYTES_PER_SEC
    _hold(found.step_id, secs, agents, client)
    return found.step_id, copies.fetch(own, found, mine, is_partial=False)


def _hold(
    step_id: StepId, secs: float, agents: Sequence[str], client: PeerClient
) -> None:
    # A hold at one machine applies to all.
    for url in agents:
        with contextlib.suppress(RepairError):
            client.endpoint(url).put(f"/holds/{step_id}", b"%d" % secs)
            return


def serve(
    service: agent.Service,
    *,
    steps: epath.PathLike,
    backups: Sequence[str],
    tls_ca: epath.PathLike | None,
    max_bytes_per_sec: float | None,
) -> None:
    """Serves a RAM disk and follows the run until a signal stops this process.

    Args:
      service: the agent's service.
      steps: the run's steps directory in storage.
      backups: the URLs of all backup hosts' agents.
      tls_ca: a PEM file with the agents' certificate authority.
      max_bytes_per_sec: the maximum copy rate, in bytes per second; None sets no limit.

    Raises:
      CheckpointError: if storage is unreachable at the beginning.
      RunError: see `open_disk` and `follow`.
    """
    storage.make_private_directory(service.root)
    with contextlib.closing(agent.AgentProcess(service)) as process:
        print(f"serving {service.root} at {process.address.url}", flush=True)
        client = PeerClient(
            secret.read(service.secret_file or secret.path(service.root)),
            tls_ca=tls_ca,
            max_bytes_per_sec=max_bytes_per_sec,
        )
        while (record := run_files.read_agents(steps)) is None:
            time.sleep(_POLL_SECS)
        own = open_disk(service.root, run=record.run)
        with contextlib.closing(client), contextlib.closing(own):
            while True:
                copied = None
                try:
                    record = run_files.read_agents(steps) or record
                    urls = list(record.urls.values())
                    copied = follow(own, agents=urls, backups=backups, client=client)
                except (errors.CheckpointError, OSError) as error:
                    print(f"no step was copied: {error}", flush=True)
                if copied is None:
                    time.sleep(_POLL_SECS)
                    continue
                (step, _), taken = copied
                print(
                    f"copied {taken.copies} parts, {taken.num_bytes} bytes, of step"
                    f" {step}",
                    flush=True,
                )


def _order(saved: StepId) -> tuple[str, int]:
    # In chronological order: a run that rolls back saves earlier steps under later
    # saves.
    return saved.save, saved.step
