import json

import grain
import pytest

from elastic_ckpt.data import records, shuffling
from tests import formats, pipelines
from tests.data import test_stages


def shuffled(num_elements, window_size, seed=3):
    parent = grain.MapDataset.range(num_elements).to_iter_dataset(pipelines.IN_CALLER)
    return shuffling.WindowShuffle(parent, window_size=window_size, seed=seed)


@pytest.mark.parametrize(
    ("num_elements", "window_size"), [(20, 5), (17, 5), (3, 5), (4, 1)]
)
def test_each_window_is_a_permutation_of_its_elements(num_elements, window_size):
    actual = list(shuffled(num_elements, window_size))
    for begin in range(0, num_elements, window_size):
        window = actual[begin : begin + window_size]
        expected = range(begin, min(begin + window_size, num_elements))
        assert sorted(window) == list(expected)


def test_windows_and_seeds_have_orders_of_their_own():
    orders = [
        tuple(
            number % 50 for number in list(shuffled(100, 50, seed))[begin : begin + 50]
        )
        for seed in (3, 4)
        for begin in (0, 50)
    ]
    assert len(set(orders)) == 4


@pytest.mark.parametrize("num_elements", [20, 17])
def test_the_state_before_every_element_can_be_returned_to(num_elements):
    expected = list(shuffled(num_elements, 5))
    elements = iter(shuffled(num_elements, 5))
    states = []
    for _ in expected:
        states.append(json.dumps(elements.get_state()))
        next(elements)
    states.append(json.dumps(elements.get_state()))
    for number, saved in reversed(list(enumerate(states))):
        for resumed in (elements, iter(shuffled(num_elements, 5))):
            resumed.set_state(json.loads(saved))
            assert json.dumps(resumed.get_state()) == saved
            assert list(resumed) == expected[number:]


def test_a_window_over_many_small_datasets_is_no_endless_loop(files, monkeypatch):
    monkeypatch.setattr(records, "_LEAST_FRUITLESS", 10)
    made = test_stages.of_stage(
        files["jsonl"],
        window=64,
        weights=dict.fromkeys(formats.DATASETS, 1.0),
    )
    rows = iter(made.make_shard(0))
    for _ in range(100):
        with records.row_due():
            assert next(rows)
