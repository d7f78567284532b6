"""Faults as data: what is to fail in a run, and when.

    faults: [{kill_slice: 1, at_step: 40}, {return_slice: 1, at_step: 80}]

* `kill_slice`: a slice dies with its hosts' memory, and is absent from then on.
* `return_slice`: a slice is there again, with empty memory.
* `preempt_slice`: the hosts of a slice get SIGTERM, as on a machine that is about to be
  preempted; it is absent, with its memory, once they have left.
* `break_slice`: the devices of a slice compute wrong values when it is checked.
* `kill_host`: the process of a host is killed; the memory of its machine stays.
* `hang_host`: a host stops (SIGSTOP), and its connections stay open.
* `slow_host`: a host gets a quarter of its time, until its world ends.
* `cut_off`: the hosts of a slice lose their connections, though they live, and can make
  none; nor can hosts of the slice that are started later. Once it is lost it is absent,
  with its memory.

A fault happens when `at_step` steps are done, or a host of its target is in a phase:

    faults: [{kill_slice: 2, in_phase: restore, in_world: 2}]

`in_phase` is one of `PHASES`; without `in_world` it is that of any world. With
`at_step`, too, it is the first such phase from that step on.

Hosts are numbered as in the world that runs. Faults are for tests and demonstrations;
they are the supervisor's, so training code need not contain any.

Source: torchft's `FailureInjection`, whose failures are data, too.
"""

from __future__ import annotations

import dataclasses
import enum
import json
from collections.abc import Callable, Collection, Sequence
from typing import Any

from elastic_ckpt.core import errors

# The phases of a host; see `watch`.
PHASES = (
    "start",
    "reach",
    "join",
    "prepare",
    "restore",
    "compile",
    "step",
    "evaluate",
    "save",
    "close",
)


class Kind(enum.StrEnum):
    """The kinds of faults, and the return of a slice."""

    KILL_SLICE = "kill_slice"
    RETURN_SLICE = "return_slice"
    PREEMPT_SLICE = "preempt_slice"
    BREAK_SLICE = "break_slice"
    KILL_HOST = "kill_host"
    HANG_HOST = "hang_host"
    SLOW_HOST = "slow_host"
    CUT_OFF = "cut_off"


OF_HOSTS = (Kind.KILL_HOST, Kind.HANG_HOST, Kind.SLOW_HOST)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fault:
    """A fault to inject into a run, or the return of a slice.

    Attributes:
      kind: what happens: `"kill_slice"`, `"return_slice"`, `"preempt_slice"`,
        `"break_slice"`, `"kill_host"`, `"hang_host"`, `"slow_host"` or `"cut_off"`.
      target: the number of the slice or host.
      at_step: the number of steps that have to be done before it happens.
      in_phase: the phase that a host of the target has to be in, such as `restore`;
        empty for any.
      in_world: the number of the world in which it happens; 0 for any.
    """

    kind: Kind | str
    target: int
    at_step: int = 0
    in_phase: str = ""
    in_world: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.kind, Kind):
            kinds = [each.value for each in Kind]
            if self.kind not in kinds:
                raise errors.ConfigError(
                    f"Fault(kind={self.kind!r}): choose one of {kinds}"
                )
            object.__setattr__(self, "kind", Kind(self.kind))


def parse(text: str) -> tuple[Fault, ...]:
    """The faults that the key `faults` lists, as JSON, by their steps.

    Raises:
      ConfigError: if it lists anything else; the entry is named.
    """
    try:
        listed = json.loads(text) if text else []
    except ValueError:
        listed = text
    if not isinstance(listed, list):
        raise errors.ConfigError(
            f"faults={text!r} is not a list; write it as"
            " [{kill_slice: 1, at_step: 40}, {return_slice: 1, at_step: 80}]"
        )
    return tuple(sorted(map(_fault, listed), key=lambda fault: fault.at_step))


def due(
    faults: Sequence[Fault],
    step: int,
    *,
    world: int = 0,
    phases: Callable[[Fault], Collection[str]] = lambda _: (),
) -> tuple[Fault, ...]:
    """Those of `faults` that happen now, in the order in which `parse` sorted them.

    Args:
      faults: that have not happened yet.
      step: the number of steps that are done.
      world: the number of the world that runs.
      phases: returns the phases of the hosts of a fault's target.
    """
    return tuple(
        fault
        for fault in faults
        if fault.at_step <= step
        and fault.in_world in (0, world)
        and (not fault.in_phase or fault.in_phase in phases(fault))
    )


def _fault(entry: Any) -> Fault:
    kinds = [kind.value for kind in Kind]
    numbers = {"at_step", "in_world"}
    if isinstance(entry, dict) and entry.keys() & {"at_step", "in_phase"}:
        names = list(entry.keys() - numbers - {"in_phase"})
        counts = [entry[name] for name in entry.keys() - {"in_phase"}]
        are_counts = all(type(value) is int and value >= 0 for value in counts)
        phase = entry.get("in_phase", "")
        is_phase = phase == "" or phase in PHASES
        if len(names) == 1 and names[0] in kinds and are_counts and is_phase:
            when = {name: entry[name] for name in entry.keys() & numbers}
            return Fault(
                kind=Kind(names[0]), target=entry[names[0]], in_phase=phase, **when
            )
    raise errors.ConfigError(
        f"faults: the entry {entry!r} is not a fault; give one of {kinds} with a"
        " number, and either at_step with a number of steps, or in_phase with one of"
        f" {list(PHASES)} and, if you like, in_world with the number of a world"
    )
