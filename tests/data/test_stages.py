"""Stages: what changes at steps of a run, exactly once on any number of hosts."""

import collections
import dataclasses
import gzip
import json
import pathlib

import grain
import jax
import jsonschema
import numpy as np
import pytest
from etils import epath
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh

import elastic_ckpt as ec
from elastic_ckpt.core import errors
from elastic_ckpt.data import (
    records,
    sharded_data,
    stages,
)
from elastic_ckpt.data.lm import documents as lm_documents
from elastic_ckpt.data.lm import pipeline, rows
from tests import formats, iterator_contract, worlds
from tests.data import test_format

TOKENS = lm_documents.Documents(column="tokens", tokenizer=None)
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
    packings=st.lists(st.sampled_from(["", *rows.PACKINGS]), min_size=4, max_size=4),
    window=st.sampled_from([0, 5]),
    num_steps=st.integers(1, 5),
)
@settings(max_examples=6)
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


def save(batches, path):
    path.mkdir()
    iterator_contract.run(batches.save(iterator_contract.Created(path)))


def load(batches, path):
    iterator_contract.run(batches.load(epath.Path(path)))


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


@pytest.mark.parametrize("step", [0, 2, 3])
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
    saved = (tmp_path / "state" / "shards-00000-00005.json.gz").read_bytes()
    assert b'"held"' in gzip.decompress(saved)
    assert b'"of":' in gzip.decompress(saved)
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


def test_local_states_of_several_ranks_continue_in_their_stage(files):
    data = short_then_long(files["parquet"])
    alone = ec.data.LocalBatches(data, global_batch_size=6)
    expected = taken(alone, 6)
    ranks = [
        ec.data.LocalBatches(data, rank=rank, num_ranks=2, global_batch_size=6)
        for rank in range(2)
    ]
    found = [[next(rank) for rank in ranks] for _ in range(2)]
    saved = json.loads(json.dumps([rank.state_dict() for rank in ranks]))
    # The batches of the next stage move no logical shard.
    found += [[next(rank) for rank in ranks] for _ in range(2)]
    for rank in ranks:
        rank.load_state_dict(saved)
    found[2:] = [[next(rank) for rank in ranks] for _ in range(4)]
    for batch, of_ranks in zip(expected, found, strict=True):
        for name in ("example_id", "inputs"):
            rows = np.concatenate([part[name] for part in of_ranks])
            assert (rows == batch[name]).all()


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


@pytest.mark.parametrize(
    ("dataset", "name", "message"),
    [(0, "novels", "books is now named novels"), (1, "web", "code is now named web")],
)
def test_a_name_stands_for_the_same_files_in_all_stages(files, dataset, name, message):
    parts = files["parquet"]
    named = dataclasses.replace(parts[dataset], name=name)
    with pytest.raises(
        errors.ConfigError, match=f"name their datasets differently .*{message}"
    ):
        stages.staged(
            [
                stages.Stage(begin=0, data=of_stage(parts)),
                stages.Stage(begin=3, data=of_stage([named], weights={name: 1})),
            ]
        )


def own_pipeline(files, *, length, is_batched=False):
    """A user's pipeline, with steps of their own before and after the rows."""

    def make_shard(shard):
        read = ec.data.Records(
            files["parquet"][0].source, shard=shard, num_shards=NUM_SHARDS
        )
        tokens = ec.data.lm.Tokens(read, documents=TOKENS)
        long = tokens.filter(lambda document: len(document) > 4)
        made = ec.data.lm.Rows(long, length=length, truncate=False, shard=shard)
        if is_batched:
            return grain.experimental.WindowShuffleIterDataset(
                made, window_size=4, seed=shard
            )
        return made.map(lambda row: row | {"sum": row["inputs"].sum()})

    return ec.data.sharded(make_shard, pipeline="mine, version 1")


def test_users_pipelines_have_stages_where_rows_can_be_taken_apart(files):
    data = ec.data.staged(
        [
            ec.data.Stage(begin=0, data=own_pipeline(files, length=12)),
            ec.data.Stage(begin=2, data=own_pipeline(files, length=30)),
        ]
    )
    expected = batches_of(data, [(step, 1, 6) for step in range(5)])
    assert batches_of(data, [(step, 3, 6) for step in range(5)]) == expected
    with pytest.raises(
        errors.ConfigError, match=r"steps after ec.* that may hold rows"
    ):
        ec.data.staged(
            [
                ec.data.Stage(
                    begin=begin,
                    data=own_pipeline(files, length=length, is_batched=True),
                )
                for begin, length in ((0, 12), (2, 30))
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


def test_stages_of_a_configuration(files, tmp_path):
    value = str(tmp_path / "stages.yml")
    pathlib.Path(value).write_text(json.dumps(STAGES_OF_CONFIG))
    staged = configured(files, data_stages=value)
    batches = ec.batches(staged, mesh=mesh(), global_batch_size=6)
    found = taken(batches, 4)
    assert [batch["inputs"].shape for batch in found] == [(6, 12)] * 2 + [(3, 30)] * 2
    alone = ec.batches(configured(files), mesh=mesh(), global_batch_size=6)
    assert same(found[:2], taken(alone, 2))


def test_a_size_that_does_not_fit_is_refused_before_its_stage_begins(files):
    data = short_then_long(files["parquet"])
    with pytest.raises(errors.ConfigError, match="stage of the data has global_batch"):
        ec.data.LocalBatches(data, rank=0, num_ranks=3, global_batch_size=6)
