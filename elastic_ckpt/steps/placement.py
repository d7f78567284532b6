"""Placement: chooses copy holders so that losing a host or a slice loses no box.

Every box, and every file of a component, gets `copies` holders besides the host that
saved it: first a distant one, in another failure domain, then close ones, in the domain
of the saver. Where domains are of two kinds, such as blocks and slices, these holders
are in different inner ones, if there are enough. Other hosts that saved the same with
the same values, as data parallelism makes them, count as holders, and so do copies that
were made already: an item that has its holders is never copied again.

Items with the same holders are copied in a few groups (`receivers` chooses their
hosts), so that each host sends to few others, and to the same ones at the next step.

Glossary: items as in `holdings`, g groups, h hosts, m copies.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from elastic_ckpt.core import columns, digest
from elastic_ckpt.steps.holdings import Holdings
from elastic_ckpt.steps.manifest import Host
from elastic_ckpt.steps.receivers import (
    DOMAIN,
    INNER,
    MACHINE,
    Candidates,
    Holders,
    Receivers,
    Wanted,
)

# Groups of the items with the same holders: more groups balance better and take longer.
_GROUPS = 8


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
class Shortfall:
    """Items that lack holders that the policy requires.

    Attributes:
      items: their numbers in the holdings, ascending, int64.
      lacks: the kind of lack: `holder`, `domain` (a second failure domain), `copies`,
        or `agreement` between their holders.
      why: a sentence for people, with the remedy.
    """

    items: np.ndarray
    lacks: str
    why: str


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Placement:
    """The copies to make.

    Attributes:
      hosts: ordered by id.
      item: of each copy, its number in the holdings, int64 `[m]`.
      source: the number in `hosts` of the holder that sends, int64 `[m]`.
      target: the number in `hosts` of the host that receives, int64 `[m]`.
      shortfalls: items that miss a guarantee even after all copies.
    """

    hosts: tuple[Host, ...]
    item: np.ndarray
    source: np.ndarray
    target: np.ndarray
    shortfalls: tuple[Shortfall, ...]


def place(
    holdings: Holdings, hosts: Sequence[Host], policy: Policy = Policy()
) -> Placement:
    """Chooses the fewest copies that give every item its holders.

    Args:
      holdings: of one step, in the local tiers; others do not count.
      hosts: of the present world. Holders that are not among them do not count.
      policy: how many copies, and where.
    """
    world = _World(holdings, hosts, policy)
    none = np.empty(0, np.int64)
    num_copies = 0 if policy.assume_data_parallelism else policy.copies
    copies = [(none,) * 3, *(world.copy(policy) for _ in range(num_copies))]
    group, source, target = (
        np.concatenate(column) for column in zip(*copies, strict=True)
    )
    item, row = world.items_of(group)
    return Placement(
        hosts=world.hosts,
        item=item,
        source=source[row],
        target=target[row],
        shortfalls=world.shortfalls(holdings, policy),
    )


class _World:
    """Groups of items, their holders, and the load of each host."""

    def __init__(
        self, holdings: Holdings, hosts: Sequence[Host], policy: Policy
    ) -> None:
        self.hosts = tuple(sorted(hosts, key=lambda host: host.id))
        self._receivers = receivers = _receivers(self.hosts, policy)
        item, host = _rows(holdings, self.hosts)
        self._load = np.bincount(
            host, holdings.stored_bytes[item], len(self.hosts)
        ).astype(float)
        # Items that a host has, and their groups.
        self._held, first = np.unique(item, return_index=True)
        bucket = _names(holdings)[self._held] % np.uint64(_GROUPS)
        ends = np.append(first, len(item))
        # Sets of holders are compared by sums of 64 bits: 1e6 sets collide by 1e-7.
        sums = np.append(np.uint64(0), np.cumsum(digest.mixed(receivers.hashes)[host]))
        sets = sums[ends[1:]] - sums[ends[:-1]]
        _, chosen, self._group = np.unique(
            digest.mixed(sets, bucket), return_index=True, return_inverse=True
        )
        self._bytes = np.bincount(
            self._group, holdings.stored_bytes[self._held], len(chosen)
        )
        sizes = ends[chosen + 1] - ends[chosen]
        group, within = columns.runs(sizes)
        holder = host[ends[chosen][group] + within]
        self._holders = Holders(receivers, len(chosen))
        self._holders.add(group, holder)
        # Among several holders the one with the highest hash sends (rendezvous hashing:
        # Thaler and Ravishankar 1998), so hosts that join or leave change little.
        key = digest.mixed(receivers.hashes[holder], bucket[chosen][group])
        order = np.lexsort([key, group])
        last = np.cumsum(sizes) - 1
        self._source, self._key = holder[order][last], key[order][last]

    def copy(self, policy: Policy) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """One more copy of each group that needs one: group, source, target."""
        there, held = self._receivers, self._holders
        num_domains, num_machines = held.num(DOMAIN), held.num(MACHINE)
        short = num_machines < policy.copies + 1
        distant = (num_domains < 2) & (there.num(DOMAIN) > 1)
        home = there.domain[self._source]
        close = there.num_in(MACHINE, home) > held.num_in(MACHINE, home)
        if policy.inner:
            distant_apart = there.has_host_apart(self._source)
            close_apart = there.num_in(INNER, home) > held.num_in(INNER, home)
        else:
            distant_apart = close_apart = np.zeros(len(self._source), bool)
        target = np.full(len(self._source), -1)
        for candidates, asked in (
            (Candidates(are_distant=True, are_apart=True), distant & distant_apart),
            (Candidates(are_distant=True), distant),
            (Candidates(are_close=True, are_apart=True), short & close & close_apart),
            (Candidates(are_close=True), short & close),
            (Candidates(are_distant=True), short & (num_domains < there.num(DOMAIN))),
            (Candidates(), short & (num_machines < there.num(MACHINE))),
        ):
            group = np.flatnonzero(asked & (target < 0))
            if len(group):
                target[group] = self._choose(group, candidates)
        group = np.flatnonzero(target >= 0)
        self._holders.add(group, target[group])
        return group, self._source[group], target[group]

    def items_of(self, group: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the items of some groups, and the index of each one's group."""
        order = columns.order(self._group)
        bounds = np.searchsorted(self._group[order], np.arange(len(self._source) + 1))
        sizes = bounds[group + 1] - bounds[group]
        row, within = columns.runs(sizes)
        return self._held[order[bounds[group][row] + within]], row

    def shortfalls(self, holdings: Holdings, policy: Policy) -> tuple[Shortfall, ...]:
        """Returns the items that lack holders at present."""
        there = self._receivers
        in_domains = self._holders.num(DOMAIN)[self._group]
        on_machines = self._holders.num(MACHINE)[self._group]
        there_is = np.zeros(holdings.num_items, bool)
        there_is[self._held] = True
        lost = np.flatnonzero(~there_is)
        alone = self._held[in_domains < 2] if policy.copies else lost[:0]
        few = self._held[on_machines < policy.copies + 1]
        shortfalls = []
        for items, lacks, why in (
            (
                holdings.diverged,
                "agreement",
                "their holders saved different values: a device computes wrongly",
            ),
            (lost, "holder", "no host that is there has them; restore an older step"),
            (
                alone,
                "domain",
                f"they are in one {policy.domain} of {there.num(DOMAIN)} alone, and are"
                " lost with it; add one, or save them to the persistent tier",
            ),
            (
                few,
                "copies",
                f"they are on fewer than {policy.copies + 1} machines, of"
                f" {there.num(MACHINE)}; add machines, or ask for fewer copies",
            ),
        ):
            if len(items):
                which = f"{len(items)} of {holdings.num_items} items"
                text = f"{which} lack {_LACKING[lacks]}: {why}"
                shortfalls.append(Shortfall(items=items, lacks=lacks, why=text))
        return tuple(shortfalls)

    def _choose(self, group: np.ndarray, candidates: Candidates) -> np.ndarray:
        wanted = Wanted(
            group=group,
            key=self._key[group],
            domain=self._receivers.domain[self._source[group]],
            bytes=self._bytes[group],
        )
        return self._receivers.choose(wanted, self._holders, self._load, candidates)


