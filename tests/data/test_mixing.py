import collections
import itertools
import json

import grain
import hypothesis
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_ckpt.core import errors
from elastic_ckpt.data import mixing, shuffling
from tests import pipelines

NAMES = ["books", "code", "mathematics", "news", "web"]
WEIGHTS = st.lists(
    st.one_of(st.integers(1, 10), st.floats(1e-6, 1e6)), min_size=1, max_size=5
).map(lambda weights: dict(zip(NAMES, weights, strict=False)))
SHARDS = st.integers(0, 100_000)
TURNS = st.integers(0, 10**12)


def furthest_from_share(chosen, weights):
    """By how many elements a dataset is off its share at worst, in any prefix."""
    total, taken, worst = sum(weights.values()), collections.Counter(), 0.0
    for number, name in enumerate(chosen, start=1):
        taken[name] += 1
        off = [abs(taken[n] - number * w / total) for n, w in weights.items()]
        worst = max(worst, *off)
    return worst


@given(WEIGHTS, SHARDS, TURNS)
def test_in_a_thousand_elements_no_dataset_is_ever_4_from_its_share(
    weights, shard, begin
):
    # 4 is what points of the golden ratio come to in the worst interval there is; it
    # grows with the logarithm of the number of elements, to about 7 in a million.
    ends = mixing.bounds(weights)
    turns = range(begin, begin + 1000)
    chosen = [mixing.chosen(turn, shard=shard, ends=ends) for turn in turns]
    worst = furthest_from_share(chosen, weights)
    hypothesis.target(worst)
    assert worst < 4


def test_the_schedule_is_frozen():
    ends = mixing.bounds({"a": 0.5, "b": 0.3, "c": 0.2})
    chosen = [
        "".join(mixing.chosen(turn, shard=shard, ends=ends) for turn in range(24))
        for shard in range(3)
    ]
    assert chosen == [
        "abacaabacbabaabacbabacba",
        "aabacbabacbacaabacbabaab",
        "caabacbabaabacaabacbacaa",
    ]


@given(WEIGHTS, SHARDS, TURNS, st.data())
def test_the_next_turn_of_some_datasets_is_the_first_one_from_here(
    weights, shard, turn, data
):
    among = data.draw(st.sets(st.sampled_from(sorted(weights)), min_size=1))
    ends = mixing.bounds(weights)
    later, name = mixing.next_chosen(turn, shard=shard, ends=ends, among=among)
    assert name in among
    assert mixing.chosen(later, shard=shard, ends=ends) == name
    before = range(max(turn, later - 1000), later)
    assert not among & {mixing.chosen(t, shard=shard, ends=ends) for t in before}


@given(
    st.lists(st.sampled_from([0, 1, 3, 1e-9, 1e-30, 5e-324, 1e300]), min_size=1).filter(
        any
    )
)
def test_every_dataset_above_zero_has_turns(weights):
    named = {str(number): weight for number, weight in enumerate(weights)}
    begin = 0
    for end, name in mixing.bounds(named):
        assert (end > begin) == (named[name] > 0)
        begin = end
    assert begin == 2**64


def part(name, length=None):
    """Elements (name, 0), (name, 1) and so on."""
    numbers = grain.MapDataset.range(length or 10**6).to_iter_dataset(
        pipelines.IN_CALLER
    )
    return numbers.map(lambda number: (name, int(number)))


def parts(*names, **lengths):
    return {name: part(name, lengths.get(name)) for name in [*names, *lengths]}


def names(elements):
    return [name for name, _ in elements]


def take(elements, count):
    return list(itertools.islice(elements, count))


def saved(elements):
    return json.loads(json.dumps(elements.get_state()))


def resumed(mixture, state):
    elements = iter(mixture)
    elements.set_state(state)
    return elements


@given(WEIGHTS, SHARDS)
def test_elements_come_by_schedule_and_each_dataset_in_its_order(weights, shard):
    mixture = mixing.Mixture(parts(*weights), weights, shard=shard)
    actual = take(iter(mixture), 60)
    ends = mixing.bounds(weights)
    assert names(actual) == [
        mixing.chosen(turn, shard=shard, ends=ends) for turn in range(60)
    ]
    for name in weights:
        numbers = [number for dataset, number in actual if dataset == name]
        assert numbers == list(range(len(numbers)))


@pytest.mark.parametrize("lengths", [{}, {"a": 7, "b": 30, "c": 2}])
def test_the_state_before_every_element_can_be_returned_to(lengths):
    mixture = mixing.Mixture(
        parts(**({"a": None, "b": None, "c": None} | lengths)),
        {"a": 0.5, "b": 0.3, "c": 0.2},
        shard=2,
    )
    expected = take(iter(mixture), 50)
    elements = iter(mixture)
    states = [saved(elements)]
    for _ in expected:
        next(elements)
        states.append(saved(elements))
    for number, state in reversed(list(enumerate(states))):
        for later in (elements, iter(mixture)):
            later.set_state(state)
            assert saved(later) == state
            assert take(later, len(expected) - number) == expected[number:]


