"""Random pipelines, stages and runs have the bytes of one host, example by example.

The other tests of exactness each hold most of a pipeline still. Here everything varies
at once: formats, filters, nested mixtures, chunks, windows, packing, epochs and stages,
and in a run hosts, batch sizes, reading ahead, resumes and steps that are done again.
"""

import dataclasses

import grain
from hypothesis import given, settings
from hypothesis import strategies as st

import elastic_ckpt as ec
from elastic_ckpt.data import mixing, records, stages
from elastic_ckpt.data.lm import documents as lm_documents
from elastic_ckpt.data.lm import rows
from tests import formats, worlds

NUM_SHARDS = 6
# A mixture of datasets, or of mixtures of them.
TREES = [
    {"books": "books", "web": "web"},
    {"books": "books", "code": "code", "web": "web"},
    {"text": {"books": "books", "web": "web"}, "code": "code"},
    {"all": {"text": {"web": "web", "books": "books"}, "code": "code"}, "more": "web"},
]
DOCUMENTS = lm_documents.Documents(column="tokens", tokenizer=None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MakeShard:
    """The pipeline of a shard; workers import it from here."""

    parts: tuple
    tree: dict
    filtered: frozenset
    reading: records.ReadOptions
    weights: tuple
    length: int
    truncate: bool
    window: int
    packing: str
    max_examples: int

    def __call__(self, shard: int) -> grain.IterDataset:
        is_fitted = self.packing in (rows.FIRST_FIT, rows.BEST_FIT)
        return rows.Rows(
            self._mixed(self.tree, shard),
            length=self.length,
            packing=self.packing,
            window=self.window,
            truncate=self.truncate,
            max_examples=self.max_examples if is_fitted else 0,
            shard=shard,
        )

    def _mixed(self, tree, shard):
        weights = dict(zip(tree, self.weights, strict=False))
        read = {
            name: self._tokens(below, shard)
            if isinstance(below, str)
            else self._mixed(below, shard)
            for name, below in tree.items()
        }
        return mixing.Mixture(read, weights, shard=shard)

    def _tokens(self, name, shard):
        (source,) = (part.source for part in self.parts if part.name == name)
        read = records.Records(
            source, shard=shard, num_shards=NUM_SHARDS, read_options=self.reading
        )
        kept = read.filter(formats.is_kept) if name in self.filtered else read
        return lm_documents.Tokens(kept, documents=DOCUMENTS)


STEPS = st.fixed_dictionaries(
    {
        "weights": st.permutations([0.2, 0.3, 0.5]).map(tuple),
        "length": st.sampled_from([5, 12, 12, 31]),
        "truncate": st.booleans(),
        "window": st.sampled_from([0, 3, 7]),
        "packing": st.sampled_from(["", *rows.PACKINGS]),
        "max_examples": st.sampled_from([0, 2]),
    }
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class World:
    """Some steps of a run, on the same hosts."""

    num_hosts: int
    num_steps: int
    read_ahead: int
    # Of the steps before, so many are done again.
    num_again: int


@st.composite
def runs(draw):
    """The keywords of each stage with its first step and size, and the worlds."""
    described = draw(st.lists(STEPS, min_size=1, max_size=3))
    later = st.lists(st.integers(1, 12), min_size=2, max_size=2, unique=True)
    begins = [0, *sorted(draw(later))]
    shared = {
        "tree": draw(st.sampled_from(TREES)),
        "filtered": draw(st.frozensets(st.sampled_from(sorted(formats.DATASETS)))),
        "reading": records.ReadOptions(
            shuffle_seed=draw(st.sampled_from([None, 3])),
            num_epochs=draw(st.sampled_from([None, None, 1, 2])),
        ),
    }
    sizes = st.sampled_from([2, 4, 6, 10, 12, 18])
    worlds_of_run = st.builds(
        World,
        num_hosts=st.sampled_from([1, 2, 3, 6]),
        num_steps=st.integers(1, 6),
        read_ahead=st.sampled_from([0, 0, 2]),
        num_again=st.sampled_from([0, 0, 1, 3]),
    )
    return (
        [
            (begin, shared | each, draw(sizes))
            for begin, each in zip(begins, described, strict=False)
        ],
        draw(st.lists(worlds_of_run, min_size=1, max_size=5)),
    )


def data_of(parts, described):
    """The data of a run."""
    made = []
    for begin, keywords, _ in described:
        is_finite = keywords["reading"].num_epochs is not None
        data = ec.data.sharded(
            MakeShard(parts=parts, **keywords),
            num_shards=NUM_SHARDS,
            pipeline="random",
            end="padded" if is_finite else "never",
        )
        made.append(stages.Stage(begin=begin, data=data))
    return stages.staged(made)


def batches_of(data, sizes, run, *, is_oracle=False):
    """The batches of a run, as long as it has any.

    The oracle is one host, which goes on as it is while nothing changes, and reads by
    itself when it is asked.
    """
    found, step, world, saved = [], 0, None, None
    stage = -1
    for part in run:
        step = max(0, step - part.num_again)
        is_new = not is_oracle
        for _ in range(part.num_steps):
            of_step = data.at(step)
            if world is None or is_new or of_step.number != stage:
                if world is not None:
                    saved = world.save()
                    world.close()
                stage, is_new = of_step.number, False
                size = sizes[stage]
                # As many hosts as divide the batch.
                hosts = max(h for h in range(1, part.num_hosts + 1) if size % h == 0)
                ahead = 0 if is_oracle else part.read_ahead
                world = worlds.World(
                    of_step, 1 if is_oracle else hosts, size, read_ahead=ahead
                )
                if saved is not None:
                    world.load(saved)
            try:
                found.append(world.next())
            except StopIteration:
                world.close()
                return found
            step += 1
    if world is not None:
        world.close()
    return found


@given(file_format=st.sampled_from(formats.FORMATS), chosen=runs())
@settings(max_examples=16)
def test_a_random_run_has_the_bytes_of_one_host(files, file_format, chosen):
    described, run = chosen
    data = data_of(files[file_format], described)
    sizes = [size for _, _, size in described]
    expected = batches_of(data, sizes, run, is_oracle=True)
    assert batches_of(data, sizes, run) == expected
