"""Hosts that train under Orbax v0's `CheckpointManager`, with elastic data."""

import functools
import hashlib
import pathlib

import orbax.checkpoint as ocp
from jax.sharding import PartitionSpec

import elastic_ckpt as ec
from elastic_ckpt.core import topology
from elastic_ckpt.data import sharded_data
from elastic_ckpt.elastic import (
    host,
)
from elastic_ckpt.training import schema
from tests import host_worlds, pipelines, worlds
from tests.processes import tier_worlds

NUM_SHARDS = 12
SIZE = 24


def data():
    """Packed rows of 12 logical shards."""
    return sharded_data.sharded(
        functools.partial(pipelines.packed, num_shards=NUM_SHARDS),
        num_shards=NUM_SHARDS,
        pipeline="packed",
    )


def digest(step, rows):
    return f"{step} {hashlib.sha256(repr(rows).encode()).hexdigest()}"


def train(place, emit, *, path, last, log):
    """Trains from the newest step to the last one, and saves every second step."""
    del emit
    host.configure(schema.WorldSection())
    with host.joined(place), ocp.CheckpointManager(path) as manager:
        mesh = topology.mesh_of(topology.present(1))
        spec = PartitionSpec(mesh.axis_names)
        batches = ec.batches(data(), mesh=mesh, spec=spec, global_batch_size=SIZE)
        first = manager.latest_step() or 0
        if first:
            wanted = ocp.args.Composite(
                state=ocp.args.StandardRestore(tier_worlds.abstract(mesh, True)),
                data=ec.orbax_v0.StatefulRestore(batches),
            )
            tier_worlds.check(manager.restore(first, args=wanted).state, first)
        for step in range(first + 1, last + 1):
            rows = worlds.by_row(worlds.gathered(next(batches)))
            if topology.this_host() == 0:
                with pathlib.Path(log).open("a") as file:
                    file.write(f"{digest(step, rows)}\n")
            if step % 2 == 0:
                state = tier_worlds.state(mesh, step, True)
                items = ocp.args.Composite(
                    state=ocp.args.StandardSave(state),
                    data=ec.orbax_v0.StatefulSave(batches),
                )
                manager.save(step, args=items)


def run(*, num_hosts, logs, **options):
    """Trains on hosts of this machine."""
    host_worlds.run(
        functools.partial(train, **options),
        num_hosts=num_hosts,
        log_directory=logs,
        emit=lambda *_, **__: None,
    )
