"""Every engine, and any Grain pipeline of a user's own, through the sidecar."""

import dataclasses
import functools
import subprocess
import sys

import grain
import numpy as np
import pytest
from elastic_ckpt_sidecar import RemoteIterator
from etils import epath

from elastic_ckpt.core import topology
from elastic_ckpt.data import elastic_data, sharded_data
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


@pytest.mark.slow
class TestFilesReadInPlace(RemoteContract):
    """Those of the fixture `data`."""


def ending(shard):
    """19 or 20 rows: 10 batches of 16."""
    numbers = grain.MapDataset.range(19 + shard % 2)
    rows = numbers.map(lambda n: {"x": np.array([shard, n + 1], np.int32)})
    return rows.to_iter_dataset(pipelines.IN_CALLER)


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


class TestOwnIterDataset(ShardedContract):
    @pytest.fixture
    def data(self):
        return of_shards(OwnIterDataset)


ENGINES = {
    "positional": lambda data, _: data,
    "everything": lambda _, parts: formats.data(parts(), "everything"),
    "workers": lambda *_: of_shards(
        functools.partial(pipelines.filtered, num_shards=NUM_SHARDS), num_workers=2
    ),
}
DEAR = ("everything", "workers")


def content(batch):
    return worlds.content({name: np.asarray(each) for name, each in batch.items()})


@pytest.mark.parametrize(
    "engine",
    [pytest.param(e, marks=pytest.mark.slow if e in DEAR else ()) for e in ENGINES],
)
def test_an_engine_yields_and_continues_the_batches_of_one_host(
    remote, data, request, tmp_path, engine
):
    parts = functools.partial(request.getfixturevalue, "parts")
    made = ENGINES[engine](data, parts)
    one_host = dataclasses.replace(made, num_workers=0) if engine == "workers" else made
    one = worlds.World(one_host, 1, 16)
    expected = [worlds.content(one.batch()) for _ in range(4)]
    batches = remote(made)
    assert content(next(batches)) == expected[0]
    iterator_contract.run(batches.save(iterator_contract.Created(tmp_path)))
    assert [content(next(batches)) for _ in range(3)] == expected[1:]
    iterator_contract.run(batches.load(epath.Path(tmp_path)))
    assert [content(next(batches)) for _ in range(3)] == expected[1:]


def test_data_ends_stays_at_its_end_and_begins_again(remote, tmp_path):
    data = of_shards(ending, end=elastic_data.End.PADDED)
    expected = [worlds.content(b) for b in worlds.World(data, 1, 24).rest()]
    batches = remote(data, size=24)
    for _ in range(2):
        assert [content(batch) for batch in batches] == expected
        assert list(batches) == []
        iterator_contract.run(batches.save(iterator_contract.Created(tmp_path)))
        batches.reset()
    assert len(expected) == 7
    # The end is saved and loaded, too.
    iterator_contract.run(batches.load(epath.Path(tmp_path)))
    assert list(batches) == []


USE = """
import sys
from elastic_ckpt.core import topology
from elastic_ckpt.data.lm import pipeline
from elastic_ckpt_sidecar import RemoteIterator
above = ("cli", "checkpoint", "elastic", "training")
above = tuple(f"elastic_ckpt.{room}" for room in above)
assert not [name for name in sys.modules if name.startswith(above)]
mesh = topology.mesh_of(topology.present(1))
data = pipeline.from_config(grain_train_files=sys.argv[1], max_target_length=8)
batches = RemoteIterator(data, mesh=mesh, global_batch_size=2)
next(batches)
"""


@pytest.mark.slow
def test_a_program_that_used_it_ends_without_a_word(corpus):
    ended = subprocess.run(
        [sys.executable, "-c", USE, corpus], capture_output=True, text=True, check=True
    )
    assert ended.stdout + ended.stderr == ""
