"""Faults as data: what fails in a run, and when.

    faults: [{kill_slice: 1, at_step: 40}, {return_slice: 1, at_step: 80}]

* `kill_slice`: a slice is lost with its hosts' memory and does not return.
* `return_slice`: a slice rejoins, with empty memory.
* `break_slice`: the devices of a slice compute wrong values when they are checked.
* `kill_host`: a host process is killed; the machine keeps its memory.
* `hang_host`: a host is frozen (SIGSTOP); its connections stay open.

A fault happens when `at_step` steps are completed. Hosts are numbered as in the current
world. Faults are for tests and demonstrations; the supervisor injects them, so training
code need not contain any.

Source: torchft's `FailureInjection`, whose failures are also data.
"""

from __future__ import annotations

import dataclasses
import enum
import json
from collections.abc import Sequence

from elastic_ckpt.core import codec, errors


class Kind(enum.StrEnum):
    """The kinds of faults, including the return of a slice."""

    KILL_SLICE = "kill_slice"
    RETURN_SLICE = "return_slice"
    BREAK_SLICE = "break_slice"
    KILL_HOST = "kill_host"
    HANG_HOST = "hang_host"


OF_HOSTS = (Kind.KILL_HOST, Kind.HANG_HOST)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fault:
    """A fault to inject into a run, or the return of a slice.

    Attributes:
      kind: the kind of fault: `"kill_slice"`, `"return_slice"`, `"break_slice"`,
        `"kill_host"` or `"hang_host"`.
      target: the slice number, or the host's index in the current world.
      at_step: the number of completed steps at which the fault happens.
    """

    kind: Kind | str
    target: int
    at_step: int = 0

    def __post_init__(self) -> None:
        kinds = [each.value for each in Kind]
        if self.kind not in kinds:
            raise errors.ConfigError(
                f"Fault(kind={self.kind!r}): choose one of {kinds}"
            )
        object.__setattr__(self, "kind", Kind(self.kind))


def parse(text: str) -> tuple[Fault, ...]:
    """Parses the `faults` key, a JSON list; returns the faults in step order.

    Raises:
      ConfigError: if an entry is not a fault; the message quotes the entry.
    """
    try:
        listed = codec.decode(list[dict[str, int]], json.loads(text or "[]"))
        return tuple(sorted(map(_fault, listed), key=lambda fault: fault.at_step))
    except ValueError as error:
        raise errors.ConfigError(
            f"faults={text!r} is not a list of faults ({error}); use the"
            " form [{kill_slice: 1, at_step: 40}, {return_slice: 1, at_step: 80}],"
            " where each entry has at_step and one of"
            f" {[each.value for each in Kind]}"
        ) from None


def due(faults: Sequence[Fault], step: int) -> tuple[Fault, ...]:
    """The faults that happen once `step` steps are completed."""
    return tuple(fault for fault in faults if fault.at_step <= step)


def _fault(entry: dict[str, int]) -> Fault:
    kinds = entry.keys() & {*Kind}
    is_complete = len(kinds) == 1 and entry.keys() == kinds | {"at_step"}
    if not is_complete or min(entry.values()) < 0:
        raise ValueError(f"{entry} is not a fault")
    (kind,) = kinds
    return Fault(kind=kind, target=entry[kind], at_step=entry["at_step"])
