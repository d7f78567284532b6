"""Faults in real processes, for suite `verdicts`: a host's actions at a step.

Each fault really happens in a program or to a process; it is not just recorded.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import resource
import signal
import socket
import tempfile
import time
from collections.abc import Callable

import elastic_ckpt as ec
from elastic_ckpt.core import topology
from elastic_ckpt.elastic.world import World

_LONG_SECS = 3600.0


def train(world: World, *, fault: str, host: int, at_step: int, steps: int) -> None:
    """Adds up numbers over all devices and has a fault in the first world.

    The fault is one of `FAULTS` or `HANGS`, or empty; host -1 stands for all.
    """
    import jax
    import numpy as np

    sharding = topology.over_all_devices(world.mesh)
    ones = jax.make_array_from_callback(
        (world.mesh.size,), sharding, lambda _: np.ones(1, np.float32)
    )
    total = jax.jit(jax.numpy.sum)
    for step in range(1, steps + 1):
        world.begin("step")
        float(total(ones))
        is_here = host in (-1, topology.this_host())
        if step == at_step and fault in HANGS and world.number == 1:
            # All hosts begin the phase.
            world.begin(HANGS[fault])
            if is_here:
                time.sleep(_LONG_SECS)
        # A program's fault occurs in each world.
        is_due = step == at_step and (world.number == 1 or host == -1)
        if is_here and is_due and fault in FAULTS:
            FAULTS[fault](world)
        if world.leaving(step):
            return


def _signal(number: signal.Signals) -> None:
    if number not in (signal.SIGKILL, signal.SIGSTOP):
        # A launcher may have made the process ignore the signal, like nohup.
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    time.sleep(_LONG_SECS)


def _bus_error() -> None:
    # Like a file on a full RAM disk, which is longer than its pages.
    with tempfile.TemporaryFile() as file:
        file.truncate(2 * mmap.PAGESIZE)
        mapped = mmap.mmap(file.fileno(), 2 * mmap.PAGESIZE)
        file.truncate(0)
        mapped[mmap.PAGESIZE]


def _raise(world: World) -> None:
    raise ValueError(f"layer {world.number} has no weights")


def _need_device_memory() -> None:
    import jax

    jax.numpy.zeros((1 << 50,), "float32").block_until_ready()


def _open_files() -> None:
    soft = len(os.listdir("/proc/self/fd")) + 16
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    kept = [open(os.devnull) for _ in range(1000)]  # noqa: SIM115
    del kept


def _fill_disk() -> None:
    with open("/dev/full", "wb", buffering=0) as file:
        file.write(b"a step")


def _use_service() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    with socket.create_connection(("127.0.0.1", port), timeout=60):
        pass


def _read(world: World, *files: str) -> None:
    data = ec.data.from_config(grain_train_files=",".join(files), max_target_length=64)
    batches = ec.batches(data, mesh=world.mesh, global_batch_size=6)
    while True:
        next(batches)


def _read_damaged_data(world: World) -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = f"{directory}/texts.array_record"
        ec.data.lm.write_arrayrecord("python-stdlib/email", path)
        os.truncate(path, os.path.getsize(path) // 2)
        _read(world, path)


def _load_nothing(world: World) -> None:
    # The same on all hosts, and no file is made in it.
    tiers = [ec.Persistent(f"{tempfile.gettempdir()}/no_steps")]
    with ec.Checkpointer(tiers, mesh=world.mesh, read_only=True) as steps:
        steps.load(7)


# The phase in which a host stops making progress, for each fault.
HANGS = {"hang": "step", "hang_in_restore": "restore", "hang_in_compile": "compile"}
FAULTS: dict[str, Callable[[World], object]] = {
    "kill": lambda _: _signal(signal.SIGKILL),
    "stop": lambda _: _signal(signal.SIGSTOP),
    "hang_up": lambda _: _signal(signal.SIGHUP),
    "segfault": lambda _: ctypes.string_at(0),
    "bus_error": lambda _: _bus_error(),
    "exit": lambda _: os._exit(3),
    "raise": _raise,
    "need_device_memory": lambda _: _need_device_memory(),
    "need_memory": lambda _: bytearray(1 << 60),
    "open_files": lambda _: _open_files(),
    "fill_disk": lambda _: _fill_disk(),
    "import": lambda _: __import__("a_package_that_is_not_installed"),
    "use_service": lambda _: _use_service(),
    "resolve": lambda _: socket.getaddrinfo("storage.invalid", 443),
    "read_missing_data": lambda world: _read(
        world, f"/nowhere/{time.monotonic_ns()}/*.array_record"
    ),
    "read_damaged_data": _read_damaged_data,
    "load_nothing": _load_nothing,
    "configure_wrongly": lambda _: ec.Persistent("steps", every=-1),
}
