"""Compiled steps, kept for the next world on this machine's RAM disk.

A world that has had its shape before loads its executables and traces nothing: a
change of slices then costs milliseconds in place of XLA's seconds. A world loads what
it has in the background, while it looks for its state and restores it (`Preloaded`).
JAX's compilation cache cannot do that for several processes on CPU: its
key depends on the process, and process 0 alone writes.

Loading an executable unpickles, and runs code. So executables are read only from a
private directory on this machine's RAM disk, never from peers or storage, and only
after a MAC (HMAC-SHA-256) under a key of the supervisor, which is in no file. Both the
directory and the key end with the supervisor. One that does not fit the program, the
mesh, the arguments, the host or the versions has another name; one that is altered is
refused, with an event, and compiled anew.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import hmac
import io
import os
import pickle
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from typing import Any

import cloudpickle
import jax
import jaxlib
from absl import logging
from jax.experimental import serialize_executable

from elastic_ckpt.core import background, events, storage, topology
from elastic_ckpt.elastic.kept_executables import KeptExecutables

# An event of `jax.monitoring`.
_CACHE_HIT = "/jax/compilation_cache/cache_hits"
# One in the text of a compiled program.
_COLLECTIVE = re.compile(
    r" (all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)"
    r"(-start)?\("
)
# What the name of an executable consists of, after the host's place.
_PARTS = ("settings", "code", "arguments", "modules")
_MAC_BYTES = hashlib.sha256().digest_size
# The most executables that a world loads before it asks for one: the newest.
_MOST_PRELOADED = 4

_Compiled = Callable[..., Any]


class Preloaded:
    """The executables of earlier worlds like this one, loaded in the background.

    Args:
      kept: the directory and the key.
    """

    def __init__(self, kept: KeptExecutables) -> None:
        self._kept = kept
        self._begun = background.in_thread(self._begin, name="executables")

    def get(self, path: str) -> _Compiled | None:
        """The executable of a file; None if it was not loaded, or does not fit."""
        loading = self._begun.result().get(path)
        return None if loading is None else loading.result()

    def _begin(self) -> dict[str, futures.Future[_Compiled | None]]:
        # That this world has devices may take a while, too.
        place = _digest(_place())
        files = [
            file
            for file in os.scandir(self._kept.directory)
            if file.name.startswith(place)
        ]
        files.sort(key=lambda file: file.stat().st_mtime_ns, reverse=True)
        return {
            file.path: background.in_thread(
                functools.partial(self._load, file.path), name="executable"
            )
            for file in files[:_MOST_PRELOADED]
        }

    def _load(self, path: str) -> _Compiled | None:
        try:
            return _load(self._kept, path)
        except Exception:
            # Whoever asks for it finds out why.
            return None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Executables:
    """Compiles jitted functions, or loads what an earlier world has compiled.

    Attributes:
      kept: the directory and the key; None compiles always.
      emit: called before and after compiling, and when an executable is loaded.
      preloaded: what is being loaded already.
    """

    kept: KeptExecutables | None
    emit: events.Emit = events.nobody
    preloaded: Preloaded | None = None

    def compiled(self, jitted: Any, *arguments: Any, step: int = 0) -> _Compiled:
        """The compiled `jitted` for these arguments, under their shardings.

        Args:
          jitted: a function of `jax.jit`, which is found by its code and not even
            traced.
          arguments: positional, arrays or their abstract values.
          step: the step that it is compiled for, for the events.
        """
        began_secs = time.monotonic()
        path = None if self.kept is None else self._path(jitted, arguments)
        if path is not None:
            loaded = self._loaded(path)
            if loaded is not None:
                secs = time.monotonic() - began_secs
                self.emit("executable_loaded", step=step, secs=secs)
                return loaded
        self.emit("compile_started", step=step)
        # Constants that it computes may be in JAX's cache though the program is not.
        lowered = jitted.lower(*arguments)
        with _cache_hits() as hits:
            compiled = lowered.compile()
        secs = time.monotonic() - began_secs
        self.emit("compiled", step=step, secs=secs)
        if path is None or loses_order(compiled):
            return compiled
        if hits:
            # On CPU an executable of JAX's cache is serialized without its code. The
            # next world finds it in that cache, too.
            logging.warning("an executable is not kept: it is of JAX's cache")
        else:
            self._keep(path, compiled, _devices(arguments))
        return compiled

    def _path(self, jitted: Any, arguments: Any) -> str | None:
        # None if the function has parts that cannot be compared.
        assert self.kept is not None
        try:
            modules = _changed_modules(self.kept.began_ns)
            code = jitted.__wrapped__, _abstract(arguments), modules
            name = "-".join(map(_digest, (_place(), _settings(), *code)))
        except Exception as error:
            # Pickling calls methods of whatever the function refers to.
            logging.warning("the executable of %r is not kept: %r", jitted, error)
            return None
        return os.path.join(self.kept.directory, name)

    def _loaded(self, path: str) -> _Compiled | None:
        assert self.kept is not None
        loaded = None if self.preloaded is None else self.preloaded.get(path)
        if loaded is not None:
            return loaded
        try:
            return _load(self.kept, path)
        except FileNotFoundError:
            _tell_others(path)
        except _AlteredError as error:
            self._refuse(path, str(error))
        except Exception as error:
            # The backend raises whatever it finds unfit.
            self._refuse(path, f"{type(error).__name__}: {error}".partition("\n")[0])
        return None

    def _keep(self, path: str, compiled: Any, devices: Sequence[jax.Device]) -> None:
        assert self.kept is not None
        try:
            parts = serialize_executable.serialize(compiled)
            payload = pickle.dumps((parts, [device.id for device in devices]))
            mac = _mac(self.kept, path, payload)
            storage.write_atomic(path, mac + payload, mode=0o600)
        except (
            *(ValueError, NotImplementedError, OSError),
            jax.errors.JaxRuntimeError,
        ) as error:
            # Not every operation can be serialized. The run is as fast as without it,
            # and the next world compiles again.
            logging.warning("an executable is not kept: %s", error)

    def _refuse(self, path: str, why: str) -> None:
        self.emit("executable_refused", path=path, why=why)
        storage.remove(path)


def _tell_others(path: str) -> None:
    # Logs what differs in the executables that are there.
    directory, name = os.path.split(path)
    place, *own = name.split("-")
    others = [each for each in os.listdir(directory) if each.startswith(place)]
    if others:
        differing = (
            [what for what, a, b in zip(_PARTS, own, each, strict=True) if a != b]
            for _, *each in (other.split("-") for other in others)
        )
        logging.warning(
            "a program is compiled: of %d kept executables the nearest has other %s",
            len(others),
            " and ".join(min(differing, key=len)),
        )


class _AlteredError(Exception):
    """A file is not what this run has written."""


def _load(kept: KeptExecutables, path: str) -> _Compiled:
    with open(path, "rb") as file:
        content = file.read()
    mac, payload = content[:_MAC_BYTES], content[_MAC_BYTES:]
    if not hmac.compare_digest(mac, _mac(kept, path, payload)):
        raise _AlteredError("it was not written by this run, or was altered")
    # The MAC shows that this run's own hosts have written it.
    parts, numbers = pickle.loads(payload)  # noqa: S301
    devices = {device.id: device for device in jax.devices()}
    return serialize_executable.deserialize_and_load(
        *parts, execution_devices=[devices[number] for number in numbers]
    )


def _mac(kept: KeptExecutables, path: str, payload: bytes) -> bytes:
    name = os.path.basename(path).encode()
    return hmac.digest(kept.key, name + payload, "sha256")


@contextlib.contextmanager
def _cache_hits() -> Iterator[list[str]]:
    # Lists what the block, but for other threads, gets of JAX's compilation cache.
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
    """Whether hosts that load this program could wait for each other for ever.

    XLA runs the collectives of a program in one order on all hosts. On CPU it
    serializes that order within each computation alone: between the body of a loop and
    what is around it, a loaded program has none, and hosts wait for each other in
    different collectives.
    """
    if jax.devices()[0].platform != "cpu" or topology.num_hosts() == 1:
        return False
    computations = compiled.as_text().split("\n}")
    if sum(bool(_COLLECTIVE.search(each)) for each in computations) <= 1:
        return False
    logging.warning("an executable is not kept: it has collectives in a loop, on CPU")
    return True


def _devices(arguments: Any) -> list[jax.Device]:
    # In the order of the mesh; XLA aborts the process if they are not the program's.
    (devices,) = {
        tuple(leaf.sharding.mesh.devices.flat) for leaf in jax.tree.leaves(arguments)
    }
    return list(devices)


def _abstract(arguments: Any) -> list[Any]:
    leaves, structure = jax.tree.flatten(arguments)
    return [
        str(structure),
        _devices(arguments),
        [f"{leaf.shape} {leaf.dtype} {leaf.sharding}" for leaf in leaves],
    ]


def _place() -> list[Any]:
    # The executable also depends on the host's place in its world, and on the versions.
    return [
        topology.this_host(),
        topology.num_hosts(),
        [(d.id, d.process_index, d.device_kind) for d in jax.devices()],
        jax.devices()[0].client.platform_version,
        jax.__version__,
        jaxlib.__version__,
        sys.version,
    ]


def _settings() -> list[Any]:
    # Apart, because a program may change them after its world has begun to load.
    return [
        sorted((name, str(value)) for name, value in jax.config.values.items()),
        [os.environ.get(name, "") for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS")],
    ]


def _changed_modules(since_ns: int) -> list[tuple[str, int, int]]:
    # Functions of modules are pickled by name, and a module that is imported later may
    # have another code by then.
    files = {
        str(getattr(module, "__file__", None)) for module in list(sys.modules.values())
    }
    stats = [(file, os.stat(file)) for file in sorted(files) if os.path.isfile(file)]
    return [
        (file, stat.st_mtime_ns, stat.st_size)
        for file, stat in stats
        if stat.st_mtime_ns > since_ns
    ]


def _digest(value: Any) -> str:
    with io.BytesIO() as file:
        _Pickler(file).dump(value)
        return hashlib.blake2b(file.getvalue(), digest_size=16).hexdigest()


_LAYOUTS = (
    jax.sharding.AbstractMesh,
    jax.sharding.Mesh,
    jax.sharding.NamedSharding,
    jax.sharding.PartitionSpec,
)


class _Pickler(cloudpickle.Pickler):
    """Pickles functions by their code and closures, and devices by their numbers.

    A pickle refers to an object that it has already, and repeats one that is equal:
    which of a program's shardings are one object depends on JAX's caches, and so on
    which thread was first; which of its texts are, on where they come from. Stand-ins
    that are numbers are never referred to.
    """

    def persistent_id(self, obj: Any) -> Any:
        """A comparable stand-in for values of JAX, and for texts."""
        if isinstance(obj, jax.Device):
            return ("device", obj.id, obj.process_index)
        if isinstance(obj, _LAYOUTS):
            return _number(obj)
        if type(obj) in (str, bytes):
            return int.from_bytes(hashlib.blake2b(repr(obj).encode()).digest())
        if isinstance(obj, jax.Array):
            raise pickle.PicklingError("it closes over an array")
        if isinstance(obj, type) and "<locals>" not in obj.__qualname__:
            # Otherwise a class that cannot be imported gets a random name.
            return ("class", obj.__module__, obj.__qualname__)
        wrapped = getattr(obj, "__wrapped__", None)
        if wrapped is not None and type(obj).__name__ == "PjitFunction":
            return ("jit", _digest(wrapped))
        return None


def _number(layout: object) -> int:
    # The same for layouts that are equal.
    mesh = getattr(layout, "mesh", layout)
    devices = mesh.devices.flat if isinstance(mesh, jax.sharding.Mesh) else ()
    text = f"{layout!r} {[(each.id, each.process_index) for each in devices]}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=16).digest())
