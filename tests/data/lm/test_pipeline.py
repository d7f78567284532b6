import dataclasses
import itertools
import json
import pathlib
import re

import grain
import numpy as np
import pytest

import elastic_ckpt as ec
from elastic_ckpt.core import errors
from elastic_ckpt.data import (
    data_keys,
    elastic_data,
    local_batches,
    positional_data,
    records,
    rows,
)
from elastic_ckpt.data.lm import documents, pipeline
from tests import corpora, worlds
from tests.data.lm import test_tokenizers

LENGTH = 16


def section(corpus="", **settings):
    return data_keys.DataKeys(
        **{
            "grain_train_files": corpus,
            "max_target_length": LENGTH,
            "num_logical_shards": 4,
            **settings,
        }
    )


def refused(match, error=errors.ConfigError):
    return pytest.raises(error, match=match)


def test_keys_may_be_a_mapping_keywords_or_those_of_a_configuration(corpus, tmp_path):
    expected = pipeline.from_config(section(corpus))
    keys = {"max_target_length": LENGTH, "num_logical_shards": 4}
    path = tmp_path / "config.yml"
    path.write_text(
        f"base_config: base.yml\ngrain_train_files: {corpus}\n"
        f"max_target_length: {LENGTH}\nsteps: 7\n"
    )
    for actual in (
        pipeline.from_config({"grain_train_files": corpus, **keys}),
        pipeline.from_config(grain_train_files=pathlib.Path(corpus), **keys),
        pipeline.from_config(ec.load_config(path).data, num_logical_shards=4),
        pipeline.from_config(
            ec.load_config(path, ["num_logical_shards=4"]).data,
            max_target_length=LENGTH,
        ),
        pipeline.from_config(section(corpus, num_logical_shards=8), **keys),
    ):
        assert actual == expected


def test_without_logical_shards_the_engine_is_the_positional_one(corpus):
    data = pipeline.from_config(
        section(corpus, num_logical_shards=0, data_shuffle_seed=3, num_epoch=2)
    )
    assert isinstance(data, positional_data.TextData)
    assert len(data.order) == 2 * data.num_records == 200
    order = grain.MapDataset.range(100).seed(3).shuffle()
    assert list(data.order)[:100] == list(order)
    (host,) = [data.host_batches(each) for each in rows.in_order(1, 4)]
    batch = next(host)
    for row, number in enumerate(list(order)[:4]):
        text = b"text %d" % number
        values = batch["targets"][row][: len(text)] - 3
        assert values.astype(np.uint8).tobytes() == text


def test_data_ends_as_the_configuration_says(corpus):
    for num_shards, (epochs, end) in itertools.product(
        (0, 4), (({}, "never"), ({"num_epoch": 1}, "padded"))
    ):
        actual = pipeline.from_config(
            section(corpus, num_logical_shards=num_shards, **epochs)
        )
        assert actual.end.value == end


def test_shuffling_changes_the_order_by_the_seed_and_can_be_switched_off(corpus):
    orders = []
    for settings in (
        {},
        {"data_shuffle_seed": 1},
        {"grain_shuffle_buffer_size": 0},
        {"enable_data_shuffling": False},
    ):
        data = pipeline.from_config(section(corpus, **settings))
        orders.append(worlds.World(data, 1, 40).batch()["inputs"].tolist())
    assert all(one != two for one, two in itertools.combinations(orders, 2))


def test_shards_are_shuffled_differently(corpus):
    # With every record in one block and window, shards would else differ in what they
    # hold but not in how it is ordered.
    make_shard = pipeline.from_config(section(corpus, num_epoch=1)).make_shard
    orders = []
    for shard in range(4):
        in_order = dataclasses.replace(make_shard, window=0)
        made, plain = (
            [row["inputs"].tobytes() for row in make(shard)]
            for make in (make_shard, in_order)
        )
        orders.append(tuple(map(plain.index, made)))
    assert len(set(orders)) == 4


