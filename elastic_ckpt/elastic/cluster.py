"""A cluster: the slices that a run can use, and the worlds that run on them."""

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
      number: the world number; each launch of the run counts from 1.
      work: the slices and the rows of a batch.
      claimant: the claimant of the world for this launch of the run; set by the
        cluster.
    """

    number: int
    work: Train
    claimant: Claimant | None = None


def leaving_for(decided: Decision | None) -> list[storage.Json]:
    """The next world's slices, for the `world_leaving` event; [] if the run waits."""
    return list(decided.slices) if isinstance(decided, Train) else []


class Cluster(Protocol):
    """The slices of a run: `Processes` or `Pathways`.

    `run` calls all methods from one thread.
    """

    @property
    def devices_per_slice(self) -> int:
        """The number of devices of each slice."""

    def slices(self, current: frozenset[int]) -> Slices:
        """The slices that are alive now.

        Args:
          current: the slices of the current world, or of the last one.
        """

    def run_world(
        self,
        train: TrainFunction,
        assignment: Assignment,
        *,
        emit: events.Emit,
        has_changed: Callable[[], Decision | None],
    ) -> bool:
        """Calls `train` on all hosts of a new world and returns when the world ends.

        Args:
          train: the training loop.
          assignment: the world's slices and rows.
          emit: a function to call with each event from the hosts.
          has_changed: a function to call often. It returns a decision to continue on
            other slices or to wait for more, or None while the world should continue.
            After a decision, the cluster may prepare the next world. It then asks the
            hosts to leave, with the `world_leaving` event; they leave after a step that
            they agree on.

        Returns:
          Whether the run is over; False if the hosts left for the next world.

        Raises:
          WorldLostError: if hosts failed or `train` raised; `slices` then omits the
            lost slices.
          StoppedError: if the run was asked to stop but did not stop in time.
          RunError: if `train` raised under a single controller; its cause is the error
            that `train` raised.
        """

    def wait(self, secs: float) -> None:
        """Returns when the slices may have changed, or after `secs`."""
