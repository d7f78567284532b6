"""The two programs of the suite `follow`: the trainer, and its follower."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import sys
import time
from typing import Any

_NEVER = 10**9


def _use_core(number: int) -> None:
    # Before JAX has threads; the agent inherits it.
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) > 1:
        os.sched_setaffinity(0, {cores[number]})


def _trainer(directory: pathlib.Path, size: dict[str, int]) -> None:
    _use_core(0)
    import jax
    import jax.numpy as jnp

    import elastic_ckpt as ec

    half = size["num_leaves"] // 2
    elements = size["leaf_kib"] * 2**10 // 4
    keys = jax.random.split(jax.random.key(0), 2 * half)

    def leaves(keys: Any) -> list[Any]:
        return [jax.random.normal(key, (elements,)) for key in keys]

    # Half of the weights are frozen; the others have two moments each.
    state = {
        "params": {"frozen": leaves(keys[:half]), "trained": leaves(keys[half:])},
        "moments": leaves(keys),
    }

    @jax.jit
    def train(state: Any, product: Any) -> tuple[Any, Any]:
        for _ in range(size["products"]):
            product = jnp.tanh(product @ product)
        change = 1 + product[0, 0] * 1e-3
        params = {
            "frozen": state["params"]["frozen"],
            "trained": [each * 0.999 + change for each in state["params"]["trained"]],
        }
        moments = [each * 0.9 + change for each in state["moments"]]
        return {"params": params, "moments": moments}, product

    product = jax.random.normal(jax.random.key(1), (1024, 1024))
    tiers = [
        ec.Local(directory / "ram"),
        ec.Peers(interface="127.0.0.1"),
        ec.Persistent(directory / "steps", every=_NEVER),
    ]
    step = 0
    with ec.Checkpointer(tiers) as checkpointer:
        for line in sys.stdin:
            secs = []
            for _ in range(int(line)):
                began_secs = time.perf_counter()
                step += 1
                state, product = train(state, product)
                jax.block_until_ready(state)
                checkpointer.save_checkpointables_async(step, {"state": state})
                secs.append(time.perf_counter() - began_secs)
            checkpointer.wait()
            print(json.dumps(secs), flush=True)


def _follower(directory: pathlib.Path) -> None:
    _use_core(1)
    import jax

    import elastic_ckpt as ec

    secret = directory / "ram" / "secret"
    for step in ec.watch_steps(directory / "steps", secret_file=secret):
        jax.block_until_ready(step.load())
        print(sum(each > step.step for each in _complete(directory)), flush=True)


def _complete(directory: pathlib.Path) -> list[int]:
    # The steps of the only host.
    steps = []
    for saved in (directory / "ram" / "hosts" / "0").iterdir():
        # The run removes steps meanwhile.
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            if any(each.name.startswith("manifest-") for each in saved.iterdir()):
                steps.append(int(saved.name.partition("-")[0]))
    return steps


if __name__ == "__main__":
    side, path, more = sys.argv[1:]
    if side == "trainer":
        _trainer(pathlib.Path(path), json.loads(more))
    else:
        _follower(pathlib.Path(path))
