"""Faults as a run records them, for suite `verdicts`.

Faults that need broken hardware are injected here into the functions that record them:
the functions that turn a JAX exception, an exit code or a missing heartbeat into
failures. The messages are the drivers' and services' own. The world is a scripted
cluster under the real loop of a run.
"""

from __future__ import annotations

import dataclasses
import random
import signal
import time
from collections.abc import Callable, Sequence
from typing import Concatenate, ParamSpec

import jax

from elastic_ckpt.core import errors, events
from elastic_ckpt.elastic import (
    decision,
    failures,
    watch,
)
from elastic_ckpt.elastic import host as host_process
from elastic_ckpt.elastic.cluster import Assignment, TrainFunction
from elastic_ckpt.elastic.failures import HostFailure

_SETTLED_SECS = 1e6


@dataclasses.dataclass(kw_only=True)
class World:
    """A world with one host per slice, in which `host` has a fault after `step`."""

    draw: random.Random
    emit: events.Emit
    hosts: int
    host: int
    step: int


P = ParamSpec("P")
Records = Callable[[World], Sequence[HostFailure]]


class ScriptedCluster:
    """A cluster whose first worlds fail as scripted; an `elastic.Cluster`.

    If `gone`, the slice of the faulty host is gone with its memory; if `is_machine`,
    with its machine.
    """

    devices_per_slice = 1

    def __init__(
        self,
        draw: random.Random,
        records: Sequence[Records],
        *,
        gone: bool = False,
        is_machine: bool = False,
    ) -> None:
        self.hosts = draw.randint(3, 8)
        self.host = draw.randrange(self.hosts)
        self.step = draw.randint(1, 40)
        self._draw = draw
        self._records = list(records)
        self._gone = gone
        self._is_machine = is_machine
        self._absent: set[int] = set()

    def slices(self, current: frozenset[int]) -> decision.Slices:
        """See `Cluster`."""
        there = set(range(self.hosts)) - self._absent
        return decision.Slices(
            current=current - self._absent,
            alive_secs=dict.fromkeys(sorted(there), _SETTLED_SECS),
        )

    def run_world(
        self,
        train: TrainFunction,
        assignment: Assignment,
        *,
        emit: events.Emit,
        has_changed: Callable[[], decision.Decision | None],
    ) -> bool:
        """See `Cluster`."""
        del train, has_changed
        emit("world_joined", world=assignment.number)
        for step in range(1, self.step + 1):
            emit("step_done", step=step)
        if not self._records:
            return True
        world = World(
            draw=self._draw, emit=emit, hosts=self.hosts, host=self.host, step=self.step
        )
        failed = self._records.pop(0)(world)
        gone = [self.host] if self._gone else []
        self._absent.update(gone)
        raise failures.WorldLostError(
            failed,
            num_hosts=self.hosts,
            gone=gone,
            machines=gone if self._is_machine else [],
        )

    def wait(self, secs: float) -> None:
        """See `Cluster`."""

    def close(self) -> None:
        """See `Cluster`."""


def _raised(host: int, error: BaseException, phase: str = "step") -> HostFailure:
    # The failure as `host_process.run` reports it.
    try:
        raise error
    except BaseException as raised:
        failure = failures.of_exception(host, raised)
    return dataclasses.replace(failure, phase=phase)


_GLOO = (
    "UNKNOWN: Gloo all-reduce failed: [external/gloo/gloo/transport/tcp/pair.cc:547]"
    " Connection closed by peer [10.0.0.{}]:{}",
    "UNKNOWN: Gloo all-reduce failed: [external/gloo/gloo/transport/tcp/pair.cc:538]"
    " Read error [10.0.0.{}]:{}: Connection reset by peer",
)
_ABORTED_LOG = (
    "client.h:80] Terminating process because the JAX distributed service detected"
    " fatal errors. This most likely indicates that another task died\n"
    "    @     0x7f9467d040ee  xla::CoordinationServiceAgent::SetError()"
)


def _followers(world: World) -> list[HostFailure]:
    # Reports of other hosts when one has left a collective; not all report in time.
    seen = []
    for host in range(world.hosts):
        if host == world.host:
            continue
        kind = world.draw.choice(["connection", "aborted", "nothing"])
        if kind == "connection":
            text = world.draw.choice(_GLOO)
            text = text.format(world.host, world.draw.randint(1024, 65535))
            seen.append(_raised(host, ValueError(text)))
        elif kind == "aborted":
            death = failures.silent_death(host, -signal.SIGABRT)
            seen.append(dataclasses.replace(death, log=_ABORTED_LOG, phase="step"))
    return seen


