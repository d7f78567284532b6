"""Faults as a run records them, for the suite `verdicts`.

What needs a fault of hardware is told here by what records it: the functions that turn
an exception of JAX, an exit code, a heartbeat that is missing, an error of storage, the
numbers of a check or of a loss into failures and events. The texts are those of the
drivers and services. The world is a scripted cluster under the real loop of a run.
"""

from __future__ import annotations

import dataclasses
import errno
import functools
import itertools
import os
import pathlib
import random
import signal
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Concatenate, ParamSpec

import jax

import elastic_ckpt as ec
from elastic_ckpt.core import errors, events, storage_cause
from elastic_ckpt.elastic import (
    decision,
    device_check,
    executables,
    host_failure,
    leader_claim,
    machine,
    process_cluster,
    watch,
)
from elastic_ckpt.elastic.cluster import Assignment, TrainFunction
from elastic_ckpt.elastic.host_failure import HostFailure
from elastic_ckpt.training import callbacks

_SETTLED_SECS = 1e6


@dataclasses.dataclass(kw_only=True)
class World:
    """A world of one host a slice, in which `host` has a fault after `step`."""

    draw: random.Random
    emit: events.Emit
    hosts: int
    host: int
    step: int


P = ParamSpec("P")
Records = Callable[[World], Sequence[HostFailure]]


