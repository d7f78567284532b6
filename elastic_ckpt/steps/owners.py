"""Decides which hosts copy and upload an item, without communication.

Both decisions depend only on the item's holders, which the sharding determines, and on
the hosts of the world.

Hosts are arranged in a circle, ordered by failure domain. With d hosts in the largest
domain, an item's distant copy goes to the host d places ahead. If no domain has more
than half of the hosts, this permutation maps every host out of its domain, and each
host receives as much as it sends. Otherwise, the hosts of the largest domain use the
hosts outside it round-robin. Close copies go to the next hosts in the domain.

Failure domains are written as `rack=r7;zone=us-east5-a`, for all hosts in the
configuration or for one host in an environment variable. A Kubernetes pod gets its zone
from the variable (`configs/deploy`) and other domains from its node's agent.

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
# The kinds of domain that `domain_kinds` chooses from by default.
DEFAULT_DOMAIN = "zone;block;rack;slice"
_MOST_SHARE = 0.6


def parse_domains(text: str, *, what: str) -> dict[str, str]:
    """Parses `kind=name;kind=name` to names, keyed by kind; skips empty names.

    Raises:
      ConfigError: if the text is malformed; the message names the setting `what`.
    """
    pairs = [pair for pair in text.split(";") if pair]
    wrong = [pair for pair in pairs if pair.find("=") < 1]
    if wrong:
        raise errors.ConfigError(
            f"{what}={text!r}: {wrong[0]!r} does not have the form `kind=name`; use a"
            " list such as rack=r7;zone=us-east5-a"
        )
    named = (pair.partition("=") for pair in pairs)
    return {kind: name for kind, _, name in named if name}


def domains_of_environment() -> dict[str, str]:
    """Returns this host's domains from its environment.

    Raises:
      ConfigError: see `parse_domains`.
    """
    return parse_domains(os.environ.get(DOMAINS_VARIABLE, ""), what=DOMAINS_VARIABLE)


def domain_kinds(hosts: Sequence[Host], kinds: str) -> tuple[str, str]:
    """Chooses the kinds of failure domain that need a copy outside the domain.

    A larger kind lets a run survive a larger loss. But if most hosts were in the same
    domain, their copies would fill the memory of the few hosts outside it.

    Args:
      hosts: all hosts of the world.
      kinds: kinds from large to small, separated by `;`.

    Returns:
      A tuple of the outer kind and the inner kind. The outer kind is the first one that
      every host has and whose largest domain has at most `_MOST_SHARE` of the hosts; if
      there is none, the last one. The inner kind is the last one, or an empty string if
      that is the outer kind or a host lacks it.
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
    """How many copies to make, and which hosts may fail together.

    Attributes:
      copies: the number of other machines that must hold the parts that a host saved.
      domain: the kind of failure domain that may be lost as a whole.
      inner: a smaller kind of domain that may also be lost as a whole; empty if there
        is none.
      assume_data_parallelism: whether to skip all copies, for models too large to copy;
        `CopyPlan.shortfalls` lists the resulting risks.
    """

    copies: int = 2
    domain: str = "slice"
    inner: str = ""
    assume_data_parallelism: bool = False


class CopyPlan(NamedTuple):
    """The copies to make.

    Attributes:
      item: the index of each copy's item, int64 `[m]`.
      source: the host that sends each copy, int64 `[m]`.
      target: the host that receives each copy, int64 `[m]`.
      shortfalls: a message for each requirement that items do not meet even after all
        copies; the message is the same on all hosts with such items.
      num_machines: the minimum number of machines that then have an item; 0 if an item
        has no holder.
    """

    item: np.ndarray
    source: np.ndarray
    target: np.ndarray
    shortfalls: tuple[str, ...]
    num_machines: int


