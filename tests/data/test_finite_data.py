"""Data that ends: each example once until the end, and nothing after it.

Mixtures are random and nested, and their weights change on the way, to zero too.
"""

import dataclasses
import itertools

import grain
import hypothesis
import numpy as np
from grain import experimental
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_ckpt.core import errors
from elastic_ckpt.data import mixing, sharded_data, shuffling
from elastic_ckpt.data.lm import language, packing, token_blocks
from tests import pipelines, stages

NUM_SHARDS = 12
NAMES = "abcd"


def is_kept(element):
    return element["x"][0] % 4 != 3


def padded(element):
    return {"x": np.pad(element["x"], (0, 3 - len(element["x"])))}


def windows(group, size=5):
    return shuffling.WindowShuffle(group, window_size=size, seed=1)


def fitted(group, packer):
    return packer(group, length_struct={"x": 6}, num_packing_bins=3)


def tokens(group, num_threads):
    documents = language.Documents(column="x", tokenizer=None)
    made = token_blocks.Tokens(group, documents=documents, num_threads=num_threads)
    return made.map(lambda actual: {"x": actual})


# Steps over the elements of a mixture; most of them have a buffer.
STEPS = {
    "nothing": lambda group: group.map(padded),
    "window": lambda group: windows(group).map(padded),
    "windows": lambda group: windows(windows(group, 3)).map(padded),
    "filter": lambda group: windows(group.filter(is_kept)).map(padded),
    "first_fit": lambda group: fitted(group, experimental.FirstFitPackIterDataset),
    "best_fit": lambda group: fitted(
        windows(group), experimental.BestFitPackIterDataset
    ),
    "tokens": lambda group: windows(tokens(group, num_threads=1)).map(padded),
    "blocks": lambda group: tokens(group, num_threads=0).map(padded),
    "concat": lambda group: packing.ConcatThenSplit(group, features=("x",), length=4),
}

BUFFERS = {*STEPS} - {"nothing"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Nested:
    """Shards of a mixture; workers import it from here.

    Attributes:
      lengths: examples of each dataset, over all shards.
      tree: names, and mixtures of them.
      weights: of each name, and of each mixture by the names in it.
      steps: what is done with the elements.
    """

    lengths: dict
    tree: tuple
    weights: dict
    steps: str = "nothing"

    def __call__(self, shard):
        return STEPS[self.steps](self._mixed(self.tree, shard))

    def _mixed(self, group, shard):
        if isinstance(group, str):
            first = 1000 * (1 + NAMES.index(group))
            # Shards from 4 on have those that are left.
            begin = first + (shard + 8) % NUM_SHARDS
            numbers = range(begin, first + self.lengths[group], NUM_SHARDS)
            return (
                grain.MapDataset.source(numbers)
                .map(lambda number: {"x": np.full(1 + number % 3, number)})
                .to_iter_dataset(pipelines.IN_CALLER)
            )
        parts = {names(part): self._mixed(part, shard) for part in group}
        weights = {name: self.weights[name] for name in parts}
        return mixing.Mixture(parts, weights, shard=shard)

    def expected(self, *datasets):
        """Every value of the datasets that is kept, in order."""
        numbers = [
            1000 * (1 + NAMES.index(name)) + number
            for name in datasets or names(self.tree)
            for number in range(self.lengths[name])
        ]
        kept = [n for n in numbers if self.steps != "filter" or n % 4 != 3]
        return sorted(n for n in kept for _ in range(1 + n % 3))


def names(group):
    """The names of the datasets in a tree, as one."""
    return group if isinstance(group, str) else "".join(map(names, group))


def mixtures(group):
    """Every mixture in a tree."""
    return (
        []
        if isinstance(group, str)
        else [group, *itertools.chain(*map(mixtures, group))]
    )


TREES = st.sampled_from(
    [("a",), ("a", "b"), ("a", ("b", "c")), (("a", "b"), ("c", "d"))]
)
WEIGHTS = st.sampled_from([0, 0, 1, 1, 3, 1e-9, 1e-30])


@st.composite
def weighed(draw, tree, weights=WEIGHTS):
    """Weights for a tree, of which some are 0 but not all of a mixture."""
    actual = {}
    for mixture in mixtures(tree):
        for name in map(names, mixture):
            actual[name] = draw(weights)
        if not any(actual[name] for name in map(names, mixture)):
            actual[names(mixture[-1])] = 1
    return actual


def data(make_shard):
    return sharded_data.sharded(
        make_shard, num_shards=NUM_SHARDS, pipeline="nested", end="padded"
    )


@st.composite
def runs(draw):
    """Stages, and the pipeline of each; at last all weights are above 0."""
    tree = draw(TREES)
    steps = draw(st.sampled_from(sorted(STEPS)))
    # Some shard has an example; without one the shapes are unknown.
    lengths = {name: draw(st.integers(1, 60)) for name in NAMES}
    run = draw(st.lists(stages.stages(), min_size=1, max_size=4))
    run.append(dataclasses.replace(draw(stages.stages()), num_batches=1000))
    above_zero = WEIGHTS.filter(bool)
    # No weight of a mixture in another is raised from 0 while a step has a buffer: its
    # examples would come twice.
    is_nested = len(mixtures(tree)) > 1
    weights = above_zero if is_nested and steps in BUFFERS else WEIGHTS
    kinds = [weights] * (len(run) - 1) + [above_zero]
    return run, [
        Nested(
            lengths=lengths, tree=tree, weights=draw(weighed(tree, group)), steps=steps
        )
        for group in kinds
    ]


def check(run, shards, make_directory):
    """The batches of all stages, if their weights are not refused."""
    of_stages = [data(shard) for shard in shards]
    try:
        return stages.check(of_stages, run, make_directory)
    except errors.DataError as error:
        # Only of what cannot be read again as it was: the end of data in a buffer.
        if shards[0].steps == "nothing" or "were raised from 0 after" not in str(error):
            raise
        hypothesis.reject()


def values(batches):
    """The values of the examples of batches, in order."""
    real = [batch["x"][batch["mask"]] for batch in batches]
    return sorted(number for rows in real for number in rows[rows > 0].tolist())


@settings(max_examples=12)
@given(runs())
def test_each_example_comes_once_until_the_end_on_any_hosts(tmp_path_factory, drawn):
    run, shards = drawn
    actual = check(run, shards, tmp_path_factory.mktemp)
    assert values(actual) == shards[0].expected()
