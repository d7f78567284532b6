"""Data that ends: each example once until the end, and nothing after it.

Mixtures are random and nested, and their weights change on the way, to zero too.
"""

import dataclasses
import itertools

import grain
import hypothesis
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_ckpt.data import mixing, sharded_data
from elastic_ckpt.data.lm import documents as lm_documents
from elastic_ckpt.data.lm import rows
from tests import pipelines, stages

NUM_SHARDS = 12
NAMES = "abcd"


def is_kept(document):
    return document[0] % 4 != 3


def padded(document):
    return {"x": np.pad(document[1:], (0, 4 - len(document)))}


def made_rows(group, shard, packing, length, window):
    made = rows.Rows(
        group,
        length=length,
        packing=packing,
        window=window,
        truncate=False,
        shard=shard,
    )
    return made.map(lambda row: {"x": row["targets"]})


def tokens(group):
    return lm_documents.Tokens(
        group.map(lambda document: {"x": document}),
        documents=lm_documents.Documents(column="x", tokenizer=None),
    )


# Steps over the elements of a mixture.
STEPS = {
    "nothing": lambda group, _: group.map(padded),
    "filter": lambda group, _: tokens(group.filter(is_kept)).map(padded),
    "alone": lambda group, shard: made_rows(group, shard, "", 3, 5),
    "first_fit": lambda group, shard: made_rows(group, shard, "first_fit", 6, 0),
    "best_fit": lambda group, shard: made_rows(tokens(group), shard, "best_fit", 6, 5),
    "concat": lambda group, shard: made_rows(group, shard, "concat_then_split", 4, 3),
}


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
        return STEPS[self.steps](self._mixed(self.tree, shard), shard)

    def _mixed(self, group, shard):
        if isinstance(group, str):
            first = 1000 * (1 + NAMES.index(group))
            # Shards from 4 on have those that are left.
            begin = first + (shard + 8) % NUM_SHARDS
            numbers = range(begin, first + self.lengths[group], NUM_SHARDS)
            return (
                grain.MapDataset.source(numbers)
                .map(lambda number: np.full(2 + number % 3, number))
                .to_iter_dataset(pipelines.IN_CALLER)
            )
        parts = {names(part): self._mixed(part, shard) for part in group}
        weights = {name: self.weights[name] for name in parts}
        return mixing.Mixture(parts, weights, shard=shard)

    def expected(self):
        """Every value that is kept, in order."""
        numbers = [
            1000 * (1 + NAMES.index(name)) + number
            for name in names(self.tree)
            for number in range(self.lengths[name])
        ]
        kept = [n for n in numbers if self.steps != "filter" or n % 4 != 3]
        return sorted(n for n in kept for _ in range(1 + n % 3))


def names(group):
    """The names of the datasets in a tree, as one."""
    return group if isinstance(group, str) else "".join(map(names, group))


def mixtures(group):
    """Every mixture in a tree."""
    if isinstance(group, str):
        return []
    return [group, *itertools.chain(*map(mixtures, group))]


TREES = st.sampled_from(
    [("a",), ("a", "b"), ("a", ("b", "c")), (("a", "b"), ("c", "d"))]
)
WEIGHTS = st.sampled_from([0, 0, 1, 1, 3, 1e-9, 1e-30])


@st.composite
def weighed(draw, tree, weights):
    """Weights for a tree, of which some are 0 but not all of a mixture."""
    actual = {}
    for mixture in mixtures(tree):
        of_parts = {names(part): draw(weights) for part in mixture}
        if not any(of_parts.values()):
            of_parts[names(mixture[-1])] = 1
        actual |= of_parts
    return actual


@st.composite
def runs(draw):
    """Stages, and the pipeline of each; at last all weights are above 0."""
    tree = draw(TREES)
    steps = draw(st.sampled_from(sorted(STEPS)))
    # Some shard has an example; without one the shapes are unknown.
    lengths = {name: draw(st.integers(1, 60)) for name in NAMES}
    run = draw(st.lists(stages.stages(), min_size=1, max_size=4))
    run.append(dataclasses.replace(draw(stages.stages()), num_batches=1000))
    kinds = [WEIGHTS] * (len(run) - 1) + [WEIGHTS.filter(bool)]
    return run, [
        Nested(
            lengths=lengths, tree=tree, weights=draw(weighed(tree, group)), steps=steps
        )
        for group in kinds
    ]


def raised_at_the_end():
    """A dataset of a nested mixture gets its weight after the other had ended."""
    described = [
        (3, {"ab": 0, "cd": 1, "a": 0, "b": 1, "c": 0, "d": 1}),
        (3, {"ab": 1, "cd": 1e-9, "a": 1, "b": 1, "c": 0, "d": 1}),
        (1000, dict.fromkeys(("ab", "cd", *NAMES), 1)),
    ]
    stage = stages.Stage(
        num_hosts=1,
        size=12,
        num_batches=0,
        order_seed=0,
        read_ahead_batches=0,
        num_workers=0,
        in_files=True,
    )
    shards = Nested(
        lengths=dict(zip(NAMES, (25, 56, 1, 1), strict=True)),
        tree=(("a", "b"), ("c", "d")),
        weights={},
        steps="best_fit",
    )
    return (
        [dataclasses.replace(stage, num_batches=count) for count, _ in described],
        [dataclasses.replace(shards, weights=each) for _, each in described],
    )


@settings(max_examples=12)
@hypothesis.example(raised_at_the_end())
@given(runs())
def test_each_example_comes_once_until_the_end_on_any_hosts(tmp_path_factory, drawn):
    run, shards = drawn
    data = [
        sharded_data.sharded(
            make_shard, num_shards=NUM_SHARDS, pipeline="nested", end="padded"
        )
        for make_shard in shards
    ]
    batches = stages.check(data, run, tmp_path_factory.mktemp)
    values = np.concatenate([batch["x"][batch["mask"]].ravel() for batch in batches])
    assert sorted(values[values > 0].tolist()) == shards[0].expected()
