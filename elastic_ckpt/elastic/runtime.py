"""The loop of an elastic run: a new world whenever slices are lost or rejoin.

    def train(world: ec.elastic.World) -> None: ...

    ec.elastic.run(train, cluster=cluster, policy=ec.elastic.Policy(min_slices=2))

The training function is called once for each world. It restores the newest step,
trains, and returns when it is done or when `world.leaving(step)` says so.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any

from elastic_ckpt.core import errors, events
from elastic_ckpt.elastic import failures, process_cluster, processes
from elastic_ckpt.elastic.cluster import Assignment, Cluster, TrainFunction
from elastic_ckpt.elastic.decision import (
    Decision,
    Policy,
    Slices,
    Train,
    Work,
    decide,
)
from elastic_ckpt.elastic.failures import ProgramFailedError, WorldLostError
from elastic_ckpt.monitoring import goodput, progress

# Steps between progress lines if standard output is not a terminal.
_LOG_PERIOD = 10


def run(
    train: TrainFunction,
    *,
    cluster: Cluster,
    policy: Policy | Callable[[], Policy] | None = None,
    work: Work | None = None,
    emit: events.Emit | None = None,
) -> None:
    """Trains on the available slices until the training function is done.

    `train` is called on every host of a world. When slices are lost or rejoin, that
    world ends, and `train` is called on the next world's hosts, where it restores the
    newest step and continues:

        def train(world):
            mesh = world.mesh
            with world.checkpointer(tiers) as checkpointer:
                ...  # Restore the newest step, if there is one.
                leaving = None
                while step < 1000 and leaving is None:
                    ...  # Train a step.
                    leaving = world.leaving(step)
                    ...  # Save the step, with force=True if the hosts leave.

        if __name__ == "__main__":
            ec.elastic.run(train, cluster=ec.elastic.Processes(slices=4))

    Args:
      train: the training function, picklable. It returns at the end of the run or when
        `world.leaving` says so.
      cluster: the slices to train on.
      policy: the rules for training, waiting and stopping, or a function that returns
        the current policy. The function is called often; to change the policy, it
        returns a different object.
      work: the rows of a batch; None if `train` chooses them.
      emit: a function called with each event of the run; by default, events are
        printed.

    Raises:
      ConfigError: if `train` cannot be sent to the hosts of the cluster.
      RunError: if `train` raised; if slices are missing for too long; or, with the
        first cause, if too many worlds in a row are lost without a new step.
      StoppedError: if the run was asked to stop but did not stop in time.
    """
    if emit is None:
        with progress.Progress(_LOG_PERIOD) as shown:
            run(train, cluster=cluster, policy=policy, work=work, emit=shown)
        return
    fixed_policy = Policy() if policy is None or callable(policy) else policy
    present_policy = policy if callable(policy) else lambda: fixed_policy
    work = work or Work(devices_per_slice=cluster.devices_per_slice)

    def lead_here(cluster: Cluster, emit: events.Emit) -> None:
        lead(train, cluster, present_policy, work, emit)

    if processes.supervise(
        cluster, train, lead_here, policy=present_policy(), emit=emit
    ):
        return
    try:
        lead_here(cluster, emit)
    except ProgramFailedError as error:
        # Only the user's traceback matters; it is a note on the error.
        raise error.with_traceback(None) from error.__cause__


def lead(
    train: TrainFunction,
    cluster: Cluster,
    present_policy: Callable[[], Policy],
    work: Work,
    emit: events.Emit,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Runs world after world until the run is over; see `run`.

    The cluster's errors must carry times from the same `clock`.
    """
    led = _Run(cluster, present_policy, work, emit, clock)
    for number in itertools.count(1):
        try:
            chosen = led.choose()
            led.emit(
                "world_started",
                world=number,
                slices=list(chosen.slices),
                spares=list(chosen.spares),
            )
            is_over = cluster.run_world(
                train,
                Assignment(number=number, work=chosen),
                emit=led.emit,
                has_changed=led.change,
            )
        except WorldLostError as error:
            led.lose(error)
        except process_cluster.LeadershipLostError:
            # The next leader continues the run.
            raise
        except errors.ElasticCkptError as error:
            led.end(error)
            raise
        else:
            if is_over:
                return
            led.begin_recovery(led.asked_secs)


