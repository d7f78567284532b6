"""Builds a logical shard's pipeline from a configuration.

    records -> mixture -> tokens -> rows

Records that contain tokens are decoded before the mixture. Each step is a Grain dataset
whose iterator has a state, so the whole pipeline has a state.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Mapping
from typing import Any

import grain

from elastic_ckpt.core import errors, sections, storage
from elastic_ckpt.data import (
    data_keys,
    datasets,
    elastic_data,
    mixing,
    records,
    sharded_data,
    stages,
    state,
)
from elastic_ckpt.data.lm import chat, chat_templates, rows, tokenizers
from elastic_ckpt.data.lm import documents as lm_documents
from elastic_ckpt.data.sources import (
    arrayrecord,
    arrow,
    files,
    lines,
    megatron,
    parquet,
    source,
    tfrecord,
    webdataset,
)

_SOURCES: dict[str, Any] = {
    "arrayrecord": arrayrecord.ArrayRecord,
    "arrow": arrow.Arrow,
    "jsonl": lines.JsonLines,
    "megatron": megatron.Megatron,
    "parquet": parquet.Parquet,
    "text": lines.Text,
    "tfrecord": tfrecord.TFRecord,
    "webdataset": webdataset.WebDataset,
}
# Formats that use `grain_record_format`.
_OF_RECORDS = ("arrayrecord", "tfrecord")
# The key of the training files, unless a mixture file names them.
_TRAIN_FILES = "grain_train_files"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """A dataset in the mixture: its name, files and weight."""

    name: str
    source: source.Source
    weight: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class LanguagePipeline:
    """Builds a shard's pipeline; a pure function of its attributes.

    Attributes:
      parts: the datasets to mix by weight.
      num_shards: the number of logical shards, S.
      reading: the order of records and the number of epochs.
      documents: the encoder that converts records to tokens.
      length: the number of tokens per row, L.
      truncate: whether longer documents are truncated; otherwise they are split.
      window: the size of the shuffle window in examples; 0 disables shuffling.
      packing: one of `rows.PACKINGS`; if empty, each example is padded to a row.
      max_examples: the maximum number of examples in a packed row; 0 sets no limit.
      seed: the seed of every shuffle.
      tokenizer_threads: the number of tokenizer threads per host; 0 uses the host's
        share of cores.
      num_processes: the number of processes on a host that share these threads.
      vocab_size: the number of rows in the model's embedding. Data that is already
        tokenized is checked against it; 0 disables the check.
      dealing: how records are dealt to shards; see `records.DEALING`.
    """

    parts: tuple[Part, ...]
    num_shards: int
    reading: records.ReadOptions
    documents: lm_documents.Encoder
    length: int
    truncate: bool = True
    window: int = 0
    packing: str = ""
    max_examples: int = 0
    seed: int = 0
    tokenizer_threads: int = 0
    num_processes: int = 1
    vocab_size: int = 0
    dealing: str = records.JOINT_SHARES

    def __call__(self, shard: int) -> grain.IterDataset:
        """The rows of a shard."""
        parts, has_texts = self._by_name, self.documents.tokenizer is not None

        def make_part(name: str) -> grain.IterDataset:
            read = records.Records(
                parts[name].source,
                shard=shard,
                num_shards=self.num_shards,
                read_options=self.reading,
            )
            read.lead = self._leads.get(name, 0)
            return read if has_texts else self._tokens(read)

        # Even a single dataset is a mixture, because a resumed run may add datasets.
        # Text is tokenized after the mixture, so that threads get many documents at a
        # time.
        mixed: grain.IterDataset = mixing.Mixture(make_part, self._weights, shard=shard)
        packed = rows.Rows(
            self._tokens(mixed) if has_texts else mixed,
            length=self.length,
            packing=self.packing,
            window=self.window,
            seed=self.seed,
            shard=shard,
            max_examples=self.max_examples,
            truncate=self.truncate,
            vocab_size=0 if has_texts else self.vocab_size,
        )
        packed.num_shards = self.num_shards
        return packed

    def threads_of_process(self) -> int:
        """The number of tokenizer threads in this process; 0 if threads do not help.

        The number depends on the machine, so it is computed where the threads run.
        """
        tokenizer = self.documents.tokenizer
        if tokenizer is None or not tokenizer.is_parallel:
            return 0
        return lm_documents.num_threads(
            self.tokenizer_threads, num_processes=self.num_processes
        )

    def identity(self) -> dict[str, storage.Json]:
        """The settings that determine the order of rows, keyed by configuration key."""
        # Skipped damage must not change a file's identity.
        identity = functools.partial(
            source.identity, digested=not self.reading.skip_corrupt
        )
        sources = source.in_threads(identity, [part.source for part in self.parts])
        return {
            state.DATASETS: {
                part.name: {"weight": part.weight, **of_source}
                for part, of_source in zip(self.parts, sources, strict=True)
            },
            **self.documents.identity(),
            "max_target_length": self.length,
            "use_truncation": self.truncate,
            "grain_packing_type": self.packing,
            "max_segments_per_seq": self.max_examples,
            "grain_shuffle_buffer_size": self.window,
            "enable_data_shuffling": self.reading.shuffle_seed is not None,
            "data_shuffle_seed": self.seed,
            state.NUM_EPOCH: self.reading.num_epochs or 0,
            records.DEALING: self.dealing if self._leads else records.SHARES,
        }

    def dealt(self, dealing: str) -> LanguagePipeline:
        """Returns this pipeline with a different way of dealing records."""
        return dataclasses.replace(self, dealing=dealing)

    @functools.cached_property
    def _by_name(self) -> dict[str, Part]:
        return {part.name: part for part in self.parts}

    @functools.cached_property
    def _weights(self) -> dict[str, float]:
        return {part.name: part.weight for part in self.parts}

    @functools.cached_property
    def _leads(self) -> dict[str, int]:
        # The first shard with an extra record of each dataset follows the last one of
        # the previous dataset, so that the totals of two shards of a finite mixture
        # differ by at most one. Weights do not matter: a resumed run may change them.
        num_epochs = self.reading.num_epochs
        if self.dealing != records.JOINT_SHARES or num_epochs is None:
            return {}
        leads, num_records = {}, 0
        for part in sorted(self.parts, key=lambda part: part.name):
            leads[part.name] = num_records % self.num_shards
            num_records += num_epochs * source.num_records(part.source)
        return leads if len(leads) > 1 else {}

    def _tokens(self, read: grain.IterDataset) -> lm_documents.Tokens:
        return lm_documents.Tokens(
            read, documents=self.documents, num_threads=self.threads_of_process()
        )


def from_config(
    data: data_keys.DataKeys | Mapping[str, Any] | None = None,
    *,
    vocab_size: int = 0,
    **keys: Any,
) -> elastic_data.ElasticData:
    """Creates the training data that configuration keys describe.

    The data is like the result of `sharded`.

        data = ec.data.from_config(
            grain_train_files="a*.parquet",
            grain_file_type="parquet",
            num_logical_shards=64,
        )
        keys = ec.load_config("train.yml").data
        data = ec.data.from_config(keys, num_logical_shards=64)

    Args:
      data: the data keys, from a configuration or in a mapping.
      vocab_size: the number of rows in the model's embedding; 0 if unknown. A tokenizer
        with more tokens is rejected, because JAX would silently use a wrong row.
      **keys: more data keys, which override the keys in `data`.

    Raises:
      ConfigError: if a key is unknown or has an invalid value, if two keys are
        incompatible, or if the tokenizer has more tokens than `vocab_size`.
      DataError: if a file is missing or does not have the configured format.
    """
    given = vars(data) if isinstance(data, data_keys.DataKeys) else data or {}
    if not isinstance(given, Mapping):
        raise errors.ConfigError(
            f"from_config: data is of type {type(data).__name__}; pass the data keys as"
            " keyword arguments, as a mapping, or from a configuration file:"
            ' ec.data.from_config(ec.load_config("train.yml").data, ...)'
        )
    settings = {
        key: sections.Setting(
            value=os.fspath(value) if isinstance(value, os.PathLike) else value,
            place="from_config",
        )
        for key, value in {**given, **keys}.items()
    }
    data = data_keys.changed(data_keys.DataKeys(), settings)
    if not data.data_stages:
        return _sharded(data, vocab_size=vocab_size)
    of_stages = data_keys.stages(data)
    if len({bool(keys.global_batch_size) for _, keys in of_stages}) > 1:
        raise errors.ConfigError(
            "data_stages: some stages set global_batch_size, while others leave it at 0"
            " and use per_device_batch_size; use the same key in all stages"
        )
    return stages.staged(
        [
            stages.Stage(
                begin=begin,
                data=_sharded(keys, vocab_size=vocab_size),
                global_batch_size=keys.global_batch_size or None,
            )
            for begin, keys in of_stages
        ]
    )


def eval_from_config(
    data: data_keys.DataKeys, *, vocab_size: int = 0
) -> elastic_data.ElasticData:
    """The evaluation data: one epoch of `grain_eval_files`, in order, padded.

    Args:
      data: the data keys.
      vocab_size: see `from_config`.
    """
    ordered = dataclasses.replace(
        data,
        data_stages="",
        enable_data_shuffling=False,
        num_epoch=1,
        grain_worker_count=0,
    )
    return _sharded(ordered, key="grain_eval_files", vocab_size=vocab_size)


def vocab_size(data: data_keys.DataKeys) -> int:
    """The vocabulary size of the data's tokenizer."""
    return (_tokenizer(data) or tokenizers.Bytes()).vocab_size


