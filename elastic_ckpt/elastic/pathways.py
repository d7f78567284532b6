"""A cluster under Pathways: this process controls the devices of all slices.

pathwaysutils' manager finds out which slices are alive: it computes on those that no
world uses, in a thread. After an error all are checked. A world is a call of the
training function in this process, with a mesh over the devices of its slices. A lost
slice makes that call fail, with any error; the arrays that it had are then unusable,
and are released before the next world begins.
"""

from __future__ import annotations

import dataclasses
import time
import traceback
from collections.abc import Callable, Iterator, Sequence

import jax
from absl import logging
from pathwaysutils.elastic import elastic, manager

from elastic_ckpt.core import errors, events, process, storage, topology
from elastic_ckpt.elastic import failures, faults, termination, watch
from elastic_ckpt.elastic.cluster import Assignment, TrainFunction, leaving_for
from elastic_ckpt.elastic.decision import Decision, Failure, Slices
from elastic_ckpt.elastic.device_state import DeviceState
from elastic_ckpt.elastic.failures import WorldLostError
from elastic_ckpt.elastic.simulated_slices import SimulatedSlices
from elastic_ckpt.elastic.world import BetweenWorlds, Steps, World
from elastic_ckpt.tiers.persistent import claims

# The longest time between two looks at the slices while there are too few.
_LOOK_SECS = 0.1


class Pathways:
    """Slices whose devices this process controls, on Pathways or simulated.

    Args:
      manager: pathwaysutils' `Manager` of the slices, or `SimulatedSlices`.
      injected: faults to inject, in the order of their steps; only into simulated
        slices.
      poll_secs: the time between two checks of slices that are not in use.
      grace_secs: how long the run has, after SIGTERM, to save and to end; then the
        process ends.
      ended: called before the process ends in this way.
      emit: called when a slice is lost or comes back before the first world; the
        `emit` of `run` is called afterwards.

    Raises:
      ConfigError: if there are faults and the slices are not simulated, or a fault is
        that of a host.
    """

    def __init__(
        self,
        manager: manager.Manager,
        *,
        injected: Sequence[faults.Fault] = (),
        poll_secs: float = 10.0,
        grace_secs: float = 60.0,
        ended: Callable[[], None] = lambda: None,
        emit: events.Emit | None = None,
    ) -> None:
        self._manager = manager
        self._simulated = manager if isinstance(manager, SimulatedSlices) else None
        _check(injected, self._simulated)
        self._faults = list(injected)
        self._grace_secs = grace_secs
        self._ended = ended
        self._present_emit = emit or events.nobody
        # That the training function began last.
        self._phase = watch.TRAIN
        self._device_state = DeviceState(self._emit)
        self._claimant = claims.Claimant(owner=process.this())
        # By slice that is alive, since when.
        self._since = dict.fromkeys(manager.active_slice_indices, time.monotonic())
        # The slices that were lost since they were last in a world.
        self._lost: set[int] = set()
        self._failures: list[Failure] = []
        manager.start_monitoring(poll_secs)

    def __enter__(self) -> Pathways:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def devices_per_slice(self) -> int:
        """See `Cluster`."""
        return len(next(iter(self._manager.slice_to_devices.values())))

    def slices(self, current: frozenset[int]) -> Slices:
        """See `Cluster`."""
        now_secs = time.monotonic()
        alive = (
            self._manager.active_slice_indices | self._manager.available_inactive_slices
        )
        for number in sorted(alive - self._since.keys()):
            self._since[number] = now_secs
            self._emit("slice_returned", slice=number)
        for number in sorted(self._since.keys() - alive):
            self._lose(number, why="it does not answer")
        present = {number: now_secs - since for number, since in self._since.items()}
        return Slices(
            current=current - self._lost,
            present_secs=present,
            failures=tuple(self._failures),
        )

    def run_world(
        self,
        train: TrainFunction,
        assignment: Assignment,
        *,
        emit: events.Emit,
        has_changed: Callable[[], Decision | None],
    ) -> bool:
        """See `Cluster`; runs in the main thread, and `train` as well."""
        self._present_emit = emit
        self._phase = watch.TRAIN
        slices = assignment.work.slices
        self._lost -= set(slices)
        self._set_active(slices, alive=frozenset(self._since))
        leaving = _Leaving(self._inject, has_changed, emit)
        ending = termination.in_this_process(
            grace_secs=self._grace_secs, ended=self._ended, emit=emit
        )
        failure = None
        try:
            with ending as leaving.is_ending:
                emit("world_joined", world=assignment.number)
                self._train(train, assignment, leaving, emit)
        except Exception as error:
            self._device_state.clear()
            failure = self._failure(error, slices)
        finally:
            if self._simulated is not None:
                self._simulated.end_world()
        if failure is not None:
            # Outside of the handler: otherwise the arrays of the world would live as
            # long as this error.
            raise failure
        if leaving.is_left():
            emit("world_left", step=leaving.step)
        return not leaving.is_left()

    def wait(self, secs: float) -> None:
        """See `Cluster`."""
        time.sleep(min(secs, _LOOK_SECS))

    def close(self) -> None:
        """Stops checking slices."""
        self._manager.close()

    def _emit(self, name: str, **fields: storage.Json) -> None:
        self._present_emit(name, **fields)

    def _train(
        self,
        train: TrainFunction,
        assignment: Assignment,
        leaving: _Leaving,
        emit: events.Emit,
    ) -> None:
        def report(name: str, **fields: storage.Json) -> None:
            # A run that continues in another world has not been stopped.
            if not (name == "run_stopped" and leaving.is_left()):
                emit(name, **fields)
            if name == "world_claimed":
                self._claimant = dataclasses.replace(self._claimant, has_claimed=True)

        steps = Steps(report)

        def leave(step: int) -> bool:
            steps.done(step)
            return leaving(step)

        work = assignment.work
        of_slices = self._manager.slice_to_devices
        devices = tuple(device for n in work.slices for device in of_slices[n])
        with jax.default_device(devices[0]):
            train(
                World(
                    number=assignment.number,
                    slices=work.slices,
                    slice_name=topology.slice_of_this_host(len(work.slices)),
                    rows=work.rows,
                    devices=devices,
                    microbatches=work.accumulated,
                    emit=steps,
                    should_stop=leave,
                    should_stop_early=leaving.for_others,
                    will_resume=leaving.is_left,
                    begin=self._begin,
                    _between=BetweenWorlds(
                        device_state=self._device_state, claimant=self._claimant
                    ),
                )
            )

    def _begin(self, phase: str) -> None:
        self._phase = phase

    def _set_active(self, active: Sequence[int], *, alive: frozenset[int]) -> None:
        self._manager.active_slice_indices = alive & frozenset(active)
        self._manager.available_inactive_slices = alive - frozenset(active)

    def _failure(self, error: Exception, slices: Sequence[int]) -> errors.RunError:
        told = failures.of_exception(0, error)
        told = dataclasses.replace(told, phase=self._phase)
        if self._simulated is not None:
            alive = self._simulated.alive()
        else:
            alive = frozenset(
                elastic.get_active_slice_indices(self._manager.slice_to_devices)
            )
        lost = sorted(set(slices) - alive)
        if lost or any(map(_is_of_a_slice, _causes(error))):
            message = traceback.format_exception_only(error)[-1].strip()
            self._set_active(slices, alive=alive)
            for number in lost:
                self._lose(number, why=message)
            traceback.clear_frames(error.__traceback__)
            return WorldLostError(
                message,
                hosts=frozenset(),
                at_secs=told.at_secs,
                failures=[told],
                gone=frozenset(lost),
            )
        if isinstance(error, errors.RunError):
            return error
        if not told.is_ours:
            logging.error("%s", told.traceback)
        words = failures.judge([told], num_hosts=1, is_lost=False).words
        failure = failures.ProgramFailedError(words, failures=[told])
        failure.__cause__ = error
        return failure

    def _lose(self, number: int, *, why: str) -> None:
        self._lost.add(number)
        self._failures.append(Failure(slice=number, at_secs=time.monotonic()))
        self._since.pop(number, None)
        self._emit("slice_lost", slice=number, why=why.partition("\n")[0])

    def _inject(self, step: int) -> None:
        for fault in faults.due(self._faults, step):
            assert self._simulated is not None
            self._faults.remove(fault)
            if fault.kind is faults.Kind.KILL_SLICE:
                self._simulated.lose(fault.target)
            else:
                self._simulated.give_back(fault.target)


