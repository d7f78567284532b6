"""Stages: what changes at steps of a run, exactly once on any number of hosts."""

import contextlib
import dataclasses
import gzip
import itertools
import json

import grain
import jax
import jsonschema
import numpy as np
import pytest
from etils import epath
from jax.sharding import Mesh

import elastic_ckpt as ec
from elastic_ckpt.core import errors
from elastic_ckpt.data import cursors, stages
from elastic_ckpt.data.sources import files as source_files
from elastic_ckpt.data.sources import parquet
from tests import formats, iterator_contract, worlds
from tests.data import test_format, test_local_batches
from tests.formats import of_stage

NUM_SHARDS = 6


def staged(*described):
    """Stages, each described by its first step, its data and its batch size."""
    return stages.staged(
        [
            stages.Stage(begin=begin, data=data, global_batch_size=size)
            for begin, data, size in described
        ]
    )


def batches_of(data, **more):
    mesh = Mesh(np.array(jax.devices()[:1]), ("data",))
    return ec.batches(data, mesh=mesh, global_batch_size=6, **more)


def save(batches, path):
    path.mkdir()
    iterator_contract.run(batches.save(iterator_contract.Created(path)))


def load(batches, path):
    iterator_contract.run(batches.load(epath.Path(path)))


def short_then_long(parts, begin=3):
    long = of_stage(parts, length=24, packing="first_fit")
    return staged((0, of_stage(parts), 6), (begin, long, 4))


def taken(batches, number):
    return [
        {name: np.asarray(each) for name, each in next(batches).items()}
        for _ in range(number)
    ]


def test_the_state_at_every_step_continues_in_its_stage(files, tmp_path):
    data = short_then_long(files["parquet"])
    expected = taken(batches_of(data), 7)
    batches = batches_of(data)
    for step in range(5):
        path = tmp_path / str(step)
        save(batches, path)
        for file in path.iterdir():
            test_format.validate(file)
        other = batches_of(data)
        taken(other, 6 - step)
        load(other, path)
        np.testing.assert_equal(taken(other, 2), expected[step : step + 2])
        # What was loaded is saved at the next step.
        load(batches, path)
        np.testing.assert_equal(taken(batches, 1), expected[step : step + 1])
    saved = (tmp_path / "4" / "shards-00000-00005.json.gz").read_bytes()
    assert cursors.HELD.encode() in gzip.decompress(saved)
    assert b'"of":' in gzip.decompress(saved)


def test_a_read_that_fails_changes_no_row(files, monkeypatch):
    monkeypatch.setattr(source_files, "_PAUSES_SECS", ())
    parts, decode = files["parquet"], parquet.Parquet.decode
    # Documents of new files follow those that come over.
    long = of_stage(parts, length=24, packing="first_fit")
    data = staged((0, of_stage(parts[:1]), 6), (3, long, 4))
    failing, calls = None, itertools.count()

    def decoded(self, file, block):
        if next(calls) == failing:
            raise OSError(5, "the store is busy")
        return decode(self, file, block)

    def contents():
        nonlocal calls
        source_files.forget_all()
        batches, found, calls = batches_of(data, read_ahead=0), [], itertools.count()
        while len(found) < 8:
            with contextlib.suppress(errors.DataError):
                found += map(worlds.content, taken(batches, 1))
        return found

    expected = contents()
    monkeypatch.setattr(parquet.Parquet, "decode", decoded)
    for failing in range(9):
        assert contents() == expected
        assert next(calls) > failing


def test_a_stage_begins_at_its_step_after_a_rollback(files, tmp_path):
    batches = batches_of(short_then_long(files["parquet"]))
    taken(batches, 1)
    save(batches, tmp_path / "step-1")
    before = taken(batches, 4)
    load(batches.leaving_out(), tmp_path / "step-1")
    after = taken(batches, 4)
    assert [batch["inputs"].shape for batch in after] == [(6, 12)] * 2 + [(4, 24)] * 2
    ids = np.concatenate([batch["example_id"] for batch in before + after])
    assert len(np.unique(ids, axis=0)) == len(ids)
    assert batches.left_out == ((6, 6 + 2 * 6 + 2 * 4),)
    load(batches.leaving_out(), tmp_path / "step-1")
    save(batches, tmp_path / "after")
    with pytest.raises(errors.DataError, match=r"stages: began at steps \[0, 3\]"):
        load(batches_of(short_then_long(files["parquet"], 4)), tmp_path / "after")


