"""Receivers: which host takes a copy, by hashing, under a bound on each host's load.

Each host is several points on the ring of its failure domain, and the domains are
points on a ring too. An item is copied to the host that follows a hashed point, if that
host may take it and its load stays below the bound; otherwise the next hash is tried.
So a host or domain that joins or leaves moves few other items (consistent hashing:
Karger et al. 1997; with bounded loads: Mirrokni, Thorup and Zadimoghaddam 2016,
arXiv:1608.01350).

Glossary: g groups of items with the same holders, h hosts.
"""

from __future__ import annotations

import dataclasses
import enum

import numpy as np

from elastic_ckpt.core import columns, digest

_POINT_BITS = np.uint64(40)
_POINTS = 16
# The bound, as a multiple of the mean. After so many probes the next bound is used,
# because a bound may be unreachable: items and domains differ in size.
_SLACKS = (1.2, 1.4, 1.7, 2, 4, np.inf)
_PROBES_A_BOUND = 20
_PROBES = _PROBES_A_BOUND * len(_SLACKS)


@enum.unique
class Candidates(enum.Enum):
    """The hosts that may take a copy, never on a machine that has one."""

    CLOSE = "those in the failure domain of the sender"
    CLOSE_APART = "those in its failure domain, in inner ones without a holder"
    DISTANT = "those in failure domains without a holder"
    DISTANT_APART = "those in domains of both kinds without a holder"
    ANYWHERE = "all of them"

    @property
    def is_close(self) -> bool:
        """Whether all are in the failure domain of the sender."""
        return self in (Candidates.CLOSE, Candidates.CLOSE_APART)

    @property
    def is_distant(self) -> bool:
        """Whether all are in failure domains without a holder."""
        return self in (Candidates.DISTANT, Candidates.DISTANT_APART)

    @property
    def is_apart(self) -> bool:
        """Whether all are in inner domains without a holder."""
        return self in (Candidates.CLOSE_APART, Candidates.DISTANT_APART)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Receivers:
    """The hosts that can take copies.

    Attributes:
      hashes: of the hosts' ids, uint64 `[h]`.
      machine: of each host, from 0 without gaps, int64 `[h]`.
      domain: of each host, from 0 without gaps, int64 `[h]`.
      inner: of each host its smaller failure domain, from 0 without gaps, int64 `[h]`.
      domain_hashes: of the domains' names, uint64.
    """

    hashes: np.ndarray
    machine: np.ndarray
    domain: np.ndarray
    inner: np.ndarray
    domain_hashes: np.ndarray

    @property
    def num_machines(self) -> int:
        """Different machines."""
        return int(self.machine.max(initial=-1)) + 1

    @property
    def num_domains(self) -> int:
        """Different failure domains."""
        return len(self.domain_hashes)

    @property
    def num_inner(self) -> int:
        """Different inner domains."""
        return int(self.inner.max(initial=-1)) + 1

    def num_machines_in(self, domain: np.ndarray) -> np.ndarray:
        """Different machines of some domains."""
        return self._num_in(domain, self.machine, self.num_machines)

    def num_inner_in(self, domain: np.ndarray) -> np.ndarray:
        """Different inner domains of some domains."""
        return self._num_in(domain, self.inner, self.num_inner)

    def has_host_apart(self, host: np.ndarray) -> np.ndarray:
        """Whether some host shares neither domain with each of some hosts."""
        both = self.domain * self.num_inner + self.inner
        shared, shared_inner, shared_both = (
            np.bincount(kind)[kind[host]] for kind in (self.domain, self.inner, both)
        )
        return shared + shared_inner - shared_both < len(self.hashes)

    def _num_in(
        self, domain: np.ndarray, label: np.ndarray, num_labels: int
    ) -> np.ndarray:
        pairs = columns.distinct(self.domain * num_labels + label)
        counts = np.bincount(pairs // max(1, num_labels))
        return np.append(counts, 0)[domain]

    def choose(
        self, wanted: Wanted, held: Holders, load: np.ndarray, candidates: Candidates
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
        domains = _Rings(self.domain_hashes, np.zeros(self.num_domains, np.int64))
        bound = np.zeros_like(load)
        for probe in range(_PROBES):
            if not len(pending):
                break
            if probe % _PROBES_A_BOUND == 0:
                slack = _SLACKS[probe // _PROBES_A_BOUND]
                bound = slack * self._bound(wanted, load, pending, candidates)
            probed = digest.mixed(wanted.key[pending], np.array([probe]))
            if candidates.is_close:
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
        wanted: Wanted,
        load: np.ndarray,
        pending: np.ndarray,
        candidates: Candidates,
    ) -> np.ndarray:
        # The mean load after all copies, over the hosts that may share them, for each
        # host.
        size = wanted.bytes[pending]
        least = size.max(initial=0)
        hosts = np.bincount(self.domain)
        there = np.bincount(self.domain, load, len(hosts))
        coming = np.bincount(wanted.domain[pending], size, len(hosts))
        if candidates.is_close:
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
        self, group: np.ndarray, host: np.ndarray, held: Holders, candidates: Candidates
    ) -> np.ndarray:
        may = ~held.on_machine(group, self.machine[host])
        if candidates.is_distant:
            may &= ~held.in_domain(group, self.domain[host])
        if candidates.is_apart:
            may &= ~held.in_inner(group, self.inner[host])
        return may

    def _least_loaded(
        self,
        wanted: Wanted,
        each: int,
        held: Holders,
        load: np.ndarray,
        candidates: Candidates,
    ) -> int:
        hosts = np.arange(len(load))
        if candidates.is_close:
            hosts = np.flatnonzero(self.domain == wanted.domain[each])
        group = np.full(len(hosts), wanted.group[each])
        hosts = hosts[self._may(group, hosts, held, candidates)]
        if not len(hosts):
            return -1
        host = int(hosts[np.lexsort([self.hashes[hosts], load[hosts]])[0]])
        load[host] += wanted.bytes[each]
        return host


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Wanted:
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


class Holders:
    """The holders of each group: pairs of a group and a host, to which pairs are added.

    Args:
      receivers: the hosts.
      num_groups: g.
    """

    def __init__(self, receivers: Receivers, num_groups: int) -> None:
        self._receivers = receivers
        self._num_groups = num_groups
        self._machines = np.empty(0, np.int64)
        self._domains = np.empty(0, np.int64)
        self._inner = np.empty(0, np.int64)
        self._hosts = np.empty(0, np.int64)

    def add(self, group: np.ndarray, host: np.ndarray) -> None:
        """Adds pairs of a group and a host that holds it."""
        there = self._receivers
        machines = group * there.num_machines + there.machine[host]
        domains = group * there.num_domains + there.domain[host]
        inner = group * there.num_inner + there.inner[host]
        self._machines = _joined(self._machines, machines)
        self._domains = _joined(self._domains, domains)
        self._inner = _joined(self._inner, inner)
        self._hosts = _joined(self._hosts, group * len(there.hashes) + host)

    def on_machine(self, group: np.ndarray, machine: np.ndarray) -> np.ndarray:
        """Whether each group is on a machine."""
        return _among(self._machines, group * self._receivers.num_machines + machine)

    def in_domain(self, group: np.ndarray, domain: np.ndarray) -> np.ndarray:
        """Whether each group is in a failure domain."""
        return _among(self._domains, group * self._receivers.num_domains + domain)

    def in_inner(self, group: np.ndarray, inner: np.ndarray) -> np.ndarray:
        """Whether each group is in an inner domain."""
        return _among(self._inner, group * self._receivers.num_inner + inner)

    def num_machines_in(self, domain: np.ndarray) -> np.ndarray:
        """Different machines with each group in one domain of each, int64 `[g]`."""
        there = self._receivers
        return self._num_in(domain, there.machine, there.num_machines)

    def num_inner_in(self, domain: np.ndarray) -> np.ndarray:
        """Different inner domains with each group in one domain of each, `[g]`."""
        there = self._receivers
        return self._num_in(domain, there.inner, there.num_inner)

    def _num_in(
        self, domain: np.ndarray, label: np.ndarray, num_labels: int
    ) -> np.ndarray:
        there = self._receivers
        num_hosts = max(1, len(there.hashes))
        group, host = self._hosts // num_hosts, self._hosts % num_hosts
        inside = there.domain[host] == domain[group]
        labels = group * num_labels + label[host]
        groups = columns.distinct(labels[inside]) // max(1, num_labels)
        return np.bincount(groups, minlength=self._num_groups)

    @property
    def num_machines(self) -> np.ndarray:
        """Different machines that have each group, int64 `[g]`."""
        group = self._machines // max(1, self._receivers.num_machines)
        return np.bincount(group, minlength=self._num_groups)

    @property
    def num_domains(self) -> np.ndarray:
        """Different failure domains that have each group, int64 `[g]`."""
        group = self._domains // max(1, self._receivers.num_domains)
        return np.bincount(group, minlength=self._num_groups)

    @property
    def num_inner(self) -> np.ndarray:
        """Different inner domains that have each group, int64 `[g]`."""
        group = self._inner // max(1, self._receivers.num_inner)
        return np.bincount(group, minlength=self._num_groups)


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


def _joined(some: np.ndarray, more: np.ndarray) -> np.ndarray:
    return columns.distinct(np.concatenate([some, more]))


def _among(ordered: np.ndarray, values: np.ndarray) -> np.ndarray:
    place = np.searchsorted(ordered, values)
    among = np.zeros(len(values), bool)
    inside = place < len(ordered)
    among[inside] = ordered[place[inside]] == values[inside]
    return among
