"""Data x tensor and data x pipeline parallelism: resumed with other degrees.

Under tensor parallelism the matrices of each layer are sharded over `model`, under
pipeline parallelism their stack over `stage`. A step computes in integers, so that the
state has the same bits under all degrees.
"""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import elastic_ckpt as ec
from elastic_ckpt.data import example_id
from elastic_ckpt.elastic import (
    host,
)
from elastic_ckpt.training import schema
from tests import host_worlds

BATCH = 8
STEPS_A_WORLD = 2
SHAPES = {"embedding": (256, 8), "up": (4, 8, 16), "down": (4, 16, 8)}
SPECS = {
    "stage": {"up": ("stage",), "down": ("stage",)},
    "model": {"up": (None, None, "model"), "down": (None, "model", None)},
}


@dataclasses.dataclass(frozen=True)
class Degrees:
    """How a world is cut: replicas of the data, and parts of the model."""

    data: int
    axis: str
    parts: int

    @property
    def devices(self):
        return self.data * self.parts

    def groups(self, num_hosts):
        """The axes that a host's devices share, and the number of groups along them."""
        if self.parts % (self.devices // num_hosts) == 0:
            return self.axis, self.data
        return ("data", self.axis), 1

    def mesh(self):
        grid = np.array(jax.devices()).reshape(self.data, self.parts)
        return Mesh(grid, ("data", self.axis))

    def shardings(self, mesh):
        specs = SPECS[self.axis]
        return {
            name: NamedSharding(mesh, PartitionSpec(*specs.get(name, ())))
            for name in SHAPES
        }


# The worlds of a run: degrees, and hosts. Groups of tensor and pipeline parallelism
# cross hosts, or are within one.
WORLDS = [
    (Degrees(2, "model", 2), 4),
    (Degrees(2, "stage", 2), 2),
    (Degrees(1, "stage", 4), 4),
    (Degrees(4, "model", 1), 1),
]


def new_state():
    return {
        name: jnp.arange(np.prod(shape), dtype=jnp.uint32).reshape(shape)
        for name, shape in SHAPES.items()
    }


def stepped(state, tokens):
    """The state after a batch."""
    read = tokens.astype(jnp.uint32).sum()
    return jax.tree.map(lambda leaf: leaf * jnp.uint32(1664525) + read, state)


def evenly(counters, new_count):
    """Counters of another number of groups: none is lost."""
    total = sum(each["rows"] for each in counters)
    return [{"rows": total // new_count}] * new_count


def data(corpus):
    return ec.data.from_config(
        grain_train_files=corpus, max_target_length=8, data_shuffle_seed=7
    )


def listed(state):
    return jax.tree.map(lambda leaf: np.asarray(leaf).tolist(), state)


def train(place, emit, *, directory, corpus, degrees):
    """A world: continues from the newest step, trains a little, saves, and reports."""
    section = schema.WorldSection(devices_per_host=degrees.devices // place.num_hosts)
    host.configure(section)
    with host.joined(place):
        mesh = degrees.mesh()
        placed = degrees.shardings(mesh)
        spec = PartitionSpec("data")
        batches = ec.batches(
            data(corpus), mesh=mesh, spec=spec, global_batch_size=BATCH
        )
        axes, num_groups = degrees.groups(place.num_hosts)
        counted = ec.components.Component(
            {"rows": 0}, "per_group", axis=axes, mesh=mesh, on_resize=evenly
        )
        rng = ec.components.Rng(7)
        parts = {"data": batches, "counted": counted, "rng": rng}
        record = {"ids": [], "keys": [], "states": [], "groups": num_groups}
        tiers = [ec.Persistent(directory, every=1)]
        with ec.Checkpointer(tiers, mesh=mesh) as checkpointer:
            done = 0
            state = jax.jit(new_state, out_shardings=placed)()
            if checkpointer.latest is not None:
                done = checkpointer.latest.step
                abstract = jax.tree.map(
                    lambda leaf: jax.ShapeDtypeStruct(
                        leaf.shape, leaf.dtype, sharding=leaf.sharding
                    ),
                    state,
                )
                wanted = {"state": abstract, **parts}
                state = ec.components.load(checkpointer, wanted).loaded["state"]
            step = jax.jit(stepped, out_shardings=placed)
            for _ in range(STEPS_A_WORLD):
                batch = next(batches)
                ids = multihost_utils.process_allgather(batch["example_id"], tiled=True)
                record["ids"].append(np.asarray(example_id.join(ids)).tolist())
                record["keys"].append(jax.random.key_data(rng.next()).tolist())
                counted.state = {"rows": counted.state["rows"] + BATCH // num_groups}
                state = step(state, batch["inputs"])
                whole = multihost_utils.process_allgather(state, tiled=True)
                record["states"].append(listed(whole))
            record["rows"] = counted.state["rows"]
            saved = {"state": state, **parts}
            assert checkpointer.save_checkpointables(done + STEPS_A_WORLD, saved)
        batches.close()
    if place.host == 0:
        emit("step_interrupted", step=done, path=json.dumps(record), resume_step=0)


def of_one_device(corpus, steps):
    """The examples, and the states, of a run on one device that is never stopped."""
    mesh = Mesh(np.array(jax.devices()[:1]), ("data",))
    batches = ec.batches(data(corpus), mesh=mesh, global_batch_size=BATCH)
    ids, states, state = [], [], new_state()
    for _ in range(steps):
        batch = next(batches)
        ids.append(
            np.asarray(example_id.join(np.asarray(batch["example_id"]))).tolist()
        )
        state = stepped(state, batch["inputs"])
        states.append(listed(state))
    batches.close()
    return ids, states


@pytest.mark.slow
def test_a_run_goes_on_bit_equal_under_other_degrees(tmp_path, corpus):
    records = []
    for number, (degrees, num_hosts) in enumerate(WORLDS):
        program = functools.partial(
            train, directory=str(tmp_path / "steps"), corpus=corpus, degrees=degrees
        )
        host_worlds.run(
            program,
            num_hosts=num_hosts,
            log_directory=tmp_path / f"logs-{number}",
            emit=lambda _, **fields: records.append(json.loads(fields["path"])),
        )
    assert len(records) == len(WORLDS)

    def every(name):
        return [each for record in records for each in record[name]]

    ids, states = of_one_device(corpus, len(WORLDS) * STEPS_A_WORLD)
    assert every("ids") == ids
    assert every("states") == states
    rng = ec.components.Rng(7)
    assert every("keys") == [jax.random.key_data(rng.next()).tolist() for _ in ids]
    rows = [record["rows"] * record["groups"] for record in records]
    steps = STEPS_A_WORLD * np.arange(1, len(WORLDS) + 1)
    assert rows == (BATCH * steps).tolist()
    assert records[0]["groups"] == 2
