"""A host's place in its world: its machine's RAM disk, the other hosts, their agents.

A world begins with three phases: hosts `introduce` themselves, `join` with a name and
the secret that follow from that, and `meet` each other's agents.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from etils import epath

from elastic_ckpt.core import addresses, errors
from elastic_ckpt.core import storage as files
from elastic_ckpt.host.captured_step import CapturedStep
from elastic_ckpt.manifests import failure_domains
from elastic_ckpt.manifests.holdings import Offer
from elastic_ckpt.manifests.manifest import Host
from elastic_ckpt.tiers.choices import Chosen, Peers
from elastic_ckpt.tiers.peers import (
    agent,
    agent_process,
    known_agents,
    peer,
    peer_client,
    secret,
)
from elastic_ckpt.tiers.persistent import persistent_root, persistent_tier
from elastic_ckpt.tiers.ram import local, ram_disk
from elastic_ckpt.tiers.source import Source, Tier

Answer = dict[str, Any]


class HostWorld:
    """One host among the others.

    Args:
      run: the identity of the run.
      number: of this host in its world, from 0.
      slice_name: the slice that it is in.
      directory: of the RAM disk; without a local tier, a directory of this world alone
        for files of components, removed at the end.
      chosen: the tiers; without a peer tier hosts serve each other, and copy nothing.

    Attributes:
      run: the identity of the run.
      peers: the peer tier.
      local_tier: the local tier; None if there is none.
      disk: the RAM disk of this machine.
      storage: the persistent tier as it was chosen; None if there is none.
      root: of persistent storage; None if there is none.
      persistent: the steps there; None if there is none.
      own: this host's part of the RAM disk, once it has joined.
      hosts: all of the world, once they have met.
      number: of this host in its world, from 0.
      captured: what this host backs up from the memory that it was captured in, by step
        and save.
    """

    own: local.LocalHost
    hosts: Sequence[Host]

    def __init__(
        self,
        *,
        run: str,
        number: int,
        slice_name: str,
        directory: epath.PathLike,
        chosen: Chosen,
    ) -> None:
        self.run = run
        self.peers = chosen.peers or Peers(copies=0)
        self._is_alone = chosen.peers is None
        self.local_tier = local_tier = chosen.local
        limit_bytes = None if local_tier is None else local_tier.limit_bytes
        self.disk = ram_disk.RamDisk(directory, run=run, limit_bytes=limit_bytes)
        self.number = number
        self.captured: dict[tuple[int, str], CapturedStep] = {}
        self.storage = storage = chosen.persistent
        self.root: persistent_root.PersistentRoot | None = None
        self.persistent: persistent_tier.PersistentTier | None = None
        if storage is not None:
            self.root = persistent_root.PersistentRoot.of(storage.directory)
            self.persistent = persistent_tier.PersistentTier(self.root, run=run)
        self._slice_name = slice_name
        self._client: peer_client.PeerClient | None = None
        # By the url of another machine's agent, the certificate that it announced.
        self._others: dict[str, str | None] = {}
        self._closing = contextlib.ExitStack()

    @property
    def tiers(self) -> list[Tier]:
        """All tiers in which this host can look for steps, as they are now.

        Peers are asked for their lists of steps once: ask again for what is new.
        """
        more = [] if self.persistent is None else [self.persistent]
        return [*self._ram_tiers(), *more]

    def in_ram(self, step: int, save: str) -> tuple[dict[Offer, Source], list[str]]:
        """What hosts hold in RAM of one save of a step, and what could not be read.

        Raises:
          CheckpointError: if that is nothing.
        """
        captured = self.captured.get((step, save))
        if captured is not None:
            return {captured.offer: captured}, []
        sources: dict[Offer, Source] = {}
        problems: list[str] = []
        for tier in self._ram_tiers():
            offered = tier.offers(step)
            problems += offered.problems
            for offer, source in offered.sources.items():
                if offer.manifest.save == save:
                    sources[offer] = source
        if not sources:
            told = "; ".join(problems) or "no host has a manifest of it"
            raise errors.CheckpointError(
                f"step {step} cannot be read in RAM ({told}); save another one"
            )
        return sources, problems

    def introduce(self) -> Answer:
        """What the others need to know before this host has a name."""
        root = self.disk.root
        return {
            "machine": self.disk.machine,
            "secret": secret.find(root),
            "fresh_secret": secret.new(),
            "agents": known_agents.read(root),
            "now_secs": time.time(),
        }

    def join(self, slots: Sequence[int], shared_secret: str) -> Answer:
        """Takes a slot of the machine, and the secret that all agreed on.

        Args:
          slots: of each host, by number.
          shared_secret: of the run.

        Returns:
          The `host` that this is from now on, and of slot 0 where its `agent` listens.
        """
        slot = slots[self.number]
        if self.local_tier is None:
            # Also when nobody calls `close`.
            self._closing.callback(weakref.finalize(self, _remove, self.disk, slot))
        secret.adopt(self.disk.root, shared_secret)
        domains = {
            "host": self.disk.machine,
            "slice": self._slice_name,
            **failure_domains.of_environment(),
            **self.peers.domains,
        }
        self.own = self._closing.enter_context(
            local.LocalHost(self.disk, slot=slot, domains=domains, number=self.number)
        )
        listens = None
        is_read = self.local_tier and not (self._is_alone and len(slots) == 1)
        if slot == 0 and is_read:
            own_agent = agent_process.AgentProcess(self._service())
            self._closing.callback(own_agent.close)
            listens = own_agent.address
        return {
            "host": dataclasses.asdict(self.own.host),
            "agent": None if listens is None else dataclasses.asdict(listens),
        }

    def meet(self, hosts: Sequence[Answer], agents: Mapping[str, Answer]) -> None:
        """Learns who is there, and where agents listen, those of idle machines too."""
        self.hosts = [Host(**host) for host in hosts]
        # Only now: who lives has its slot by now, so no slot of theirs is cleaned.
        self.own.clean()
        known_agents.write(self.disk.root, agents)
        tls = self.peers.tls
        self._client = self._closing.enter_context(
            peer_client.PeerClient(
                secret.read(secret.path(self.disk.root)),
                tls_ca=None if tls is None else tls.authority,
                max_bytes_per_sec=self.peers.max_bytes_per_sec,
            )
        )
        self._others = {
            each["url"]: each.get("certificate_sha256")
            for machine, each in agents.items()
            if machine != self.disk.machine
        }
        for url in self.peers.known:
            self._others.setdefault(url, None)

    def new_save(self, after: str) -> str:
        """A name for the saves from now on, greater as text than `after` and its own.

        Args:
          after: the name of the save that was found last; empty if there was none.
        """
        # The time, in milliseconds, but never back: clocks of machines differ.
        known = [self._newest_save(), int(after) if after.isdecimal() else 0]
        return f"{max(time.time_ns() // 1_000_000, max(known) + 1):015d}"

    def say(self, value: Any) -> Any:
        """`value`: for what drivers have to agree on."""
        return value

    def decide(self, value: Any) -> Any:
        """`value`, as `say`: for decisions of a caller while stages are under way."""
        return value

    def close(self) -> None:
        """Lets go of the slot, and of the agent if this process started it."""
        self._closing.close()

    def _ram_tiers(self) -> list[Tier]:
        if self._client is None:
            return [self.disk]
        others = [
            peer.Peer(url, self._client, self.run, certificate_sha256=certificate)
            for url, certificate in self._others.items()
        ]
        return [self.disk, peer.Peers(others)]

    def _service(self) -> agent.Service:
        tls = self.peers.tls
        return agent.Service(
            root=str(self.disk.root),
            interface=self.peers.interface or addresses.of_this_host(),
            port=self.peers.port,
            tls_certificate=None if tls is None else tls.certificate,
            tls_key=None if tls is None else tls.key,
        )

    def _newest_save(self) -> int:
        saves = [
            save
            for slot in self.disk.slots()
            for _, save in self.disk.saves(slot)
            if save.isdecimal()
        ]
        return max(map(int, saves), default=0)


def _remove(disk: ram_disk.RamDisk, slot: int) -> None:
    # Hosts of one machine may share the directory.
    files.remove(disk.host_directory(slot))
    if not disk.slots():
        files.remove(disk.root)
