"""Data that ends: each example once until the end, and nothing after it.

Mixtures are random and nested, and their weights change on the way, to zero too.
"""

import dataclasses
import itertools

import grain
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_ckpt.data import elastic_data, mixing, sharded_data
from tests import pipelines, stages, worlds

NUM_SHARDS = 12
NAMES = "abcd"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Nested:
    """Shards of a mixture; workers import it from here.

    Attributes:
      lengths: examples of each dataset, over all shards.
      tree: names, and mixtures of them.
      weights: of each name, and of each mixture by the names in it.
    """

    lengths: dict
    tree: tuple
    weights: dict

    def __call__(self, shard):
        return self._mixed(self.tree, shard)

    def _mixed(self, of, shard):
        if isinstance(of, str):
            first = 1000 * NAMES.index(of)
            # Shards from 4 on have those that are left.
            begin = first + (shard + 8) % NUM_SHARDS
            numbers = range(begin, first + self.lengths[of], NUM_SHARDS)
            return (
                grain.MapDataset.source(numbers)
                .map(lambda number: {"x": np.array(number)})
                .to_iter_dataset(pipelines.IN_CALLER)
            )
        parts = {names(part): self._mixed(part, shard) for part in of}
        weights = {name: self.weights[name] for name in parts}
        return mixing.Mixture(parts, weights, shard=shard)


def names(of):
    """The names of the datasets in a tree, as one."""
    return of if isinstance(of, str) else "".join(map(names, of))


def mixtures(of):
    """Every mixture in a tree."""
    return [] if isinstance(of, str) else [of, *itertools.chain(*map(mixtures, of))]


TREES = st.sampled_from(
    [("a",), ("a", "b"), ("a", ("b", "c")), (("a", "b"), ("c", "d"))]
)
WEIGHTS = st.sampled_from([0, 0, 1, 1, 3, 1e-9, 1e-30])


@st.composite
def weighed(draw, tree, weights=WEIGHTS):
    """Weights for a tree, of which some are 0 but not all of a mixture."""
    found = {}
    for mixture in mixtures(tree):
        for name in map(names, mixture):
            found[name] = draw(weights)
        if not any(found[name] for name in map(names, mixture)):
            found[names(mixture[-1])] = 1
    return found


def data(make_shard, end):
    return sharded_data.sharded(
        make_shard, num_shards=NUM_SHARDS, pipeline="nested", end=end
    )


@st.composite
def runs(draw):
    """Stages, and the pipeline of each; at last all weights are above 0."""
    tree = draw(TREES)
    lengths = {name: draw(st.integers(0, 60)) for name in NAMES}
    # Some shard has an example; else there is nothing to tell shapes from.
    lengths["a"] += 1
    run = draw(st.lists(stages.stages(), min_size=1, max_size=4))
    run.append(dataclasses.replace(draw(stages.stages()), num_batches=1000))
    kinds = [WEIGHTS] * (len(run) - 1) + [WEIGHTS.filter(bool)]
    return run, [
        Nested(lengths=lengths, tree=tree, weights=draw(weighed(tree, kind)))
        for kind in kinds
    ]


def examples(batches):
    """The examples of batches, in order."""
    real = [batch["x"][batch["mask"]].tolist() for batch in batches]
    return list(itertools.chain.from_iterable(real))


@settings(max_examples=50)
@given(runs())
def test_each_example_comes_once_until_the_end_on_any_hosts(tmp_path_factory, drawn):
    run, shards = drawn
    of_stages = [data(shard, elastic_data.End.PADDED) for shard in shards]
    found = examples(stages.check(of_stages, run, tmp_path_factory.mktemp))
    expected = [
        1000 * NAMES.index(name) + number
        for name in names(shards[0].tree)
        for number in range(shards[0].lengths[name])
    ]
    assert sorted(found) == sorted(expected)


@settings(max_examples=50)
@given(runs())
def test_what_fills_no_batch_is_dropped_on_any_hosts(tmp_path_factory, drawn):
    run, shards = drawn
    of_stages = [data(shard, elastic_data.End.DROPPED) for shard in shards]
    batches = stages.check(of_stages, run, tmp_path_factory.mktemp)
    assert all(batch["mask"].all() for batch in batches)
    assert len(set(examples(batches))) == len(examples(batches))


def flat(lengths, weights, end):
    tree = tuple(lengths)
    return data(Nested(lengths=lengths, tree=tree, weights=weights), end)


@pytest.mark.parametrize("num_hosts", [1, 2, 4])
def test_nothing_comes_after_the_end_of_data_that_drops_the_remainder(num_hosts):
    # Shards 4 to 7 have a row more than the others; a batch has rows of 4 shards.
    ending = flat({"a": 28}, {"a": 1}, elastic_data.End.DROPPED)
    world = worlds.World(ending, num_hosts, 4)
    assert sorted(examples(world.rest())) == list(range(24))
    for _ in range(6):
        with pytest.raises(StopIteration):
            world.batch()
    saved = world.save()
    for hosts, size in ((1, 4), (4, 4), (1, 2), (3, 3), (1, 12)):
        later = worlds.World(ending, hosts, size)
        later.load(saved)
        assert later.rest() == []


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [1, 2, 5])
def test_nothing_comes_after_the_end_where_processes_read(num_workers):
    ending = flat({"a": 28}, {"a": 1}, elastic_data.End.DROPPED)
    world = worlds.World(dataclasses.replace(ending, num_workers=num_workers), 1, 1)
    saved = None
    for _ in range(2):
        if saved:
            world.load(saved)
        else:
            assert sorted(examples(world.rest())) == list(range(24))
        for _ in range(13):
            with pytest.raises(StopIteration):
                world.batch()
        saved = world.save()
    world.close()


@pytest.mark.parametrize("end", [elastic_data.End.PADDED, elastic_data.End.DROPPED])
@pytest.mark.parametrize("size", [4, 12])
def test_a_weight_that_is_raised_when_all_have_ended_loses_nothing(end, size):
    lengths = {"a": 36, "b": 60}
    first = worlds.World(flat(lengths, {"a": 1, "b": 0}, end), 1, size)
    found = examples(first.rest())
    assert sorted(found) == list(range(36))
    second = worlds.World(flat(lengths, {"a": 1, "b": 1}, end), 4, size)
    second.load(first.save())
    assert sorted(examples(second.rest())) == list(range(1000, 1060))
