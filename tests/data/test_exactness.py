"""Random pipelines, stages and runs: the bytes of one host, and each token once.

Everything varies at once: formats, filters, nested mixtures, chunks, windows, packing,
epochs and stages; and in a run hosts, batch sizes, weights, reading ahead, resumes,
kills, and steps that are done again. The oracle is one host that is never stopped but
to change what the run changes. `ELASTIC_CKPT_EXAMPLES` asks for more runs.
"""

import collections
import contextlib
import dataclasses
import functools
import operator
import os

import grain
import hypothesis
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_ckpt.data import elastic_data, mixing, records, sharded_data, stages
from elastic_ckpt.data.lm import documents as lm_documents
from elastic_ckpt.data.lm import rows
from tests import formats, pipelines, source_contract, worlds

EXAMPLES = int(os.environ.get("ELASTIC_CKPT_EXAMPLES", settings().max_examples))
NUM_SHARDS = 12
# Multiples of the shards, divisors, and sizes that are neither.
SIZES = [12, 24, 36, 2, 4, 6, 8, 10, 16, 18, 30]
# Mixtures of datasets, or of mixtures of them.
TREES = [
    {"web": "web"},
    {"books": "books", "code": "code", "web": "web"},
    {"text": {"books": "books", "web": "web"}, "code": "code"},
    {"all": {"text": {"web": "web", "books": "books"}, "other": {"code": "code"}}},
]
IN_MEMORY = "in memory"
NAMES = [*formats.DATASETS]


def leaves(tree):
    """The names of the datasets of a tree."""
    for below in tree.values():
        yield from [below] if isinstance(below, str) else leaves(below)


def in_memory(name, number):
    """A document of 2 to 4 tokens; no token is in two documents, and none is 0."""
    place = NAMES.index(name)
    first, length = 1 + 10 * (1000 * place + number), 2 + (number + place + 1) % 3
    return {"tokens": np.arange(first, first + length, dtype=np.int32)}


def same(element):
    return element


def padded(document):
    targets = np.pad(document[1:], (0, 31 - max(len(document), 1)))
    return {"targets": targets, "targets_segmentation": targets > 0}


@dataclasses.dataclass(frozen=True, kw_only=True)
class MakeShard:
    """The pipeline of a shard; workers import it from here."""

    # Of the files in `parts`, or `IN_MEMORY`: documents of these lengths.
    file_format: str
    parts: tuple = ()
    lengths: dict
    # Names of mixtures, and of datasets, and the weights of all of them.
    tree: dict
    weights: dict
    # Datasets of which a third is left out.
    filtered: frozenset = frozenset()
    reading: records.ReadOptions
    # Whether documents are mixed before they become tokens.
    tokens_late: bool = False
    # Whether functions are applied to single documents, and to rows.
    has_steps: bool = False
    # The arguments of `Rows`; without it a document is a row.
    rows: dict | None

    def __call__(self, shard):
        made = self._mixed(self.tree, shard)
        if self.tokens_late:
            made = lm_documents.Tokens(made, documents=formats.TOKENS)
        if self.has_steps:
            made = made.map(same)
        if self.rows is None:
            return made.map(padded)
        made = rows.Rows(made, shard=shard, **self.rows)
        return made.map(same) if self.has_steps else made

    def _mixed(self, tree, shard):
        parts = {}
        for name, below in tree.items():
            make = self._documents if isinstance(below, str) else self._mixed
            parts[name] = make(below, shard)
        weights = {name: self.weights[name] for name in parts}
        if not any(weights.values()):
            weights[max(weights)] = 1
        return mixing.Mixture(parts, weights, shard=shard)

    def _documents(self, name, shard):
        if self.file_format == IN_MEMORY:
            # Shards from 4 on have those that are left.
            numbers = range((shard + 8) % NUM_SHARDS, self.lengths[name], NUM_SHARDS)
            held = grain.MapDataset.source(numbers)
            held = held.map(functools.partial(in_memory, name))
            read = held.to_iter_dataset(pipelines.IN_CALLER)
        else:
            (source,) = (part.source for part in self.parts if part.name == name)
            read = records.Records(
                source, shard=shard, num_shards=NUM_SHARDS, read_options=self.reading
            )
        kept = read.filter(formats.is_kept) if name in self.filtered else read
        if self.tokens_late:
            return kept
        return lm_documents.Tokens(kept, documents=formats.TOKENS)

    def targets(self):
        """How often each token is a target until the end, if none is cut off."""
        found = collections.Counter()
        for name in leaves(self.tree):
            elements = [{"tokens": each} for each in formats.documents(name)]
            if self.file_format == IN_MEMORY:
                elements = [in_memory(name, n) for n in range(self.lengths[name])]
            for element in elements:
                if name not in self.filtered or formats.is_kept(element):
                    found.update(element["tokens"][1:].tolist())
        return {token: n * self.reading.num_epochs for token, n in found.items()}


