"""A host of a world: a process that joins the others and calls the training function.

A host is a child of the warm fork server and waits until the supervisor sends it a
task. Over a pipe, it reports heartbeats, phases, events and failures and receives the
supervisor's orders. Importing this module does not import JAX, so the launcher starts
fast.

*Devices.* Every host checks its devices while it restores, and no step counts until the
devices have passed. Each device multiplies matrices of small integers. The products and
sums are exact in any hardware's floating point and in any order, so every sound device
computes the same known number.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import faulthandler
import gc
import json
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import connection
from typing import Any

from etils import epy

from elastic_ckpt.core import allgather, background, errors, events, storage
from elastic_ckpt.elastic import executables, failures, termination, watch
from elastic_ckpt.elastic.cluster import Assignment, TrainFunction
from elastic_ckpt.elastic.world import BetweenWorlds, Leaving, World
from elastic_ckpt.steps import layout

with epy.lazy_imports():
    import jax
    import numpy as np

    from elastic_ckpt.core import addresses, metrics
    from elastic_ckpt.data import compatibility
    from elastic_ckpt.data.lm import documents

# Modules that the fork server imports, so that hosts need not while slices change.
IMPORTS = (
    __name__,
    "elastic_ckpt.data.lm.documents",
    "elastic_ckpt.frontend",
    "jax.experimental.serialize_executable",
    "jaxlib.mlir.dialects.builtin",
    "jaxlib.mlir.dialects.mhlo",
)
# The supervisor's orders: begin the world; leave for the next world; leave although a
# host loses its memory; stop the run.
BEGIN = b"begin"
LEAVE = b"leave"
LOSE_MEMORY = b"lose memory"
STOP = b"stop"

# Between heartbeats, a host measures how late it wakes up.
_TICKS, _TICK_SECS = 10, 0.1
# Time until JAX aborts a process that has lost the coordination service.
_ABORT_SECS = 2.0
# The time that other hosts have to report their failures.
_REPORT_SECS = 10.0
# How long hosts wait after SIGTERM for the supervisor's order, and for each other.
_ORDER_SECS = 20.0
_AGREE_SECS = 60.0
# The time limit for joining, unless the supervisor kills the hosts earlier. After that,
# JAX aborts all hosts without saying which one is missing.
_JOIN_SECS = 900
# The time limit for one attempt to reach host 0, and the pause between attempts.
_TRY_SECS = 5.0
_REACH_SECS = 0.02
# The result of sound devices; a test computes it with integers.
EXPECTED = 2136504280
_SIZE = 256
_ROUNDS = 16
# A prime. Values below it have 8 bits and are exact in bfloat16; a sum of _SIZE
# products is below 2**24 and is exact in float32.
_MODULUS = 251
# Always includes the CPU, because colocated data iterators use its devices.
_PLATFORMS = {"cpu": "cpu", "gpu": "cuda,cpu", "tpu": "tpu,cpu"}


class DeviceWrongError(errors.RunError):
    """A device computes wrong values."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hardware:
    """All hosts that a run may use, and each host's devices.

    Attributes:
      hosts: the total number of hosts in all slices.
      devices_per_host: the number of devices of each host, for CPUs and GPUs.
      jax_cache_dir: the directory of JAX's compilation cache; empty disables the cache.
      hardware: `cpu`, `gpu` or `tpu`.
    """

    hosts: int = 1
    slices: int = 1
    devices_per_host: int = 1
    jax_cache_dir: str = ""
    hardware: str = "cpu"

    def gpus(self, slot: int) -> range | None:
        """A host's GPUs, numbered among those that CUDA_VISIBLE_DEVICES allows.

        None means all GPUs of the machine; `slot` is the host's index on the machine.
        """
        return range(slot * self.devices_per_host, (slot + 1) * self.devices_per_host)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Member:
    """A host's place in its world.

    Attributes:
      address: the `host:port` where host 0 runs JAX's coordination service.
    """

    address: str
    num_hosts: int
    host: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class SliceMemory:
    """The RAM disk of each slice.

    Attributes:
      directory: the parent of the slices' directories.
      run: the run name; each slice's directory contains a run directory of this
        name.
      tls_certificate: a PEM file with the certificate of the agents that serve the RAM
        disks; None disables TLS.
      tls_key: a PEM file with the certificate's private key.
    """

    directory: str
    run: str
    tls_certificate: str | None = None
    tls_key: str | None = None

    def root(self, number: int) -> str:
        """The run directory in a slice's RAM, which is lost with the slice."""
        return os.path.join(layout.slice_directory(self.directory, number), self.run)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Owned:
    """What a supervisor shares with the hosts of all its worlds.

    Attributes:
      memory: the RAM disks of the slices; None if hosts do not store checkpoints there.
      most_hosts: the maximum number of hosts that this machine can have in a world.
      broken: the slices whose devices compute wrong values, as an injected fault.
    """

    memory: SliceMemory | None
    kept: executables.KeptExecutables
    most_hosts: int = 1
    broken: frozenset[int] = frozenset()


