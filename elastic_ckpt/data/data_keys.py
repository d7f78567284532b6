"""The configuration keys of the input data, and its stages."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import yaml

from elastic_ckpt.core import errors, sections, storage
from elastic_ckpt.core.sections import Setting, key


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataKeys:
    """The input data: datasets, tokens, batches and loading.

    The attributes are the keys of this section of a configuration, as explained in
    `configs/base.yml`. `ec.load_config(path).data` reads them from a file, and
    `from_config` checks them.
    """

    grain_train_files: str = key(
        "",
        "Training files: one or more paths, URIs or glob patterns, separated by commas."
        " For a mixture, use the form patterns,weight;patterns,weight.",
    )
    grain_train_mixture_config_path: str = key(
        "",
        'JSON file with the mixture, instead of grain_train_files: {"name": {"path":'
        ' "files*", "weight": 0.5}, ...}; `datasets` instead of `path` nests a second'
        " mixture. Weights and datasets may change when you resume.",
    )
    data_stages: str = key(
        "",
        "Stages of the data: a list, or the path of a YAML file that contains one. Each"
        " stage has begin_step, the number of training steps before it (after 100, its"
        " first is step 101, or 100 in MaxText), and the keys that it sets, such as"
        " grain_train_files, max_target_length or global_batch_size. Stages that have"
        " not begun may change when you resume.",
        lists="any",
    )
    grain_file_type: str = key(
        "arrayrecord",
        "Format of the files, including those for evaluation: `arrow` is what Hugging"
        " Face datasets save, `jsonl` and `text` may be compressed (.gz, .zst),"
        " `megatron` is .bin files with their .idx, and `webdataset` is tar archives.",
        choices=(
            "arrayrecord",
            "arrow",
            "jsonl",
            "megatron",
            "parquet",
            "text",
            "tfrecord",
            "webdataset",
        ),
    )
    text_whole_files: bool = key(
        False,
        "With grain_file_type=text, whether each file is one document. If false, each"
        " line is a document.",
    )
    grain_record_format: str = key(
        "bytes",
        "What a record of an ArrayRecord or TFRecord file contains: the text itself,"
        " or a tf.Example.",
        choices=("bytes", "tf_example"),
    )
    train_data_columns: str = key(
        "text",
        "Column, or feature of a tf.Example, with the text or the tokens. With use_sft,"
        " the column with the messages of a conversation, or two columns, separated by"
        " a comma, with the prompt and the completion. A list, as in MaxText, is"
        " accepted.",
        lists="names",
    )
    use_sft: bool = key(
        False,
        "Train on conversations: the tokenizer's chat template renders their messages."
        " add_bos and add_eos have no effect, because the template adds these tokens.",
    )
    sft_train_on_completion_only: bool = key(
        False,
        "With use_sft, whether the loss counts only the assistant's tokens. If false,"
        " it counts all tokens.",
    )
    chat_template_path: str = key(
        "",
        "File with the chat template: Jinja text, or a .json file with the field"
        " chat_template. If empty, the tokenizer's own template is used, from"
        " chat_template.jinja or tokenizer_config.json next to the tokenizer's file.",
    )
    chat_template: str = key(
        "", "The chat template itself, instead of chat_template_path."
    )
    chat_template_date: str = key(
        "",
        "Date, YYYY-MM-DD, that a chat template sees as today's date. Without it, a"
        " template that asks for the date is rejected, because rows would change from"
        " day to day.",
    )
    text_directory: str = key(
        "",
        "Local directory of text files. If a dataset is a single file that does not"
        " exist yet, it is written from this directory, as by `elastic-ckpt data`."
        " `python-stdlib`, or `python-stdlib/email`, is Python's own source code. For"
        " multiple datasets, separate directories with `;`, and put the evaluation"
        " directory last.",
    )
    num_logical_shards: int = key(
        48,
        "Number of logical shards, fixed for the whole run. Any number of hosts that"
        " divides it reads each shard only once; `elastic-ckpt plan` lists these host"
        " counts.",
        at_least=1,
    )
    num_epoch: int = key(
        0,
        "Number of epochs after which the data and the run end; 0 repeats the data"
        " endlessly. Incomplete batches at the end are padded and masked.",
        at_least=0,
    )
    corrupt_records: str = key(
        "fail",
        "What to do with a corrupt record: stop the run (`fail`) or skip the record"
        " (`skip`). In Parquet and Arrow files, its whole row group or record batch is"
        " skipped.",
        choices=("fail", "skip"),
    )
    tokenize_train_data: bool = key(
        True, "Tokenize the column. Set to false if the column contains tokens."
    )
    tokenizer_type: str = key(
        "bytes",
        "Kind of tokenizer; all but `bytes` need the `tokenizers` extra.",
        choices=("bytes", "sentencepiece", "tiktoken", "huggingface"),
    )
    tokenizer_path: str = key(
        "", "Path or URI of the tokenizer's file; `bytes` has none."
    )
    tokenizer_threads: int = key(
        0,
        "Tokenizer threads on each host. 0 divides the machine's cores among the"
        " hosts on it. May change when you resume.",
        at_least=0,
    )
    add_bos: bool = key(
        True,
        "Begin each document with the tokenizer's beginning-of-sequence token. Set to"
        " false if the tokenizer has none.",
    )
    add_eos: bool = key(
        True,
        "End each document with the tokenizer's end-of-sequence token. Set to false if"
        " the tokenizer has none.",
    )
    max_target_length: int = key(256, "Length of a row in tokens.", at_least=1)
    use_truncation: bool = key(
        True,
        "Truncate documents that are longer than a row. If false, they are split into"
        " multiple examples.",
    )
    packing: bool = key(False, "Pack multiple examples into a row.")
    grain_packing_type: str = key(
        "first_fit",
        "Where packing puts an example: into the first row with enough room"
        " (first_fit), into the fullest such row (best_fit), or after the previous"
        " example, split where a row is full (concat_then_split).",
        choices=("first_fit", "best_fit", "concat_then_split"),
    )
    max_segments_per_seq: int = key(
        0,
        "Maximum number of examples in a packed row, for first_fit and best_fit. 0,"
        " or -1 as in MaxText, sets no limit.",
        at_least=0,
        off=-1,
    )
    grain_shuffle_buffer_size: int = key(
        100,
        "Number of examples in each logical shard's shuffle buffer, if"
        " enable_data_shuffling is true. 0 shuffles only the files and the blocks in"
        " them.",
        at_least=0,
    )
    per_device_batch_size: float = key(
        1.0,
        "Rows of a batch on each device; used if global_batch_size is 0.",
        at_least=0,
    )
    global_batch_size: int = key(
        0,
        "Rows of a batch across all devices, regardless of their number. 0 uses"
        " per_device_batch_size times the number of devices.",
        at_least=0,
    )
    enable_rampup_batch_size: bool = key(
        False,
        "Start with smaller batches that grow in stages, each with the same number of"
        " rows. Requires per_device_batch_size.",
    )
    per_device_batch_size_start: float = key(
        4.0, "Rows of a batch on each device in the first stage.", at_least=0
    )
    per_device_batch_size_increment: float = key(
        2.0, "Rows that every stage adds on each device.", at_least=0
    )
    global_rampup_samples: int = key(
        500, "Rows in the whole ramp: all stages except the last.", at_least=1
    )
    enable_data_shuffling: bool = key(
        True, "Shuffle the records, in a different order in each epoch."
    )
    data_shuffle_seed: int = key(0, "Seed of the shuffle.", at_least=0)
    max_shard_reads: float = key(
        1.5,
        "Maximum number of hosts that read a logical shard, averaged over the shards."
        " If this is exceeded, the run does not start. If the number of hosts does not"
        " divide num_logical_shards, some shards are read more than once. May change"
        " when you resume.",
        at_least=1,
    )
    grain_worker_count: int = key(
        -1,
        "Worker processes on each host that run its logical shards. 0 runs them in the"
        " host's own process. -1 uses one worker process for conversations, whose"
        " templates run in Python, and none for other data. May change when you"
        " resume.",
        at_least=-1,
    )
    grain_per_worker_buffer_size: int = key(
        1, "Batches that each worker process prepares in advance.", at_least=1
    )
    data_read_ahead_batches: int = key(
        2,
        "Batches that each host loads onto its devices in advance; 0 loads a batch"
        " when it is needed. May change when you resume.",
        at_least=0,
    )
    grain_eval_files: str = key(
        "", "Evaluation files, in the same form as grain_train_files."
    )
    eval_interval: int = key(
        0,
        "Training steps between evaluations; 0 or -1 disables evaluation.",
        at_least=0,
        off=-1,
    )
    eval_steps: int = key(
        0,
        "Batches per evaluation; 0 or -1 evaluates on all of them.",
        at_least=0,
        off=-1,
    )
    colocated_python_data_input: bool = key(
        False,
        "Run the data iterator in colocated Python, where it also writes its own"
        " state.",
    )


def changed(data: DataKeys, settings: Mapping[str, Setting]) -> DataKeys:
    """Returns `data` with the given keys set.

    Raises:
      ConfigError: if a key is unknown or a value is invalid.
    """
    fields = dataclasses.fields(data)
    values: dict[str, Any] = dict(
        sections.checked(settings, fields, of=" of the data (others are set elsewhere)")
    )
    return dataclasses.replace(data, **values)


def stages(data: DataKeys) -> list[tuple[int, DataKeys]]:
    """Returns the step at which each stage of the data begins, and the stage's keys.

    Without `data_stages`, there is one stage.

    Raises:
      ConfigError: if the file cannot be read, or a stage is invalid. The message names
        the file or the stage.
    """
    if not data.data_stages:
        return [(0, data)]
    text = data.data_stages
    if text.lstrip().startswith("["):
        path, document = _STAGES, sections.parse(text, path=_STAGES)
    else:
        path = storage.absolute(text)
        document = sections.compose(path, by=f" ({_STAGES})")
    nodes = document.value if isinstance(document, yaml.SequenceNode) else []
    if not nodes or not all(isinstance(node, yaml.MappingNode) for node in nodes):
        raise errors.ConfigError(
            f"{path} does not contain a list of stages; list each stage as"
            " `- begin_step: 0`, followed by the keys that the stage sets"
        )
    fields = [f for f in dataclasses.fields(data) if f.name not in _OF_ALL_STAGES]
    found = []
    for number, node in enumerate(nodes):
        settings = sections.read_mapping(path, node)
        begin = settings.pop("begin_step", None)
        if begin is None or type(begin.value) is not int or begin.value < 0:
            raise errors.ConfigError(
                f"{path}, stage {number}: begin_step is missing or invalid; set it to"
                " the number of training steps before the stage, 0 or more"
            )
        of = " of a stage (set keys for all stages outside data_stages)"
        values: dict[str, Any] = dict(sections.checked(settings, fields, of=of))
        if values.keys() & {*_TRAINING}:
            # The stage's data replaces the run's, no matter which key sets either.
            values |= {key: "" for key in _TRAINING if key not in values}
        found.append((begin.value, dataclasses.replace(data, **values)))
    return found


_STAGES = "data_stages"
# The alternative keys for the training data.
_TRAINING = ("grain_train_files", "grain_train_mixture_config_path")
# Keys that a stage cannot set: they belong to the run or the loop.
_OF_ALL_STAGES = {
    "colocated_python_data_input",
    "data_read_ahead_batches",
    "data_stages",
    "enable_rampup_batch_size",
    "eval_interval",
    "eval_steps",
    "global_rampup_samples",
    "grain_eval_files",
    "max_shard_reads",
    "num_logical_shards",
    "per_device_batch_size_increment",
    "per_device_batch_size_start",
    "text_directory",
}
