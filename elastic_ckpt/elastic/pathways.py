"""A cluster under Pathways: this process controls the devices of all slices.

pathwaysutils' manager finds the live slices: a thread computes on slices that no world
uses. After an error, it checks all slices. A world is one call of the training function
in this process, with a mesh over the devices of its slices. If a slice is lost, that
call fails with an arbitrary error; the world's arrays are then unusable and are
released before the next world begins. If a world ends as planned, its state stays in
device memory for the next world.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
import traceback
from collections.abc import Callable, Sequence
from unittest import mock

import jax
from absl import logging

from elastic_ckpt.core import errors, events, extras, process, storage, topology
from elastic_ckpt.elastic import failures, faults, termination, watch
from elastic_ckpt.elastic.cluster import Assignment, TrainFunction, leaving_for
from elastic_ckpt.elastic.decision import Decision, Failure, Slices
from elastic_ckpt.elastic.world import BetweenWorlds, DeviceState, Leaving, World
from elastic_ckpt.tiers.persistent import claims

try:
    import pathwaysutils
    from pathwaysutils.elastic import elastic, manager
    from pathwaysutils.test import mock_fault_injection
except ImportError:
    raise errors.ConfigError(
        "a single-controller run needs the `pathways` extra; to install it,"
        f" {extras.hint('pathways')}"
    ) from None

# The longest pause between checks of the slices while there are too few.
_LOOK_SECS = 0.1


def initialize() -> None:
    """Configures JAX for Pathways; must be called before any other use of JAX.

    Raises:
      ConfigError: if this process was not started next to a Pathways proxy.
    """
    if not pathwaysutils.is_pathways_backend_used():
        raise errors.ConfigError(
            "enable_single_controller=true, but JAX_PLATFORMS does not contain `proxy`:"
            " start the run with the JobSet of configs/deploy/base/pathways, which sets"
            " it, or set enable_single_controller=false"
        )
    pathwaysutils.initialize()


class Pathways(contextlib.AbstractContextManager["Pathways"]):
    """Slices whose devices this process controls, on Pathways or simulated.

    Args:
      manager: pathwaysutils' `Manager` of the slices, or `SimulatedSlices`.
      injected: faults to inject, in step order; only for `SimulatedSlices`.
      poll_secs: the time between checks of unused slices.
      grace_secs: the time that the run has to save and stop after SIGTERM before the
        process exits.
      ended: a function called before the process exits because `grace_secs` is over.
      emit: a function called with an event when a slice is lost or rejoins before the
        first world; `run` uses its own `emit` afterward.

    Raises:
      ConfigError: if there are faults but the slices are not simulated, or if a fault
        needs host processes.
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
        if injected and self._simulated is None:
            raise errors.ConfigError(
                "faults can only be injected into SimulatedSlices (hardware=cpu in a"
                " configuration); remove the faults"
            )
        for fault in injected:
            if fault.kind not in (faults.Kind.KILL_SLICE, faults.Kind.RETURN_SLICE):
                raise errors.ConfigError(
                    f"faults contains {fault.kind}, which needs host processes, but"
                    " this run has only the process that trains; use only kill_slice"
                    " and return_slice, or set `hosts` to the number of slices"
                )
        self._faults = list(injected)
        self._grace_secs = grace_secs
        self._ended = ended
        self._emit = emit or events.nobody
        # The last phase that the training function began.
        self._phase = watch.TRAIN
        self._device_state = DeviceState()
        self._claimant = claims.Claimant(owner=process.this())
        # The time since which each live slice has been alive; the last world's
        # beginning.
        self._since = dict.fromkeys(manager.active_slice_indices, time.monotonic())
        self._began_secs = math.inf
        self._failures: list[Failure] = []
        manager.start_monitoring(poll_secs)

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
        since = self._since.items()
        # A slice that was lost and has rejoined is no longer in the last world.
        return Slices(
            current=current & {n for n, secs in since if secs <= self._began_secs},
            alive_secs={number: now_secs - secs for number, secs in since},
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
        """See `Cluster`; must be called in the main thread, which runs `train`."""
        self._emit = emit
        self._phase = watch.TRAIN
        slices = assignment.work.slices
        devices = tuple(
            device
            for number in slices
            for device in self._manager.slice_to_devices[number]
        )
        self._began_secs = time.monotonic()
        self._set_active(slices, alive=frozenset(self._since))
        stopped: dict[str, storage.Json] = {}

        def report(name: str, **fields: storage.Json) -> None:
            if name == "world_claimed":
                self._claimant = dataclasses.replace(self._claimant, has_claimed=True)
            # Whether the run ends with a world is known only after the world.
            if name == "run_stopped":
                stopped.update(fields)
            else:
                emit(name, **fields)

        def ask(step: int) -> Leaving | None:
            self._inject(step)
            if is_ending(step):
                return "stop"
            if decided := has_changed():
                emit("world_leaving", slices=leaving_for(decided))
                return "resume"
            return None

        between = BetweenWorlds(
            emit=report,
            ask=ask,
            claimant=self._claimant,
            device_state=self._device_state,
        )
        failure, is_over = None, True
        try:
            with (
                termination.in_this_process(
                    grace_secs=self._grace_secs, ended=self._ended, emit=emit
                ) as is_ending,
                jax.default_device(devices[0]),
            ):
                emit("world_joined", world=assignment.number)
                train(
                    World(
                        number=assignment.number,
                        slices=slices,
                        slice_name=topology.slice_of_this_host(len(slices)),
                        rows=assignment.work.rows,
                        devices=devices,
                        microbatches=assignment.work.accumulated,
                        emit=between.report,
                        leaving=between.leaving,
                        begin=self._begin,
                        _between=between,
                    )
                )
                # SIGTERM may arrive while the hosts leave for the next world.
                is_over = not between.resumes() or is_ending(between.step)
        except Exception as error:
            self._device_state.clear()
            failure = self._failure(error, slices)
        finally:
            if self._simulated is not None:
                self._simulated.end_world()
        if failure is not None:
            # Raised outside the handler; otherwise the world's arrays would live as
            # long as this error.
            raise failure
        if not is_over:
            emit("world_left", step=between.step)
        elif stopped:
            emit("run_stopped", **stopped)
        return is_over

    def wait(self, secs: float) -> None:
        """See `Cluster`."""
        time.sleep(min(secs, _LOOK_SECS))

    def close(self) -> None:
        """Stops checking slices."""
        self._manager.close()

    def _begin(self, phase: str) -> None:
        self._phase = phase

    def _set_active(self, active: Sequence[int], *, alive: frozenset[int]) -> None:
        self._manager.active_slice_indices = alive & frozenset(active)
        self._manager.available_inactive_slices = alive - frozenset(active)

    def _failure(self, error: Exception, slices: Sequence[int]) -> errors.RunError:
        told = dataclasses.replace(failures.of_exception(0, error), phase=self._phase)
        alive = frozenset(
            elastic.get_active_slice_indices(self._manager.slice_to_devices)
            if self._simulated is None
            else self._simulated.alive
        )
        lost = sorted(set(slices) - alive)
        if lost or _is_of_a_slice(error):
            self._set_active(slices, alive=alive)
            for number in lost:
                self._lose(number, why=told.message)
            traceback.clear_frames(error.__traceback__)
            return failures.WorldLostError([told], gone=lost)
        if isinstance(error, errors.RunError):
            return error
        if not told.is_ours:
            logging.error("%s", told.traceback)
        words = failures.judge([told], num_hosts=1, is_lost=False).words
        failure = failures.ProgramFailedError(words, failures=[told])
        failure.__cause__ = error
        return failure

    def _lose(self, number: int, *, why: str) -> None:
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
                self._simulated.rejoin(fault.target)


class SimulatedSlices(manager.Manager):
    """A stand-in for Pathways slices: equal groups of this process's devices.

    For tests and demonstrations: pathwaysutils' manager with its lost-slice simulator.
    Reading an array on a lost slice raises the error that Pathways would raise. The
    simulator replaces JAX functions, so call these methods on the training thread.

    Args:
      num_slices: the number of groups.

    Attributes:
      alive: the numbers of the live slices.

    Raises:
      ConfigError: if the devices cannot be divided evenly among the slices.
    """

    def __init__(self, num_slices: int) -> None:
        devices = jax.devices()
        each, left = divmod(len(devices), num_slices)
        if left:
            raise errors.ConfigError(
                f"{len(devices)} devices cannot be divided evenly among {num_slices}"
                " slices; set jax_num_cpu_devices (devices_per_host in a configuration)"
                " to a multiple of the number of slices"
            )
        groups = {
            number: devices[number * each : (number + 1) * each]
            for number in range(num_slices)
        }
        # CPU devices have no slice numbers.
        with mock.patch.object(elastic, "get_slice_to_devices", return_value=groups):
            super().__init__(devices)
        self.alive = set(groups)
        self._faulty = contextlib.ExitStack()

    def start_monitoring(self, poll_interval: float | int = 10) -> None:
        """Does nothing: `lose` and `rejoin` update the slices."""

    def lose(self, number: int) -> None:
        """Simulates the loss of a slice; a world on it fails when it reads an array."""
        self.alive.discard(number)
        if number in self.active_slice_indices:
            # A new one each time: it tracks arrays by address, and addresses recur.
            simulator = mock_fault_injection.DeviceLossSimulator()
            for each in self.slice_to_devices.keys() - self.alive:
                simulator.mark_slice_lost(each, self.slice_to_devices)
            self._faulty.close()
            self._faulty.enter_context(simulator)
        self.available_inactive_slices = self.alive - self.active_slice_indices

    def rejoin(self, number: int) -> None:
        """Brings back a slice, without the arrays that it had."""
        self.alive.add(number)
        self.available_inactive_slices = self.alive - self.active_slice_indices

    def end_world(self) -> None:
        """Stops raising errors for lost arrays once their world has ended."""
        self._faulty.close()


def _is_of_a_slice(error: BaseException | None) -> bool:
    # Also checks the error's causes.
    if error is None:
        return False
    is_here = isinstance(error, jax.errors.JaxRuntimeError) and (
        elastic.is_error_due_to_slice_down(error, log_traceback=False)
    )
    return is_here or _is_of_a_slice(error.__cause__ or error.__context__)
