"""Stages: what changes at steps of a run, exactly once on any number of hosts."""

import asyncio
import collections
import contextlib
import dataclasses
import functools
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
    local_batches,
    pipeline_changes,
    records,
    sharded_data,
    stages,
    state,
)
from elastic_ckpt.data.lm import language, pipeline
from elastic_ckpt.training import schema, training_files
from tests import formats, worlds
from tests.data import test_format

# A search of hours sets the variable to more.
MOST_EXAMPLES = 8

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


@pytest.mark.slow
@given(chosen=schedules())
@settings(max_examples=15)
def test_stages_are_those_of_one_host_example_by_example(files, chosen):
    check_schedule(files["parquet"], chosen)


@pytest.mark.parametrize("file_format", formats.FORMATS)
@given(chosen=schedules())
@settings(max_examples=MOST_EXAMPLES)
@pytest.mark.night
def test_many_schedules_of_stages(files, file_format, chosen):
    check_schedule(files[file_format], chosen)


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


@pytest.mark.slow
@given(
    lengths=st.lists(st.integers(3, 40), min_size=2, max_size=4),
    packings=st.lists(
        st.sampled_from(["", *language.PACKINGS]), min_size=4, max_size=4
    ),
    window=st.sampled_from([0, 5]),
    num_steps=st.integers(1, 5),
)
@settings(max_examples=15)
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


def test_batches_begin_stages_by_themselves(files):
    batches = ec.batches(
        short_then_long(files["parquet"]), mesh=mesh(), global_batch_size=6
    )
    shapes = [batch["inputs"].shape for batch in taken(batches, 6)]
    assert shapes == [(6, 12)] * 3 + [(4, 24)] * 3


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


@pytest.mark.parametrize("step", [0, 1, 2, 3, 4, 5])
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


@pytest.mark.parametrize("step", [2, 3, 4])
def test_a_state_of_an_older_program_that_began_a_stage_at_its_load_is_loaded(
    files, step
):
    data = short_then_long(files["parquet"])
    local = ec.data.LocalBatches(data, global_batch_size=6)
    taken(local, step + 1)
    saved = local.get_state()
    expected = taken(local, 2)
    older = local_batches.of_fields(
        {**saved, "progress": {"step": step + 1, "begun": 1}}
    )
    local.set_state(older)
    assert same(taken(local, 2), expected)


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


def test_rows_read_ahead_are_those_of_the_stage(files):
    data = short_then_long(files["parquet"])
    ahead = ec.data.LocalBatches(data, global_batch_size=6, read_ahead=4)
    assert same(
        [next(ahead) for _ in range(6)],
        taken(ec.data.LocalBatches(data, global_batch_size=6), 6),
    )


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
        ([(1, {})], r"begin at steps \[1\]; the first begins at 0"),
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


