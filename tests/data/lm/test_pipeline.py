import itertools
import json
import pathlib

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import elastic_ckpt as ec
from elastic_ckpt.core import errors
from elastic_ckpt.data import (
    data_keys,
    elastic_data,
    local_batches,
    records,
)
from elastic_ckpt.data.lm import documents, pipeline
from tests import corpora, worlds
from tests.data.lm import test_tokenizers

LENGTH = 16
FILES, MIXTURE = "grain_train_files", "grain_train_mixture_config_path"
TOKENS = {
    "grain_file_type": "parquet",
    "train_data_columns": "tokens",
    "tokenize_train_data": False,
}


def section(corpus="", **settings):
    own = {"max_target_length": LENGTH, "num_logical_shards": 4}
    return data_keys.DataKeys(grain_train_files=corpus, **own | settings)


def refused(match, error=errors.ConfigError):
    return pytest.raises(error, match=match)


def test_keys_may_be_a_mapping_keywords_or_those_of_a_configuration(corpus, tmp_path):
    expected = pipeline.from_config(section(corpus))
    keys = {"max_target_length": LENGTH, "num_logical_shards": 4}
    path = tmp_path / "config.yml"
    path.write_text(f"base_config: base.yml\n{FILES}: {corpus}\nsteps: 7\n")
    for actual in (
        pipeline.from_config({FILES: corpus, **keys}),
        pipeline.from_config(grain_train_files=pathlib.Path(corpus), **keys),
        pipeline.from_config(ec.load_config(path).data, **keys),
        pipeline.from_config(section(corpus, num_logical_shards=8), **keys),
    ):
        assert actual == expected
    # Rows know how many shards share the memory of their chapters.
    assert expected.make_shard(1).num_shards == 4


def test_shuffling_is_by_seed_and_shard_and_can_be_switched_off(corpus):
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


def test_evaluation_is_one_epoch_in_order_padded_whatever_training_does(corpus):
    config = section(
        "nowhere", grain_eval_files=corpus, num_epoch=3, grain_worker_count=4
    )
    data = pipeline.eval_from_config(config)
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
    assert json.loads(json.dumps(plain)) == plain
    window, segments = "grain_shuffle_buffer_size", "max_segments_per_seq"
    for settings, differing in (
        ({"grain_worker_count": 2, "grain_per_worker_buffer_size": 7}, set()),
        ({"global_batch_size": 8}, set()),
        ({"num_logical_shards": 8}, {"num_logical_shards"}),
        ({"data_shuffle_seed": 1}, {"data_shuffle_seed"}),
        ({"enable_data_shuffling": False}, {"enable_data_shuffling", window}),
        ({"max_target_length": 8}, {"max_target_length"}),
        ({"use_truncation": False}, {"use_truncation"}),
        ({"num_epoch": 2}, {"num_epoch"}),
        ({"add_bos": False}, {"add_bos"}),
        ({"add_eos": False}, {"add_eos"}),
        ({window: 7}, {window}),
        ({"packing": True}, {"grain_packing_type"}),
        ({"packing": True, segments: 3}, {"grain_packing_type", segments}),
        ({"train_data_columns": "body"}, {"train_data_columns", "datasets"}),
        ({"tokenize_train_data": False}, {"tokenizer"}),
    ):
        other = pipeline.from_config(section(corpus, **settings)).identity()
        assert other.keys() == plain.keys()
        assert {key for key in plain if plain[key] != other[key]} == differing


def test_a_dataset_goes_once_none_of_its_documents_is_held(files, tmp_path):
    paths = {part.name: ",".join(part.source.files) for part in files["parquet"]}
    file = tmp_path / "mixture.json"

    def world(num_hosts, **weights):
        entries = {n: {"path": paths[n], "weight": w} for n, w in weights.items()}
        file.write_text(json.dumps(entries))
        keys = section(enable_data_shuffling=False, **TOKENS | {MIXTURE: str(file)})
        return worlds.World(pipeline.from_config(keys), num_hosts, 8)

    both, one, alone = world(2, web=1, code=1), world(2, web=1, code=0), world(1, web=1)
    both.batch()
    both.write(tmp_path / "both")
    with refused("code was removed, but incomplete rows", errors.DataError):
        alone.read(tmp_path / "both")
    one.read(tmp_path / "both")
    for _ in range(40):
        one.batch()
        one.write(tmp_path / "one")
    alone.read(tmp_path / "one")
    for _ in range(5):
        assert worlds.content(alone.batch()) == worlds.content(one.batch())


def test_files_are_added_to_a_run_as_another_dataset(files, tmp_path):
    (web,) = (part.source.files for part in files["parquet"] if part.name == "web")
    before, every = ",".join(web[:2]), ",".join(web)
    one, longer, added = (
        worlds.World(pipeline.from_config(section(each, **TOKENS)), 2, 4)
        for each in (before, every, f"{before},1;{web[2]},0")
    )
    one.next()
    one.write(tmp_path)
    with refused(
        "2.parquet is new.*; new files can join an endless run as a", errors.DataError
    ):
        longer.read(tmp_path)
    # A weight of 0 takes no turn from the others.
    added.read(tmp_path)
    for _ in range(5):
        assert added.next() == one.next()


