"""A host among the others of its world: its RAM disk, their agents, and storage."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import zlib
from collections.abc import Mapping, Sequence

from etils import epath

from elastic_ckpt.checkpoint.host.captured_step import CapturedStep
from elastic_ckpt.checkpoint.host.part_exchange import KINDS, Kind, Letter, PartExchange
from elastic_ckpt.core import calls, clock, errors
from elastic_ckpt.steps import failure_domains, owners
from elastic_ckpt.steps.holdings import Offer
from elastic_ckpt.steps.manifest import Host
from elastic_ckpt.steps.step_id import StepId
from elastic_ckpt.tiers.choices import Chosen, Peers
from elastic_ckpt.tiers.peers import mailbox, peer, peer_client
from elastic_ckpt.tiers.peers.run_agents import Seen
from elastic_ckpt.tiers.persistent import persistent_root, persistent_tier
from elastic_ckpt.tiers.ram import local, ram_disk
from elastic_ckpt.tiers.ram.machine import find as find_machine
from elastic_ckpt.tiers.source import ReadError, Source, Tier, merged

# The columns of messages are much alike, and speed counts.
_COMPRESSION = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Forwarded:
    """The part of a host in what agents did not send.

    Attributes:
      messages: by name, compressed.
    """

    messages: Mapping[str, bytes]


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostConfig:
    """The configuration of a host.

    Attributes:
      number: of the host in its world, from 0.
      run: the identity of the run.
      slice_name: the slice that it is in.
      directory: of the RAM disk; without a local tier, a directory of this world alone
        for files of components, removed at the end.
      chosen: the tiers; without a peer tier hosts serve each other, and copy nothing.
    """

    number: int
    run: str
    slice_name: str
    directory: epath.PathLike
    chosen: Chosen

    @property
    def peer_tier(self) -> Peers:
        """The peer tier, or one that copies nothing."""
        return self.chosen.peers or Peers(copies=0)


class HostWorld:
    """A host in a world that it has joined.

    Args:
      config: of the host.
      own: its part of the machine's RAM disk.
      hosts: all of the world, by number.
      client: of the agents of other machines.
      agents: their addresses, by machine; see `run_agents`.

    Attributes:
      run: the identity of the run.
      number: of this host in its world, from 0.
      own: this host's part of the RAM disk.
      disk: the RAM disk of this machine.
      hosts: all of the world, by number.
      local_tier: the local tier.
      peers: the peer tier; its `domain` is the kind that this world has.
      storage: the persistent tier as it was chosen; None if there is none.
      root: of persistent storage; None if there is none.
      persistent: the steps there; None if there is none.
      mail: of this host.
      client: of the agents of other machines.
      is_read_only: whether nothing is written, bad copies included.
      captured: the steps that this host backs up from the memory of their capture, by
        step and save.
      agent_urls: of the agents of all machines that are known, by machine.
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
        self.local_tier = config.chosen.local
        domain = failure_domains.kind_of(hosts, config.peer_tier.domain)
        kinds = config.peer_tier.domain
        self._inner_domain = failure_domains.inner_kind(hosts, kinds, domain)
        self.peers = dataclasses.replace(config.peer_tier, domain=domain)
        self.storage = config.chosen.persistent
        self.root: persistent_root.PersistentRoot | None = None
        self.persistent: persistent_tier.PersistentTier | None = None
        if self.storage is not None:
            self.root = persistent_root.PersistentRoot.from_path(self.storage.directory)
            self.persistent = persistent_tier.PersistentTier(self.root, run=self.run)
        self.is_read_only = config.chosen.is_read_only
        # The RAM disk of a program that runs, or ran.
        self._read_disk: ram_disk.RamDisk | None = None
        read_ram = config.chosen.read_ram
        if read_ram is not None and find_machine(read_ram) is not None:
            self._read_disk = ram_disk.RamDisk(read_ram, run=self.run)
        self.captured: dict[StepId, CapturedStep] = {}
        self.client = client
        self.agents = agents
        self.agent_urls = {machine: each.url for machine, each in agents.items()}
        announced = [
            url
            for machine, url in self.agent_urls.items()
            if machine != own.disk.machine
        ]
        given = dict.fromkeys([*config.peer_tier.known, *config.peer_tier.backups])
        # The agents of all other machines that are known.
        known = self.agent_urls.values()
        self._agents = [*announced, *(url for url in given if url not in known)]
        self.mail = mailbox.Mailbox(
            own.disk,
            slot=own.slot,
            hosts=hosts,
            endpoint=self._endpoint_of,
        )

    @property
    def copy_policy(self) -> owners.Policy:
        """How many copies of a step this world keeps in the memory of peers."""
        return owners.Policy(
            copies=self.peers.copies if len(self.hosts) > 1 else 0,
            domain=self.peers.domain,
            inner=self._inner_domain,
            assume_data_parallelism=self.peers.assume_data_parallelism,
        )

    @property
    def tiers(self) -> list[Tier]:
        """All tiers in which this host can look for steps, as they are now.

        Peers are asked for their lists of steps once: ask again for what is new.
        """
        more = [] if self.persistent is None else [self.persistent]
        return [*self.ram_tiers, *more]

    @property
    def ram_tiers(self) -> list[Tier]:
        """The tiers in the memory of this machine and of others, as `tiers`."""
        peers = peer.Peers([self.peer_at(url) for url in self._agents])
        read = [] if self._read_disk is None else [self._read_disk]
        return [*read, self.disk, peers]

    @functools.cached_property
    def exchanges(self) -> Mapping[Kind, PartExchange]:
        """This host's part in the exchanges of each kind."""
        number, num_hosts = self.number, len(self.hosts)
        return {
            kind: PartExchange(self.mail, kind, host=number, num_hosts=num_hosts)
            for kind in KINDS
        }

    @property
    def is_connected(self) -> bool:
        """Whether the machines of all hosts of the world have agents, or are this one.

        Hosts that keep nothing in RAM have none.
        """
        machines = {host.machine for host in self.hosts}
        return machines <= {self.disk.machine, *self.agent_urls}

    @property
    def idle_peers(self) -> list[peer.Peer]:
        """Machines that no host of the world is on, for which this host answers.

        As `tiers`: ask again for what is new.
        """
        machines = {host.machine for host in self.hosts}
        present = {self.agent_urls.get(machine) for machine in machines}
        idle = sorted(set(self._agents) - present)
        return [self.peer_at(url) for url in idle[self.number :: len(self.hosts)]]

    def source(self, host: Host, url: str, step_id: StepId) -> Source:
        """The source of the parts that a host holds of a save of a step.

        Args:
          host: the holder.
          url: of its agent; empty if its machine is one of the world.
          step_id: the step.

        Raises:
          CheckpointError: if nothing is known of its machine.
        """
        machine, slot = host.machine, host.slot
        if not url and machine == self.disk.machine and slot.isdecimal():
            directory = self.disk.step_directory(int(slot), step_id)
            return ram_disk.StepFiles(directory)
        url = url or self.agent_urls.get(machine, "")
        if not url:
            raise errors.CheckpointError(
                f"host {host.id}, which holds parts of step {step_id.step}, has"
                " announced no agent that serves them; start the run again"
            )
        return peer.PeerSource(self.client.endpoint(url), f"{slot}/{step_id}")

    def in_ram(self, step_id: StepId) -> dict[Offer, Source]:
        """Returns the offers in RAM of one save of a step, with their sources.

        Raises:
          CheckpointError: if there are no offers.
        """
        captured = self.captured.get(step_id)
        if captured is not None:
            return {captured.offer: captured}
        offered, problems = merged(tier.offers(step_id.step) for tier in self.ram_tiers)
        sources = {
            offer: source
            for offer, source in offered.items()
            if offer.manifest.save == step_id.save
        }
        if not sources:
            raise errors.CheckpointError(not_in_ram(step_id.step, problems))
        return sources

    @calls.call()
    def new_save(self, after: str) -> str:
        """A name for the saves from now on, greater as text than `after` and its own.

        Args:
          after: the name of the save that was found last; empty if there was none.
        """
        # The time, in milliseconds, but never back: clocks of machines differ.
        known = [self._newest_save(), int(after) if after.isdecimal() else 0]
        return f"{max(clock.time_ns() // 1_000_000, max(known) + 1):015d}"

    def peer_at(self, url: str) -> peer.Peer:
        """The RAM disk of a machine whose agent is known, as it is now."""
        return peer.Peer(url, self.client, self.run)

    @calls.call(channel="kind", order="up")
    def merge_parts(self, kind: Kind) -> tuple[Letter, ...]:
        """Merges again what is offered below this host; see `PartExchange.merge`."""
        return self.exchanges[kind].merge()

    @calls.call(channel="kind", order="down")
    def pass_parts(self, kind: Kind) -> tuple[Letter, ...]:
        """Takes this host's parts, and passes on others; see `PartExchange.pass_on`."""
        return self.exchanges[kind].pass_on()

    @calls.call(channel="kind")
    def forward_mail(self, kind: Kind, letters: tuple[Letter, ...]) -> Forwarded:
        """Returns the messages of this host that its machine's agent did not send.

        Args:
          kind: of the exchange.
          letters: that could not be read.
        """
        del kind
        messages = {}
        for letter in letters:
            if letter.writer == self.number:
                with contextlib.suppress(ReadError):
                    content = self.mail.read(self.number, letter.name)
                    messages[letter.name] = zlib.compress(content, _COMPRESSION)
        return Forwarded(messages=messages)

    @calls.call(channel="kind")
    def deliver_mail(
        self,
        kind: Kind,
        letters: tuple[Letter, ...],
        forwarded: tuple[Forwarded, ...],
    ) -> None:
        """Delivers what `forward_mail` returned.

        Args:
          kind: of the exchange.
          letters: that could not be read.
          forwarded: by each host, by number.
        """
        del kind
        for letter in letters:
            content = forwarded[letter.writer].messages.get(letter.name)
            if letter.reader == self.number and content is not None:
                self.mail.deliver(letter.writer, letter.name, zlib.decompress(content))

    @calls.call()
    def secs_until_peers_are_asked(self) -> float:
        """How long this host still leaves peers alone that have failed, in seconds."""
        return self.client.left_skipped_secs()

    def close(self) -> None:
        """Removes the messages of this host."""
        self.mail.remove("")

    def _endpoint_of(self, machine: str) -> peer_client.Endpoint:
        if machine not in self.agent_urls:
            raise ReadError(f"cannot be read: no agent is known of machine {machine}")
        return self.client.endpoint(self.agent_urls[machine])

    def _newest_save(self) -> int:
        saves = [
            each.save for _, each in self.disk.all_saves() if each.save.isdecimal()
        ]
        return max(map(int, saves), default=0)


def not_in_ram(step: int, problems: Sequence[str]) -> str:
    """Why a step cannot be read, if no host offers anything of it."""
    reasons = "; ".join(problems) or "no host has a manifest of it"
    return f"step {step} cannot be read in RAM ({reasons}); save another one"
