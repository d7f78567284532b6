"""The head's part of a run, alone: hosts' agents save and restore what it names.

A separate program that imports nothing of the tests: `in_head.py DIRECTORY`. The agents
are colocated Python in this process, as if a single controller drove them. The tiers
that its restores read are printed.
"""

import pathlib
import shutil
import sys
from unittest import mock

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from orbax.checkpoint import v1 as ocp

import elastic_ckpt as ec
from elastic_ckpt.core import topology


def main(directory: pathlib.Path) -> None:
    """Saves a step to RAM and storage, and restores it from either."""
    memory, stored = directory / "memory", directory / "stored"
    mesh = Mesh(np.array(jax.devices()), ("device",))
    rows = NamedSharding(mesh, PartitionSpec("device"))
    values = np.arange(64, dtype=np.float32).reshape(8, 8)
    state = {"w": jax.device_put(values, rows)}
    wanted = {"w": jax.ShapeDtypeStruct((8, 8), np.float32, sharding=rows)}

    def check(restored: dict[str, jax.Array]) -> None:
        assert np.asarray(restored["w"]).tobytes() == values.tobytes()

    def emit(name: str, **fields: int) -> None:
        if name == "restored_from":
            kinds = ("local", "close", "distant", "persistent")
            print(*[kind for kind in kinds if fields[f"{kind}_bytes"]])

    def checkpointer() -> ec.Checkpointer:
        tiers = [ec.Local(memory), ec.Persistent(stored, every=1)]
        return ec.Checkpointer(tiers, mesh=mesh, run="run", emit=emit)

    with mock.patch.object(topology, "is_single_controller", return_value=True):
        with checkpointer() as saving:
            assert saving.save_checkpointables(1, {"state": state})
        with checkpointer() as restoring:
            check(restoring.load(1, wanted))
        shutil.rmtree(memory)
        with checkpointer() as restoring:
            check(restoring.load(1, wanted))
    with ocp.training.Checkpointer(stored) as stock:
        check(stock.load_checkpointables(1, {"state": wanted})["state"])


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 2)
    main(pathlib.Path(sys.argv[1]))
