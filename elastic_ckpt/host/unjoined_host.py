"""A host before it has joined a world: it is introduced, takes a slot, and connects."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import Any

from elastic_ckpt.core import addresses, working_directory
from elastic_ckpt.host.answers import Introduction, JoinedHost
from elastic_ckpt.host.world import HostConfig, HostWorld
from elastic_ckpt.manifests import failure_domains
from elastic_ckpt.manifests.manifest import Host
from elastic_ckpt.tiers import run_identity
from elastic_ckpt.tiers.peers import (
    agent,
    agent_process,
    known_agents,
    node_record,
    peer_client,
    secret,
    world_record,
)
from elastic_ckpt.tiers.ram import local, machine, ram_disk


class UnjoinedHost:
    """A host that has no slot of its machine yet.

    Args:
      config: of the host.
      resources: releases the slot, the agent and connections.
    """

    def __init__(self, config: HostConfig, resources: contextlib.ExitStack) -> None:
        self._config = config
        self._resources = resources
        if config.chosen.local is None:
            working = working_directory.WorkingDirectory(config.directory)
            resources.callback(working.close)
        local_tier = config.chosen.local
        self._disk = ram_disk.RamDisk(
            config.directory,
            run=config.run,
            limit_bytes=None if local_tier is None else local_tier.limit_bytes,
        )

    def introduce(self) -> Introduction:
        """Returns the facts that the others need before this host has a slot."""
        root = self._disk.root
        file = self._config.peer_tier.secret_file
        return Introduction(
            machine=self._disk.machine,
            secret=secret.find(root) if file is None else secret.read(file),
            fresh_secret=secret.new(),
            agents=known_agents.read(root),
            now_secs=time.time(),
            fresh_identity=run_identity.new_name(),
            disk=run_identity.of_disk(self._found),
            stored=self._stored(),
        )

    def lines(self) -> run_identity.Lines:
        """Returns the lines by which steps show whose they are."""
        persistent = self._config.chosen.persistent
        in_storage: tuple[run_identity.Saves, ...] = ()
        if persistent is not None and self._config.number == 0:
            in_storage = run_identity.lines_in_storage(persistent.directory)
        return run_identity.Lines(
            in_ram=run_identity.line_in_ram(self._found), in_storage=in_storage
        )

    def join(
        self,
        slots: Sequence[int],
        shared_secret: str,
        identity: run_identity.Identity | None,
    ) -> HostInSlot:
        """Takes a slot of the machine, adopts the secret, and starts the agent.

        Args:
          slots: of each host, by number.
          shared_secret: of the run.
          identity: of the run; None if it is not known.
        """
        config, disk = self._config, self._disk
        slot = slots[config.number]
        secret.adopt(disk.root, shared_secret)
        domains = {
            "host": disk.machine,
            "slice": config.slice_name,
            **self._node_domains(),
            **failure_domains.of_environment(),
            **config.peer_tier.domains,
        }
        own = local.LocalHost(disk, slot=slot, domains=domains, number=config.number)
        self._resources.callback(own.close)
        if slot == 0 and config.chosen.local is not None:
            machine.warn_unless_in_memory(disk.root)
        if identity is not None and config.chosen.local is not None:
            run_identity.write(disk, identity)
        address, service = None, None
        is_alone = config.chosen.peers is None and len(slots) == 1
        if slot == 0 and config.chosen.local is not None and not is_alone:
            service = self._service()
            own_agent = agent_process.AgentProcess(service, most_bytes=disk.limit_bytes)
            self._resources.callback(own_agent.close)
            address = own_agent.address
        return HostInSlot(
            config=config,
            own=own,
            address=address,
            service=service,
            resources=self._resources,
        )

    @property
    def _found(self) -> ram_disk.RamDisk:
        # The RAM disk that is there before this host has done anything.
        read_ram = self._config.chosen.read_ram
        if read_ram is None:
            return self._disk
        return ram_disk.RamDisk(read_ram, run=self._config.run)

    def _stored(self) -> run_identity.Place | None:
        persistent = self._config.chosen.persistent
        if persistent is None or self._config.number:
            return None
        return run_identity.of_storage(persistent.directory)

    def _node_domains(self) -> Mapping[str, str]:
        record = node_record.find(self._disk.root)
        return {} if record is None else record.domains

    def _service(self) -> agent.Service:
        peers = self._config.peer_tier
        return agent.Service(
            root=str(self._disk.root),
            interface=peers.interface or addresses.of_this_host(),
            port=peers.port,
            tls_certificate=None if peers.tls is None else peers.tls.certificate,
            tls_key=None if peers.tls is None else peers.tls.key,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostInSlot:
    """A host that has a slot of its machine, and no connection to the others yet.

    Attributes:
      config: of the host.
      own: its part of the machine's RAM disk.
      address: the address of the machine's agent, if this host has started it.
      service: of that agent; None if this host has not started it.
      resources: releases the connections.
    """

    config: HostConfig
    own: local.LocalHost
    address: agent.Address | None
    service: agent.Service | None
    resources: contextlib.ExitStack

    @property
    def joined(self) -> JoinedHost:
        """The host in the form that the others get."""
        return JoinedHost(host=self.own.host, agent=self.address)

    def connect(self, hosts: Sequence[Host], agents: Mapping[str, Any]) -> HostWorld:
        """Connects to the other hosts.

        Args:
          hosts: of the world, by number.
          agents: by machine, the addresses of agents, also those of idle machines.
        """
        config, disk = self.config, self.own.disk
        peers = config.peer_tier
        # Only now: hosts that are alive have their slots, so none of theirs is cleaned.
        self.own.clean()
        known_agents.write(disk.root, agents)
        client = peer_client.PeerClient(
            secret.read(secret.path(disk.root)),
            tls_ca=None if peers.tls is None else peers.tls.authority,
            timeout_secs=peers.timeout_secs,
            max_bytes_per_sec=peers.max_bytes_per_sec,
        )
        self.resources.callback(client.close)
        world = HostWorld(
            config,
            own=self.own,
            hosts=hosts,
            client=client,
            agents=agents,
            service=self.service,
        )
        self.resources.callback(world.close)
        if self.own.slot == 0 and config.chosen.peers is not None:
            # The last one: it has the agent of the node read the others.
            noted = world_record.WorldRecord(
                run=config.run,
                hosts=tuple(hosts),
                policy=world.copy_policy,
                limit_bytes=disk.limit_bytes,
                tls_ca=None if peers.tls is None else peers.tls.authority,
                max_bytes_per_sec=peers.max_bytes_per_sec,
                timeout_secs=peers.timeout_secs,
            )
            world_record.write(disk.root, noted)
        return world
