"""SIGTERM to the machine that leads: its hosts leave, and another machine leads.

All hosts save and leave their world after a step that they agree on, as for any planned
change. Then this machine leads no more, and the next leader goes on from that step.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from elastic_ckpt.core import errors
from elastic_ckpt.elastic import failures, local_slices, supervisor
from elastic_ckpt.elastic.decision import Decision, Train
from elastic_ckpt.elastic.machines import slice_machines
from elastic_ckpt.elastic.machines.slice_machines import LeadershipLostError


class HandedOverError(LeadershipLostError):
    """This machine leaves the run, and has another one lead it."""


class Handover:
    """The end of a leader's last world.

    Args:
      own: the slices of this machine.
      machines: of all slices.

    Attributes:
      began: whether SIGTERM has arrived, and the run goes on without this machine.
    """

    def __init__(
        self, own: local_slices.LocalSlices, machines: slice_machines.SliceMachines
    ) -> None:
        self._own = own
        self._machines = machines
        self._deadline_secs = 0.0
        self.began = False

    def can_begin(self, decided: Decision | None, training: frozenset[int]) -> bool:
        """Whether the run can go on without this machine.

        Args:
          decided: without the slices of this machine; None to go on as now.
          training: the slices of the world that runs.
        """
        is_apart = training.isdisjoint(self._own.numbers)
        has_slices = isinstance(decided, Train) or (decided is None and is_apart)
        return has_slices and self._machines.are_several

    def begin(self, running: supervisor.HostProcesses) -> bool:
        """Asks the hosts to leave; those that have not begun to train are ended.

        Returns:
          Whether they are asked now.
        """
        self.began = True
        self._deadline_secs = time.monotonic() + self._own.limits.grace_secs
        if not running.is_running:
            running.end()
        return running.leave()

    def look(
        self,
        running: supervisor.HostProcesses,
        decided: Decision | None,
        training: frozenset[int],
    ) -> None:
        """Ends hosts that take too long, or the run; called often.

        Args:
          running: the hosts.
          decided: see `can_begin`; the other machines may have got SIGTERM, too.
          training: likewise.
        """
        if not self.can_begin(decided, training):
            self.began = False
            running.stop()
        elif time.monotonic() > self._deadline_secs:
            running.end()

    @contextlib.contextmanager
    def of_lost_worlds(self) -> Iterator[None]:
        """Raises a HandedOverError if the block loses its world, or its hosts' time."""
        try:
            yield
        except (failures.WorldLostError, errors.StoppedError) as error:
            if self.began:
                raise HandedOverError(str(error)) from error
            raise

    def check(self, *, is_over: bool) -> None:
        """Raises a HandedOverError if it began, unless the run is over."""
        if self.began and not is_over:
            raise HandedOverError("this machine was asked to end")
