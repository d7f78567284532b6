"""Carries out faults on the host processes of a world, and on the slices of a run."""

from __future__ import annotations

import signal
from collections.abc import Callable, Collection, Sequence

from elastic_ckpt.core import events
from elastic_ckpt.elastic import faults, supervisor
from elastic_ckpt.elastic.machines import slice_machines


class Injector:
    """Carries out each fault when it is due.

    Args:
      injected: the faults, by their steps.
      machines: of the slices.
      gone: called with the number of a slice that is absent from now on.
      returned: called with the number of a slice that is there again.
      emit: called for each fault.

    Attributes:
      absent: the slices that are absent though their machines are there.
    """

    def __init__(
        self,
        injected: Sequence[faults.Fault],
        machines: slice_machines.SliceMachines,
        *,
        gone: Callable[[int], object],
        returned: Callable[[int], None],
        emit: events.Emit = events.nobody,
    ) -> None:
        self._faults = list(injected)
        self._machines = machines
        self._gone = gone
        self._returned = returned
        self._emit = emit
        self.absent: set[int] = set()

    def pass_over(self, start_step: int) -> None:
        """Drops faults that an earlier start of the run has lived through."""
        self._faults = [f for f in self._faults if f.at_step >= start_step]

    def inject(
        self,
        running: supervisor.HostProcesses,
        *,
        step: int,
        hosts_of: Callable[[int], Collection[int]],
    ) -> None:
        """Carries out the faults that are due; called every 0.1 s.

        Args:
          running: the hosts of the world.
          step: the number of steps that are done.
          hosts_of: returns the hosts of a slice in this world.
        """

        def hosts(fault: faults.Fault) -> Collection[int]:
            if fault.kind in faults.OF_HOSTS:
                return [fault.target]
            return hosts_of(fault.target)

        for fault in faults.due(self._faults, step):
            self._faults.remove(fault)
            self._emit(
                "fault_injected",
                kind=str(fault.kind),
                target=fault.target,
                step=step,
            )
            self._carry_out(fault, running, hosts(fault))

    def _carry_out(
        self,
        fault: faults.Fault,
        running: supervisor.HostProcesses,
        hosts: Collection[int],
    ) -> None:
        kind = faults.Kind(fault.kind)
        match kind:
            case faults.Kind.KILL_SLICE:
                self.absent.add(fault.target)
                self._gone(fault.target)
                running.send_signal(hosts, signal.SIGKILL)
                self._machines.inject(kind, fault.target)
            case faults.Kind.PREEMPT_SLICE:
                self.absent.add(fault.target)
                running.send_signal(hosts, signal.SIGTERM)
            case faults.Kind.BREAK_SLICE:
                self._machines.inject(kind, fault.target)
            case faults.Kind.RETURN_SLICE:
                self.absent.discard(fault.target)
                self._machines.inject(kind, fault.target)
                self._returned(fault.target)
            case faults.Kind.KILL_HOST:
                running.send_signal(hosts, signal.SIGKILL)
            case faults.Kind.HANG_HOST:
                running.send_signal(hosts, signal.SIGSTOP)
