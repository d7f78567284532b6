"""Keeps compiled steps on this machine's RAM disk for the next world.

If an earlier world had the same shape, a world loads that world's executables without
tracing. Getting a compiled step then takes milliseconds instead of the seconds that XLA
needs. Loading begins in the background while the world finds and restores its state.
JAX's compilation cache cannot do that for multiple processes on CPU: its key depends on
the process, and only process 0 writes.

Loading an executable unpickles it, which runs code. Executables are therefore read only
from a private directory on this machine's RAM disk, never from peers or storage, and
only after checking a MAC (HMAC-SHA-256) under a key that the supervisor never writes to
a file. The directory and the key are gone once the supervisor exits. An executable's
name is derived from the program, the mesh, the arguments, the host and the versions. An
altered executable is rejected and recompiled, and an event reports it.

Importing this module does not import JAX, so the launcher starts fast.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import hmac
import io
import os
import pathlib
import pickle
import re
import secrets
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from typing import Any

import cloudpickle
from absl import logging
from etils import epy

from elastic_ckpt.core import background, events, storage, working_directory

with epy.lazy_imports():
    import jax
    import jaxlib
    from jax.experimental import serialize_executable

    from elastic_ckpt.core import topology

_RAM_DISK = "/dev/shm"
# An event of `jax.monitoring`.
_CACHE_HIT = "/jax/compilation_cache/cache_hits"
# Matches a collective in the text of a compiled program.
_COLLECTIVE = re.compile(
    r" (all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)"
    r"(-start)?\("
)
_MAC_BYTES = hashlib.sha256().digest_size

_Compiled = Callable[..., Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class KeptExecutables:
    """The storage for the executables of a supervisor's worlds.

    Attributes:
      directory: a private directory on this machine's RAM disk.
      key: the MAC key for all files, which exists only in the memory of the supervisor
        and its hosts.
      began_ns: the creation time of the directory, in nanoseconds since 1970.
    """

    directory: str
    key: bytes = dataclasses.field(repr=False)
    began_ns: int


@contextlib.contextmanager
def kept() -> Iterator[KeptExecutables]:
    """Creates a directory and a key that exist until the end of the block."""
    directory = working_directory.new_path(
        _RAM_DISK if os.access(_RAM_DISK, os.W_OK) else tempfile.gettempdir()
    )
    with contextlib.closing(working_directory.WorkingDirectory(directory)):
        yield KeptExecutables(
            directory=directory, key=secrets.token_bytes(32), began_ns=time.time_ns()
        )


class Executables:
    """Compiles jitted functions, or loads what an earlier world compiled.

    The executables of earlier worlds like this one are loaded in the background.
    """

    def __init__(self, kept: KeptExecutables) -> None:
        self._kept = kept
        self._begun = background.in_thread(self._begin, name="executables")

    def compiled(
        self,
        jitted: Any,
        *arguments: Any,
        step: int = 0,
        emit: events.Emit = events.nobody,
    ) -> _Compiled:
        """Returns `jitted` compiled for these arguments and their shardings.

        Looks the function up by its code, without tracing. Arguments may be abstract.
        """
        began_secs = time.monotonic()
        path = self._path(jitted, arguments)
        if path is not None and (loaded := self._loaded(path, emit)) is not None:
            emit("executable_loaded", step=step, secs=time.monotonic() - began_secs)
            return loaded
        compiled, is_cached = _compiled(jitted, *arguments, step=step, emit=emit)
        # On CPU, JAX serializes an executable from its own cache without the code. The
        # next world also finds it in that cache.
        if path is not None and not is_cached and not loses_order(compiled):
            self._keep(path, compiled, _devices(arguments))
        return compiled

    def _begin(self) -> dict[pathlib.Path, futures.Future[_Compiled]]:
        # Loads all: a world has few programs.
        return {
            file: background.in_thread(
                functools.partial(self._load, file), name="executable"
            )
            for file in pathlib.Path(self._kept.directory).glob(f"{_place()}-*")
        }

    def _path(self, jitted: Any, arguments: Any) -> pathlib.Path | None:
        # None if parts of the function cannot be compared.
        try:
            leaves, structure = jax.tree.flatten(arguments)
            shapes = [f"{leaf.shape} {leaf.dtype} {leaf.sharding}" for leaf in leaves]
            code = jitted.__wrapped__, str(structure), shapes, _devices(arguments)
            # Not in `_place`: a program may change these after its world has begun.
            settings = [
                sorted((name, str(value)) for name, value in jax.config.values.items()),
                [os.environ.get(n, "") for n in ("XLA_FLAGS", "LIBTPU_INIT_ARGS")],
                changed_modules(self._kept.began_ns),
            ]
            name = _digest((code, settings))
        except Exception as error:
            # Pickling calls methods of all objects that the function refers to.
            logging.warning("cannot keep the executable of %r: %r", jitted, error)
            return None
        return pathlib.Path(self._kept.directory, f"{_place()}-{name}")

    def _loaded(self, path: pathlib.Path, emit: events.Emit) -> _Compiled | None:
        try:
            loading = self._begun.result().get(path)
            return self._load(path) if loading is None else loading.result()
        except FileNotFoundError:
            return None
        except Exception as error:
            # The backend may raise anything.
            why = f"{type(error).__name__}: {error}".partition("\n")[0]
            emit("executable_refused", path=str(path), why=why)
            storage.remove(path)
            return None

    def _load(self, path: pathlib.Path) -> _Compiled:
        content = path.read_bytes()
        mac, payload = content[:_MAC_BYTES], content[_MAC_BYTES:]
        if not hmac.compare_digest(mac, self._mac(path, payload)):
            raise ValueError("it was not written by this run, or was altered")
        # The MAC shows that this run's own hosts wrote it.
        parts, numbers = pickle.loads(payload)  # noqa: S301
        devices = {device.id: device for device in jax.devices()}
        return serialize_executable.deserialize_and_load(
            *parts, execution_devices=[devices[number] for number in numbers]
        )

    def _keep(self, path: pathlib.Path, compiled: Any, numbers: Sequence[int]) -> None:
        try:
            payload = pickle.dumps((serialize_executable.serialize(compiled), numbers))
            storage.write_atomic(path, self._mac(path, payload) + payload, mode=0o600)
        except (
            *(ValueError, NotImplementedError, OSError),
            jax.errors.JaxRuntimeError,
        ) as error:
            # Not every operation can be serialized; the next world compiles again.
            logging.warning("cannot keep an executable: %s", error)

    def _mac(self, path: pathlib.Path, payload: bytes) -> bytes:
        return hmac.digest(self._kept.key, path.name.encode() + payload, "sha256")


def compile_now(
    jitted: Any, *arguments: Any, step: int = 0, emit: events.Emit = events.nobody
) -> _Compiled:
    """Compiles without storing the executable; see `Executables.compiled`."""
    return _compiled(jitted, *arguments, step=step, emit=emit)[0]


def _compiled(
    jitted: Any, *arguments: Any, step: int, emit: events.Emit
) -> tuple[_Compiled, bool]:
    # Also returns whether the executable came from JAX's own cache.
    began_secs = time.monotonic()
    emit("compile_started", step=step)
    lowered = jitted.lower(*arguments)
    with _cache_hits() as hits:
        compiled = lowered.compile()
    emit("compiled", step=step, secs=time.monotonic() - began_secs)
    return compiled, bool(hits)


@contextlib.contextmanager
def _cache_hits() -> Iterator[list[str]]:
    # Lists this thread's hits in JAX's compilation cache during the block.
    hits: list[str] = []
    own = threading.get_ident()

    def note(event: str, **_: str | int) -> None:
        if event == _CACHE_HIT and threading.get_ident() == own:
            hits.append(event)

    jax.monitoring.register_event_listener(note)
    try:
        yield hits
    finally:
        jax.monitoring.unregister_event_listener(note)


def loses_order(compiled: Any) -> bool:
    """Whether hosts that load this program could deadlock.

    XLA runs a program's collectives in the same order on all hosts. On CPU, it
    serializes that order only within each computation. A loaded program has no order
    between a loop's body and the code around it, so hosts can wait for each other in
    different collectives.
    """
    if jax.devices()[0].platform != "cpu" or topology.num_hosts() == 1:
        return False
    computations = compiled.as_text().split("\n}")
    return sum(bool(_COLLECTIVE.search(each)) for each in computations) > 1


def _devices(arguments: Any) -> list[int]:
    # In mesh order; XLA aborts the process if they are not the program's devices.
    (numbers,) = {
        tuple(device.id for device in leaf.sharding.mesh.devices.flat)
        for leaf in jax.tree.leaves(arguments)
    }
    return list(numbers)


def _place() -> str:
    # An executable depends on the host's place in its world and on the versions. The
    # first call initializes the devices, which may take a while.
    return _digest(
        [
            topology.this_host(),
            topology.num_hosts(),
            [(d.id, d.process_index, d.device_kind) for d in jax.devices()],
            jax.devices()[0].client.platform_version,
            jax.__version__,
            jaxlib.__version__,
            sys.version,
        ]
    )


def changed_modules(since_ns: int) -> list[tuple[str, int, int]]:
    """The module files changed since a time, each with the first version seen.

    A module's functions are pickled by name, but the code of a module that is imported
    later may have changed.
    """
    files = {
        str(getattr(module, "__file__", None)) for module in list(sys.modules.values())
    }
    return sorted((f, *_version(f)) for f in files if _version(f)[0] > since_ns)


@functools.cache
def _version(file: str) -> tuple[int, int]:
    # Cached: later changes do not reach a module that is already imported.
    with contextlib.suppress(OSError):
        stat = os.stat(file)
        return stat.st_mtime_ns, stat.st_size
    return 0, 0


def _digest(value: Any) -> str:
    with io.BytesIO() as file:
        _Pickler(file).dump(value)
        return hashlib.blake2b(file.getvalue(), digest_size=16).hexdigest()


class _Pickler(cloudpickle.Pickler):
    """Pickles functions by their code and closures, and devices by their IDs.

    A pickle refers back to an object that it already contains, but repeats an object
    that is merely equal. Which shardings of a program are the same object depends on
    JAX's caches and thus on the order of threads; for strings, it depends on their
    origin. A pickle never refers back to numbers, so numbers stand in for both.
    """

    def persistent_id(self, obj: Any) -> Any:
        """A comparable stand-in for JAX values and strings."""
        if type(obj) in (str, bytes):
            return _number(repr(obj))
        of = jax.sharding
        layouts = (of.AbstractMesh, of.Mesh, of.NamedSharding, of.PartitionSpec)
        if isinstance(obj, (jax.Device, *layouts)):
            mesh = getattr(obj, "mesh", obj)
            ids = mesh.device_ids.tolist() if isinstance(mesh, of.Mesh) else []
            return _number(f"{obj!r} {ids}")
        if isinstance(obj, jax.Array):
            raise pickle.PicklingError("the function closes over an array")
        if isinstance(obj, type) and "<locals>" not in obj.__qualname__:
            # cloudpickle would assign a random name to a class that cannot be imported.
            return ("class", obj.__module__, obj.__qualname__)
        if type(obj).__name__ == "PjitFunction":
            return ("jit", _digest(obj.__wrapped__))
        return None


def _number(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=16).digest())