STAGE = st.tuples(
    st.dictionaries(st.sampled_from(NAMES), st.integers(0, 5), min_size=1).filter(
        lambda weights: any(weights.values())
    ),
    st.integers(0, 30),
)


@given(st.lists(STAGE, min_size=2, max_size=6), SHARDS)
def test_however_weights_and_datasets_change_each_goes_on_where_it_was(stages, shard):
    state, actual = None, []
    for weights, count in stages:
        elements = iter(mixing.Mixture(parts(*weights), weights, shard=shard))
        if state:
            elements.set_state(state)
        now = take(elements, count)
        assert set(names(now)) <= {name for name, w in weights.items() if w}
        actual += now
        state = saved(elements)
    for name in NAMES:
        numbers = [number for dataset, number in actual if dataset == name]
        assert numbers == list(range(len(numbers)))
    assert mixing.taken([state]) == dict(collections.Counter(names(actual)))


@given(
    st.dictionaries(
        st.sampled_from(NAMES),
        st.tuples(st.integers(1, 5), st.integers(1, 25)),
        min_size=1,
    ),
    SHARDS,
    st.lists(st.integers(1, 20), max_size=5),
)
def test_datasets_that_end_leave_the_others_to_go_on_and_lose_nothing(
    datasets, shard, stops
):
    weights = {name: weight for name, (weight, _) in datasets.items()}
    lengths = {name: length for name, (_, length) in datasets.items()}
    mixture = mixing.Mixture(parts(**lengths), weights, shard=shard)
    expected = list(mixture)
    assert sorted(expected) == sorted(
        (name, number) for name, length in lengths.items() for number in range(length)
    )
    elements, actual = iter(mixture), []
    for count in stops:
        actual += take(elements, count)
        elements = resumed(mixture, saved(elements))
    assert actual + list(elements) == expected


def parts_of(name, length):
    return [(name, number) for number in range(length)]


def in_windows(weights, *names, **lengths):
    mixture = mixing.Mixture(parts(*names, **lengths), weights, shard=1)
    return shuffling.WindowShuffle(mixture, window_size=20, seed=3)


@pytest.mark.parametrize("count", [20, 33, 59])
def test_what_is_in_a_window_is_read_again_by_the_weights_of_then(count):
    run = [{"a": 1, "b": 1}, {"a": 1, "b": 9}, {"a": 5, "b": 1}, {"a": 0, "b": 1}]
    state, actual = None, []
    for weights in run:
        elements = iter(in_windows(weights, a=100, b=100))
        if state:
            elements.set_state(state)
        actual += take(elements, count)
        state = saved(elements)
        # Nothing is kept of weights that are not needed any more.
        assert len(cursors_of(state).get("schedule", [])) <= 2
    elements = resumed(in_windows({"a": 1, "b": 1}, a=100, b=100), state)
    actual += list(elements)
    assert sorted(actual) == [*parts_of("a", 100), *parts_of("b", 100)]


def cursors_of(state):
    """The cursor of the mixture in a window."""
    return state["parent"]


def test_a_state_has_no_schedule_where_nothing_is_in_a_buffer():
    elements = iter(mixing.Mixture(parts("a", "b"), {"a": 1, "b": 1}, shard=0))
    take(elements, 7)
    assert saved(elements).keys() == {"turn", "taken", "parts"}
    elements = iter(in_windows({"a": 1, "b": 1}, "a", "b"))
    take(elements, 20)
    assert "schedule" not in cursors_of(saved(elements))
    take(elements, 1)
    assert cursors_of(saved(elements))["schedule"] == [
        {"until": 40, "weights": {"a": 1, "b": 1}}
    ]


def test_a_dataset_of_which_examples_are_in_a_window_cannot_be_gone():
    elements = iter(in_windows({"a": 1, "b": 1}, "a", "b"))
    actual = take(elements, 21)
    state = saved(elements)
    message = "dataset b was removed, but some .*; add it again with weight 0 until"
    with pytest.raises(errors.DataError, match=message):
        resumed(in_windows({"a": 1}, "a"), state)
    elements = resumed(in_windows({"a": 1, "b": 0}, "a", "b"), state)
    actual += take(elements, 20)
    elements = resumed(in_windows({"a": 1}, "a"), saved(elements))
    actual += take(elements, 20)
    numbers = [number for dataset, number in sorted(actual) if dataset == "b"]
    assert numbers == list(range(len(numbers)))


def test_weights_cannot_be_raised_while_the_end_of_data_is_in_a_window():
    elements = iter(in_windows({"a": 1, "b": 0}, a=30, b=30))
    actual = take(elements, 25)
    state = saved(elements)
    message = (
        r"weights of \['b'\] were raised from 0 after the other datasets had ended"
    )
    with pytest.raises(errors.DataError, match=message):
        resumed(in_windows({"a": 1, "b": 1}, a=30, b=30), state)
    elements = resumed(in_windows({"a": 1, "b": 0}, a=30, b=30), state)
    actual += list(elements)
    actual += list(resumed(in_windows({"a": 1, "b": 1}, a=30, b=30), saved(elements)))
    assert sorted(actual) == [*parts_of("a", 30), *parts_of("b", 30)]
