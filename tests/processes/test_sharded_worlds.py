"""Batches of each engine through the sidecar and Orbax, on hosts that come and go."""

import functools
import hashlib

import orbax.checkpoint as v0
import pytest
from orbax.checkpoint import v1 as ocp

import elastic_ckpt as ec
from elastic_ckpt.core import errors, topology
from elastic_ckpt.data import sharded_data
from elastic_ckpt.elastic import host
from elastic_ckpt.training import schema
from tests import conftest, host_worlds, pipelines, worlds

NUM_SHARDS = 12
BATCHES_A_SIZE = 2
# Hosts, and rows of batches in turn: hosts load what they hold, or exchange rows; four
# of five hosts load, and hand rows on. Shards move where the size changes.
FEW = ((2, (12, 24)), (3, (18,)))
MANY = ((4, (12, 24)), (5, (20,)), (1, (24, 18)))


def engines(corpus):
    """Every engine by its name."""
    make_shard = functools.partial(pipelines.everything, num_shards=NUM_SHARDS)
    return {
        "sharded": sharded_data.sharded(
            make_shard, num_shards=NUM_SHARDS, pipeline="everything"
        ),
        "positional": conftest.data_of(corpus, num_threads=1),
    }


def digest(engine, batch):
    """A batch in few digits, from all of its bytes."""
    by_row = repr(worlds.by_row(batch))
    return f"{engine} {hashlib.sha256(by_row.encode()).hexdigest()}"


def train(place, emit, *, directory, corpus, sizes):
    """Continues all engines from the newest step, takes batches of sizes, and saves."""
    host.configure(schema.WorldSection())
    with host.joined(place):
        mesh = topology.mesh_of(topology.present(1))
        iterators = {
            name: ec.batches(
                data, mesh=mesh, global_batch_size=sizes[0], colocated=True
            )
            for name, data in engines(corpus).items()
        }
        # The manager of Orbax v0 has one of them, and v1 the other.
        sharded, positional = iterators.values()
        with (
            ocp.training.Checkpointer(f"{directory}/v1") as checkpointer,
            v0.CheckpointManager(f"{directory}/v0") as manager,
        ):
            step = checkpointer.latest.step if checkpointer.latest else 0
            if step:
                checkpointer.load_checkpointables(step, {"data": positional})
                item = ec.orbax_v0.StatefulRestore(sharded)
                manager.restore(step, args=v0.args.Composite(data=item))
            for number, size in enumerate(sizes):
                for name, batches in iterators.items():
                    if number:
                        resize(batches, size, place)
                    for offset in range(BATCHES_A_SIZE):
                        line = digest(name, worlds.gathered(next(batches)))
                        at = step + offset
                        emit("step_interrupted", step=at, path=line, resume_step=0.0)
                step += BATCHES_A_SIZE
            checkpointer.save_checkpointables(step, {"data": positional})
            item = ec.orbax_v0.StatefulSave(sharded)
            manager.save(step, args=v0.args.Composite(data=item))
        for batches in iterators.values():
            batches.close()


def resize(batches, size, place):
    """Changes the size, after the last host has asked for another one."""
    is_last = place.host == place.num_hosts - 1
    if place.num_hosts > 1:
        with pytest.raises(errors.ConfigError, match="with the same arg"):
            batches.resize(3 * size if is_last else size)
    batches.resize(size)


def of_one_host(corpus, sizes):
    """The digests of one host that continues from size to size."""
    lines = set()
    for name, data in engines(corpus).items():
        number, saved = 0, None
        for size in sizes:
            one = worlds.World(data, 1, size)
            if saved is not None:
                one.load(saved)
            for _ in range(BATCHES_A_SIZE):
                lines.add((number, digest(name, one.batch())))
                number += 1
            saved = one.save()
            one.close()
    return lines


@pytest.mark.parametrize("resized", [FEW, pytest.param(MANY, marks=pytest.mark.slow)])
def test_batches_are_those_of_one_host_through_worlds_and_sizes(
    tmp_path, corpus, resized
):
    recorded = []

    def record(_, **fields):
        recorded.append((fields["step"], fields["path"]))

    for number, (num_hosts, sizes) in enumerate(resized):
        host_worlds.run(
            functools.partial(
                train, directory=str(tmp_path / "s"), corpus=corpus, sizes=sizes
            ),
            num_hosts=num_hosts,
            log_directory=tmp_path / f"logs-{number}",
            emit=record,
        )
    expected = of_one_host(corpus, [size for _, sizes in resized for size in sizes])
    assert set(recorded) == expected
    # Every host saw every batch.
    assert len(recorded) == sum(
        len(engines(corpus)) * BATCHES_A_SIZE * num_hosts * len(sizes)
        for num_hosts, sizes in resized
    )
