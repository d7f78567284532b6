"""Finds the hosts of a world that hang or are slow although their processes live.

A host sends a heartbeat each second from a thread, and a note when its program begins a
phase or a step.

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
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

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
_TICK_SECS = 0.1
_TICKS = 10


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


def unlimited(**limits: float) -> Limits:
    """Limits of hosts that may hang for any time; otherwise as given."""
    return Limits(most_secs=math.inf, heartbeat_secs=math.inf, **limits)


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
    """What a host has told: its phase, how many it has begun, and when."""

    since_secs: float
    phase: str = "start"
    begun: int = 0
    heartbeat_secs: float | None = None
    longest_secs: dict[str, float] = dataclasses.field(default_factory=dict)


class Watch:
    """Watches the hosts of one world for hangs.

    Times are of any clock that does not go back.

    Args:
      limits: of the run.
      hosts: how many there are.
      now_secs: the time.
    """

    def __init__(self, limits: Limits, hosts: int, *, now_secs: float) -> None:
        self._limits = limits
        self._looked_secs = now_secs
        # Those that have not ended.
        self._hosts = {host: _Host(since_secs=now_secs) for host in range(hosts)}

    def start_again(self, *, now_secs: float) -> None:
        """All times begin now: hosts that were prepared have waited for others."""
        self._shift(math.inf, now_secs=now_secs)

    def look(self, *, now_secs: float) -> None:
        """Notes that messages of the hosts are received now; called often.

        Time in which this process stood still does not count: messages wait to be
        received, or the hosts stood still with it, on a machine that was paused.
        """
        missed_secs = now_secs - self._looked_secs - _LOOK_SECS
        self._shift(max(0.0, missed_secs), now_secs=now_secs)

    def _shift(self, secs: float, *, now_secs: float) -> None:
        self._looked_secs = now_secs
        for each in self._hosts.values():
            each.since_secs = min(each.since_secs + secs, now_secs)
            if each.heartbeat_secs is not None:
                each.heartbeat_secs = min(each.heartbeat_secs + secs, now_secs)

    def phase(self, host: int) -> str:
        """The phase that a host began last; empty if it has ended."""
        return self._hosts[host].phase if host in self._hosts else ""

    def heartbeat(self, host: int, *, now_secs: float, begun: int = 0) -> None:
        """Notes a heartbeat, with how many phases the host has begun.

        A host does not report the begin of each step, if they are short.
        """
        told = self._hosts[host]
        told.heartbeat_secs = now_secs
        if begun > told.begun:
            told.begun, told.since_secs = begun, now_secs

    def begin(
        self, host: int, phase: str, *, now_secs: float, begun: int | None = None
    ) -> None:
        """Notes that a host begins a phase, or the same phase once more.

        Args:
          host: its number.
          phase: that begins.
          now_secs: the time.
          begun: how many phases it has begun with this one; None for one more.
        """
        told = self._hosts[host]
        longest_secs = told.longest_secs.get(told.phase, 0.0)
        told.longest_secs[told.phase] = max(longest_secs, now_secs - told.since_secs)
        told.phase, told.since_secs = phase, now_secs
        told.begun = told.begun + 1 if begun is None else begun

    def end(self, host: int) -> None:
        """Notes that a host has ended."""
        self._hosts.pop(host, None)

    def hang(self, *, now_secs: float) -> Hang | None:
        """The hosts that hang; None if none does."""
        silent = {
            host: now_secs - told.heartbeat_secs
            for host, told in self._hosts.items()
            if told.heartbeat_secs is not None
            and now_secs - told.heartbeat_secs > self._limits.heartbeat_secs
        }
        if silent:
            secs, phases = max(silent.values()), sorted({*map(self.phase, silent)})
            why = f"no heartbeat for {secs:.0f} s, in {phases}"
            return Hang(hosts=frozenset(silent), why=why, secs=secs)
        waited_secs = {
            host: now_secs - told.since_secs
            for host, told in self._hosts.items()
            if told.phase != CLOSE
        }
        hosts = self.behind()
        host = min(hosts & waited_secs.keys() or waited_secs, default=None)
        # The others wait for one that is within its time.
        if host is None or any(
            secs <= self._most_secs(each) for each, secs in waited_secs.items()
        ):
            return None
        secs = waited_secs[host]
        why = f"hangs in phase {self.phase(host)!r} for {secs:.0f} s"
        return Hang(hosts=hosts, why=why, secs=secs)

    def behind(self) -> frozenset[int]:
        """The hosts that the others wait for; empty if all are equally far."""
        least = min((told.begun for told in self._hosts.values()), default=0)
        behind = frozenset(h for h, told in self._hosts.items() if told.begun == least)
        if len(behind) == len(self._hosts):
            return frozenset()
        all_reach = all(self.phase(host) == REACH for host in behind)
        is_host_0 = all_reach and 2 * len(behind) > len(self._hosts)
        return frozenset([0]) if is_host_0 else behind

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


class HostLoad:
    """Adds up what this host alone spends time on, in seconds."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._secs: dict[str, float] = collections.defaultdict(float)
        self._since_secs = time.monotonic()

    def listen(self) -> None:
        """Takes in the metrics that the process records from now on."""
        from jax import monitoring

        from elastic_ckpt.core import metrics

        kinds = {metrics.DATA_WAIT.name: "data", metrics.DATA_SAVE_BLOCK.name: "save"}

        def receive(event: str, duration_secs: float, **_: str | int) -> None:
            if event in kinds:
                self._add(kinds[event], duration_secs)

        monitoring.register_event_duration_secs_listener(receive)

    def sleep(self) -> None:
        """Sleeps for a second, in ticks, and adds how late they end."""
        for _ in range(_TICKS):
            began_secs = time.monotonic()
            time.sleep(_TICK_SECS)
            self._add(LATE, time.monotonic() - began_secs - _TICK_SECS)

    def take(self) -> dict[str, float]:
        """The seconds of each kind since the last call, and `secs` of all time."""
        now_secs = time.monotonic()
        with self._lock:
            taken = {**self._secs, "secs": now_secs - self._since_secs}
            self._secs.clear()
            self._since_secs = now_secs
        return taken

    def _add(self, kind: str, secs: float) -> None:
        with self._lock:
            self._secs[kind] += secs


