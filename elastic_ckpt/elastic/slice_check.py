"""A computation that shows whether the devices of a slice that came back are sound.

Each host of the slice runs it in a separate process, at the lowest priority, before
the slice is used. Every device multiplies matrices of small integers, whose products
and sums are exact in the floating point of all hardware and in any order; so all
devices of all hosts have to get one known number. A slice that gets another one, or
takes too long, is refused; it is checked again later, after longer and longer times.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import connection
from typing import TYPE_CHECKING, Any

import numpy as np

from elastic_ckpt.core import errors, storage
from elastic_ckpt.elastic import (
    executables,
    host_start,
    watch,
)
from elastic_ckpt.elastic import host as host_process
from elastic_ckpt.elastic.host import Hardware

if TYPE_CHECKING:
    import jax

# The result of `compute` on sound devices; a test computes it with integers.
EXPECTED = 2136504280
_SIZE = 256
_ROUNDS = 16
# A prime. Values below it have 8 bits, so that bfloat16 holds them, and the sum of
# _SIZE products is below 2**24, so that float32 holds it.
_MODULUS = 251
# Between a check that failed and the next one: this, and then twice as long each time.
_RETRY_SECS = 30.0
_MOST_RETRY_SECS = 3600.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checked:
    """The result of the check of a slice.

    Attributes:
      slice: its number.
      problem: what is wrong with it; None if it is sound.
    """

    slice: int
    problem: str | None


class SliceChecks:
    """The checks of the slices that came back, each until the slice is sound.

    Args:
      hardware: the devices of each host.
      machine: that has the slices.
      kept: the place of executables; None compiles in each check.
      hosts_per_slice: each has a process.
      first_slice: the lowest number of the slices of this machine.
      log_directory: the directory for the output of these processes.
      limits: of the run, by which a check that hangs is ended.
    """

    def __init__(
        self,
        hardware: Hardware,
        *,
        machine: host_start.ThisMachine,
        kept: executables.KeptExecutables | None = None,
        hosts_per_slice: int,
        first_slice: int = 0,
        log_directory: str,
        limits: watch.Limits,
    ) -> None:
        self._hardware = hardware
        self._machine = machine
        self._kept = kept
        self._hosts_per_slice = hosts_per_slice
        self._first_slice = first_slice
        self._log_directory = log_directory
        self._limits = limits
        # Of the checks of sound slices.
        self._longest_secs: float | None = None
        self._checks: dict[int, _Check] = {}
        # By slice that is refused: how often in a row, and when to check it again.
        self._refused: dict[int, tuple[int, float]] = {}
        # Slices whose checks are to fail: a fault.
        self.broken: set[int] = set()

    @property
    def unsound(self) -> frozenset[int]:
        """The slices that have not passed their checks."""
        return frozenset(self._checks.keys() | self._refused.keys())

    def begin(self, number: int) -> None:
        """Begins to check a slice; it is `unsound` until then."""
        self.forget(number)
        self._start(number)

    def forget(self, number: int) -> None:
        """Ends the check of a slice, which is gone."""
        self._refused.pop(number, None)
        if number in self._checks:
            self._checks.pop(number).close()

    def poll(self) -> list[Checked]:
        """The checks that have ended since the last call; called often."""
        now_secs = time.monotonic()
        for number, (_, again_secs) in self._refused.items():
            if number not in self._checks and now_secs >= again_secs:
                self._start(number)
        results = []
        for number, check in list(self._checks.items()):
            most_secs = watch.patience_secs(self._limits, self._longest_secs)
            checked = check.result(most_secs, now_secs=now_secs)
            if checked is not None:
                self._checks.pop(number).close()
                self._note(checked, now_secs - check.began_secs, now_secs)
                results.append(checked)
        return results

    def wait(self, secs: float) -> None:
        """Waits until a check may have ended, or so many seconds have passed."""
        pipes = [pipe for check in self._checks.values() for pipe in check.pipes]
        if pipes:
            connection.wait(pipes, secs)
        else:
            time.sleep(secs)

    def close(self) -> None:
        """Ends all checks."""
        for number in list(self._checks):
            self.forget(number)

    def _start(self, number: int) -> None:
        self._checks[number] = _Check(
            number,
            self._hardware,
            machine=self._machine,
            kept=self._kept,
            slots=self._slots(number),
            log_directory=self._log_directory,
            broken=number in self.broken,
        )

    def _slots(self, number: int) -> range:
        first = (number - self._first_slice) * self._hosts_per_slice
        return range(first, first + self._hosts_per_slice)

    def _note(self, checked: Checked, secs: float, now_secs: float) -> None:
        times, _ = self._refused.pop(checked.slice, (0, 0.0))
        if checked.problem is None:
            self._longest_secs = max(secs, self._longest_secs or 0.0)
            return
        retry_secs = min(_RETRY_SECS * 2**times, _MOST_RETRY_SECS)
        self._refused[checked.slice] = (times + 1, now_secs + retry_secs)


class _Check:
    """The processes that check one slice.

    Attributes:
      pipes: from those that have sent nothing yet, with their hosts.
    """

    def __init__(
        self,
        number: int,
        hardware: Hardware,
        *,
        machine: host_start.ThisMachine,
        kept: executables.KeptExecutables | None,
        slots: range,
        log_directory: str,
        broken: bool,
    ) -> None:
        self._slice = number
        self._values: dict[int, list[int]] = {}
        self._processes: list[host_start.LocalProcess] = []
        self.pipes: dict[connection.Connection, int] = {}
        self.began_secs = time.monotonic()
        storage.make_directory(log_directory)
        self._log = os.path.join(log_directory, f"check-of-slice-{number}.log")
        for host, slot in enumerate(slots):
            child = machine.process()
            child.begin(functools.partial(run, hardware, slot, kept, broken, self._log))
            self._processes.append(child)
            self.pipes[child.channel] = host

    def result(self, limit_secs: float, *, now_secs: float) -> Checked | None:
        """The result; None while there is none."""
        for pipe in connection.wait(list(self.pipes), 0):
            assert isinstance(pipe, connection.Connection)
            host = self.pipes.pop(pipe)
            try:
                self._values[host] = json.loads(pipe.recv_bytes())
            except (EOFError, OSError):
                problem = problem_of_failure(host, self._log)
                return Checked(slice=self._slice, problem=problem)
        secs = now_secs - self.began_secs
        if self.pipes and secs > limit_secs:
            problem = problem_of_time(sorted(self.pipes.values()), secs)
            return Checked(slice=self._slice, problem=problem)
        if self.pipes:
            return None
        return Checked(slice=self._slice, problem=problem_of(self._values))

    def close(self) -> None:
        """Ends the processes."""
        for child in self._processes:
            child.send_signal(signal.SIGKILL)
        for child in self._processes:
            child.wait()
            child.channel.close()


def problem_of_failure(host: int, log: str) -> str:
    """What is wrong with a slice whose host ended without a value."""
    return f"its host {host} failed in the check; see {log}"


def problem_of_time(hosts: Sequence[int], secs: float) -> str:
    """What is wrong with a slice whose hosts have no values yet."""
    return f"its hosts {list(hosts)} did not finish the check in {secs:.0f} s"


def run(
    hardware: Hardware,
    slot: int,
    kept: executables.KeptExecutables | None,
    broken: bool,
    log: str,
    pipe: connection.Connection,
) -> None:
    """Checks all devices of this process, and sends what each has computed.

    Args:
      hardware: the devices of this host.
      slot: the number of this host on its machine.
      kept: the place of executables; None compiles in each check.
      broken: whether the last device is to compute a wrong value: a fault.
      log: the file for the output.
      pipe: to the supervisor.
    """
    host_process.redirect_output(log)
    os.nice(19)

    host_process.configure(hardware, slot=slot)
    host_process.check_devices(hardware.hardware)
    import jax

    keeper = None if kept is None else executables.Executables(kept)
    compiled = [] if keeper is None else [keeper.compiled]
    values = [compute(device, *compiled) for device in jax.local_devices()]
    values[-1] += broken
    pipe.send_bytes(json.dumps(values).encode())


def compute(
    device: jax.Device, compiled: Callable[..., Any] = lambda jitted, *_: jitted
) -> int:
    """The number that a device computes; `EXPECTED` on a sound one.

    Args:
      device: of this process.
      compiled: compiles a jitted function for its arguments.
    """
    import jax
    import jax.numpy as jnp

    @jax.jit
    def rounds(rows: jax.Array, columns: jax.Array) -> jax.Array:
        weights = (5 * rows + 3 * columns * columns + 1) % _MODULUS

        def multiply(_: int, values: jax.Array) -> jax.Array:
            product = values.astype(jnp.float32) @ weights.astype(jnp.float32)
            return product.astype(jnp.int32) % _MODULUS

        values = jax.lax.fori_loop(
            0, _ROUNDS, multiply, (7 * rows + 11 * columns) % _MODULUS
        )
        # It depends on the order of rows and columns, modulo 2**32.
        position = (rows * _SIZE + columns + 1).astype(jnp.uint32)
        return (values.astype(jnp.uint32) * position).sum(dtype=jnp.uint32)

    mesh = jax.sharding.Mesh([device], ("device",))
    here = jax.NamedSharding(mesh, jax.P())
    arrays = [
        jax.device_put(each, here) for each in np.indices((_SIZE, _SIZE), np.int32)
    ]
    return int(compiled(rounds, *arrays)(*arrays))


def problem_of(values: Mapping[int, Sequence[int]]) -> str | None:
    """The reason why a slice is not sound; None if it is.

    Args:
      values: by host of the slice, the value of each of its devices.
    """
    wrong = [
        f"device {device} of its host {host} computed {value}"
        for host, of_host in sorted(values.items())
        for device, value in enumerate(of_host)
        if value != EXPECTED
    ]
    if not wrong:
        return None
    return f"{errors.first_of(wrong)}, and sound devices compute {EXPECTED}"
