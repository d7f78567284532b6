"""Traces: what fails and comes back, and when, as JSON lines.

    {"version": 1}
    {"time": 3600.0, "what": "kill_machine", "which": 17}
    {"time": 9000.0, "what": "return_machine", "which": 17}

docs/pages/reference/simulate.md specifies the format. A trace names machines and slices
by their numbers in the cluster, so that it does not depend on what a run decides.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import math
from collections.abc import Iterable, Mapping
from typing import Any

from elastic_ckpt.core import bucket_clients, errors, storage

VERSION = 1


class What(enum.Enum):
    """The kinds of events; `elastic.faults` has those of slices and hosts, too."""

    KILL_SLICE = "kill_slice"
    RETURN_SLICE = "return_slice"
    KILL_RACK = "kill_rack"
    RETURN_RACK = "return_rack"
    KILL_MACHINE = "kill_machine"
    RETURN_MACHINE = "return_machine"
    KILL_HOST = "kill_host"
    HANG_HOST = "hang_host"

    @property
    def target(self) -> str:
        """The kind of thing that `which` numbers: slice, rack or machine."""
        kind = self.value.partition("_")[2]
        return "machine" if kind == "host" else kind

    @property
    def is_return(self) -> bool:
        """Whether something is there again, with empty memory."""
        return self.value.startswith("return_")

    @property
    def keeps_machines(self) -> bool:
        """Whether a process is lost, and its machine stays, with its memory."""
        return self in (What.KILL_HOST, What.HANG_HOST)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Event:
    """One event of a trace.

    Attributes:
      time: in seconds since the run began.
      what: happens.
      which: the number of the slice, rack or machine.
    """

    time: float
    what: What
    which: int


def to_bytes(events: Iterable[Event]) -> bytes:
    """The trace as a file, ordered by time."""
    lines = [{"version": VERSION}] + [
        {"time": each.time, "what": each.what.value, "which": each.which}
        for each in sorted(events, key=lambda each: each.time)
    ]
    return "".join(json.dumps(line) + "\n" for line in lines).encode()


def parse(content: bytes, *, path: str, numbers: Mapping[str, int]) -> list[Event]:
    """The events of a file, by time.

    Args:
      content: of the file.
      path: of the file, for messages.
      numbers: how many slices, racks and machines there are, by `What.target`.

    Raises:
      ConfigError: if a line is no event, or names something that does not exist.
    """
    lines = [_json(line, path, n) for n, line in _lines(content)]
    if not lines or lines[0][1] != {"version": VERSION}:
        raise errors.ConfigError(
            f'{path} does not begin with {{"version": {VERSION}}}; write that as its'
            " first line, if it is a trace"
        )
    events = [_event(entry, f"{path}, line {n}", numbers) for n, entry in lines[1:]]
    return sorted(events, key=lambda each: each.time)


def read(path: str, *, numbers: Mapping[str, int]) -> list[Event]:
    """As `parse`, of the file at a path.

    Raises:
      ConfigError: if there is none, and as in `parse`.
    """
    try:
        content = storage.absolute(path).read_bytes()
    except bucket_clients.failures() as error:
        raise errors.ConfigError(
            f"--trace {path} cannot be read: {error}; name a file of JSON lines"
        ) from error
    return parse(content, path=path, numbers=numbers)


def _lines(content: bytes) -> list[tuple[int, bytes]]:
    numbered = enumerate(content.splitlines(), start=1)
    return [(number, line) for number, line in numbered if line.strip()]


def _json(line: bytes, path: str, number: int) -> tuple[int, Any]:
    try:
        return number, json.loads(line)
    except ValueError as error:
        raise errors.ConfigError(
            f"{path}, line {number}, is not JSON ({error}); correct or remove it"
        ) from error


def _event(entry: Any, place: str, numbers: Mapping[str, int]) -> Event:
    kinds = [kind.value for kind in What]
    if not isinstance(entry, dict) or entry.keys() != {"time", "what", "which"}:
        raise errors.ConfigError(
            f"{place}, has {entry!r}; an event has time, what and which"
        )
    time, what, which = entry["time"], entry["what"], entry["which"]
    if type(time) not in (int, float) or not 0 <= time < math.inf:
        raise errors.ConfigError(
            f"{place}, has time {time!r}; it is in seconds, from 0 on"
        )
    if what not in kinds:
        raise errors.ConfigError(f"{place}, has what {what!r}; it is one of {kinds}")
    kind = What(what)
    most = numbers[kind.target]
    if type(which) is not int or not 0 <= which < most:
        raise errors.ConfigError(
            f"{place}, has which {which!r}; {kind.target}s of this cluster have the"
            f" numbers 0 to {most - 1}; choose --hosts and --slices as of the trace"
        )
    return Event(time=float(time), what=kind, which=which)
