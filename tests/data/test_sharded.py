import functools
import gc

import grain
import numpy as np
import pytest

from elastic_ckpt.core import errors
from elastic_ckpt.data import shard_rows, sharded_data
from tests import iterator_contract, pipelines, worlds

NUM_SHARDS = 12


@pytest.mark.parametrize(
    ("ends", "num_workers", "read_ahead"),
    [
        (True, 0, 0),
        (False, 0, 0),
        (False, 0, 2),
        pytest.param(False, 1, 1, marks=pytest.mark.slow),
    ],
)
def test_the_error_of_a_shard_reaches_the_caller_whoever_reads(
    ends, num_workers, read_ahead
):
    def made(wrong):
        def row(number):
            if number == wrong:
                raise ValueError(f"{number} is wrong")
            return {"x": np.array(number)}

        def make_shard(shard):
            numbers = grain.MapDataset.range(shard, wrong if ends else 600, NUM_SHARDS)
            return numbers.map(row).to_iter_dataset(pipelines.IN_CALLER)

        return sharded_data.sharded(
            make_shard,
            num_shards=NUM_SHARDS,
            pipeline="numbers",
            num_workers=num_workers,
        )

    world = worlds.World(made(43), 1, NUM_SHARDS, read_ahead=read_ahead)
    one = worlds.World(made(600), 1, NUM_SHARDS)
    for _ in range(3):
        assert world.next() == one.next()
    error = errors.DataError if ends else ValueError
    message = r"7 has ended, but .*end=\"padded\"" if ends else "43 is wrong"
    # What is read of the batch does not change the state, as often as it is tried.
    for _ in range(2):
        assert world.save() == one.save()
        with pytest.raises(error, match=message) as raised:
            world.next()
        assert ends or "in the pipeline of logical shard 7" in raised.value.__notes__
    for each in (world, one):
        each.close()
    # The error holds what failed, and with it its processes.
    del world, one, each, raised
    gc.collect()


def test_the_cursor_of_a_shard_is_noted_once_in_a_chapter_if_there_are_any():
    chapters = functools.partial(pipelines.mixture, num_shards=1, packing="first_fit")
    plain = functools.partial(pipelines.plain, num_shards=1)
    for make_shard in (chapters, lambda shard: chapters(shard).map(dict), plain):
        data = sharded_data.sharded(make_shard, num_shards=1, pipeline="one shard")
        world, found = worlds.World(data, 1, 1), []
        for _ in range(200):
            world.next()
            ((_, cursor),) = world.save()[1]
            found.append(cursor)
        rows_at = [cursor["row"] for cursor in found]
        if make_shard is plain:
            assert rows_at == [*range(1, 201)]
            continue
        # Of the first rows of chapters, and valid for all rows after them.
        assert all(row <= number for number, row in enumerate(rows_at, 1))
        # The first chapter is one row, after which the second has begun.
        assert len(set(rows_at)) == len({c["state"]["chapter"] for c in found}) + 1
        assert max(np.diff(sorted({*rows_at}))) > 16


@pytest.mark.parametrize(("cursor", "row"), [(None, 6), ({"row": 3}, 2)])
def test_a_shard_that_cannot_come_to_its_row_is_refused(cursor, row):
    five = grain.MapDataset.range(5).to_iter_dataset(pipelines.IN_CALLER)
    assert next(shard_rows.iterator(five, None, 4)) == 4
    if cursor:
        state = shard_rows.iterator(five, None, 3).get_state()
        cursor = cursor | {"state": shard_rows.to_json(state)}
        assert next(shard_rows.iterator(five, cursor, 4)) == 4
    with pytest.raises(errors.DataError, match=rf"to row {row}, where the data state"):
        shard_rows.iterator(five, cursor, row)


class TestShardedBatches(iterator_contract.IteratorContract):
    @pytest.fixture
    def data(self):
        return pipelines.sharded("everything", num_shards=8)

    def other(self, _):
        return pipelines.sharded(
            "plain", num_shards=8
        ), 'pipeline: saved "everything", now "plain"'
