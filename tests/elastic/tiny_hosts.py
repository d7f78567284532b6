"""Training functions of a few numbers, for hosts of any cluster."""

import json
import os
import pathlib
import signal

import jax
import numpy as np

from elastic_ckpt.core import topology

RATES = {"tokens": 9, "learning_rate": 0.1}


def counts(world, *, steps, directory, action="", at_step=0):
    """Sums over all devices; in a step host 0 raises, or has a process end."""
    directory = pathlib.Path(directory)
    work = {"rows": world.rows, "parts": world.microbatches}
    note(directory, world, "began", number=world.number, slices=world.slices, **work)
    sharding = topology.over_all_devices(world.mesh)
    ones = jax.make_array_from_callback(
        (world.mesh.size,), sharding, lambda _: np.ones(1, np.float32)
    )
    total = jax.jit(jax.numpy.sum)
    for step in range(1, steps + 1):
        loss = float(total(ones))
        world.emit("step", step=step, steps=steps, loss=loss, secs=0.0, **RATES)
        if step == at_step and topology.is_primary():
            if action == "raise":
                raise ValueError("the number is wrong")
            os.kill(int(action), signal.SIGTERM)
        if why := world.leaving(step):
            note(directory, world, "left", step=step, why=why)
            return


def note(directory, world, name, **values):
    """Writes values of a host into a separate file."""
    path = directory / f"{name}-{world.number}-{topology.this_host()}.json"
    path.write_text(json.dumps(values))


def notes(directory, name):
    """The notes of all hosts, by world and host."""
    paths = sorted(pathlib.Path(directory).glob(f"{name}-*.json"))
    return [json.loads(path.read_text()) for path in paths]