def test_evaluation_is_one_epoch_in_order_padded_whatever_training_does(corpus):
    config = section(
        "nowhere", grain_eval_files=corpus, num_epoch=3, grain_worker_count=4
    )
    data = pipeline.eval_from_config(config, global_batch_size=12)
    assert (data.end, data.num_workers) == (elastic_data.End.PADDED, 0)
    expected = [(b"text %d " % number * 5)[:LENGTH] for number in range(100)]
    for num_hosts in (1, 3):
        actual = [
            bytes((row[row > 2] - 3).astype(np.uint8))
            for batch in worlds.World(data, num_hosts, 12).rest()
            for row in batch["targets"][batch["mask"]]
        ]
        assert sorted(actual) == sorted(expected)
    # Three rows of each shard, which has every fourth record of the file.
    assert actual[:12] == [expected[s + 4 * n] for s in range(4) for n in range(3)]


def test_the_identity_names_whatever_changes_the_examples(corpus):
    plain = pipeline.from_config(section(corpus)).identity()

    def differing(**settings):
        other = pipeline.from_config(section(corpus, **settings)).identity()
        assert other.keys() == plain.keys()
        return {key for key in plain if plain[key] != other[key]}

    assert differing() == set()
    assert differing(grain_worker_count=2, grain_per_worker_buffer_size=7) == set()
    assert differing(global_batch_size=8) == set()
    for key, value in {
        "num_logical_shards": 8,
        "data_shuffle_seed": 1,
        "enable_data_shuffling": False,
        "max_target_length": 8,
        "use_truncation": False,
        "num_epoch": 2,
        "add_bos": False,
        "add_eos": False,
    }.items():
        assert key in differing(**{key: value})
        assert differing(**{key: value}) <= {key, "grain_shuffle_buffer_size"}
    assert differing(grain_shuffle_buffer_size=7) == {"grain_shuffle_buffer_size"}
    assert differing(packing=True) == {"grain_packing_type"}
    assert differing(train_data_columns="body") == {"train_data_columns", "datasets"}
    assert differing(tokenize_train_data=False) == {"tokenizer"}
    assert json.loads(json.dumps(plain)) == plain


def mixture(tmp_path, parts, **weights):
    """Endless data of the datasets with these weights, from a file of JSON."""
    content = {
        part.name: {"path": ",".join(part.source.files), "weight": weights[part.name]}
        for part in parts
        if part.name in weights
    }
    file = tmp_path / "mixture.json"
    file.write_text(json.dumps(content))
    keys = section(
        grain_train_mixture_config_path=str(file),
        grain_file_type="parquet",
        train_data_columns="tokens",
        tokenize_train_data=False,
        enable_data_shuffling=False,
    )
    return pipeline.from_config(keys)


def test_a_dataset_goes_once_none_of_its_documents_is_held(files, tmp_path):
    weights, parts = [{"web": 1, "code": 1}, {"web": 1, "code": 0}], files["parquet"]
    both, one = (worlds.World(mixture(tmp_path, parts, **w), 2, 8) for w in weights)
    both.batch()
    both.write(tmp_path / "both")
    alone = worlds.World(mixture(tmp_path, parts, web=1), 1, 8)
    with refused("code was removed, but some of its ex", errors.DataError):
        alone.read(tmp_path / "both")
    one.read(tmp_path / "both")
    for _ in range(40):
        one.batch()
        one.write(tmp_path / "one")
    alone.read(tmp_path / "one")
    for _ in range(5):
        assert worlds.content(alone.batch()) == worlds.content(one.batch())


def test_files_are_added_to_a_run_as_another_dataset(tmp_path):
    for number in range(3):
        corpora.write_parquet(
            tmp_path / f"{number}.parquet",
            corpora.documents(90 * number, 90 * number + 90),
        )

    def world(**keys):
        settings = section("", grain_file_type="parquet", **keys)
        return worlds.World(pipeline.from_config(settings), 2, 4)

    before = f"{tmp_path}/0.parquet,{tmp_path}/1.parquet"
    one = world(grain_train_files=before)
    one.next()
    one.write(tmp_path / "state")
    with refused("2.parquet is new.*; to add files to a run, ke", errors.DataError):
        world(grain_train_files=f"{tmp_path}/0.parquet,{tmp_path}/[12].parquet").read(
            tmp_path / "state"
        )
    entries = {
        "0.parquet": {"path": before, "weight": 1},
        "new": {"path": f"{tmp_path}/2.parquet", "weight": 0},
    }
    (tmp_path / "mixture.json").write_text(json.dumps(entries))
    # A weight of 0 takes no turn from the others.
    for keys in (
        {"grain_train_mixture_config_path": str(tmp_path / "mixture.json")},
        {"grain_train_files": f"{before},1;{tmp_path}/2.parquet,0"},
    ):
        resumed, expected = world(**keys), world(grain_train_files=before)
        for each in (resumed, expected):
            each.read(tmp_path / "state")
        for _ in range(5):
            assert resumed.next() == expected.next()


