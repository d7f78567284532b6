"""Trains a Flax NNX model: stop it at any time and run it again to continue.

python examples/flax_nnx.py runs/nnx --steps 20
python examples/flax_nnx.py runs/nnx --steps 40
"""

import argparse
import pathlib

import jax
import optax
from flax import nnx

import elastic_ckpt as ec


class Model(nnx.Module):
    """Predicts the next byte from the current one."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(260, 32, rngs=rngs)
        self.project = nnx.Linear(32, 260, rngs=rngs)

    def __call__(self, inputs: jax.Array) -> jax.Array:
        return self.project(self.embed(inputs))


def new_model() -> tuple[Model, nnx.Optimizer]:
    model = Model(nnx.Rngs(0))
    return model, nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param)


def loss_of(model: Model, batch: dict[str, jax.Array]) -> jax.Array:
    loss = optax.softmax_cross_entropy_with_integer_labels
    return loss(model(batch["inputs"]), batch["targets"]).mean()


@nnx.jit
def train_step(
    model: Model, optimizer: nnx.Optimizer, batch: dict[str, jax.Array]
) -> jax.Array:
    loss, gradients = nnx.value_and_grad(loss_of)(model, batch)
    optimizer.update(model, gradients)
    return loss


def main(directory: pathlib.Path, steps: int) -> None:
    texts = directory / "email.array_record"
    if not texts.exists():
        directory.mkdir(parents=True, exist_ok=True)
        ec.data.lm.write_arrayrecord("python-stdlib/email", texts)
    data = ec.data.from_config(grain_train_files=str(texts), max_target_length=64)
    mesh = jax.sharding.Mesh(jax.devices(), ("data",))
    batches = ec.batches(data, mesh=mesh, spec=jax.P("data"), global_batch_size=24)

    model, optimizer = new_model()
    # Replicate the model and the optimizer on all devices.
    everywhere = jax.NamedSharding(mesh, jax.P())
    nnx.update(
        (model, optimizer), jax.device_put(nnx.state((model, optimizer)), everywhere)
    )

    tiers = [ec.Persistent(directory / "checkpoints", every=10)]
    with ec.Checkpointer(tiers) as checkpointer:
        step = 0
        if checkpointer.latest is not None:
            step = checkpointer.latest.step
            wanted = {"state": nnx.state((model, optimizer)), "data": batches}
            saved = checkpointer.load_checkpointables(step, wanted)
            nnx.update((model, optimizer), saved["state"])
            print(f"continues from step {step}")
        while step < steps:
            loss = train_step(model, optimizer, next(batches))
            step += 1
            checkpointables = {"state": nnx.state((model, optimizer)), "data": batches}
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
