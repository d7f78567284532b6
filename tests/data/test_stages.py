"""Stages: what changes at steps of a run, exactly once on any number of hosts."""

import asyncio
import collections
import contextlib
import dataclasses
import json
import pathlib
import unittest.mock

import grain
import jax
import jsonschema
import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from etils import epath
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh

import elastic_ckpt as ec
from elastic_ckpt.core import errors, topology
from elastic_ckpt.data import (
    batch_size,
    blocks,
    data_keys,
    pipeline_changes,
    records,
    sharded_data,
    stages,
)
from elastic_ckpt.data.lm import language, pipeline
from elastic_ckpt.training import schema, training_files
from tests import formats, worlds
from tests.data import test_format

TOKENS = language.Documents(column="tokens", tokenizer=None)
NUM_SHARDS = 6


def of_stage(
    parts,
    *,
    length=12,
    packing="concat_then_split",
    window=0,
    truncate=False,
    weights=formats.WEIGHTS,
    epochs=None,
):
    """The data of a stage, as `from_config` makes it."""
    made = pipeline.LanguagePipeline(
        parts=tuple(
            dataclasses.replace(part, weight=weights[part.name])
            for part in parts
            if part.name in weights
        ),
        num_shards=NUM_SHARDS,
        reading=records.ReadOptions(num_epochs=epochs, shuffle_seed=3),
        documents=TOKENS,
        length=length,
        packing=packing,
        window=window,
        truncate=truncate,
    )
    return sharded_data.ShardedData(
        make_shard=made,
        num_shards=NUM_SHARDS,
        pipeline=made.identity(),
        end=ec.data.End.PADDED if epochs else ec.data.End.NEVER,
    )


@contextlib.contextmanager
def example_by_example():
    """Pipelines whose steps take single examples."""
    with unittest.mock.patch.object(blocks, "of", return_value=None):
        yield


def batches_of(data, schedule):
    """The batches of a schedule: the step, the number of hosts and the size of each.

    A world goes on as it is while none of them, and no stage, changes.
    """
    found, world, saved, now = [], None, None, None
    for step, num_hosts, size in schedule:
        of_step = data.at(step)
        if now != (of_step.number, num_hosts, size):
            saved = world.save() if world else None
            world = worlds.World(of_step, num_hosts, size)
            if saved:
                world.load(saved)
            now = of_step.number, num_hosts, size
        found.append(world.next())
    return found


STAGES = st.lists(
    st.fixed_dictionaries(
        {
            "length": st.sampled_from([5, 12, 12, 31]),
            "packing": st.sampled_from(["", *language.PACKINGS]),
            "window": st.sampled_from([0, 4, 4]),
            "truncate": st.booleans(),
            "weights": st.sampled_from(
                [
                    {"web": 1.0},
                    {"books": 1.0, "code": 0.2},
                    {"books": 0.2, "code": 0.3, "web": 0.5},
                ]
            ),
        }
    ),
    min_size=1,
    max_size=4,
)


@st.composite
def schedules(draw):
    """The stages of a run, and its steps, some of which it does again."""
    chosen = draw(STAGES)
    begins = draw(
        st.lists(
            st.integers(1, 14),
            min_size=len(chosen) - 1,
            max_size=len(chosen) - 1,
            unique=True,
        )
    )
    sizes = draw(
        st.lists(
            st.sampled_from([2, 4, 6, 12, 18]),
            min_size=len(chosen),
            max_size=len(chosen),
        )
    )
    begins = [0, *sorted(begins)]
    step, steps = 0, []
    for _ in range(draw(st.integers(1, 4))):
        num_hosts = draw(st.sampled_from([1, 2, 3, 6]))
        for _ in range(draw(st.integers(1, 7))):
            size = next(
                each
                for begin, each in reversed(list(zip(begins, sizes, strict=True)))
                if begin <= step
            )
            # As many of them as divide the batch.
            hosts = max(h for h in range(1, num_hosts + 1) if size % h == 0)
            steps.append((step, hosts, size))
            step += 1
        step -= draw(st.sampled_from([0, 0, min(3, step)]))
    return list(zip(begins, chosen, strict=True)), steps


