"""The loop of an elastic run: a world, and another when slices are lost or come back.

    def train(world: ec.elastic.World) -> None: ...

    ec.elastic.run(train, cluster=cluster, policy=ec.elastic.Policy(min_slices=2))

The training function is called anew for each world. It restores the newest step,
trains, and returns when it is done, or when `world.is_leaving(step)` returns True.
"""

from __future__ import annotations

import functools
import itertools
import math
import time
from collections.abc import Callable

from elastic_ckpt.core import errors, events, storage
from elastic_ckpt.elastic.cluster import (
    Assignment,
    Cluster,
    CompileAhead,
    TrainFunction,
)
from elastic_ckpt.elastic.decision import (
    Decision,
    Policy,
    Slices,
    Stop,
    Train,
    Work,
    decide,
)
from elastic_ckpt.elastic.host_failure import WorldLostError
from elastic_ckpt.elastic.timeline import Timeline


def run(
    train: TrainFunction,
    *,
    cluster: Cluster,
    policy: Policy | None = None,
    work: Work | None = None,
    compile_ahead: TrainFunction | None = None,
    emit: events.Emit = events.nobody,
) -> None:
    """Trains on the slices that are there, until `train` returns.

    Args:
      train: called on every host of each world; picklable.
      cluster: the slices.
      policy: when to train, to wait and to stop.
      work: the rows of a batch; None if `train` chooses them.
      compile_ahead: compiles with `world.compiled` what `train` does, and writes
        nothing; picklable. It is called on every host of a shadow world, one slice
        smaller than the one that trains. None compiles when a world begins.
      emit: called for each event of the run.

    Raises:
      RunError: if `train` raised; if slices are missing for too long; or, with the
        first cause, if worlds are lost again and again without a new step.
      StoppedError: if the run was asked to end and did not within its time.
    """
    policy = policy or Policy()
    timeline = Timeline(emit)
    retries = _Retries(policy.max_retries, timeline)
    decided = functools.partial(
        decide,
        policy=policy,
        work=work or Work.of_any_rows(cluster.devices_per_slice),
    )
    current: frozenset[int] = frozenset()
    for number in itertools.count(1):
        chosen = _await_slices(cluster, current, decided, timeline)
        current = frozenset(chosen.slices)
        slices, spares = list(chosen.slices), list(chosen.spares)
        timeline("world_started", world=number, slices=slices, spares=spares)
        change = _Change(cluster, chosen, decided)
        try:
            is_over = cluster.run_world(
                train,
                _assignment(number, chosen, compile_ahead, decided),
                emit=retries,
                has_changed=change,
            )
        except WorldLostError as error:
            timeline.begin(since_secs=error.at_secs)
            retries.note(error)
        else:
            if is_over:
                return
            timeline.begin(since_secs=change.since_secs)


def _assignment(
    number: int,
    chosen: Train,
    compiles: TrainFunction | None,
    decided: Callable[..., Decision],
) -> Assignment:
    smaller = _one_slice_fewer(chosen, decided)
    compile_ahead = None
    if compiles is not None and isinstance(smaller, Train):
        compile_ahead = CompileAhead(compiles=compiles, work=smaller)
    return Assignment(number=number, work=chosen, compile_ahead=compile_ahead)


def _one_slice_fewer(
    chosen: Train, decided: Callable[..., Decision]
) -> Decision | None:
    # The same program for whichever slice is lost, unless a spare takes its place.
    left = frozenset(chosen.slices[:-1])
    if not left or chosen.spares:
        return None
    present_secs = dict.fromkeys(left, math.inf)
    return decided(Slices(current=left, present_secs=present_secs))


class _Change:
    """Returns whether a run should continue on other slices than those of its world."""

    def __init__(
        self, cluster: Cluster, chosen: Train, decided: Callable[..., Decision]
    ) -> None:
        self._cluster = cluster
        self._slices = chosen.slices
        self._decided = decided
        # Since when it should, by the monotonic clock.
        self.since_secs = math.inf

    def __call__(self) -> bool:
        now = self._decided(self._cluster.slices(frozenset(self._slices)))
        has_changed = isinstance(now, Train) and now.slices != self._slices
        if has_changed:
            self.since_secs = min(self.since_secs, time.monotonic())
        return has_changed


def _await_slices(
    cluster: Cluster,
    current: frozenset[int],
    decided: Callable[..., Decision],
    emit: events.Emit,
) -> Train:
    began_secs = time.monotonic()
    waiting_for = ""
    while True:
        waited_secs = time.monotonic() - began_secs
        now = decided(cluster.slices(current), waited_secs=waited_secs)
        if isinstance(now, Train):
            return now
        if isinstance(now, Stop):
            raise errors.RunError(
                f"{now.why}; bring slices back and start the run once more, or lower"
                " elastic_min_slice_count"
            )
        if now.why != waiting_for:
            emit("waiting_for_slices", why=now.why, within_secs=now.within_secs)
            waiting_for = now.why
        cluster.wait(now.within_secs)


class _Retries:
    """Counts the worlds that were lost since the last new step; an `Emit`."""

    def __init__(self, most: int, emit: events.Emit) -> None:
        self._most = most
        self._emit = emit
        self._newest_step = -1
        self._lost: list[WorldLostError] = []

    def __call__(self, name: str, **fields: storage.Json) -> None:
        """Passes an event on."""
        if name == "step" and int(str(fields["step"])) > self._newest_step:
            self._newest_step = int(str(fields["step"]))
            self._lost.clear()
        self._emit(name, **fields)

    def note(self, error: WorldLostError) -> None:
        """Notes that a world was lost.

        Raises:
          RunError: if there were too many of them without a new step.
        """
        self._lost.append(error)
        first = self._lost[0]
        if not self._most:
            raise first
        if len(self._lost) > self._most:
            raise errors.RunError(
                f"{len(self._lost)} worlds were lost without a new step, the first one"
                f" because {first}"
            ) from first
