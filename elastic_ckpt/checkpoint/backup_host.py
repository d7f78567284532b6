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
from elastic_ckpt.steps.manifest import Manifest
from elastic_ckpt.steps.step_id import StepId
from elastic_ckpt.tiers import find
from elastic_ckpt.tiers.peers import agent, run_agents, secret
from elastic_ckpt.tiers.peers.peer import ManifestKey, Peer, Peers
from elastic_ckpt.tiers.peers.peer_client import PeerClient
from elastic_ckpt.tiers.ram import local, ram_disk
from elastic_ckpt.tiers.source import RepairError

_POLL_SECS = 1.0
# Between two looks at the record in storage.
_RECORD_SECS = 10.0
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
        self._steps, self._client = steps, client
        while (record := run_agents.read(steps)) is None:
            time.sleep(_RECORD_SECS)
        self._record, self._read_secs = record, time.monotonic()
        self._disk = ram_disk.RamDisk(root, run=record.run)
        domains = {"host": self._disk.machine, "backup": "backup"}
        self._own = local.LocalHost(self._disk, slot=0, domains=domains, number=0)
        self._slot = self._disk.host_directory(0)
        self._backups = list(backups)
        self._known: dict[ManifestKey, Manifest] = {}
        with ram_disk.held_off(self._slot):
            self._own.clean()

    def follow(self) -> tuple[StepId, Replicated] | None:
        """Copies this host's share of one step; returns it, or None if none is due.

        Raises:
          CheckpointError: if the share does not fit or cannot be read; what is there
            stays.
          RunError: if this host is not among the backup hosts.
        """
        if time.monotonic() - self._read_secs > _RECORD_SECS:
            self._record = run_agents.read(self._steps) or self._record
            self._read_secs = time.monotonic()
        own = self._own.held()
        newest = max(own, key=_order, default=None)
        others = self._others()
        ahead = {each for saves in others for each in saves} - set(own)
        target = max(ahead, key=_order, default=None)
        if target is None or _order(target) < _order(newest):
            target = None
            if newest and any(newest not in saves for saves in others):
                self._hold(newest, _HOLD_SECS)
                return None
            if not self._is_newer_listed(newest):
                return None
        found = self._found(target)
        if found is None or _order(found.step_id) <= _order(newest):
            return None
        common = set(own).intersection(*others)
        kept = {newest, max(common, key=_order, default=None)}
        with ram_disk.held_off(self._slot):
            for each in set(own) - kept:
                self._own.remove(each)
        num_bytes = found.table.num_bytes
        end = np.cumsum(num_bytes)
        # Equal shares of all bytes in a line, each part by its middle.
        middle = (end - num_bytes / 2) / max(1, end[-1])
        number = self._number()
        mine = np.flatnonzero(middle * len(self._backups) // 1 == number).tolist()
        share_bytes = int(num_bytes[mine].sum())
        self._hold(found.step_id, _HOLD_SECS + share_bytes / _LEAST_BYTES_PER_SEC)
        taken = copies.fetch(self._own, found, mine, is_partial=False)
        self._known.clear()
        return found.step_id, taken

    def close(self) -> None:
        """Releases the RAM disk; the steps in it stay."""
        self._own.close()

    def _number(self) -> int:
        # Of this host among all: the one whose agent serves this memory.
        for number, url in enumerate(self._backups):
            if Peer(url, self._client, "").machine == self._disk.machine:
                return number
        raise errors.RunError(
            f"none of the backup hosts {self._backups} is this one, whose RAM disk is"
            f" {self._disk.root}; give each the same URLs, at which it reaches itself"
        )

    def _others(self) -> list[set[StepId]]:
        # The steps of the backup hosts that answer; this one may be among them.
        peers = [Peer(url, self._client, self._disk.run) for url in self._backups]
        return [set(each.known_saves()) for each in peers if not each.problems]

    def _is_newer_listed(self, newest: StepId | None) -> bool:
        # One agent is asked: each has parts of every step.
        url = random.choice(list(self._record.urls.values()))
        asked = Peer(url, self._client, self._disk.run)
        return any(_order(each) > _order(newest) for each in asked.known_saves())

    def _found(self, target: StepId | None) -> find.FoundStep | None:
        # The step to copy: `target` if the run still has it, else its newest.
        run = self._disk.run
        peers = Peers(
            [
                Peer(url, self._client, run, known=self._known)
                for url in self._record.urls.values()
            ]
        )
        if target is not None:
            with contextlib.suppress(errors.CheckpointError):
                return find.of_save([peers], target)
        return find.search([peers]).newest().found

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
    with contextlib.ExitStack() as stack:
        process = stack.enter_context(contextlib.closing(agent.AgentProcess(service)))
        print(f"serving {service.root} at {process.address.url}", flush=True)
        client = PeerClient(
            secret.read(service.secret_file or secret.path(service.root)),
            tls_ca=tls_ca,
            max_bytes_per_sec=max_bytes_per_sec,
        )
        stack.callback(client.close)
        backup = stack.enter_context(
            contextlib.closing(
                BackupHost(service.root, steps=steps, backups=backups, client=client)
            )
        )
        while True:
            try:
                copied = backup.follow()
            except (errors.CheckpointError, OSError) as error:
                print(f"no step was copied: {error}", flush=True)
                copied = None
            if copied is None:
                time.sleep(_POLL_SECS)
                continue
            step_id, taken = copied
            print(
                f"copied {taken.copies} parts, {taken.num_bytes} bytes, of step"
                f" {step_id.step}",
                flush=True,
            )


def _order(saved: StepId | None) -> tuple[str, int]:
    # In time: a run that goes back saves earlier steps under later saves.
    return ("", -1) if saved is None else (saved.save, saved.step)
