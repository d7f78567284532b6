"""Trains an Equinox model: stop it at any time and run it again to continue.

python examples/equinox_model.py runs/equinox --steps 20
python examples/equinox_model.py runs/equinox --steps 40
"""

import argparse
import pathlib

import equinox as eqx
import jax
import optax

import elastic_ckpt as ec

OPTIMIZER = optax.adamw(1e-2)


class Model(eqx.Module):
    """Predicts the next byte from the current one."""

    embed: eqx.nn.Embedding
    hidden: eqx.nn.MLP

    def __init__(self, key: jax.Array) -> None:
        embed_key, hidden_key = jax.random.split(key)
        self.embed = eqx.nn.Embedding(260, 32, key=embed_key)
        self.hidden = eqx.nn.MLP(32, 260, 64, depth=1, key=hidden_key)

    def __call__(self, token: jax.Array) -> jax.Array:
        return self.hidden(self.embed(token))


def loss_of(model: Model, batch: dict[str, jax.Array]) -> jax.Array:
    logits = jax.vmap(jax.vmap(model))(batch["inputs"])
    loss = optax.softmax_cross_entropy_with_integer_labels
    return loss(logits, batch["targets"]).mean()


@eqx.filter_jit
def train_step(
    model: Model, moments: optax.OptState, batch: dict[str, jax.Array]
) -> tuple[Model, optax.OptState, jax.Array]:
    loss, gradients = eqx.filter_value_and_grad(loss_of)(model, batch)
    arrays = eqx.filter(model, eqx.is_array)
    updates, moments = OPTIMIZER.update(gradients, moments, arrays)
    return eqx.apply_updates(model, updates), moments, loss


def main(directory: pathlib.Path, steps: int) -> None:
    texts = directory / "email.array_record"
    if not texts.exists():
        directory.mkdir(parents=True, exist_ok=True)
        ec.data.lm.write_arrayrecord("python-stdlib/email", texts)
    data = ec.data.from_config(grain_train_files=str(texts), max_target_length=64)
    mesh = jax.sharding.Mesh(jax.devices(), ("data",))
    batches = ec.batches(data, mesh=mesh, spec=jax.P("data"), global_batch_size=24)

    model = Model(jax.random.key(0))
    moments = OPTIMIZER.init(eqx.filter(model, eqx.is_array))
    # A model also contains functions. `eqx.filter` selects the arrays for a checkpoint,
    # and `eqx.combine` puts them back.
    everywhere = jax.NamedSharding(mesh, jax.P())
    model, moments = eqx.filter_shard((model, moments), everywhere)

    tiers = [ec.Persistent(directory / "checkpoints", every=10)]
    with ec.Checkpointer(tiers) as checkpointer:
        step = 0
        if checkpointer.latest is not None:
            step = checkpointer.latest.step
            state = eqx.filter((model, moments), eqx.is_array)
            saved = checkpointer.load_checkpointables(
                step, {"state": state, "data": batches}
            )
            model, moments = eqx.combine(saved["state"], (model, moments))
            print(f"continues from step {step}")
        while step < steps:
            model, moments, loss = train_step(model, moments, next(batches))
            step += 1
            state = eqx.filter((model, moments), eqx.is_array)
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
