"""How hosts of suite `tiers` take turns, and the state that they save.

All hosts begin a turn together. Before it the garbage of the turn before is collected,
and free memory is touched.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import itertools
import json
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from orbax.checkpoint import multihost

from benchmarks import free_memory
from elastic_ckpt import frontend
from elastic_ckpt.core import topology
from elastic_ckpt.elastic import member, multicontroller
from elastic_ckpt.tiers import choices
from elastic_ckpt.training import schema

_RUN = "benchmark"
_TIMEOUT_MS = 600_000
_barriers = itertools.count()

State = dict[str, jax.Array]
# By side, the secs that each round took here.
Secs = dict[str, list[float]]


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
        """The size of the whole state."""
        return self.num_leaves * self.leaf_mib * 2**20 + self.num_small * 8 * 2**10


@contextlib.contextmanager
def joined(
    host: member.Member, place: Place, *, copies: int
) -> Iterator[tuple[Mesh, frontend.Checkpointer]]:
    """Joins the world, with a checkpointer over the local tier and `copies` of it."""
    multicontroller.configure(schema.WorldSection())
    with multicontroller.joined(host):
        mesh = topology.mesh_of(topology.present(1))
        local = choices.Local(place.machines[host.host])
        made = frontend.Checkpointer(
            [local, choices.Peers(copies=copies)], run=_RUN, slice_name=str(host.host)
        )
        with made:
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


def views(state: State) -> Iterator[np.ndarray]:
    """Views of the memory of this host's devices."""
    for array in state.values():
        for shard in array.addressable_shards:
            yield np.asarray(shard.data)


def timed(place: Place, work: Callable[[], Any]) -> tuple[float, Any]:
    """The secs that `work` takes here, when all hosts begin it together; its result."""
    # Garbage of one side is not collected in the turn of another.
    gc.collect()
    meet()
    free_memory.touch(place.num_bytes // jax.process_count())
    meet()
    began = time.perf_counter()
    result = work()
    return time.perf_counter() - began, result


def meet() -> None:
    """Returns when all hosts are here."""
    client = multihost.get_jax_distributed_client()
    client.wait_at_barrier(f"turn-{next(_barriers)}", _TIMEOUT_MS)


def turns(sides: Mapping[str, Any], rounds: int) -> Iterator[str]:
    """Each side once a round, and one round more than are counted."""
    for _ in range(rounds + 1):
        yield from sides


def pairs(names: tuple[str, str], pairs: int) -> Iterator[str]:
    """Both names again and again, one pair more than are counted."""
    # Whichever is first has what the other left behind: they take turns in that too.
    for number in range(pairs + 1):
        yield from names if number % 2 else reversed(names)


def report(
    place: Place, world: str, host: member.Member, samples: Mapping[str, list[float]]
) -> None:
    """Writes this host's measurements for the process that started the world."""
    with open(f"{place.results}/{world}-{host.host}.json", "w") as file:
        json.dump(samples, file)