def test_data_that_cannot_have_stages(files):
    with pytest.raises(errors.ConfigError, match="num_logical_shards"):
        stages.staged([stages.Stage(begin=0, data=object())])
    other = dataclasses.replace(of_stage(files["parquet"]), num_shards=3)
    with pytest.raises(errors.ConfigError, match=r"numbers of logical shards, \[3, 6"):
        stages.staged(
            [
                stages.Stage(begin=0, data=of_stage(files["parquet"])),
                stages.Stage(begin=5, data=other),
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


def test_two_datasets_of_one_name_are_told_apart(files):
    books, code, _ = files["parquet"]
    renamed = [dataclasses.replace(part, name="train") for part in (books, code)]
    data = stages.staged(
        [
            stages.Stage(begin=begin, data=of_stage([part], weights={"train": 1.0}))
            for begin, part in zip((0, 2), renamed, strict=True)
        ]
    )
    local = ec.data.LocalBatches(data, global_batch_size=NUM_SHARDS)
    found = taken(local, 5)
    code_begins = formats.tokens("code", 0)
    first_of_code = code_begins[0] if len(code_begins) else 1 + 40 * 1000
    assert all((batch["inputs"] < first_of_code).all() for batch in found[:2])
    assert (found[-1]["inputs"] >= first_of_code).any()
    names = [
        list(each[pipeline_changes.DATASETS])
        for each in pipeline_changes.stages_of(data.identity())
    ]
    assert names == [["train"], ["train#2"]]


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
        ((None, None, None), 3, [6, 6, 6, 2, 2, 2, 2]),
        ((6, None, None), 2, [6, 6, 2, 2, 2, 2, 2]),
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


def test_a_step_that_is_said_is_refused_where_a_load_would_refuse_it(files, tmp_path):
    parts = files["parquet"]
    batches = ec.batches(of_stage(parts), mesh=mesh(), global_batch_size=6)
    taken(batches, 4)
    save(batches, tmp_path / "state")
    rest = taken(batches, 1)
    staged = ec.batches(short_then_long(parts), mesh=mesh(), global_batch_size=6)
    load(staged, tmp_path / "state")
    with pytest.raises(
        errors.DataError, match=r"run is at step 4, and stages that begin at \[3\] are"
    ):
        staged.begin_at(4)
    on_time = ec.batches(short_then_long(parts, 5), mesh=mesh(), global_batch_size=6)
    load(on_time, tmp_path / "state")
    on_time.begin_at(4)
    assert same(taken(on_time, 1), rest)
    assert next(on_time)["inputs"].shape == (4, 24)


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


def read_of(tokens, first):
    return sorted(token for token in tokens if first <= token < first + 200)


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


def test_no_stage_gives_a_dataset_the_name_of_one_that_continues(tmp_path):
    a, b, c = (
        documents_of(tmp_path, name, first)
        for name, first in (("a", 1000), ("b", 2000), ("c", 3000))
    )
    run = local(of_files(a))
    taken(run, 10)
    saved = run.state_dict()
    assert list(saved["pipeline"]["datasets"]) == ["train"]
    # A single dataset is named train, whatever its files are.
    data = of_files(
        data_stages=[
            {"begin_step": 0, "grain_train_files": f"{a},0.9;{c},0.1"},
            {"begin_step": 12, "grain_train_files": b},
        ]
    )
    staged = resumed(data, saved, step=10)
    names = [
        list(each[pipeline_changes.DATASETS])
        for each in pipeline_changes.stages_of(staged.state_dict()["pipeline"])
    ]
    assert names == [["train", "c.parquet"], ["train#2"]]
    assert read_of(firsts(staged, 2), 1000)[0] == 1040
    assert firsts(staged) == list(range(2000, 2004))
    again = resumed(data, staged.state_dict())
    assert firsts(again, 3) == firsts(staged, 3)


@pytest.mark.parametrize("in_stages", [False, True])
def test_the_name_of_a_removed_dataset_is_kept_for_its_files(tmp_path, in_stages):
    a, old, new = (
        documents_of(tmp_path, name, first)
        for name, first in (("a", 1000), ("v1/b", 2000), ("v2/b", 3000))
    )

    def data(listed):
        if not in_stages:
            return of_files(listed)
        return of_files(
            data_stages=[
                {"begin_step": 0, "grain_train_files": f"{a},1"},
                {"begin_step": 30, "grain_train_files": listed},
            ]
        )

    run = local(of_files(f"{a},1;{old},1"))
    before = read_of(firsts(run, 20), 2000)
    without = resumed(of_files(f"{a},1"), run.state_dict())
    taken(without, 10)
    other = resumed(data(f"{a},1;{new},1"), without.state_dict(), step=30)
    assert read_of(firsts(other, 8), 3000)[:3] == [3000, 3001, 3002]
    # The removed dataset continues, even if another has had its name since.
    for saved, step in ((without.state_dict(), 30), (other.state_dict(), 38)):
        again = resumed(data(f"{a},1;{old},1"), saved, step=step)
        after = read_of(firsts(again, 8), 2000)
        assert before + after == list(range(2000, after[-1] + 1))


def test_a_stage_may_begin_with_another_dataset_of_a_removed_name(tmp_path):
    a, old, new = (
        documents_of(tmp_path, name, first)
        for name, first in (("a", 1000), ("v1/b", 2000), ("v2/b", 3000))
    )
    run = local(of_files(f"{a},1;{old},1"))
    taken(run, 20)
    data = of_files(
        data_stages=[
            {"begin_step": 0, "grain_train_files": f"{a},1"},
            {"begin_step": 22, "grain_train_files": f"{a},1;{new},1"},
        ]
    )
    batches = resumed(data, run.state_dict(), step=20)
    assert 3000 in firsts(batches, 6)
    pipeline_now = batches.state_dict()["pipeline"]
    assert pipeline_now[pipeline_changes.REMOVED].keys() == {"b.parquet"}
    assert firsts(resumed(data, batches.state_dict()), 3) == firsts(batches, 3)


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


def test_removed_datasets_are_of_the_schema(tmp_path):
    a, b = (
        documents_of(tmp_path, name, first) for name, first in (("a", 1), ("b", 2000))
    )
    run = ec.batches(of_files(f"{a},1;{b},1"), mesh=mesh(), global_batch_size=4)
    taken(run, 2)
    save(run, tmp_path / "both")
    one = ec.batches(of_files(f"{a},1"), mesh=mesh(), global_batch_size=4)
    load(one, tmp_path / "both")
    save(one, tmp_path / "one")
    test_format.validate(tmp_path / "one" / "data_state.json")
    assert state.read(tmp_path / "one").pipeline[pipeline_changes.REMOVED].keys() == {
        "b.parquet"
    }
    # Going back to where it was not removed.
    load(one, tmp_path / "both")
    save(one, tmp_path / "again")
    both = ec.batches(of_files(f"{a},1;{b},1"), mesh=mesh(), global_batch_size=4)
    load(both, tmp_path / "again")
    save(both, tmp_path / "restored")
    assert pipeline_changes.REMOVED not in state.read(tmp_path / "restored").pipeline


def test_a_users_mixture_does_not_give_the_name_of_a_removed_dataset_to_another(
    tmp_path,
):
    a, b, c = (
        documents_of(tmp_path, name, first)
        for name, first in (("a", 1000), ("b", 2000), ("c", 3000))
    )

    def mixed(**paths):
        def make_shard(shard):
            parts = {
                name: ec.data.lm.Tokens(
                    ec.data.Records(parquet_of(path), shard=shard, num_shards=1),
                    documents=TOKENS,
                )
                for name, path in paths.items()
            }
            mixture = ec.data.Mixture(parts, dict.fromkeys(parts, 1), shard=shard)
            examples = ec.data.lm.Examples(mixture, length=8, truncate=True)
            return language.Padded(examples, length=8)

        return ec.data.sharded(make_shard, pipeline="mixed, version 1")

    run = local(mixed(text=a, more=b))
    before = read_of(firsts(run, 20), 2000)
    without = resumed(mixed(text=a), run.state_dict())
    taken(without, 5)
    with pytest.raises(
        errors.DataError, match=r"more is the name of another dataset .*another na"
    ):
        resumed(mixed(text=a, more=c), without.state_dict())
    after = read_of(
        firsts(resumed(mixed(text=a, more=b), without.state_dict()), 9), 2000
    )
    assert not set(before) & set(after)
    assert 3000 in firsts(resumed(mixed(text=a, new=c), without.state_dict()), 9)
    assert resumed(
        two_stages(mixed(text=a), mixed(text=a, new=c), 50), run.state_dict(), 20
    )
    with pytest.raises(
        errors.DataError, match=r"more is the name of another dataset .*another na"
    ):
        resumed(
            two_stages(mixed(text=a), mixed(text=a, more=c), 50), run.state_dict(), 20
        )


def test_the_progress_is_part_of_the_saved_state():
    saved = state.DataState(
        engine="sharded",
        position={"stream_row": 8},
        pipeline={},
        progress=state.Progress(step=3, begun=2),
    )
    fields = json.loads(state.to_bytes(saved))
    assert fields["progress"] == {"step": 3, "begun": 2}
    assert "progress" not in json.loads(
        state.to_bytes(dataclasses.replace(saved, progress=None))
    )


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


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("missing.yml", r"missing.yml: no such configuration file \(data_stages\)"),
        ([{"max_target_length": 3}], "data_stages, stage 0: the stage has no begin"),
        ([{"begin_step": 0, "max_target_lenght": 3}], "unknown key 'max_target_leng"),
        (
            [{"begin_step": 0, "steps": 3}],
            "unknown key .steps.; the nearest key of the data .others are not set",
        ),
        (
            [{"begin_step": 0, "num_logical_shards": 3}],
            "num_logical_shards is not a key that a stage can have",
        ),
        (
            [{"begin_step": 0}, {"begin_step": 4, "eval_interval": 3}],
            "eval_interval is not a key that a stage can have",
        ),
        ([3], "data_stages, stage 0: write a list of stages"),
        ([{"begin_step": 5}], r"data_stages: .*begin at steps \[5\]"),
        (
            [{"begin_step": 0}, {"begin_step": 4, "data_shuffle_seed": 8}],
            "step 4 has other documents than the first.*data_shuffle_seed",
        ),
    ],
)
def test_stages_of_a_configuration_that_are_wrong(files, value, message):
    with pytest.raises(errors.ConfigError, match=message):
        configured(files, data_stages=value)


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