def _on_one(
    world: World,
    *texts: str,
    kind: type[Exception] = jax.errors.JaxRuntimeError,
) -> Sequence[HostFailure]:
    error = kind(world.draw.choice(texts))
    # The others lose their connections when its process exits, or before.
    after = [e for e in _followers(world) if not e.is_silent or world.host == 0]
    seen = [_raised(world.host, error), *after]
    return world.draw.sample(seen, len(seen))


def _on_all(
    world: World,
    *texts: str,
    kind: type[Exception] = jax.errors.JaxRuntimeError,
    is_single: bool = False,
) -> Sequence[HostFailure]:
    # If `is_single`, there is a single controller, whose only host is the process that
    # trains.
    text = world.draw.choice(texts)
    hosts = 1 if is_single else world.hosts
    return [
        _raised(host, kind(text.format(*world.draw.choices(range(1, 100), k=2))))
        for host in world.draw.sample(range(hosts), hosts)
    ]


def _dies(
    world: World,
    *codes: int,
    log: str = "",
    oom_kills: int = 0,
    has_followers: bool = True,
) -> Sequence[HostFailure]:
    code = world.draw.choice(codes)
    death = failures.silent_death(world.host, code, oom_kills=oom_kills)
    # Connections close a moment after the process exits.
    after = _followers(world) if has_followers else []
    return [dataclasses.replace(death, log=log, phase="step"), *after]


def _hangs(
    world: World, phase: str, *, everywhere: bool = False, is_silent: bool = False
) -> Sequence[HostFailure]:
    limits = watch.Limits(most_secs=120.0, heartbeat_secs=30.0)
    watched = watch.Watch(limits, world.hosts, now_secs=0.0)
    for host in range(world.hosts):
        watched.begin(host, "reach", 1)
        is_here = everywhere or host == world.host
        if not is_here or phase != "reach":
            watched.begin(host, "join", 2)
            watched.begin(host, phase, 3)
        if not is_here and phase != "reach":
            watched.begin(host, "evaluate", 4)
    for secs in range(300):
        watched.look(now_secs=float(secs))
        for host in range(world.hosts):
            if secs < 4 or not is_silent or host != world.host:
                watched.heartbeat(host, 0, {})
    hang = watched.hang()
    assert hang is not None
    return [
        dataclasses.replace(
            failures.of_hang(host, hang, now_secs=time.monotonic()),
            phase=watched.phase(host),
        )
        for host in hang.hosts or [0]
    ]


_CHECK_LOG = (
    "F1126 11:35:33.808 hlo_verifier.cc:91] Check failed: instruction->shape() == shape"
)
# By kind and variant: JAX's messages on the faulty host.
_ON_ONE = {
    "device_bad: memory": (
        "INTERNAL: CUDA_ERROR_ECC_UNCORRECTABLE: uncorrectable ECC error encountered",
        "INTERNAL: stream did not block host until done; NVRM: Xid (PCI:0000:44:00):"
        " 94, pid=871, Contained ECC error",
    ),
    "device_bad: gone": (
        "INTERNAL: CUDA_ERROR_NO_DEVICE: no CUDA-capable device is detected",
        "INTERNAL: NVRM: Xid (PCI:0000:b3:00): 79, GPU has fallen off the bus",
        "INTERNAL: TPU chip 3 is unhealthy",
    ),
    "device_bad: links": (
        "INTERNAL: CUDA_ERROR_NVLINK_UNCORRECTABLE: uncorrectable NVLink error",
        "INTERNAL: NVRM: Xid (PCI:0000:44:00): 74, NVLink: fatal error detected",
        "INTERNAL: an ICI link of the slice has failed",
    ),
    "device_memory_taken": (
        "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 8589934592 bytes",
    ),
    "device_failed": (
        "INTERNAL: Core halted unexpectedly: Accelerator device halted prematurely",
        "INTERNAL: CUDA_ERROR_LAUNCH_FAILED: unspecified launch failure",
    ),
}
# JAX's messages on all hosts.
_ON_ALL = {
    "fails_on_devices": (
        "INTERNAL: CUDA_ERROR_ILLEGAL_ADDRESS: an illegal memory access at 0x{}{}",
        "INTERNAL: Core halted unexpectedly: semaphore {} has a nonzero value",
    ),
    "device_memory_exhausted": (
        "RESOURCE_EXHAUSTED: Out of memory allocating {}{}000 bytes",
        "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used {}.{}G",
    ),
    "program_refused_by_xla": (
        "INVALID_ARGUMENT: Argument 0 of {} is sharded otherwise",
        "UNIMPLEMENTED: no kernel for f8e4m3 on device {}",
    ),
    "network_failed: fabric": (
        "INTERNAL: NCCL operation ncclGroupEnd() failed: unhandled system error (run"
        " with NCCL_DEBUG=INFO for details)",
        "INTERNAL: NET/IB : Got completion from peer 10.0.35.{}<49189> with error 12,"
        " opcode 0, len 0, vendor err 129 (Recv)",
    ),
    "network_failed: names": (
        "INTERNAL: DNS resolution failed for host-{}.run.default: NXDOMAIN",
    ),
    "network_failed: coordination": (
        "DEADLINE_EXCEEDED: Barrier timed out. Id: restore/{}. Tasks: {}",
        "UNAVAILABLE: failed to connect to all addresses; last error: UNKNOWN:"
        " ipv4:10.0.0.{}:8476: Failed to connect to remote host",
    ),
}
# Other errors on all hosts.
_RAISED: dict[str, tuple[type[Exception], *tuple[str, ...]]] = {
    "network_failed: connections": (ValueError, *_GLOO),
    "cannot_continue": (
        errors.RunError,
        "hosts of this world have two versions of jax: 0.10.2 and 0.11.{}",
        "the mesh has an axis of {}, which does not divide the {} rows of a batch",
    ),
    "program_failed": (ValueError, "no batch is left", "layer {}"),
    "program_failed: it speaks of devices": (
        AssertionError,
        "CUDA_ERROR_ECC_UNCORRECTABLE is no dataset",
    ),
    "shapes_differ": (
        TypeError,
        "add got incompatible shapes for broadcasting: ({},), ({},).",
        "dot_general requires contracting dimensions to have the same shape, got ({},)"
        " and ({},).",
    ),
    "not_finite": (FloatingPointError, "invalid value (nan) encountered in div"),
    "diverged": (errors.DivergedError, "loss_above_best: the loss is {}"),
    "replaced": (errors.ReplacedError, "another start continues the run"),
    "other_model": (
        errors.OtherModelError,
        "the saved step has no leaf params/layer_{}/w",
    ),
    "data_unusable": (
        errors.DataError,
        "the data state was saved by a different pipeline (shards: saved {}, now {})",
        "an example to pack has features of different lengths, [{}, {}]",
    ),
    "step_unreadable": (
        errors.CheckpointError,
        "/mnt/run contains the steps of another run, 'a', and this run is 'b'",
    ),
    "step_not_stored": (
        errors.NotStoredError,
        "step {} is not in /mnt/run: No space left on device",
    ),
    "grace_exceeded": (
        errors.StoppedError,
        "hosts {} did not save and stop within {} s",
    ),
}


