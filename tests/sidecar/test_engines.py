"""Every engine, and any Grain pipeline of a user's own, through the sidecar."""

import dataclasses
import functools

import grain
import numpy as np
import pytest
from elastic_ckpt_sidecar import RemoteIterator

from elastic_ckpt.core import topology
from elastic_ckpt.data import elastic_data, positional_data, sharded_data
from tests import formats, iterator_contract, pipelines, worlds

NUM_SHARDS = 8


class RemoteContract(iterator_contract.IteratorContract):
    """Through colocated Python."""

    def make(self, data):
        return RemoteIterator(
            data,
            mesh=topology.mesh_of(topology.present(2)),
            global_batch_size=iterator_contract.GLOBAL_BATCH_SIZE,
        )


class ShardedContract(RemoteContract):
    def other(self, data):
        return dataclasses.replace(data, pipeline="other"), 'pipeline: saved "'


def of_shards(make_shard, **more):
    return sharded_data.sharded(
        make_shard, num_shards=NUM_SHARDS, pipeline="mine", **more
    )


class TestGrainsElasticIterator(RemoteContract):
    @pytest.fixture
    def data(self, data):
        return dataclasses.replace(data, in_place=False)

    def other(self, data):
        files = data.files
        other = positional_data.PositionalData(
            files=files, max_target_length=16, num_threads=0, in_place=False
        )
        return other, "data_shuffle_seed: saved 7, now 0"


@pytest.mark.slow
@pytest.mark.night
class TestThreadsThatReadInPlace(RemoteContract):
    @pytest.fixture
    def data(self, data):
        return dataclasses.replace(data, num_threads=4)


@pytest.mark.slow
class TestMixedFilteredAndPackedFiles(ShardedContract):
    @pytest.fixture
    def data(self, parts):
        return formats.data(parts, "everything")


@pytest.mark.slow
@pytest.mark.night
class TestMixture(ShardedContract):
    @pytest.fixture
    def data(self, parts):
        return formats.data(parts, "mixture")


@pytest.mark.slow
@pytest.mark.night
class TestPacked(ShardedContract):
    @pytest.fixture
    def data(self):
        return of_shards(functools.partial(pipelines.packed, num_shards=NUM_SHARDS))


@pytest.mark.slow
class TestDataThatEnds(ShardedContract):
    @pytest.fixture
    def data(self):
        return of_shards(ending, end=elastic_data.End.PADDED)


def ending(shard):
    """19 or 20 rows: 10 batches of 16."""
    numbers = grain.MapDataset.range(19 + shard % 2)
    rows = numbers.map(lambda n: {"x": np.array([shard, n + 1], np.int32)})
    return rows.to_iter_dataset(pipelines.IN_CALLER)


class OwnMapDataset(grain.MapDataset):
    """A user's own source."""

    def __len__(self):
        return 500

    def __getitem__(self, index):
        if isinstance(index, slice):
            return self.slice(index)
        return {"x": np.full(3, index % len(self), np.float32)}


def of_own_map_dataset(shard):
    mine = OwnMapDataset().seed(3).shuffle()[shard::NUM_SHARDS].repeat()
    return mine.to_iter_dataset(pipelines.IN_CALLER).filter(lambda e: e["x"][0] % 5)


@pytest.mark.slow
@pytest.mark.night
class TestOwnMapDataset(ShardedContract):
    @pytest.fixture
    def data(self):
        return of_shards(of_own_map_dataset)


class OwnIterDataset(grain.IterDataset):
    """A user's own iterator: numbers of which each depends on all before it."""

    def __init__(self, shard):
        super().__init__()
        self._shard = shard

    def __iter__(self):
        return OwnIterator(self._shard)


class OwnIterator(grain.DatasetIterator):
    def __init__(self, shard):
        super().__init__()
        self._number = shard + 1

    def __next__(self):
        self._number = self._number * 48271 % (2**31 - 1)
        return {"x": np.array([self._number], np.int32)}

    def get_state(self):
        # States may contain NumPy's types and tuples, as those of Grain do.
        return {"batch": (np.int64(self._number), [1])}

    def set_state(self, state):
        number, ones = state["batch"]
        assert isinstance(state["batch"], tuple)
        assert ones == [1]
        self._number = number


def of_own_iter_dataset(shard):
    return OwnIterDataset(shard)


@pytest.mark.slow
class TestOwnIterDataset(ShardedContract):
    @pytest.fixture
    def data(self):
        return of_shards(of_own_iter_dataset)


@pytest.mark.parametrize(
    ("end", "size", "num_batches"),
    [
        (elastic_data.End.PADDED, 8, 20),
        (elastic_data.End.PADDED, 24, 7),
        (elastic_data.End.DROPPED, 8, 19),
        (elastic_data.End.DROPPED, 24, 6),
    ],
)
def test_data_ends_stays_at_its_end_and_begins_again(remote, end, size, num_batches):
    data = of_shards(ending, end=end)
    one = worlds.World(data, 1, size)
    expected = [worlds.content(batch) for batch in one.rest()]
    batches = remote(data, size=size)
    for _ in range(2):
        delivered = [worlds.content(as_numpy(batch)) for batch in batches]
        assert delivered == expected
        assert list(batches) == []
        batches.reset()
    assert len(expected) == num_batches


@pytest.mark.slow
def test_processes_that_read_for_a_worker_change_nothing(remote, tmp_path):
    make_shard = functools.partial(pipelines.filtered, num_shards=NUM_SHARDS)
    one = worlds.World(of_shards(make_shard), 1, 16)
    expected = [worlds.content(one.batch()) for _ in range(4)]
    batches = remote(of_shards(make_shard, num_workers=2))
    assert worlds.content(as_numpy(next(batches))) == expected[0]
    iterator_contract.run(batches.save(iterator_contract.Created(tmp_path)))
    for of_one in expected[1:]:
        assert worlds.content(as_numpy(next(batches))) == of_one
    iterator_contract.run(batches.load(tmp_path))
    for of_one in expected[1:]:
        assert worlds.content(as_numpy(next(batches))) == of_one


def as_numpy(batch):
    return {name: np.asarray(feature) for name, feature in batch.items()}


def test_the_end_is_saved_and_loaded(remote, tmp_path):
    data = of_shards(ending, end=elastic_data.End.PADDED)
    batches = remote(data)
    next(batches)
    rest = len(list(batches))
    iterator_contract.run(batches.save(iterator_contract.Created(tmp_path)))
    batches.reset()
    assert len(list(batches)) == rest + 1
    batches.reset()
    iterator_contract.run(batches.load(tmp_path))
    assert list(batches) == []


@pytest.mark.parametrize("in_place", [True, False])
def test_positional_data_ends_too(remote, data, in_place):
    data = dataclasses.replace(data, num_epochs=1, in_place=in_place)
    batches = remote(data)
    for _ in range(2):
        delivered = list(batches)
        # 100 examples; Grain's own iterator leaves out what fills no batch.
        assert len(delivered) == (7 if in_place else 6)
        assert sum(int(np.asarray(batch["mask"]).sum()) for batch in delivered) == (
            100 if in_place else 96
        )
        assert list(batches) == []
        batches.reset()
