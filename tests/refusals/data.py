"""Mistakes in what data is made of: files, mixtures, pipelines, batches, stages."""

import datetime
import functools
import json
import pathlib
import sys
from typing import Any
from unittest import mock

import grain
import numpy as np
import pyarrow as pa
import pyarrow.parquet

import elastic_ckpt as ec
from elastic_ckpt.core import errors, topology
from elastic_ckpt.data import data_keys, datasets, sharded_data
from elastic_ckpt.data.lm import chat, documents, pipeline, rows, tokenizers
from elastic_ckpt.training import batch_size
from tests.refusals import Refusal, row

IN_CALLER = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
NUMBERS = grain.MapDataset.range(64).map(lambda n: {"x": np.array(n)})
RECORDS = ec.data.Parquet(files=("/nowhere/part.parquet",))
TEMPLATE = ec.data.lm.ChatTemplate(
    text="{% for m in messages %}{{ '' + m.content }}{% endfor %}"
)
PRE_TOKENIZED = documents.Documents(column="tokens", tokenizer=None)
DATA = errors.DataError


def numbers(shard: int) -> grain.IterDataset:
    return NUMBERS[shard::2].to_iter_dataset(IN_CALLER)


def sharded(make_shard=numbers, **settings: Any) -> ec.data.ElasticData:
    settings = {"num_shards": 2, "pipeline": "mine", **settings}
    return sharded_data.sharded(make_shard, **settings)


def of_rows(row: Any) -> ec.data.ElasticData:
    """Data of shards that yield these rows."""
    return sharded(lambda shard: NUMBERS[shard::2].map(row).to_iter_dataset(IN_CALLER))


def batches(**settings: Any) -> object:
    mesh = topology.mesh_of(topology.present(2))
    given = {"data": sharded(), "mesh": mesh, "global_batch_size": 8}
    return ec.batches(**given | settings)


def local(data=None, **settings: Any) -> object:
    settings = {"global_batch_size": 4, **settings}
    return next(ec.data.LocalBatches(data or sharded(), **settings))


def keys(**settings: Any) -> object:
    given = {
        "grain_train_files": "/nowhere/part.parquet",
        "grain_file_type": "parquet",
        "num_logical_shards": 4,
        "max_target_length": 16,
    }
    return pipeline.from_config(given | settings)


def keys_of_a_file(directory: pathlib.Path, **settings: Any) -> object:
    """Reads data of a file that there is by these keys."""
    table = pa.table({"text": ["a", "b"], "messages": ["a", "b"]})
    pa.parquet.write_table(table, directory / "part.parquet")
    return keys(grain_train_files=str(directory / "part.parquet"), **settings)


def conversations(directory: pathlib.Path, **settings: Any) -> object:
    given = {"use_sft": True, "train_data_columns": "messages"}
    return keys_of_a_file(directory, **given | settings)


def mixture(directory: pathlib.Path, content: Any) -> object:
    """Reads a file that describes a mixture."""
    path = directory / "mixture.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return datasets.from_file(path)


def batch_of(**settings: Any) -> object:
    world = topology.Topology(hosts=4, slices=2, devices=8)
    return batch_size.schedule(data_keys.DataKeys(**settings), world)


def turns(content: Any, tools: Any = None, **settings: Any) -> object:
    made = chat.Conversations(template=TEMPLATE, **settings)
    return made.tokens([made.value({"messages": content, "tools": tools})])


def media(*, kind="images", modality="images", shape=(2,), max_per_row=1, **settings):
    medium = ec.data.lm.Encoded(
        modality=modality, data=b"", num_tokens=1, placeholder=7
    )
    known = ec.data.lm.Modality(
        decode=lambda _: np.zeros(2, np.uint8), shape=shape, max_per_row=max_per_row
    )
    made = ec.data.lm.MultimodalRows(
        grain.MapDataset.source([[medium, [1, 2]]]).to_iter_dataset(IN_CALLER),
        modalities={kind: known},
        length=8,
        **settings,
    )
    return next(iter(made))


