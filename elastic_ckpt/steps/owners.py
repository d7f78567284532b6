"""Decides who copies and who uploads what some hosts hold.

Both are functions of the holders of an item, which the sharding names, and of the hosts
of the world: no host has to ask another.

Hosts stand on a circle, failure domain behind failure domain. The distant copy of an
item goes to the host one largest domain further on. If no domain has more than half of
the hosts, that is a permutation of them which leaves every domain: each host receives
as much as it sends. The hosts of a larger domain take turns with those outside. Close
copies go to the next hosts of the domain.

Failure domains are written as text, `rack=r7;zone=us-east5-a`, in configs and
environments. A config applies to all hosts; an environment variable names the domains
of one host. A Kubernetes pod gets its zone in this way (`configs/deploy`), and others
from its node's agent.

Glossary: i items, m copies.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import os
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from elastic_ckpt.core import errors
from elastic_ckpt.steps.manifest import Host

Holders = tuple[int, ...]
DOMAINS_VARIABLE = "ELASTIC_CKPT_DOMAINS"
# The kinds of domain of which `domain_kinds` chooses by default.
DEFAULT_DOMAIN = "zone;block;rack;slice"
_MOST_SHARE = 0.6


def parse_domains(text: str, *, what: str) -> dict[str, str]:
    """Parses the names of domains, by kind; a kind without a name is left out.

    Args:
      text: pairs, separated by `;`.
      what: the setting whose value it is, for messages.

    Raises:
      ConfigError: if the text has another form.
    """
    pairs = [pair for pair in text.split(";") if pair]
    wrong = [pair for pair in pairs if pair.find("=") < 1]
    if wrong:
        raise errors.ConfigError(
            f"{what}={text!r}: {wrong[0]!r} is not `kind=name`; write for example"
            " rack=r7;zone=us-east5-a"
        )
    named = (pair.partition("=") for pair in pairs)
    return {kind: name for kind, _, name in named if name}


def domains_of_environment() -> dict[str, str]:
    """Returns the domains that this host's environment names.

    Raises:
      ConfigError: as `parse_domains`.
    """
    return parse_domains(os.environ.get(DOMAINS_VARIABLE, ""), what=DOMAINS_VARIABLE)


def domain_kinds(hosts: Sequence[Host], kinds: str) -> tuple[str, str]:
    """Chooses the kinds of failure domain that one copy of everything is outside of.

    The larger the kind, the greater the loss that is survived. But if most hosts were
    in one domain, the copies of all of them would fill the memory of the few outside.

    Args:
      hosts: of a world.
      kinds: from large to small, separated by `;`.

    Returns:
      The first kind of which every host has a domain, and no domain more than
      `_MOST_SHARE` of the hosts, or the last kind if there is none; and the last kind,
      if it is another one of which each host has a domain, or else an empty text.
    """
    listed = kinds.split(";")
    outer = inner = listed[-1]
    for kind in reversed(listed):
        counts = collections.Counter(host.domains.get(kind) for host in hosts)
        if None not in counts and max(counts.values()) <= _MOST_SHARE * len(hosts):
            outer = kind
    is_another = inner != outer and all(inner in host.domains for host in hosts)
    return outer, inner if is_another else ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Policy:
    """How many copies, and what may fail at once.

    Attributes:
      copies: holders of each item besides the host that saved it, on other machines.
      domain: the kind of failure domain that comes and goes as a whole.
      inner: a smaller kind that does, too; empty if there is none.
      assume_data_parallelism: nothing is copied, for models whose copies would not fit
        into memory; what data parallelism alone leaves at risk is reported.
    """

    copies: int = 2
    domain: str = "slice"
    inner: str = ""
    assume_data_parallelism: bool = False


class Placement(NamedTuple):
    """The copies to make.

    Attributes:
      item: the number of the item of each copy, int64 `[m]`.
      source: the host that sends it, int64 `[m]`.
      target: the host that receives it, int64 `[m]`.
      shortfalls: what items lack even after all copies, a sentence each, the same on
        hosts with parts that lack the same.
      num_machines: the fewest that then have an item; 0 if one has no holder.
    """

    item: np.ndarray
    source: np.ndarray
    target: np.ndarray
    shortfalls: tuple[str, ...]
    num_machines: int


class Owners:
    """The hosts of a world, as holders of items.

    A host without the label `host`, which names its machine, counts as a machine of its
    own; without another one it is in the domain of all hosts without it: no guarantee
    goes beyond the labels.

    Args:
      hosts: by number.
      policy: how many copies, and where.
    """

    def __init__(self, hosts: Sequence[Host], policy: Policy) -> None:
        self._policy = policy
        self._domain = [host.domains.get(policy.domain, "") for host in hosts]
        self._machine = [host.domains.get("host", host.id) for host in hosts]
        # Without an inner kind each host is apart from all others.
        self._inner = [
            host.domains.get(policy.inner, "" if policy.inner else host.id)
            for host in hosts
        ]
        labels = [*zip(self._domain, self._inner, self._machine, strict=True)]
        self._circle = sorted(range(len(hosts)), key=lambda host: (labels[host], host))
        self._place = {host: place for place, host in enumerate(self._circle)}
        self._sizes = collections.Counter(self._domain)
        firsts = [(self._domain[host], self._place[host]) for host in self._circle]
        self._firsts = dict(reversed(firsts))
        self.copies = functools.cache(self._copies)

    def place(self, holders: Sequence[Holders], num_bytes: np.ndarray) -> Placement:
        """The fewest copies that give every item its holders.

        Args:
          holders: of each item, ascending.
          num_bytes: of each item, int64 `[i]`.
        """
        policy, senders = self._policy, shares(holders, num_bytes)
        copies = [
            self.copies(of_item, sender) if of_item else ()
            for of_item, sender in zip(holders, senders, strict=True)
        ]
        item = np.repeat(np.arange(len(copies)), [len(each) for each in copies])
        # The items of one set are alike.
        pairs = zip(holders, copies, strict=True)
        after = {(*of_item, *more) for of_item, more in pairs}
        domains = {self._count(self._domain, each) for each in after}
        machines = {self._count(self._machine, each) for each in after}
        num_machines = len({*self._machine})
        lacks = {
            "a holder in this world: until the next step is saved, only machines"
            " outside of it have them": 0 in machines,
            f"a distant holder: they are in one {policy.domain} of {len(self._sizes)}"
            " alone, and are lost with it; add one, or save them to the persistent"
            " tier": policy.copies > 0 and 1 in domains,
            f"copies: they are on fewer than {policy.copies + 1} machines, of"
            f" {num_machines}; add machines, or ask for fewer copies": any(
                0 < number <= policy.copies for number in machines
            ),
        }
        return Placement(
            item=item,
            source=np.array(senders, np.int64)[item],
            target=np.array([each for some in copies for each in some], np.int64),
            shortfalls=tuple(f"parts lack {what}" for what in lacks if lacks[what]),
            num_machines=min(machines, default=num_machines),
        )

    def _copies(self, holders: Holders, source: int) -> Holders:
        # The hosts that copy what `holders` hold, of which `source` sends.
        policy, held = self._policy, [*holders]
        for _ in range(0 if policy.assume_data_parallelism else policy.copies):
            leaves = self._count(self._domain, held) < 2 <= len(self._sizes)
            if leaves or self._count(self._machine, held) <= policy.copies:
                held += self._next(held, source, leaves=leaves)
        return tuple(held[len(holders) :])

    def _next(self, held: Sequence[int], source: int, *, leaves: bool) -> Sequence[int]:
        # The next holder: if possible in a domain without one, or in that of the
        # source, and in an inner domain without one. Empty if all machines have it.
        machines, domains, inner = (
            {of[host] for host in held}
            for of in (self._machine, self._domain, self._inner)
        )
        best: Sequence[int] = ()
        least: tuple[bool, ...] = (True,)
        for host in self._after(source, leaves=leaves):
            domain = self._domain[host]
            misses = (
                self._machine[host] in machines,
                domain in domains if leaves else domain != self._domain[source],
                self._inner[host] in inner,
            )
            if misses < least:
                best, least = (host,), misses
            if not any(misses):
                break
        return best

    def _after(self, source: int, *, leaves: bool) -> Iterator[int]:
        # All hosts from the one that follows `source`, or from the one that its distant
        # copy goes to.
        circle, domain = self._circle, self._domain[source]
        place, size = self._place[source], self._sizes[domain]
        begin, count, turn = place + 1, len(circle), 0
        if leaves:
            first = self._firsts[domain]
            begin, count = first + size, len(circle) - size
            turn = place - first + max(self._sizes.values()) - size
        turned = ((turn + number) % count for number in range(count))
        for offset in itertools.chain(turned, range(count, len(circle))):
            yield circle[(begin + offset) % len(circle)]

    def _count(self, labels: Sequence[str], hosts: Sequence[int]) -> int:
        return len({labels[host] for host in hosts})


def shares(holders: Sequence[Holders], num_bytes: np.ndarray) -> list[int]:
    """Which holder of each item uploads it, or sends its copies.

    The items of one set of holders lie on a line of bytes, in their order. Holder k of
    n takes those whose middle lies in the k-th n-th of the line. So the shares of all
    holders are equal, up to the largest item, whatever the order of sizes.

    Args:
      holders: of each item. A host needs to give all items that it holds itself, and
        no others.
      num_bytes: of each item, int64 `[i]`.

    Returns:
      A holder of each item; -1 if it has none.
    """
    middles: list[float] = []
    totals: collections.Counter[Holders] = collections.Counter()
    for of_item, size in zip(holders, num_bytes.tolist(), strict=True):
        middles.append(totals[of_item] + size / 2)
        totals[of_item] += size
    return [
        of_item[_turn(middle, totals[of_item], len(of_item))] if of_item else -1
        for of_item, middle in zip(holders, middles, strict=True)
    ]


def _turn(middle: float, total: int, num_holders: int) -> int:
    return min(int(middle / max(1, total) * num_holders), num_holders - 1)
