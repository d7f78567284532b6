"""Mistakes in what data is made of: files, mixtures, pipelines, batches, stages."""

import datetime
import json
import pathlib
from typing import Any

import grain
import jax
import numpy as np
import pyarrow as pa
import pyarrow.parquet

import elastic_ckpt as ec
from elastic_ckpt.core import errors, topology
from elastic_ckpt.data import data_keys, datasets, sharded_data
from elastic_ckpt.data.lm import chat, documents, pipeline, rows, tokenizers
from elastic_ckpt.training import batch_size
from tests.refusals import Refusal

IN_CALLER = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
NUMBERS = grain.MapDataset.range(64).map(lambda n: {"x": np.array(n)})
RECORDS = ec.data.Parquet(files=("/nowhere/part.parquet",))


def numbers(shard: int) -> grain.IterDataset:
    return NUMBERS[shard::2].to_iter_dataset(IN_CALLER)


def sharded(make_shard=numbers, **settings: Any) -> ec.data.ElasticData:
    settings = {"num_shards": 2, "pipeline": "mine", **settings}
    return sharded_data.sharded(make_shard, **settings)


def mesh() -> jax.sharding.Mesh:
    return topology.mesh_of(topology.present(2))


def batches(**settings: Any) -> object:
    given = {"data": sharded(), "mesh": mesh(), "global_batch_size": 8}
    return ec.batches(**given | settings)


def local(make_shard=numbers, **settings: Any) -> object:
    settings = {"global_batch_size": 4, **settings}
    return next(ec.data.LocalBatches(sharded(make_shard), **settings))


def of_rows(row) -> object:
    """A batch of a pipeline that yields these rows."""
    return local(lambda shard: NUMBERS[shard::2].map(row).to_iter_dataset(IN_CALLER))


def of_jax(row) -> object:
    """A batch of arrays of such a pipeline."""

    def make_shard(shard):
        return NUMBERS[shard::2].map(row).to_iter_dataset(IN_CALLER)

    return next(batches(data=sharded(make_shard)))


def keys(**settings: Any) -> object:
    given = {
        "grain_train_files": "/nowhere/part.parquet",
        "grain_file_type": "parquet",
        "num_logical_shards": 4,
        "max_target_length": 16,
    }
    return pipeline.from_config(given | settings)


def stages(*described: Any) -> object:
    return keys(data_stages=list(described))


def of_a_file(**settings: Any):
    """Reads data of a file that there is by these keys."""

    def call(directory: pathlib.Path) -> object:
        table = pa.table({"text": ["a", "b"], "messages": ["a", "b"]})
        pa.parquet.write_table(table, directory / "part.parquet")
        return keys(grain_train_files=str(directory / "part.parquet"), **settings)

    return call


def conversations(**settings: Any):
    given = {"use_sft": True, "train_data_columns": "messages"}
    return of_a_file(**given | settings)


def listed(text: str) -> object:
    return datasets.from_list(text, key="grain_train_files")


def mixture(content: Any):
    """Reads a file that describes a mixture."""

    def call(directory: pathlib.Path) -> object:
        path = directory / "mixture.json"
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        return datasets.from_file(path)

    return call


def batch_of(**settings: Any) -> object:
    world = topology.Topology(hosts=4, slices=2, devices=8)
    return batch_size.schedule(data_keys.DataKeys(**settings), world)


def tokens_of(made: documents.Documents, record: Any) -> object:
    return made.value(record)


def turns(content: Any) -> object:
    made = chat.Conversations(template=TEMPLATE)
    return made.tokens([made.value({"messages": content})])


def media(
    *,
    kind: str = "images",
    modality: str = "images",
    shape=(2,),
    max_per_row: int = 1,
    **settings: Any,
) -> object:
    medium = ec.data.lm.Encoded(
        modality=modality, data=b"", num_tokens=1, placeholder=7
    )
    made = ec.data.lm.MultimodalRows(
        grain.MapDataset.source([[medium, [1, 2]]]).to_iter_dataset(IN_CALLER),
        modalities={
            kind: ec.data.lm.Modality(
                decode=lambda _: np.zeros(2, np.uint8),
                shape=shape,
                max_per_row=max_per_row,
            )
        },
        length=8,
        **settings,
    )
    return next(iter(made))


TEMPLATE = ec.data.lm.ChatTemplate(
    text="{% for m in messages %}{{ '' + m.content }}{% endfor %}"
)
PRE_TOKENIZED = documents.Documents(column="tokens", tokenizer=None)
DATA, CONFIG = errors.DataError, errors.ConfigError

