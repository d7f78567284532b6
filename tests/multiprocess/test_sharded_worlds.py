"""Logical shards through the sidecar and Orbax, on real hosts that come and go."""

import functools
import hashlib
import time

import jax
import numpy as np
import pytest
from elastic_ckpt_sidecar import RemoteIterator
from jax.experimental import multihost_utils
from orbax.checkpoint import v1 as ocp

from elastic_ckpt.config import schema
from elastic_ckpt.core import topology
from elastic_ckpt.data import cursors, example_id, positional_data, rows, sharded_data
from elastic_ckpt.elastic import multicontroller, supervisor
from tests import pipelines, worlds

NUM_SHARDS = 12
BATCHES_A_WORLD = 5
# Hosts and rows of a batch: each shard is one host's; rows are exchanged between the
# hosts; hosts run each other's shards, and discard what is not theirs.
WORLDS = ((4, 12), (3, 18), (5, 20), (6, 12))


def data():
    make_shard = functools.partial(pipelines.everything, num_shards=NUM_SHARDS)
    return sharded_data.sharded(
        make_shard, num_shards=NUM_SHARDS, pipeline="everything"
    )


def train(place, emit, *, directory, size, late_host=None):
    """Continues from the newest step, takes a few batches, and saves."""
    multicontroller.configure(schema.WorldSection())
    with multicontroller.joined(place):
        if place.host == late_host:
            write = cursors.write

            def late(*arguments):
                time.sleep(3)
                write(*arguments)

            cursors.write = late
        mesh = topology.mesh_of(topology.present(1))
        batches = RemoteIterator(data(), mesh=mesh, global_batch_size=size)
        weights = {
            "w": jax.make_array_from_callback(
                (2,), topology.replicated(mesh), lambda i: np.arange(2.0)[i]
            )
        }
        with ocp.training.Checkpointer(directory) as checkpointer:
            step = 0
            if checkpointer.latest is not None:
                step = checkpointer.latest.step
                wanted = {"state": weights, "data": batches}
                checkpointer.load_checkpointables(step, wanted)
            for _ in range(BATCHES_A_WORLD):
                batch = multihost_utils.process_allgather(next(batches), tiled=True)
                ids = example_id.join(batch["example_id"])
                emit(
                    "step_interrupted",
                    step=step,
                    path=str(ids),
                    resume_step=token_sum(batch),
                )
            parts = {"state": weights, "data": batches}
            checkpointer.save_checkpointables(step + BATCHES_A_WORLD, parts)
        batches.close()


def token_sum(batch):
    """A number that changes with any token and with its place."""
    tokens = np.asarray(batch["tokens"], np.float64)
    return float((tokens * (1 + np.arange(tokens.size)).reshape(tokens.shape)).sum())


def expected_batches(sizes):
    """The batches of one host that continues from size to size."""
    batches, before = [], None
    for size in sizes:
        one = data().host_batches(
            rows.Placement.in_order(0, num_hosts=1, global_batch_size=size)
        )
        if before is not None:
            cursors = before.shard_cursors()
            one.go_to(before.position(), lambda _, cursors=cursors: cursors)
        for _ in range(BATCHES_A_WORLD):
            batch = next(one)
            ids = str(example_id.join(batch["example_id"]))
            batches.append((ids, token_sum(batch)))
        before = one
    return batches


def run_world(directory, tmp_path, num_hosts, size, **options):
    recorded = []

    def record(_, **fields):
        recorded.append((fields["path"], fields["resume_step"]))

    supervisor.HostProcesses(
        functools.partial(train, directory=str(directory), size=size, **options),
        num_hosts=num_hosts,
        log_directory=tmp_path / f"logs-{num_hosts}-{time.monotonic_ns()}",
        emit=record,
    ).run()
    # Every host saw every batch.
    assert len(recorded) == num_hosts * BATCHES_A_WORLD
    return list(dict.fromkeys(recorded))


