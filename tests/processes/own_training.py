"""A training function of a user on several machines, and the program that starts it.

python own_training.py DIRECTORY RAM MACHINES NUMBER
"""

import functools
import os
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

import elastic_ckpt as ec

STEPS = 1_000_000
# The corpus, for `data` of the audit.
FILES = "TEXTS_OF_OWN_TRAINING"


def data(file=None):
    file = file or os.environ[FILES]
    return ec.data.from_config(grain_train_files=file, max_target_length=16)


def initial_state():
    return {"tokens": jnp.zeros((), "int32")}


@jax.jit
def train_step(state, batch):
    return {"tokens": state["tokens"] + (batch["targets"] != 0).sum()}


def is_over(directory):
    """Whether the test has made a file, as host 0 sees it."""
    is_there = os.path.exists(f"{directory}/end")
    return bool(multihost_utils.broadcast_one_to_all(np.asarray(is_there)))


def train(world, directory):
    batches = ec.batches(
        data(f"{directory}/texts.array_record"), mesh=world.mesh, global_batch_size=6
    )
    everywhere = jax.NamedSharding(world.mesh, jax.P())
    state, step = jax.jit(initial_state, out_shardings=everywhere)(), 0
    tiers = [
        ec.Local(world.ram_directory, every=2),
        ec.Peers(copies=1),
        ec.Persistent(f"{directory}/steps", every=50),
    ]
    with (
        ec.RunDirectory(
            f"{directory}/run", tiers=tiers, steps=STEPS, world=world
        ) as run,
        world.checkpointer(tiers, emit=run.emit) as checkpointer,
    ):
        if checkpointer.latest is not None:
            step = checkpointer.latest.step
            loaded = {"state": state, "data": batches}
            state = checkpointer.load_checkpointables(step, loaded)["state"]
        leaving = None
        while leaving is None and not is_over(directory):
            batch = next(batches)
            state = train_step(state, batch)
            step += 1
            run.log(step, batch)
            leaving = world.leaving(step)
            checkpointables = {"state": state, "data": batches}
            checkpointer.save_checkpointables_async(
                step, checkpointables, force=leaving is not None
            )
    batches.close()


def main(directory, ram, machines, number):
    with ec.elastic.Processes(
        slices=int(machines),
        ram=ram,
        run="own",
        logs=f"{directory}/logs",
        machines=int(machines),
        machine=int(number),
        shared=f"{directory}/steps",
        interface=f"127.0.0.{int(number) + 1}",
        machine_timeout_secs=20,
    ) as cluster:
        ec.elastic.run(
            functools.partial(train, directory=directory),
            cluster=cluster,
            policy=ec.elastic.Policy(settle_secs=0),
        )


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    main(*sys.argv[1:])
