"""A cluster: the slices that a run can use, and worlds on them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Protocol

from elastic_ckpt.core import events, storage
from elastic_ckpt.elastic.decision import Decision, Slices, Train
from elastic_ckpt.elastic.world import World
from elastic_ckpt.tiers.persistent.claims import Claimant

TrainFunction = Callable[[World], object]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Assignment:
    """The world that a cluster runs next.

    Attributes:
      number: of the world, from 1 at each start of a run.
      work: the slices and the rows of a batch.
      claimant: claims the world in storage, for this start of the run; a cluster adds
        it.
    """

    number: int
    work: Train
    claimant: Claimant | None = None


def leaving_for(decided: Decision | None) -> list[storage.Json]:
    """The slices of the next world, for `world_leaving`; none if it has to wait."""
    return list(decided.slices) if isinstance(decided, Train) else []


class Cluster(Protocol):
    """The slices of a run: `Processes` or `Pathways`.

    Its methods are what `run` calls, from one thread.
    """

    @property
    def devices_per_slice(self) -> int:
        """The number of devices of each slice."""

    def slices(self, current: frozenset[int]) -> Slices:
        """The slices that are alive now.

        Args:
          current: the slices of the present world, or of the last one.
        """

    def run_world(
        self,
        train: TrainFunction,
        assignment: Assignment,
        *,
        emit: events.Emit,
        has_changed: Callable[[], Decision | None],
    ) -> bool:
        """Calls `train` on all hosts of a new world, and returns when the world ends.

        Args:
          train: the training loop.
          assignment: the slices and rows of the world.
          emit: called with each event of the hosts.
          has_changed: called often; returns the decision to continue on other slices,
            or to wait for some, and None as long as the world is to go on. After a
            decision the next world may be prepared; then the hosts are asked to leave,
            with the event `world_leaving`, and do so after a step that they agree on.

        Returns:
          Whether the run is over; False if the hosts have left for another world.

        Raises:
          WorldLostError: if hosts failed, also if `train` raised; `slices` then lacks
            those that are lost.
          StoppedError: if the run was asked to end, and did not end in time.
          RunError: as above, of a cluster of one controller, with the error of `train`.
        """

    def wait(self, secs: float) -> None:
        """Returns when the slices may have changed, or after `secs`."""
