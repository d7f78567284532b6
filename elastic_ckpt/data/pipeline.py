"""The pipeline of a logical shard that a configuration describes.

    units -> records -> tokens -> mix -> trim or chunk -> window shuffle -> pack or pad

Each arrow is a Grain dataset that saves where it is, so the whole saves where it is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import grain
import numpy as np

from elastic_ckpt.config import schema
from elastic_ckpt.core import errors, storage
from elastic_ckpt.data import (
    datasets,
    elastic_data,
    language,
    mixing,
    positional,
    records,
    sharded_data,
    shuffling,
    state,
    token_blocks,
    tokenizers,
    units,
)
from elastic_ckpt.data.sources import arrayrecord, files, parquet, source, tfrecord

_SOURCES: dict[str, Any] = {
    "arrayrecord": arrayrecord.ArrayRecord,
    "parquet": parquet.Parquet,
    "tfrecord": tfrecord.TFRecord,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """A dataset of the mixture: its name, files and weight."""

    name: str
    source: source.Source
    weight: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class LanguagePipeline:
    """Makes the pipeline of a shard; a pure function of these values.

    Attributes:
      parts: the datasets, which are mixed by weight.
      num_shards: S.
      reading: in which order records are read, and until when.
      documents: how a record is made tokens.
      length: tokens of a row, L.
      truncate: whether longer documents are trimmed; if not, they are cut in chunks.
      window: examples that are shuffled at a time; 0 shuffles none.
      packing: one of `language.PACKINGS`; empty pads each example to a row.
      max_examples: of a packed row; 0 sets no limit.
      seed: of every shuffle.
      tokenizer_threads: threads of a host that tokenise; 0 takes its share of cores.
      num_processes: processes of a host that share them.
      vocab_size: rows of the model's embedding. Tokens that the column has are compared
        with it; 0 compares none.
    """

    parts: tuple[Part, ...]
    num_shards: int
    reading: records.Reading
    documents: language.Documents
    length: int
    truncate: bool = True
    window: int = 0
    packing: str = ""
    max_examples: int = 0
    seed: int = 0
    tokenizer_threads: int = 0
    num_processes: int = 1
    vocab_size: int = 0

    def __call__(self, shard: int) -> grain.IterDataset:
        """The rows of a shard."""
        read = {part.name: self._tokens(part, shard) for part in self.parts}
        weights = {part.name: part.weight for part in self.parts}
        found = language.Examples(
            # Also of a single dataset: others may join it at a resume.
            mixing.Mixture(read, weights, shard=shard),
            length=self.length,
            truncate=self.truncate,
        )
        # Another order in each shard.
        seed = units.mixed(self.seed ^ shard) >> 32
        if self.window:
            found = shuffling.WindowShuffle(found, window_size=self.window, seed=seed)
        if self.packing:
            rows = language.packed(
                found,
                packing=self.packing,
                length=self.length,
                seed=seed,
                max_examples=self.max_examples,
            )
        else:
            rows = found.map(self._pad)
        compared = self.vocab_size and not self.documents.tokenizer
        return rows.map(self._in_vocabulary) if compared else rows

    def threads_of_process(self) -> int:
        """Threads that tokenise in this process; 0 if the tokenizer has no use for any.

        It may run on another machine than the one that read the configuration.
        """
        if not self.documents.is_parallel:
            return 0
        return token_blocks.num_threads(
            self.tokenizer_threads, num_processes=self.num_processes
        )

    def identity(self) -> dict[str, storage.Json]:
        """What decides which row comes when, named by configuration keys."""
        tokenizer = self.documents.tokenizer
        # States from before this setting have no word of it.
        limit = {"max_segments_per_seq": self.max_examples} if self.max_examples else {}
        return {
            state.DATASETS: {
                part.name: {"weight": part.weight, **self._source_identity(part)}
                for part in self.parts
            },
            "tokenizer": tokenizer.identity() if tokenizer else None,
            "train_data_columns": self.documents.column,
            "add_bos": self.documents.add_begin,
            "add_eos": self.documents.add_end,
            "max_target_length": self.length,
            "use_truncation": self.truncate,
            "grain_packing_type": self.packing,
            "grain_shuffle_buffer_size": self.window,
            "enable_data_shuffling": self.reading.shuffle_seed is not None,
            "data_shuffle_seed": self.seed,
            state.NUM_EPOCH: self.reading.num_epochs or 0,
            **limit,
        }

    def renamed(self, names: Mapping[str, str]) -> LanguagePipeline:
        """This pipeline with other names of its datasets."""
        parts = tuple(
            dataclasses.replace(part, name=names.get(part.name, part.name))
            for part in self.parts
        )
        return dataclasses.replace(self, parts=parts)

    def _source_identity(self, part: Part) -> dict[str, storage.Json]:
        # Damage that is left out does not make another file.
        return source.identity(part.source, sampled=not self.reading.skip_corrupt)

    def _tokens(self, part: Part, shard: int) -> token_blocks.Tokens:
        read = records.Records(
            part.source, shard=shard, num_shards=self.num_shards, reading=self.reading
        )
        return token_blocks.Tokens(
            read, documents=self.documents, num_threads=self.threads_of_process()
        )

    def _in_vocabulary(self, row: language.Example) -> language.Example:
        for name in ("inputs", "targets"):
            # As unsigned numbers, those below zero are the largest.
            if row[name].view(np.uint32).max() >= self.vocab_size:
                wrong = row[name][row[name].view(np.uint32) >= self.vocab_size][0]
                raise errors.DataError(
                    f"column {self.documents.column!r} has the token {wrong}, and the"
                    f" model's vocabulary tokens from 0 to {self.vocab_size - 1}; set"
                    " vocab_size to that of the tokenizer which made the tokens"
                )
        return row

    def _pad(self, example: language.Example) -> language.Example:
        return language.padded(example, self.length)


def from_config(
    data: schema.DataSection, *, vocab_size: int = 0
) -> elastic_data.ElasticData:
    """The training data that a configuration describes.

    With `num_logical_shards` it is sharded, else positional.

    Args:
      data: the configuration.
      vocab_size: rows of the model's embedding: for a token that it has no row for, JAX
        would take another row in silence. 0 if it is not known.

    Raises:
      ConfigError: if the engine cannot do what is asked, or the tokenizer has more
        tokens than `vocab_size`.
      DataError: if files are missing or not of their format.
    """
    _check_vocabulary(data, vocab_size)
    if data.num_logical_shards:
        if data.grain_use_elastic_iterator:
            raise errors.ConfigError(
                "grain_use_elastic_iterator=true and num_logical_shards="
                f"{data.num_logical_shards}: Grain's elastic iterator knows no shards;"
                " set one of them back"
            )
        return _sharded(
            data,
            of=_datasets(data),
            num_epochs=data.num_epoch,
            num_workers=data.grain_worker_count,
            vocab_size=vocab_size,
        )
    needs = _needs_shards(data)
    if needs:
        raise errors.ConfigError(
            f"{needs} needs logical shards; set num_logical_shards to a number that the"
            " numbers of hosts divide, for example the global batch size"
        )
    return positional.from_config(data)


def eval_from_config(
    data: schema.DataSection, *, global_batch_size: int, vocab_size: int = 0
) -> elastic_data.ElasticData:
    """The evaluation data: one epoch of `grain_eval_files`, in order, padded."""
    _check_vocabulary(data, vocab_size)
    ordered = dataclasses.replace(
        data,
        enable_data_shuffling=False,
        drop_remainder=False,
        num_logical_shards=data.num_logical_shards or global_batch_size,
    )
    return _sharded(
        ordered,
        of=datasets.from_list(data.grain_eval_files, key="grain_eval_files"),
        key="grain_eval_files",
        num_epochs=1,
        num_workers=0,
        vocab_size=vocab_size,
    )


def vocab_size(data: schema.DataSection) -> int:
    """Tokens that the data may have, as far as it tells."""
    return (_tokenizer(data) or tokenizers.Bytes()).vocab_size


def describe(data: schema.DataSection) -> str:
    """The training data in words: each dataset as a tree, with its share."""
    of = _datasets(data)
    total = sum(dataset.weight for dataset in of)
    return "\n".join(
        f"{dataset.name}, {dataset.weight / total:.1%}\n"
        + source.tree(_source(data, dataset))
        for dataset in of
    )


def _check_vocabulary(data: schema.DataSection, rows: int) -> None:
    if rows and data.tokenize_train_data and vocab_size(data) > rows:
        raise errors.ConfigError(
            f"vocab_size={rows}, but the tokenizer has {vocab_size(data)} tokens; set"
            f" vocab_size to {vocab_size(data)} or more"
        )


def _datasets(data: schema.DataSection) -> list[datasets.Dataset]:
    if data.grain_train_mixture_config_path:
        return datasets.from_file(data.grain_train_mixture_config_path)
    return datasets.from_list(data.grain_train_files, key="grain_train_files")


def _sharded(
    data: schema.DataSection,
    *,
    of: list[datasets.Dataset],
    key: str = "grain_train_files",
    num_epochs: int,
    num_workers: int,
    vocab_size: int,
) -> sharded_data.ShardedData:
    shuffle = data.enable_data_shuffling
    packing = data.grain_packing_type if data.packing else ""
    if data.max_segments_per_seq and packing == language.CONCAT_THEN_SPLIT:
        raise errors.ConfigError(
            f"max_segments_per_seq={data.max_segments_per_seq} does not go with"
            " grain_packing_type=concat_then_split, which cuts rows wherever they are"
            " full; set it to 0, or pack by first_fit or best_fit"
        )
    pipeline = LanguagePipeline(
        parts=tuple(
            Part(name=d.name, source=_source(data, d, key), weight=d.weight) for d in of
        ),
        num_shards=data.num_logical_shards,
        reading=records.Reading(
            shuffle_seed=data.data_shuffle_seed if shuffle else None,
            num_epochs=num_epochs or None,
            skip_corrupt=data.corrupt_records == "skip",
        ),
        documents=language.Documents(
            column=data.train_data_columns,
            tokenizer=_tokenizer(data),
            add_begin=data.add_bos,
            add_end=data.add_eos,
        ),
        length=data.max_target_length,
        truncate=data.use_truncation,
        window=data.grain_shuffle_buffer_size if shuffle else 0,
        packing=packing,
        max_examples=data.max_segments_per_seq if packing else 0,
        seed=data.data_shuffle_seed,
        tokenizer_threads=data.tokenizer_threads,
        num_processes=max(num_workers, 1),
        vocab_size=vocab_size,
    )
    end = elastic_data.End.DROPPED if data.drop_remainder else elastic_data.End.PADDED
    return sharded_data.ShardedData(
        make_shard=pipeline,
        num_shards=data.num_logical_shards,
        pipeline=pipeline.identity(),
        end=end if num_epochs else elastic_data.End.NEVER,
        num_workers=num_workers,
        per_worker_batches=data.grain_per_worker_buffer_size,
    )


def _source(
    data: schema.DataSection, dataset: datasets.Dataset, key: str = "grain_train_files"
) -> source.Source:
    columns = (data.train_data_columns,)
    found = files.find_files(dataset.patterns, key=key)
    more = {}
    if data.grain_file_type != "parquet":
        more["record_format"] = data.grain_record_format
    return _SOURCES[data.grain_file_type](files=found, columns=columns, **more)


def _tokenizer(data: schema.DataSection) -> tokenizers.Tokenizer | None:
    if not data.tokenize_train_data:
        return None
    return tokenizers.load(data.tokenizer_type, data.tokenizer_path)


def _needs_shards(data: schema.DataSection) -> str:
    # The first setting that the positional engine has nothing for, in words.
    asked = {
        f"grain_file_type={data.grain_file_type}": (
            data.grain_file_type != "arrayrecord"
        ),
        "packing=true": data.packing,
        "use_truncation=false": not data.use_truncation,
        "grain_train_mixture_config_path": data.grain_train_mixture_config_path,
        "a mixture in grain_train_files": ";" in data.grain_train_files,
        f"tokenizer_type={data.tokenizer_type}": data.tokenizer_type != "bytes",
        "tokenize_train_data=false": not data.tokenize_train_data,
        "add_bos=false": not data.add_bos,
        "add_eos=false": not data.add_eos,
        "grain_record_format=tf_example": data.grain_record_format != "bytes",
        f"grain_worker_count={data.grain_worker_count}": data.grain_worker_count,
        "corrupt_records=skip": data.corrupt_records == "skip",
    }
    return next((name for name, value in asked.items() if value), "")
