"""Hosts that train under Orbax v0's `CheckpointManager` with our handlers."""

import errno
import functools
import hashlib
import os
import pathlib
import signal

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding, PartitionSpec

import elastic_ckpt as ec
from elastic_ckpt.core import topology
from elastic_ckpt.data import sharded_data
from elastic_ckpt.elastic import multicontroller, supervisor
from elastic_ckpt.integrations import orbax_v0_steps
from elastic_ckpt.tiers.persistent import ocdbt, upload
from elastic_ckpt.training import schema
from tests import pipelines
from tests.multiprocess import tier_worlds

NUM_SHARDS = 12
SIZE = 24
# A host is killed before or after it calls a function of this holder and name.
POINTS = {
    "before its manifest is written": (upload.Upload, "finish", True),
    "before the commit": (orbax_v0_steps, "add_tree", False),
}


def batches_on(mesh):
    """Packed rows of 12 logical shards."""
    data = sharded_data.sharded(
        functools.partial(pipelines.packed, num_shards=NUM_SHARDS),
        num_shards=NUM_SHARDS,
        pipeline="packed",
    )
    spec = PartitionSpec(mesh.axis_names)
    return ec.batches(data, mesh=mesh, spec=spec, global_batch_size=SIZE)


def digest(batch):
    """A digest of all rows of a batch, the same on every host."""
    whole = hashlib.sha256()
    for name, array in sorted(batch.items()):
        mesh = array.sharding.mesh
        replicated = NamedSharding(mesh, PartitionSpec())
        copy = jax.jit(lambda rows: rows, out_shardings=replicated)(array)
        values = np.asarray(copy.addressable_data(0))
        whole.update(f"{name} {values.dtype} {values.shape}".encode())
        whole.update(values.tobytes())
    return whole.hexdigest()


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
        text = digest(next(batches))
        if topology.this_host() == 0:
            with pathlib.Path(log).open("a") as file:
                file.write(f"{step} {text}\n")
        if step % 2 == 0:
            manager.save(step, args=parts(mesh, step, batches))


def killed(manager, mesh, *, point, victim):
    """Saves step 2, and is killed while step 4 is saved."""
    batches = batches_on(mesh)
    next(batches)
    manager.save(2, args=parts(mesh, 2, batches))
    manager.wait_until_finished()
    next(batches)
    if topology.this_host() == victim:
        holder, name, before = POINTS[point]
        called = getattr(holder, name)

        def dying(*arguments, **options):
            if not before:
                called(*arguments, **options)
            os.kill(os.getpid(), signal.SIGKILL)

        setattr(holder, name, dying)
    manager.save(4, args=parts(mesh, 4, batches))
    manager.wait_until_finished()


def failing(manager, mesh, *, victim):
    """One host fails to write, then to take the state: both steps fail everywhere."""
    batches = batches_on(mesh)
    manager.save(2, args=parts(mesh, 2, batches))
    manager.wait_until_finished()
    fails = topology.this_host() == victim
    writes, takes = ocdbt.write, ec.data.Batches.save
    if fails:
        ocdbt.write = _fail
    manager.save(4, args=parts(mesh, 4, batches))
    _expect_failure(manager.wait_until_finished, victim)
    ocdbt.write = writes
    if fails:
        ec.data.Batches.save = _fail_at_once
    _expect_failure(lambda: manager.save(6, args=parts(mesh, 6, batches)), victim)
    ec.data.Batches.save = takes
    manager.save(8, args=parts(mesh, 8, batches))
    manager.wait_until_finished()
    assert manager.all_steps() == [2, 8], manager.all_steps()
    manager.reload()
    assert manager.all_steps() == [2, 8], manager.all_steps()
    assert restore(manager, mesh, batches) == 8


def _fail(*_):
    raise OSError(errno.ENOSPC, "disk full")


async def _fail_at_once(*_):
    raise OSError("disk full")


def _expect_failure(call, victim):
    message = ""
    try:
        call()
    except Exception as error:
        message = str(error)
    assert "disk full" in message, message
    assert (f"host {victim}" in message) == (topology.this_host() != victim), message


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