class HostChannel:
    """A host's channel to its supervisor; an `Emit` that sends it events.

    Attributes:
      phase: the last phase that the program began.
    """

    def __init__(self, pipe: connection.Connection) -> None:
        self._pipe = pipe
        self._lock = threading.Lock()
        self.phase = ""
        # The number of phases begun, reported or not.
        self._num_begun = 0
        # By kind, the seconds that only this host spent since the last heartbeat.
        self._spent_secs: dict[str, float] = collections.defaultdict(float)

    def __call__(self, name: str, **fields: storage.Json) -> None:
        """Sends an event."""
        events.check(name, fields)
        self.send({"event": name, "fields": fields})

    def send(self, message: dict[str, Any]) -> None:
        """Sends a message as JSON; may be called from any thread."""
        with self._lock:
            self._pipe.send_bytes(json.dumps(message).encode())

    def begin(self, phase: str) -> None:
        """Reports that the program begins a phase.

        If the same phase begins again, only the next heartbeat says so.
        """
        self._num_begun += 1
        if phase != self.phase:
            self.phase = phase
            self.send({"phase": phase, "begun": self._num_begun})

    def wait(self, await_check: Callable[[], object]) -> None:
        """Waits until the world that this host has joined begins.

        A world that does not begin immediately is a prepared world. Only hosts with
        sound devices may join a prepared world, so this awaits the device check first.
        """
        if not self._pipe.poll():
            await_check()
        jax.monitoring.register_event_duration_secs_listener(self._note)
        self.send({"ready": True})
        order = self._pipe.recv_bytes()
        assert order == BEGIN, order

    def agree(self, hosts: allgather.Allgather) -> bytes:
        """Agrees with all hosts on the order to follow, even if only some received it.

        If no host received an order, the run ends.
        """
        own, secs = b"", _ORDER_SECS
        try:
            # Does not take the lock, which senders in other threads need. The newest
            # order takes precedence.
            while self._pipe.poll(secs):
                own, secs = self._pipe.recv_bytes(), 0.0
        except (EOFError, OSError):
            # The supervisor is about to kill this process.
            own = own or LEAVE
        told = hosts.gather("leaving", own.decode(), timeout_secs=_AGREE_SECS)
        return next(
            (each for each in (STOP, LOSE_MEMORY, LEAVE) if each.decode() in told), STOP
        )

    def send_heartbeats(self) -> None:
        """Sends a heartbeat each second, with the time that only this host spent.

        If sending fails, the supervisor has exited, and this process kills itself.
        """
        try:
            while True:
                with self._lock:
                    spent_secs = {**self._spent_secs}
                    self._spent_secs.clear()
                self.send({"heartbeat": spent_secs, "begun": self._num_begun})
                for _ in range(_TICKS):
                    began_secs = time.monotonic()
                    time.sleep(_TICK_SECS)
                    self._note(watch.LATE, time.monotonic() - began_secs - _TICK_SECS)
        except OSError:
            os.kill(os.getpid(), signal.SIGKILL)

    def _note(self, event: str, duration_secs: float, **_: str | int) -> None:
        # JAX calls this for each duration that the process records.
        kinds = {
            watch.LATE: watch.LATE,
            metrics.DATA_WAIT.name: "data",
            metrics.DATA_SAVE_BLOCK.name: "save",
        }
        if event in kinds:
            with self._lock:
                self._spent_secs[kinds[event]] += duration_secs


