"""A host, which joins its world in four calls and then has the objects for its work.

facts        returns what must be the same on all hosts, which is compared first
introduce    returns the facts that other hosts need before this host has a slot
join         takes a slot of the machine, adopts the secret, starts the agent
connect      connects to the other hosts, and creates the objects for saves
             (`HostSaver`), copies, backups and restores

The function `join` makes these calls on all hosts of a new world and chooses their
slots and secret. All of this passes only through the coordination service: the secret
never appears on a command line, in a log, or on the network that carries arrays.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
import secrets
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from elastic_ckpt.checkpoint.host.backup import HostBackup
from elastic_ckpt.checkpoint.host.copies import HostCopies
from elastic_ckpt.checkpoint.host.reader import HostReader
from elastic_ckpt.checkpoint.host.saver import HostSaver
from elastic_ckpt.checkpoint.host.world import HostConfig, HostWorld
from elastic_ckpt.core import addresses, calls, clock, storage, working_directory
from elastic_ckpt.data import compatibility
from elastic_ckpt.steps import owners
from elastic_ckpt.steps.manifest import Host
from elastic_ckpt.tiers.peers import (
    agent,
    peer_client,
    secret,
)
from elastic_ckpt.tiers.persistent import claims, records, run_files
from elastic_ckpt.tiers.ram import local, machine, ram_disk

if TYPE_CHECKING:
    from elastic_ckpt.checkpoint.hosts import Hosts

# Creates a host's additional role objects, keyed by class name, from the existing ones.
MoreRoles = Callable[[Mapping[str, Any]], Mapping[str, Any]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Introduction:
    """The facts that other hosts need before this host has a slot.

    Attributes:
      secret: the run's secret, if the machine has it.
      fresh_secret: a new secret, for a run without a secret.
      agents: the agents that this machine has recorded; see `run_files`.
      now_secs: the current time, in seconds since 1970.
      fresh_identity: a new name, for a run without an identity.
      stored: on host 0, the persistent storage; None if there is none.
    """

    machine: str
    secret: str | None
    fresh_secret: str
    agents: Mapping[str, run_files.Seen]
    now_secs: float
    fresh_identity: str
    disk: run_files.StepsDirectory
    stored: run_files.StepsDirectory | None


class HostEndpoint:
    """A host, which runs calls.

    Args:
      more_roles: a function that creates the objects that a transport adds.
    """

    def __init__(
        self,
        config: HostConfig,
        more_roles: MoreRoles = lambda _: {},
    ) -> None:
        self._config = config
        self._more_roles = more_roles
        self._roles: dict[str, Any] = {"HostEndpoint": self}
        # Releases the slot, the agent and connections.
        self._resources = contextlib.ExitStack()
        self._own: local.LocalHost | None = None
        local_tier = config.chosen.local
        if local_tier is None:
            working = working_directory.WorkingDirectory(config.directory)
            self._resources.callback(working.close)
        self._disk = ram_disk.RamDisk(
            config.directory,
            run=config.run,
            limit_bytes=None if local_tier is None else local_tier.limit_bytes,
        )

    def role(self, name: str) -> Any:
        """The object of this class; most exist only once the world is joined."""
        assert name in self._roles, f"{name}: the host has not joined its world"
        return self._roles[name]

    @calls.call()
    def facts(self) -> dict[str, str]:
        """Returns what must be the same on all hosts, as text, keyed by name."""
        return {
            "the run's name (run=, by default the directory's name)": self._config.run,
            **self._config.chosen.shared,
            **compatibility.versions(),
        }

    @calls.call()
    def introduce(self) -> Introduction:
        """Returns the facts that other hosts need before this host has a slot."""
        config, root, found = self._config, self._disk.root, self._disk
        file = config.peer_tier.secret_file
        if config.chosen.read_ram is not None:
            found = ram_disk.RamDisk(config.chosen.read_ram, run=config.run)
        persistent = None if config.number else config.chosen.persistent
        return Introduction(
            machine=self._disk.machine,
            secret=secret.read(file) if file else secret.current(secret.path(root)),
            fresh_secret=secret.new(),
            agents=run_files.known_agents(root),
            now_secs=clock.time_ns() / 10**9,
            fresh_identity=secrets.token_hex(16),
            disk=run_files.steps_directory(
                found.root, has_steps=bool(found.all_saves())
            ),
            stored=run_files.steps_directory(persistent.directory)
            if persistent
            else None,
        )

    @calls.call()
    def join(
        self,
        slots: tuple[int, ...],
        shared_secret: str,
        identity: run_files.Identity | None,
    ) -> tuple[Host, agent.Address | None]:
        """Takes a slot of the machine, adopts the secret, and starts the agent.

        Returns:
          The host as manifests identify it, and the address of the machine's agent. The
          address is None for slots after the first, and in a single-host world without
          peers.
        """
        config, disk = self._config, self._disk
        slot = slots[config.number]
        disk.keep(secret.path(disk.root), secret.adopt, disk.root, shared_secret)
        domains = {
            "host": disk.machine,
            "slice": config.slice_name,
            **agent.domains(disk.root),
            **owners.domains_of_environment(),
            **config.peer_tier.domains,
        }
        own = local.LocalHost(disk, slot=slot, domains=domains, number=config.number)
        self._own = own
        self._resources.callback(own.close)
        if slot == 0 and config.chosen.local is not None:
            machine.warn_unless_in_memory(disk.root)
        if identity is not None and config.chosen.local is not None:
            path, content = disk.root / run_files.IDENTITY, records.to_bytes(identity)
            disk.keep(path, storage.write_atomic, path, content)
        is_alone = config.chosen.peers is None and len(slots) == 1
        if slot or config.chosen.local is None or is_alone:
            return own.host, None
        peers = config.peer_tier
        service = agent.Service(
            root=str(disk.root),
            interface=peers.interface or addresses.of_this_host(),
            port=peers.port,
            tls_certificate=None if peers.tls is None else peers.tls.certificate,
            tls_key=None if peers.tls is None else peers.tls.key,
        )
        of_machine = agent.AgentProcess(service)
        self._resources.callback(of_machine.close)
        path = disk.root / agent.ADDRESS_FILE
        disk.keep(path, agent.publish, disk.root, of_machine.address)
        return own.host, of_machine.address

    @calls.call()
    def connect(
        self, hosts: tuple[Host, ...], agents: Mapping[str, run_files.Seen]
    ) -> None:
        """Connects to the other hosts."""
        config, own, disk = self._config, self._own, self._disk
        assert own is not None
        # Only now have all live hosts locked their slots, so those are not cleaned.
        own.clean()
        record = run_files.RunAgents(config.run, agents)
        disk.keep(
            disk.root / run_files.AGENTS, run_files.write_agents, disk.root, record
        )
        peers = config.peer_tier
        client = peer_client.PeerClient(
            secret.read(secret.path(disk.root)),
            tls_ca=None if peers.tls is None else peers.tls.authority,
            timeout_secs=peers.timeout_secs,
            max_bytes_per_sec=peers.max_bytes_per_sec,
        )
        self._resources.callback(client.close)
        world = HostWorld(config, own=own, hosts=hosts, client=client, agents=agents)
        self._resources.callback(world.mail.remove, "")
        saver = HostSaver(world)
        # Component files of an unfinished step.
        self._resources.callback(storage.remove, saver.staging)
        roles: list[Any] = [world, saver, HostCopies(world), HostReader(world)]
        if world.root is not None:
            roles.append(HostBackup(world))
        self._roles |= {type(role).__name__: role for role in roles}
        self._roles |= self._more_roles(self._roles)

    @calls.call()
    def close(self) -> None:
        """Releases the host's resources; saved steps stay."""
        self._resources.close()