def test_texts_keep_what_the_steps_hold(tmp_path):
    path = tmp_path / "texts.parquet"
    texts = [f"Text number {number}. " * (1 + number % 7) for number in range(60)]
    pa.parquet.write_table(pa.table({"text": texts}), path)
    staged = ec.data.from_config(
        grain_train_files=path,
        grain_file_type="parquet",
        num_logical_shards=2,
        max_target_length=64,
        packing=True,
        grain_packing_type="best_fit",
        use_truncation=False,
        num_epoch=1,
        drop_remainder=False,
        data_stages=[
            {"begin_step": 0},
            {"begin_step": 3, "max_target_length": 200},
            {"begin_step": 5, "grain_packing_type": "concat_then_split"},
        ],
    )
    found = list(ec.data.LocalBatches(staged, global_batch_size=2))
    number = sum(len(text.encode()) + 1 for text in texts)
    assert sum(pairs_of(found).values()) == number


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


class Chunks(grain.experimental.FlatMapTransform):
    """Cuts tokens into chunks."""

    max_fan_out = 30

    def __init__(self, size):
        self.size = size

    def flat_map(self, element):
        tokens = element["tokens"]
        return [{"x": tokens[at : at + 1]} for at in range(0, len(tokens), self.size)]


def test_steps_of_users_that_are_not_alike_are_refused(tmp_path):
    path = written(tmp_path, "a", 1)

    def cut(size):
        def make_shard(shard):
            read = ec.data.Records(
                parquet_of(path),
                shard=shard,
                num_shards=2,
            )
            return grain.experimental.FlatMapIterDataset(read, Chunks(size))

        return ec.data.sharded(make_shard, pipeline="chunks, version 1")

    assert two_stages(cut(2), cut(2))
    with pytest.raises(errors.ConfigError, match="stage 0 has no ec"):
        two_stages(cut(2), cut(3))


