"""The machines that have the slices of a run: this one, and those that follow it."""

from __future__ import annotations

from collections.abc import Collection

from elastic_ckpt.elastic import faults, host_start, local_slices, slice_check
from elastic_ckpt.elastic.cluster import Assignment
from elastic_ckpt.elastic.machines import followers, remote_machine


class SliceMachines:
    """Finds the machine of each slice.

    Args:
      own: the slices of this machine.
      others: the other machines; None if there is none.

    Attributes:
      are_several: whether the run has other machines.
    """

    def __init__(
        self, own: local_slices.LocalSlices, others: followers.Followers | None
    ) -> None:
        self._own = own
        self._others = others
        self.are_several = others is not None

    def poll(self) -> None:
        """Takes in machines that come and go; see `Followers.poll`."""
        if self._others is not None:
            self._others.poll()

    def may_go_on(self) -> bool:
        """Whether others may continue the run without this one."""
        return self._others is not None and self._others.may_go_on()

    def slices(self) -> frozenset[int]:
        """The slices of all machines that are there."""
        others = frozenset[int]() if self._others is None else self._others.slices()
        return others.union(self._own.numbers)

    def numbers(self, slices: Collection[int]) -> frozenset[int]:
        """The machines of slices; empty if the run has only one."""
        if not self.are_several:
            return frozenset()
        return frozenset(number // len(self._own.numbers) for number in slices)

    def checkers(
        self,
    ) -> list[slice_check.SliceChecks | remote_machine.RemoteMachine]:
        """The checks of the slices of each machine."""
        others = [] if self._others is None else self._others.all()
        return [self._own.checks, *others]

    def check(self, number: int) -> None:
        """Begins to check a slice."""
        (self._remote(number) or self._own.checks).begin(number)

    def inject(self, kind: faults.Kind, number: int) -> None:
        """Carries out a fault of a slice on its machine, but for signals to hosts.

        Nothing happens on a machine that is not there.
        """
        if number in self.slices():
            (self._remote(number) or self._own).inject(kind, number)

    def of_world(
        self,
        assignment: Assignment,
        *,
        cut_off: Collection[int] = (),
        is_ahead: bool = False,
    ) -> list[host_start.HostMachine]:
        """The machines that start the hosts of a world, by host.

        Args:
          assignment: the world.
          cut_off: the slices that have lost their network: a fault.
          is_ahead: whether its hosts compile ahead for it, and do not train.
        """
        machines: list[host_start.HostMachine] = []
        for number in assignment.work.slices:
            remote = self._remote(number)
            machine: host_start.HostMachine = self._own.machine
            if remote is not None:
                machine = remote_machine.RemoteStart(
                    machine=remote, assignment=assignment, is_ahead=is_ahead
                )
            if number in cut_off:
                machine = host_start.CutOffMachine(machine)
            machines += [machine] * self._own.hosts_per_slice
        return machines

    def _remote(self, number: int) -> remote_machine.RemoteMachine | None:
        # The other machine that has a slice and is there.
        return None if self._others is None else self._others.of_slice(number)