def join(hosts: Hosts, *, write_claim: claims.WriteClaim | None = None) -> None:
    """Joins `hosts` to a world, in which they can read each other's RAM.

    Args:
      hosts: all hosts of the world.
      write_claim: the write claim, made once all hosts have their slots; None if the
        hosts do not write to storage.

    Raises:
      ConfigError: if the hosts' versions, run names or tiers differ.
      HostsFailedError: if a host cannot join; the message says why.
      RunError: if a host's RAM disk has steps of another run.
    """
    # Compared before a host writes anything.
    compatibility.check(
        [
            {compatibility.HOST: f"host {number}", **facts}
            for number, facts in enumerate(hosts.all(HostEndpoint.facts))
        ]
    )
    introduced = hosts.all(HostEndpoint.introduce)
    # Idle machines have the latest world's secret. A machine that was not in that world
    # may have a different secret, created by its agent.
    known = [each for each in introduced if each.secret] or introduced
    newest = max(
        known,
        key=lambda each: max((seen.secs for seen in each.agents.values()), default=0.0),
    )
    shared = newest.secret or newest.fresh_secret
    # A host's slot is the number of hosts before it on the same machine.
    counts = collections.defaultdict[str, Iterator[int]](itertools.count)
    slots = [next(counts[each.machine]) for each in introduced]
    identity = run_files.agreed(
        introduced[0].stored,
        [each.disk for each in introduced],
        fresh=introduced[0].fresh_identity,
    )
    joined = hosts.all(HostEndpoint.join, tuple(slots), shared, identity)
    if write_claim is not None:
        write_claim.begin(identity)
    agents = run_files.joined_agents(
        [each.agents for each in introduced],
        {address.machine: address.url for _, address in joined if address is not None},
        now_secs=introduced[0].now_secs,
    )
    hosts.all(HostEndpoint.connect, tuple(host for host, _ in joined), agents)
