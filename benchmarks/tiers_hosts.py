"""What the hosts of suite `tiers` do: each function is a program of one host.

All sides of a comparison take turns in one world. The hosts wait for each other before
each turn, and a turn of a round takes as long as on the slowest of them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import itertools
import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent import futures
from typing import Any, cast
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from orbax.checkpoint import multihost
from orbax.checkpoint import v1 as ocp

from elastic_ckpt.checkpoint import factory, tiered
from elastic_ckpt.config import schema
from elastic_ckpt.core import digest, events, host_memory, topology
from elastic_ckpt.elastic import member, multicontroller
from elastic_ckpt.tiers import choices
from elastic_ckpt.tiers.peers import peer_client, peer_endpoint

_RUN = "benchmark"
_TIMEOUT_MS = 600_000
_THREADS = 4
_WARM_SECS = 0.4
_MOST_TOUCHES = 3
_barriers = itertools.count()

State = dict[str, jax.Array]
# By side, the secs that each round took here.
Secs = dict[str, list[float]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Place:
    """Where a host works, and on what.

    Attributes:
      machines: directories on the RAM disk, one a machine; host n is on machine n.
      results: the directory of what is measured.
      orbax: the directory of Orbax's checkpoints, on the RAM disk.
      num_leaves: large ones of the state.
      leaf_mib: of each of these.
      num_small: leaves of 8 KiB besides.
      rounds: that are counted; one before them is not.
      check_pairs: of a save and a load with and without digests.
    """

    machines: tuple[str, ...]
    results: str
    orbax: str
    num_leaves: int
    leaf_mib: int
    num_small: int
    rounds: int
    check_pairs: int

    @property
    def num_bytes(self) -> int:
        """Of the whole state."""
        return self.num_leaves * self.leaf_mib * 2**20 + self.num_small * 8 * 2**10


def save(host: member.Member, emit: events.Emit, *, place: Place) -> None:
    """Saves, and copies the same bytes in other ways."""
    del emit
    with joined(host, place, copies=0) as (mesh, ours):
        fresh_state = states(place, _sharded(mesh))
        steps = itertools.count(1)
        kept = [np.empty_like(view) for view in _views(fresh_state())]
        orbax = _orbax(place)

        def copy(state: State) -> None:
            for into, view in zip(kept, _views(state), strict=True):
                np.copyto(into, view)

        def copy_to_fresh(state: State) -> list[np.ndarray]:
            return [np.array(view) for view in _views(state)]

        def save_ours(state: State) -> Callable[[], Any]:
            response = ours.save_async(next(steps), state)
            assert response is not None
            return response.result

        def save_orbax(state: State) -> Callable[[], Any]:
            response = orbax.save_checkpointables_async(
                next(steps), {"state": state}, force=True
            )
            assert response is not None
            return response.result

        sides = {
            "copy": copy,
            "copy_to_fresh": copy_to_fresh,
            "block": save_ours,
            "block_orbax": save_orbax,
        }
        secs: Secs = {name: [] for name in sides}
        for name in _turns(sides, place.rounds):
            state = fresh_state()
            took, done = timed(place, functools.partial(sides[name], state))
            secs[name].append(took)
            if callable(done):
                done()
            ours.wait()
        orbax.close()
        secs |= {"save": [], "save_unchecked": []}
        for name in _pairs(("save", "save_unchecked"), place.check_pairs):
            state = fresh_state()
            with _digests(as_they_are=name == "save", stand_in=bytes(16)):
                took, committed = timed(place, lambda s=state: save_ours(s)())
            assert committed
            secs[name].append(took)
            ours.wait()
        # The last one is restored.
        assert save_ours(fresh_state())()
        ours.wait()
        report(place, "save", host, secs)


def restore(host: member.Member, emit: events.Emit, *, place: Place) -> None:
    """Restores what the same number of hosts has saved, and copies the same files."""
    del emit
    with joined(host, place, copies=0) as (mesh, ours):
        wanted = abstract(place, _sharded(mesh))
        orbax = _orbax(place)
        machine = place.machines[host.host]
        copied = os.path.join(machine, "copied")
        (step,) = _step_directories(machine)

        def load_ours() -> State:
            return jax.block_until_ready(ours.load(None, wanted))

        def load_orbax() -> State:
            parts = {"state": wanted}
            return jax.block_until_ready(orbax.load_checkpointables(None, parts))

        def copy() -> None:
            subprocess.run(["cp", "-r", step, copied], check=True)

        sides = {"load": load_ours, "copy": copy, "load_orbax": load_orbax}
        secs: Secs = {name: [] for name in sides}
        for name in _turns(sides, place.rounds):
            secs[name].append(timed(place, sides[name])[0])
            shutil.rmtree(copied, ignore_errors=True)
        orbax.close()
        secs |= {"load_checked": [], "load_unchecked": []}
        for name in _pairs(("load_checked", "load_unchecked"), place.check_pairs):
            with _digests(as_they_are=name == "load_checked", stand_in=_Any()):
                secs[name].append(timed(place, load_ours)[0])
        report(place, "restore", host, secs)


def restore_half(
    host: member.Member, emit: events.Emit, *, place: Place, urls: tuple[str, ...]
) -> None:
    """Restores on half of the hosts, and reads the same files without any more ado."""
    del emit
    with joined(host, place, copies=0) as (mesh, ours):
        wanted = abstract(place, _sharded(mesh))
        machine = place.machines[host.host]
        other = host.host + host.num_hosts
        with open(os.path.join(machine, "secret"), encoding="ascii") as file:
            client = peer_client.PeerClient(file.read())
        endpoint = client.endpoint(urls[other])
        own_files = _files(_step_directories(machine)[0])
        peer_files = _files(_step_directories(place.machines[other])[0])
        memory = {path: np.ones(os.path.getsize(path), np.uint8) for path in own_files}
        memory |= {
            path: np.ones(os.path.getsize(path), np.uint8) for path in peer_files
        }

        def read_own(path: str) -> None:
            with open(path, "rb", buffering=0) as file:
                file.readinto(memory[path].data)

        def read_peer(path: str) -> None:
            name = os.path.relpath(path, os.path.join(place.machines[other], "hosts"))
            endpoint.read_into(f"/v1/hosts/{name}", 0, memory[path].data)

        def read_files(*, own: bool) -> None:
            with futures.ThreadPoolExecutor(_THREADS) as pool:
                reads = [pool.submit(read_peer, path) for path in peer_files]
                if own:
                    reads += [pool.submit(read_own, path) for path in own_files]
                for read in reads:
                    read.result()

        def load() -> State:
            return jax.block_until_ready(ours.load(None, wanted))

        sides: dict[str, Callable[[], Any]] = {
            "load": load,
            "read_files": functools.partial(read_files, own=True),
            "read_peers_files": functools.partial(read_files, own=False),
        }
        secs: Secs = {name: [] for name in sides}
        for name in _turns(sides, place.rounds):
            secs[name].append(timed(place, sides[name])[0])
        client.close()
        report(place, "restore_half", host, secs)


def replicate(host: member.Member, emit: events.Emit, *, place: Place) -> None:
    """Counts what is sent for copies of replicated, and of sharded state."""
    del emit
    with joined(host, place, copies=2) as (mesh, ours), _counted() as sent:
        counts: dict[str, list[float]] = {}
        layouts = {"replicated": NamedSharding(mesh, PartitionSpec())}
        layouts["sharded"] = _sharded(mesh)
        for step, (name, sharding) in enumerate(layouts.items(), start=1):
            before = dict(sent)
            assert ours.save(step, states(place, sharding)())
            ours.wait()
            for kind in sent:
                counts[f"{name}_{kind}"] = [sent[kind] - before[kind]]
        report(place, "replicate", host, counts)


@contextlib.contextmanager
def joined(
    host: member.Member, place: Place, *, copies: int
) -> Iterator[tuple[Mesh, tiered.TieredCheckpointer]]:
    """Joins the world, with a checkpointer over the local tier and `copies` of it."""
    multicontroller.configure(schema.WorldSection())
    with multicontroller.joined(host):
        mesh, _ = topology.make_mesh(1)
        local = choices.Local(place.machines[host.host])
        made = factory.Checkpointer(
            [local, choices.Peers(copies=copies)], run=_RUN, slice_name=str(host.host)
        )
        assert isinstance(made, tiered.TieredCheckpointer)
        with made:
            yield mesh, made


def _orbax(place: Place) -> ocp.training.Checkpointer:
    return ocp.training.Checkpointer(
        place.orbax,
        preservation_policy=cast(Any, ocp.training.preservation_policies.LatestN(1)),
    )


def _sharded(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec(mesh.axis_names))


def abstract(place: Place, sharding: NamedSharding) -> dict[str, Any]:
    """The state as it is wanted under a sharding."""
    large = (place.leaf_mib * 128, 2048)
    shapes = {f"kernel_{number:03d}": large for number in range(place.num_leaves)}
    small = {f"scale_{number:04d}": (2048,) for number in range(place.num_small)}
    return {
        name: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)
        for name, shape in (shapes | small).items()
    }


def states(place: Place, sharding: NamedSharding) -> Callable[[], State]:
    """Each call gives the state after one more step: new arrays, the old are gone."""
    wanted = abstract(place, sharding)

    @functools.partial(jax.jit, out_shardings=sharding)
    def first() -> State:
        return {
            name: jax.lax.broadcasted_iota(leaf.dtype, leaf.shape, 0)
            for name, leaf in wanted.items()
        }

    @functools.partial(jax.jit, donate_argnums=0)
    def after(state: State) -> State:
        return {name: array + 1 for name, array in state.items()}

    held = [first()]

    def step() -> State:
        held.append(jax.block_until_ready(after(held.pop())))
        return held[0]

    return step


def _views(state: State) -> Iterator[np.ndarray]:
    for array in state.values():
        for shard in array.addressable_shards:
            yield np.asarray(shard.data)


def timed(place: Place, work: Callable[[], Any]) -> tuple[float, Any]:
    """The secs that `work` takes here, when all hosts begin it together; its result."""
    # Garbage of one side is not collected in the turn of another.
    gc.collect()
    _meet()
    _warm_up(2 * place.num_bytes // jax.process_count())
    _meet()
    began = time.perf_counter()
    result = work()
    return time.perf_counter() - began, result


def _meet() -> None:
    client = multihost.get_jax_distributed_client()
    client.wait_at_barrier(f"turn-{next(_barriers)}", _TIMEOUT_MS)


def _warm_up(num_bytes: int) -> None:
    # A virtual machine gives free memory back to its host after two seconds, and gets
    # it again page by page, which takes longer than all that is measured here: free
    # memory is touched until that is quick.
    for _ in range(_MOST_TOUCHES):
        began = time.perf_counter()
        memory = host_memory.allocate(num_bytes)
        memory[::4096] = 1
        del memory
        if time.perf_counter() - began < _WARM_SECS:
            return


def _turns(sides: Mapping[str, Any], rounds: int) -> Iterator[str]:
    for _ in range(rounds + 1):
        yield from sides


def _pairs(names: tuple[str, str], pairs: int) -> Iterator[str]:
    # Whichever is first has what the other left behind: they take turns in that too.
    for number in range(pairs + 1):
        yield from names if number % 2 else reversed(names)


class _Any(bytes):
    # Equal to every digest.

    def __eq__(self, other: object) -> bool:
        return True

    def __hash__(self) -> int:
        return 0


@contextlib.contextmanager
def _digests(*, as_they_are: bool, stand_in: bytes) -> Iterator[None]:
    if as_they_are:
        yield
        return
    with mock.patch.object(digest, "values_digest", return_value=stand_in):
        yield


@contextlib.contextmanager
def _counted() -> Iterator[dict[str, int]]:
    # Bytes that this host has taken from agents: parts of leaves, and what was listed.
    sent = {"parts": 0, "listings": 0}
    read_into = peer_endpoint.Endpoint.read_into
    read = peer_endpoint.Endpoint.read

    def counted_into(self: Any, path: str, offset: int, into: memoryview) -> None:
        read_into(self, path, offset, into)
        sent["parts"] += len(into)

    def counted(self: Any, path: str, *, most_bytes: int) -> bytes:
        found = read(self, path, most_bytes=most_bytes)
        sent["listings"] += len(found)
        return found

    with (
        mock.patch.object(peer_endpoint.Endpoint, "read_into", counted_into),
        mock.patch.object(peer_endpoint.Endpoint, "read", counted),
    ):
        yield sent


def _step_directories(machine: str) -> list[str]:
    slot = os.path.join(machine, "hosts", "0")
    steps = [entry.path for entry in os.scandir(slot) if entry.is_dir()]
    return [step for step in steps if os.path.basename(step) != "restored"]


def _files(directory: str) -> list[str]:
    return [
        os.path.join(parent, name)
        for parent, _, names in os.walk(directory)
        for name in names
        if name != "zarr.json"
    ]


def report(
    place: Place, world: str, host: member.Member, found: Mapping[str, list[float]]
) -> None:
    """Hands what this host has measured to whoever started the world."""
    with open(f"{place.results}/{world}-{host.host}.json", "w") as file:
        json.dump(found, file)
