"""Finds the hosts of a world that hang or are slow although their processes live.

A host sends a heartbeat each second from a thread, and a note when its program begins
another phase.

*Hangs.* A host whose heartbeats stop is stopped, frozen or out of memory. If they go on
and no host begins anything new in its time, the world hangs: in a collective, a
restore, a compilation. The culprits are the hosts that are behind the others, if any. A
host may take `_PATIENCE` times the longest that it has itself taken for a phase in this
world, at least `_LEAST_SECS`, and at most a configured bound; for a phase that it has
not ended yet, or that differs each time (`_UNLIKE`), it may take that bound. What other
hosts took says nothing: one may have found its program in a cache. As long as one host
is within its time the others wait for it, and nothing hangs. In `CLOSE` hosts wait for
uploads, for any time. A host that does not reach host 0 (`REACH`) within `_REACH_SECS`
of host 0's start is lost; if most do not, host 0 is.

*Slow hosts.* All hosts wait for the slowest one in the same collectives, so a step
takes equally long on each. A heartbeat therefore has the time that its host alone
spent: `late` waking up (it was stopped, or got no processor), waiting for `data`, and
blocked in a `save`. A host is slow if such a time is at least `LEAST_PERCENT` of a
window and more than `RATIO` times the median of the other hosts, in `WINDOWS` windows
in a row. A host whose devices alone are slow shows none of these times.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
import statistics
from collections.abc import Iterator, Mapping

_PATIENCE = 10
_LEAST_SECS = 60.0
_REACH_SECS = 30.0
# The longest time between two looks at the hosts that counts.
_LOOK_SECS = 1.0
# A host reaches host 0, and there joins, when all have reached it.
REACH = "reach"
JOIN = "join"
TRAIN = "train"
CLOSE = "close"
COMPILE = "compile"
RESTORE = "restore"
# Of a training function that names no phases; of another program, or from a cache; from
# RAM, or from storage.
_UNLIKE = frozenset((TRAIN, COMPILE, RESTORE))

LATE = "late"
WINDOW_SECS = 10.0
WINDOWS = 3
LEAST_PERCENT = 30.0
RATIO = 3.0
_MEANINGS = {
    LATE: "it was stopped, or had no processor,",
    "data": "it waited for its data",
    "save": "it was blocked by capturing the state of its data",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """How long the hosts of a run may take before they count as lost.

    Attributes:
      most_secs: the longest that a step, or another phase such as a restore, may take.
        Once a run has taken steps, a multiple of the longest one counts, if less.
      heartbeat_secs: a host whose process sends no heartbeat for so long is lost.
      grace_secs: how long hosts have, after SIGTERM, to save and to end.
    """

    most_secs: float = 600.0
    heartbeat_secs: float = 30.0
    grace_secs: float = 60.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hang:
    """Hosts that hang.

    Attributes:
      hosts: the culprits; empty if all hosts are equally far.
      why: what is missing, since when.
      secs: for how long.
    """

    hosts: frozenset[int]
    why: str
    secs: float


@dataclasses.dataclass(kw_only=True)
class _Host:
    """What a host has told: its phase, how many it has begun, and when.

    Attributes:
      spent_secs: what it alone spent time on in the present window, by kind.
      slow: in how many windows in a row it was slow, by kind.
    """

    since_secs: float = 0.0
    phase: str = "start"
    begun: int = 0
    heartbeat_secs: float = math.inf
    longest_secs: dict[str, float] = dataclasses.field(default_factory=dict)
    spent_secs: collections.Counter[str] = dataclasses.field(
        default_factory=collections.Counter
    )
    slow: collections.Counter[str] = dataclasses.field(
        default_factory=collections.Counter
    )


class Watch:
    """Watches the hosts of one world.

    Its clock goes on only while `look` is called often. Time in which this process
    stood still does not count: messages wait to be received, or the hosts stood still
    with it, on a machine that was paused. Nor does the time in which hosts that are
    prepared wait for their world to begin.

    Args:
      limits: of the run.
      hosts: how many there are.
      now_secs: the time, of any clock that does not go back.
    """

    def __init__(self, limits: Limits, hosts: int, *, now_secs: float) -> None:
        self._limits = limits
        self._looked_secs = now_secs
        # The time of its clock, and when the present window of slow hosts began.
        self._secs = self._window_secs = 0.0
        # Those that have not ended.
        self._hosts = {host: _Host() for host in range(hosts)}

    def look(self, *, now_secs: float) -> None:
        """Notes that messages of the hosts are received now; called often."""
        self._secs += min(now_secs - self._looked_secs, _LOOK_SECS)
        self._looked_secs = now_secs

    def phase(self, host: int) -> str:
        """The phase that a host began last; empty if it has ended."""
        return self._hosts[host].phase if host in self._hosts else ""

    def heartbeat(self, host: int, begun: int, spent_secs: Mapping[str, float]) -> None:
        """Notes a heartbeat.

        Args:
          host: its number.
          begun: how many phases it has begun.
          spent_secs: what it alone spent time on since the last one, by kind.
        """
        told = self._hosts[host]
        told.heartbeat_secs = self._secs
        told.spent_secs.update(spent_secs)
        if begun > told.begun:
            self.begin(host, told.phase, begun)

    def begin(self, host: int, phase: str, begun: int) -> None:
        """Notes that a host begins a phase, or the same phase once more.

        Args:
          host: its number.
          phase: that begins.
          begun: how many phases it has begun with this one.
        """
        told = self._hosts[host]
        longest_secs = told.longest_secs.get(told.phase, 0.0)
        told.longest_secs[told.phase] = max(longest_secs, self._secs - told.since_secs)
        told.phase, told.since_secs, told.begun = phase, self._secs, begun

    def end(self, host: int) -> None:
        """Notes that a host has ended."""
        self._hosts.pop(host, None)

    def hang(self) -> Hang | None:
        """The hosts that hang; None if none does."""
        silent = {
            host: self._secs - told.heartbeat_secs
            for host, told in self._hosts.items()
            if self._secs - told.heartbeat_secs > self._limits.heartbeat_secs
        }
        if silent:
            secs, phases = max(silent.values()), sorted({*map(self.phase, silent)})
            return Hang(
                hosts=frozenset(silent),
                why=f"no heartbeat for {secs:.0f} s, in {phases}",
                secs=secs,
            )
        waited_secs = {
            host: self._secs - told.since_secs
            for host, told in self._hosts.items()
            if told.phase != CLOSE
        }
        # The others wait for one that is within its time.
        if not waited_secs or any(
            secs <= self._most_secs(host) for host, secs in waited_secs.items()
        ):
            return None
        hosts = self.behind()
        host = min(hosts & waited_secs.keys() or waited_secs)
        secs = waited_secs[host]
        return Hang(
            hosts=hosts & waited_secs.keys(),
            why=f"hangs in phase {self.phase(host)!r} for {secs:.0f} s",
            secs=secs,
        )

    def behind(self) -> frozenset[int]:
        """The hosts that the others wait for; empty if all are equally far."""
        least = min((told.begun for told in self._hosts.values()), default=0)
        behind = frozenset(h for h, told in self._hosts.items() if told.begun == least)
        if len(behind) == len(self._hosts):
            return frozenset()
        all_reach = all(self.phase(host) == REACH for host in behind)
        is_host_0 = all_reach and 2 * len(behind) > len(self._hosts)
        return frozenset([0]) if is_host_0 else behind

    def newly_slow(self) -> Iterator[tuple[int, str, str]]:
        """Yields the hosts that have become slow since the last call.

        Yields:
          The host, the phase that it is slow in, and what it spends its time on.
        """
        secs = self._secs - self._window_secs
        if secs < WINDOW_SECS:
            return
        self._window_secs = self._secs
        heard = {h: told for h, told in self._hosts.items() if told.spent_secs}
        for kind, (host, told) in itertools.product(_MEANINGS, heard.items()):
            percents = {
                each: 100 * other.spent_secs[kind] / secs
                for each, other in heard.items()
            }
            percent = percents.pop(host)
            median = statistics.median(percents.values() or [percent])
            is_slow = percent >= LEAST_PERCENT and percent > RATIO * median
            told.slow[kind] = told.slow[kind] + 1 if is_slow else 0
            if told.slow[kind] == WINDOWS:
                why = (
                    f"{_MEANINGS[kind]} {percent:.0f} % of the time, other hosts"
                    f" {median:.0f} %"
                )
                # A host that is late is so in any phase.
                yield host, told.phase if kind == LATE else kind, why
        for told in heard.values():
            told.spent_secs.clear()

    def _most_secs(self, host: int) -> float:
        # How long a host may be in its phase.
        told, most_secs = self._hosts[host], self._limits.most_secs
        if told.phase == JOIN and any(e.phase == REACH for e in self._hosts.values()):
            return -1.0
        if told.phase == REACH and self.phase(0) == JOIN:
            # From when host 0 listens.
            late_secs = max(0.0, self._hosts[0].since_secs - told.since_secs)
            reach_secs = max(_REACH_SECS, self._limits.heartbeat_secs)
            return late_secs + min(reach_secs, most_secs)
        longest_secs = told.longest_secs.get(told.phase)
        if told.phase in _UNLIKE or longest_secs is None or math.isinf(most_secs):
            return most_secs
        return min(most_secs, max(_LEAST_SECS, _PATIENCE * longest_secs))
