"""A run that loses a slice, continues on the others, and lets the slice rejoin.

python examples/elastic_run.py runs/elastic --slices 4 --steps 300

Slice 1 is killed after 12 steps, and its data in RAM is lost. Each slice is a process
on this machine; with `machines=` and `shared=`, slices run on several machines.
"""

import argparse
import functools
import pathlib

import jax
import jax.numpy as jnp
import optax

import elastic_ckpt as ec

OPTIMIZER = optax.adam(1e-2)
# Must be divisible by the number of devices for any number of slices.
ROWS = 24


def new_state() -> dict:
    first, second = jax.random.split(jax.random.key(0))
    params = {
        "embed": 0.1 * jax.random.normal(first, (260, 32)),
        "project": 0.1 * jax.random.normal(second, (32, 260)),
    }
    return {"params": params, "opt_state": OPTIMIZER.init(params)}


@jax.jit
def train_step(state: dict, batch: dict[str, jax.Array]) -> tuple[dict, jax.Array]:
    def loss_of(params: dict[str, jax.Array]) -> jax.Array:
        logits = params["embed"][batch["inputs"]] @ params["project"]
        loss = optax.softmax_cross_entropy_with_integer_labels
        return jnp.mean(loss(logits, batch["targets"]))

    loss, gradients = jax.value_and_grad(loss_of)(state["params"])
    updates, opt_state = OPTIMIZER.update(gradients, state["opt_state"])
    params = optax.apply_updates(state["params"], updates)
    return {"params": params, "opt_state": opt_state}, loss


def train(world: ec.elastic.World, directory: pathlib.Path, steps: int) -> None:
    """Trains in one world; called on all hosts of each new world."""
    data = ec.data.from_config(
        grain_train_files=str(directory / "email.array_record"), max_target_length=64
    )
    batches = ec.batches(data, mesh=world.mesh, global_batch_size=ROWS)
    everywhere = jax.NamedSharding(world.mesh, jax.P())
    state, step = jax.jit(new_state, out_shardings=everywhere)(), 0
    assert world.ram_directory is not None  # `Processes` was given a RAM disk
    tiers = [
        ec.Local(world.ram_directory, every=5),
        ec.Peers(copies=1),
        ec.Persistent(directory / "checkpoints", every=50),
    ]
    with world.checkpointer(tiers) as checkpointer:
        if checkpointer.latest is not None:
            step = checkpointer.latest.step
            wanted = {"state": state, "data": batches}
            state = checkpointer.load_checkpointables(step, wanted)["state"]
        leaving = None
        while step < steps and leaving is None:
            state, loss = train_step(state, next(batches))
            step += 1
            leaving = world.leaving(step)
            if step % 50 == 0 and jax.process_index() == 0:
                print(f"step {step} on slices {world.slices}: loss {loss:.3f}")
            checkpointer.save_checkpointables_async(
                step,
                {"state": state, "data": batches},
                force=leaving is not None or step == steps,
            )
    batches.close()


def main(directory: pathlib.Path, slices: int, steps: int, ram: str) -> None:
    texts = directory / "email.array_record"
    if not texts.exists():
        directory.mkdir(parents=True, exist_ok=True)
        ec.data.lm.write_arrayrecord("python-stdlib/email", texts)
    faults = [
        ec.elastic.Fault(kind="kill_slice", target=1, at_step=12),
        ec.elastic.Fault(kind="return_slice", target=1, at_step=20),
    ]
    policy = ec.elastic.Policy(min_slices=slices - 1, settle_secs=0)
    with ec.elastic.Processes(
        slices=slices, ram=ram, run=directory.name, injected=faults
    ) as cluster:
        run = functools.partial(train, directory=directory.absolute(), steps=steps)
        ec.elastic.run(run, cluster=cluster, policy=policy)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("directory", type=pathlib.Path)
    parser.add_argument("--slices", type=int, default=4)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--ram", default="/dev/shm", help="the RAM disk of a machine")
    given = parser.parse_args()
    main(given.directory, given.slices, given.steps, given.ram)
