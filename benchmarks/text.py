"""The text part of suite `data`: from Parquet to packed rows of tokens.

All sides read the same documents: the source code of Python's standard library, cut
into documents of log-normal length. The tokenizer is a Hugging Face byte-level BPE
trained on some of them. The sides take turns in one process. Grain and our side create
rows of 2048 tokens.

* `text_packed_mtok_per_sec`: the pipeline of `from_config` with 16 logical shards and
  as many threads as cores. With more shards, the corpus would end before each shard has
  read the first of its longest chapters: until then, more is tokenized than delivered.
* `text_ratio_tokenizer`: relative to the library's own `encode_batch_fast` on lists of
  1000 documents, which does not read files, create arrays or pack anything.
* `text_ratio_grain_map`: relative to Grain's interleave of the files, `map` of each
  record, and packer.
* `text_ratio_hf_datasets_map`: relative to `map(batched=True)` of Hugging Face
  `datasets`, which tokenizes 1000 documents per call, streamed from the same files and
  cut to rows by `group_texts` from its examples.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import pathlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from benchmarks import report, sized
from benchmarks.peers import hf_datasets, peer
from benchmarks.peers import measure as peers
from elastic_ckpt.data import prefetch, rows, sharded_data
from elastic_ckpt.data.lm import pipeline, text
from elastic_ckpt.data.sources import files as source_files

_NUM_SHARDS = 16
_COLUMN = "text"
_NUM_FILES = 8
# The size of the corpus; all files have about 31 million.
_NUM_CHARACTERS = sized(10**9, 10**6)
_MEAN_CHARACTERS = 2000
# The standard deviation of the logarithm of the length.
_SIGMA = 0.8
_TRAINING_TEXTS = 2500
_VOCAB_SIZE = 32_000
_TEXTS_A_CALL = 1000
_ROUNDS = sized(5, 1)
# The tokens timed for each side in each round, and the tokens before that, of 8 million
# in all: by then, ours is a few million tokens ahead, as it is later.
_NUM_TOKENS = sized(3_500_000, 100_000)
_WARM_UP_TOKENS = sized(4_500_000, 12_500)
_PARALLELISM = "TOKENIZERS_PARALLELISM"


def measure(directory: pathlib.Path) -> dict[str, report.Figure]:
    """Measures with files in `directory`."""
    texts = _texts(directory)
    files = _write(texts, directory)
    path = _train(texts, directory)
    sides: peers.Sides = {
        "ours": functools.partial(_from_config, files, path),
        "tokenizer": functools.partial(_library, texts, path),
        "grain_map": functools.partial(_grain_map, files, path),
    }
    if peer.is_installed("datasets"):
        sides["hf_datasets_map"] = functools.partial(_hf_map, files, path)
    else:
        print(f"text: hf_datasets_map: not installed: datasets; {peer.INSTALL}")
    rates = peers.in_turns(
        sides,
        num_tokens=_NUM_TOKENS,
        warm_up_tokens=_WARM_UP_TOKENS,
        num_rounds=_ROUNDS,
    )
    return peers.compared(
        rates,
        name="text_packed_mtok",
        ratio=lambda name: f"text_ratio_{name}",
        bounds={"text_ratio_tokenizer": "at least 0.9"},
    )


def _texts(directory: pathlib.Path) -> list[str]:
    from pyarrow import parquet as pq

    sources = directory / "sources.parquet"
    text.write(text.PYTHON_STDLIB, str(sources), file_type="parquet")
    column = pq.read_table(sources)["text"].to_pylist()
    sources.unlink()
    whole = "\n".join(column)[:_NUM_CHARACTERS]
    generator = np.random.default_rng(0)
    mu, place = np.log(_MEAN_CHARACTERS) - _SIGMA**2 / 2, 0
    texts = []
    while place < len(whole):
        length = max(1, int(generator.lognormal(mu, _SIGMA)))
        texts.append(whole[place : place + length])
        place += length
    return texts


def _write(texts: list[str], directory: pathlib.Path) -> list[str]:
    import pyarrow as pa
    from pyarrow import parquet as pq

    files = [str(directory / f"texts-{number}.parquet") for number in range(_NUM_FILES)]
    for number, file in enumerate(files):
        table = pa.table({_COLUMN: texts[number::_NUM_FILES]})
        pq.write_table(table, file, row_group_size=100)
    return files


def _train(texts: list[str], directory: pathlib.Path) -> str:
    import tokenizers

    byte_level = tokenizers.pre_tokenizers.ByteLevel
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = byte_level(add_prefix_space=False)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=_VOCAB_SIZE,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=byte_level.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts[:_TRAINING_TEXTS], trainer)
    path = directory / "tokenizer.json"
    tokenizer.save(str(path))
    return str(path)


def inputs(
    data: sharded_data.ShardedData, read_ahead: prefetch.ReadAhead
) -> Iterator[Any]:
    """The inputs of the batches of a run on one host, which decodes all its data.

    Discards blocks that an earlier run in this process has decoded.
    """
    source_files.forget_all()
    (placement,) = rows.in_order(1, data.num_shards)
    rows_of_host = prefetch.Prefetched(
        data.host_batches(placement), make=dict, read_ahead=read_ahead
    )
    with contextlib.closing(rows_of_host) as batches:
        while True:
            yield next(batches)["inputs"]


def _from_config(files: list[str], path: str) -> Iterator[Any]:
    os.environ[_PARALLELISM] = "false"
    data = pipeline.from_config(
        grain_train_files=",".join(files),
        grain_file_type="parquet",
        num_logical_shards=_NUM_SHARDS,
        tokenizer_type="huggingface",
        tokenizer_path=path,
        max_target_length=peer.ROW_LENGTH,
        use_truncation=False,
        packing=True,
        grain_packing_type="concat_then_split",
        grain_shuffle_buffer_size=0,
    )
    assert isinstance(data, sharded_data.ShardedData)
    yield from inputs(data, prefetch.ReadAhead(batches=1))


def _library(texts: list[str], path: str) -> Iterator[Any]:
    import tokenizers

    os.environ[_PARALLELISM] = "true"
    tokenizer = tokenizers.Tokenizer.from_file(path)
    left = 0
    for first in itertools.cycle(range(0, len(texts), _TEXTS_A_CALL)):
        some = texts[first : first + _TEXTS_A_CALL]
        encoded = tokenizer.encode_batch_fast(some, add_special_tokens=False)
        # As rows, so that the driver counts the tokens.
        num_rows, left = divmod(left + sum(map(len, encoded)), peer.ROW_LENGTH)
        yield np.empty((num_rows, peer.ROW_LENGTH), np.int32)


def _grain_map(files: list[str], path: str) -> Iterator[Any]:
    import tokenizers
    from grain import experimental

    tokenizer = tokenizers.Tokenizer.from_file(path)

    def encode(record: dict[str, Any]) -> dict[str, Any]:
        encoded = tokenizer.encode(record[_COLUMN], add_special_tokens=False)
        return {"tokens": np.array(encoded.ids, np.int32)}

    read = [experimental.ParquetIterDataset(file) for file in files]
    documents = experimental.InterleaveIterDataset(read, cycle_length=len(files))
    packed = iter(
        experimental.ConcatThenSplitIterDataset(
            documents.map(encode), length_struct={"tokens": peer.ROW_LENGTH}
        )
    )
    with contextlib.closing(packed):
        for row in packed:
            yield row["tokens"]


def _hf_map(files: list[str], path: str) -> Iterator[Any]:
    import tokenizers

    os.environ[_PARALLELISM] = "true"
    tokenizer = tokenizers.Tokenizer.from_file(path)

    def encode(records: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        encoded = tokenizer.encode_batch_fast(
            records[_COLUMN], add_special_tokens=False
        )
        return {hf_datasets.COLUMN: [encoding.ids for encoding in encoded]}

    tokenised = hf_datasets.streamed(files).map(
        encode, batched=True, batch_size=_TEXTS_A_CALL, remove_columns=[_COLUMN]
    )
    for row in tokenised.map(hf_datasets.group_texts, batched=True):
        yield np.asarray(row[hf_datasets.COLUMN], np.int32)