def ahead(dataset):
    return grain.experimental.ThreadPrefetchIterDataset(dataset, prefetch_buffer_size=5)


def test_a_thread_between_examples_and_rows_is_refused(tmp_path):
    path = written(tmp_path, "a", 1)
    assert two_stages(of_records(path, after=ahead), of_records(path, after=ahead))
    with pytest.raises(errors.ConfigError, match="makes its rows by other steps than"):
        two_stages(
            of_records(path, after=ahead), of_records(path, after=ahead, length=30)
        )


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


def test_a_make_shard_that_returns_the_same_datasets_again(tmp_path):
    path = written(tmp_path, "a", 1)
    short, long = (of_records(path, length=length) for length in (12, 30))
    cached = [
        dataclasses.replace(data, make_shard=functools.cache(data.make_shard))
        for data in (short, long)
    ]

    def found(one, other):
        data = stages.StagedData(
            stages=tuple(
                stages.Stage(begin=begin, data=data)
                for begin, data in ((0, one), (3, other), (5, one))
            )
        )
        return pairs_of(ec.data.LocalBatches(data, global_batch_size=2))

    assert found(*cached) == found(short, long)
    assert found(short, long) == pairs_of(
        ec.data.LocalBatches(short, global_batch_size=2)
    )


def test_what_has_begun_stays_so_after_a_rollback_to_before_there_were_stages(
    files, tmp_path
):
    parts = files["parquet"]
    batches = ec.batches(of_stage(parts), mesh=mesh(), global_batch_size=6)
    taken(batches, 2)
    save(batches, tmp_path / "before")
    staged = ec.batches(short_then_long(parts), mesh=mesh(), global_batch_size=6)
    load(staged, tmp_path / "before")
    staged.begin_at(2)
    taken(staged, 3)
    load(staged.leaving_out(), tmp_path / "before")
    save(staged, tmp_path / "unknown")
    staged.begin_at(2)
    save(staged, tmp_path / "known")
    other = short_then_long(parts, 4)
    for name in ("known", "unknown"):
        test_format.validate(tmp_path / name / "data_state.json")
        assert json.loads((tmp_path / name / "data_state.json").read_text())[
            "progress"
        ] == {"step": 2 if name == "known" else None, "begun": 2}
        with pytest.raises(errors.DataError, match=r"steps \[0, 3\], now \[0, 4\]"):
            load(ec.batches(other, mesh=mesh(), global_batch_size=6), tmp_path / name)
    again = ec.batches(short_then_long(parts), mesh=mesh(), global_batch_size=6)
    load(again, tmp_path / "known")
    assert same(taken(again, 3), taken(staged, 3))


