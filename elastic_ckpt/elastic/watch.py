"""Finds hosts that hang although their processes live.

Each host sends a heartbeat from a thread, and a note when its program begins a phase or
a step. A host whose heartbeats stop is stopped, frozen or out of memory. If heartbeats
go on and no host begins anything new, the world hangs in a phase: in a collective, a
restore, a compilation. Then the host that is behind the others is the culprit, if there
is one.

A phase may take `_PATIENCE` times the longest that the run has seen, at least
`_LEAST_SECS`, and at most a bound that is configured; a phase that is not known yet may
take as long as that bound. A training function that names no phases is in `TRAIN`,
which may be anything, so nothing is learned from it. In `CLOSE` hosts wait for uploads.

A host that does not reach host 0 (`REACH`) is lost. If most do not, host 0 is: it is
host 0 that the others have lost.
"""

from __future__ import annotations

import dataclasses
import math

_PATIENCE = 10
_LEAST_SECS = 60.0
# The longest time between two looks at the hosts that counts.
_LOOK_SECS = 1.0
# A host reaches host 0, and there joins, when all have reached it.
REACH = "reach"
JOIN = "join"
TRAIN = "train"
CLOSE = "close"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hang:
    """Hosts that hang.

    Attributes:
      hosts: the culprits; empty if all hosts are equally far.
      why: what is missing, since when.
    """

    hosts: frozenset[int]
    why: str


@dataclasses.dataclass(kw_only=True)
class Limits:
    """How long hosts may take; for phases, learned by all worlds of a run.

    Attributes:
      most_secs: the bound for each phase.
      heartbeat_secs: the longest time without a heartbeat.
      grace_secs: for hosts to save and end after SIGTERM.
      compile_ahead_secs: for a shadow world, while another trains; 0 starts none.
      longest_secs: of each phase that has ended, the longest.
    """

    most_secs: float = math.inf
    heartbeat_secs: float = math.inf
    grace_secs: float = 60.0
    compile_ahead_secs: float = 0.0
    longest_secs: dict[str, float] = dataclasses.field(default_factory=dict)

    def learn(self, phase: str, secs: float) -> None:
        """Notes how long a phase took."""
        self.longest_secs[phase] = max(secs, self.longest_secs.get(phase, 0.0))

    def limit_secs(self, phase: str) -> float:
        """How long a phase may take, in seconds."""
        if phase == CLOSE:
            return math.inf
        longest_secs = self.longest_secs.get(phase)
        if math.isinf(self.most_secs) or longest_secs is None or phase == TRAIN:
            return self.most_secs
        return min(self.most_secs, max(_LEAST_SECS, _PATIENCE * longest_secs))


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

    def phase(self, host: int) -> str:
        """The phase that a host began last; empty if it has ended."""
        return self._phases.get(host, "")

    def heartbeat(self, host: int, *, now_secs: float) -> None:
        """Notes a heartbeat."""
        self._heartbeat_secs[host] = now_secs

    def begin(self, host: int, phase: str, *, now_secs: float) -> None:
        """Notes that a host begins a phase, or the same phase once more."""
        self._limits.learn(self._phases[host], now_secs - self._since_secs[host])
        self._phases[host] = phase
        self._counts[host] += 1
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
            )
        for host, since_secs in self._since_secs.items():
            secs = now_secs - since_secs
            if secs > self._limits.limit_secs(self._phases[host]):
                return Hang(
                    hosts=self.behind(),
                    why=f"hangs in phase {self._phases[host]!r} for {secs:.0f} s",
                )
        return None

    def behind(self) -> frozenset[int]:
        """The hosts that the others wait for; empty if all are equally far."""
        least = min(self._counts.values(), default=0)
        behind = frozenset(h for h, count in self._counts.items() if count == least)
        if len(behind) == len(self._counts):
            return frozenset()
        if all(self._phases[host] == REACH for host in behind):
            return behind if 2 * len(behind) <= len(self._counts) else frozenset([0])
        return behind
