import dataclasses
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
from elastic_ckpt.data.lm import pipeline
from tests import corpora, formats, worlds

LENGTH = 16
NUM_SHARDS = 4


def section(corpus="", **settings):
    return data_keys.DataKeys(
        **{
            "grain_train_files": corpus,
            "max_target_length": LENGTH,
            "num_logical_shards": 4,
            **settings,
        }
    )


def tokens(file_format, parts, **settings):
    """The documents of `formats`, whose records are lists of tokens."""
    lists = [f"{','.join(part.source.files)},{part.weight}" for part in parts]
    return section(
        ";".join(lists),
        **{
            "grain_file_type": file_format,
            "grain_record_format": "tf_example",
            "train_data_columns": "tokens",
            "tokenize_train_data": False,
            "max_target_length": formats.LENGTH,
            **settings,
        },
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


@pytest.mark.parametrize(
    ("settings", "end"),
    [
        ({}, elastic_data.End.NEVER),
        ({"num_epoch": 1}, elastic_data.End.PADDED),
    ],
)
@pytest.mark.parametrize("num_shards", [0, 4])
def test_data_ends_as_the_configuration_says(corpus, settings, end, num_shards):
    actual = pipeline.from_config(
        section(corpus, num_logical_shards=num_shards, **settings)
    )
    assert actual.end is end


def texts(batches):
    """The text in the targets of each segment, without begin and end."""
    actual = []
    for batch in batches:
        for row, marks in zip(
            batch["targets"], batch["targets_segmentation"], strict=True
        ):
            for segment in range(1, marks.max(initial=0) + 1):
                values = row[marks == segment]
                actual.append(bytes((values[values > 2] - 3).astype(np.uint8)))
    return actual


EXPECTED_TEXTS = [b"text %d " % number * 5 for number in range(100)]


def first_rows(data, num_rows):
    return worlds.World(data, 1, num_rows).batch()["inputs"].tolist()


def test_shuffling_changes_the_order_by_the_seed_and_can_be_switched_off(corpus):
    orders = [
        first_rows(pipeline.from_config(section(corpus, **settings)), 40)
        for settings in (
            {},
            {"data_shuffle_seed": 1},
            {"grain_shuffle_buffer_size": 0},
            {"enable_data_shuffling": False},
        )
    ]
    assert all(one != two for n, one in enumerate(orders) for two in orders[:n])


def test_shards_are_shuffled_differently(corpus):
    # With every record in one block and window, shards would else differ in what they
    # hold but not in how it is ordered.
    data = pipeline.from_config(section(corpus, num_epoch=1))
    orders = []
    for shard in range(4):
        rows = [row["inputs"].tobytes() for row in data.make_shard(shard)]
        in_order = dataclasses.replace(data.make_shard, window=0)
        plain = [row["inputs"].tobytes() for row in in_order(shard)]
        assert sorted(rows) == sorted(plain)
        orders.append(tuple(plain.index(row) for row in rows))
    assert len(set(orders)) == 4


def test_evaluation_is_one_epoch_in_order_padded_whatever_training_does(corpus):
    config = section(
        "nowhere",
        grain_eval_files=corpus,
        num_epoch=3,
        grain_worker_count=4,
    )
    data = pipeline.eval_from_config(config, global_batch_size=12)
    assert (data.end, data.num_workers) == (elastic_data.End.PADDED, 0)
    expected = [text[:LENGTH] for text in EXPECTED_TEXTS]
    for num_hosts in (1, 3):
        batches = worlds.World(data, num_hosts, 12).rest()
        actual = texts(batches)
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
    paths = {part.name: ",".join(part.source.files) for part in parts}
    content = {
        name: {"path": paths[name], "weight": weight}
        for name, weight in weights.items()
    }
    file = tmp_path / "mixture.json"
    file.write_text(json.dumps(content))
    config = tokens(
        "parquet",
        parts,
        grain_train_files="",
        grain_train_mixture_config_path=str(file),
        enable_data_shuffling=False,
    )
    return pipeline.from_config(config)


# An input contains the numbers of its dataset and of its document.
def read(batches):
    firsts = np.concatenate([batch["inputs"][:, 0] for batch in batches])
    datasets = list(formats.DATASETS)
    return [
        (datasets[number // 1000], number % 1000)
        for number in ((firsts - 1) // 40).tolist()
    ]


def of_shard(read_rows, shard, *, size):
    """The rows of a shard, of the first rows of batches of one size."""
    shards = [
        rows.batch_shards(NUM_SHARDS, size, number)
        for number in range(len(read_rows) // size)
    ]
    return [
        row
        for row, of_row in zip(read_rows, np.concatenate(shards), strict=True)
        if of_row == shard
    ]


@pytest.mark.parametrize(
    "run",
    [
        [{"web": 1, "code": 1}, {"web": 1, "code": 0, "books": 9}],
        [{"web": 1, "code": 1, "books": 1}, {"web": 1, "code": 0, "books": 1}],
        [{"web": 1, "code": 1}, {"web": 1, "code": 0}, {"web": 1, "code": 1}],
    ],
    ids=["one for another", "one at zero", "one gone and back"],
)
def test_a_mixture_may_change_at_a_resume_and_each_dataset_goes_on(
    files, tmp_path, run
):
    parts, batches = files["parquet"], []
    for number, weights in enumerate(run):
        world = worlds.World(mixture(tmp_path, parts, **weights), 2 ** (number + 1), 8)
        if number:
            world.read(tmp_path / str(number - 1))
        batches += [world.batch() for _ in range(3)]
        (tmp_path / str(number)).mkdir()
        world.write(tmp_path / str(number))
    actual = read(batches)
    assert len(set(actual)) == len(actual)
    for name in {name: None for weights in run for name in weights}:
        alone = worlds.World(mixture(tmp_path, parts, **{name: 1}), 1, 4)
        every = read([alone.batch() for _ in range(18)])
        for shard in range(NUM_SHARDS):
            expected = [n for _, n in of_shard(every, shard, size=4)]
            held = of_shard(actual, shard, size=8)
            numbers = [n for weighted, n in held if weighted == name]
            assert numbers == expected[: len(numbers)]


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


@pytest.fixture
def parts(files):
    return files["parquet"]


def test_a_dataset_that_is_added_to_a_list_starts_no_other_anew(tmp_path):
    for place, first in (("a", 0), ("b", 100), ("c", 200)):
        (tmp_path / place).mkdir()
        corpora.write_parquet(
            tmp_path / place / "part", corpora.documents(first, first + 90)
        )

    def weighted(directories, weights):
        listed = (f"{tmp_path}/{place}/part,{weights[place]}" for place in directories)
        return pipeline.from_config(
            section(";".join(listed), grain_file_type="parquet")
        )

    # A weight of 0 takes no turn from the others.
    weights = {"a": 1, "b": 2, "c": 0}
    one, resumed = (worlds.World(weighted(o, weights), 2, 4) for o in ("ab", "abc"))
    for _ in range(5):
        one.next()
    one.write(tmp_path / "state")
    resumed.read(tmp_path / "state")
    for _ in range(9):
        assert resumed.next() == one.next()
    with refused("part is now named a/part, with the same files", errors.DataError):
        worlds.World(weighted("cab", weights), 2, 4).read(tmp_path / "state")


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
    resumed = world(grain_train_mixture_config_path=str(tmp_path / "mixture.json"))
    resumed.read(tmp_path / "state")
    for _ in range(5):
        assert resumed.next() == one.next()


def token_file(tmp_path, *documents):
    """A Parquet file of tokens, int64."""
    return corpora.write_parquet(
        tmp_path / "a",
        [{"text": "", "tokens": np.array(document)} for document in documents],
    )


def first_row(file, *, vocab_size, **settings):
    data = pipeline.from_config(
        section(
            file,
            grain_file_type="parquet",
            train_data_columns="tokens",
            tokenize_train_data=False,
            num_logical_shards=1,
            **settings,
        ),
        vocab_size=vocab_size,
    )
    return next(local_batches.LocalBatches(data, global_batch_size=1))


@pytest.mark.parametrize(("packing", "wrong"), [(False, 300), (True, -1)])
def test_a_token_that_is_not_in_the_vocabulary_is_an_error(tmp_path, packing, wrong):
    for document in ([wrong, 1, 2], [1, wrong, 2], [1, 2, wrong]):
        file = token_file(tmp_path, document)
        with refused(
            f"a document has the token {wrong}, but the model's vocabulary has"
            " tokens from 0 to 299; set vocab_size",
            errors.DataError,
        ):
            first_row(file, vocab_size=300, packing=packing)


def test_a_model_with_fewer_tokens_than_the_tokenizer_is_refused(corpus):
    for shards in (0, 4):
        wanted = section(corpus, num_logical_shards=shards, grain_eval_files=corpus)
        pipeline.from_config(wanted, vocab_size=259)
        with refused("vocab_size=258, but the tokenizer has 259 tokens; set"):
            pipeline.from_config(wanted, vocab_size=258)
        with refused("vocab_size=258, but the tokenizer has 259 tokens; set"):
            pipeline.eval_from_config(wanted, global_batch_size=4, vocab_size=258)


def test_a_corrupt_row_group_ends_the_run_or_is_left_out_and_counted(tmp_path, caplog):
    file = corpora.write_parquet(tmp_path / "a", corpora.documents(0, 80))
    corpora.spoil(file, b"text 19 ")
    named = rf"{file}, row group 2: corrupt \("

    def read(**settings):
        settings |= {"grain_shuffle_buffer_size": 1, "num_epoch": 2}
        keys = section(file, grain_file_type="parquet", **settings)
        placement = rows.Placement.in_order(0, num_hosts=1, global_batch_size=4)
        batches = pipeline.from_config(keys).host_batches(placement)
        while next(batches)[elastic_data.MASK].any():
            pass
        return records.skipped(batches.shard_cursors().values())

    with refused(f"^{named}", errors.DataError) as caught:
        read()
    assert "or set corrupt_records=skip" in str(caught.value)
    assert "\n" not in str(caught.value)
    with caplog.at_level("WARNING"):
        assert read(corrupt_records="skip") == 2 * 8
    warned = [each.getMessage() for each in caplog.records]
    assert warned
    assert all(re.match(f"{named}.*; skipped", each) for each in warned)
