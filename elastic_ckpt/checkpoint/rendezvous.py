"""The rendezvous of the hosts of a new world: they agree on slots and on a secret.

All of it passes through the coordination service alone, the secret too: it is on no
command line, in no log, and not on the network that arrays take.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence

from elastic_ckpt.checkpoint.host.endpoint import HostEndpoint
from elastic_ckpt.checkpoint.hosts import Hosts
from elastic_ckpt.tiers import run_identity
from elastic_ckpt.tiers.peers import run_agents
from elastic_ckpt.tiers.run_identity import Identity


def join(
    hosts: Hosts, *, begin_writing: Callable[[Identity | None], None] = lambda _: None
) -> None:
    """Joins `hosts` to a world, in which they can read each other's RAM.

    Args:
      hosts: of the world.
      begin_writing: called with the identity of the run when all of them have their
        slots, before the first of them writes to storage.

    Raises:
      HostsFailedError: if a host cannot take part, with the reason.
      RunError: if the RAM disk of a host has steps of another run.
    """
    introduced = hosts.all(HostEndpoint.introduce)
    # Machines that were in a world before have its secret, and so have idle ones.
    secrets = [each.secret for each in introduced if each.secret is not None]
    secret = introduced[0].fresh_secret
    if secrets:
        secret = collections.Counter(secrets).most_common(1)[0][0]
    slots = slots_of([each.machine for each in introduced])
    identity = run_identity.agreed(
        introduced[0].stored,
        [each.disk for each in introduced],
        fresh=introduced[0].fresh_identity,
    )
    joined = hosts.all(HostEndpoint.join, slots, secret, identity)
    begin_writing(identity)
    agents = run_agents.joined(
        [each.agents for each in introduced],
        {
            each.agent.machine: each.agent.url
            for each in joined
            if each.agent is not None
        },
        now_secs=introduced[0].now_secs,
    )
    hosts.all(HostEndpoint.connect, tuple(each.host for each in joined), agents)


def slots_of(machines: Sequence[str]) -> tuple[int, ...]:
    """The slot of each host: how many hosts before it are on the same machine."""
    counts: collections.Counter[str] = collections.Counter()
    slots = []
    for machine in machines:
        slots.append(counts[machine])
        counts[machine] += 1
    return tuple(slots)
