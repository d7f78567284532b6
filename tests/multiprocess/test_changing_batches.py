"""Real hosts of any number, whose batches change their size, so that shards move."""

import functools
import hashlib

import pytest
from orbax.checkpoint import v1 as ocp

import elastic_ckpt as ec
from elastic_ckpt.core import errors, topology
from elastic_ckpt.data import elastic_data, sharded_data, stages
from elastic_ckpt.elastic import multicontroller, supervisor
from elastic_ckpt.training import schema
from tests import pipelines, worlds

NUM_SHARDS = 64
# Batches of 64, 128 and 192 rows are blocked, of 16 windowed, and the others striped.
# Of three hosts two load, and hand rows on to the third one.
WORLDS = (
    (4, (64, 24, 128, 16, 40)),
    (3, (48, 192, 24, 66)),
)


def engines():
    """Every engine whose cursors move, by its name."""

    def of(make_shard, **more):
        return sharded_data.sharded(
            functools.partial(make_shard, num_shards=NUM_SHARDS),
            num_shards=NUM_SHARDS,
            pipeline="changing",
            **more,
        )

    return {
        "chunked": of(pipelines.chunked),
        "finite": of(pipelines.packed, end=elastic_data.End.PADDED),
        # Longer rows, packed otherwise, where the batch has another size too.
        "stages": ec.data.staged(
            [
                ec.data.Stage(
                    begin=begin,
                    data=of(
                        functools.partial(
                            pipelines.mixture, packing=packing, length=length
                        )
                    ),
                )
                for begin, packing, length in (
                    (0, "first_fit", 8),
                    (2, "concat_then_split", 20),
                    (6, "best_fit", 13),
                )
            ]
        ),
    }


def digest(name, batch):
    return f"{name} {hashlib.sha256(repr(worlds.by_row(batch)).encode()).hexdigest()}"


def train(place, emit, *, directory, sizes, colocated):
    """Continues from the newest step, with batches of each size, and saves."""
    multicontroller.configure(schema.WorldSection(devices_per_host=2))
    with multicontroller.joined(place):
        iterators = {
            name: ec.batches(
                data,
                mesh=topology.mesh_of(topology.present(1)),
                global_batch_size=sizes[0],
                colocated=colocated,
            )
            for name, data in engines().items()
        }
        with ocp.training.Checkpointer(directory) as checkpointer:
            step = checkpointer.latest.step if checkpointer.latest else 0
            if step:
                checkpointer.load_checkpointables(step, dict(iterators))
            for size in sizes:
                for name, batches in iterators.items():
                    # At first the last host asks for batches of another size.
                    is_last = place.host == place.num_hosts - 1
                    with pytest.raises(errors.ConfigError, match="with the same arg"):
                        batches.resize(3 * size if is_last else size)
                    batches.resize(size)
                    batch = worlds.gathered(next(batches))
                    line = digest(name, batch)
                    emit("step_interrupted", step=step, path=line, resume_step=0.0)
                step += 1
            checkpointer.save_checkpointables(step, dict(iterators))
        for batches in iterators.values():
            batches.close()


def of_one_host():
    """The digests of one host that continues from size to size."""
    lines = set()
    for name, data in engines().items():
        saved = None
        sizes = [size for _, of_world in WORLDS for size in of_world]
        for number, size in enumerate(sizes):
            one = worlds.World(stages.at(data, number), 1, size)
            if saved is not None:
                one.load(saved)
            lines.add((number, digest(name, one.batch())))
            saved = one.save()
            one.close()
    return lines


@pytest.mark.slow
@pytest.mark.parametrize(
    "colocated", [False, pytest.param(True, marks=pytest.mark.night)]
)
def test_batches_are_those_of_one_host_where_a_change_of_size_moves_shards(
    tmp_path, colocated
):
    recorded = []

    def record(_, **fields):
        recorded.append((fields["step"], fields["path"]))

    for num_hosts, sizes in WORLDS:
        supervisor.HostProcesses(
            functools.partial(
                train, directory=str(tmp_path / "s"), sizes=sizes, colocated=colocated
            ),
            num_hosts=num_hosts,
            log_directory=tmp_path / f"logs-{num_hosts}",
            emit=record,
        ).run()
    assert set(recorded) == of_one_host()
    assert len(recorded) == len(engines()) * sum(
        hosts * len(sizes) for hosts, sizes in WORLDS
    )
