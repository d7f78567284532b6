"""A backup host: a machine without accelerators that holds copies for the others.

It is in no world. Host 0 of the world sends it a request after each save
(`backup_copies`), with the parts to fetch and their holders. It fetches them from the
agents of the world's machines, verified, and commits them when it has all. Its agent
serves them like those of an idle machine, and puts bad ones right. Besides the newest
step it keeps the newest one of which all backup hosts have their parts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from etils import epath

from elastic_ckpt.checkpoint.host import backup_copies, copies
from elastic_ckpt.core import checked_json, errors
from elastic_ckpt.steps import part_message
from elastic_ckpt.steps.holdings import Offer
from elastic_ckpt.steps.part_table import PartTable
from elastic_ckpt.tiers.peers import agent_url, backup_directory, peer, peer_client
from elastic_ckpt.tiers.ram import file_repair, local, ram_disk
from elastic_ckpt.tiers.source import Source


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fetched:
    """A step of which the host has fetched its parts.

    Attributes:
      step: its number.
      save: which save of it.
      copies: how many parts.
      num_bytes: of them.
    """

    step: int
    save: str
    copies: int
    num_bytes: int


class BackupHost:
    """Takes requests one after another; closed by the caller.

    Args:
      root: of the RAM disk, which `backup_directory.make` has made.
      client: of the agents of other machines, with the run's secret.
    """

    def __init__(self, root: epath.PathLike, client: peer_client.PeerClient) -> None:
        self._root = root
        self._client = client
        self._own: local.LocalHost | None = None

    def close(self) -> None:
        """Frees the slot; the steps stay."""
        if self._own is not None:
            self._own.close()

    def poll(self) -> Fetched | None:
        """Carries out the newest request; None if there is none.

        Raises:
          CheckpointError: if the request cannot be read, or parts cannot be fetched or
            do not fit; the steps that are there stay.
          RunError: if another process has the slot.
        """
        content = backup_directory.take_request(self._root)
        if content is None:
            return None
        try:
            message = part_message.parse(content)
        except checked_json.UnreadableError as error:
            raise errors.CheckpointError(f"a request {error}") from None
        step_id = message.tables[0].saved.step_id
        own = self._slot(message.tables[0].saved.run)
        held = own.held()
        # The newest one here may be on all backup hosts by now.
        newest = [max(held, key=backup_copies.order)] if held else []
        with file_repair.held_off(own.disk.host_directory(own.slot)):
            for each in set(held) - {step_id, *newest, *message.saves}:
                own.remove(each)
        taken = copies.fetched(own, self._sources(message.tables), is_partial=False)
        return Fetched(
            step=step_id.step,
            save=step_id.save,
            copies=taken.copies,
            num_bytes=taken.num_bytes,
        )

    def _slot(self, run: str) -> local.LocalHost:
        if self._own is None:
            disk = ram_disk.RamDisk(self._root, run=run)
            host = backup_copies.backup_host(disk.machine, number=0)
            self._own = local.LocalHost(disk, slot=0, domains=host.domains, number=0)
            with file_repair.held_off(disk.host_directory(self._own.slot)):
                self._own.clean()
        if self._own.disk.run != run:
            raise errors.CheckpointError(
                f"a request is of run {run!r}, and {self._root} is that of"
                f" {self._own.disk.run!r}; start a backup host for each run"
            )
        return self._own

    def _sources(self, tables: Sequence[PartTable]) -> dict[Offer, Source]:
        sources: dict[Offer, Source] = {}
        for table in tables:
            directory = str(table.saved.step_id)
            for holder, offer in zip(
                table.holders, table.with_files().offers(), strict=True
            ):
                slot = holder.host.id.rpartition(".")[2]
                url, certificate = agent_url.unpinned(holder.url)
                endpoint = self._client.endpoint(url, certificate_sha256=certificate)
                sources[offer] = peer.PeerSource(endpoint, f"{slot}/{directory}")
        return sources
