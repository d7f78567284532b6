"""Real hosts that need the same rows of a batch, or parts of the same sequences.

Their weights are cut over other axes than the rows, by tensors or also by layers, and
are restored where the world before had cut them in another way.
"""

import dataclasses
import functools
import hashlib
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from orbax.checkpoint import v1 as ocp

import elastic_ckpt as ec
from elastic_ckpt.data import elastic_data, sharded_data
from elastic_ckpt.elastic import host as host_process
from elastic_ckpt.training import schema
from tests import conftest, host_worlds, pipelines, worlds

NUM_SHARDS = 12
BATCHES_A_WORLD = 2
IN_PROCESS, COLOCATED = False, True


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """A mesh over hosts, and the shardings of batches of some size and of weights."""

    hosts: int
    mesh: dict[str, int]
    spec: PartitionSpec
    weights: PartitionSpec
    size: int
    row_parts: int = 2
    sequence_parts: int = 1

    def parts_of(self, shape):
        """The shape of a device's part of a sharded feature."""
        rows, *rest = shape
        if len(shape) == 2 and shape[1] > 2:
            rest = [shape[1] // self.sequence_parts]
        return (rows // self.row_parts, *rest)


# Batches of 12, 4 and 8 rows are blocked, windowed and striped over the 12 shards; of
# 8 rows, hosts exchange some.
TENSOR = Layout(
    hosts=4,
    mesh={"data": 2, "tensor": 4},
    spec=PartitionSpec("data"),
    weights=PartitionSpec(None, None, "tensor"),
    size=8,
)
SEQUENCE = Layout(
    hosts=4,
    mesh={"data": 2, "sequence": 2, "tensor": 2},
    spec=PartitionSpec("data", "sequence"),
    weights=PartitionSpec("sequence", "tensor"),
    sequence_parts=2,
    size=4,
)
LAYOUTS = [
    # Two hosts hold the same rows, of two devices each.
    TENSOR,
    # Two hosts hold the two halves of the same sequences.
    SEQUENCE,
]


def engines(corpus):
    """Every engine that gives the rows of one host in their places, by its name."""

    def packed(**more):
        make_shard = functools.partial(pipelines.packed, num_shards=NUM_SHARDS)
        return sharded_data.sharded(
            make_shard, num_shards=NUM_SHARDS, pipeline="packed", **more
        )

    return {
        "packed": packed(),
        "finite": packed(end=elastic_data.End.PADDED),
        "positional": conftest.data_of(corpus, length=8),
    }


def digest(array):
    """A text that is the same for equal arrays alone."""
    array = np.ascontiguousarray(array)
    return hashlib.sha256(array.dtype.str.encode() + array.tobytes()).hexdigest()


def new_weights():
    return jnp.arange(512, dtype=jnp.uint32).reshape(4, 8, 16)


def stepped(weights, tokens):
    """The weights after a batch, in integers: all layouts have the same bits."""
    return weights * jnp.uint32(1664525) + tokens.astype(jnp.uint32).sum()


def train(place, emit, *, directory, corpus, layout):
    """Continues all from the newest step, takes a few batches, and saves."""

    def tell(step, name, features):
        parts = json.dumps([name, parts_of(features)])
        emit("step_interrupted", step=step, path=parts, resume_step=0)

    num_devices = int(np.prod(list(layout.mesh.values())))
    host_process.configure(
        schema.WorldSection(devices_per_host=num_devices // layout.hosts)
    )
    with host_process.joined(place):
        grid = np.array(jax.devices()).reshape(tuple(layout.mesh.values()))
        mesh = Mesh(grid, tuple(layout.mesh))
        iterators = {
            colocated: {
                name: ec.batches(
                    data,
                    mesh=mesh,
                    spec=layout.spec,
                    global_batch_size=layout.size,
                    colocated=colocated,
                )
                for name, data in engines(corpus).items()
            }
            for colocated in (IN_PROCESS, COLOCATED)
        }
        cut = NamedSharding(mesh, layout.weights)
        tiers = [ec.Persistent(f"{directory}-weights", every=1)]
        with (
            ocp.training.Checkpointer(directory) as checkpointer,
            ec.Checkpointer(tiers, mesh=mesh) as ours,
        ):
            step = checkpointer.latest.step if checkpointer.latest else 0
            weights = jax.jit(new_weights, out_shardings=cut)()
            after, rng = jax.jit(stepped, out_shardings=cut), ec.components.Rng(7)
            if step:
                wanted = {"state": {"w": weights}, "rng": rng}
                weights = ours.load_checkpointables(step, wanted)["state"]["w"]
            for by_name in iterators.values():
                if step:
                    checkpointer.load_checkpointables(step, dict(by_name))
            for number in range(step, step + BATCHES_A_WORLD):
                for colocated, by_name in iterators.items():
                    for name, batches in by_name.items():
                        batch = next(batches)
                        tell(number, name, batch)
                        if (colocated, name) == (IN_PROCESS, "packed"):
                            tokens = batch["tokens"]
                weights, key = after(weights, tokens), rng.next()
                tell(number, "weights", {"w": weights, "key": jax.random.key_data(key)})
            # Either reads in the next world what one of them has written.
            writer = step // BATCHES_A_WORLD % 2 == 1
            last = step + BATCHES_A_WORLD
            checkpointer.save_checkpointables(last, dict(iterators[writer]))
            ours.save_checkpointables(last, {"state": {"w": weights}, "rng": rng})
        for by_name in iterators.values():
            for batches in by_name.values():
                batches.close()


def parts_of(batch):
    """The place and digest of the part of each feature on each device of this host."""
    return {
        name: [
            (
                [
                    part.indices(size)[:2]
                    for part, size in zip(shard.index, feature.shape, strict=True)
                ],
                digest(shard.data),
            )
            for shard in feature.addressable_shards
        ]
        for name, feature in batch.items()
    }


def batches_of_one_host(data, sizes):
    """The batches of one host that continues from size to size."""
    batches, saved = [], None
    for size in sizes:
        one = worlds.World(data, 1, size)
        if saved is not None:
            one.load(saved)
        batches += [one.batch() for _ in range(BATCHES_A_WORLD)]
        saved = one.save()
        one.close()
    return batches


def of_one_device(batches):
    """The weights and the key after each of the batches."""
    weights, rng, made = new_weights(), ec.components.Rng(7), []
    for batch in batches:
        weights = stepped(weights, jnp.asarray(batch["tokens"]))
        key = jax.random.key_data(rng.next())
        made.append({"w": np.asarray(weights), "key": np.asarray(key)})
    return made


@pytest.mark.slow
def test_devices_of_hosts_with_shared_rows_hold_the_batches_of_one_host(
    tmp_path, corpus
):
    expected = {
        name: batches_of_one_host(data, [layout.size for layout in LAYOUTS])
        for name, data in engines(corpus).items()
    }
    num_records = 2 * len(expected) + 1
    expected["weights"] = of_one_device(expected["packed"])
    for number, layout in enumerate(LAYOUTS):
        recorded = []

        def record(_, *, recorded=recorded, **fields):
            recorded.append((fields["step"], *json.loads(fields["path"])))

        host_worlds.run(
            functools.partial(
                train, directory=str(tmp_path / "s"), corpus=corpus, layout=layout
            ),
            num_hosts=layout.hosts,
            log_directory=tmp_path / f"logs-{number}",
            emit=record,
        )
        assert len(recorded) == num_records * BATCHES_A_WORLD * layout.hosts
        for step, name, parts_by_name in recorded:
            batch = expected[name][step]
            assert parts_by_name.keys() == batch.keys()
            for feature, parts in parts_by_name.items():
                for bounds, content in parts:
                    part = batch[feature][tuple(slice(*of_dim) for of_dim in bounds)]
                    whole = batch[feature].shape
                    assert name == "weights" or part.shape == layout.parts_of(whole)
                    assert content == digest(part)
