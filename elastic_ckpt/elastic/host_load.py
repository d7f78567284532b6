"""The time that a host spends on its own account, for which all other hosts wait.

All hosts wait for the slowest one in the same collectives, so a step takes the same
time on each. These times are those of one host alone:

* `late`: a thread of the process is to wake up ten times a second. So much later it
  did: the process was stopped, or got no processor.
* `data`: the loop waited for a batch.
* `save`: the loop was blocked while the state of the data was captured.

A host whose devices alone are slow shows none of them.
"""

from __future__ import annotations

import collections
import threading
import time

LATE = "late"
_TICK_SECS = 0.1
_TICKS = 10


class HostLoad:
    """Adds up these times in a host, in seconds."""

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
