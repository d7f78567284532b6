"""A host in its world: its RAM disk, the other hosts' agents, and storage."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from etils import epath

from elastic_ckpt.checkpoint.host.exchange import Exchange
from elastic_ckpt.core import calls, clock, errors
from elastic_ckpt.steps import owners
from elastic_ckpt.steps.manifest import Holder, Host, Manifest
from elastic_ckpt.steps.step import StepId
from elastic_ckpt.steps.table import StepTable
from elastic_ckpt.tiers.choices import Chosen, Peers
from elastic_ckpt.tiers.find import FoundStep
from elastic_ckpt.tiers.peers import peer, peer_client
from elastic_ckpt.tiers.persistent import persistent_root, persistent_tier
from elastic_ckpt.tiers.persistent.run_files import Seen
from elastic_ckpt.tiers.ram import local, ram_disk
from elastic_ckpt.tiers.ram.machine import find as find_machine
from elastic_ckpt.tiers.source import ReadError, Source, SourceTier


class HeldStep(NamedTuple):
    """A step whose parts this host copies and uploads.

    Attributes:
      found: the parts that this host knows of, and where to read them.
      holders: for each item, the indices of this world's hosts that have it in memory,
        in ascending order.
    """

    found: FoundStep
    holders: Sequence[tuple[int, ...]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostConfig:
    """The configuration of a host.

    Attributes:
      number: the host's index in the world, from 0.
      directory: the RAM disk; without a local tier, a directory for this world's
        component files, which is removed at the end.
      chosen: the tiers; without a peer tier, hosts serve each other but copy nothing.
    """

    number: int
    run: str
    slice_name: str
    directory: epath.PathLike
    chosen: Chosen

    @property
    def peer_tier(self) -> Peers:
        """The peer tier, or a peer tier that copies nothing."""
        return self.chosen.peers or Peers(copies=0)


class HostWorld:
    """A host in a world that it has joined.

    Attributes:
      copy_policy: the policy for the copies of a step that this world keeps in peers'
        memory.
      root: the steps in persistent storage; None if there is no storage.
      mail: this host's messages and its side of exchanges with all other hosts.
      held: the steps that this host copies or backs up.
      agent_urls: the URLs of agents, by machine.
    """

    def __init__(
        self,
        config: HostConfig,
        *,
        own: local.LocalHost,
        hosts: Sequence[Host],
        client: peer_client.PeerClient,
        agents: Mapping[str, Seen],
    ) -> None:
        self.run = config.run
        self.number = config.number
        self.own = own
        self.disk = own.disk
        self.hosts = hosts
        self.chosen = config.chosen
        peers = config.peer_tier
        domain, inner = owners.domain_kinds(hosts, peers.domain)
        self.copy_policy = owners.Policy(
            copies=peers.copies if len(hosts) > 1 else 0,
            domain=domain,
            inner=inner,
            assume_data_parallelism=peers.assume_data_parallelism,
        )
        self.root: persistent_root.PersistentRoot | None = None
        if config.chosen.persistent is not None:
            directory = config.chosen.persistent.directory
            self.root = persistent_root.PersistentRoot.from_path(directory)
        # All holders of a step in storage share a directory and therefore a cache.
        self._stored = functools.lru_cache(maxsize=4)(persistent_tier.StepSource)
        self._disks = [self.disk]
        read_ram = config.chosen.read_ram
        if read_ram is not None and find_machine(read_ram) is not None:
            # It belongs to a program that is running or has run.
            self._disks.insert(0, ram_disk.RamDisk(read_ram, run=self.run))
        self.held: dict[StepId, HeldStep] = {}
        self.client = client
        self.agents = agents
        self.agent_urls = {machine: each.url for machine, each in agents.items()}
        # The known agents of all other machines.
        urls = dict.fromkeys([*self.agent_urls.values(), *peers.known, *peers.backups])
        urls.pop(self.agent_urls.get(self.disk.machine, ""), None)
        self._agents = list(urls)
        self.mail = Exchange(
            self.disk, hosts=hosts, number=self.number, endpoint=self._endpoint_of
        )

    @property
    def persistent(self) -> persistent_tier.PersistentTier | None:
        """The current steps in storage; None if there is no storage."""
        if self.root is None:
            return None
        return persistent_tier.PersistentTier(self.root, run=self.run)

    @property
    def passes(self) -> bool:
        """Whether hosts can exchange messages and read each other's RAM.

        This requires agents on all machines; hosts that keep nothing in RAM have none.
        """
        reached = {self.disk.machine, *self.agent_urls}
        return len(self.hosts) > 1 and reached.issuperset(
            host.machine for host in self.hosts
        )

    def hold(self, found: FoundStep) -> bool:
        """Makes this host copy and back up parts of a found step.

        Returns:
          Whether the step is completely in RAM; if it is not, nothing is done.
        """
        table = found.table.held_by(lambda holder: holder.tier == "local")
        if table.complete:
            in_ram = FoundStep(table, found.sources)
            sets = table.holder_sets(self.hosts)
            self.held[table.step_id] = HeldStep(in_ram, sets)
        return table.complete

    @functools.cached_property
    def owners(self) -> owners.Owners:
        """Decides where copies go."""
        return owners.Owners(self.hosts, self.copy_policy)

    @property
    def tiers(self) -> list[SourceTier]:
        """All tiers in which this host can search for steps, in their current state.

        Peers are asked for their lists of steps only once; to see new steps, read this
        property again.
        """
        stored = self.persistent
        return [*self.ram_tiers, *([] if stored is None else [stored])]

    @property
    def ram_tiers(self) -> list[SourceTier]:
        """The tiers in the RAM of this and other machines; see `tiers`."""
        return [*self._disks, *self._peers(self._agents)]

    def idle_peers(self, hosts: Collection[int]) -> list[peer.Peer]:
        """The idle machines outside the world that `hosts` are responsible for.

        As with `tiers`, call this again to see new steps.
        """
        machines = {host.machine for host in self.hosts}
        present = {self.agent_urls.get(machine) for machine in machines}
        idle = sorted(set(self._agents) - present)
        return self._peers(
            [url for n, url in enumerate(idle) if n % len(self.hosts) in hosts]
        )

    def source(self, holder: Holder, step_id: StepId) -> Source:
        """The source of a holder's parts of a save of a step.

        Raises:
          CheckpointError: if the agent of the holder's machine is not known.
        """
        host, machine = holder.host, holder.host.machine
        if holder.tier == "persistent":
            return self._stored(holder.url)
        if not holder.url and machine == self.disk.machine and host.slot.isdecimal():
            directory = self.disk.step_directory(int(host.slot), step_id)
            return ram_disk.StepFiles(directory)
        url = holder.url or self.agent_urls.get(machine, "")
        if not url:
            raise errors.CheckpointError(
                f"host {host.id} holds parts of step {step_id.step}, but has not"
                " announced an agent that serves them; restart the run"
            )
        return peer.PeerSource(self.client.endpoint(url), f"{host.slot}/{step_id}")

    def found(self, manifests: Sequence[Manifest]) -> FoundStep:
        """A step that other hosts have reported, with the sources of its holders.

        Raises:
          CheckpointError: see `source`.
        """
        table = StepTable(manifests)
        return FoundStep(
            table, [self.source(each, table.step_id) for each in table.holders]
        )

    def listed(
        self, table: StepTable, items: np.ndarray, hosts: Sequence[Sequence[int]]
    ) -> Manifest:
        """A manifest that lists hosts of this world as holders of a step's items.

        Args:
          table: the table of the step.
          items: the item indices.
          hosts: for each item, the host indices in the order in which to try them.
        """
        numbers = list(dict.fromkeys(number for some in hosts for number in some))
        place = {number: n for n, number in enumerate(numbers)}
        holder = [place[number] for some in hosts for number in some]
        rows = table.items.take(items.repeat(list(map(len, hosts))))
        return Manifest(
            run=table.run,
            step_id=table.step_id,
            contents=table.contents,
            holders=tuple(Holder(self.hosts[number]) for number in numbers),
            parts=rows._replace(holder=np.array(holder, np.int64)),
        )

    def holding(self, step_id: StepId) -> HeldStep:
        """The parts of a step that this host copies or backs up.

        Raises:
          CheckpointError: if this host no longer has parts of the step in memory.
        """
        if step_id not in self.held:
            raise errors.CheckpointError(
                f"step {step_id.step} is no longer in this host's memory; save"
                " a different step"
            )
        return self.held[step_id]

    @calls.call()
    def new_save(self, after: str) -> str:
        """A name for new saves; as text, greater than `after` and this disk's saves.

        Args:
          after: the newest known save; empty if there is none.
        """
        # The time in milliseconds, but always increasing, because machine clocks
        # differ.
        known = [after, *(each.save for _, each in self.disk.all_saves())]
        newest = max((int(each) for each in known if each.isdecimal()), default=0)
        return f"{max(clock.time_ns() // 1_000_000, newest + 1):015d}"

    @calls.call()
    def secs_until_peers_are_asked(self) -> float:
        """The time until this host stops skipping failed peers, in seconds."""
        return self.client.left_skipped_secs()

    def _peers(self, urls: Sequence[str]) -> list[peer.Peer]:
        return [peer.Peer(url, self.client, self.run) for url in urls]

    def _endpoint_of(self, machine: str) -> peer_client.Endpoint:
        if machine not in self.agent_urls:
            raise ReadError(f"cannot be read: machine {machine} has no known agent")
        return self.client.endpoint(self.agent_urls[machine])
