"""A program of a user, as the README describes it: it finds its place by variables."""

import os
import sys

import jax

import elastic_ckpt as ec

STEPS_A_START = 4


def main(checkpoints):
    jax.config.update("jax_platforms", "cpu")
    jax.distributed.initialize()
    config = ec.load_config(os.environ["ELASTIC_CKPT_CONFIG"])
    mesh = jax.sharding.Mesh(jax.devices(), ("data",))
    data = ec.data.from_config(config.data)
    batches = ec.batches(data, mesh=mesh, global_batch_size=8)
    state = {"tokens_seen": jax.numpy.zeros((), "int32")}
    ram = os.environ["ELASTIC_CKPT_LOCAL"]
    tiers = [ec.Local(ram, every=2), ec.Peers(), ec.Persistent(checkpoints, every=1000)]
    with ec.Checkpointer(tiers) as checkpointer:
        first_step = 0
        if checkpointer.latest is not None:
            first_step = checkpointer.latest.step
            wanted = {"state": state, "data": batches}
            state = checkpointer.load_checkpointables(None, wanted)["state"]
        for step in range(first_step, first_step + STEPS_A_START):
            batch = next(batches)
            state = {"tokens_seen": state["tokens_seen"] + batch["targets"].size}
            parts = {"state": state, "data": batches}
            checkpointer.save_checkpointables(step + 1, parts)
    seen = int(state["tokens_seen"])
    print(f"host {jax.process_index()}: {first_step} {seen}", flush=True)
    jax.distributed.shutdown()
    # As if SIGTERM had ended the first start.
    return 143 if first_step == 0 else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