def test_a_state_of_a_step_that_was_only_said_is_one_of_this_step(files, tmp_path):
    data = short_then_long(files["parquet"], 5)
    batches = ec.batches(data, mesh=mesh(), global_batch_size=6)
    batches.begin_at(4)
    save(batches, tmp_path / "fresh")
    batches.begin_at(7)
    save(batches, tmp_path / "late")
    other = ec.batches(data, mesh=mesh(), global_batch_size=6)
    load(other, tmp_path / "fresh")
    assert [batch["inputs"].shape[1] for batch in taken(other, 3)] == [12, 24, 24]
    load(other, tmp_path / "late")
    assert next(other)["inputs"].shape[1] == 24


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"begin": 2.5}, r"begin=2.5; give a whole number of at least 0"),
        ({"begin": 2, "global_batch_size": 0}, "global_batch_size=0; give a whole"),
        ({"begin": 2, "global_batch_size": "4"}, "global_batch_size='4'; give a whole"),
        ({"begin": 2, "global_batch_size": True}, "global_batch_size=True; give a"),
    ],
)
def test_steps_and_sizes_of_stages_are_whole_numbers(files, fields, message):
    data = of_stage(files["parquet"])
    with pytest.raises(errors.ConfigError, match=message):
        stages.staged(
            [stages.Stage(begin=0, data=data), stages.Stage(data=data, **fields)]
        )


def test_a_size_that_does_not_fit_is_refused_before_its_stage_begins(files):
    data = short_then_long(files["parquet"])
    with pytest.raises(errors.ConfigError, match="stage of the data has global_batch"):
        ec.data.LocalBatches(data, rank=0, num_ranks=3, global_batch_size=6)


def test_files_that_a_later_stage_has_twice_keep_their_share(files):
    books, code, _ = files["parquet"]
    twice = [
        dataclasses.replace(books, name="one"),
        dataclasses.replace(books, name="two"),
        code,
    ]
    data = stages.staged(
        [
            stages.Stage(begin=0, data=of_stage([books], weights={"books": 1.0})),
            stages.Stage(
                begin=2, data=of_stage(twice, weights={"one": 1, "two": 1, "code": 2})
            ),
        ]
    )
    _, later = pipeline_changes.stages_of(data.identity())
    weights = {
        name: each["weight"] for name, each in later[pipeline_changes.DATASETS].items()
    }
    assert weights == {"books": 1, "two": 1, "code": 2}


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"data_stages": "[{begin_step: 0"}, "data_stages: not valid YAML"),
        (
            {
                "data_stages": [
                    {"begin_step": 0},
                    {"begin_step": 2, "global_batch_size": 0},
                ]
            },
            "some stages have a global_batch_size, and others have 0",
        ),
        (
            {
                "use_dpo": True,
                "packing": False,
                "tokenize_train_data": True,
                "data_stages": [
                    {"begin_step": 0},
                    {"begin_step": 2, "max_target_length": 9},
                ],
            },
            "use_dpo=true needs the same max_target_length",
        ),
    ],
)
def test_keys_of_stages_that_do_not_fit_are_named(files, keys, message):
    with pytest.raises(errors.ConfigError, match=message):
        configured(files, **keys)


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