def check_schedule(parts, chosen):
    described, schedule = chosen
    data = stages.staged(
        [
            stages.Stage(begin=begin, data=of_stage(parts, **each))
            for begin, each in described
        ]
    )
    with example_by_example():
        expected = batches_of(data, [(step, 1, size) for step, _, size in schedule])
    assert batches_of(data, schedule) == expected


@given(chosen=schedules())
@settings(max_examples=10)
def test_stages_are_those_of_one_host_example_by_example(files, chosen):
    check_schedule(files["parquet"], chosen)


def pairs_of(found):
    """How often each pair of an input and its target is in some batches."""
    pairs = collections.Counter()
    for batch in found:
        is_real = batch["targets_segmentation"] > 0
        pairs.update(
            zip(
                batch["inputs"][is_real].tolist(),
                batch["targets"][is_real].tolist(),
                strict=True,
            )
        )
    return pairs


@given(
    lengths=st.lists(st.integers(3, 40), min_size=2, max_size=4),
    packings=st.lists(
        st.sampled_from(["", *language.PACKINGS]), min_size=4, max_size=4
    ),
    window=st.sampled_from([0, 5]),
    num_steps=st.integers(1, 5),
)
@settings(max_examples=8)
def test_each_token_is_trained_on_once_over_all_stages(
    files, lengths, packings, window, num_steps
):
    described = list(zip(lengths, packings, strict=False))
    data = stages.staged(
        [
            stages.Stage(
                begin=number * num_steps,
                data=of_stage(
                    files["parquet"],
                    length=length,
                    packing=packing,
                    window=window,
                    epochs=1,
                ),
            )
            for number, (length, packing) in enumerate(described)
        ]
    )
    local = ec.data.LocalBatches(data, global_batch_size=4)
    found = list(local)
    expected = collections.Counter()
    for document in formats.documents(*formats.DATASETS):
        expected.update(zip(document[:-1].tolist(), document[1:].tolist(), strict=True))
    assert pairs_of(found) == expected
    seen = [
        lengths[min(step // num_steps, len(lengths) - 1)] for step in range(len(found))
    ]
    assert [batch["inputs"].shape[1] for batch in found] == seen


def mesh():
    return Mesh(np.array(jax.devices()[:1]), ("data",))


def short_then_long(parts, begin=3):
    return stages.staged(
        [
            stages.Stage(begin=0, data=of_stage(parts), global_batch_size=6),
            stages.Stage(
                begin=begin,
                data=of_stage(parts, length=24, packing="first_fit"),
                global_batch_size=4,
            ),
        ]
    )


def taken(batches, number):
    return [
        {name: np.asarray(each) for name, each in next(batches).items()}
        for _ in range(number)
    ]


def same(one, other):
    return all(
        a.keys() == b.keys() and all((a[name] == b[name]).all() for name in a)
        for a, b in zip(one, other, strict=True)
    )


class Directory:
    """A directory of Orbax's that exists already."""

    def __init__(self, path):
        self.path = path

    async def await_creation(self):
        return self.path


def save(batches, path):
    path.mkdir()

    async def write():
        await (await batches.save(Directory(epath.Path(path))))

    asyncio.run(write())


def load(batches, path):
    async def read():
        await (await batches.load(epath.Path(path)))

    asyncio.run(read())


@pytest.mark.parametrize("step", [0, 2, 3, 4])
def test_a_saved_state_continues_in_its_stage(files, tmp_path, step):
    data = short_then_long(files["parquet"])
    batches = ec.batches(data, mesh=mesh(), global_batch_size=6)
    taken(batches, step)
    save(batches, tmp_path / "state")
    expected = taken(batches, 5)
    other = ec.batches(data, mesh=mesh(), global_batch_size=6)
    taken(other, 5)
    load(other, tmp_path / "state")
    assert same(taken(other, 2), expected[:2])
    # As long as no stage that has begun counts as one to begin.
    save(other, tmp_path / "later")
    third = ec.batches(data, mesh=mesh(), global_batch_size=6)
    load(third, tmp_path / "later")
    assert same(taken(third, 3), expected[2:])


def test_what_stages_save_is_of_the_schemas(files, tmp_path):
    data = short_then_long(files["parquet"])
    batches = ec.batches(data, mesh=mesh(), global_batch_size=6)
    taken(batches, 4)
    save(batches, tmp_path / "state")
    for path in (tmp_path / "state").iterdir():
        test_format.validate(path)
    saved = (tmp_path / "state" / "shards-00000-00005.json").read_text()
    assert '"held"' in saved
    assert '"of":' in saved
    local = ec.data.LocalBatches(data, global_batch_size=6)
    taken(local, 4)
    room = pathlib.Path(ec.data.__file__).parent
    schema_of_local = json.loads((room / "schemas" / "local_batches.json").read_text())
    jsonschema.validate(local.state_dict(), schema_of_local)


def test_a_stage_begins_at_its_step_after_a_rollback(files, tmp_path):
    data = short_then_long(files["parquet"])
    batches = ec.batches(data, mesh=mesh(), global_batch_size=6)
    taken(batches, 1)
    save(batches, tmp_path / "step-1")
    before = taken(batches, 4)
    load(batches.leaving_out(), tmp_path / "step-1")
    after = taken(batches, 4)
    assert [batch["inputs"].shape for batch in after] == [(6, 12)] * 2 + [(4, 24)] * 2
    ids = [
        tuple(row) for batch in before + after for row in batch["example_id"].tolist()
    ]
    assert len(set(ids)) == len(ids)
    assert batches.left_out == ((6, 6 + 2 * 6 + 2 * 4),)


def test_a_run_without_stages_is_extended_by_some(files, tmp_path):
    parts = files["parquet"]
    batches = ec.batches(of_stage(parts), mesh=mesh(), global_batch_size=6)
    taken(batches, 2)
    save(batches, tmp_path / "state")
    rest = taken(batches, 1)
    staged = ec.batches(short_then_long(parts), mesh=mesh(), global_batch_size=6)
    load(staged, tmp_path / "state")
    with pytest.raises(errors.DataError, match=r"call begin_at\(step\)"):
        next(staged)
    staged.begin_at(2)
    assert same(taken(staged, 1), rest)
    assert next(staged)["inputs"].shape == (4, 24)


def test_later_stages_change_at_a_resume_and_begun_ones_do_not(files, tmp_path):
    parts = files["parquet"]
    batches = ec.batches(short_then_long(parts), mesh=mesh(), global_batch_size=6)
    taken(batches, 2)
    save(batches, tmp_path / "state")
    later = ec.batches(short_then_long(parts, 4), mesh=mesh(), global_batch_size=6)
    load(later, tmp_path / "state")
    shapes = [batch["inputs"].shape for batch in taken(later, 3)]
    assert shapes == [(6, 12)] * 2 + [(4, 24)]
    earlier = ec.batches(short_then_long(parts, 1), mesh=mesh(), global_batch_size=6)
    with pytest.raises(
        errors.DataError, match=r"run is at step 2, and stages that begin at \[1\] are"
    ):
        load(earlier, tmp_path / "state")
    save(later, tmp_path / "in-second")
    with pytest.raises(
        errors.DataError, match=r"did so at steps \[0, 4\], now \[0, 3\]"
    ):
        load(batches, tmp_path / "in-second")
    with pytest.raises(errors.DataError, match=r"steps \[0, 4\], now \[0\]"):
        load(
            ec.batches(of_stage(parts), mesh=mesh(), global_batch_size=6),
            tmp_path / "in-second",
        )


def test_weights_of_a_stage_that_has_begun_may_change(files):
    one = stages.staged([stages.Stage(begin=0, data=of_stage(files["parquet"]))])
    other = stages.staged(
        [
            stages.Stage(
                begin=0, data=of_stage(files["parquet"], weights={"books": 1.0})
            ),
        ]
    )
    differences = pipeline_changes.between(
        one.identity(), other.identity(), step=3, begun=1
    )
    assert not differences
    longer = stages.staged(
        [stages.Stage(begin=0, data=of_stage(files["parquet"], length=13))]
    )
    (difference,) = pipeline_changes.between(
        one.identity(), longer.identity(), step=3, begun=1
    )
    assert difference == "stages[0].max_target_length: saved 12, now 13"


def test_local_states_of_several_ranks_continue_in_their_stage(files):
    data = short_then_long(files["parquet"])
    alone = ec.data.LocalBatches(data, global_batch_size=6)
    expected = taken(alone, 6)
    ranks = [
        ec.data.LocalBatches(data, rank=rank, num_ranks=2, global_batch_size=6)
        for rank in range(2)
    ]
    found = [[next(rank) for rank in ranks] for _ in range(3)]
    for rank in ranks:
        with pytest.raises(errors.ConfigError, match="next stage move logical shards"):
            next(rank)
    saved = json.loads(json.dumps([rank.state_dict() for rank in ranks]))
    for rank in ranks:
        rank.load_state_dict(saved)
    found += [[next(rank) for rank in ranks] for _ in range(3)]
    for batch, of_ranks in zip(expected, found, strict=True):
        ids = np.concatenate([part["example_id"] for part in of_ranks])
        rows = np.concatenate([part["inputs"] for part in of_ranks])
        order = np.lexsort(ids.T)
        theirs = np.lexsort(batch["example_id"].T)
        assert (rows[order] == batch["inputs"][theirs]).all()


@pytest.mark.parametrize(
    ("described", "message"),
    [
        ([], "there is no stage"),
        ([(0, {}), (0, {})], r"begin at steps \[0, 0\]"),
        ([(0, {}), (5, {"epochs": 1})], "several ways to end"),
    ],
)
def test_stages_that_do_not_fit(files, described, message):
    with pytest.raises(errors.ConfigError, match=message):
        stages.staged(
            [
                stages.Stage(begin=begin, data=of_stage(files["parquet"], **each))
                for begin, each in described
            ]
        )


def own_pipeline(files, *, length, size=None):
    """A user's pipeline, with a step of their own between examples and rows."""

    def make_shard(shard):
        read = ec.data.Records(
            files["parquet"][0].source, shard=shard, num_shards=NUM_SHARDS
        )
        tokens = ec.data.lm.Tokens(read, documents=TOKENS)
        examples = ec.data.lm.Examples(tokens, length=length, truncate=False)
        if size:
            examples = examples.filter(lambda each: len(each["inputs"]) > size)
        return ec.data.lm.packed(examples, packing="first_fit", length=length, seed=1)

    return ec.data.sharded(make_shard, pipeline="mine, version 1")


def test_users_pipelines_have_stages_where_rows_can_be_taken_apart(files):
    data = ec.data.staged(
        [
            ec.data.Stage(begin=0, data=own_pipeline(files, length=12)),
            ec.data.Stage(begin=2, data=own_pipeline(files, length=30)),
        ]
    )
    schedule = [(step, 1, 6) for step in range(5)]
    with example_by_example():
        expected = batches_of(data, schedule)
    assert batches_of(data, [(step, 3, 6) for step in range(5)]) == expected
    with pytest.raises(errors.ConfigError, match="rows by other steps than those of"):
        ec.data.staged(
            [
                ec.data.Stage(begin=0, data=own_pipeline(files, length=12, size=2)),
                ec.data.Stage(begin=2, data=own_pipeline(files, length=30, size=2)),
            ]
        )


def sized(parts, *sizes):
    """Stages of two steps each, with these sizes."""
    return stages.staged(
        [
            stages.Stage(begin=2 * number, data=of_stage(parts), global_batch_size=each)
            for number, each in enumerate(sizes)
        ]
    )


def sizes_of(batches, number):
    return [len(batch["inputs"]) for batch in taken(batches, number)]


@pytest.mark.parametrize(
    ("sizes", "resize_at", "expected"),
    [
        ((6, None, None), 3, [6, 6, 6, 2, 2, 2, 2]),
        ((6, None, 4), 3, [6, 6, 6, 2, 4, 4, 4]),
        ((6, 4, None), 1, [6, 2, 4, 4, 4, 4, 4]),
    ],
)
def test_a_size_holds_until_a_stage_begins_that_has_one(
    files, sizes, resize_at, expected
):
    batches = ec.batches(
        sized(files["parquet"], *sizes), mesh=mesh(), global_batch_size=6
    )
    found = sizes_of(batches, resize_at)
    batches.resize(2)
    assert found + sizes_of(batches, 7 - resize_at) == expected


def test_a_size_holds_after_a_load_and_after_going_back(files, tmp_path):
    data = sized(files["parquet"], 6, None, None, 4)
    batches = ec.batches(data, mesh=mesh(), global_batch_size=6)
    taken(batches, 1)
    save(batches, tmp_path / "first")
    taken(batches, 2)
    batches.resize(2)
    taken(batches, 1)
    save(batches, tmp_path / "resized")
    taken(batches, 3)
    load(batches, tmp_path / "resized")
    assert sizes_of(batches, 3) == [2, 2, 4]
    # A state has no size: in another iterator those of the stages count.
    other = ec.batches(data, mesh=mesh(), global_batch_size=6)
    load(other, tmp_path / "resized")
    assert sizes_of(other, 3) == [6, 6, 4]
    # The first stage has a size of its own.
    load(batches.leaving_out(), tmp_path / "first")
    assert sizes_of(batches, 6) == [6, 2, 2, 2, 2, 4]


def documents_of(path, name, first):
    """The listed file of 200 documents, whose tokens are numbers from `first` on."""
    file = path / f"{name}.parquet"
    file.parent.mkdir(exist_ok=True)
    documents = [[first + number] * 4 for number in range(200)]
    pa.parquet.write_table(pa.table({"tokens": documents}), file, row_group_size=50)
    return str(file)


def of_files(listed="", **keys):
    return ec.data.from_config(
        grain_train_files=listed,
        grain_file_type="parquet",
        train_data_columns="tokens",
        tokenize_train_data=False,
        enable_data_shuffling=False,
        num_logical_shards=1,
        max_target_length=8,
        **keys,
    )


def local(data):
    return ec.data.LocalBatches(data, global_batch_size=4)


def firsts(batches, number=1):
    return [
        token for batch in taken(batches, number) for token in batch["inputs"][:, 0]
    ]


def resumed(data, saved, step=None):
    batches = local(data)
    batches.load_state_dict(json.loads(json.dumps(saved)))
    if step is not None:
        batches.begin_at(step)
    return batches


def test_a_stage_replaces_the_datasets_of_the_run_by_either_key(tmp_path):
    a, b = (
        documents_of(tmp_path, name, first)
        for name, first in (("a", 1000), ("b", 2000))
    )
    mixture = {"begin_step": 1, "grain_train_mixture_config_path": f"{tmp_path}/a.json"}
    files = {"begin_step": 1, "grain_train_files": b}
    pathlib.Path(f"{tmp_path}/a.json").write_text(
        json.dumps({"a": {"path": a, "weight": 1}})
    )
    of_run = {key: mixture[key] for key in mixture if key != "begin_step"}
    first = {"begin_step": 0}
    data = of_files(**of_run, data_stages=[first, files])
    assert [token // 1000 for token in firsts(local(data), 2)] == [1] * 4 + [2] * 4
    data = of_files(b, data_stages=[first, mixture])
    assert [token // 1000 for token in firsts(local(data), 2)] == [2] * 4 + [1] * 4
    # As a run keeps them.
    config = dataclasses.replace(
        schema.Config(),
        data=dataclasses.replace(
            data_keys.DataKeys(),
            **of_run,
            grain_file_type="parquet",
            data_stages=json.dumps([first, files]),
        ),
    )
    for section in (config.data, training_files.prepare(config).data):
        kept = [
            (each.grain_train_files, each.grain_train_mixture_config_path)
            for _, each in data_keys.stages(section)
        ]
        assert kept == [("", f"{tmp_path}/a.json"), (b, "")]
    with pytest.raises(
        errors.ConfigError,
        match="has both grain_train_files and grain_train_mixture_config_path; set one",
    ):
        of_files(b, data_stages=[first, mixture | files])


def test_other_files_in_place_of_a_dataset_are_refused_in_stages_too(tmp_path):
    a, old, new = (
        documents_of(tmp_path, name, first)
        for name, first in (("a", 1000), ("v1/b", 2000), ("v2/b", 3000))
    )
    run = local(of_files(f"{a},1;{old},1"))
    taken(run, 2)
    data = of_files(
        data_stages=[{"begin_step": 0, "grain_train_files": f"{a},1;{new},1"}]
    )
    with pytest.raises(errors.DataError, match=r"b.parquet.files: b.parquet ha"):
        resumed(data, run.state_dict())


def configured(files, **keys):
    """Data of the first two datasets as a configuration describes it."""
    return ec.data.from_config(
        {
            "grain_train_files": ";".join(
                f"{','.join(part.source.files)},{part.weight}"
                for part in files["parquet"][:2]
            ),
            "grain_file_type": "parquet",
            "train_data_columns": "tokens",
            "tokenize_train_data": False,
            "num_logical_shards": NUM_SHARDS,
            "max_target_length": 12,
            "global_batch_size": 6,
            **keys,
        }
    )


STAGES_OF_CONFIG = [
    {"begin_step": 0},
    {
        "begin_step": 2,
        "max_target_length": 30,
        "global_batch_size": 3,
        "use_truncation": False,
    },
]


@pytest.mark.parametrize("is_file", [False, True])
def test_stages_of_a_configuration(files, tmp_path, is_file):
    value = STAGES_OF_CONFIG
    if is_file:
        value = str(tmp_path / "stages.yml")
        pathlib.Path(value).write_text(json.dumps(STAGES_OF_CONFIG))
    staged = configured(files, data_stages=value)
    batches = ec.batches(staged, mesh=mesh(), global_batch_size=6)
    found = taken(batches, 4)
    assert [batch["inputs"].shape for batch in found] == [(6, 12)] * 2 + [(3, 30)] * 2
    alone = ec.batches(configured(files), mesh=mesh(), global_batch_size=6)
    assert same(found[:2], taken(alone, 2))


def test_batches_have_the_sizes_of_their_stages():
    section = dataclasses.replace(
        data_keys.DataKeys(),
        per_device_batch_size=2.0,
        data_stages=json.dumps(
            [
                {"begin_step": 0},
                {"begin_step": 5, "per_device_batch_size": 1},
                {"begin_step": 9, "global_batch_size": 24},
            ]
        ),
    )
    world = topology.Topology(hosts=2, slices=1, devices=4)
    assert batch_size.schedule(section, world).stages == ((0, 8), (5, 4), (9, 24))
    with pytest.raises(errors.ConfigError, match="does not work with data_stages"):
        batch_size.schedule(
            dataclasses.replace(section, enable_rampup_batch_size=True), world
        )


def test_a_plan_shows_the_stages(files):
    section = dataclasses.replace(
        data_keys.DataKeys(),
        grain_train_files=",".join(files["parquet"][0].source.files),
        grain_file_type="parquet",
        train_data_columns="tokens",
        packing=True,
        data_stages=json.dumps(STAGES_OF_CONFIG),
    )
    shown = pipeline.describe(section)
    assert "stage from step 0: rows of" in shown
    assert "stage from step 2: rows of 30 tokens, first_fit, batches of 3 rows" in shown


def written(tmp_path, name, first):
    path = tmp_path / f"{name}.parquet"
    documents = [
        np.arange(first + 40 * n, first + 40 * n + 2 + n % 9, dtype=np.int32)
        for n in range(60)
    ]
    pa.parquet.write_table(pa.table({"tokens": documents}), path)
    return str(path)


def parquet_of(path):
    return ec.data.Parquet(files=(path,), columns=("tokens",))


def of_records(path, *, after=lambda examples: examples, rows=None, seed=1, length=12):
    """Data of a user's pipeline over the records of a file."""

    def make_shard(shard):
        read = ec.data.Records(
            parquet_of(path),
            shard=shard,
            num_shards=2,
            read_options=ec.data.ReadOptions(shuffle_seed=seed, num_epochs=1),
        )
        examples = ec.data.lm.Examples(
            ec.data.lm.Tokens(read, documents=TOKENS), length=length, truncate=False
        )
        made = ec.data.lm.packed(
            after(examples), packing="first_fit", length=length, seed=1
        )
        return rows(made) if rows else made

    return ec.data.sharded(make_shard, pipeline="mine, version 1", end="padded")


def two_stages(one, other, begin=2):
    return ec.data.staged(
        [ec.data.Stage(begin=0, data=one), ec.data.Stage(begin=begin, data=other)]
    )


def test_stages_that_begin_with_other_records_are_refused(tmp_path):
    a, b = (written(tmp_path, name, first) for name, first in (("a", 1), ("b", 9000)))
    with pytest.raises(errors.ConfigError, match=r"0 and 2 begin with other records"):
        two_stages(of_records(a), of_records(b))
    with pytest.raises(errors.ConfigError, match=r"begin with other records; mix them"):
        two_stages(of_records(a), of_records(a, seed=2))


def test_datasets_of_a_mixture_are_the_same_in_all_stages(tmp_path):
    a, b = (written(tmp_path, name, first) for name, first in (("a", 1), ("b", 9000)))

    def mixed(weights, **paths):
        def make_shard(shard):
            parts = {
                name: ec.data.lm.Tokens(
                    ec.data.Records(
                        parquet_of(path),
                        shard=shard,
                        num_shards=2,
                    ),
                    documents=TOKENS,
                )
                for name, path in paths.items()
            }
            examples = ec.data.lm.Examples(
                ec.data.Mixture(parts, weights, shard=shard), length=12, truncate=False
            )
            return ec.data.lm.packed(
                examples, packing="first_fit", length=12, seed=shard
            )

        return ec.data.sharded(make_shard, pipeline="mixed, version 1")

    both = {"text": 1, "more": 2}
    assert two_stages(
        mixed({"text": 1, "more": 0}, text=a, more=b), mixed(both, text=a, more=b)
    )
    with pytest.raises(errors.ConfigError, match="other datasets of the same name"):
        two_stages(mixed({"text": 1}, text=a), mixed(both, text=b, more=a))


def ahead(dataset):
    return grain.experimental.ThreadPrefetchIterDataset(dataset, prefetch_buffer_size=5)


def test_functions_of_single_rows_may_follow_and_what_has_a_state_may_not(
    tmp_path,
):
    path = written(tmp_path, "a", 1)

    def doubled(dataset):
        kept = dataset.filter(lambda row: row["inputs"][0] >= 0)
        return ahead(kept.map(lambda row: row | {"twice": 2 * row["inputs"]}))

    data = two_stages(
        of_records(path, rows=doubled), of_records(path, rows=doubled, length=30)
    )
    found = list(ec.data.LocalBatches(data, global_batch_size=2))
    assert all((batch["twice"] == 2 * batch["inputs"]).all() for batch in found)
    assert pairs_of(found) == pairs_of(
        ec.data.LocalBatches(of_records(path), global_batch_size=2)
    )

    def shuffled(dataset):
        return ec.data.WindowShuffle(dataset, window_size=4, seed=1)

    with pytest.raises(errors.ConfigError, match=r"WindowShuffle.* after its row"):
        two_stages(
            of_records(path, rows=shuffled), of_records(path, rows=shuffled, length=30)
        )


def test_a_size_that_does_not_fit_is_refused_before_its_stage_begins(files):
    data = short_then_long(files["parquet"])
    with pytest.raises(errors.ConfigError, match="stage of the data has global_batch"):
        ec.data.LocalBatches(data, rank=0, num_ranks=3, global_batch_size=6)


def test_a_run_keeps_its_stages_with_absolute_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    written(tmp_path, "a", 1)
    written(tmp_path, "b", 9000)
    (tmp_path / "stages.yml").write_text(
        "- begin_step: 0\n- begin_step: 3\n  grain_train_files: b.parquet\n"
    )
    config = dataclasses.replace(
        schema.Config(),
        data=dataclasses.replace(
            data_keys.DataKeys(),
            grain_train_files="a.parquet",
            grain_file_type="parquet",
            data_stages="stages.yml",
        ),
    )
    kept = json.loads(training_files.prepare(config).data.data_stages)
    assert kept == [
        {"begin_step": 0},
        {"begin_step": 3, "grain_train_files": str(tmp_path / "b.parquet")},
    ]
