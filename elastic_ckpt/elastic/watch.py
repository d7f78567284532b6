"""Finds hosts that hang or are slow although their processes are alive.

A thread on each host sends a heartbeat every second and a message whenever the program
begins a new phase.

*Hangs.* A host whose heartbeats stop is stopped, frozen or out of memory. If heartbeats
continue but no host begins anything new within its time limit, the world hangs: in a
collective, a restore, a compilation. The culprits are the hosts behind the others, if
any. A host's limit for a phase is `_PATIENCE` times the longest time that this host
has taken for the phase in this world, at least `_LEAST_SECS` and at most a configured
bound. The bound itself applies to a phase that the host has not finished before or
whose length varies (`_UNLIKE`). Other hosts' times are not evidence: a host may have
found its program in a cache. As long as one host is within its limit, the others wait
for it, and nothing hangs. In `CLOSE`, hosts wait for uploads without limit. A host
that does not reach host 0 (`REACH`) within `_REACH_SECS` after host 0 starts
listening is lost; if most hosts cannot reach host 0, host 0 is lost.

*Slow hosts.* All hosts wait for the slowest one in the same collectives, so a step
takes equally long on each. A heartbeat therefore reports the time that only its own
host spent: `late` waking up (the host was stopped or got no CPU time), waiting for
`data`, or blocked in a `save`. A host is slow if such a time is at least
`LEAST_PERCENT` of a window and more than `RATIO` times the median of the other hosts,
in `WINDOWS` windows in a row. A host with slow devices shows none of these times.
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
# Time between checks of the hosts counts up to this limit.
_LOOK_SECS = 1.0
# A host first reaches host 0; it joins when all hosts have reached host 0.
REACH = "reach"
JOIN = "join"
TRAIN = "train"
CLOSE = "close"
COMPILE = "compile"
RESTORE = "restore"
# Phases whose length varies: a training function may report no phases; programs differ
# and may come from a cache; a restore reads from RAM or storage.
_UNLIKE = frozenset((TRAIN, COMPILE, RESTORE))

LATE = "late"
WINDOW_SECS = 10.0
WINDOWS = 3
LEAST_PERCENT = 30.0
RATIO = 3.0
_MEANINGS = {
    LATE: "it was stopped or got no CPU time",
    "data": "it waited for its data",
    "save": "it was blocked while capturing its data state",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """How long the hosts of a run may take before they count as lost.

    Attributes:
      most_secs: the time limit for a step or another phase, such as a restore. Once a
        host has completed steps, its limit for a step is a multiple of its longest
        step, if that is shorter.
      heartbeat_secs: the time without a heartbeat after which a host is lost.
      grace_secs: the time that hosts have to save and stop after SIGTERM.
    """

    most_secs: float = 600.0
    heartbeat_secs: float = 30.0
    grace_secs: float = 60.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hang:
    """A hang of a world.

    Attributes:
      hosts: the culprits; empty if no host is behind the others.
      why: the symptom and how long it has lasted.
    """

    hosts: frozenset[int]
    why: str
    secs: float


@dataclasses.dataclass(kw_only=True)
class _Host:
    """A host's current phase, its start time, and the count of phases begun.

    Attributes:
      spent_secs: by kind, the time that only this host spent in the current window.
      slow: by kind, the number of windows in a row in which the host was slow.
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

    Its clock advances only while `look` is called often. Time in which this process was
    frozen does not count: messages may still be waiting, or the whole machine was
    paused. Time in which prepared hosts wait for their world does not count either.
    """

    def __init__(self, limits: Limits, hosts: int, *, now_secs: float) -> None:
        self._limits = limits
        self._looked_secs = now_secs
        # The time on its own clock, and when the current window began.
        self._secs = self._window_secs = 0.0
        # The hosts that have not exited.
        self._hosts = {host: _Host() for host in range(hosts)}

    def look(self, *, now_secs: float) -> None:
        """Advances the clock; must be called often, whenever messages are received."""
        self._secs += min(now_secs - self._looked_secs, _LOOK_SECS)
        self._looked_secs = now_secs

    def phase(self, host: int) -> str:
        """The last phase that a host began; empty if the host has exited."""
        return self._hosts[host].phase if host in self._hosts else ""

    def heartbeat(self, host: int, begun: int, spent_secs: Mapping[str, float]) -> None:
        """Records a heartbeat.

        Args:
          host: the host that sent it.
          begun: the number of phases that the host has begun.
          spent_secs: by kind, the time that only this host spent since its last
            heartbeat.
        """
        told = self._hosts[host]
        told.heartbeat_secs = self._secs
        told.spent_secs.update(spent_secs)
        if begun > told.begun:
            self.begin(host, told.phase, begun)

    def begin(self, host: int, phase: str, begun: int) -> None:
        """Records that a host begins its `begun`-th phase, possibly a repeat."""
        told = self._hosts[host]
        longest_secs = told.longest_secs.get(told.phase, 0.0)
        told.longest_secs[told.phase] = max(longest_secs, self._secs - told.since_secs)
        told.phase, told.since_secs, told.begun = phase, self._secs, begun

    def end(self, host: int) -> None:
        """Records that a host has exited."""
        self._hosts.pop(host, None)

    def hang(self) -> Hang | None:
        """The hang of the world; None if the world does not hang."""
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
        # The others wait for a host that is within its limit.
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
        """The hosts that the others wait for; empty if none is behind."""
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
          The host, the phase in which it is slow, and how it spends its time.
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
                    f"{_MEANINGS[kind]} {percent:.0f}% of the time; the median of the"
                    f" other hosts is {median:.0f}%"
                )
                # A host can be late in any phase; other kinds are themselves phases.
                yield host, told.phase if kind == LATE else kind, why
        for told in heard.values():
            told.spent_secs.clear()

    def _most_secs(self, host: int) -> float:
        # The time limit for a host's phase.
        told, most_secs = self._hosts[host], self._limits.most_secs
        if told.phase == JOIN and any(e.phase == REACH for e in self._hosts.values()):
            return -1.0
        if told.phase == REACH and self.phase(0) == JOIN:
            # The limit counts from when host 0 listens.
            late_secs = max(0.0, self._hosts[0].since_secs - told.since_secs)
            reach_secs = max(_REACH_SECS, self._limits.heartbeat_secs)
            return late_secs + min(reach_secs, most_secs)
        longest_secs = told.longest_secs.get(told.phase)
        if told.phase in _UNLIKE or longest_secs is None or math.isinf(most_secs):
            return most_secs
        return min(most_secs, max(_LEAST_SECS, _PATIENCE * longest_secs))
