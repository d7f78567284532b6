import itertools
import json

import grain
import hypothesis
import numpy as np
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
    numbers = mixing.chosen(turns[0], len(turns), shard=shard, ends=ends)
    return [named[number] for number in numbers.tolist()]


@given(WEIGHTS, SHARDS, TURNS)
def test_in_a_thousand_elements_no_dataset_is_ever_4_from_its_share(
    weights, shard, begin
):
    # 4 is what points of the golden ratio come to in the worst interval there is; it
    # grows with the logarithm of the number of elements, to about 7 in a million.
    chosen = np.array(names_of(weights, range(begin, begin + 1000), shard))
    shares, total = np.arange(1, 1001), sum(weights.values())
    worst = max(
        abs(np.cumsum(chosen == name) - shares * weight / total).max()
        for name, weight in weights.items()
    )
    hypothesis.target(worst)
    assert worst < 4


@given(st.lists(st.sampled_from([1, 3, 1e-9, 1e-30, 5e-324, 1e300]), min_size=1))
def test_every_weight_has_turns(weights):
    ends = [0, *mixing.bounds(tuple(weights)).tolist(), 2**64]
    assert len(ends) == len(weights) + 1
    assert all(one < two for one, two in itertools.pairwise(ends))


def part(name, length=99):
    """A dataset of the elements (name, 0), (name, 1) and so on."""
    numbers = grain.MapDataset.range(length).map(lambda n: (name, int(n)))
    return numbers.to_iter_dataset(pipelines.IN_CALLER)


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
        parts = {name: part(name) for name in weights}
        elements = itertools.islice(mixing.Mixture(parts, weights, shard=shard), 24)
        assert "".join(name for name, _ in elements) == expected
        ordered = dict(sorted(weights.items()))
        assert "".join(names_of(ordered, range(24), shard)) == expected


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
    parts = {name: part(name, length) for name, (_, length) in datasets.items()}
    mixture = mixing.Mixture(parts, weights, shard=shard)
    expected = list(mixture)
    assert sorted(expected) == sorted(itertools.chain(*parts.values()))
    elements = iter(mixture)
    states, found = [(0, saved(elements))], []
    while some := shard_steps.take(elements, at_a_time):
        found += some
        states.append((len(found), saved(elements)))
    assert found == expected
    taken = {name: 2 * length for name, (_, length) in datasets.items()}
    assert mixing.taken([states[-1][1]] * 2) == taken
    for number, state in reversed(states):
        later = iter(mixture)
        later.set_state(state)
        assert saved(later) == state
        assert list(later) == expected[number:]
