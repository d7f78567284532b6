import collections
import itertools
import json

import grain
import hypothesis
from hypothesis import given
from hypothesis import strategies as st

from elastic_ckpt.data import mixing, shard_steps
from tests import pipelines

NAMES = ["books", "code", "mathematics", "news", "web"]
WEIGHTS = st.lists(
    st.one_of(st.integers(1, 10), st.floats(1e-6, 1e6)), min_size=1, max_size=5
).map(lambda weights: dict(zip(NAMES, weights, strict=False)))
SHARDS = st.integers(0, 100_000)
TURNS = st.integers(0, 10**12)


def names_of(weights, turns, shard):
    """The dataset of each turn of a shard."""
    ends, named = mixing.bounds(tuple(weights.values())), [*weights]
    numbers = [mixing.chosen(turn, shard=shard, ends=ends) for turn in turns]
    together = mixing.all_chosen(turns[0], len(turns), shard=shard, ends=ends)
    assert together.tolist() == numbers
    return [named[number] for number in numbers]


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
    chosen = names_of(weights, range(begin, begin + 1000), shard)
    worst = furthest_from_share(chosen, weights)
    hypothesis.target(worst)
    assert worst < 4


@given(st.lists(st.sampled_from([1, 3, 1e-9, 1e-30, 5e-324, 1e300]), min_size=1))
def test_every_weight_has_turns(weights):
    begin = 0
    for end in mixing.bounds(tuple(weights)):
        assert end > begin
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


def test_the_schedule_is_frozen():
    # The order in which datasets are named does not matter.
    weights = {"c": 0.2, "a": 0.5, "b": 0.3}
    for shard, expected in enumerate(
        (
            "abacaabacbabaabacbabacba",
            "aabacbabacbacaabacbabaab",
            "caabacbabaabacaabacbacaa",
        )
    ):
        mixture = mixing.Mixture(parts(*weights), weights, shard=shard)
        assert "".join(names(take(iter(mixture), 24))) == expected
        ordered = dict(sorted(weights.items()))
        assert "".join(names_of(ordered, range(24), shard)) == expected


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
            mixing.renew(elements)
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
    st.integers(1, 20),
)
def test_datasets_that_end_leave_the_others_to_go_on_from_any_state(
    datasets, shard, at_a_time
):
    weights = {name: weight for name, (weight, _) in datasets.items()}
    lengths = {name: length for name, (_, length) in datasets.items()}
    mixture = mixing.Mixture(parts(**lengths), weights, shard=shard)
    expected = list(mixture)
    assert sorted(expected) == sorted(
        (name, number) for name, length in lengths.items() for number in range(length)
    )
    elements = iter(mixture)
    states, found = [(0, saved(elements))], []
    while some := shard_steps.take(elements, at_a_time):
        found += some
        states.append((len(found), saved(elements)))
    assert found == expected
    for number, state in reversed(states):
        for later in (elements, iter(mixture)):
            later.set_state(state)
            assert saved(later) == state
            assert list(later) == expected[number:]