def without_pyarrow(directory: pathlib.Path, reader: Any) -> object:
    path = str(directory / "part")
    open(path, "w").close()
    with mock.patch.dict(sys.modules, {"pyarrow": None, "pyarrow.parquet": None}):
        return reader(files=(path,)).index(path)


in_batches, in_shards, in_keys = row(batches), row(sharded), row(keys)
in_files, in_rows, in_media = row(keys, error=DATA), row(rows.Rows), row(media)
in_jax = row(lambda data: next(batches(data=data)), error=DATA)
in_stages = row(lambda *described: keys(data_stages=list(described)))
in_list = row(lambda text: datasets.from_list(text, key="grain_train_files"))
in_mixture, in_turns = row(mixture, writes=True), row(turns, error=DATA)
in_document = row(lambda made, record: made.value(record), error=DATA)

REFUSALS = {
    # Files and columns.
    "one file in place of a list": row(ec.data.Parquet)(
        "files='a.parquet': pass a tuple", files="a.parquet"
    ),
    "no file": row(ec.data.TFRecord)("pass a tuple of one or more", files=()),
    **{
        f"a {reader.__name__} file without its library": row(
            without_pyarrow, writes=True
        )(r"package pyarrow cannot be imported.*'\.\[parquet\]'", reader)
        for reader in (ec.data.Parquet, ec.data.Arrow)
    },
    "a file twice": row(ec.data.ArrayRecord)(
        "lists 'a' twice; list it", files=("a", "b", "a")
    ),
    "an index of Megatron": row(ec.data.Megatron)(
        "data.idx is not a .bin file", files=("data.idx",)
    ),
    "a tokenizer that there is none of": row(tokenizers.load)(
        "'spm' .*choose bytes without a path, or sentencepiece with a .*, tiktoken",
        *("spm", "t.model"),
    ),
    "a tokenizer without a file": row(tokenizers.load)(
        "path '' .*, tiktoken with a .tikt", "tiktoken", ""
    ),
    # Pipelines.
    "a shard that is none of the shards": row(ec.data.Records)(
        "shard=4 is invalid with num_shards=4; pass", RECORDS, shard=4, num_shards=4
    ),
    "no epoch": row(ec.data.ReadOptions)("num_epochs=0 is inv", num_epochs=0),
    "weights of other datasets": row(ec.data.Mixture)(
        r"datasets are named \['a'\], but the weights .* \['b'\]; pass one",
        *({"a": numbers(0)}, {"b": 1}),
        shard=0,
    ),
    "weights that are all zero": row(ec.data.Mixture)(
        r"the weights of \['a'\] are all 0; set at",
        *({"a": numbers(0)}, {"a": 0}),
        shard=0,
    ),
    "a packing that there is none of": in_rows(
        "packing='best'; choose one of first", numbers(0), packing="best", length=8
    ),
    "rows of no token": in_rows("length=0; pass at least 1", numbers(0), length=0),
    "a negative window": in_rows(
        "window=-1; pass at least 0", numbers(0), length=8, window=-1
    ),
    "a limit of documents to rows that cut them anywhere": in_rows(
        "max_examples=2 does not work with packing='concat_then_split'",
        numbers(0),
        **{"length": 8, "packing": "concat_then_split", "max_examples": 2},
    ),
    "a further feature that rows have": in_rows(
        r"includes \['inputs'\], which rows always have",
        numbers(0),
        **{"length": 8, "features": ("inputs",)},
    ),
    "a shard that is no iterable dataset": in_shards(
        r"returned \w+, .*to_iter_dataset\(\)", lambda _: NUMBERS
    ),
    "no number of shards": in_shards(
        "exactly one value, but has none; set it", num_shards=None
    ),
    "a source that is not sliced by shard": in_shards(
        r"would read all of .* repeat every example 2 times; in make_shard.*::2\]",
        lambda _: NUMBERS.to_iter_dataset(),
    ),
    "an end that there is none of": in_shards(
        "end='pad' is invalid; use 'never', 'padded' or", end="pad"
    ),
    # Batches.
    "Grain's data": in_batches(
        r"data is of type \w+MapDataset, .*ec.data.sharded\(mak", data=NUMBERS
    ),
    "text for a number of batches ahead": in_batches(
        "read_ahead='2' is invalid; pass a number of batches", read_ahead="2"
    ),
    "text for a spec": in_batches(
        "spec='data'; .*PartitionSpec, such as Part", spec="data"
    ),
    "a batch that the devices do not divide": in_batches(
        "size=12 cannot be divided evenly among the 8 shards of .* on this mesh",
        global_batch_size=12,
    ),
    "batches in a loader of PyTorch": row(
        lambda: len(ec.data.LocalBatches(sharded(), global_batch_size=4)),
        error=TypeError,
    )("no length, .*; use ec.data.TorchLoader"),
    "a batch that the ranks do not divide": row(local)(
        "size=4 cannot be divided evenly among 3 ranks; choose", num_ranks=3
    ),
    "rows of several shapes": row(local, error=DATA)(
        r"feature 'x' has different shapes .*, \(2,\), \(3,\) .*; pad or pack all",
        of_rows(lambda e: {"x": np.zeros(2 + e["x"] % 2)}),
    ),
    "a feature with the name of one that batches add": row(local, error=DATA)(
        r"features named \['example_id'\], but batches add .*; rename",
        of_rows(lambda e: {"example_id": e["x"]}),
    ),
    "text for JAX": in_jax(
        "feature 'caption' has values such as .*, but JAX arrays can .* only numbers;",
        of_rows(lambda _: {"caption": "text"}),
    ),
    "a number that JAX would cut": in_jax(
        f"feature 'x' has value {-(2**31) - 1}, which is out of range for int32",
        of_rows(lambda e: {"x": e["x"] - 2**31 - 1}),
    ),
    "a ramp that misses its end": row(batch_of)(
        "does not reach per_device_batch",
        enable_rampup_batch_size=True,
        per_device_batch_size=6.0,
        per_device_batch_size_start=2.0,
        per_device_batch_size_increment=3.0,
        global_rampup_samples=96,
    ),
    # Mixtures.
    "a list in which a dataset has no weight": in_list(
        "b has no weight; use the form patterns,weight;", "a,0.5;b"
    ),
    "a list with the same files twice": in_list(
        "lists the same files twice", "a,0.5;a,0.5"
    ),
    "a list with a negative weight": in_list(
        "dataset b has weight -1.0; set it to", "a,0.5;b,-1"
    ),
    "a mixture that is no JSON": in_mixture(
        r"mixture\.json: .* cannot be read as JSON", "{"
    ),
    "a mixture with a misspelt field": in_mixture(
        "entry a is {'path': 'x', 'wieght': 1}; set its weight",
        {"a": {"path": "x", "wieght": 1}},
    ),
    "a mixture with text for a weight": in_mixture(
        "'weight': '1'}; set its weight to a number",
        {"a": {"path": "x", "weight": "1"}},
    ),
    "a mixture that is missing": Refusal(
        lambda d: datasets.from_file(d / "none.json"),
        "none.json: .* cannot be read .*No such file",
    ),
    "a mixture with a name twice": in_mixture(
        r"cannot be read as JSON \(a name occurs twice in \['a', 'a'\]",
        '{"a": {"path": "x", "weight": 1}, "a": {"path": "y", "weight": 1}}',
    ),
    "a mixture with the name of a dataset inside another": in_mixture(
        r"two of the datasets \['a/b', 'a/b'\] have the same name; rename one",
        {
            "a/b": {"path": "x", "weight": 1},
            "a": {"datasets": {"b": {"path": "y", "weight": 1}}, "weight": 1},
        },
    ),
    # Media.
    "media of which none fits": in_media("set max_per_row to 1 or more", max_per_row=0),
    "media with the name of a feature": in_media(
        "names that do not clash", kind="inputs"
    ),
    "media that are cut": in_media(
        "choose first_fit or best_fit", packing="concat_then_split"
    ),
    "a medium of a kind that there is none of": row(media, error=DATA)(
        r"modality 'sounds' and num_tokens=1; modality must be one of \['images'\]",
        modality="sounds",
    ),
    "a medium of another shape": row(media, error=DATA)(
        r"'images' returned uint8\[2\], but its Modality declares uint8\[3\]; resize",
        shape=(3,),
    ),
    # Keys.
    "an unknown key": in_keys("unknown key 'steps'; the nearest key of", steps=7),
    "training files on a site": in_files(
        "data cannot be read from https://.*; download the files, or copy them",
        grain_train_files="https://example.com/a.parquet",
    ),
    "a limit of examples to rows that are cut anywhere": in_keys(
        "max_segments_per_seq=3 does not work with .*concat_then_split, .*to 0",
        packing=True,
        grain_packing_type="concat_then_split",
        max_segments_per_seq=3,
    ),
    # Conversations and documents.
    "conversations that are not to be tokenised": in_keys(
        "use_sft=true does not work with tokenize_train_data=false, .*; set tok",
        **{"use_sft": True, "tokenize_train_data": False},
    ),
    "a chat template and a file with one": in_keys(
        "chat_template and chat_template_path are both set; set only",
        **{"use_sft": True, "chat_template": "a", "chat_template_path": "b"},
    ),
    "conversations without a template": row(conversations, writes=True)(
        "no chat template.*set chat_template_path"
    ),
    "a chat template that is none": row(conversations, writes=True)(
        "the chat template is invalid", chat_template="{% if %}"
    ),
    "a conversation that is text": in_turns(
        r"contains str, not a list of messages; in columns \(train", "Hello"
    ),
    "messages of another form": in_turns(
        r"invalid message \(\['from', 'value'\]\); each message must have a role",
        [{"from": "human", "value": "a"}],
    ),
    "messages that are nested deeply": in_turns(
        "a message that is nested too deeply",
        [{"role": "a", "content": functools.reduce(lambda a, _: [a], range(10**4))}],
    ),
    "roles without an assistant": in_turns(
        r"has the roles \['model', 'user'\], but none is 'assistant', so",
        [{"role": "user", "content": "a"}, {"role": "model", "content": "a"}],
        completion_only=True,
    ),
    "tools that are none": in_turns(
        "column 'tools' is not a list of tools", [{"role": "user"}], tools="{"
    ),
    "a message with a date": in_turns(
        "a message that contains date; messages may contain only text, n",
        [{"role": "user", "content": datetime.date.today()}],
    ),
    "conversations of three columns": row(chat.Conversations)(
        r"columns=\('a', 'b', 'c'\) .*; list one column of messages, or two",
        **{"template": TEMPLATE, "columns": ("a", "b", "c")},
    ),
    "a column that is missing": in_document(
        r"no column 'tokens'; .* \['text'\]", PRE_TOKENIZED, {"text": "a"}
    ),
    "text in place of tokens": in_document(
        "not a list of tokens; if .* use a tok", PRE_TOKENIZED, {"tokens": "text"}
    ),
    "tokens in place of text": in_document(
        "contains ndarray, not text; .* set tokenizer=None",
        *(documents.Documents(), {"text": np.zeros(2)}),
    ),
    # Stages.
    "stages that begin late": row(keys_of_a_file, writes=True)(
        r"begin after \[5\]", data_stages=[{"begin_step": 5}]
    ),
    "no stage": in_stages("data_stages does not contain a list of stages; list"),
    "stages that are names": in_stages(
        "data_stages does not contain a list of stages; list", "short", "long"
    ),
    "a stage without a beginning": in_stages(
        "stage 1: begin_step is missing or invalid; set it to the number of",
        *({"begin_step": 0}, {"max_target_length": 3}),
    ),
    "stages of which some have a size": in_stages(
        "some stages set global_batch_size, while others leave it at 0 .*; use the",
        *({"begin_step": 0}, {"begin_step": 5, "global_batch_size": 8}),
    ),
    "a stage with a key of the run": in_stages(
        "unknown key 'num_logical_shards'; the nearest key of a stage .set keys for",
        {"begin_step": 0, "num_logical_shards": 3},
    ),
    "stages of which one has no size": row(batch_of)(
        "does not work with data_stages",
        data_stages=json.dumps([{"begin_step": 0}]),
        enable_rampup_batch_size=True,
    ),
}
