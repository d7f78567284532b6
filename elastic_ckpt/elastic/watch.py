"""Finds hosts that hang although their processes live.

Each host sends a heartbeat from a thread, and a note when its program begins a phase or
a step. A host whose heartbeats stop is stopped, frozen or out of memory. If heartbeats
go on and no host begins anything new in its time, the world hangs in a phase: in a
collective, a restore, a compilation. Then the host that is behind the others is the
culprit, if there is one.

A host may take `_PATIENCE` times the longest that it has itself taken for a phase in
this world, at least `_LEAST_SECS`, and at most a bound that is configured; for a phase
that it has not ended yet it may take as long as that bound. What other hosts took says
nothing: one of them may have found its program in a cache, or its data on its own disk.
Nothing is learned from phases that differ each time (`_UNLIKE`). As long as one host is
within its time the others wait for it, and nothing hangs. In `CLOSE` hosts wait for
uploads, for any time.

A host that does not reach host 0 (`REACH`) is lost. If most do not, host 0 is: it is
host 0 that the others have lost. It takes no time to reach a host that listens, so
hosts have `_REACH_SECS` for it, or as long as for a heartbeat, once host 0 waits.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

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


def patience_secs(limits: Limits, longest_secs: float | None) -> float:
    """How long to wait for what took at most so long before; None if it never ended."""
    if math.isinf(limits.most_secs) or longest_secs is None:
        return limits.most_secs
    return min(limits.most_secs, max(_LEAST_SECS, _PATIENCE * longest_secs))


def unlimited(**limits: float) -> Limits:
    """Limits of hosts that may hang for any time; otherwise as given."""
    return Limits(most_secs=math.inf, heartbeat_secs=math.inf, **limits)


class Watch:
    """Watches the hosts of one world.

    Args:
      limits: of the run.
      hosts: how many there are.
      now_secs: the time, on any clock that does not go back.
    """

    def __init__(self, limits: Limits, hosts: int, *, now_secs: float) -> None:
        self._limits = limits
        self._looked_secs = now_secs
        # By host: its last heartbeat, and its phase, how many it began, and when.
        self._heartbeat_secs: dict[int, float] = {}
        self._phases = dict.fromkeys(range(hosts), "start")
        self._counts = dict.fromkeys(range(hosts), 0)
        self._since_secs = dict.fromkeys(range(hosts), now_secs)
        # By host and phase, the longest that it took.
        self._longest_secs: dict[tuple[int, str], float] = {}

    def start_again(self, *, now_secs: float) -> None:
        """All times begin now: hosts that were prepared have waited for others."""
        self._looked_secs = now_secs
        for times in (self._heartbeat_secs, self._since_secs):
            times.update(dict.fromkeys(times, now_secs))

    def phase(self, host: int) -> str:
        """The phase that a host began last; empty if it has ended."""
        return self._phases.get(host, "")

    def heartbeat(self, host: int, *, now_secs: float, begun: int = 0) -> None:
        """Notes a heartbeat, with how many phases the host has begun.

        A host does not report the begin of each step, if they are short.
        """
        self._heartbeat_secs[host] = now_secs
        if begun > self._counts.get(host, begun):
            self._counts[host] = begun
            self._since_secs[host] = now_secs

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
        ended, secs = (host, self._phases[host]), now_secs - self._since_secs[host]
        self._longest_secs[ended] = max(secs, self._longest_secs.get(ended, 0.0))
        self._phases[host] = phase
        self._counts[host] = self._counts[host] + 1 if begun is None else begun
        self._since_secs[host] = now_secs

    def end(self, host: int) -> None:
        """Notes that a host has ended."""
        for each in (
            self._heartbeat_secs,
            self._phases,
            self._counts,
            self._since_secs,
        ):
            each.pop(host, None)

    def look(self, *, now_secs: float) -> None:
        """Notes that messages of the hosts are received now; called often.

        Time in which this process stood still does not count: messages wait to be
        received, or the hosts stood still with it, on a machine that was paused.
        """
        missed_secs = max(0.0, now_secs - self._looked_secs - _LOOK_SECS)
        self._looked_secs = now_secs
        for times in (self._heartbeat_secs, self._since_secs):
            for host, secs in times.items():
                times[host] = min(secs + missed_secs, now_secs)

    def hang(self, *, now_secs: float) -> Hang | None:
        """The hosts that hang; None if none does."""
        silent = {
            host: now_secs - last_secs
            for host, last_secs in self._heartbeat_secs.items()
            if now_secs - last_secs > self._limits.heartbeat_secs
        }
        if silent:
            phases = sorted({self._phases[host] for host in silent})
            return Hang(
                hosts=frozenset(silent),
                why=f"no heartbeat for {max(silent.values()):.0f} s, in {phases}",
                secs=max(silent.values()),
            )
        secs = {
            host: now_secs - since_secs
            for host, since_secs in self._since_secs.items()
            if self._phases[host] != CLOSE
        }
        if any(self._has_time(host, secs) for host in secs):
            # The others wait for the one that is within its time.
            return None
        hosts = self.behind()
        host = min(hosts & secs.keys() or secs, default=None)
        if host is None:
            return None
        why = f"hangs in phase {self._phases[host]!r} for {secs[host]:.0f} s"
        return Hang(hosts=hosts, why=why, secs=secs[host])

    def behind(self) -> frozenset[int]:
        """The hosts that the others wait for; empty if all are equally far."""
        least = min(self._counts.values(), default=0)
        behind = frozenset(h for h, count in self._counts.items() if count == least)
        if len(behind) == len(self._counts):
            return frozenset()
        if all(self._phases[host] == REACH for host in behind):
            return behind if 2 * len(behind) <= len(self._counts) else frozenset([0])
        return behind

    def _has_time(self, host: int, secs: Mapping[int, float]) -> bool:
        # Whether a host is within its time, after `secs` in its phase, by host.
        phase, limits = self._phases[host], self._limits
        if self._phases.get(0) == JOIN and REACH in self._phases.values():
            if phase == JOIN:
                return False
            if phase == REACH:
                most_secs = max(_REACH_SECS, limits.heartbeat_secs)
                return min(secs[host], secs[0]) <= min(most_secs, limits.most_secs)
        longest_secs = (
            None if phase in _UNLIKE else self._longest_secs.get((host, phase))
        )
        return secs[host] <= patience_secs(limits, longest_secs)