@pytest.mark.parametrize(
    "resized", [WORLDS[:2], pytest.param(WORLDS, marks=pytest.mark.slow(minutes=0.2))]
)
def test_batches_are_those_of_one_host_through_worlds_and_sizes(tmp_path, resized):
    batches = []
    for num_hosts, size in resized:
        batches += run_world(tmp_path / "steps", tmp_path, num_hosts, size)
    assert batches == expected_batches([size for _, size in resized])


@pytest.mark.slow
def test_a_step_is_not_committed_before_the_last_host_has_written(tmp_path):
    run_world(tmp_path / "steps", tmp_path, 3, 12, late_host=2)
    saved = tmp_path / "steps" / str(BATCHES_A_WORLD) / "data"
    assert sorted(path.name for path in saved.glob("shards-*")) == [
        "shards-00000-00003.json",
        "shards-00004-00007.json",
        "shards-00008-00011.json",
    ]


# Up and down, by one and by many; each host has a device.
HOST_COUNTS = (2, 8, 1, 6, 3, 4)
SIZE = 24


def engines(corpus):
    """Every engine by its name."""
    texts = functools.partial(
        positional_data.PositionalData,
        files=(corpus,),
        max_target_length=8,
        num_threads=1,
    )
    return {
        "sharded": data(),
        "in_place": texts(),
        "elastic": texts(in_place=False),
    }


def digest(engine, batch):
    """A batch in few digits, from all of its bytes.

    Grain's elastic iterator has the rows of one host, in another order.
    """
    by_row = worlds.by_row(batch)
    in_order = sorted(by_row) if engine == "elastic" else by_row
    return hashlib.sha256(repr(in_order).encode()).hexdigest()


def train_all(place, emit, *, directory, corpus):
    """Continues all engines from the newest step, takes a few batches, and saves."""
    multicontroller.configure(schema.WorldSection())
    with multicontroller.joined(place):
        mesh = topology.mesh_of(topology.present(1))
        iterators = {
            name: RemoteIterator(data, mesh=mesh, global_batch_size=SIZE)
            for name, data in engines(corpus).items()
        }
        with ocp.training.Checkpointer(directory) as checkpointer:
            step = checkpointer.latest.step if checkpointer.latest else 0
            if step:
                checkpointer.load_checkpointables(step, dict(iterators))
            for number in range(step, step + BATCHES_A_WORLD):
                for name, batches in iterators.items():
                    batch = multihost_utils.process_allgather(next(batches), tiled=True)
                    line = f"{name} {digest(name, batch)}"
                    emit("step_interrupted", step=number, path=line, resume_step=0.0)
            checkpointer.save_checkpointables(step + BATCHES_A_WORLD, dict(iterators))
        for batches in iterators.values():
            batches.close()


def of_one_host(corpus, num_batches):
    """The digests of a host that never stops."""
    lines = set()
    for name, data in engines(corpus).items():
        one = worlds.World(data, 1, SIZE)
        for number in range(num_batches):
            lines.add((number, f"{name} {digest(name, one.batch())}"))
        one.close()
    return lines


@pytest.mark.slow
def test_save_change_the_host_count_load_gives_byte_identical_batches(tmp_path, corpus):
    recorded = []

    def record(_, **fields):
        recorded.append((fields["step"], fields["path"]))

    for number, num_hosts in enumerate(HOST_COUNTS):
        supervisor.HostProcesses(
            functools.partial(train_all, directory=str(tmp_path / "s"), corpus=corpus),
            num_hosts=num_hosts,
            log_directory=tmp_path / f"logs-{number}",
            emit=record,
        ).run()
    expected = of_one_host(corpus, BATCHES_A_WORLD * len(HOST_COUNTS))
    assert len(expected) == 3 * BATCHES_A_WORLD * len(HOST_COUNTS)
    assert set(recorded) == expected
    # Every host saw every batch.
    assert len(recorded) == 3 * BATCHES_A_WORLD * sum(HOST_COUNTS)
