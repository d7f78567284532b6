"""Placement: chooses copy holders so that losing a host or a slice loses no box.

Every box, and every file of a component, gets `copies` holders besides the host that
saved it: first a distant one, in another failure domain, then close ones, in the domain
of the saver. Where domains are of two kinds, such as blocks and slices, these holders
are in different inner ones, if there are enough. Other hosts that saved the same with
the same values, as data parallelism makes them, count as holders, and so do copies that
were made already: an item that has its holders is never copied again.

Items with the same holders are copied in a few groups, so that each host sends to few
others, and to the same ones at the next step. Which host takes a group is decided by
hashing, under a bound on each host's load: each host is several points on the ring of
its failure domain, and the domains are points on a ring too. A group is copied to the
host that follows a hashed point, if that host may take it and its load stays below the
bound; otherwise the next hash is tried. So a host or domain that joins or leaves moves
few other items (consistent hashing: Karger et al. 1997; with bounded loads: Mirrokni,
Thorup and Zadimoghaddam 2016, arXiv:1608.01350).

Glossary: items as in `holdings`, g groups, h hosts, m copies.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from elastic_ckpt.core import columns, digest
from elastic_ckpt.steps.holdings import Holdings
from elastic_ckpt.steps.manifest import Host

# Groups of the items with the same holders: more groups balance better and take longer.
_GROUPS = 8
# Of a host on the ring of its domain, and the bits of a point's place on a ring.
_POINTS = 16
_POINT_BITS = np.uint64(40)
# The bound, as a multiple of the mean. After so many probes the next bound is used,
# because a bound may be unreachable: items and domains differ in size.
_SLACKS = (1.2, 1.4, 1.7, 2, 4, np.inf)
_PROBES_A_BOUND = 20
_PROBES = _PROBES_A_BOUND * len(_SLACKS)
# What two hosts can share: the machine, the failure domain, a smaller domain inside of
# that; or they are the same host.
_MACHINE, _DOMAIN, _INNER, _HOST = range(4)


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
      num_machines: the fewest that then have an item; 0 if one has no holder.
    """

    hosts: tuple[Host, ...]
    item: np.ndarray
    source: np.ndarray
    target: np.ndarray
    shortfalls: tuple[Shortfall, ...]
    num_machines: int


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
        num_machines=world.num_machines(holdings),
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
        self._holders = _Holders(receivers, len(chosen))
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
        num_domains, num_machines = held.num(_DOMAIN), held.num(_MACHINE)
        short = num_machines < policy.copies + 1
        distant = (num_domains < 2) & (there.num(_DOMAIN) > 1)
        home = there.domain[self._source]
        close = there.num_in(_MACHINE, home) > held.num_in(_MACHINE, home)
        if policy.inner:
            distant_apart = there.has_host_apart(self._source)
            close_apart = there.num_in(_INNER, home) > held.num_in(_INNER, home)
        else:
            distant_apart = close_apart = np.zeros(len(self._source), bool)
        target = np.full(len(self._source), -1)
        for candidates, asked in (
            (_Candidates(are_distant=True, are_apart=True), distant & distant_apart),
            (_Candidates(are_distant=True), distant),
            (_Candidates(are_close=True, are_apart=True), short & close & close_apart),
            (_Candidates(are_close=True), short & close),
            (_Candidates(are_distant=True), short & (num_domains < there.num(_DOMAIN))),
            (_Candidates(), short & (num_machines < there.num(_MACHINE))),
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
        in_domains = self._holders.num(_DOMAIN)[self._group]
        on_machines = self._holders.num(_MACHINE)[self._group]
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
                f"they are in one {policy.domain} of {there.num(_DOMAIN)} alone, and"
                " are lost with it; add one, or save them to the persistent tier",
            ),
            (
                few,
                "copies",
                f"they are on fewer than {policy.copies + 1} machines, of"
                f" {there.num(_MACHINE)}; add machines, or ask for fewer copies",
            ),
        ):
            if len(items):
                which = f"{len(items)} of {holdings.num_items} items"
                text = f"{which} lack {_LACKING[lacks]}: {why}"
                shortfalls.append(Shortfall(items=items, lacks=lacks, why=text))
        return tuple(shortfalls)

    def num_machines(self, holdings: Holdings) -> int:
        """The fewest machines that have an item at present; 0 if one has no holder."""
        if len(self._held) < holdings.num_items:
            return 0
        most = self._receivers.num(_MACHINE)
        return int(np.min(self._holders.num(_MACHINE), initial=most))

    def _choose(self, group: np.ndarray, candidates: _Candidates) -> np.ndarray:
        wanted = _Wanted(
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


def _receivers(hosts: tuple[Host, ...], policy: Policy) -> _Receivers:
    # A host without a label counts as a separate machine, in the domain of all hosts
    # without one: no guarantee goes beyond the labels.
    machines = [host.domains.get(policy.machine, host.id) for host in hosts]
    domains = [host.domains.get(policy.domain, "") for host in hosts]
    inner = [host.domains.get(policy.inner, "") for host in hosts]
    names = (machines, domains, inner)
    labels = [np.unique(each, return_inverse=True)[1] for each in names]
    return _Receivers(
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


class _Candidates(NamedTuple):
    """The hosts that may take a copy, never on a machine that has one.

    Attributes:
      are_close: those in the failure domain of the sender.
      are_distant: those in failure domains without a holder.
      are_apart: those in inner domains without a holder.
    """

    are_close: bool = False
    are_distant: bool = False
    are_apart: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class _Receivers:
    """The hosts that can take copies.

    Attributes:
      hashes: of the hosts' ids, uint64 `[h]`.
      labels: of each host, from 0 without gaps, its machine, domain, inner domain and
        number, int64 `[4, h]`.
      domain_hashes: of the domains' names, uint64.
    """

    hashes: np.ndarray
    labels: np.ndarray
    domain_hashes: np.ndarray

    @property
    def domain(self) -> np.ndarray:
        """The failure domain of each host, int64 `[h]`."""
        return self.labels[_DOMAIN]

    def num(self, kind: int) -> int:
        """Different labels of a kind."""
        return int(self.labels[kind].max(initial=-1)) + 1

    def num_in(self, kind: int, domain: np.ndarray) -> np.ndarray:
        """Different labels of a kind inside of some domains."""
        num = self.num(kind)
        pairs = columns.distinct(self.domain * num + self.labels[kind])
        return np.append(np.bincount(pairs // max(1, num)), 0)[domain]

    def has_host_apart(self, host: np.ndarray) -> np.ndarray:
        """Whether some host shares neither domain with each of some hosts."""
        inner = self.labels[_INNER]
        both = self.domain * self.num(_INNER) + inner
        shared, shared_inner, shared_both = (
            np.bincount(kind)[kind[host]] for kind in (self.domain, inner, both)
        )
        return shared + shared_inner - shared_both < len(self.hashes)

    def choose(
        self, wanted: _Wanted, held: _Holders, load: np.ndarray, candidates: _Candidates
    ) -> np.ndarray:
        """The host that takes each of the wanted copies, int64; -1 where none may.

        Args:
          wanted: the copies.
          held: the present holders of the groups.
          load: bytes that each host has, float `[h]`; what it takes is added.
          candidates: the hosts to choose from.
        """
        chosen = np.full(len(wanted.group), -1)
        pending = np.arange(len(chosen))
        hosts = _Rings(self.hashes, self.domain)
        domains = _Rings(
            self.domain_hashes, np.zeros_like(self.domain_hashes, np.int64)
        )
        bound = np.zeros_like(load)
        for probe in range(_PROBES):
            if not len(pending):
                break
            if probe % _PROBES_A_BOUND == 0:
                slack = _SLACKS[probe // _PROBES_A_BOUND]
                bound = slack * self._bound(wanted, load, pending, candidates)
            probed = digest.mixed(wanted.key[pending], np.array([probe]))
            if candidates.are_close:
                domain = wanted.domain[pending]
            else:
                domain = domains.after(np.zeros(len(pending), np.int64), probed)
            host = hosts.after(domain, digest.mixed(probed))
            may = self._may(wanted.group[pending], host, held, candidates)
            taken = np.flatnonzero(may)
            fits = _fit(host[taken], wanted.bytes[pending[taken]], load, bound)
            taken = taken[fits]
            chosen[pending[taken]] = host[taken]
            np.add.at(load, host[taken], wanted.bytes[pending[taken]])
            pending = np.delete(pending, taken)
        for each in pending:
            chosen[each] = self._least_loaded(wanted, int(each), held, load, candidates)
        return chosen

    def _bound(
        self,
        wanted: _Wanted,
        load: np.ndarray,
        pending: np.ndarray,
        candidates: _Candidates,
    ) -> np.ndarray:
        # The mean load after all copies, over the hosts that may share them, for each
        # host.
        size = wanted.bytes[pending]
        least = size.max(initial=0)
        hosts = np.bincount(self.domain)
        there = np.bincount(self.domain, load, len(hosts))
        coming = np.bincount(wanted.domain[pending], size, len(hosts))
        if candidates.are_close:
            return np.maximum(((there + coming) / hosts)[self.domain], least)
        mean = (load.sum() + size.sum()) / len(load)
        # Copies from a domain go outside of it: a host has a share of the copies of the
        # domain with the least room outside, its own domain not counted.
        outside = np.maximum(len(load) - hosts, 1)
        shares = (load.sum() - there + coming) / outside
        first, second = np.sort(np.append(shares, [0, 0]))[[-1, -2]]
        others = np.where(shares == first, second, first)[self.domain]
        return np.maximum(others, max(mean, least))

    def _may(
        self,
        group: np.ndarray,
        host: np.ndarray,
        held: _Holders,
        candidates: _Candidates,
    ) -> np.ndarray:
        may = ~held.has(_MACHINE, group, host)
        if candidates.are_distant:
            may &= ~held.has(_DOMAIN, group, host)
        if candidates.are_apart:
            may &= ~held.has(_INNER, group, host)
        return may

    def _least_loaded(
        self,
        wanted: _Wanted,
        each: int,
        held: _Holders,
        load: np.ndarray,
        candidates: _Candidates,
    ) -> int:
        hosts = np.arange(len(load))
        if candidates.are_close:
            hosts = np.flatnonzero(self.domain == wanted.domain[each])
        group = np.full(len(hosts), wanted.group[each])
        hosts = hosts[self._may(group, hosts, held, candidates)]
        if not len(hosts):
            return -1
        host = int(hosts[np.lexsort([self.hashes[hosts], load[hosts]])[0]])
        load[host] += wanted.bytes[each]
        return host


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class _Wanted:
    """Copies that are to be made, one a row.

    Attributes:
      group: what is copied, int64.
      key: decides which points are probed, uint64.
      domain: that of the host which sends it, int64.
      bytes: its size, float.
    """

    group: np.ndarray
    key: np.ndarray
    domain: np.ndarray
    bytes: np.ndarray


class _Holders:
    """The holders of each group: pairs of a group and a host, to which pairs are added.

    Args:
      receivers: the hosts.
      num_groups: g.
    """

    def __init__(self, receivers: _Receivers, num_groups: int) -> None:
        self._receivers = receivers
        self._num_groups = num_groups
        # For each kind of label, the pairs of a group and a label as one number.
        self._pairs = [np.empty(0, np.int64) for _ in receivers.labels]

    def add(self, group: np.ndarray, host: np.ndarray) -> None:
        """Adds pairs of a group and a host that holds it."""
        for kind, pairs in enumerate(self._pairs):
            more = self._pair(kind, group, host)
            self._pairs[kind] = columns.distinct(np.concatenate([pairs, more]))

    def has(self, kind: int, group: np.ndarray, host: np.ndarray) -> np.ndarray:
        """Whether a holder of each group shares the label of a kind with a host."""
        pairs, sought = self._pairs[kind], self._pair(kind, group, host)
        place = np.searchsorted(pairs, sought)
        return np.append(pairs, -1)[place] == sought

    def num(self, kind: int) -> np.ndarray:
        """Different labels of a kind that have each group, int64 `[g]`."""
        group = self._pairs[kind] // max(1, self._receivers.num(kind))
        return np.bincount(group, minlength=self._num_groups)

    def num_in(self, kind: int, domain: np.ndarray) -> np.ndarray:
        """Different labels with each group in one domain of each, int64 `[g]`."""
        there = self._receivers
        group, host = np.divmod(self._pairs[_HOST], max(1, len(there.hashes)))
        inside = there.domain[host] == domain[group]
        labels = columns.distinct(self._pair(kind, group, host)[inside])
        groups = labels // max(1, there.num(kind))
        return np.bincount(groups, minlength=self._num_groups)

    def _pair(self, kind: int, group: np.ndarray, host: np.ndarray) -> np.ndarray:
        return group * self._receivers.num(kind) + self._receivers.labels[kind][host]


class _Rings:
    """Members as points on rings, which lie one behind the other on a line.

    Args:
      hashes: of the members, uint64 `[m]`.
      ring: that each is on, from 0 without gaps, int64 `[m]`.
    """

    def __init__(self, hashes: np.ndarray, ring: np.ndarray) -> None:
        member, turn = columns.runs(np.full(len(hashes), _POINTS))
        points = _point(ring[member], digest.mixed(hashes[member], turn))
        order = np.argsort(points, kind="stable")
        self._member, self._points = member[order], points[order]
        on = np.arange(int(ring.max(initial=-1)) + 2)
        self._bounds = np.searchsorted(ring[self._member], on)

    def after(self, ring: np.ndarray, hashed: np.ndarray) -> np.ndarray:
        """The members that follow hashed points on some rings, int64."""
        place = np.searchsorted(self._points, _point(ring, hashed))
        first, end = self._bounds[ring], self._bounds[ring + 1]
        return self._member[np.where(place < end, place, first)]


def _point(ring: np.ndarray, hashed: np.ndarray) -> np.ndarray:
    above = ring.astype(np.uint64) << _POINT_BITS
    return above | (hashed >> (np.uint64(64) - _POINT_BITS))


def _fit(
    host: np.ndarray, size: np.ndarray, load: np.ndarray, bound: np.ndarray
) -> np.ndarray:
    # Whether each copy still fits after all earlier ones to the same host.
    order = np.argsort(host, kind="stable")
    total = np.cumsum(size[order])
    begins = np.searchsorted(host[order], host[order])
    before = total[begins] - size[order][begins]
    fits = np.empty(len(host), bool)
    to = host[order]
    fits[order] = load[to] + total - before <= bound[to]
    return fits
