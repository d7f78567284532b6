"""Slices that stand for those of Pathways: groups of this process's CPU devices.

A slice is lost as by pathwaysutils' `DeviceLossSimulator`: the arrays on its devices
raise the errors of a lost slice when their values are read, and checks of the manager
find it missing, until it is given back. It is for tests and demonstrations.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

import jax
from pathwaysutils.elastic import elastic, manager
from pathwaysutils.test import mock_fault_injection

from elastic_ckpt.core import errors


class SimulatedSlices(manager.Manager):
    """A stand-in for the slices of Pathways: equal groups of this process's devices.

    It is pathwaysutils' manager with its own simulator of lost slices, which replaces
    functions of JAX: call its methods in the thread that trains.

    Args:
      num_slices: the number of groups.

    Raises:
      ConfigError: if the devices cannot be divided evenly among them.
    """

    def __init__(self, num_slices: int) -> None:
        devices = jax.devices()
        each, left = divmod(len(devices), num_slices)
        if left:
            raise errors.ConfigError(
                f"slices={num_slices}: {len(devices)} devices cannot be divided evenly"
                " among that many slices; set"
                " jax_num_cpu_devices (devices_per_host in a configuration) to a"
                " multiple of slices"
            )
        groups = {
            number: devices[number * each : (number + 1) * each]
            for number in range(num_slices)
        }
        # CPU devices do not have the number of a slice.
        with mock.patch.object(elastic, "get_slice_to_devices", return_value=groups):
            super().__init__(devices)
        self._down: set[int] = set()
        self._faulty = contextlib.ExitStack()

    def start_monitoring(self, poll_interval: float | int = 10) -> None:
        """Does nothing: `give_back` checks the slices."""
        del poll_interval

    def lose(self, number: int) -> None:
        """Loses a slice; a world on it fails when it reads an array."""
        self._down.add(number)
        if number in self.active_slice_indices:
            self._faulty.close()
            self._faulty.enter_context(self._simulated())
        else:
            self._check()

    def give_back(self, number: int) -> None:
        """Returns a slice, without the arrays that it had."""
        self._down.discard(number)
        self._check()

    def end_world(self) -> None:
        """Stops the errors of lost arrays, once their world has ended."""
        self._faulty.close()

    def alive(self) -> frozenset[int]:
        """The numbers of the slices that compute."""
        with self._simulated():
            active = elastic.get_active_slice_indices(self.slice_to_devices)
        # The look's own arrays may have the addresses of arrays that were lost.
        return frozenset(active) | (self.slice_to_devices.keys() - self._down)

    def _check(self) -> None:
        with self._simulated():
            self._check_inactive_slices()

    @contextlib.contextmanager
    def _simulated(self) -> Iterator[None]:
        # A new one each time: its arrays are addresses, which are used again.
        simulator = mock_fault_injection.DeviceLossSimulator()
        for number in self._down:
            simulator.mark_slice_lost(number, self.slice_to_devices)
        with simulator:
            yield
