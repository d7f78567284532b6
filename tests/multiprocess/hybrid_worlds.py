"""A run under hybrid parallelism: data x tensor, or data x pipeline, in JAX alone.

The model is the user's own: an embedding, and layers that are stacked along their first
dim. Under tensor parallelism the matrices of each layer are sharded over `model`; under
pipeline parallelism the stack is sharded over `stage`, and micro-batches pass from
stage to stage (`shard_map`, `ppermute`). So another number of stages is another
sharding of the same arrays, and nothing in a checkpoint depends on it.
"""

import dataclasses
import hashlib
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import elastic_ckpt as ec
from elastic_ckpt.config import schema
from elastic_ckpt.data import example_id
from elastic_ckpt.elastic import multicontroller

BATCH = 8
STEPS_A_WORLD = 2
LAYERS, WIDTH, HIDDEN, VOCABULARY = 4, 8, 16, 256
MICRO_BATCHES = 2


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


def shardings(mesh):
    """The parameters' shardings: by the dims of layers, or by their stack."""
    if "stage" in mesh.axis_names:
        specs = {"up": PartitionSpec("stage"), "down": PartitionSpec("stage")}
    else:
        specs = {
            "up": PartitionSpec(None, None, "model"),
            "down": PartitionSpec(None, "model", None),
        }
    specs["embedding"] = PartitionSpec()
    return {name: NamedSharding(mesh, spec) for name, spec in specs.items()}


def new_parameters():
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = {
        "embedding": (VOCABULARY, WIDTH),
        "up": (LAYERS, WIDTH, HIDDEN),
        "down": (LAYERS, HIDDEN, WIDTH),
    }
    return {
        name: 0.3 * jax.random.normal(key, shape)
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }


OPTIMIZER = optax.adam(0.01)


def new_state():
    parameters = new_parameters()
    return {"params": parameters, "opt": OPTIMIZER.init(parameters)}


def abstract_state(mesh):
    """The shapes of the state, and how it lies on a mesh: moments as parameters do."""
    placed = shardings(mesh)
    whole = NamedSharding(mesh, PartitionSpec())

    def with_sharding(path, leaf):
        return jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=placed.get(path[-1], whole)
        )

    shapes = jax.eval_shape(new_state)
    return jax.tree_util.tree_map_with_path(
        lambda keys, leaf: with_sharding(
            [str(getattr(key, "key", key)) for key in keys], leaf
        ),
        shapes,
    )


def layers_applied(layers, x):
    """All layers of a stack, one after the other."""

    def layer(x, weights):
        up, down = weights
        return x + jnp.tanh(x @ up) @ down, None

    return jax.lax.scan(layer, x, (layers["up"], layers["down"]))[0]


def pipelined(mesh, layers, x):
    """All layers, of which each stage has a part; micro-batches pass through them."""
    stages = mesh.shape["stage"]

    def on_stage(layers, x):
        stage = jax.lax.axis_index("stage")
        micro = x.reshape(MICRO_BATCHES, -1, *x.shape[1:])
        # Varies over the stages, as all that passes between them.
        passed = micro[0] * 0 + 0.0 * stage
        outputs = []
        for tick in range(MICRO_BATCHES + stages - 1):
            entering = micro[min(tick, MICRO_BATCHES - 1)]
            done = layers_applied(layers, jnp.where(stage == 0, entering, passed))
            if tick >= stages - 1:
                outputs.append(jnp.where(stage == stages - 1, done, 0))
            ring = [(at, (at + 1) % stages) for at in range(stages)]
            passed = jax.lax.ppermute(done, "stage", ring)
        return jax.lax.psum(jnp.stack(outputs).reshape(x.shape), "stage")

    spec = PartitionSpec("stage")
    return jax.shard_map(
        on_stage,
        mesh=mesh,
        in_specs=({"up": spec, "down": spec}, PartitionSpec("data")),
        out_specs=PartitionSpec("data"),
    )(layers, x)


