"""A small loop of a user under `ec.elastic.run`: data, checkpoints, and one sum."""

import json
import pathlib

import jax
import numpy as np

import elastic_ckpt as ec
from elastic_ckpt.core import topology
from tests import conftest
from tests.elastic.tiny_hosts import RATES

ROWS = 8


def train(world, *, directory, ram, corpus, last_world, least_steps, ahead=0):
    """Adds up all inputs, and ends some steps after the last world began.

    It asks whether to stop by numbers that are so far ahead of those that it saves.
    """
    directory = pathlib.Path(directory)
    mesh = world.mesh
    batches = ec.batches(conftest.data_of(corpus), mesh=mesh, global_batch_size=ROWS)
    whole = topology.replicated(mesh)
    ids = jax.jit(lambda batch: batch["example_id"], out_shardings=whole)
    add = jax.jit(lambda sum, batch: sum + batch["inputs"].sum(), out_shardings=whole)
    state = {"sum": jax.device_put(np.zeros((), np.int32), whole)}
    tiers = [
        ec.Local(world.ram_directory or ram, every=2),
        ec.Peers(),
        ec.Persistent(str(directory / "storage"), every=20),
    ]
    with world.checkpointer(tiers, run="tiny") as checkpointer:
        first = 0
        if checkpointer.latest is not None:
            wanted = {"state": state, "data": batches}
            first = checkpointer.latest.step
            state = checkpointer.load_checkpointables(None, wanted)["state"]
        step, stopping, ends = first, False, first + least_steps
        while not stopping and (world.number < last_world or step < ends):
            batch = next(batches)
            state = {"sum": add(state["sum"], batch)}
            step += 1
            record(directory, world, step, np.asarray(ids(batch)), state["sum"])
            stopping = world.should_stop(step + ahead)
            parts = {"state": state, "data": batches}
            checkpointer.save_checkpointables_async(step, parts, force=stopping)
    batches.close()


def record(directory, world, step, ids, total):
    """Writes the examples of a step, and reports the step to the cluster."""
    if topology.is_primary():
        with (directory / "steps.jsonl").open("a") as file:
            entry = {"step": step, "ids": ids.tolist(), "sum": int(total)}
            file.write(json.dumps({**entry, "world": world.number}) + "\n")
    world.emit("step", step=step, steps=step, loss=0.0, secs=0.0, **RATES)


def steps(directory):
    """The last record of each step, in order."""
    lines = (pathlib.Path(directory) / "steps.jsonl").read_text().splitlines()
    by_step = {record["step"]: record for record in map(json.loads, lines)}
    return [by_step[step] for step in sorted(by_step)]