def _once(
    record: Callable[Concatenate[World, P], Sequence[HostFailure]],
    *args: P.args,
    **kwargs: P.kwargs,
) -> tuple[Records, ...]:
    return (lambda world: record(world, *args, **kwargs),)


# By verdict kind and variant: the records of each of the first worlds. The slices of
# faults in `GONE` are gone.
RECORDS: dict[str, tuple[Records, ...]] = {
    "host_out_of_memory": _once(_dies, -signal.SIGKILL, oom_kills=1),
    "host_killed": _once(_dies, -signal.SIGKILL),
    "host_killed: others": _once(
        _dies, -signal.SIGTERM, -signal.SIGHUP, -signal.SIGXCPU
    ),
    "host_crashed": _once(_dies, -signal.SIGSEGV, -signal.SIGABRT, log=_CHECK_LOG),
    "host_crashed: memory": _once(_dies, -signal.SIGBUS),
    "host_exited": _once(_dies, 3, 1, 134),
    "host_cut_off": _once(
        _dies, -signal.SIGABRT, log=_ABORTED_LOG, has_followers=False
    ),
    "slice_lost": _once(_dies, -signal.SIGKILL),
    "machine_lost": _once(_dies, -signal.SIGKILL),
    "slice_restarted": _once(
        _on_all,
        "DATA_LOSS: Data loss: the slice was restarted",
        "DATA_LOSS: 0x7f",
        is_single=True,
    ),
    "device_wrong": _once(
        _on_one,
        f"TPU_3 computed 17, but sound devices compute {host_process.EXPECTED}",
        kind=host_process.DeviceWrongError,
    ),
    "host_unreachable": _once(_hangs, "reach"),
    "host_stopped": _once(_hangs, "step", is_silent=True),
    "restore_hangs": _once(_hangs, "restore"),
    "world_hangs: compile": _once(_hangs, "compile", everywhere=True),
    "world_hangs": _once(_hangs, "step", everywhere=True),
    "host_hangs": _once(_hangs, "step"),
    "fails_again": (
        *_once(_on_one, "INTERNAL: device-side assert at index 512 of 512"),
        *_once(_on_one, "INTERNAL: device-side assert at index 519 of 512"),
    ),
    **{kind: _once(_on_one, *texts) for kind, texts in _ON_ONE.items()},
    **{kind: _once(_on_all, *texts) for kind, texts in _ON_ALL.items()},
    **{
        kind: _once(_on_all, *texts, kind=error)
        for kind, (error, *texts) in _RAISED.items()
    },
}
GONE = ("slice_lost", "machine_lost")