def make_step(mesh):
    """The jitted step of a mesh."""

    def loss_of(parameters, batch):
        x = parameters["embedding"][batch["inputs"]]
        layers = {name: parameters[name] for name in ("up", "down")}
        if "stage" in mesh.axis_names:
            x = pipelined(mesh, layers, x)
        else:
            x = layers_applied(layers, x)
        logits = x @ parameters["embedding"].T
        return optax.softmax_cross_entropy_with_integer_labels(
            logits, batch["targets"]
        ).mean()

    def step(state, batch):
        loss, gradients = jax.value_and_grad(loss_of)(state["params"], batch)
        updates, opt = OPTIMIZER.update(gradients, state["opt"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, (
            loss
        )

    placed = jax.tree.map(lambda leaf: leaf.sharding, abstract_state(mesh))
    return jax.jit(step, out_shardings=(placed, None), donate_argnums=0)


def digests(state):
    """A digest of the bits of each whole leaf, the same on every mesh."""
    whole = multihost_utils.process_allgather(state, tiled=True)
    return {
        jax.tree_util.keystr(path): hashlib.sha256(
            np.asarray(leaf).tobytes()
        ).hexdigest()
        for path, leaf in jax.tree_util.tree_leaves_with_path(whole)
    }


def evenly(counters, new_count):
    """Counters of another number of groups: none is lost."""
    total = sum(each["rows"] for each in counters)
    return [{"rows": total // new_count}] * new_count


def data(corpus):
    return ec.data.positional(
        files=(corpus,), max_target_length=8, shuffle_seed=7, num_threads=0
    )


def train(place, emit, *, directory, corpus, degrees):
    """A world: continues from the newest step, trains a little, saves, and reports."""
    section = schema.WorldSection(devices_per_host=degrees.devices // place.num_hosts)
    multicontroller.configure(section)
    with multicontroller.joined(place):
        mesh = degrees.mesh()
        batches = ec.batches(
            data(corpus),
            mesh=mesh,
            spec=PartitionSpec("data"),
            global_batch_size=BATCH,
        )
        abstract = abstract_state(mesh)
        tiers = [ec.Persistent(directory, every=1)]
        axes, num_groups = degrees.groups(place.num_hosts)
        counted = ec.components.Component(
            {"rows": 0}, "per_group", axis=axes, mesh=mesh, on_resize=evenly
        )
        rng = ec.components.Rng(7)
        parts = {"data": batches, "counted": counted, "rng": rng}
        record = {"ids": [], "losses": [], "keys": [], "groups": num_groups}
        with ec.Checkpointer(tiers, mesh=mesh) as checkpointer:
            if checkpointer.latest is None:
                done = 0
                placed = jax.tree.map(lambda leaf: leaf.sharding, abstract)
                state = jax.jit(new_state, out_shardings=placed)()
            else:
                done = checkpointer.latest.step
                wanted = {"state": abstract, **parts}
                state = ec.components.load(checkpointer, wanted).loaded["state"]
            record["before"] = digests(state)
            step = make_step(mesh)
            for _ in range(STEPS_A_WORLD):
                batch = next(batches)
                ids = multihost_utils.process_allgather(batch["example_id"], tiled=True)
                record["ids"].append(np.asarray(example_id.join(ids)).tolist())
                record["keys"].append(jax.random.key_data(rng.next()).tolist())
                counted.state = {"rows": counted.state["rows"] + BATCH // num_groups}
                state, loss = step(state, batch)
                record["losses"].append(float(loss))
            record["after"] = digests(state)
            record["rows"] = counted.state["rows"]
            saved = {"state": state, **parts}
            assert checkpointer.save_checkpointables(done + STEPS_A_WORLD, saved)
        batches.close()
    if place.host == 0:
        emit("step_interrupted", step=done, path=json.dumps(record), resume_step=0)


def expected_ids(corpus, steps):
    """The examples of a run on one host with one device."""
    mesh = Mesh(np.array(jax.devices()[:1]), ("data",))
    batches = ec.batches(data(corpus), mesh=mesh, global_batch_size=BATCH)
    ids = [
        np.asarray(example_id.join(np.asarray(next(batches)["example_id"]))).tolist()
        for _ in range(steps)
    ]
    batches.close()
    return ids


def logs(directory, degrees):
    return pathlib.Path(directory, f"logs-{degrees.axis}{degrees.data}x{degrees.parts}")
