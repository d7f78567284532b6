"""The failures of a simulated cluster: random or taken from a real run.

Failures are the `slice_lost`, `slice_returned` and `host_lost` events of `core.events`,
so a simulation can replay the failures in any run's log.

Source of the default rate: 419 unexpected interruptions of 2,048 hosts within 54 days
("The Llama 3 Herd of Models", arXiv:2407.21783, section 3.3.4), one per 6,300 host
hours. Each interruption counts as the loss of the host's slice, the worst case.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from elastic_ckpt.core import errors


class Failure(NamedTuple):
    """A failure, or the return of a slice.

    Attributes:
      time: the seconds since the run began.
      name: `slice_lost` (with its memory), `slice_returned` (with empty memory) or
        `host_lost` (only a process, while its machine and memory remain).
      slice: the slice number; for `host_lost`, the number of the host's slice.
    """

    time: float
    name: str
    slice: int


def draw(
    *,
    slices: int,
    hosts_per_slice: int,
    secs: float,
    machine_hours: float = 6300.0,
    repair_hours: float = 4.0,
    seed: int = 0,
) -> list[Failure]:
    """Random losses of slices within `secs`, and their returns, ordered by time.

    Times are exponentially distributed. `machine_hours` is a machine's mean time
    between failures; each failure takes down the machine's slice. `repair_hours` is the
    mean time until a lost slice is back.
    """
    random = np.random.default_rng(seed)
    expected = secs * slices * hosts_per_slice / (machine_hours * 3600.0)
    times = np.sort(random.uniform(0.0, secs, random.poisson(expected)))
    events: list[Failure] = []
    back_at = dict.fromkeys(range(slices), 0.0)
    for time in times.tolist():
        number = int(random.integers(slices))
        back = time + random.exponential(repair_hours * 3600.0)
        if time >= back_at[number]:
            events += [
                Failure(time, "slice_lost", number),
                Failure(back, "slice_returned", number),
            ]
            back_at[number] = back
    return sorted(events)


def of_log(
    log: Sequence[Mapping[str, Any]], *, slices: int, hosts_per_slice: int
) -> list[Failure]:
    """The failures in the log of a run, with times since its first event.

    Reads the three failure events and `world_started`, which maps hosts to slices. A
    lost slice that is in the next world without having returned lost only a process.

    Raises:
      ConfigError: if an event is about a slice that the cluster does not have.
    """
    events: list[Failure] = []
    world: Sequence[int] = range(slices)
    # By slice, when this world lost the slice or one of its hosts.
    lost: dict[int, float] = {}
    # A slice that the last world lost never returned.
    log = [*log, {"event": "world_started", "time": 0.0, "slices": (), "spares": ()}]
    for line in log:
        name, time = line["event"], line["time"] - log[0]["time"]
        if name == "world_started":
            world = line["slices"]
            # A slice in this world that has not returned lost only a process.
            back = {e.slice for e in events if e.time > lost.get(e.slice, math.inf)}
            kept = {*world, *line["spares"]} - back
            events += [
                Failure(at, "host_lost" if number in kept else "slice_lost", number)
                for number, at in lost.items()
            ]
            lost = {}
        elif name in ("slice_lost", "slice_returned", "host_lost"):
            kind = name.partition("_")[0]
            place = line[kind] // hosts_per_slice if kind == "host" else line[kind]
            known = world if kind == "host" else range(slices)
            if place >= len(known) or known[place] >= slices:
                raise errors.ConfigError(
                    f"--trace has a {name} event for {kind} {line[kind]}, but the"
                    f" configuration has only slices 0 to {slices - 1}, with"
                    f" {hosts_per_slice} hosts each; set hosts and slices as in that"
                    " run"
                )
            if name == "slice_returned":
                events.append(Failure(time, name, known[place]))
            else:
                lost.setdefault(known[place], time)
    return sorted(events)
