"""Plain JAX on a mesh of `fsdp` and `tensor`; continues on a different mesh shape.

export JAX_PLATFORMS=cpu JAX_NUM_CPU_DEVICES=8
python examples/plain_jax.py runs/jax --mesh 4 2 --steps 20
python examples/plain_jax.py runs/jax --mesh 2 4 --steps 40
"""

import argparse
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax

import elastic_ckpt as ec

State = dict[str, object]
OPTIMIZER = optax.adam(1e-2)
# The sharding of each parameter; the optimizer's moments are sharded alike.
SPECS = {"embed": jax.P("fsdp", "tensor"), "project": jax.P("tensor", "fsdp")}
SHAPES = {"embed": (264, 32), "project": (32, 264)}


def new_state(mesh: jax.sharding.Mesh) -> State:
    """Parameters and moments, created with their shardings."""

    @jax.jit
    def make() -> State:
        keys = dict(zip(SHAPES, jax.random.split(jax.random.key(0), 2), strict=True))
        params = {
            name: jax.lax.with_sharding_constraint(
                0.1 * jax.random.normal(keys[name], shape),
                jax.NamedSharding(mesh, SPECS[name]),
            )
            for name, shape in SHAPES.items()
        }
        return {"params": params, "opt_state": OPTIMIZER.init(params)}

    return make()


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


def main(directory: pathlib.Path, shape: tuple[int, int], steps: int) -> None:
    texts = directory / "email.array_record"
    if not texts.exists():
        directory.mkdir(parents=True, exist_ok=True)
        ec.data.lm.write_arrayrecord("python-stdlib/email", texts)
    data = ec.data.from_config(grain_train_files=str(texts), max_target_length=64)
    devices = np.array(jax.devices()[: shape[0] * shape[1]]).reshape(shape)
    mesh = jax.sharding.Mesh(devices, ("fsdp", "tensor"))
    # A batch is sharded over `fsdp` and replicated over `tensor`.
    batches = ec.batches(data, mesh=mesh, spec=jax.P("fsdp"), global_batch_size=16)

    state, step = new_state(mesh), 0
    tiers = [ec.Persistent(directory / "checkpoints", every=10)]
    with ec.Checkpointer(tiers) as checkpointer:
        if checkpointer.latest is not None:
            step = checkpointer.latest.step
            # Each leaf is read into its sharding on this mesh.
            wanted = {"state": state, "data": batches}
            state = checkpointer.load_checkpointables(step, wanted)["state"]
            print(f"continues from step {step} on a mesh of {shape[0]} x {shape[1]}")
        while step < steps:
            state, loss = train_step(state, next(batches))
            step += 1
            checkpointables = {"state": state, "data": batches}
            checkpointer.save_checkpointables_async(
                step, checkpointables, force=step == steps
            )
            if step % 10 == 0:
                print(f"step {step}: loss {loss:.3f}", flush=True)
    batches.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("directory", type=pathlib.Path)
    parser.add_argument("--mesh", type=int, nargs=2, default=(1, 1))
    parser.add_argument("--steps", type=int, default=20)
    arguments = parser.parse_args()
    main(arguments.directory, tuple(arguments.mesh), arguments.steps)
