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
from typing import NamedTuple

import numpy as np

from elastic_ckpt.core import columns, digest

_POINT_BITS = np.uint64(40)
_POINTS = 16
# The bound, as a multiple of the mean. After so many probes the next bound is used,
# because a bound may be unreachable: items and domains differ in size.
_SLACKS = (1.2, 1.4, 1.7, 2, 4, np.inf)
_PROBES_A_BOUND = 20
_PROBES = _PROBES_A_BOUND * len(_SLACKS)


# What two hosts can share: the machine, the failure domain, a smaller domain inside of
# that; or they are the same host.
MACHINE, DOMAIN, INNER, HOST = range(4)


class Candidates(NamedTuple):
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
class Receivers:
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
        return self.labels[DOMAIN]

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
        inner = self.labels[INNER]
        both = self.domain * self.num(INNER) + inner
        shared, shared_inner, shared_both = (
            np.bincount(kind)[kind[host]] for kind in (self.domain, inner, both)
        )
        return shared + shared_inner - shared_both < len(self.hashes)

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
        self, group: np.ndarray, host: np.ndarray, held: Holders, candidates: Candidates
    ) -> np.ndarray:
        may = ~held.has(MACHINE, group, host)
        if candidates.are_distant:
            may &= ~held.has(DOMAIN, group, host)
        if candidates.are_apart:
            may &= ~held.has(INNER, group, host)
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
        group, host = np.divmod(self._pairs[HOST], max(1, len(there.hashes)))
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
