"""Finds the hosts that are slow, and the phase that they are slow in.

Hosts report with each heartbeat what they alone spend time on (`host_load`). A host is
slow if that is at least `LEAST_PERCENT` of a window of `WINDOW_SECS`, and more than
`RATIO` times the median of the other hosts, in each of `WINDOWS` windows in a row. On a
busy machine all of its hosts get too little, so that none is slow; a pause of one host,
such as a first batch that is read from a cold disk, is over before the last window.
"""

from __future__ import annotations

import collections
import dataclasses
import statistics
from collections.abc import Mapping

from elastic_ckpt.elastic import host_load

WINDOW_SECS = 10.0
WINDOWS = 3
LEAST_PERCENT = 30.0
RATIO = 3.0

_MEANINGS = {
    host_load.LATE: "it was stopped, or had no processor,",
    "data": "it waited for its data",
    "save": "it was blocked by capturing the state of its data",
}


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


def slow_in(percents: Mapping[int, Mapping[str, float]]) -> dict[tuple[int, str], str]:
    """By host and kind, those that are slow in a window, and how slow.

    Args:
      percents: by host, how much of its time it spent on each kind.
    """
    slow = {}
    for host, own in percents.items():
        for kind, percent in own.items():
            others = [
                each.get(kind, 0.0) for other, each in percents.items() if other != host
            ]
            if not others or percent < LEAST_PERCENT:
                continue
            median = statistics.median(others)
            if percent > RATIO * median:
                slow[host, kind] = (
                    f"{_MEANINGS[kind]} {percent:.0f} % of the time, other hosts"
                    f" {median:.0f} %"
                )
    return slow


class SlowHosts:
    """Finds the slow hosts of one world, and names each when it has become slow.

    Args:
      now_secs: the time, on any clock that does not go back.
    """

    def __init__(self, *, now_secs: float) -> None:
        self._began_secs = now_secs
        # In the window under way, by host: seconds by kind, and phases by heartbeat.
        self._secs: dict[int, dict[str, float]] = {}
        self._phases: dict[int, collections.Counter[str]] = {}
        # In how many windows in a row a host has been slow.
        self._windows: dict[tuple[int, str], int] = {}

    def note(self, host: int, load: Mapping[str, float], *, phase: str) -> None:
        """Notes a heartbeat.

        Args:
          host: that sent it.
          load: see `HostLoad.take`.
          phase: that the host is in.
        """
        total = self._secs.setdefault(host, collections.defaultdict(float))
        for kind, secs in load.items():
            total[kind] += secs
        self._phases.setdefault(host, collections.Counter())[phase] += 1

    def newly_slow(self, *, now_secs: float) -> list[SlowHost]:
        """The hosts that have become slow since the last call."""
        if now_secs - self._began_secs < WINDOW_SECS:
            return []
        slow = slow_in(
            {
                host: {
                    kind: 100 * secs / total["secs"]
                    for kind, secs in total.items()
                    if kind != "secs"
                }
                for host, total in self._secs.items()
                if total["secs"] > 0
            }
        )
        self._windows = {each: self._windows.get(each, 0) + 1 for each in slow}
        slow_hosts = [
            SlowHost(host=host, phase=self._phase(host, kind), why=why)
            for (host, kind), why in slow.items()
            if self._windows[host, kind] == WINDOWS
        ]
        self._began_secs = now_secs
        self._secs.clear()
        self._phases.clear()
        return slow_hosts

    def _phase(self, host: int, kind: str) -> str:
        # A host that is late is so in any phase: the one that it was in most.
        if kind == host_load.LATE:
            return self._phases[host].most_common(1)[0][0]
        return kind
