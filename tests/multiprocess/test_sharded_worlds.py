"""Batches of each engine through the sidecar and Orbax, on hosts that come and go."""

import functools
import hashlib

import pytest
from elastic_ckpt_sidecar import RemoteIterator
from orbax.checkpoint import v1 as ocp

from elastic_ckpt.core import topology
from elastic_ckpt.data import positional_data, sharded_data
from elastic_ckpt.elastic import multicontroller, supervisor
from elastic_ckpt.training import schema
from tests import pipelines, worlds

NUM_SHARDS = 12
BATCHES_A_WORLD = 3
# Hosts and rows of a batch: hosts load what they hold; they exchange rows; four of five
# hosts load, and six of eight, and hand rows on. Then up and down, by one and by many.
WORLDS = ((4, 12), (3, 18), (5, 20), (8, 24), (1, 24), (6, 12))


def engines(corpus):
    """Every engine by its name."""
    make_shard = functools.partial(pipelines.everything, num_shards=NUM_SHARDS)
    texts = functools.partial(
        positional_data.PositionalData,
        files=(corpus,),
        max_target_length=8,
        num_threads=1,
    )
    return {
        "sharded": sharded_data.sharded(
            make_shard, num_shards=NUM_SHARDS, pipeline="everything"
        ),
        "in_place": texts(),
        "elastic": texts(in_place=False),
    }


def digest(engine, batch):
    """A batch in few digits, from all of its bytes.

    Grain's elastic iterator has the rows of one host, in another order.
    """
    by_row = worlds.by_row(batch)
    in_order = sorted(by_row) if engine == "elastic" else by_row
    return f"{engine} {hashlib.sha256(repr(in_order).encode()).hexdigest()}"


def train(place, emit, *, directory, corpus, size):
    """Continues all engines from the newest step, takes a few batches, and saves."""
    multicontroller.configure(schema.WorldSection())
    with multicontroller.joined(place):
        mesh = topology.mesh_of(topology.present(1))
        iterators = {
            name: RemoteIterator(data, mesh=mesh, global_batch_size=size)
            for name, data in engines(corpus).items()
        }
        with ocp.training.Checkpointer(directory) as checkpointer:
            step = checkpointer.latest.step if checkpointer.latest else 0
            if step:
                checkpointer.load_checkpointables(step, dict(iterators))
            for number in range(step, step + BATCHES_A_WORLD):
                for name, batches in iterators.items():
                    batch = worlds.gathered(next(batches))
                    line = digest(name, batch)
                    emit("step_interrupted", step=number, path=line, resume_step=0.0)
            checkpointer.save_checkpointables(step + BATCHES_A_WORLD, dict(iterators))
        for batches in iterators.values():
            batches.close()


def of_one_host(corpus, sizes):
    """The digests of one host that continues from size to size."""
    lines = set()
    for name, data in engines(corpus).items():
        number, saved = 0, None
        for size in sizes:
            one = worlds.World(data, 1, size)
            if saved is not None:
                one.load(saved)
            for _ in range(BATCHES_A_WORLD):
                lines.add((number, digest(name, one.batch())))
                number += 1
            saved = one.save()
            one.close()
    return lines


@pytest.mark.parametrize(
    "resized", [WORLDS[:2], pytest.param(WORLDS, marks=pytest.mark.slow)]
)
def test_batches_are_those_of_one_host_through_worlds_and_sizes(
    tmp_path, corpus, resized
):
    recorded = []

    def record(_, **fields):
        recorded.append((fields["step"], fields["path"]))

    for number, (num_hosts, size) in enumerate(resized):
        supervisor.HostProcesses(
            functools.partial(
                train, directory=str(tmp_path / "s"), corpus=corpus, size=size
            ),
            num_hosts=num_hosts,
            log_directory=tmp_path / f"logs-{number}",
            emit=record,
        ).run()
    expected = of_one_host(corpus, [size for _, size in resized])
    assert len(expected) == 3 * BATCHES_A_WORLD * len(resized)
    assert set(recorded) == expected
    # Every host saw every batch.
    num_hosts = sum(num_hosts for num_hosts, _ in resized)
    assert len(recorded) == 3 * BATCHES_A_WORLD * num_hosts
