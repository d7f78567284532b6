"""The failure model: a random trace of what is lost and comes back.

Machines, slices, racks and processes fail at random, each kind as a Poisson process
with a mean time between the failures of one of them. Lost hardware is back after a
random time, exponential with a mean; a process is back at once. Each kind is drawn from
a separate stream of the seed, so that a changed rate of one leaves the others alone.

Source of the default: 419 unexpected interruptions of 2,048 hosts within 54 days
("The Llama 3 Herd of Models", arXiv:2407.21783, section 3.3.4), one for each 6,300
hours of a host. All of them count as lost machines, which is the worst case.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np

from elastic_ckpt.core import errors
from elastic_ckpt.simulation.hardware import Hardware
from elastic_ckpt.simulation.trace import Event, What

_HOUR_SECS = 3600.0
# The kinds of failures, and what happens; their order is that of the streams.
_LOSSES = {
    "machine": What.KILL_MACHINE,
    "slice": What.KILL_SLICE,
    "rack": What.KILL_RACK,
    "process": What.KILL_HOST,
    "hang": What.HANG_HOST,
}
_RETURNS = {
    "machine": What.RETURN_MACHINE,
    "slice": What.RETURN_SLICE,
    "rack": What.RETURN_RACK,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class FailureModel:
    """How often things fail, and how long they are gone.

    Attributes:
      between_hours: by kind (`machine`, `slice`, `rack`, `process`, `hang`), the mean
        time between failures of one of them; kinds that are absent do not fail.
      repair_hours: by kind (`machine`, `slice`, `rack`), the mean time until one that
        failed is back, or replaced.
      seed: of the draw.
    """

    between_hours: Mapping[str, float] = dataclasses.field(
        default_factory=lambda: {"machine": 6300.0}
    )
    repair_hours: Mapping[str, float] = dataclasses.field(
        default_factory=lambda: {"machine": 4.0, "slice": 1.0, "rack": 4.0}
    )
    seed: int = 0

    def __post_init__(self) -> None:
        for field, kinds in (("between_hours", _LOSSES), ("repair_hours", _RETURNS)):
            for kind, hours in getattr(self, field).items():
                if kind not in kinds or hours <= 0:
                    option = "--fails" if field == "between_hours" else "--repair"
                    raise errors.ConfigError(
                        f"{option} {kind}={hours:g}: name one of {list(kinds)} with"
                        " hours above 0"
                    )

    def trace(self, hardware: Hardware, *, secs: float) -> list[Event]:
        """The events of a cluster within a time, ordered by it."""
        events = [
            event
            for stream, kind in enumerate(_LOSSES)
            if kind in self.between_hours
            for event in self._of_kind(kind, stream, hardware, secs)
        ]
        return sorted(events, key=lambda each: each.time)

    def _of_kind(
        self, kind: str, stream: int, hardware: Hardware, secs: float
    ) -> list[Event]:
        draw = np.random.default_rng([self.seed, stream])
        number = hardware.number_of(_LOSSES[kind].target)
        expected = secs * number / (self.between_hours[kind] * _HOUR_SECS)
        times = np.sort(draw.uniform(0.0, secs, draw.poisson(expected)))
        targets = draw.integers(0, number, len(times))
        repairs = draw.exponential(1.0, len(times)) * _HOUR_SECS
        events: list[Event] = []
        back: dict[int, float] = {}
        for time, which, repair in zip(
            times.tolist(), targets.tolist(), repairs.tolist(), strict=True
        ):
            if time < back.get(which, 0.0):
                # It is gone already.
                continue
            events.append(Event(time=time, what=_LOSSES[kind], which=which))
            if kind in _RETURNS:
                back[which] = time + repair * self.repair_hours.get(kind, 4.0)
                returned = _RETURNS[kind]
                events.append(Event(time=back[which], what=returned, which=which))
        return events
