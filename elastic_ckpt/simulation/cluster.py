"""The slices of a simulated cluster, as `elastic.decision` is asked about them."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from elastic_ckpt.elastic import decision
from elastic_ckpt.simulation.hardware import Hardware, Presence
from elastic_ckpt.simulation.trace import Event

# Times are sums in floating point: a moment later they have certainly passed.
MOMENT_SECS = 1e-6


class SimulatedCluster:
    """Which slices are there, which events come, and what the run decides.

    Args:
      hardware: of the cluster.
      trace: the events, by time.
      policy: of the run.
      work: of the run.
      check_secs: how long a slice that is back is checked before it may be used.
    """

    def __init__(
        self,
        hardware: Hardware,
        trace: Sequence[Event],
        *,
        policy: decision.Policy,
        work: decision.Work,
        check_secs: float,
    ) -> None:
        self._presence = Presence(hardware)
        self._trace = trace
        self._next = 0
        self._policy = policy
        self._work = work
        self._check_secs = check_secs
        self._failures: list[decision.Failure] = []
        self._quarantined: frozenset[int] = frozenset()

    @property
    def next_event(self) -> Event | None:
        """The next event of the trace."""
        if self._next == len(self._trace):
            return None
        return self._trace[self._next]

    def next_event_secs(self) -> float:
        """When the next event comes."""
        event = self.next_event
        return math.inf if event is None else event.time

    def take_event(self) -> tuple[Event, list[int]]:
        """Makes the next event happen; returns it, and the slices that it is about."""
        event = self._trace[self._next]
        self._next += 1
        self._presence.note(event)
        return event, list(self._presence.slices_of(event))

    def note_lost(self, slices: Collection[int], *, at_secs: float) -> None:
        """Notes that slices were lost with the world that ran on them."""
        for number in sorted(slices):
            self._failures.append(decision.Failure(slice=number, at_secs=at_secs))
            self._presence.restart(number, at_secs=at_secs)
        self._quarantined = decision.quarantined(self._failures, self._policy)

    def restart(self) -> None:
        """Notes that the run was started anew: earlier failures do not count."""
        self._failures.clear()
        self._quarantined = frozenset()

    def decide(
        self, current: Collection[int], *, now_secs: float, waited_secs: float = 0.0
    ) -> decision.Decision:
        """The decision of the run on the slices that are there."""
        slices = decision.Slices(
            current=frozenset(current),
            present_secs={
                number: now_secs - since
                for number, since in self._presence.since.items()
                if not since or now_secs - since >= self._check_secs
            },
            quarantined=self._quarantined,
        )
        return decision.decide(
            slices, self._policy, self._work, waited_secs=waited_secs
        )

    def one_slice_fewer(self, slices: Sequence[int]) -> decision.Decision:
        """The decision if one of these slices is lost, and no other is there."""
        left = slices[:-1]
        return decision.decide(
            decision.Slices(
                current=frozenset(left), present_secs=dict.fromkeys(left, math.inf)
            ),
            self._policy,
            self._work,
        )

    def next_moment(self, *, now_secs: float) -> float:
        """When the next slice is sound or settled, so that the decision may change."""
        waits = {self._check_secs, self._policy.settle_secs} - {0.0}
        moments = (
            since + wait + MOMENT_SECS
            for since in self._presence.since.values()
            if since
            for wait in waits
        )
        return min((each for each in moments if each > now_secs), default=math.inf)