def describe(data: data_keys.DataKeys) -> str:
    """Describes the training data: each dataset as a tree, with its share."""
    described = []
    for begin, section in data_keys.stages(data):
        if data.data_stages:
            size = section.global_batch_size
            each = (
                f"{size}" if size else f"{section.per_device_batch_size:g} per device"
            )
            packing = section.grain_packing_type if section.packing else "unpacked"
            described.append(
                f"stage from step {begin:,}: rows of {section.max_target_length}"
                f" tokens, {packing}, {each} in each batch"
            )
        parts = _parts(section)
        total = sum(part.weight for part in parts)
        described += [
            f"{part.name}, {part.weight / total:.1%}\n{source.tree(part.source)}"
            for part in parts
        ]
    return "\n".join(described)


def _parts(data: data_keys.DataKeys, *, key: str = _TRAIN_FILES) -> tuple[Part, ...]:
    if key == _TRAIN_FILES and data.grain_train_mixture_config_path:
        mixture = datasets.from_file(data.grain_train_mixture_config_path)
    else:
        mixture = datasets.from_list(getattr(data, key), key=key)
    # A conversation may have tools beside its columns.
    settings: dict[str, Any] = {"columns": () if data.use_sft else _columns(data)}
    if data.grain_file_type in _OF_RECORDS:
        settings["record_format"] = data.grain_record_format
    if data.grain_file_type == "text":
        settings["whole_files"] = data.text_whole_files
    make_source = functools.partial(_SOURCES[data.grain_file_type], **settings)
    return tuple(
        Part(
            name=dataset.name,
            source=make_source(files=files.find_files(dataset.patterns, key=key)),
            weight=dataset.weight,
        )
        for dataset in mixture
    )


