"""Follows the run of `flax_nnx.py` from outside and ranks its steps by loss.

It takes no part in the run and may be on a different machine. Without `--once`, it
waits for further steps.

    python examples/evaluator.py runs/nnx
"""

import argparse
import pathlib

import jax
from flax import nnx
from flax_nnx import loss_of, new_model

import elastic_ckpt as ec


def main(directory: pathlib.Path, *, once: bool) -> None:
    data = ec.data.from_config(
        grain_train_files=str(directory / "email.array_record"), max_target_length=64
    )
    mesh = jax.sharding.Mesh(jax.devices()[:1], ("data",))
    batches = ec.batches(data, mesh=mesh, global_batch_size=48)
    batch = next(batches)
    model, optimizer = new_model()
    wanted = nnx.state((model, optimizer))

    # A step is leased until the next one is requested: the run does not remove it.
    steps = ec.watch_steps(directory / "checkpoints", timeout_secs=0 if once else None)
    for step in steps:
        # Leaves that have not changed since the previous step are not read again.
        nnx.update((model, optimizer), step.load(wanted))
        loss = float(loss_of(model, batch))
        ec.record_metrics(step, {"eval_loss": loss})
        print(f"{step.step}: {loss:.3f}", flush=True)
    batches.close()

    tiers = [ec.Persistent(directory / "checkpoints")]
    with ec.Checkpointer(tiers, read_only=True) as checkpointer:
        print("best step:", ec.best_step(checkpointer, metric="eval_loss"))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("directory", type=pathlib.Path)
    parser.add_argument("--once", action="store_true", help="stop after the newest")
    arguments = parser.parse_args()
    main(arguments.directory, once=arguments.once)
