"""Steps that a world of one process saved to a RAM disk and to persistent storage."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from elastic_ckpt import frontend
from elastic_ckpt.tiers import choices

RUN = "run-7"


def state(step):
    """Sharded and replicated leaves, one without elements, a string and a number."""
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    generator = np.random.default_rng(step)

    def over(value, *spec):
        return jax.device_put(value, NamedSharding(mesh, PartitionSpec(*spec)))

    return {
        "params": {
            "w": over(generator.random((16, 6), np.float32), "x"),
            "b": over(jnp.asarray(generator.random(6), jnp.bfloat16)),
        },
        "none": over(np.zeros((0, 3), np.float32)),
        "step": step,
    }


class Cursors:
    """A component of two files."""

    async def save(self, directory):
        async def write():
            path = await directory.await_creation()
            for name in "ab":
                (path / f"{name}.json").write_text(f'"{name}"')

        return write()

    async def load(self, directory):
        async def read():
            self.names = sorted(each.name for each in directory.iterdir())

        return read()


def checkpointer(
    ram, storage=None, *, every=1, keep=None, keep_in_ram=None, limit_bytes=None, **more
):
    """A checkpointer over a RAM disk and persistent storage, if there is any."""
    tiers = [choices.Local(ram, keep=keep_in_ram, limit_bytes=limit_bytes)]
    if storage is not None:
        tiers.append(choices.Persistent(storage, every=every, keep=keep))
    return frontend.Checkpointer(tiers, slice_name="s0", **{"run": RUN, **more})


def save(opened, *steps, **options):
    """Saves some steps, each into every tier before the next."""
    for step in steps:
        parts = {"state": state(step), "data": Cursors()}
        assert opened.save_checkpointables(step, parts, **options)
        opened.wait()


def steps_of(tier):
    """The steps of which a tier may have something, ascending."""
    return sorted({each.step for each in tier.known_saves()})
