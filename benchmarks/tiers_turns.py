"""How the hosts of suite `tiers` take turns, and the state that they save.

All sides of a comparison take turns in one world. All hosts begin a turn together, and
it takes as long as on the slowest of them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import itertools
import json
import os
import pathlib
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from orbax.checkpoint import multihost

from benchmarks import memory, turns
from elastic_ckpt import frontend
from elastic_ckpt.core import events, topology
from elastic_ckpt.elastic import member, multicontroller, supervisor
from elastic_ckpt.tiers import choices
from elastic_ckpt.training import schema

HOSTS = 4
_TIMEOUT_MS = 600_000
_barriers = itertools.count()

State = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Place:
    """The directories of a world, and the state that its hosts save.

    Attributes:
      machines: directories on the RAM disk, one a machine; host n is on machine n.
      results: the directory of what is measured.
      orbax: the directory of Orbax's checkpoints, on the RAM disk.
      num_leaves: large ones of the state.
      leaf_mib: of each of these.
      num_small: leaves of 8 KiB besides.
      rounds: that are counted; one before them is not.
    """

    machines: tuple[str, ...]
    results: str
    orbax: str
    num_leaves: int
    leaf_mib: int
    num_small: int
    rounds: int

    @property
    def num_bytes(self) -> int:
        """The size of the whole state."""
        return self.num_leaves * self.leaf_mib * 2**20 + self.num_small * 8 * 2**10


@contextlib.contextmanager
def joined(
    host: member.Member, place: Place
) -> Iterator[tuple[Mesh, frontend.Checkpointer]]:
    """Joins the world, with a checkpointer over RAM, and no copies."""
    multicontroller.configure(schema.WorldSection())
    with multicontroller.joined(host):
        mesh = topology.mesh_of(topology.present(1))
        tiers = [choices.Local(place.machines[host.host]), choices.Peers(copies=0)]
        with frontend.Checkpointer(
            tiers, run="benchmark", slice_name=str(host.host)
        ) as made:
            yield mesh, made


def sharded(mesh: Mesh) -> NamedSharding:
    """Over all devices: no two hosts have the same."""
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


def in_turns(
    place: Place,
    sides: Mapping[str, Callable[[Any], Any]],
    *,
    prepare: Callable[[], Any] = lambda: None,
    finish: Callable[[Any], object] = lambda _: None,
) -> turns.Secs:
    """The seconds of each side on this host, of one round more than are counted.

    Args:
      place: of the world.
      sides: what is timed.
      prepare: makes what a side gets, before its turn.
      finish: gets what a side has returned, after its turn.
    """
    secs: turns.Secs = {name: [] for name in sides}
    for name in [*sides] * (place.rounds + 1):
        given = prepare()
        # Garbage of one side is not collected in the turn of another.
        gc.collect()
        _meet()
        memory.touch(place.num_bytes // jax.process_count())
        _meet()
        began = time.perf_counter()
        done = sides[name](given)
        secs[name].append(time.perf_counter() - began)
        finish(done)
    return secs


def _meet() -> None:
    # Returns when all hosts are here.
    client = multihost.get_jax_distributed_client()
    client.wait_at_barrier(f"turn-{next(_barriers)}", _TIMEOUT_MS)


def run(
    program: Callable[..., None], place: Place, *, num_hosts: int = HOSTS
) -> turns.Secs:
    """Runs a program on all hosts.

    Returns:
      What they `report`: by side, of the slowest host in each round but the first.
    """
    os.makedirs(place.results)
    supervisor.HostProcesses(
        functools.partial(program, place=place),
        num_hosts=num_hosts,
        log_directory=f"{place.results}/logs",
        emit=events.nobody,
    ).run()
    files = sorted(pathlib.Path(place.results).glob("*.json"))
    of_hosts = [json.loads(file.read_bytes()) for file in files]
    shutil.rmtree(place.results)
    return {
        name: list(map(max, *(host[name] for host in of_hosts)))[1:]
        for name in of_hosts[0]
    }


def report(place: Place, host: member.Member, secs: turns.Secs) -> None:
    """Writes this host's measurements for the process that started the world."""
    with open(f"{place.results}/{host.host}.json", "w") as file:
        json.dump(secs, file)
