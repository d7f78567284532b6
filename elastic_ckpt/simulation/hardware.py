"""The machines of a simulated cluster, and which of them are there.

Machines are numbered from 0: slice k has those from `k * hosts_per_slice` on, and a
rack has consecutive machines likewise. A host is one machine here, with separate
memory. A slice can be used while all of its machines are there.
"""

from __future__ import annotations

import dataclasses

from elastic_ckpt.simulation.trace import Event


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hardware:
    """The size of a cluster.

    Attributes:
      slices: their number.
      hosts_per_slice: the machines of each.
      hosts_per_rack: the machines of each rack, which may hold parts of slices.
    """

    slices: int
    hosts_per_slice: int
    hosts_per_rack: int = 1

    @property
    def hosts(self) -> int:
        """All machines."""
        return self.slices * self.hosts_per_slice

    @property
    def racks(self) -> int:
        """All racks; the last one may be smaller."""
        return -(-self.hosts // self.hosts_per_rack)

    def hosts_of_slice(self, number: int) -> range:
        """The machines of a slice."""
        first = number * self.hosts_per_slice
        return range(first, first + self.hosts_per_slice)

    def hosts_of_rack(self, number: int) -> range:
        """The machines of a rack."""
        first = number * self.hosts_per_rack
        return range(first, min(self.hosts, first + self.hosts_per_rack))

    def hosts_of(self, event: Event) -> range:
        """The machines that an event of a trace is about."""
        match event.what.target:
            case "slice":
                return self.hosts_of_slice(event.which)
            case "rack":
                return self.hosts_of_rack(event.which)
            case _:
                return range(event.which, event.which + 1)

    def number_of(self, target: str) -> int:
        """How many slices, racks or machines there are, by `What.target`."""
        return {"slice": self.slices, "rack": self.racks}.get(target, self.hosts)


class Presence:
    """Which machines are there, and since when each slice is whole.

    Args:
      hardware: of the cluster; all of it is there at time 0.

    Attributes:
      since: by slice that is whole, since when.
    """

    def __init__(self, hardware: Hardware) -> None:
        self._hardware = hardware
        # By machine, the slices, racks and machines that are gone and include it.
        self._gone: dict[int, set[tuple[str, int]]] = {}
        self.since = dict.fromkeys(range(hardware.slices), 0.0)

    def note(self, event: Event) -> None:
        """Notes that machines are gone or back; other events change nothing."""
        if event.what.keeps_machines:
            return
        cause = (event.what.target, event.which)
        for host in self._hardware.hosts_of(event):
            if event.what.is_return:
                causes = self._gone.get(host, set())
                causes.discard(cause)
                if not causes:
                    self._gone.pop(host, None)
            else:
                self._gone.setdefault(host, set()).add(cause)
        for number in self.slices_of(event):
            is_whole = not any(
                host in self._gone for host in self._hardware.hosts_of_slice(number)
            )
            if not is_whole:
                self.since.pop(number, None)
            else:
                self.since.setdefault(number, event.time)

    def slices_of(self, event: Event) -> range:
        """The slices that an event is about."""
        hosts = self._hardware.hosts_of(event)
        size = self._hardware.hosts_per_slice
        return range(hosts[0] // size, hosts[-1] // size + 1)

    def restart(self, number: int, *, at_secs: float) -> None:
        """Notes that the hosts of a whole slice were lost, but not its machines."""
        if number in self.since:
            self.since[number] = at_secs