_LACKING = {
    "agreement": "agreement",
    "holder": "any holder",
    "domain": "a distant holder",
    "copies": "copies",
}


def _receivers(hosts: tuple[Host, ...], policy: Policy) -> Receivers:
    # A host without a label counts as a separate machine, in the domain of all hosts
    # without one: no guarantee goes beyond the labels.
    machines = [host.domains.get(policy.machine, host.id) for host in hosts]
    domains = [host.domains.get(policy.domain, "") for host in hosts]
    inner = [host.domains.get(policy.inner, "") for host in hosts]
    names = (machines, domains, inner)
    labels = [np.unique(each, return_inverse=True)[1] for each in names]
    return Receivers(
        hashes=np.array([digest.name_hash(host.id) for host in hosts], np.uint64),
        labels=np.array([*labels, np.arange(len(hosts))], np.int64),
        domain_hashes=np.array(
            [digest.name_hash(name) for name in sorted(set(domains))], np.uint64
        ),
    )


def _rows(holdings: Holdings, hosts: tuple[Host, ...]) -> tuple[np.ndarray, np.ndarray]:
    # Every pair of an item and a host that is there and has it, ascending.
    host = holdings.host_of_rows(hosts)
    there = host >= 0
    pairs = columns.distinct(holdings.item[there] * len(hosts) + host[there])
    return pairs // max(1, len(hosts)), pairs % max(1, len(hosts))


def _names(holdings: Holdings) -> np.ndarray:
    # 64 bits for each item, the same in every step that has it.
    saved = holdings.boxes
    boxes = digest.mixed(holdings.leaf, *saved.start.T, *saved.stop.T)
    files = [digest.name_hash(file.path) for file in holdings.files]
    return np.concatenate([boxes, np.array(files, np.uint64)])