def _sharded(
    data: data_keys.DataKeys,
    *,
    key: str = _TRAIN_FILES,
    vocab_size: int,
) -> sharded_data.ShardedData:
    shuffle = data.enable_data_shuffling
    packing = data.grain_packing_type if data.packing else ""
    _check(data, num_tokens=vocab_size)
    pipeline = LanguagePipeline(
        parts=_parts(data, key=key),
        num_shards=data.num_logical_shards,
        reading=records.ReadOptions(
            shuffle_seed=data.data_shuffle_seed if shuffle else None,
            num_epochs=data.num_epoch or None,
            skip_corrupt=data.corrupt_records == "skip",
        ),
        documents=_documents(data),
        length=data.max_target_length,
        truncate=data.use_truncation,
        window=data.grain_shuffle_buffer_size if shuffle else 0,
        packing=packing,
        max_examples=data.max_segments_per_seq if packing else 0,
        seed=data.data_shuffle_seed,
        tokenizer_threads=data.tokenizer_threads,
        num_processes=max(data.grain_worker_count, 1),
        vocab_size=vocab_size,
    )
    num_workers = data.grain_worker_count
    if num_workers < 0:
        # Templates run as Python and hold the GIL, which the training loop needs;
        # everything else releases it most of the time.
        num_workers = int(data.use_sft)
    return sharded_data.ShardedData(
        make_shard=pipeline,
        num_shards=data.num_logical_shards,
        pipeline=pipeline.identity(),
        end=elastic_data.End.PADDED if data.num_epoch else elastic_data.End.NEVER,
        num_workers=num_workers,
        per_worker_batches=data.grain_per_worker_buffer_size,
    )


def _tokenizer(data: data_keys.DataKeys) -> tokenizers.Tokenizer | None:
    if not data.tokenize_train_data:
        return None
    return tokenizers.load(data.tokenizer_type, data.tokenizer_path)


def _columns(data: data_keys.DataKeys) -> tuple[str, ...]:
    return tuple(name.strip() for name in data.train_data_columns.split(","))


def _documents(data: data_keys.DataKeys) -> lm_documents.Encoder:
    tokenizer = _tokenizer(data)
    if tokenizer is None or not data.use_sft:
        return lm_documents.Documents(
            column=data.train_data_columns,
            tokenizer=tokenizer,
            add_begin=data.add_bos,
            add_end=data.add_eos,
        )
    return chat.Conversations(
        columns=_columns(data),
        template=chat_templates.load_chat_template(
            tokenizer,
            text=data.chat_template,
            path=data.chat_template_path,
            date=data.chat_template_date,
        ),
        tokenizer=tokenizer,
        completion_only=data.sft_train_on_completion_only,
        length=data.max_target_length if data.use_truncation else 0,
    )


def _check(data: data_keys.DataKeys, *, num_tokens: int) -> None:
    # Rejects settings that are incompatible with each other or with the model.
    wanted = vocab_size(data) if num_tokens and data.tokenize_train_data else 0
    is_cut = data.packing and data.grain_packing_type == rows.CONCAT_THEN_SPLIT
    for is_wrong, message in (
        (
            wanted > num_tokens,
            f"vocab_size={num_tokens}, but the tokenizer has {wanted} tokens; set"
            f" vocab_size to {wanted} or more",
        ),
        (
            data.use_sft and not data.tokenize_train_data,
            "use_sft=true does not work with tokenize_train_data=false, because a chat"
            " template renders text; set tokenize_train_data=true",
        ),
        (
            data.chat_template and data.chat_template_path,
            "chat_template and chat_template_path are both set; set only one of them",
        ),
        (
            data.max_segments_per_seq and is_cut,
            f"max_segments_per_seq={data.max_segments_per_seq} does not work with"
            " grain_packing_type=concat_then_split, which splits documents wherever a"
            " row is full; set max_segments_per_seq to 0, or pack with first_fit or"
            " best_fit",
        ),
    ):
        if is_wrong:
            raise errors.ConfigError(message)