@dataclasses.dataclass(frozen=True, kw_only=True)
class SlowHost:
    """A host that is slow.

    Attributes:
      host: its number.
      phase: that it is slow in.
      why: what it spends its time on, and how much more than others.
    """

    host: int
    phase: str
    why: str


class SlowHosts:
    """Finds the slow hosts of one world, and names each when it has become slow.

    Args:
      now_secs: the time, on any clock that does not go back.
    """

    def __init__(self, *, now_secs: float) -> None:
        self._began_secs = now_secs
        # In the present window, by host: seconds by kind, and the phase of each
        # heartbeat.
        self._secs: dict[int, Any] = collections.defaultdict(collections.Counter)
        self._phases: dict[int, list[str]] = collections.defaultdict(list)
        # In how many windows in a row a host was slow, by kind.
        self._windows: dict[tuple[int, str], int] = {}

    def note(self, host: int, load: Mapping[str, float], *, phase: str) -> None:
        """Notes a heartbeat that a host in a phase sent; `load` is of `HostLoad`."""
        self._secs[host].update(load)
        self._phases[host].append(phase)

    def newly_slow(self, *, now_secs: float) -> list[SlowHost]:
        """The hosts that have become slow since the last call."""
        if now_secs - self._began_secs < WINDOW_SECS:
            return []
        slow = dict(self._slow())
        self._windows = {each: self._windows.get(each, 0) + 1 for each in slow}
        # A host that is late is so in any phase: the one that it was in most.
        found = [
            SlowHost(
                host=host,
                phase=statistics.mode(self._phases[host]) if kind == LATE else kind,
                why=why,
            )
            for (host, kind), why in slow.items()
            if self._windows[host, kind] == WINDOWS
        ]
        self._began_secs = now_secs
        self._secs.clear()
        self._phases.clear()
        return found

    def _slow(self) -> Iterator[tuple[tuple[int, str], str]]:
        # Those that are slow in this window, by host and kind, and how slow.
        for kind, host in itertools.product(_MEANINGS, self._secs):
            percents = {
                each: 100 * secs[kind] / secs["secs"]
                for each, secs in self._secs.items()
                if secs["secs"]
            }
            percent = percents.pop(host, 0.0)
            median = statistics.median(percents.values() or [percent])
            if percent >= LEAST_PERCENT and percent > RATIO * median:
                yield (
                    (host, kind),
                    f"{_MEANINGS[kind]} {percent:.0f} % of the time, other hosts"
                    f" {median:.0f} %",
                )
