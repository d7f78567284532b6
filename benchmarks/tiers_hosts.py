"""The hosts of suite `tiers`, their turns, and the state that they save.

All sides of a comparison take turns in one world. All hosts begin a turn together, and
a turn takes as long as on the slowest host. `save`, `restore` and `restore_half` are a
host's programs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import itertools
import json
import math
import os
import pathlib
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping
from concurrent import futures
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from orbax.checkpoint import multihost
from orbax.checkpoint import v1 as ocp

from benchmarks import turns
from elastic_ckpt import frontend
from elastic_ckpt.core import events, topology
from elastic_ckpt.elastic import (
    cluster,
    decision,
    process_cluster,
    station,
    watch,
)
from elastic_ckpt.elastic import host as host_process
from elastic_ckpt.tiers import choices
from elastic_ckpt.tiers.peers import peer_client
from elastic_ckpt.training import schema

HOSTS = 4
_TIMEOUT_MS = 600_000
_barriers = itertools.count()

State = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Place:
    """A world's directories on the RAM disk and the state that its hosts save."""

    machines: tuple[str, ...]  # host n is on machine n
    results: str  # for the measurements
    orbax: str  # for Orbax's checkpoints
    num_leaves: int  # large leaves of the state
    leaf_mib: int
    num_small: int  # additional leaves of 8 KiB
    rounds: int  # counted rounds, after an uncounted one

    @property
    def num_bytes(self) -> int:
        """The size of the whole state."""
        return self.num_leaves * self.leaf_mib * 2**20 + self.num_small * 8 * 2**10


def sharded(mesh: Mesh) -> NamedSharding:
    """A sharding over all devices: no two hosts have the same part."""
    return NamedSharding(mesh, PartitionSpec(mesh.axis_names))


def abstract(place: Place, sharding: NamedSharding) -> dict[str, Any]:
    """The abstract state under a sharding."""
    large = (place.leaf_mib * 128, 2048)
    shapes = {f"kernel_{number:03d}": large for number in range(place.num_leaves)}
    small = {f"scale_{number:04d}": (2048,) for number in range(place.num_small)}
    return {
        name: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)
        for name, shape in (shapes | small).items()
    }


def states(place: Place, sharding: NamedSharding) -> Callable[[], State]:
    """Each call returns the state after one more step, in new arrays; frees the old."""
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


