"""Decides who copies and who uploads what some hosts hold.

Both are functions of the holders of an item, which the sharding names, and of the hosts
of the world: no host has to ask another.

Hosts stand on a circle, failure domain behind failure domain. The distant copy of an
item goes to the host one largest domain further on. If no domain has more than half of
the hosts, that is a permutation of them which leaves every domain: each host receives
as much as it sends. The hosts of a larger domain take turns with those outside. Close
copies go to the next hosts of the domain.

Glossary: i items, m copies.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Callable, Collection, Iterator, Sequence

import numpy as np

from elastic_ckpt.steps.manifest import Host

Holders = tuple[int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Policy:
    """How many copies, and what may fail at once.

    Attributes:
      copies: holders of each item besides the host that saved it, on other machines.
      domain: the kind of failure domain that comes and goes as a whole.
      inner: a smaller kind that does, too; empty if there is none.
      machine: the kind of domain that names the machine, where several hosts share one.
      assume_data_parallelism: nothing is copied, for models whose copies would not fit
        into memory; what data parallelism alone leaves at risk is reported.
    """

    copies: int = 2
    domain: str = "slice"
    inner: str = ""
    machine: str = "host"
    assume_data_parallelism: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Placement:
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

    A host without a label of a kind counts as a machine of its own, in the domain of
    all hosts without one: no guarantee goes beyond the labels.

    Args:
      hosts: by number.
      policy: how many copies, and where.
    """

    def __init__(self, hosts: Sequence[Host], policy: Policy) -> None:
        self._policy = policy
        get = [host.domains.get for host in hosts]
        ids = [host.id for host in hosts]
        self._machine = [g(policy.machine, i) for g, i in zip(get, ids, strict=True)]
        self._domain = [each(policy.domain, "") for each in get]
        self._inner = [each(policy.inner, "") for each in get]

        def place(host: int) -> tuple[str, ...]:
            return tuple(of[host] for of in (self._domain, self._inner, self._machine))

        self._circle = sorted(range(len(hosts)), key=lambda host: (place(host), host))
        self._place = {host: place for place, host in enumerate(self._circle)}
        self._sizes = collections.Counter(self._domain)
        self._firsts = {
            self._domain[host]: self._place[host] for host in self._circle[::-1]
        }
        self._num_machines = len({*self._machine})
        self.copies = functools.cache(self._copies)

    def place(self, holders: Sequence[Holders], num_bytes: np.ndarray) -> Placement:
        """The fewest copies that give every item its holders.

        Args:
          holders: of each item, ascending.
          num_bytes: of each item, int64 `[i]`.
        """
        senders = shares(holders, num_bytes)
        copies = [
            self.copies(of_item, sender) if of_item else ()
            for of_item, sender in zip(holders, senders, strict=True)
        ]
        item = np.repeat(np.arange(len(copies)), [len(each) for each in copies])
        # The items of one set are alike.
        pairs = zip(holders, copies, strict=True)
        after = {(*of_item, *more) for of_item, more in pairs}
        return Placement(
            item=item,
            source=np.array(senders, np.int64)[item],
            target=np.array([each for some in copies for each in some], np.int64),
            shortfalls=tuple(self._shortfalls(after)),
            num_machines=min(
                (self._count(self._machine, each) for each in after),
                default=self._num_machines,
            ),
        )

    def _copies(self, holders: Holders, source: int) -> Holders:
        # The hosts that copy what `holders` hold, of which `source` sends.
        policy = self._policy
        if policy.assume_data_parallelism:
            return ()
        held = [*holders]
        for _ in range(policy.copies):
            leaves = self._count(self._domain, held) < 2 <= len(self._sizes)
            if self._count(self._machine, held) > policy.copies and not leaves:
                break
            target = self._next(held, source, leaves=leaves)
            if target is None:
                break
            held.append(target)
        return tuple(held[len(holders) :])

    def _next(self, held: Sequence[int], source: int, *, leaves: bool) -> int | None:
        # The next holder: if possible in a domain without one, or in that of the
        # source, and in an inner domain without one.
        machines, domains, inner = (
            {of[host] for host in held}
            for of in (self._machine, self._domain, self._inner)
        )
        best: tuple[tuple[bool, bool], int] | None = None
        for host in self._after(source, leaves=leaves):
            if self._machine[host] in machines:
                continue
            domain = self._domain[host]
            misses = (
                domain in domains if leaves else domain != self._domain[source],
                bool(self._policy.inner) and self._inner[host] in inner,
            )
            if best is None or misses < best[0]:
                best = misses, host
            if not any(misses):
                break
        return None if best is None else best[1]

    def _after(self, source: int, *, leaves: bool) -> Iterator[int]:
        # All hosts from the one that follows `source`, or from the one that its distant
        # copy goes to.
        circle = self._circle
        if not leaves:
            begin = self._place[source] + 1
            yield from (
                circle[n % len(circle)] for n in range(begin, begin + len(circle))
            )
            return
        size = self._sizes[self._domain[source]]
        first = self._firsts[self._domain[source]]
        num_outside = len(circle) - size
        turn = self._place[source] - first + max(self._sizes.values()) - size
        for number in range(num_outside):
            beyond = size + (turn + number) % num_outside
            yield circle[(first + beyond) % len(circle)]
        yield from circle[first : first + size]

    def _count(self, labels: Sequence[str], hosts: Sequence[int]) -> int:
        return len({labels[host] for host in hosts})

    def _shortfalls(self, items: Collection[Holders]) -> Iterator[str]:
        policy, domain = self._policy, self._policy.domain
        kinds: tuple[tuple[str, Callable[[Holders], bool], str], ...] = (
            (
                "any holder",
                lambda held: not held,
                "no host that is there has them; restore an older step",
            ),
            (
                "a distant holder",
                lambda held: policy.copies > 0 and self._count(self._domain, held) == 1,
                f"they are in one {domain} of {len(self._sizes)} alone, and are lost"
                " with it; add one, or save them to the persistent tier",
            ),
            (
                "copies",
                lambda held: 0 < self._count(self._machine, held) <= policy.copies,
                f"they are on fewer than {policy.copies + 1} machines, of"
                f" {self._num_machines}; add machines, or ask for fewer copies",
            ),
        )
        for lack, lacks, why in kinds:
            if any(map(lacks, items)):
                yield f"parts lack {lack}: {why}"


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
    middles = np.zeros(len(holders))
    totals: dict[Holders, int] = {}
    for number, of_item in enumerate(holders):
        begin = totals.get(of_item, 0)
        middles[number] = begin + num_bytes[number] / 2
        totals[of_item] = begin + int(num_bytes[number])
    return [
        of_item[_turn(middle, totals[of_item], len(of_item))] if of_item else -1
        for of_item, middle in zip(holders, middles.tolist(), strict=True)
    ]


def _turn(middle: float, total: int, num_holders: int) -> int:
    return min(int(middle / max(1, total) * num_holders), num_holders - 1)
