"""Hosts that train under Orbax v0's `CheckpointManager` with our handlers."""

import functools
import hashlib
import pathlib

import orbax.checkpoint as ocp
from jax.sharding import PartitionSpec

import elastic_ckpt as ec
from elastic_ckpt.core import topology
from elastic_ckpt.data import sharded_data
from elastic_ckpt.elastic import multicontroller, supervisor
from elastic_ckpt.training import schema
from tests import pipelines, worlds
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


def batches_on(mesh):
    spec = PartitionSpec(mesh.axis_names)
    return ec.batches(data(), mesh=mesh, spec=spec, global_batch_size=SIZE)


def digest(step, rows):
    return f"{step} {hashlib.sha256(repr(rows).encode()).hexdigest()}"


def parts(mesh, step, batches):
    """The items of a step."""
    return ocp.args.Composite(
        state=ec.orbax_v0.TreeSave(tier_worlds.state(mesh, step, True)),
        data=ec.orbax_v0.StatefulSave(batches),
    )


def restore(manager, mesh, batches):
    """Restores the newest step, compares the bits of its state, and returns it."""
    step = manager.latest_step()
    wanted = ec.orbax_v0.TreeRestore(tier_worlds.abstract(mesh, True))
    restored = manager.restore(
        step,
        args=ocp.args.Composite(
            state=wanted, data=ec.orbax_v0.StatefulRestore(batches)
        ),
    )
    tier_worlds.check(restored.state, step)
    return step


def train(manager, mesh, *, last, log):
    """Trains from the newest step to the last one, and saves every second step."""
    batches = batches_on(mesh)
    first = 0 if manager.latest_step() is None else restore(manager, mesh, batches)
    for step in range(first + 1, last + 1):
        rows = worlds.by_row(worlds.gathered(next(batches)))
        if topology.this_host() == 0:
            with pathlib.Path(log).open("a") as file:
                file.write(f"{digest(step, rows)}\n")
        if step % 2 == 0:
            manager.save(step, args=parts(mesh, step, batches))


def host(place, emit, *, path, work):
    """A host that opens a manager, does `work` with it, and closes it."""
    del emit
    multicontroller.configure(schema.WorldSection())
    with multicontroller.joined(place):
        mesh = topology.mesh_of(topology.present(1))
        with ocp.CheckpointManager(path) as manager:
            work(manager, mesh)


def run(work, *, num_hosts, path, logs):
    """Runs `work` on hosts of this machine."""
    supervisor.HostProcesses(
        functools.partial(host, path=path, work=work),
        num_hosts=num_hosts,
        log_directory=logs,
        emit=lambda *_, **__: None,
    ).run()
