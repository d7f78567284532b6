import dataclasses
import itertools

import cloudpickle
import grain
import numpy as np
import pytest

from elastic_ckpt.core import errors
from elastic_ckpt.data import elastic_data, positional_data, rows
from tests import conftest, worlds

SIZE = 12


def numbers(num_epochs=None):
    order = grain.MapDataset.range(100).seed(7).shuffle().repeat(num_epochs)
    return order.map(lambda n: {"x": np.array([n, n * n], np.int32)})


@pytest.fixture(params=[0, 3], ids=["in the caller", "in threads"])
def data(request):
    return positional_data.positional(
        numbers(),
        pipeline="numbers",
        read_options=grain.ReadOptions(
            num_threads=request.param, prefetch_buffer_size=2 * request.param
        ),
    )


def test_two_epochs_are_those_of_grains_elastic_iterator_from_any_state(data):
    grains = grain.experimental.ElasticIterator(
        numbers(), SIZE, grain.sharding.NoSharding()
    )
    # 16 batches of 12 rows, and one of 8.
    finite = dataclasses.replace(data, dataset=numbers(2))
    world, states, batches = worlds.World(finite, 3, SIZE), [], []
    for number in range(17):
        states.append(world.save())
        batches.append(batch := world.batch())
        first = SIZE * number
        real = min(SIZE, 200 - first)
        padding = SIZE - real
        assert batch.keys() == {"example_id", "mask", "x"}
        assert batch["mask"].tolist() == [True] * real + [False] * padding
        assert batch["x"][:real].tolist() == next(grains)["x"][:real].tolist()
        assert not batch["x"][real:].any()
        ids = [*range(first, first + real)] + [elastic_data.NO_ID] * padding
        assert elastic_data.join_ids(batch["example_id"]).tolist() == ids
        assert world.hosts[0].get_state()[0] == grains.get_state()
    assert world.rest() == []
    states.append(world.save())
    expected = list(map(worlds.content, batches))
    for number, num_hosts in ((0, 1), (7, 4), (14, 3), (15, 2), (16, 3), (17, 1)):
        resumed = worlds.World(finite, num_hosts, SIZE)
        resumed.load(states[number])
        assert list(map(worlds.content, resumed.rest())) == expected[number:]


def test_example_ids_have_64_bits():
    ids = [0, 1, 2**32 - 1, 2**32, 2**63, elastic_data.NO_ID]
    halves = elastic_data.split_ids(np.array(ids, np.uint64))
    assert elastic_data.join_ids(halves).tolist() == ids


def test_it_travels_to_a_sidecar_by_cloudpickle(data, corpus):
    for each in (data, conftest.data_of(corpus)):
        copy = cloudpickle.loads(cloudpickle.dumps(each))
        assert copy == each
        one, other = worlds.World(each, 1, SIZE), worlds.World(copy, 1, SIZE)
        assert one.next() == other.next()


def test_a_state_of_another_pipeline_or_of_other_examples_is_another(data):
    identities = [
        positional_data.positional(examples, pipeline=name).identity()
        for examples in (numbers(), numbers(2))
        for name in ("numbers", "numbers, version 2", {"numbers": 2})
    ]
    assert identities[0] == data.identity()
    assert all(one != two for one, two in itertools.combinations(identities, 2))


def test_what_is_not_a_dataset_with_a_name_is_refused():
    with pytest.raises(
        errors.ConfigError, match=r"dataset is of type .*IterDataset; pass a"
    ):
        positional_data.positional(numbers().to_iter_dataset(), pipeline="numbers")
    with pytest.raises(errors.ConfigError, match="pass pipeline="):
        positional_data.positional(numbers(), pipeline="")


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda n: None if n == 3 else {"x": np.array(n)}, "None"),
        (np.array, r"array\(0\)"),
        (lambda n: {"mask": np.array(n)}, "mask"),
    ],
)
def test_an_element_that_makes_no_row_is_refused(make, match):
    data = positional_data.positional(grain.MapDataset.range(9).map(make), pipeline="1")
    (host,) = [data.host_batches(each) for each in rows.in_order(1, 4)]
    for _ in range(2):
        with pytest.raises(errors.DataError, match=match):
            next(host)