class _Leaving:
    """Returns after each step whether to leave a world, and why it was left.

    Args:
      inject: called with the steps that are done.
      has_changed: see `Cluster.run_world`.
      emit: called when it is decided to leave for other slices.

    Attributes:
      is_ending: whether the run was asked to end.
      step: after which the world is left; None if it is not.
    """

    def __init__(
        self,
        inject: Callable[[int], None],
        has_changed: Callable[[], Decision | None],
        emit: events.Emit,
    ) -> None:
        self._emit = emit
        self.is_ending: Callable[[int], bool] = lambda _: False
        self.step: int | None = None
        self._inject = inject
        self._has_changed = has_changed
        self._is_stopped = False

    def __call__(self, step: int) -> bool:
        self._inject(step)
        self._is_stopped = self._is_stopped or self.is_ending(step)
        if self.step is None and self._is_stopped:
            self.step = step
        return self.for_others(step)

    def for_others(self, step: int) -> bool:
        """Whether to leave for other slices; before the first step, too."""
        if self.step is None and (decided := self._has_changed()):
            self.step = step
            self._emit("world_leaving", slices=leaving_for(decided))
        return self.step is not None

    def is_left(self) -> bool:
        """Whether the run continues in another world."""
        return self.step is not None and not self._is_stopped


def _check(injected: Sequence[faults.Fault], simulated: SimulatedSlices | None) -> None:
    if injected and simulated is None:
        raise errors.ConfigError(
            "faults can only be injected into SimulatedSlices (hardware=cpu in a"
            " configuration); remove them"
        )
    of_slices = (faults.Kind.KILL_SLICE, faults.Kind.RETURN_SLICE)
    for fault in injected:
        if fault.kind not in of_slices or fault.in_phase:
            raise errors.ConfigError(
                f"faults contains {fault.in_phase or fault.kind}, but the only host is"
                " the process that trains; use kill_slice and return_slice with"
                " at_step, or set `hosts` to the number of slices"
            )


def _is_of_a_slice(error: BaseException) -> bool:
    return isinstance(error, jax.errors.JaxRuntimeError) and (
        elastic.is_error_due_to_slice_down(error, log_traceback=False)
    )


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