class Owners:
    """The hosts of a world that hold items.

    A host without the label `host`, which identifies its machine, counts as a separate
    machine. Hosts that lack any other label count as one domain of that kind.
    Guarantees are only as good as the labels.
    """

    def __init__(self, hosts: Sequence[Host], policy: Policy) -> None:
        self._policy = policy
        self._domain = [host.domains.get(policy.domain, "") for host in hosts]
        self._machine = [host.domains.get("host", host.id) for host in hosts]
        # Without an inner kind, each host is its own domain.
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

    def plan_copies(
        self, holders: Sequence[Holders], num_bytes: np.ndarray
    ) -> CopyPlan:
        """Plans the minimum number of copies that satisfy the policy for every item.

        Args:
          holders: the indices of each item's hosts, in ascending order.
          num_bytes: the size of each item, int64 `[i]`.
        """
        policy, senders = self._policy, assign_holders(holders, num_bytes)
        copies = [
            self.copies(of_item, sender) if of_item else ()
            for of_item, sender in zip(holders, senders, strict=True)
        ]
        item = np.repeat(np.arange(len(copies)), [len(each) for each in copies])
        # Items with the same holders are copied to the same hosts.
        pairs = zip(holders, copies, strict=True)
        after = {(*of_item, *more) for of_item, more in pairs}
        domains = {self._count(self._domain, each) for each in after}
        machines = {self._count(self._machine, each) for each in after}
        num_machines = len({*self._machine})
        lacks = {
            "a holder in this world: until the next step is saved, only machines"
            " outside it have them": 0 in machines,
            f"a distant holder: they are all in one {policy.domain} (of"
            f" {len(self._sizes)}) and would be lost with it; add another, or save to"
            " the persistent tier": policy.copies > 0 and 1 in domains,
            f"copies: they are on fewer than {policy.copies + 1} machines (of"
            f" {num_machines}); add machines, or reduce the number of copies": any(
                0 < number <= policy.copies for number in machines
            ),
        }
        return CopyPlan(
            item=item,
            source=np.array(senders, np.int64)[item],
            target=np.array([each for some in copies for each in some], np.int64),
            shortfalls=tuple(f"parts lack {what}" for what in lacks if lacks[what]),
            num_machines=min(machines, default=num_machines),
        )

    def _copies(self, holders: Holders, source: int) -> Holders:
        # The hosts that copy from `source` an item that `holders` have.
        policy, held = self._policy, [*holders]
        for _ in range(0 if policy.assume_data_parallelism else policy.copies):
            leaves = self._count(self._domain, held) < 2 <= len(self._sizes)
            if leaves or self._count(self._machine, held) <= policy.copies:
                held += self._next(held, source, leaves=leaves)
        return tuple(held[len(holders) :])

    def _next(self, held: Sequence[int], source: int, *, leaves: bool) -> Sequence[int]:
        # The next holder: preferably in a new domain if the copy `leaves`, otherwise in
        # the source's domain, and in a new inner domain. Empty if all machines have the
        # item.
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
        # All hosts, starting after `source`, or at the target of its distant copy.
        circle, domain = self._circle, self._domain[source]
        place, size = self._place[source], self._sizes[domain]
        begin, count, rotation = place + 1, len(circle), 0
        if leaves:
            first = self._firsts[domain]
            begin, count = first + size, len(circle) - size
            rotation = place - first + max(self._sizes.values()) - size
        rotated = ((rotation + number) % count for number in range(count))
        for offset in itertools.chain(rotated, range(count, len(circle))):
            yield circle[(begin + offset) % len(circle)]

    def _count(self, labels: Sequence[str], hosts: Sequence[int]) -> int:
        return len({labels[host] for host in hosts})


def assign_holders(holders: Sequence[Holders], num_bytes: np.ndarray) -> list[int]:
    """Chooses the holder that uploads each item or sends its copies.

    The items of each set of n holders are concatenated and cut into n pieces of equal
    size. Holder k takes the items whose middle byte is in piece k. So the holders'
    shares are equal up to the size of one item, regardless of the order of sizes.

    Args:
      holders: the holders of each item. A host must list all items that it holds
        itself, and may omit other items.
      num_bytes: the size of each item, int64 `[i]`.

    Returns:
      The chosen holder of each item; -1 if the item has no holder.
    """
    middles: list[float] = []
    totals: collections.Counter[Holders] = collections.Counter()
    for of_item, size in zip(holders, num_bytes.tolist(), strict=True):
        middles.append(totals[of_item] + size / 2)
        totals[of_item] += size
    return [
        of_item[_index(middle, totals[of_item], len(of_item))] if of_item else -1
        for of_item, middle in zip(holders, middles, strict=True)
    ]


def _index(middle: float, total: int, num_holders: int) -> int:
    return min(int(middle / max(1, total) * num_holders), num_holders - 1)
