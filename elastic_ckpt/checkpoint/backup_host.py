"""A backup host: a machine in no world that keeps a share of each step in its RAM.

It follows the run: the record of agents beside the run's steps in storage names the
machines, and the share is copied from their RAM, which holds the step meanwhile (a
`hold` at one of the agents). The backup hosts of a run together have one copy of a
step only if they copy the same one. So one that is behind takes the newest step that
another has, and nobody goes on to a newer one until all that answer have it.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Sequence

import numpy as np
from etils import epath

from elastic_ckpt.checkpoint.host import copies
from elastic_ckpt.checkpoint.host.answers import Replicated
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

# Between two looks at the record in storage, and at an agent.
_POLL_SECS = 2.0
# Before all steps.
_NONE = StepId(-1, "")
# How long the run keeps a step for this host.
_HOLD_SECS, _LEAST_BYTES_PER_SEC = 60.0, 2**24


class BackupHost:
    """One of the backup hosts of a run.

    Args:
      root: of its RAM disk, which an agent serves.
      steps: the directory of the run's steps in storage.
      backups: the URLs of the agents of all backup hosts, in the same order on each.
      client: of agents.

    Raises:
      CheckpointError: if storage is out of reach.
      RunError: if another process keeps steps in this RAM disk.
    """

    def __init__(
        self,
        root: epath.PathLike,
        *,
        steps: epath.PathLike,
        backups: Sequence[str],
        client: PeerClient,
    ) -> None:
        self._steps, self._client, self._backups = steps, client, list(backups)
        while (record := run_files.read_agents(steps)) is None:
            time.sleep(_POLL_SECS)
        self._record = record
        disk = ram_disk.RamDisk(root, run=record.run)
        domains = {"host": disk.machine, "backup": "backup"}
        self._own = local.LocalHost(disk, slot=0, domains=domains, number=0)
        self._own.clean()

    def follow(self) -> tuple[StepId, Replicated] | None:
        """Copies this host's share of one step; returns it, or None if none is due.

        Raises:
          CheckpointError: if the share does not fit or cannot be read; what is there
            stays.
          RunError: if this host is not among the backup hosts.
        """
        self._record = run_files.read_agents(self._steps) or self._record
        urls = list(self._record.urls.values())
        own = self._own.held()
        newest = max(own, key=_order, default=_NONE)
        backups = self._peers(self._backups)
        # The steps of those that answer; this host may be among them.
        others = [
            set(each.known_saves()) for each in backups if not each.listing.problem
        ]
        ahead = [each for each in set().union(*others) if _order(each) > _order(newest)]
        if own and not ahead and any(newest not in saves for saves in others):
            self._hold(newest, _HOLD_SECS)
            return None
        # One agent is asked: each has parts of every step.
        listed = ahead or self._peers([random.choice(urls)])[0].known_saves()
        if not any(_order(each) > _order(newest) for each in listed):
            return None
        search, found = find.search(self._peers(urls)), None
        if ahead:
            # The run may have it no more.
            with contextlib.suppress(errors.CheckpointError):
                found = search.of_step(*max(ahead, key=_order))
        found = found or search.newest().found
        if found is None or _order(found.step_id) <= _order(newest):
            return None
        # This host is the one whose agent serves this memory.
        machines, disk = [each.listing.machine for each in backups], self._own.disk
        if disk.machine not in machines:
            raise errors.RunError(
                f"none of the backup hosts {self._backups} is this one, whose RAM disk"
                f" is {disk.root}; give each the same URLs, at which it reaches itself"
            )
        common = set(own).intersection(*others)
        for each in {*own} - {newest, max(common, key=_order, default=_NONE)}:
            self._own.remove(each)
        sizes, everyone = found.table.num_bytes, tuple(range(len(machines)))
        taker = np.array(owners.shares([everyone] * len(sizes), sizes), int)
        mine = np.flatnonzero(taker == machines.index(disk.machine)).tolist()
        secs = _HOLD_SECS + int(sizes[mine].sum()) / _LEAST_BYTES_PER_SEC
        self._hold(found.step_id, secs)
        return found.step_id, copies.fetch(self._own, found, mine, is_partial=False)

    def close(self) -> None:
        """Releases the RAM disk; the steps in it stay."""
        self._own.close()

    def _peers(self, urls: Sequence[str]) -> list[Peer]:
        return [Peer(url, self._client, self._record.run) for url in urls]

    def _hold(self, step_id: StepId, secs: float) -> None:
        # At one machine it counts for all.
        for url in self._record.urls.values():
            with contextlib.suppress(RepairError):
                self._client.endpoint(url).put(f"/holds/{step_id}", b"%d" % secs)
                return


def serve(
    service: agent.Service,
    *,
    steps: epath.PathLike,
    backups: Sequence[str],
    tls_ca: epath.PathLike | None,
    max_bytes_per_sec: float | None,
) -> None:
    """Serves a RAM disk, and follows the run until a signal ends this process."""
    storage.make_private_directory(service.root)
    with contextlib.closing(agent.AgentProcess(service)) as process:
        print(f"serving {service.root} at {process.address.url}", flush=True)
        client = PeerClient(
            secret.read(service.secret_file or secret.path(service.root)),
            tls_ca=tls_ca,
            max_bytes_per_sec=max_bytes_per_sec,
        )
        backup = BackupHost(service.root, steps=steps, backups=backups, client=client)
        with contextlib.closing(client), contextlib.closing(backup):
            while True:
                told = None
                try:
                    if copied := backup.follow():
                        (step, _), taken = copied
                        told = (
                            f"copied {taken.copies} parts, {taken.num_bytes} bytes, of"
                            f" step {step}"
                        )
                except (errors.CheckpointError, OSError) as error:
                    print(f"no step was copied: {error}", flush=True)
                if told:
                    print(told, flush=True)
                else:
                    time.sleep(_POLL_SECS)


def _order(saved: StepId) -> tuple[str, int]:
    # In time: a run that goes back saves earlier steps under later saves.
    return saved.save, saved.step
