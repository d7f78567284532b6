"""Saves and restores a large state in a process whose memory is limited.

    python -m tests.checkpoint.limited_memory save|restore TIERS DIRECTORY RAM GIB EXTRA

`TIERS` is `ram` or `storage`. The limit, `RLIMIT_DATA`, is what the process has once it
has saved and loaded a small step, and has the state, and `EXTRA` MiB. Files of a RAM
disk that are mapped do not count.
"""

import json
import pathlib
import resource
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

import elastic_ckpt as ec

LEAVES = 20
SMALL = {"small": np.arange(3)}


def elements(gib):
    return int(gib * 2**30) // 4 // LEAVES


def names():
    return [f"w{number:02}" for number in range(LEAVES)]


@jax.jit
def made(number, positions):
    return (positions * jnp.uint32(2654435761) + number).astype(jnp.float32)


def leaf(number, size):
    return made(jnp.uint32(number), jnp.arange(size, dtype=jnp.uint32))


def data_bytes():
    for line in pathlib.Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmData:"):
            return int(line.split()[1]) * 2**10
    raise AssertionError


def limit(num_bytes):
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    resource.setrlimit(resource.RLIMIT_DATA, (num_bytes, hard))


def run(what, tiers, directory, ram, gib, extra_mib):
    """Saves step 2, or restores it and compares its values."""
    chosen = [ec.Persistent(directory, every=2)]
    if tiers == "ram":
        chosen = [ec.Local(ram, every=1)]
    size, extra_bytes = elements(gib), int(extra_mib) * 2**20
    with ec.Checkpointer(chosen) as checkpointer:
        if what == "save":
            checkpointer.save_checkpointables(0, {"state": SMALL})
            checkpointer.wait()
            state = {n: leaf(number, size) for number, n in enumerate(names())}
            jax.block_until_ready(state)
            before = data_bytes()
            limit(before + extra_bytes)
            assert checkpointer.save_checkpointables(2, {"state": state})
            checkpointer.wait()
        else:
            # What a program needs for its first values.
            jax.block_until_ready(leaf(0, 8))
            before = data_bytes()
            limit(before + 4 * size * LEAVES + extra_bytes)
            device = SingleDeviceSharding(jax.devices()[0])
            wanted = jax.ShapeDtypeStruct((size,), jnp.float32, sharding=device)
            state = checkpointer.load_checkpointables(
                2, {"state": dict.fromkeys(names(), wanted)}
            )["state"]
            limit(resource.RLIM_INFINITY)
            for number, name in enumerate(names()):
                assert jnp.array_equal(state[name], leaf(number, size)), name
    print(json.dumps({"before_bytes": before}))


if __name__ == "__main__":
    what, tiers, directory, ram, gib, extra_mib = sys.argv[1:]
    run(what, tiers, directory, ram, float(gib), extra_mib)
