"""A simulated cluster: what fails and comes back, and which of its slices are there.

Machines are numbered from 0: slice k has those from `k * hosts_per_slice` on, and a
rack has consecutive machines likewise. A host is one machine here, with separate
memory. A slice can be used while all of its machines are there.

A trace says what fails and comes back, and when, as JSON lines:

    {"version": 1}
    {"time": 3600.0, "what": "kill_machine", "which": 17}
    {"time": 9000.0, "what": "return_machine", "which": 17}

docs/pages/reference/simulate.md specifies the format. A trace names machines and slices
by their numbers in the cluster, so that it does not depend on what a run decides.

Without a trace, machines, slices, racks and processes fail at random, each kind as a
Poisson process with a mean time between the failures of one of them. Lost hardware is
back after a random time, exponential with a mean; a process is back at once. Each kind
is drawn from a separate stream of the seed, so that a changed rate of one leaves the
others alone. Source of the default: 419 unexpected interruptions of 2,048 hosts within
54 days ("The Llama 3 Herd of Models", arXiv:2407.21783, section 3.3.4), one for each
6,300 hours of a host. All of them count as lost machines, which is the worst case.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from elastic_ckpt.core import bucket_clients, errors, storage
from elastic_ckpt.elastic import decision

TRACE_VERSION = 1
# Times are sums in floating point: a moment later they have certainly passed.
MOMENT_SECS = 1e-6


class EventKind(enum.Enum):
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
        return self in (EventKind.KILL_HOST, EventKind.HANG_HOST)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Event:
    """One event of a trace.

    Attributes:
      time: in seconds since the run began.
      what: happens.
      which: the number of the slice, rack or machine.
    """

    time: float
    what: EventKind
    which: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClusterSize:
    """The size of a cluster.

    Attributes:
      slices: their number.
      hosts_per_slice: the machines of each.
      hosts_per_rack: the machines of each rack, which may hold parts of slices; the
        last rack may be smaller.
    """

    slices: int
    hosts_per_slice: int
    hosts_per_rack: int = 1

    @property
    def hosts(self) -> int:
        """All machines."""
        return self.slices * self.hosts_per_slice

    def number_of(self, target: str) -> int:
        """How many slices, racks or machines there are, by `EventKind.target`."""
        return -(-self.hosts // self._size(target))

    def hosts_of(self, target: str, which: int) -> range:
        """The machines of a slice or rack, or one machine."""
        first, size = which * self._size(target), self._size(target)
        return range(first, min(self.hosts, first + size))

    def slices_of(self, event: Event) -> range:
        """The slices that an event is about."""
        hosts, size = self.hosts_of(event.what.target, event.which), self._size("slice")
        return range(hosts[0] // size, hosts[-1] // size + 1)

    def _size(self, target: str) -> int:
        sizes = {"slice": self.hosts_per_slice, "rack": self.hosts_per_rack}
        return sizes.get(target, 1)


def to_bytes(events: Iterable[Event]) -> bytes:
    """The trace as a file, ordered by time."""
    lines = [{"version": TRACE_VERSION}] + [
        {"time": each.time, "what": each.what.value, "which": each.which}
        for each in sorted(events, key=lambda each: each.time)
    ]
    return "".join(json.dumps(line) + "\n" for line in lines).encode()


def parse(content: bytes, *, path: str, hardware: ClusterSize) -> list[Event]:
    """The events of a file, by time.

    Args:
      content: of the file.
      path: of the file, for messages.
      hardware: of the cluster.

    Raises:
      ConfigError: if a line is no event, or names something that does not exist.
    """
    entries: list[tuple[str, Any]] = []
    for number, line in enumerate(content.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            entries.append((f"{path}, line {number}", json.loads(line)))
        except ValueError as error:
            raise errors.ConfigError(
                f"{path}, line {number}, is not JSON ({error}); correct or remove it"
            ) from error
    if not entries or entries[0][1] != {"version": TRACE_VERSION}:
        raise errors.ConfigError(
            f'{path} does not begin with {{"version": {TRACE_VERSION}}}; write that as'
            " its first line, if it is a trace"
        )
    events = [_event(entry, place, hardware) for place, entry in entries[1:]]
    return sorted(events, key=lambda each: each.time)


def read(path: str, hardware: ClusterSize) -> list[Event]:
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
    return parse(content, path=path, hardware=hardware)


def _event(entry: Any, place: str, hardware: ClusterSize) -> Event:
    kinds = [kind.value for kind in EventKind]
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
    kind = EventKind(what)
    most = hardware.number_of(kind.target)
    if type(which) is not int or not 0 <= which < most:
        raise errors.ConfigError(
            f"{place}, has which {which!r}; {kind.target}s of this cluster have the"
            f" numbers 0 to {most - 1}; choose --hosts and --slices as of the trace"
        )
    return Event(time=float(time), what=kind, which=which)


_HOUR_SECS = 3600.0
# What fails, and what comes back, by kind; the order is that of the streams.
_FAILURES: Mapping[str, tuple[EventKind, EventKind | None]] = {
    "machine": (EventKind.KILL_MACHINE, EventKind.RETURN_MACHINE),
    "slice": (EventKind.KILL_SLICE, EventKind.RETURN_SLICE),
    "rack": (EventKind.KILL_RACK, EventKind.RETURN_RACK),
    "process": (EventKind.KILL_HOST, None),
    "hang": (EventKind.HANG_HOST, None),
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
        repaired = [kind for kind, (_, back) in _FAILURES.items() if back]
        for option, hours_of, kinds in (
            ("--fails", self.between_hours, list(_FAILURES)),
            ("--repair", self.repair_hours, repaired),
        ):
            for kind, hours in hours_of.items():
                if kind not in kinds or hours <= 0:
                    raise errors.ConfigError(
                        f"{option} {kind}={hours:g}: name one of {kinds} with hours"
                        " above 0"
                    )

    def trace(self, hardware: ClusterSize, *, secs: float) -> list[Event]:
        """The events of a cluster within a time, ordered by it."""
        events: list[Event] = []
        for stream, (kind, (what, back)) in enumerate(_FAILURES.items()):
            if kind not in self.between_hours:
                continue
            draw = np.random.default_rng([self.seed, stream])
            number = hardware.number_of(what.target)
            expected = secs * number / (self.between_hours[kind] * _HOUR_SECS)
            times = np.sort(draw.uniform(0.0, secs, draw.poisson(expected)))
            targets = draw.integers(0, number, len(times))
            repairs = draw.exponential(1.0, len(times)) * _HOUR_SECS
            drawn = zip(times.tolist(), targets.tolist(), repairs.tolist(), strict=True)
            is_back: dict[int, float] = {}
            for time, which, repair in drawn:
                if time < is_back.get(which, 0.0):
                    # It is gone already.
                    continue
                events.append(Event(time=time, what=what, which=which))
                if back:
                    end = time + repair * self.repair_hours.get(kind, 4.0)
                    is_back[which] = end
                    events.append(Event(time=end, what=back, which=which))
        return sorted(events, key=lambda each: each.time)


class SimulatedCluster:
    """Which slices are there, which events come, and what the run decides.

    Args:
      hardware: of the cluster; all of it is there at time 0.
      trace: the events, by time.
      policy: of the run.
      work: of the run.
      check_secs: how long a slice that is back is checked before it may be used.

    Attributes:
      since: by slice that is whole, since when.
    """

    def __init__(
        self,
        hardware: ClusterSize,
        trace: Sequence[Event],
        *,
        policy: decision.Policy,
        work: decision.Work,
        check_secs: float,
    ) -> None:
        self._hardware = hardware
        self._trace = trace
        self._next = 0
        self._policy = policy
        self._work = work
        self._check_secs = check_secs
        # By slice whose processes alone have died since the last world began, when.
        self._crashed: dict[int, float] = {}
        # By machine, the slices, racks and machines that are gone and include it.
        self._gone: dict[int, set[tuple[str, int]]] = {}
        self.since = dict.fromkeys(range(hardware.slices), 0.0)
        self._failures: list[decision.Failure] = []
        self._quarantined: frozenset[int] = frozenset()

    def next_event_secs(self) -> float:
        """When the next event comes."""
        is_over = self._next == len(self._trace)
        return math.inf if is_over else self._trace[self._next].time

    def take_event(self) -> Event:
        """Makes the next event happen."""
        event = self._trace[self._next]
        self._next += 1
        if event.what.keeps_machines:
            return event
        cause = (event.what.target, event.which)
        for host in self._hardware.hosts_of(*cause):
            causes = self._gone.setdefault(host, set())
            if event.what.is_return:
                causes.discard(cause)
            else:
                causes.add(cause)
        for number in self._hardware.slices_of(event):
            hosts = self._hardware.hosts_of("slice", number)
            if any(self._gone.get(host) for host in hosts):
                self.since.pop(number, None)
            else:
                self.since.setdefault(number, event.time)
        return event

    def note_lost(
        self,
        slices: Collection[int],
        *,
        crashed: Collection[int] = (),
        at_secs: float,
    ) -> None:
        """Notes that slices were lost with the world that ran on them.

        Args:
          slices: that were lost.
          crashed: those of them whose processes have died, and that may be as sound as
            before.
          at_secs: when.
        """
        for number in sorted(slices):
            self._failures.append(decision.Failure(slice=number, at_secs=at_secs))
            if number in self.since:
                # Its hosts were lost, but not its machines.
                if number in crashed:
                    self._crashed[number] = at_secs
                else:
                    self.since[number] = at_secs
        self._quarantined = decision.quarantined(self._failures, self._policy)

    def begin_world(self, slices: Collection[int]) -> None:
        """Notes the slices of the next world; others that have crashed come back."""
        for number, at_secs in self._crashed.items():
            if number in self.since and number not in slices:
                self.since[number] = at_secs
        self._crashed.clear()

    def restart(self) -> None:
        """Notes that the run was started anew: earlier failures do not count."""
        self._failures.clear()
        self._quarantined = frozenset()

    def decide(
        self, current: Collection[int], *, now_secs: float, waited_secs: float = 0.0
    ) -> decision.Decision:
        """The decision of the run on the slices that are there."""
        crashed = self._crashed.keys() & self.since.keys()
        present_secs = {
            number: now_secs - since
            for number, since in self.since.items()
            if number in crashed or self._is_checked(since, now_secs)
        }
        slices = decision.Slices(
            current=frozenset(current) | crashed,
            present_secs=present_secs,
            quarantined=self._quarantined,
        )
        return decision.decide(
            slices, self._policy, self._work, waited_secs=waited_secs
        )

    def _is_checked(self, since: float, now_secs: float) -> bool:
        return not since or now_secs - since >= self._check_secs

    def next_moment(self, *, now_secs: float) -> float:
        """When the decision may change: an event, or a slice is sound or settled."""
        waits = {self._check_secs, self._policy.settle_secs} - {0.0}
        moments = [
            since + wait + MOMENT_SECS
            for since in self.since.values()
            if since
            for wait in waits
        ]
        later = (each for each in moments if each > now_secs)
        return min([self.next_event_secs(), *later])
