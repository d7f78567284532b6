"""Faults as data: what is to fail in a run, and at which step.

    faults: [{kill_slice: 1, at_step: 40}, {return_slice: 1, at_step: 80}]

* `kill_slice`: a slice dies with its hosts' memory, and is absent from then on.
* `return_slice`: a slice is there again, with empty memory.
* `preempt_slice`: the hosts of a slice get SIGTERM, as on a machine that is about to be
  preempted; it is absent, with its memory, once they have left.
* `break_slice`: the devices of a slice compute wrong values when it is checked.
* `kill_host`: the process of a host is killed; the memory of its machine stays.
* `hang_host`: a host stops (SIGSTOP), and its connections stay open.

Hosts are numbered as in the world that runs. Faults are for tests and demonstrations;
they are the supervisor's, so training code need not contain any.

Source: torchft's `FailureInjection`, whose failures are data, too.
"""

from __future__ import annotations

import dataclasses
import enum
import json
from collections.abc import Sequence
from typing import Any

from elastic_ckpt.core import errors


class Kind(enum.Enum):
    """The kinds of faults, and the return of a slice."""

    KILL_SLICE = "kill_slice"
    RETURN_SLICE = "return_slice"
    PREEMPT_SLICE = "preempt_slice"
    BREAK_SLICE = "break_slice"
    KILL_HOST = "kill_host"
    HANG_HOST = "hang_host"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fault:
    """One fault.

    Attributes:
      kind: what happens.
      target: the number of the slice or host.
      at_step: the number of steps that are done when it happens.
    """

    kind: Kind
    target: int
    at_step: int


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


def due(faults: Sequence[Fault], step: int) -> tuple[Fault, ...]:
    """The first of `faults`, which `parse` sorted, that happen when `step` is done."""
    return tuple(fault for fault in faults if fault.at_step <= step)


def _fault(entry: Any) -> Fault:
    kinds = [kind.value for kind in Kind]
    if isinstance(entry, dict) and len(entry) == 2 and "at_step" in entry:
        (name,) = entry.keys() - {"at_step"}
        values = (entry[name], entry["at_step"])
        if name in kinds and all(type(value) is int and value >= 0 for value in values):
            target, at_step = values
            return Fault(kind=Kind(name), target=target, at_step=at_step)
    raise errors.ConfigError(
        f"faults has the entry {entry!r}; an entry is one of {kinds} with a number, and"
        " at_step with a number of steps"
    )