# A host's program, which joins the world as the given member.
Program = Callable[[Member, HostChannel], None]
# A process's work, called with the pipe to the supervisor; picklable.
Task = Callable[[connection.Connection], None]


def stand_by(pipe: connection.Connection, example: Task | None) -> None:
    """Waits for a task and runs it; the main function of a supervisor's processes.

    Ignores Ctrl-C, which the supervisor handles. `example` is a task with the same
    imports as the one to come; None if the task arrives immediately.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if example is not None:
        # Copies the memory pages of its objects and reads its files' versions before a
        # host needs them.
        gc.collect()
        executables.changed_modules(0)
        compatibility.versions()
    # Imported modules are never garbage, and a collection would copy all their pages.
    gc.freeze()
    # The supervisor may exit first.
    with contextlib.suppress(EOFError):
        task: Task = pipe.recv()
        task(pipe)


def run(
    program: Program, member: Member, log: str, pipe: connection.Connection
) -> None:
    """Runs `program` in this process, as its task (see `stand_by`)."""
    with open(log, "ab") as file:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(file.fileno(), stream.fileno())
    channel = HostChannel(pipe)
    # The supervisor asks for the stacks of hosts that hang.
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    background.in_thread(channel.send_heartbeats, name="heartbeats")
    try:
        program(member, channel)
    except BaseException as error:
        # This is the process's outermost function: the error is reported here or never.
        traceback.print_exc()
        failure = failures.of_exception(member.host, error)
        if failure.is_of_devices:
            # Gives JAX time to abort this host if it has lost all others.
            time.sleep(_ABORT_SECS)
        channel.send({"failure": dataclasses.asdict(failure)})
        sys.stdout.flush()
        if failure.is_of_devices:
            # The supervisor kills this host when all have reported. If host 0 exited
            # earlier, the service would also stop, and JAX would abort the others.
            time.sleep(_REPORT_SECS)
        # Skips JAX's shutdown, which would wait for hosts that hang.
        os._exit(1)


def run_host(
    train: TrainFunction,
    hardware: Hardware,
    assignment: Assignment,
    owned: Owned,
    member: Member,
    channel: HostChannel,
) -> None:
    """Joins a world as one of its hosts, and trains."""
    slices, memory = assignment.work.slices, owned.memory
    per_slice = member.num_hosts // len(slices)
    own = slices[member.host // per_slice]
    configure(
        hardware,
        # A host uses the same slot in all worlds.
        slot=(own * per_slice + member.host % per_slice) % owned.most_hosts,
    )
    # The hosts of a machine share its cores but not its devices.
    os.environ[documents.LOCAL_HOSTS_VARIABLE] = str(
        min(member.num_hosts, owned.most_hosts)
    )
    # One host may simulate multiple mesh slices.
    num_slices = max(1, hardware.slices // hardware.hosts)

    def ask(step: int) -> Leaving | None:
        if not between.step:
            channel.send({"stepped": True})
        channel.begin(channel.phase)
        if not is_reached(step):
            return None
        order = channel.agree(hosts)
        between.loses_memory = order == LOSE_MEMORY
        return "stop" if order == STOP else "resume"

    with joined(member, channel.begin):
        check_hardware(hardware.hardware)
        hosts = allgather.new()
        # JAX's preemption service handles the signal but hides which host received it.
        termination.call_beside(lambda: channel.send({"sigterm": True}))
        compiled = executables.Executables(owned.kept).compiled
        check = background.in_thread(
            lambda: check_devices(
                jax.local_devices(), compiled, error=int(own in owned.broken)
            ),
            name="device-check",
        )
        between = BetweenWorlds(
            emit=events.nobody if member.host else channel,
            ask=ask,
            compiled=compiled,
            claimant=assignment.claimant,
            await_check=check.result,
        )
        with termination.agreed() as is_reached:
            channel.wait(between.await_check)
            between.report("world_joined", world=assignment.number)
            channel.begin(watch.TRAIN)
            train(
                World(
                    number=assignment.number,
                    slices=tuple(
                        each * num_slices + n
                        for each in slices
                        for n in range(num_slices)
                    ),
                    slice_name=str(own * num_slices),
                    ram_directory=(
                        None if memory is None else memory.root(own * num_slices)
                    ),
                    rows=assignment.work.rows,
                    microbatches=assignment.work.accumulated,
                    emit=between.report,
                    leaving=between.leaving,
                    begin=channel.begin,
                    _between=between,
                )
            )
            if between.answer is not None:
                between.report("world_left", step=between.step)
    if between.resumes():
        sys.stdout.flush()
        # Does not wait for backups in threads, because the next world makes them.
        os._exit(0)


def check_devices(
    devices: Sequence[jax.Device],
    compiled: Callable[..., Any] = lambda jitted, *_: jitted,
    *,
    error: int = 0,
) -> None:
    """Checks that this process's devices compute the correct result.

    A nonzero `error` is added to the result to inject a fault.

    Raises:
      DeviceWrongError: if a device computes a different result.
    """
    for device in devices:
        here = jax.NamedSharding(jax.sharding.Mesh([device], ("device",)), jax.P())
        places = np.indices((_SIZE, _SIZE), np.int32)
        rows, columns = (jax.device_put(each, here) for each in places)
        value = int(compiled(jax.jit(_compute), rows, columns)(rows, columns)) + error
        if value != EXPECTED:
            raise DeviceWrongError(
                f"{device} computed {value}, but sound devices compute {EXPECTED}"
            )


def _compute(rows: jax.Array, columns: jax.Array) -> jax.Array:
    weights = (5 * rows + 3 * columns * columns + 1) % _MODULUS

    def multiply(_: int, values: jax.Array) -> jax.Array:
        product = values.astype("float32") @ weights.astype("float32")
        return product.astype("int32") % _MODULUS

    begin = (7 * rows + 11 * columns) % _MODULUS
    values = jax.lax.fori_loop(0, _ROUNDS, multiply, begin)
    # Weighted, so that the order of rows and columns matters; modulo 2**32.
    position = (rows * _SIZE + columns + 1).astype("uint32")
    return (values.astype("uint32") * position).sum(dtype="uint32")


def configure(world: Hardware, *, slot: int | None = None) -> None:
    """Chooses the devices; must be called before any other use of JAX.

    A host uses the GPUs of its slot (its index on the machine); None uses all GPUs.
    """
    jax.config.update("jax_platforms", _PLATFORMS[world.hardware])
    gpus = None if slot is None else world.gpus(slot)
    if world.hardware == "gpu" and gpus is not None:
        jax.config.update("jax_cuda_visible_devices", ",".join(map(str, gpus)))
    jax.config.update("jax_num_cpu_devices", world.devices_per_host)
    if world.jax_cache_dir:
        directory = storage.absolute(os.path.expanduser(world.jax_cache_dir))
        jax.config.update("jax_compilation_cache_dir", os.fspath(directory))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def check_hardware(hardware: str) -> None:
    """Raises a RunError if JAX fell back to CPUs, as it does if CUDA is missing."""
    if hardware != "cpu" and jax.default_backend() == "cpu":
        raise errors.RunError(
            f"hardware={hardware}, but JAX finds only CPUs on {socket.gethostname()}:"
            f" {jax.local_devices()}; install JAX for your accelerator (jax[cuda12])"
            " and check its driver, or set hardware=cpu"
        )


def join_outer_launcher() -> bool:
    """Joins the world of an outer launcher that JAX detects (Slurm, JobSet, TPU pods).

    Returns:
      Whether there is an outer launcher; without one, this changes nothing.
    """
    try:
        with warnings.catch_warnings():
            # In every Kubernetes pod, JAX recommends installing its k8s extra.
            warnings.simplefilter("ignore")
            jax.distributed.initialize()
    except ValueError as error:
        if "coordinator_address should be defined" in str(error):
            return False
        raise
    return True


@contextlib.contextmanager
def joined(
    member: Member, begin: Callable[[str], object] = lambda _: None
) -> Iterator[None]:
    """Joins the world; at the end of the body, leaves it together with all hosts.

    If the body raises, JAX is not shut down, and the process must exit.

    Raises:
      RunError: if this host cannot reach host 0.
    """
    begin(watch.REACH)
    host, port = member.address.rsplit(":", 1)
    until_secs = time.monotonic() + _JOIN_SECS
    # Tries until host 0 accepts connections.
    while member.host:
        try:
            socket.create_connection((host.strip("[]"), int(port)), _TRY_SECS).close()
            break
        except OSError as error:
            if time.monotonic() > until_secs:
                raise errors.RunError(
                    f"host {member.host} could not reach host 0 at {member.address}"
                    f" within {_JOIN_SECS} s ({error}); check the network between the"
                    " two hosts"
                ) from error
            time.sleep(_REACH_SECS)
    begin(watch.JOIN)
    jax.distributed.initialize(
        member.address,
        num_processes=member.num_hosts,
        process_id=member.host,
        coordinator_bind_address=member.address,
        cluster_detection_method="deactivate",
        initialization_timeout=_JOIN_SECS,
    )
    _collect_over_the_same_network()
    yield
    # Disconnects all hosts first: the coordination service stops with host 0.
    jax.distributed.shutdown()


def _collect_over_the_same_network() -> None:
    from jax._src import config, distributed, xla_bridge
    from jax._src.lib import _jax

    # By default, CPU collectives use the address of the machine's hostname, often a
    # loopback address that other machines cannot reach.
    def make_client() -> object:
        return xla_bridge.make_cpu_client(
            _jax.make_gloo_tcp_collectives(
                distributed_client=distributed.global_state.client,
                hostname=addresses.of_this_host(),
            )
        )

    if config.cpu_collectives_implementation.value == "gloo":
        xla_bridge.register_backend_factory(
            "cpu", make_client, priority=0, fail_quietly=False
        )


def check_guarded(what: str) -> None:
    """Raises a ConfigError in a host process that runs the user's script again.

    A host imports the script that starts the run to find the training function.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise errors.ConfigError(
            f"{what} starts processes that each run this script again; put"
            ' all code except definitions under `if __name__ == "__main__":`'
        )


def check_sent(train: Callable[..., object]) -> None:
    """Raises a ConfigError if a training function cannot be sent to host processes."""
    try:
        sent = pickle.dumps(train)
    except (AttributeError, TypeError, pickle.PicklingError) as error:
        raise errors.ConfigError(
            f"the training function cannot be sent to host processes ({error}); define"
            " it with `def` at the top level of a module, and use functools.partial to"
            " pass values to it"
        ) from None
    main = sys.modules["__main__"]
    path = getattr(main, "__file__", None) or ""
    if b"__main__" in sent and not os.path.exists(path) and main.__spec__ is None:
        raise errors.ConfigError(
            "the training function is defined in an interactive session or in a program"
            " without a file, so host processes cannot import it; move the function"
            " into a file"
        )
