"""Trains a Flax Linen model with optax, with parameters sharded over all devices.

python examples/linen_optax.py runs/linen --steps 20
python examples/linen_optax.py runs/linen --steps 40
"""

import argparse
import pathlib
from typing import Any

import jax
import optax
from flax import linen as nn
from flax.training.train_state import TrainState

import elastic_ckpt as ec


class Model(nn.Module):
    """Predicts the next byte from the current one."""

    @nn.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        hidden = nn.Embed(260, 32)(inputs)
        return nn.Dense(260)(nn.relu(nn.Dense(64)(hidden)))


def new_state(key: jax.Array) -> TrainState:
    model = Model()
    parameters = model.init(key, jax.numpy.zeros((1, 64), int))["params"]
    return TrainState.create(
        apply_fn=model.apply, params=parameters, tx=optax.adamw(1e-2)
    )


@jax.jit
def train_step(
    state: TrainState, batch: dict[str, jax.Array]
) -> tuple[TrainState, jax.Array]:
    def loss_of(parameters: Any) -> jax.Array:
        logits = state.apply_fn({"params": parameters}, batch["inputs"])
        loss = optax.softmax_cross_entropy_with_integer_labels
        return loss(logits, batch["targets"]).mean()

    loss, gradients = jax.value_and_grad(loss_of)(state.params)
    return state.apply_gradients(grads=gradients), loss


def shardings_of(state: Any, mesh: jax.sharding.Mesh) -> Any:
    """Shards the last dim of matrices over the mesh and replicates everything else."""

    def sharding(leaf: jax.ShapeDtypeStruct) -> jax.NamedSharding:
        divides = leaf.ndim == 2 and leaf.shape[1] % mesh.size == 0
        return jax.NamedSharding(mesh, jax.P(None, "data") if divides else jax.P())

    return jax.tree.map(sharding, state)


def main(directory: pathlib.Path, steps: int) -> None:
    texts = directory / "email.array_record"
    if not texts.exists():
        directory.mkdir(parents=True, exist_ok=True)
        ec.data.lm.write_arrayrecord("python-stdlib/email", texts)
    data = ec.data.from_config(grain_train_files=str(texts), max_target_length=64)
    mesh = jax.sharding.Mesh(jax.devices(), ("data",))
    batches = ec.batches(data, mesh=mesh, spec=jax.P("data"), global_batch_size=24)

    # Shapes are enough to restore: a saved state is never initialized first.
    key = jax.random.key(0)
    shapes = jax.eval_shape(new_state, key)
    shardings = shardings_of(shapes, mesh)

    tiers = [ec.Persistent(directory / "checkpoints", every=10)]
    with ec.Checkpointer(tiers) as checkpointer:
        if checkpointer.latest is None:
            state = jax.jit(new_state, out_shardings=shardings)(key)
        else:
            wanted = jax.tree.map(
                lambda leaf, sharding: jax.ShapeDtypeStruct(
                    leaf.shape, leaf.dtype, sharding=sharding
                ),
                *(shapes, shardings),
            )
            saved = checkpointer.load_checkpointables(
                checkpointer.latest.step, {"state": wanted, "data": batches}
            )
            state = saved["state"]
            print(f"continues from step {state.step}")
        for step in range(int(state.step) + 1, steps + 1):
            state, loss = train_step(state, next(batches))
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
    parser.add_argument("--steps", type=int, default=20)
    arguments = parser.parse_args()
    main(arguments.directory, arguments.steps)