def test_a_token_that_is_not_in_the_vocabulary_is_an_error(tmp_path):
    document = {"text": "", "tokens": np.array([1, 300, 2])}
    keys = section(
        corpora.write_parquet(tmp_path / "a", [document]),
        grain_file_type="parquet",
        train_data_columns="tokens",
        tokenize_train_data=False,
    )
    data = pipeline.from_config(keys, vocab_size=300)
    with refused(
        "a document has the token 300, but the model's vocabulary has"
        " tokens from 0 to 299; set vocab_size",
        errors.DataError,
    ):
        next(local_batches.LocalBatches(data, global_batch_size=4))


def test_a_model_with_fewer_tokens_than_the_tokenizer_is_refused(corpus):
    message = "vocab_size=258, but the tokenizer has 259 tokens; set"
    for shards in (0, 4):
        wanted = section(corpus, num_logical_shards=shards, grain_eval_files=corpus)
        pipeline.from_config(wanted, vocab_size=259)
        with refused(message):
            pipeline.from_config(wanted, vocab_size=258)
        with refused(message):
            pipeline.eval_from_config(wanted, global_batch_size=4, vocab_size=258)


def test_a_corrupt_row_group_ends_the_run_or_is_left_out_and_counted(tmp_path, caplog):
    file = corpora.write_parquet(tmp_path / "a", corpora.documents(0, 80))
    corpora.spoil(file, b"text 19 ")
    named = rf"{file}, row group 2: corrupt \("

    def read(**settings):
        keys = section(file, grain_file_type="parquet", num_epoch=2, **settings)
        world = worlds.World(pipeline.from_config(keys), 1, 4)
        world.rest()
        return records.skipped(world.hosts[0].shard_cursors().values())

    with refused(f"^{named}.*or set corrupt_records=skip", errors.DataError):
        read()
    with caplog.at_level("WARNING"):
        assert read(corrupt_records="skip") == 2 * 8
    warned = [each.getMessage() for each in caplog.records]
    assert warned
    assert all(re.match(f"{named}.*; skipped", each) for each in warned)


@pytest.mark.parametrize("kind", ["sentencepiece", "huggingface"])
def test_worker_processes_share_the_threads_of_a_host(
    corpus, kind, tmp_path, monkeypatch
):
    monkeypatch.setattr(documents, "_num_cores", lambda: 12)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    own = {
        "tokenizer_type": kind,
        "tokenizer_path": test_tokenizers.written(tmp_path, kind),
    }
    plain = pipeline.from_config(section(corpus, **own))
    for settings, expected in (
        ({}, 12),
        ({"grain_worker_count": 3}, 4),
        ({"tokenizer_threads": 5}, 5),
        ({"tokenizer_threads": 5, "grain_worker_count": 2}, 2),
        ({"tokenizer_type": "bytes", "tokenizer_path": ""}, 0),
    ):
        data = pipeline.from_config(section(corpus, **own | settings))
        assert data.make_shard.threads_of_process() == expected
        assert (data.identity() == plain.identity()) == bool(expected)
    in_caller, in_threads = (
        worlds.World(pipeline.from_config(section(corpus, **own, **more)), 2, 4)
        for more in ({"tokenizer_threads": 1}, {"tokenizer_threads": 3})
    )
    for _ in range(3):
        assert in_caller.next() == in_threads.next()
        assert in_caller.save() == in_threads.save()
