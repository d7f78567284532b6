"""The part of suite `data` that reads text: from Parquet to packed rows of tokens.

All sides read the same documents, the sources of Python's standard library cut into
texts of log-normal length, with a tokenizer trained on some of them; in one process,
in turns. Grain's and ours make rows of 2048 tokens.

* `text_packed_mtok_per_sec`: what `from_config` builds, 64 logical shards, with a
  byte-level BPE of Hugging Face and as many threads as there are cores.
* `text_ratio_tokenizer`, `text_ratio_tiktoken`, `text_ratio_sentencepiece`: over the
  library's own batch call on lists of 1000 of these texts, which reads no file, makes
  no array and packs nothing.
* `text_ratio_grain_map`: over Grain's interleave of the files, `map` of each record,
  and packer.
* `text_ratio_hf_datasets_map`: over `map(batched=True)` of Hugging Face `datasets`,
  which tokenises 1000 documents a call; streamed from the same files, and cut to rows
  by its examples' `group_texts`.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import itertools
import os
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from benchmarks import report, text_corpus
from benchmarks.peers import hf_datasets, peer
from benchmarks.peers import measure as sides
from elastic_ckpt.data import data_keys, prefetch, rows
from elastic_ckpt.data.lm import pipeline

NUM_SHARDS = 64
_TEXTS_A_CALL = 1000
_ROUNDS = 5
_NUM_TOKENS = 6_000_000

_OURS = "ours"
_PARALLELISM = "TOKENIZERS_PARALLELISM"
# The figure of each library's own batch call.
_RATIOS = {
    "huggingface": "text_ratio_tokenizer",
    "tiktoken": "text_ratio_tiktoken",
    "sentencepiece": "text_ratio_sentencepiece",
}
_BOUNDS = {
    "text_ratio_tokenizer": "at least 0.9",
    "text_ratio_tiktoken": "no bound",
    "text_ratio_sentencepiece": "no bound",
}


def measure(
    directory: pathlib.Path,
    *,
    num_tokens: int = _NUM_TOKENS,
    num_rounds: int = _ROUNDS,
    num_characters: int | None = None,
) -> dict[str, report.Figure]:
    """Measures in files below `directory`.

    Args:
      directory: made anew.
      num_tokens: timed of each side in each round.
      num_rounds: how often each side has its turn.
      num_characters: of the corpus; None takes all.
    """
    directory.mkdir(parents=True)
    texts = text_corpus.texts(directory, num_characters)
    files = text_corpus.write(texts, directory)
    figures: dict[str, report.Figure] = {}
    for kind, tokenizer in text_corpus.train(texts, directory).items():
        compared = [
            sides.Side(name=_OURS, make=_from_config(files, kind, tokenizer)),
            sides.Side(name=kind, make=_library(texts, kind, tokenizer)),
        ]
        if kind == "huggingface":
            compared += _peers(files, tokenizer)
        rates = sides.in_turns(
            compared,
            num_tokens=num_tokens,
            warm_up_tokens=num_tokens // 8,
            num_rounds=num_rounds,
        )
        figures |= sides.compared(
            rates,
            ours=_OURS,
            name="text_packed_mtok" if kind == "huggingface" else None,
            ratio=lambda name: _RATIOS.get(name, f"text_ratio_{name}"),
            bounds=_BOUNDS,
        )
    return figures


def _from_config(
    files: list[str], kind: str, tokenizer: str
) -> Callable[[], Iterator[Any]]:
    config = data_keys.DataKeys(
        grain_train_files=",".join(files),
        grain_file_type="parquet",
        num_logical_shards=NUM_SHARDS,
        tokenizer_type=kind,
        tokenizer_path=tokenizer,
        max_target_length=peer.ROW_LENGTH,
        use_truncation=False,
        packing=True,
        grain_packing_type="concat_then_split",
        grain_shuffle_buffer_size=0,
    )

    def make() -> Iterator[Any]:
        os.environ[_PARALLELISM] = "false"
        placement = rows.Placement.in_order(
            0, num_hosts=1, global_batch_size=NUM_SHARDS
        )
        rows_of_host = prefetch.Prefetched(
            pipeline.from_config(config).host_batches(placement),
            make=dict,
            read_ahead=prefetch.ReadAhead(batches=1),
        )
        with contextlib.closing(rows_of_host) as batches:
            while True:
                yield next(batches)["inputs"]

    return make


def _library(
    texts: list[str], kind: str, tokenizer: str
) -> Callable[[], Iterator[Any]]:
    def make() -> Iterator[Any]:
        os.environ[_PARALLELISM] = "true"
        count = text_corpus.COUNTERS[kind](tokenizer)
        left = 0
        for first in itertools.cycle(range(0, len(texts), _TEXTS_A_CALL)):
            left += count(texts[first : first + _TEXTS_A_CALL])
            # As many rows, so that the driver counts them.
            num_rows, left = divmod(left, peer.ROW_LENGTH)
            yield np.empty((num_rows, peer.ROW_LENGTH), np.int32)

    return make


def _peers(files: list[str], tokenizer: str) -> list[sides.Side]:
    peers = [sides.Side(name="grain_map", make=_grain_map(files, tokenizer))]
    try:
        importlib.metadata.version("datasets")
    except importlib.metadata.PackageNotFoundError:
        print(f"text: hf_datasets_map: not installed: datasets; {peer.INSTALL}")
        return peers
    return [*peers, sides.Side(name="hf_datasets_map", make=_hf_map(files, tokenizer))]


def _grain_map(files: list[str], path: str) -> Callable[[], Iterator[Any]]:
    def make() -> Iterator[Any]:
        import tokenizers
        from grain import experimental

        tokenizer = tokenizers.Tokenizer.from_file(path)

        def encode(record: dict[str, Any]) -> dict[str, Any]:
            encoded = tokenizer.encode(
                record[text_corpus.COLUMN], add_special_tokens=False
            ).ids
            return {"tokens": np.array(encoded, np.int32)}

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

    return make


def _hf_map(files: list[str], path: str) -> Callable[[], Iterator[Any]]:
    def make() -> Iterator[Any]:
        import tokenizers

        os.environ[_PARALLELISM] = "true"
        tokenizer = tokenizers.Tokenizer.from_file(path)

        def encode(records: dict[str, list[str]]) -> dict[str, list[list[int]]]:
            encoded = tokenizer.encode_batch_fast(
                records[text_corpus.COLUMN], add_special_tokens=False
            )
            return {hf_datasets.COLUMN: [encoding.ids for encoding in encoded]}

        tokenised = hf_datasets.streamed(files).map(
            encode,
            batched=True,
            batch_size=_TEXTS_A_CALL,
            remove_columns=[text_corpus.COLUMN],
        )
        for row in tokenised.map(hf_datasets.group_texts, batched=True):
            yield np.asarray(row[hf_datasets.COLUMN], np.int32)

    return make
