"""Hosts that save a state to tiers, or restore it and compare each bit."""

import functools
import json

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from elastic_ckpt import frontend
from elastic_ckpt.core import events, topology
from elastic_ckpt.elastic import host as host_process
from elastic_ckpt.tiers import choices
from elastic_ckpt.training import schema
from tests import host_worlds
from tests.recorded_events import RecordedEvents

SHAPES = {"w": (48, 40), "b": (240,), "scale": (), "m": (24, 10, 4)}


class Counter:
    """A component of which each host writes a file: the shards that it has."""

    SHARDS = 24

    def __init__(self, step=0):
        self.step = step

    async def save(self, directory):
        hosts, host = topology.num_hosts(), topology.this_host()
        step = self.step

        async def write():
            path = await directory.await_creation()
            for shard in range(host, self.SHARDS, hosts):
                (path / f"shard-{shard:02d}").write_text(f"{step}/{shard}")

        return write()

    async def load(self, directory):
        async def read():
            texts = {path.name: path.read_text() for path in directory.iterdir()}
            self.step = int(texts["shard-00"].partition("/")[0])
            expected = {
                f"shard-{n:02d}": f"{self.step}/{n}" for n in range(self.SHARDS)
            }
            assert texts == expected

        return read()


def values(name, step):
    """The values of a leaf after `step` steps: no two alike, NaNs among them."""
    shape = SHAPES[name]
    generator = np.random.default_rng([step, sorted(SHAPES).index(name)])
    return generator.integers(0, 2**32, shape, np.uint32).view(np.float32)


def spec(name, sharded):
    """How a leaf is laid out: over all devices, or whole on each."""
    if not sharded or not SHAPES[name]:
        return PartitionSpec()
    return PartitionSpec(("slice", "fsdp"))


def abstract(mesh, sharded):
    """The state as it is wanted on `mesh`."""
    return {
        name: jax.ShapeDtypeStruct(
            shape, np.float32, sharding=NamedSharding(mesh, spec(name, sharded))
        )
        for name, shape in SHAPES.items()
    }


def state(mesh, step, sharded):
    """The state after `step` steps."""
    return {
        name: jax.make_array_from_callback(
            leaf.shape, leaf.sharding, functools.partial(_part, values(name, step))
        )
        for name, leaf in abstract(mesh, sharded).items()
    }


def _part(whole, index):
    return whole[index]


def check(restored, step):
    """Fails unless every shard of `found` has the bits of that step."""
    for name, array in restored.items():
        whole = values(name, step)
        for shard in array.addressable_shards:
            assert np.asarray(shard.data).tobytes() == whole[shard.index].tobytes()


def tiers(
    directory,
    *,
    copies=2,
    persistent=None,
    every=1,
    keep=None,
    limit_bytes=None,
    **peers,
):
    """The tiers of a host; without a directory in RAM it has storage alone."""
    chosen = []
    if directory is not None:
        chosen += [
            choices.Local(directory, keep=keep, limit_bytes=limit_bytes),
            choices.Peers(copies=copies, **peers),
        ]
    if persistent:
        chosen.append(choices.Persistent(persistent, every=every))
    return chosen


def host(place, emit, *, directories, work, slices=1, **options):
    """A host that opens a checkpointer, does `work` with it, and closes it."""
    host_process.configure(schema.WorldSection())
    with host_process.joined(place):
        world = topology.present(slices)
        mesh = topology.mesh_of(world)
        checkpointer = frontend.Checkpointer(
            tiers(directories[place.host], **options),
            run="run",
            slice_name=str(place.host * slices // world.hosts),
            emit=emit if place.host == 0 else events.nobody,
        )
        with checkpointer:
            work(checkpointer, mesh)


def save(checkpointer, mesh, *, steps, sharded):
    """Saves the state of some steps, with other metrics on each host."""
    metrics = {"loss": 1 + topology.this_host()}
    for step in steps:
        checkpointables = {"state": state(mesh, step, sharded), "data": Counter(step)}
        assert checkpointer.save_checkpointables(step, checkpointables, metrics=metrics)
        checkpointer.wait()


def restore(checkpointer, mesh, *, step, sharded):
    """Restores the newest step, which has to be `step`."""
    counter = Counter()
    restored = checkpointer.load_checkpointables(
        None, {"state": abstract(mesh, sharded), "data": counter}
    )
    assert checkpointer.latest.step == step, checkpointer.latest
    check(restored["state"], step)
    assert counter.step == step


def run(work, *, num_hosts, directories, logs, **options):
    """Runs `work` on hosts, each on one of the directories; the events of host 0."""
    recorded = RecordedEvents()
    host_worlds.run(
        functools.partial(host, directories=directories, work=work, **options),
        num_hosts=num_hosts,
        log_directory=logs,
        emit=recorded,
    )
    return json.loads(json.dumps(recorded.listed))
