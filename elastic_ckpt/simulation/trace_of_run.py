"""The trace of the faults that were injected into a real run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from elastic_ckpt.elastic import faults
from elastic_ckpt.simulation.trace import Event, What

# Other faults are no events of a trace.
_KINDS = {
    faults.Kind.KILL_SLICE: What.KILL_SLICE,
    faults.Kind.RETURN_SLICE: What.RETURN_SLICE,
    faults.Kind.KILL_HOST: What.KILL_HOST,
    faults.Kind.HANG_HOST: What.HANG_HOST,
}


def trace_of_run(
    events: Sequence[Mapping[str, Any]], *, hosts_per_slice: int
) -> list[Event]:
    """The faults of a run, by time.

    Hosts of faults are numbered as in the world that runs; those of a trace as in the
    cluster.

    Args:
      events: of the run, in order.
      hosts_per_slice: of the run.
    """
    slices: Sequence[int] = ()
    trace = []
    for event in events:
        if event["event"] == "world_started":
            slices = event["slices"]
        if event["event"] != "fault_injected":
            continue
        kind, which = faults.Kind(event["kind"]), event["target"]
        if kind not in _KINDS:
            continue
        if kind in faults.OF_HOSTS:
            place, host = divmod(which, hosts_per_slice)
            if place >= len(slices):
                continue
            which = slices[place] * hosts_per_slice + host
        secs = event["time"] - events[0]["time"]
        trace.append(Event(time=secs, what=_KINDS[kind], which=which))
    return trace