def test_a_stage_has_its_files_in_place_of_the_mixture_of_the_run():
    described = json.dumps([{"begin_step": 0}, {"begin_step": 5, FILES: "b"}])
    keys = section(**{MIXTURE: "m.json"}, data_stages=described)
    (_, first), (_, second) = data_keys.stages(keys)
    assert (getattr(first, FILES), getattr(first, MIXTURE)) == ("", "m.json")
    assert (getattr(second, FILES), getattr(second, MIXTURE)) == ("b", "")


def test_a_token_that_the_model_does_not_have_is_refused(corpus, tmp_path):
    document = {"text": "", "tokens": np.array([1, 300, 2])}
    keys = section(corpora.write_parquet(tmp_path / "a", [document]), **TOKENS)
    data = pipeline.from_config(keys, vocab_size=300)
    with refused("token 300, but the mo.* from 0 to 299; set", errors.DataError):
        next(local_batches.LocalBatches(data, global_batch_size=4))
    # Before the data are read, if there is a tokenizer.
    message = "vocab_size=258, but the tokenizer has 259 tokens; set"
    keys = section(corpus, grain_eval_files=corpus)
    pipeline.from_config(keys, vocab_size=259)
    with refused(message):
        pipeline.from_config(keys, vocab_size=258)
    with refused(message):
        pipeline.eval_from_config(keys, vocab_size=258)


def messages(content):
    return [{"role": "user", "content": content}]


REFUSING = "{% if messages[0].content %}{{ raise_exception('no') }}{% endif %}"
CHAT = {"use_sft": True, "chat_template": REFUSING, "tokenize_train_data": True}
# Conversations have a worker process unless told otherwise, which takes seconds.
CHAT["grain_worker_count"] = 0
WRITERS = {
    "jsonl": lambda path, table: path.write_text(
        "\n".join(map(json.dumps, table.to_pylist()))
    ),
    "parquet": lambda path, table: pq.write_table(table, path),
    "arrow": lambda path, table: pa.ipc.new_stream(path, table.schema).write(table),
}


@pytest.mark.parametrize("kind", WRITERS)
@pytest.mark.parametrize(
    ("good", "bad", "keys", "message"),
    [
        ([7], [7, -100], {}, "contains token -100, but .* not that of labels"),
        ([7], [2**31], {}, "contains token 2147483648, which does not fit"),
        (None, 7, {"tokenize_train_data": True}, "contains int.*, not text"),
        (messages(""), messages("a"), CHAT, "rejects a conversation: no"),
        (messages(""), messages(""), CHAT, "has tools, but the chat template does not"),
    ],
)
def test_a_value_that_is_no_document_is_named_by_its_file_and_record(
    tmp_path, kind, good, bad, keys, message
):
    for name, last in (("a", good), ("b", bad), ("c", good)):
        tools = ["f"] if name == "b" and "tools" in message else None
        table = {"tokens": [good] * 5 + [last], "tools": [None] * 5 + [tools]}
        WRITERS[kind](tmp_path / name, pa.table(table))
    keys = TOKENS | {"grain_file_type": kind, "num_epoch": 1} | keys
    data = pipeline.from_config(section(f"{tmp_path}/a,1;{tmp_path}/[bc],1", **keys))
    with refused(f"^{tmp_path}/b, record 5: .*{message}", errors.DataError):
        for _ in local_batches.LocalBatches(data, global_batch_size=4):
            pass


def test_a_corrupt_row_group_ends_the_run_or_is_left_out(tmp_path):
    file = corpora.write_parquet(tmp_path / "a", corpora.documents(0, 80))
    corpora.spoil(file, b"text 19 ")

    def read(**settings):
        keys = section(file, grain_file_type="parquet", num_epoch=2, **settings)
        world = worlds.World(pipeline.from_config(keys), 1, 4)
        world.rest()
        return records.skipped(world.hosts[0].get_state()[1].values())

    with refused("group 2: .* corrupt .*set corrupt_records=skip", errors.DataError):
        read()
    assert read(corrupt_records="skip") == 2 * 8


def test_worker_processes_share_the_threads_of_a_host(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "_num_cores", lambda: 12)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    own = {
        "tokenizer_type": "tiktoken",
        "tokenizer_path": test_tokenizers.written(tmp_path, "tiktoken"),
    }
    identities = []
    for settings, expected in (
        ({}, 12),
        ({"grain_worker_count": 3}, 4),
        ({"tokenizer_threads": 5}, 5),
        ({"tokenizer_threads": 5, "grain_worker_count": 2}, 2),
        ({"tokenizer_type": "bytes", "tokenizer_path": ""}, 0),
    ):
        data = pipeline.from_config(section(corpus, **own | settings))
        assert data.make_shard.threads_of_process() == expected
        identities.append(data.identity())
    assert [each == identities[0] for each in identities] == [True] * 4 + [False]