@dataclasses.dataclass(frozen=True, kw_only=True)
class World:
    """Some steps of a run, on the same hosts."""

    # Of each stage.
    weights: tuple
    size: int
    # As many of them as divide the size.
    num_hosts: int = 1
    # How rows lie on hosts: in order if it is 0.
    order_seed: int = 0
    num_steps: int
    # Of the steps before, so many are done again, with other rows.
    num_again: int = 0
    # Batches that are taken, and lost as the hosts are killed.
    num_lost: int = 0
    read_ahead: int = 0
    num_workers: int = 0
    in_files: bool = False

    def opened(self, data):
        hosts = max(h for h in range(1, self.num_hosts + 1) if self.size % h == 0)
        row_hosts = np.arange(self.size) * hosts // self.size
        if self.order_seed:
            row_hosts = np.random.default_rng(self.order_seed).permutation(row_hosts)
        return worlds.World(
            data, hosts, self.size, row_hosts, read_ahead=self.read_ahead
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """The pipelines of stages, the steps at which they begin, and worlds."""

    pipelines: tuple
    begins: tuple
    worlds: tuple

    @property
    def is_finite(self):
        return self.pipelines[0].reading.num_epochs is not None

    def data(self, world):
        made = []
        for begin, make_shard, weights in zip(
            self.begins, self.pipelines, world.weights, strict=False
        ):
            data = sharded_data.sharded(
                dataclasses.replace(make_shard, weights=weights),
                num_shards=NUM_SHARDS,
                pipeline="random",
                end="padded" if self.is_finite else "never",
                num_workers=world.num_workers,
            )
            made.append(stages.Stage(begin=begin, data=data))
        return stages.staged(made)


WEIGHTS = st.sampled_from([0, 0, 1, 1, 3, 1e-9, 1e-30])


@st.composite
def weights_of(draw, tree, weights=WEIGHTS):
    """Weights of all names of a tree."""
    found = {name: draw(weights) for name in tree}
    for below in tree.values():
        if not isinstance(below, str):
            found |= draw(weights_of(below, weights))
    return found


@st.composite
def arguments(draw):
    """Those of `Rows`."""
    packing = draw(st.sampled_from(["", *rows.PACKINGS]))
    fits = packing in (rows.FIRST_FIT, rows.BEST_FIT)
    return {
        "packing": packing,
        "length": draw(st.sampled_from([5, 12, 12, 31])),
        "truncate": draw(st.sampled_from([True, False, False])),
        "window": draw(st.sampled_from([0, 3, 7])),
        "max_examples": draw(st.sampled_from([0, 2])) if fits else 0,
    }


@st.composite
def made_shards(draw, num_stages, epochs=(None, 1, 1, 2)):
    """A pipeline for each of some stages."""
    kind = draw(st.sampled_from([*formats.FORMATS, IN_MEMORY, IN_MEMORY]))
    tree = draw(st.sampled_from(TREES))
    is_in_memory = kind == IN_MEMORY
    lengths = {name: draw(st.integers(1, 60)) for name in NAMES if is_in_memory}
    filtered = draw(st.frozensets(st.sampled_from(["books", "code"])))
    shared = MakeShard(
        file_format=kind,
        lengths=lengths,
        tree=tree,
        weights=draw(weights_of(tree)),
        # Some shard has an example; without one the shapes are unknown.
        filtered=frozenset(n for n in filtered if lengths.get(n, 60) > 3),
        reading=records.ReadOptions(
            shuffle_seed=draw(st.sampled_from([None, 3])),
            num_epochs=1 if is_in_memory else draw(st.sampled_from(epochs)),
        ),
        tokens_late=draw(st.booleans()),
        has_steps=draw(st.booleans()),
        rows=None,
    )
    if not draw(st.integers(0, 7)):
        return (shared,) * num_stages
    return tuple(
        dataclasses.replace(
            shared,
            rows=draw(arguments()),
            # Stages need not have all datasets.
            tree=draw(st.sampled_from([tree, tree, {min(tree): tree[min(tree)]}])),
        )
        for _ in range(num_stages)
    )


def world_of(
    tree, num_stages, *, weights=WEIGHTS, max_hosts=12, num_workers=(0,), **more
):
    """Some steps of a run of stages over a tree of mixtures."""
    described = {
        "weights": st.tuples(*[weights_of(tree, weights)] * num_stages),
        "size": st.sampled_from(SIZES),
        "num_hosts": st.integers(1, max_hosts),
        "order_seed": st.integers(0, 3),
        "num_steps": st.integers(0, 6),
        "num_again": st.sampled_from([0, 0, 1, 3]),
        "num_lost": st.sampled_from([0, 0, 2]),
        "read_ahead": st.sampled_from([0, 0, 2]),
        "num_workers": st.sampled_from(num_workers),
        "in_files": st.booleans(),
    }
    return st.builds(World, **described | more)


@st.composite
def runs(draw, max_worlds=5, **more):
    """Stages and worlds; finite data is read to its end."""
    num_stages = draw(st.integers(1, 3))
    made = draw(made_shards(num_stages))
    tree = max((each.tree for each in made), key=len)
    later = st.lists(st.integers(1, 12), min_size=2, max_size=2, unique=True)
    world = world_of(tree, num_stages, **more)
    found = draw(st.lists(world, min_size=1, max_size=max_worlds))
    if draw(st.booleans()):
        found = [dataclasses.replace(each, weights=found[0].weights) for each in found]
    if made[0].reading.num_epochs is not None:
        last = {"weights": WEIGHTS.filter(bool), "num_steps": st.just(1000)}
        found.append(draw(world_of(tree, num_stages, **more | last)))
    return Run(pipelines=made, begins=(0, *sorted(draw(later))), worlds=tuple(found))


def in_memory_run(lengths, tree, of_stages, *described):
    """A run of one host over documents in memory, to its end."""
    made = MakeShard(
        file_format=IN_MEMORY,
        lengths=dict(zip(NAMES, lengths, strict=True)),
        tree=tree,
        weights={},
        reading=records.ReadOptions(num_epochs=1),
        rows=None,
    )
    return Run(
        pipelines=tuple(
            dataclasses.replace(made, rows=of_stage | {"truncate": False})
            for of_stage in of_stages
        ),
        begins=tuple(range(len(of_stages))),
        worlds=tuple(
            World(weights=(weights,) * len(of_stages), size=12, num_steps=number)
            for number, weights in described
        ),
    )


# A dataset of a nested mixture gets its weight after the other had ended.
RAISED_AT_THE_END = in_memory_run(
    (25, 56, 1),
    {"ab": {"a": "books", "b": "code"}, "cd": {"c": "web", "d": "web"}},
    [{"packing": "best_fit", "length": 6, "window": 5}],
    (3, {"ab": 0, "cd": 1, "a": 0, "b": 1, "c": 0, "d": 1}),
    (3, {"ab": 1, "cd": 1e-9, "a": 1, "b": 1, "c": 0, "d": 1}),
    (1000, dict.fromkeys(("ab", "cd", *"abcd"), 1)),
)
# A stage begins before the one before it has used what it was handed over.
SHORT_STAGES = in_memory_run(
    (60, 60, 60),
    TREES[1],
    [
        {"packing": "concat_then_split", "length": 5, "window": window}
        for window in (30, 0, 0)
    ],
    (1000, {"books": 1, "code": 1, "web": 1}),
)


def batches_of(run, make_directory=None):
    """The batches of a run, and None where data ends; the oracle has no directory."""
    found, step, world, load, now = [], 0, None, None, None
    for number, part in enumerate(run.worlds):
        step = max(0, step - part.num_again)
        if make_directory is None:
            part = World(weights=part.weights, size=part.size, num_steps=part.num_steps)
        data = run.data(part)
        for _ in range(part.num_steps):
            at, of_hosts = data.at(step), number if make_directory else part.size
            if (needed := (at.number, part.weights, of_hosts)) != now:
                if world is not None:
                    if make_directory and part.in_files:
                        directory = make_directory("data")
                        world.write(directory)
                        load = operator.methodcaller("read", directory)
                    else:
                        load = operator.methodcaller("load", world.save())
                    for _ in range(part.num_lost):
                        with contextlib.suppress(StopIteration):
                            world.batch()
                    world.close()
                world, now = part.opened(at), needed
                if load:
                    load(world)
            try:
                found.append(world.batch())
            except StopIteration:
                # With other weights it may go on.
                found.append(None)
                for _ in range(2):
                    with pytest.raises(StopIteration):
                        world.batch()
                break
            step += 1
    if world is not None:
        world.close()
    return found


def over(files, make_shard):
    """A pipeline that reads the files of its format, if it has one."""
    parts = files.get(make_shard.file_format, ())
    return dataclasses.replace(make_shard, parts=parts)


def check(run, make_directory, files):
    """A run has the batches of the oracle, and if it ends each token once an epoch."""
    made = tuple(over(files, each) for each in run.pipelines)
    run = dataclasses.replace(run, pipelines=made)
    expected, actual = batches_of(run), batches_of(run, make_directory)
    assert [batch and worlds.content(batch) for batch in actual] == [
        batch and worlds.content(batch) for batch in expected
    ]
    delivered = list(filter(None, actual))
    ids = collections.Counter()
    for batch in delivered:
        ids.update(elastic_data.join_ids(batch.pop("example_id")).tolist())
    num_padding = ids.pop(elastic_data.NO_ID, 0)
    assert set(ids.values()) <= {1}
    if not run.is_finite:
        return
    assert actual[-1] is None
    assert sum(np.sum(~batch["mask"]) for batch in delivered) == num_padding
    used = collections.Counter()
    for batch in delivered:
        used.update(batch["targets"][batch["targets_segmentation"] > 0].tolist())
        assert not any(feature[~batch["mask"]].any() for feature in batch.values())
    targets = max(made, key=lambda each: len(each.tree)).targets()
    if any(
        each.tree != made[0].tree or (each.rows and each.rows["truncate"])
        for each in made
    ):
        assert used <= collections.Counter(targets)
    else:
        assert used == targets


@settings(max_examples=EXAMPLES)
@hypothesis.example(RAISED_AT_THE_END)
@hypothesis.example(SHORT_STAGES)
@given(runs())
def test_any_run_has_the_bytes_of_one_host_and_each_token_once(
    files, tmp_path_factory, run
):
    check(run, tmp_path_factory.mktemp, files)


@pytest.mark.slow
@settings(max_examples=4, phases=[hypothesis.Phase.generate])
# Simple examples come first, and these have workers too.
@given(
    runs(max_hosts=2, num_workers=(1, 0, 2), max_worlds=2).filter(
        lambda run: any(each.num_workers and each.num_steps for each in run.worlds)
    )
)
def test_any_run_with_worker_processes_has_the_bytes_of_one_host(
    files, tmp_path_factory, run
):
    check(run, tmp_path_factory.mktemp, files)


@settings(max_examples=EXAMPLES)
@given(made_shards(1, epochs=(1, 2)))
def test_a_shard_resumes_from_the_state_before_every_row(files, made):
    pipeline = over(files, made[0])(7)
    source_contract.resumed_everywhere(pipeline)


@pytest.mark.parametrize("file_format", formats.FORMATS)
def test_documents_have_one_type_whichever_are_read_together(files, file_format):
    make_shard = dataclasses.replace(
        SHORT_STAGES.pipelines[0],
        weights=dict.fromkeys(NAMES, 1),
        file_format=file_format,
        rows=None,
    )
    types = {row["targets"].dtype for row in over(files, make_shard)(0)}
    assert types == {np.dtype(np.int32)}
