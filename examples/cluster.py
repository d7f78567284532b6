"""A training loop for many hosts, started by Slurm or a JobSet: one process per host.

docs/pages/guides/slurm.md and kubernetes.md explain how. A preempted job saves a last
step, and its next start continues from the RAM of the nodes that it keeps.
"""

import argparse
import os
import sys

import jax
import jax.numpy as jnp
import optax
from jax.experimental import multihost_utils

import elastic_ckpt as ec

# Tells Slurm's script and the JobSet to restart the job.
PREEMPTED = 143
OPTIMIZER = optax.adam(1e-2)


def new_state() -> dict:
    keys = jax.random.split(jax.random.key(0))
    params = {
        "embed": 0.1 * jax.random.normal(keys[0], (260, 64)),
        "project": 0.1 * jax.random.normal(keys[1], (64, 260)),
    }
    return {"params": params, "moments": OPTIMIZER.init(params)}


@jax.jit
def train_step(state: dict, batch: dict[str, jax.Array]) -> tuple[dict, jax.Array]:
    def loss_of(params: dict) -> jax.Array:
        logits = params["embed"][batch["inputs"]] @ params["project"]
        loss = optax.softmax_cross_entropy_with_integer_labels
        return loss(logits, batch["targets"]).mean()

    loss, gradients = jax.value_and_grad(loss_of)(state["params"])
    updates, moments = OPTIMIZER.update(gradients, state["moments"])
    params = optax.apply_updates(state["params"], updates)
    return {"params": params, "moments": moments}, loss


def main(texts: str, checkpoints: str, steps: int) -> int:
    jax.distributed.initialize()
    mesh = jax.make_mesh(
        (jax.device_count(),), ("data",), axis_types=(jax.sharding.AxisType.Auto,)
    )
    data = ec.data.from_config(grain_train_files=texts, max_target_length=64)
    batches = ec.batches(data, mesh=mesh, global_batch_size=24)
    replicated = jax.NamedSharding(mesh, jax.P())
    state = jax.jit(new_state, out_shardings=replicated)()

    tiers = [
        ec.Local(os.environ["ELASTIC_CKPT_LOCAL"], every=5),
        ec.Peers(copies=1),
        ec.Persistent(checkpoints, every=1000),
    ]
    step, loss, is_preempted = 0, jnp.nan, False
    with ec.Checkpointer(tiers, mesh=mesh) as checkpointer:
        if checkpointer.latest is not None:
            step = checkpointer.latest.step
            wanted = {"state": state, "data": batches}
            state = checkpointer.load_checkpointables(step, wanted)["state"]
            print(f"host {jax.process_index()} continues from step {step}", flush=True)
        while step < steps and not is_preempted:
            state, loss = train_step(state, next(batches))
            step += 1
            # True on all hosts after the same step, once one of them receives SIGTERM.
            is_preempted = multihost_utils.reached_preemption_sync_point(step)
            checkpointables = {"state": state, "data": batches}
            is_last = is_preempted or step == steps
            checkpointer.save_checkpointables_async(
                step, checkpointables, force=is_last
            )
            if jax.process_index() == 0 and (is_last or step % 10 == 0):
                print(f"step {step}: loss {loss:.3f}", flush=True)
    batches.close()
    return PREEMPTED if is_preempted else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("texts", help="an ArrayRecord file, or a glob for several")
    parser.add_argument("checkpoints", help="a directory that all hosts share")
    parser.add_argument("--steps", type=int, default=100_000)
    arguments = parser.parse_args()
    sys.exit(main(arguments.texts, arguments.checkpoints, arguments.steps))
