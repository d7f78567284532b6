"""Times what a change of slices costs, phase by phase.

end      the hosts that are left are killed, or all leave after an agreed step
decide   the slices of the next world are known
start    its processes are joined
prepare  the job is assembled, and the newest step is found
restore  state and data are at that step
compile  the step is compiled, or loaded
step     the first step is done and logged
"""

from __future__ import annotations

import time
from collections.abc import Callable

from elastic_ckpt.core import events, storage

# The event that ends each phase.
_ENDS = {
    "world_started": "decide",
    "world_joined": "start",
    "run_started": "prepare",
    "restored_from": "restore",
    "weights_loaded": "restore",
    "compiled": "compile",
    "executable_loaded": "compile",
    "step": "step",
    "step_done": "step",
}
_STEPS = ("step", "step_done")
PHASES = ("end", *dict.fromkeys(_ENDS.values()))


class Timeline:
    """An `Emit` that adds the event `recovered` after the first step of a later world.

    It is made when a run begins.

    Args:
      emit: called for each event.
      clock: the time in seconds.
    """

    def __init__(
        self, emit: events.Emit, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._emit = emit
        self._clock = clock
        # The seconds of each phase of the change under way; None if there is none.
        self._phases: dict[str, float] | None = None
        self._since = 0.0
        self._began = clock()
        self._world = 0
        # When the hosts of this world were asked to leave; None if they were not.
        self._asked_secs: float | None = None
        self._newest_step = 0
        self._start_step = 0

    def begin(self, *, since_secs: float | None = None) -> None:
        """Begins a change.

        Args:
          since_secs: the time, by the clock, when the first host was missing; None for
            a change before which the hosts were asked to leave (`world_leaving`).
        """
        self._phases = dict.fromkeys(PHASES, 0.0)
        if since_secs is None:
            since_secs = self._asked_secs
        self._since = self._clock() if since_secs is None else since_secs
        self._end_phase("end")

    def __call__(self, name: str, **fields: storage.Json) -> None:
        """Passes an event on; that of the end with the seconds of all worlds."""
        if name == "run_finished":
            fields["secs"] = self._clock() - self._began
        self._emit(name, **fields)
        if name == "world_started":
            self._world = int(str(fields["world"]))
            self._asked_secs = None
        elif name == "world_leaving":
            self._asked_secs = self._clock()
        elif name == "run_started":
            self._start_step = int(str(fields["start_step"]))
        elif name == "restored_from":
            self._start_step = int(str(fields["step"]))
        if self._phases is not None and name in _ENDS:
            self._end_phase(_ENDS[name])
            if name in _STEPS:
                self._recovered(self._phases)
        if name in _STEPS:
            self._newest_step = int(str(fields["step"]))

    def _end_phase(self, phase: str) -> None:
        assert self._phases is not None
        now = self._clock()
        self._phases[phase] += now - self._since
        self._since = now

    def _recovered(self, phases: dict[str, float]) -> None:
        self._phases = None
        self._emit(
            "recovered",
            world=self._world,
            steps_lost=max(0, self._newest_step - self._start_step),
            secs=sum(phases.values()),
            **{f"{phase}_secs": secs for phase, secs in phases.items()},
        )