def in_turns(
    place: Place,
    sides: Mapping[str, Callable[[Any], Any]],
    *,
    prepare: Callable[[], Any] = lambda: None,
    finish: Callable[[Any], object] = lambda _: None,
) -> turns.Secs:
    """The seconds of each side on this host, including the uncounted round.

    Before a side's turn, `prepare` creates its argument; after the turn, `finish` gets
    its result.
    """
    client = multihost.get_jax_distributed_client()

    def meet() -> None:
        client.wait_at_barrier(f"turn-{next(_barriers)}", _TIMEOUT_MS)

    secs: turns.Secs = {name: [] for name in sides}
    for name in [*sides] * (place.rounds + 1):
        given = prepare()
        # Garbage of one side is not collected in another side's turn.
        gc.collect()
        meet()
        turns.touch(place.num_bytes // jax.process_count())
        meet()
        began = time.perf_counter()
        done = sides[name](given)
        secs[name].append(time.perf_counter() - began)
        finish(done)
    return secs


@dataclasses.dataclass(frozen=True, kw_only=True)
class Host:
    """A host that has joined the world."""

    number: int
    place: Place
    mesh: Mesh
    ours: frontend.Checkpointer  # over RAM, without copies


# Returns the seconds of each side on a host.
Program = Callable[[Host], turns.Secs]


class _Station(station.Station):
    # The hosts join the world themselves.
    on_host: host_process.Program

    def program(self, assignment: cluster.Assignment) -> host_process.Program:
        del assignment
        return self.on_host


def run(program: Program, place: Place, *, num_hosts: int = HOSTS) -> turns.Secs:
    """Runs a program on all hosts.

    Returns:
      By side, the seconds of the slowest host in each round except the first.
    """
    os.makedirs(place.results)
    on_host = functools.partial(_on_host, program=program, place=place)
    slices = tuple(range(num_hosts))
    work = decision.Train(slices=slices, spares=(), rows=0, accumulated=1)
    own = _Station(
        host_process.Hardware(hosts=num_hosts, slices=num_hosts),
        log_directory=f"{place.results}/logs",
    )
    own.on_host = on_host
    machines = process_cluster.Machines(own)
    with contextlib.closing(own):
        process_cluster.ProcessCluster(
            machines, limits=watch.Limits(most_secs=math.inf, heartbeat_secs=math.inf)
        ).run_world(
            on_host,
            cluster.Assignment(number=1, work=work),
            emit=events.nobody,
            has_changed=lambda: None,
        )
    files = sorted(pathlib.Path(place.results).glob("*.json"))
    of_hosts = [json.loads(file.read_bytes()) for file in files]
    shutil.rmtree(place.results)
    return {
        name: list(map(max, *(host[name] for host in of_hosts)))[1:]
        for name in of_hosts[0]
    }


def _on_host(
    host: host_process.Member, emit: events.Emit, *, program: Program, place: Place
) -> None:
    del emit
    host_process.configure(schema.WorldSection())
    tiers = [choices.Local(place.machines[host.host]), choices.Peers(copies=0)]
    with host_process.joined(host):
        mesh = topology.mesh_of(topology.present(1))
        with frontend.Checkpointer(
            tiers, run="benchmark", slice_name=str(host.host)
        ) as ours:
            joined = Host(number=host.host, place=place, mesh=mesh, ours=ours)
            secs = program(joined)
            path = pathlib.Path(place.results, f"{host.host}.json")
            path.write_text(json.dumps(secs))


# Threads that only read files.
_THREADS = 4


def save(host: Host) -> turns.Secs:
    """Saves the state and copies the same bytes."""
    place, ours = host.place, host.ours
    fresh_state = states(place, sharded(host.mesh))
    steps = itertools.count(1)
    kept = [np.empty_like(view) for view in _views(fresh_state())]
    orbax = _orbax_checkpointer(place)

    def copy(state: State) -> None:
        for into, view in zip(kept, _views(state), strict=True):
            np.copyto(into, view)

    def begin(state: State) -> Any:
        return ours.save_async(next(steps), state)

    def begin_orbax(state: State) -> Any:
        checkpointables = {"state": state}
        return orbax.save_checkpointables_async(
            next(steps), checkpointables, force=True
        )

    def commit(state: State) -> Any:
        response = begin(state)
        assert response.result()
        return response

    def finish(response: Any) -> None:
        if response is not None:
            response.result()
        ours.wait()

    # The last save is restored.
    sides = {
        "copy": copy,
        "block": begin,
        "block_orbax": begin_orbax,
        "save": commit,
    }
    secs = in_turns(place, sides, prepare=fresh_state, finish=finish)
    orbax.close()
    return secs


def restore(host: Host) -> turns.Secs:
    """Restores a save of the same number of hosts and copies the same files."""
    place, ours = host.place, host.ours
    wanted = abstract(place, sharded(host.mesh))
    orbax = _orbax_checkpointer(place)
    copied = os.path.join(place.machines[host.number], "copied")
    step = _step_directory(place.machines[host.number])
    checkpointables = {"state": wanted}

    def copy(_: object) -> None:
        subprocess.run(["cp", "-r", step, copied], check=True)

    sides = {
        "load": lambda _: jax.block_until_ready(ours.load(None, wanted)),
        "copy": copy,
        "load_orbax": lambda _: jax.block_until_ready(
            orbax.load_checkpointables(None, checkpointables)
        ),
    }
    secs = in_turns(
        place, sides, finish=lambda _: shutil.rmtree(copied, ignore_errors=True)
    )
    orbax.close()
    return secs


def restore_half(host: Host, *, urls: tuple[str, ...]) -> turns.Secs:
    """Restores on half of the hosts and, for comparison, only reads the same files."""
    place, ours = host.place, host.ours
    wanted = abstract(place, sharded(host.mesh))
    secret = pathlib.Path(place.machines[host.number], "secret").read_text()
    client = peer_client.PeerClient(secret)
    # Hosts need rows in their order: this host needs the rows of two of the four.
    peers = {2 * host.number, 2 * host.number + 1} - {host.number}
    files = [
        (urls[number], os.path.relpath(path, machine), path)
        for number in sorted(peers)
        for machine in [place.machines[number]]
        for path in _files(_step_directory(machine))
    ]
    into = {path: np.ones(os.path.getsize(path), np.uint8) for *_, path in files}

    def read(url: str, name: str, path: str) -> None:
        client.endpoint(url).read_into(f"/{name}", into[path].data)

    def read_peers_files(_: object) -> None:
        with futures.ThreadPoolExecutor(_THREADS) as pool:
            for done in [pool.submit(read, *each) for each in files]:
                done.result()

    sides = {
        "load": lambda _: jax.block_until_ready(ours.load(None, wanted)),
        "read_peers_files": read_peers_files,
    }
    secs = in_turns(place, sides)
    client.close()
    return secs


def _views(state: State) -> list[np.ndarray]:
    # Views of the memory of this host's devices.
    return [
        np.asarray(shard.data)
        for array in state.values()
        for shard in array.addressable_shards
    ]


def _orbax_checkpointer(place: Place) -> ocp.training.Checkpointer:
    keep = cast(Any, ocp.training.preservation_policies.LatestN(1))
    return ocp.training.Checkpointer(place.orbax, preservation_policy=keep)


def _step_directory(machine: str) -> str:
    # Other directories contain messages and files that a restore unpacks.
    slot = os.path.join(machine, "hosts", "0")
    (step,) = [
        entry.path
        for entry in os.scandir(slot)
        if entry.is_dir() and entry.name[0].isdigit()
    ]
    return step


def _files(directory: str) -> list[str]:
    return [
        os.path.join(parent, name)
        for parent, _, names in os.walk(directory)
        for name in names
        if name != "zarr.json"
    ]
