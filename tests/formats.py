"""The same documents in files of every format, and pipelines that read them."""

import dataclasses
import functools
import json
import pathlib
from collections.abc import Callable

import grain
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from elastic_ckpt.data import elastic_data, mixing, records, sharded_data
from elastic_ckpt.data.lm import documents as lm_documents
from elastic_ckpt.data.lm import pipeline, rows
from elastic_ckpt.data.sources import (
    arrayrecord,
    arrow,
    lines,
    megatron,
    parquet,
    record_format,
    tfrecord,
)
from tests import corpora, megatron_files, tfrecord_files

# Documents of each file of each dataset.
DATASETS = {"books": (30,), "code": (50, 40), "web": (90, 1, 80)}
WEIGHTS = {"books": 0.2, "code": 0.3, "web": 0.5}

LENGTH = 12
NUM_SHARDS = 12
SEED = 5
TOKENS = lm_documents.Documents(column="tokens", tokenizer=None)


def tokens(dataset: str, number: int) -> np.ndarray:
    """A document of 0 to 30 tokens; no token is in two documents, and none is 0."""
    place = list(DATASETS).index(dataset)
    first = 1 + 40 * (1000 * place + number)
    return np.arange(first, first + (number * 7 + 3 * place) % 31, dtype=np.int32)


def documents(*datasets: str) -> list[np.ndarray]:
    """Every document of the given datasets."""
    return [
        tokens(name, number)
        for name in datasets
        for number in range(sum(DATASETS[name]))
    ]


def write(directory, file_format: str) -> tuple[pipeline.Part, ...]:
    """Writes the documents as files of one format; the datasets in them."""
    make_source, write_file = _FORMATS[file_format]
    suffix = "bin" if file_format == "megatron" else file_format
    parts = []
    for name, counts in DATASETS.items():
        paths, left = [], documents(name)
        for number, count in enumerate(counts):
            paths.append(str(directory / f"{name}-{number}.{suffix}"))
            write_file(paths[-1], [{"tokens": each} for each in left[:count]])
            left = left[count:]
        made = make_source(files=tuple(paths), columns=("tokens",))
        parts.append(pipeline.Part(name=name, source=made, weight=WEIGHTS[name]))
    return tuple(parts)


def _write_arrayrecord(path, elements):
    encoded = [tfrecord_files.example(element) for element in elements]
    corpora.write_records(path, encoded, options="group_size:1")


def _write_parquet(path, elements):
    table = pa.Table.from_pylist([{**each, "other": "x"} for each in elements])
    pq.write_table(table, path, row_group_size=16, write_page_checksum=True)


def _write_arrow(path, elements):
    schema = pa.schema([("tokens", pa.list_(pa.int32()))])
    with pa.ipc.new_stream(path, schema) as writer:
        writer.write_table(pa.Table.from_pylist(elements, schema), max_chunksize=16)


def _write_jsonl(path, elements):
    lists = ({"tokens": element["tokens"].tolist()} for element in elements)
    pathlib.Path(path).write_text("".join(json.dumps(each) + "\n" for each in lists))


def _write_megatron(path, elements):
    path, documents = pathlib.Path(path), [[each["tokens"]] for each in elements]
    megatron_files.write(path.parent, documents, name=path.stem)


_EXAMPLES = {"record_format": record_format.TF_EXAMPLE}
# What reads each format, and what writes a file of it.
_FORMATS: dict[str, tuple[Callable, Callable]] = {
    "arrayrecord": (
        functools.partial(arrayrecord.ArrayRecord, **_EXAMPLES),
        _write_arrayrecord,
    ),
    "arrow": (arrow.Arrow, _write_arrow),
    "jsonl": (lines.JsonLines, _write_jsonl),
    "megatron": (megatron.Megatron, _write_megatron),
    "parquet": (parquet.Parquet, _write_parquet),
    "tfrecord": (
        functools.partial(tfrecord.TFRecord, **_EXAMPLES),
        corpora.write_tfrecord,
    ),
}
FORMATS = tuple(_FORMATS)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Steps:
    """The steps over the documents of a shard; those of `Rows` are its arguments."""

    datasets: tuple[str, ...] = ("web",)
    filtered: bool = False
    truncate: bool = True
    window: int = 0
    packing: str = ""


PIPELINES = {
    "plain": Steps(),
    "filter": Steps(filtered=True),
    "chunk": Steps(truncate=False),
    "window_shuffle": Steps(window=5),
    "concat_then_split": Steps(truncate=False, packing="concat_then_split"),
    "first_fit": Steps(truncate=False, packing="first_fit"),
    "best_fit": Steps(truncate=False, packing="best_fit"),
    "mixture": Steps(datasets=tuple(DATASETS)),
    "everything": Steps(
        datasets=tuple(DATASETS),
        filtered=True,
        truncate=False,
        window=7,
        packing="first_fit",
    ),
}


def is_kept(element) -> bool:
    """Two thirds of the documents."""
    return len(element["tokens"]) % 3 > 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class MakeShard:
    """The pipeline of a shard; workers import it from here."""

    parts: tuple[pipeline.Part, ...]
    steps: Steps
    num_epochs: int | None

    def __call__(self, shard: int) -> grain.IterDataset:
        steps, read = self.steps, {}
        for part in self.parts:
            if part.name not in steps.datasets:
                continue
            elements = records.Records(
                part.source,
                shard=shard,
                num_shards=NUM_SHARDS,
                read_options=records.ReadOptions(
                    shuffle_seed=SEED, num_epochs=self.num_epochs
                ),
            )
            read[part.name] = lm_documents.Tokens(
                elements.filter(is_kept) if steps.filtered else elements,
                documents=TOKENS,
            )
        (made, *others) = read.values()
        if others:
            made = mixing.Mixture(read, WEIGHTS, shard=shard)
        return rows.Rows(
            made,
            length=LENGTH,
            packing=steps.packing,
            window=steps.window,
            truncate=steps.truncate,
            seed=SEED,
            shard=shard,
        )


def data(parts, name, *, num_epochs=None, **more) -> sharded_data.ShardedData:
    """Elastic data of the pipeline `name` over the files of one format."""
    return sharded_data.sharded(
        MakeShard(parts=parts, steps=PIPELINES[name], num_epochs=num_epochs),
        num_shards=NUM_SHARDS,
        pipeline=name,
        **({"end": elastic_data.End.PADDED} if num_epochs else {}),
        **more,
    )


def of_stage(
    parts, *, length=LENGTH, packing="concat_then_split", weights=WEIGHTS, epochs=None
) -> sharded_data.ShardedData:
    """The data of a stage, as `from_config` makes it."""
    made = pipeline.LanguagePipeline(
        parts=tuple(
            dataclasses.replace(part, weight=weights[part.name])
            for part in parts
            if part.name in weights
        ),
        num_shards=6,
        reading=records.ReadOptions(num_epochs=epochs, shuffle_seed=3),
        documents=TOKENS,
        length=length,
        packing=packing,
        window=4,
        truncate=not packing,
    )
    return sharded_data.ShardedData(
        make_shard=made,
        num_shards=6,
        pipeline=made.identity(),
        end=elastic_data.End.PADDED if epochs else elastic_data.End.NEVER,
    )
