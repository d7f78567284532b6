"""Joining: the hosts of a new world learn of each other, and agree on the run's secret.

What they say goes through the coordination service alone, the secret too: nobody finds
it on a command line, in a log, or on the network that arrays take.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence

from elastic_ckpt.checkpoint.hosts import Hosts
from elastic_ckpt.tiers.peers import known_agents


def join(hosts: Hosts) -> None:
    """Makes a world of `hosts`: from now on they find each other's RAM.

    Raises:
      HostsFailed: if a host cannot take part, with the reason.
    """
    introduced = hosts.all("world.introduce")
    slots = slots_of([each["machine"] for each in introduced])
    # Machines that were in a world before have its secret, and so have those that idle.
    known = [each["secret"] for each in introduced if each["secret"] is not None]
    secret = introduced[0]["fresh_secret"]
    if known:
        secret = collections.Counter(known).most_common(1)[0][0]
    joined = hosts.all("world.join", slots, secret)
    agents = known_agents.joined(
        [each["agents"] for each in introduced],
        {
            each["agent"]["machine"]: {
                "url": each["agent"]["url"],
                "certificate_sha256": each["agent"]["certificate_sha256"],
            }
            for each in joined
            if each["agent"] is not None
        },
        now_secs=introduced[0]["now_secs"],
    )
    hosts.all("world.meet", [each["host"] for each in joined], agents)


def slots_of(machines: Sequence[str]) -> list[int]:
    """Of each host, how many before it are on the same machine."""
    seen: collections.Counter[str] = collections.Counter()
    slots = []
    for machine in machines:
        slots.append(seen[machine])
        seen[machine] += 1
    return slots