REFUSALS = {
    # Files and columns.
    "one file in place of a list": Refusal(
        lambda _: ec.data.Parquet(files="a.parquet"), "files='a.parquet': give a tuple"
    ),
    "no file": Refusal(
        lambda _: ec.data.TFRecord(files=()), "give a tuple of one or more"
    ),
    "a file twice": Refusal(
        lambda _: ec.data.ArrayRecord(files=("a", "b", "a")), "has 'a' twice; name it"
    ),
    "an index of Megatron": Refusal(
        lambda _: ec.data.Megatron(files=("data.idx",)), "data.idx is no .bin file"
    ),
    "a tokenizer that there is none of": Refusal(
        lambda _: tokenizers.load("spm", "t.model"),
        "'spm' .*choose bytes without a path, or sentencepiece with a .*, tiktoken",
    ),
    "a tokenizer without a file": Refusal(
        lambda _: tokenizers.load("tiktoken", ""), "path '' .*, tiktoken with a .tikt"
    ),
    # Pipelines.
    "a shard that is none of the shards": Refusal(
        lambda _: ec.data.Records(RECORDS, shard=4, num_shards=4),
        "shard=4 of num_shards=4; shards are",
    ),
    "no epoch": Refusal(
        lambda _: ec.data.ReadOptions(num_epochs=0), "num_epochs=0; give 1 or"
    ),
    "weights of other datasets": Refusal(
        lambda _: ec.data.Mixture({"a": numbers(0)}, {"b": 1}, shard=0),
        r"parts are named \['a'\], and weights \['b'\]; give each",
    ),
    "weights that are all zero": Refusal(
        lambda _: ec.data.Mixture({"a": numbers(0)}, {"a": 0}, shard=0),
        r"all weights of \['a'\] are 0; raise one",
    ),
    "a packing that there is none of": Refusal(
        lambda _: rows.Rows(numbers(0), packing="best", length=8),
        "packing='best'; choose one of first",
    ),
    "rows of no token": Refusal(
        lambda _: rows.Rows(numbers(0), length=0), "length=0; give 1 or more"
    ),
    "a negative window": Refusal(
        lambda _: rows.Rows(numbers(0), length=8, window=-1), "window=-1; give 0 or m"
    ),
    "a limit of documents to rows that cut them anywhere": Refusal(
        lambda _: rows.Rows(
            numbers(0), length=8, packing="concat_then_split", max_examples=2
        ),
        "max_examples=2 does not work with packing='concat_then_split'",
    ),
    "a further feature that rows have": Refusal(
        lambda _: rows.Rows(numbers(0), length=8, features=("inputs",)),
        r"\['inputs'\] are there in any case",
    ),
    "a shard that is no iterable dataset": Refusal(
        lambda _: sharded(lambda _: NUMBERS), r"returned a \w+, .*to_iter_dataset\(\)"
    ),
    "no number of shards": Refusal(
        lambda _: sharded(num_shards=None),
        r"num_shards has the values \[\]; set it once",
    ),
    "a source that is not sliced by shard": Refusal(
        lambda _: sharded(lambda _: NUMBERS.to_iter_dataset()),
        r"would read all of .* repeat every example 2 times; give each shard .*::2\]",
    ),
    "an end that there is none of": Refusal(
        lambda _: sharded(end="pad"), "end='pad'; use ec.data.End or one of 'never'"
    ),
    # Batches.
    "Grain's data": Refusal(
        lambda _: batches(data=NUMBERS),
        r"data is a \w+MapDataset; .*ec.data.sharded\(mak",
    ),
    "text for a number of batches ahead": Refusal(
        lambda _: batches(read_ahead="2"), "read_ahead='2'; give a number of batches"
    ),
    "text for a spec": Refusal(
        lambda _: batches(spec="data"), "spec='data'; .*PartitionSpec, such as Part"
    ),
    "a batch that the devices do not divide": Refusal(
        lambda _: batches(global_batch_size=12),
        "size=12 cannot be divided evenly among the 8 parts that the mesh makes of it",
    ),
    "a batch that the ranks do not divide": Refusal(
        lambda _: local(num_ranks=3),
        "size=4 cannot be divided evenly among num_ranks=3; choose",
    ),
    "rows of several shapes": Refusal(
        lambda _: of_rows(lambda e: {"x": np.zeros(2 + e["x"] % 2)}),
        r"feature 'x' of several shapes, \(2,\), \(3,\) .*; pad or pack them",
        DATA,
    ),
    "a feature with the name of one that batches add": Refusal(
        lambda _: of_rows(lambda e: {"example_id": e["x"]}),
        r"features named \['example_id'\], which batches add .*; rename",
        DATA,
    ),
    "text for JAX": Refusal(
        lambda _: of_jax(lambda _: {"caption": "text"}),
        "feature 'caption' has values such as .*, and JAX arrays hold numbers alone;",
        DATA,
    ),
    "a number that JAX would cut": Refusal(
        lambda _: of_jax(lambda e: {"x": e["x"] - 2**31 - 1}),
        f"feature 'x' has the value {-(2**31) - 1}, but JAX would convert it to int32",
        DATA,
    ),
    "a batch size of a configuration that devices do not divide": Refusal(
        lambda _: batch_of(global_batch_size=12),
        "12 rows cannot be divided evenly among 8 devices, as JAX requires; set",
    ),
    "a ramp that misses its end": Refusal(
        lambda _: batch_of(
            enable_rampup_batch_size=True,
            per_device_batch_size=6.0,
            per_device_batch_size_start=2.0,
            per_device_batch_size_increment=3.0,
            global_rampup_samples=96,
        ),
        "does not reach per_device_batch",
    ),
    # Mixtures.
    "a list in which a dataset has no weight": Refusal(
        lambda _: listed("a,0.5;b"), "b has no weight; write patterns,weight;"
    ),
    "a list with the same files twice": Refusal(
        lambda _: listed("a,0.5;a,0.5"), "names the same files twice"
    ),
    "a list with a negative weight": Refusal(
        lambda _: listed("a,0.5;b,-1"), "dataset b has the weight -1.0; weights are"
    ),
    "a mixture that is no JSON": Refusal(
        mixture("{"), r"mixture\.json: .* cannot be read as JSON", writes=True
    ),
    "a mixture with a misspelt field": Refusal(
        mixture({"a": {"path": "x", "wieght": 1}}),
        "a has {'path': 'x', 'wieght': 1}; give it a weight",
        writes=True,
    ),
    "a mixture with a dataset inside that has no weight": Refusal(
        mixture({"a": {"datasets": {"b": {"path": "x"}}, "weight": 1}}),
        "a/b has {'path': 'x'}; give it a weight",
        writes=True,
    ),
    "a mixture with text for a weight": Refusal(
        mixture({"a": {"path": "x", "weight": "1"}}),
        "'weight': '1'}; give it a weight, which is a number",
        writes=True,
    ),
    "a mixture that is missing": Refusal(
        lambda d: datasets.from_file(d / "none.json"),
        "none.json: .* cannot be read .*No such file",
    ),
    "a mixture without any weight": Refusal(
        mixture({"a": {"path": "x", "weight": 0}}),
        r"all weights of \['a'\] are 0; raise one",
        writes=True,
    ),
    "a mixture with a name twice": Refusal(
        mixture('{"a": {"path": "x", "weight": 1}, "a": {"path": "y", "weight": 1}}'),
        r"cannot be read as JSON \(a name is there twice in \['a', 'a'\]",
        writes=True,
    ),
    "a mixture with the name of a dataset inside another": Refusal(
        mixture(
            {
                "a/b": {"path": "x", "weight": 1},
                "a": {"datasets": {"b": {"path": "y", "weight": 1}}, "weight": 1},
            }
        ),
        r"two datasets have the same name, of \['a/b', 'a/b'\]; rename one",
        writes=True,
    ),
    # Media.
    "media of which none fits": Refusal(
        lambda _: media(max_per_row=0), "give each a max_per_row of 1 or more"
    ),
    "media with the name of a feature": Refusal(
        lambda _: media(kind="inputs"), "and a name that makes no feature twice"
    ),
    "media that are cut": Refusal(
        lambda _: media(packing="concat_then_split"), "choose first_fit or best_fit"
    ),
    "a medium of a kind that there is none of": Refusal(
        lambda _: media(modality="sounds"),
        r"modality 'sounds' with num_tokens=1; use one of \['images'\]",
        DATA,
    ),
    "a medium of another shape": Refusal(
        lambda _: media(shape=(3,)),
        r"'images' made uint8\[2\], and its Modality says uint8\[3\]; resize, pad",
        DATA,
    ),
    # Keys.
    "an unknown key": Refusal(
        lambda _: keys(steps=7), "unknown key 'steps'; the nearest key of"
    ),
    "a key of another type": Refusal(
        lambda _: keys(packing="yes"), "packing must be true or false, not 'yes'"
    ),
    "packing and Parquet without logical shards": Refusal(
        lambda _: keys(num_logical_shards=0, packing=True),
        '^grain_file_type="parquet", packing=true needs logical shards; set num_logic',
    ),
    "training files that match nothing": Refusal(
        lambda d: keys(grain_train_files=f"{d}/nothing*"), "grain_train_files", DATA
    ),
    "training files on a site": Refusal(
        lambda _: keys(grain_train_files="https://example.com/a.parquet"),
        "data is not read from https://.*; download the files, or copy them",
        DATA,
    ),
    "training files of an unknown protocol": Refusal(
        lambda _: keys(grain_train_files="nonsense://a/b"),
        "data is not read from nonsense://.*; download the files, or copy them",
        DATA,
    ),
    "a limit of examples to rows that are cut anywhere": Refusal(
        lambda _: keys(
            packing=True,
            grain_packing_type="concat_then_split",
            max_segments_per_seq=3,
        ),
        "max_segments_per_seq=3 does not work with .*concat_then_split, .*to 0",
    ),
    # Conversations and documents.
    "conversations that are not to be tokenised": Refusal(
        lambda _: keys(use_sft=True, tokenize_train_data=False),
        "use_sft=true does not work with tokenize_train_data=false; set it to true",
    ),
    "a chat template and a file with one": Refusal(
        lambda _: keys(use_sft=True, chat_template="a", chat_template_path="b"),
        "chat_template and chat_template_path are both set; set one",
    ),
    "conversations without a template": Refusal(
        conversations(),
        "no chat template.*set chat_template_path",
        writes=True,
    ),
    "a chat template that is none": Refusal(
        conversations(chat_template="{% if %}"),
        "not one that can be used",
        writes=True,
    ),
    "a conversation that is text": Refusal(
        lambda _: turns("Hello"), "has a str, not a list of messages; name", DATA
    ),
    "messages of another form": Refusal(
        lambda _: turns([{"from": "human", "value": "a"}]),
        r"a message with \['from', 'value'\]; a message has a role",
        DATA,
    ),
    "a message with a date": Refusal(
        lambda _: turns([{"role": "user", "content": datetime.date.today()}]),
        "has a date in a message; messages have texts, numbers, lists",
        DATA,
    ),
    "conversations of three columns": Refusal(
        lambda _: chat.Conversations(template=TEMPLATE, columns=("a", "b", "c")),
        r"columns=\('a', 'b', 'c'\) .*; name one column of messages, or two",
    ),
    "a column that is missing": Refusal(
        lambda _: tokens_of(PRE_TOKENIZED, {"text": "a"}),
        r"no column 'tokens', only \['text'\]",
        DATA,
    ),
    "text in place of tokens": Refusal(
        lambda _: tokens_of(PRE_TOKENIZED, {"tokens": "text"}),
        "not a list of tokens; give a tok",
        DATA,
    ),
    "tokens in place of text": Refusal(
        lambda _: tokens_of(documents.Documents(), {"text": np.zeros(2)}),
        "has a ndarray, not text; set tokenizer=None",
        DATA,
    ),
    # Stages.
    "stages that begin late": Refusal(
        of_a_file(data_stages=[{"begin_step": 5}]),
        r"begin at steps \[5\]",
        writes=True,
    ),
    "no stage": Refusal(
        lambda _: stages(), "data_stages: write a list of stages: `- be"
    ),
    "stages that are names": Refusal(
        lambda _: stages("short", "long"), "data_stages: write a list of stages: `- be"
    ),
    "a stage without a beginning": Refusal(
        lambda _: stages({"begin_step": 0}, {"max_target_length": 3}),
        "stage 1: it has no begin_step, the training step .*; give it a number from 0",
    ),
    "stages of which some have a size": Refusal(
        lambda _: stages({"begin_step": 0}, {"begin_step": 5, "global_batch_size": 8}),
        "some stages have a global_batch_size, and others have 0, .*; use one of",
    ),
    "a stage with a misspelt key": Refusal(
        lambda _: stages({"begin_step": 0, "max_target_lenght": 3}),
        "unknown key 'max_target_leng",
    ),
    "a stage with a key of the run": Refusal(
        lambda _: stages({"begin_step": 0, "num_logical_shards": 3}),
        "unknown key 'num_logical_shards'; the nearest key of a stage .those of all",
    ),
    "stages of which one has no size": Refusal(
        lambda _: batch_of(
            data_stages=json.dumps([{"begin_step": 0}]), enable_rampup_batch_size=True
        ),
        "does not work with data_stages",
    ),
}