class _Run:
    """The state of a run: its slices, its events, and how worlds were lost.

    A run makes progress if a world passes the newest step or begins at a later step
    than the previous world: steps may be lost and retrained.

    Attributes:
      asked_secs: the time at which a world's hosts were last asked to leave.
    """

    def __init__(
        self,
        cluster: Cluster,
        present_policy: Callable[[], Policy],
        work: Work,
        emit: events.Emit,
        clock: Callable[[], float],
    ) -> None:
        self._cluster = cluster
        self._present_policy = present_policy
        self._policy = present_policy()
        self._work = work
        self._emit = emit
        self._clock = clock
        self._began_secs = self.asked_secs = clock()
        self._account = goodput.Account(time=clock())
        self._quarantined: frozenset[int] = frozenset()
        self._world = 0
        self._slices: list[int] = []
        # The last step of this world (0 before any), the last step of the run, the step
        # from which the world resumed, and the first step of this or the last world.
        self._step = self._done = self._start = self._first = 0
        # The worlds lost since the last progress; how and after which step the last
        # world was lost, until a world is past that step.
        self._lost: list[WorldLostError] = []
        self._how, self._failed = "", 0

    def choose(self) -> Train:
        """Waits until the next world's slices can be chosen, and returns them."""
        began_secs = self._clock()
        waiting_for = ""
        while True:
            waited_secs = self._clock() - began_secs
            _, now = self._decide(waited_secs=waited_secs)
            if isinstance(now, Train):
                return now
            if not now.within_secs:
                raise errors.RunError(
                    f"after a wait of {waited_secs:.0f} s, {now.why}; bring slices back"
                    " and restart the run, or lower min_slices (elastic_min_slice_count"
                    " in a configuration)"
                )
            if now.why != waiting_for:
                waiting_for = now.why
                self.emit(
                    "waiting_for_slices", why=now.why, within_secs=now.within_secs
                )
            self._cluster.wait(now.within_secs)

    def change(self) -> Decision | None:
        """The decision that ends the world; None while the world should continue."""
        slices, now = self._decide()
        if isinstance(now, Train):
            return None if [*now.slices] == self._slices else now
        # A slice is about to be lost, and the remaining slices are too few.
        is_leaving = not slices.alive_secs.keys() >= {*self._slices}
        return now if is_leaving and self._policy.max_retries else None

    def _decide(self, *, waited_secs: float = 0.0) -> tuple[Slices, Decision]:
        policy = self._present_policy()
        slices = self._cluster.slices(frozenset(self._slices))
        excluded = slices.quarantined(policy)
        for number in sorted(excluded - self._quarantined):
            count = sum(failure.slice == number for failure in slices.failures)
            self.emit(
                "slice_quarantined",
                slice=number,
                why=f"it has failed {count} times in this run",
            )
        self._quarantined |= excluded
        decided = decide(slices, policy, self._work, waited_secs=waited_secs)
        if policy is not self._policy:
            self._policy = policy
            chosen = list(decided.slices) if isinstance(decided, Train) else []
            most = policy.max_slices or len(slices.alive_secs)
            self.emit("scale_requested", slices=most, chosen=chosen)
        return slices, decided

    def emit(self, name: str, **fields: Any) -> None:
        """Passes an event on; adds the run's total seconds to `run_finished`."""
        now = self._clock()
        if name == "run_finished":
            fields["secs"] = now - self._began_secs
        self._emit(name, **fields)
        told = "step" if name == "step_done" else name
        newest = self._account.newest_step
        self._account = goodput.after(self._account, told, fields, time=now)
        match told:
            case "world_started":
                self._world, self._slices, self._step = (
                    fields["world"],
                    fields["slices"],
                    0,
                )
            case "world_leaving":
                self.asked_secs = now
            case "run_started":
                self._start = fields["start_step"]
            case "restored_from":
                self._start = fields["step"]
            case "step":
                self._note_step(fields["step"], newest)

    def _note_step(self, step: int, newest: int) -> None:
        if step > (newest if self._step else self._first):
            self._lost.clear()
        if step > self._failed:
            self._how = ""
        if not self._step:
            self._first = step
        recovered = self._account.recovered()
        if recovered is not None:
            self._account = dataclasses.replace(self._account, before=None)
            lost = max(0, self._done - self._start)
            self._emit("recovered", world=self._world, steps_lost=lost, **recovered)
        self._step = self._done = step

    def lose(self, error: WorldLostError) -> None:
        """Records that a world was lost.

        Raises:
          RunError: if the loss ends the run.
        """
        self.begin_recovery(min(each.at_secs for each in error.failures))
        self._lost.append(error)
        most = self._policy.max_retries
        judged = self._judge(
            error.failures,
            num_hosts=error.num_hosts,
            gone=error.gone,
            machines=error.machines,
            is_lost=len(self._lost) <= most,
        )
        self._how, self._failed = judged.how, self._step
        end: errors.RunError | None = None
        if judged.kind.name == "replaced":
            end = errors.ReplacedError(judged.words)
        elif judged.kind.action == failures.STOP:
            end = ProgramFailedError(judged.words, failures=error.failures)
        elif not most:
            end = error
        elif len(self._lost) > most:
            end = errors.RunError(
                f"{len(self._lost)} worlds in a row were lost without a new step, more"
                " than max_retries (elastic_max_retries in a configuration) allows;"
                " fix the cause of the first loss, then restart the run. First loss:"
                f" {self._lost[0]}"
            )
        if end is not None:
            raise end from (error.__cause__ if end is error else error)

    def end(self, error: errors.ElasticCkptError) -> None:
        """Emits the verdict on the error that ends the run."""
        is_program = isinstance(error, ProgramFailedError)
        told = error.failures if is_program else [failures.of_exception(0, error)]
        self._judge(told, num_hosts=1, is_lost=False)

    def _judge(
        self, failed: Sequence[failures.HostFailure], **of_this: Any
    ) -> failures.Verdict:
        judged = failures.judge(
            failed,
            slices=self._slices,
            step=self._step,
            before=self._how,
            **of_this,
        )
        self._emit("verdict", world=self._world, **judged.fields())
        return judged

    def begin_recovery(self, since: float) -> None:
        """Records that a world has ended.

        Args:
          since: the time at which the first host failed or all hosts were asked to
            leave.
        """
        self._account = goodput.lost(self._account, since=since, time=self._clock())