def test_a_run_continues_with_other_stages_but_for_those_that_have_begun(
    files, tmp_path
):
    parts = files["parquet"]
    short = of_stage(parts)
    for name, before in (("without", short), ("in-first", short_then_long(parts))):
        batches = batches_of(before)
        taken(batches, 2)
        save(batches, tmp_path / name)
        later = batches_of(short_then_long(parts, 4))
        load(later, tmp_path / name)
        if before is short:
            with pytest.raises(errors.DataError, match=r"begin_at\(step\) after"):
                next(later)
            later.begin_at(2)
        found = taken(later, 3)
        np.testing.assert_equal(found[:1], taken(batches, 1))
        assert [batch["inputs"].shape for batch in found] == [(6, 12)] * 2 + [(4, 24)]
    save(later, tmp_path / "in-second")
    for name, other, message in (
        ("in-first", short_then_long(parts, 1), r"at step 2, but new stages .* \[1\]"),
        ("in-second", short_then_long(parts), r"at steps \[0, 4\], now .*\[0, 3\]"),
        ("in-second", short, r"steps \[0, 4\], now .*\[0\]"),
    ):
        with pytest.raises(errors.DataError, match=message):
            load(batches_of(other), tmp_path / name)


def test_local_states_of_several_ranks_continue_in_their_stage(files):
    data, next_rows = short_then_long(files["parquet"]), test_local_batches.next_rows
    alone, ranks = (
        test_local_batches.world(data, num_ranks, 6, read_ahead=ahead)
        for num_ranks, ahead in ((1, 0), (2, 4))
    )
    expected = [next_rows(alone) for _ in range(6)]
    assert [next_rows(ranks) for _ in range(2)] == expected[:2]
    saved = json.loads(json.dumps([rank.state_dict() for rank in ranks]))
    # The batches of the next stage move no logical shard.
    assert [next_rows(ranks) for _ in range(2)] == expected[2:4]
    for rank in ranks:
        jsonschema.validate(rank.state_dict(), test_local_batches.SCHEMA)
        rank.load_state_dict(saved)
    assert [next_rows(ranks) for _ in range(4)] == expected[2:]


def own(part, after=lambda rows: rows):
    """Data of a user's pipeline."""

    def make_shard(shard):
        read = ec.data.Records(part.source, shard=shard, num_shards=NUM_SHARDS)
        tokens = ec.data.lm.Tokens(read, documents=formats.TOKENS)
        return after(ec.data.lm.Rows(tokens, length=12, shard=shard))

    return ec.data.sharded(make_shard, pipeline="mine, version 1")


def test_stages_that_do_not_fit_are_refused(files):
    books, code, _ = files["parquet"]
    data = of_stage(files["parquet"])
    finite = of_stage([books], epochs=1)
    renamed = of_stage([dataclasses.replace(books, name="web")])
    shuffled = own(
        books,
        lambda rows: grain.experimental.WindowShuffleIterDataset(
            rows, window_size=4, seed=1
        ),
    )
    for stages_of, message in (
        ([], "list of stages is empty; pass"),
        ([(0, data, None), (0, data, None)], r"begin after \[0, 0\]"),
        ([(0, data, 6), (1, data, 0)], r"global_batch_size \[6, 0\]; set"),
        ([(0, data, None), (5, finite, None)], "different values of end"),
        ([(0, data, None), (3, renamed, None)], "differently .*books is now named web"),
        ([(0, own(books), None), (2, shuffled, None)], "ec.* that may buffer rows"),
        ([(0, own(books), None), (2, own(code), None)], "reads different records"),
    ):
        with pytest.raises(errors.ConfigError, match=message):
            staged(*stages_of)
    with pytest.raises(errors.ConfigError, match="size=4 cannot be divided"):
        ec.data.LocalBatches(
            short_then_long(files["parquet"]), num_ranks=3, global_batch_size=6
        )


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
    data = of_stage(files["parquet"])
    batches = batches_of(staged(*((2 * n, data, each) for n, each in enumerate(sizes))))
    found = taken(batches, resize_at)
    batches.resize(2)
    found += taken(batches, 7 - resize_at)
    assert [len(batch["inputs"]) for batch in found] == expected


def test_stages_of_a_configuration(corpus, tmp_path):
    keys = {
        "grain_train_files": corpus,
        "num_logical_shards": NUM_SHARDS,
        "max_target_length": 12,
        "global_batch_size": 6,
    }
    later = {"max_target_length": 30, "global_batch_size": 3}
    file = tmp_path / "stages.yml"
    file.write_text(json.dumps([{"begin_step": 0}, {"begin_step": 2, **later}]))
    in_stages = ec.data.from_config({**keys, "data_stages": str(file)})
    found = taken(batches_of(in_stages), 4)
    assert [batch["inputs"].shape for batch in found] == [(6, 12)] * 2 + [(3, 30)] * 2
    np.testing.assert_equal(found[:2], taken(batches_of(ec.data.from_config(keys)), 2))