class ScriptedCluster:
    """A cluster whose first worlds fail as they are told; an `elastic.Cluster`.

    If `gone`, the slice of the host with the fault is gone with its memory, and if
    `is_machine` with its machine.
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
            present_secs=dict.fromkeys(sorted(there), _SETTLED_SECS),
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
        failures = self._records.pop(0)(world)
        if not failures:
            return True
        error = process_cluster.error_of(failures, self.hosts, described="lost")
        if isinstance(error, host_failure.WorldLostError) and self._gone:
            self._absent.add(self.host)
            error.gone = frozenset([self.host])
            if self._is_machine:
                error.machines = frozenset([self.host])
        raise error

    def wait(self, secs: float) -> None:
        """See `Cluster`."""

    def close(self) -> None:
        """See `Cluster`."""


def _raised(host: int, error: BaseException, phase: str = "step") -> HostFailure:
    # As `host_process.run` reports it.
    try:
        raise error
    except BaseException as raised:
        failure = host_failure.of_exception(host, raised)
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
    # What other hosts report when one has left a collective: not all of them in time.
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
            death = host_failure.silent_death(host, -signal.SIGABRT)
            seen.append(dataclasses.replace(death, log=_ABORTED_LOG, phase="step"))
    return seen


def _on_one(world: World, *texts: str) -> Sequence[HostFailure]:
    error = jax.errors.JaxRuntimeError(world.draw.choice(texts))
    # The others lose their connections when its process has ended, or before.
    after = [e for e in _followers(world) if not e.is_silent or world.host == 0]
    seen = [_raised(world.host, error), *after]
    return world.draw.sample(seen, len(seen))


def _on_all(
    world: World,
    *texts: str,
    kind: type[Exception] = jax.errors.JaxRuntimeError,
    is_single: bool = False,
) -> Sequence[HostFailure]:
    # If it `is_single`, there is one controller, whose only host is the process that
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
    death = host_failure.silent_death(world.host, code, oom_kills=oom_kills)
    # Connections end a moment after the process.
    after = _followers(world) if has_followers else []
    return [dataclasses.replace(death, log=log, phase="step"), *after]


def _hangs(
    world: World, phase: str, *, everywhere: bool = False, is_silent: bool = False
) -> Sequence[HostFailure]:
    now_secs = time.monotonic()
    limits = watch.Limits(most_secs=120.0, heartbeat_secs=30.0)
    began_secs = now_secs - 300.0
    watched = watch.Watch(limits, world.hosts, now_secs=began_secs)
    for host in range(world.hosts):
        watched.begin(host, "reach", now_secs=began_secs)
        is_here = everywhere or host == world.host
        if not is_here or phase != "reach":
            watched.begin(host, "join", now_secs=began_secs + 1)
            watched.begin(host, phase, now_secs=began_secs + 2)
        if not is_here and phase != "reach":
            watched.begin(host, "evaluate", now_secs=began_secs + 3)
        secs = 3.0 if is_silent and host == world.host else 299.9
        watched.heartbeat(host, now_secs=began_secs + secs)
    hang = watched.hang(now_secs=now_secs)
    assert hang is not None
    return [
        host_failure.of_hang(host, hang, watched.phase(host), now_secs=now_secs)
        for host in hang.hosts or [0]
    ]


def _degrades(
    world: World, tier: str, *errors_: BaseException
) -> Sequence[HostFailure]:
    error = world.draw.choice(errors_)
    # Of each save, until it has passed.
    for step in range(world.step, world.step + world.draw.randint(1, 4)):
        storage_cause.report(world.emit, tier, step, f"{error}")
    return []


def _fills_mapped_memory(world: World) -> Sequence[HostFailure]:
    return [*_degrades(world, "local", _FULL), *_dies(world, -signal.SIGBUS)]


def _emits(world: World, name: str, **fields: Any) -> Sequence[HostFailure]:
    # An event of the slice with the fault.
    world.emit(name, slice=world.host, **fields)
    return []


def _computes_wrongly(world: World) -> Sequence[HostFailure]:
    wrong = device_check.EXPECTED + world.draw.randrange(1, 9)
    why = device_check.problem_of(f"CpuDevice(id={world.host})", wrong)
    return _emits(world, "slice_refused", why=why)


def _is_slow(world: World, kind: str) -> Sequence[HostFailure]:
    slow = watch.SlowHosts(now_secs=0.0)
    found: list[watch.SlowHost] = []
    for second in range(1, 60):
        for host in range(world.hosts):
            part = 0.7 if host == world.host else 0.02
            slow.note(host, {"secs": 1.0, kind: part}, phase="step")
        found += slow.newly_slow(now_secs=float(second))
    for each in found:
        world.emit("slow_host", slice=each.host, **dataclasses.asdict(each))
    return []


def _diverges(world: World, loss: float) -> Sequence[HostFailure]:
    above = functools.partial(callbacks.loss_above_best, smoothing=0.5, factor=1.5)
    warn = callbacks.Action.WARN
    detectors = {
        "non_finite": callbacks.Detector(callbacks.non_finite, action=warn),
        "loss_above_best": callbacks.Detector(above, action=warn, patience=2),
    }
    for step, (name, detector) in itertools.product(range(1, 9), detectors.items()):
        report = callbacks.Report(
            loss=loss if step > 5 else 2.0 + world.draw.random() / 10,
            gradient_norm=1.0,
            tokens=64,
            learning_rate=0.1,
        )
        found = detector.after_step(step, report)
        if found is not None:
            fields = {"callback": name, "action": found.action.value, "why": found.why}
            world.emit("divergence_found", step=step, **fields)
            break
    return []


def _leads_no_more(world: World) -> Sequence[HostFailure]:
    lost = ["its claim was not renewed for 30 s", "process 412 of host-a has ended"]
    leader = leader_claim.Leader(
        machine=world.host,
        address="10.0.0.8:40311",
        key="",
        term=1,
        claim="",
        since_secs=time.monotonic(),
        lost=world.draw.choice(lost),
    )
    machine.report_lost(leader, world.emit)
    return []


def _flip_a_bit(world: World, files: Iterable[pathlib.Path]) -> None:
    # The largest file has the values; small ones describe a directory.
    file = max(files, key=lambda each: each.stat().st_size)
    content = bytearray(file.read_bytes())
    content[world.draw.randrange(len(content))] ^= 1
    file.write_bytes(content)


def _restores(world: World, *, is_distrusted: bool) -> Sequence[HostFailure]:
    # A step whose copy in RAM is bad, or all of which was corrupt when it was captured.
    with tempfile.TemporaryDirectory() as directory:
        ram, storage = (
            pathlib.Path(directory, "ram"),
            pathlib.Path(directory, "storage"),
        )
        tiers = [ec.Local(ram, every=1), ec.Persistent(storage, every=2)]
        with ec.Checkpointer(tiers) as checkpointer:
            for step in (2, 3) if is_distrusted else (2,):
                checkpointer.save(step, {"w": jax.numpy.full(1000, 1.0)})
        if not is_distrusted:
            _flip_a_bit(world, filter(pathlib.Path.is_file, ram.rglob("*")))
        with ec.Checkpointer(tiers, emit=world.emit) as checkpointer:
            checkpointer.load()
            if is_distrusted:
                checkpointer.load(2, go_back=True)
                fields = {"restored_step": 3, "to_step": 2, "why": "the loss is nan"}
                world.emit("restore_distrusted", step=4, **fields)
    return []


def _loads_a_damaged_program(world: World) -> Sequence[HostFailure]:
    with executables.kept() as kept:
        keeper = executables.Executables(kept)
        # A program that JAX has in its own cache is not kept.
        number = time.time_ns() % 2**20
        step = jax.jit(lambda x: x + number)
        mesh = jax.sharding.Mesh(jax.devices()[:1], ("data",))
        whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
        values = jax.device_put(jax.numpy.zeros(8), whole)
        keeper.compiled(step, values, emit=world.emit)
        _flip_a_bit(world, pathlib.Path(kept.directory).iterdir())
        keeper.compiled(step, values, emit=world.emit)
    return []


def _os_error(number: int, path: str) -> OSError:
    return OSError(number, os.strerror(number), path)


_BUCKET = "gs://models/run/checkpoints/40"
_PEER = "http://10.0.0.8:8470"
_FULL = _os_error(errno.ENOSPC, "/dev/shm/run/hosts/0/40")
_CHECK_LOG = (
    "F1126 11:35:33.808 hlo_verifier.cc:91] Check failed: instruction->shape() == shape"
)
# By kind: what JAX says on the host that has the fault.
_ON_ONE = {
    "device_memory_bad": (
        "INTERNAL: CUDA_ERROR_ECC_UNCORRECTABLE: uncorrectable ECC error encountered",
        "INTERNAL: stream did not block host until done; NVRM: Xid (PCI:0000:44:00):"
        " 94, pid=871, Contained ECC error",
    ),
    "device_lost": (
        "INTERNAL: CUDA_ERROR_NO_DEVICE: no CUDA-capable device is detected",
        "INTERNAL: NVRM: Xid (PCI:0000:b3:00): 79, GPU has fallen off the bus",
        "INTERNAL: TPU chip 3 is unhealthy",
    ),
    "device_link_down": (
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
# What it says on all hosts.
_ON_ALL = {
    "program_fails_on_devices": (
        "INTERNAL: CUDA_ERROR_ILLEGAL_ADDRESS: an illegal memory access at 0x{}{}",
        "INTERNAL: Core halted unexpectedly: semaphore {} has a nonzero value",
    ),
    "device_memory_exhausted": (
        "RESOURCE_EXHAUSTED: Out of memory allocating {}{}000 bytes",
    ),
    "program_refused_by_xla": (
        "INVALID_ARGUMENT: Argument 0 of {} is sharded otherwise",
        "UNIMPLEMENTED: no kernel for f8e4m3 on device {}",
    ),
    "fabric_failed": (
        "INTERNAL: NCCL operation ncclGroupEnd() failed: unhandled system error (run"
        " with NCCL_DEBUG=INFO for details)",
        "INTERNAL: NET/IB : Got completion from peer 10.0.35.{}<49189> with error 12,"
        " opcode 0, len 0, vendor err 129 (Recv)",
    ),
    "name_not_resolved": (
        "INTERNAL: DNS resolution failed for host-{}.run.default: NXDOMAIN",
    ),
    "coordination_timed_out": (
        "DEADLINE_EXCEEDED: Barrier timed out. Id: restore/{}. Tasks: {}",
    ),
    "coordination_lost": (
        "UNAVAILABLE: failed to connect to all addresses; last error: UNKNOWN:"
        " ipv4:10.0.0.{}:8476: Failed to connect to remote host",
    ),
}
# What else is raised on all hosts.
_RAISED: dict[str, tuple[type[Exception], *tuple[str, ...]]] = {
    "connections_lost": (ValueError, *_GLOO),
    "cannot_go_on": (
        errors.RunError,
        "hosts of this world have two versions of jax: 0.10.2 and 0.11.{}",
        "the mesh has an axis of {}, which does not divide the {} rows of a batch",
    ),
    "program_failed": (ValueError, "shapes ({}, {}) do not fit", "layer {}"),
    "program_failed: it speaks of devices": (
        AssertionError,
        "CUDA_ERROR_ECC_UNCORRECTABLE is no dataset",
    ),
    "diverged": (errors.DivergedError, "loss_above_best: the loss is {}"),
    "replaced": (errors.ReplacedError, "another start continues the run"),
    "other_model": (
        errors.OtherModelError,
        "the saved step has no leaf params/layer_{}/w",
    ),
    "data_changed": (
        errors.DataError,
        "the data state was saved by another pipeline (shards: saved {}, now {})",
    ),
    "data_unusable": (
        errors.DataError,
        "an example to pack has features of several lengths, [{}, {}]",
    ),
    "step_of_another_run": (
        errors.CheckpointError,
        "/mnt/run contains the steps of another run, 'a', and this run is 'b'",
    ),
    "step_not_stored": (
        errors.NotStoredError,
        "step {} is not in /mnt/run: No space left on device",
    ),
    "grace_exceeded": (
        errors.StoppedError,
        "hosts {} did not save and end within {} s",
    ),
}
# The errors of saves to storage.
_STORAGE: dict[str, tuple[OSError, ...]] = {
    "tier_failed": (OSError("INTERNAL: cannot be encoded"),),
    "storage_full": (_os_error(errno.ENOSPC, "/mnt/run"),),
    "storage_read_only": (_os_error(errno.EROFS, "/mnt/r"),),
    "storage_throttled": (
        OSError("HTTP status 429: rateLimitExceeded: the object exceeded its rate"),
        OSError("An error occurred (SlowDown): Please reduce your request rate"),
    ),
    "storage_refused": (
        OSError(f"PERMISSION_DENIED: {_BUCKET}: HTTP status 403"),
        OSError("An error occurred (AccessDenied) when calling PutObject"),
        PermissionError(errno.EACCES, os.strerror(errno.EACCES), "/mnt/run"),
    ),
    "storage_stale": (_os_error(errno.ESTALE, "/mnt/run"),),
    "storage_io_error": (_os_error(errno.EIO, "/mnt/run"),),
    "storage_slow": (
        TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT)),
        OSError(f"DEADLINE_EXCEEDED: {_BUCKET}: no answer within 60 s"),
    ),
    "storage_unreachable": (
        OSError(f"UNAVAILABLE: {_BUCKET}: HTTP status 503"),
        ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"),
    ),
    "storage_missing": (
        OSError("NOT_FOUND: the bucket does not exist"),
        _os_error(errno.ENOENT, "/mnt/run/checkpoints"),
    ),
    "component_failed": (OSError("components were not written: ['metrics']"),),
    "wrong_clock": (
        OSError("An error occurred (RequestTimeTooSkewed) when calling PutObject"),
        OSError("certificate verify failed: certificate is not yet valid"),
    ),
}


def _once(
    record: Callable[Concatenate[World, P], Sequence[HostFailure]],
    *args: P.args,
    **kwargs: P.kwargs,
) -> tuple[Records, ...]:
    return (lambda world: record(world, *args, **kwargs),)


# By kind of the verdict, and a variant: what each of the first worlds records. The
# slice of those in `GONE` is gone.
RECORDS: dict[str, tuple[Records, ...]] = {
    "host_out_of_memory": _once(_dies, -signal.SIGKILL, oom_kills=1),
    "host_killed": _once(_dies, -signal.SIGKILL),
    "host_ended": _once(_dies, -signal.SIGTERM, -signal.SIGHUP, -signal.SIGXCPU),
    "host_crashed": _once(_dies, -signal.SIGSEGV, -signal.SIGABRT, log=_CHECK_LOG),
    "host_memory_bad": _once(_dies, -signal.SIGBUS),
    "ram_disk_full": _once(_degrades, "local", _FULL),
    "ram_disk_full: it is mapped": (_fills_mapped_memory,),
    "host_exited": _once(_dies, 3, 1, 134),
    "host_cut_off": _once(
        _dies, -signal.SIGABRT, log=_ABORTED_LOG, has_followers=False
    ),
    "slice_lost": _once(_dies, -signal.SIGKILL),
    "too_few_slices": _once(_dies, -signal.SIGKILL),
    "machine_lost": _once(_dies, -signal.SIGKILL),
    "leader_lost": (_leads_no_more,),
    "slice_restarted": _once(
        _on_all,
        "DATA_LOSS: Data loss: the slice was restarted",
        "DATA_LOSS: 0x7f",
        is_single=True,
    ),
    "slice_preempted": _once(_emits, "slice_preempted"),
    "host_unreachable": _once(_hangs, "reach"),
    "host_stopped": _once(_hangs, "step", is_silent=True),
    "restore_hangs": _once(_hangs, "restore"),
    "compile_hangs": _once(_hangs, "compile", everywhere=True),
    "host_hangs": _once(_hangs, "step"),
    "collective_hangs": _once(_hangs, "step", everywhere=True),
    "device_too_slow": _once(
        _emits, "slice_refused", why="its hosts [0, 1] did not finish the check in 20 s"
    ),
    "device_check_failed": _once(
        _emits, "slice_refused", why="its host 1 failed in the check; see /runs/a/check"
    ),
    "state_corrupt": _once(_restores, is_distrusted=True),
    "executable_damaged": (_loads_a_damaged_program,),
    "program_fails_again": (
        *_once(_on_one, "INTERNAL: device-side assert at index 512 of 512"),
        *_once(_on_one, "INTERNAL: device-side assert at index 519 of 512"),
    ),
    "device_wrong": (_computes_wrongly,),
    "host_slow": _once(_is_slow, watch.LATE),
    "data_slow": _once(_is_slow, "data"),
    "loss_not_finite": _once(_diverges, float("nan")),
    "loss_diverges": _once(_diverges, 9.0),
    "copies_damaged": _once(_restores, is_distrusted=False),
    "peer_unreachable": _once(
        _degrades,
        "peer",
        OSError(f"the items of host 3 cannot be read: {_PEER}: Connection refused"),
        OSError(f"{_PEER}: timed out"),
    ),
    "peer_refused": _once(
        _degrades, "peer", OSError(f"{_PEER} does not take the run's secret")
    ),
    "copies_differ": _once(
        _degrades, "local", OSError("the digest differs of params/w at hosts 1 and 3")
    ),
    **{kind: _once(_on_one, *texts) for kind, texts in _ON_ONE.items()},
    **{kind: _once(_on_all, *texts) for kind, texts in _ON_ALL.items()},
    **{
        kind: _once(_on_all, *texts, kind=error)
        for kind, (error, *texts) in _RAISED.items()
    },
    **{kind: _once(_degrades, "persistent", *e) for kind, e in _STORAGE.items()},
}
GONE = ("slice_lost", "machine_lost", "too_few_slices")
