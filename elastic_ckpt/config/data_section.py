"""The configuration keys of the input pipeline."""

from __future__ import annotations

import dataclasses

from elastic_ckpt.config.key import key


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataSection:
    """Where examples come from, and how many a step takes."""

    grain_train_files: str = key(
        "",
        "Files with the training records: a path, a URI or a glob pattern, or several"
        " separated by commas. A mixture is written patterns,weight;patterns,weight.",
    )
    grain_train_mixture_config_path: str = key(
        "",
        "A JSON file of the mixture instead:"
        ' {"name": {"path": "files*", "weight": 0.5}, ...}; in the place of path,'
        " datasets nests another mixture. Weights and datasets may change at a resume.",
    )
    grain_file_type: str = key(
        "arrayrecord",
        "Format of the files.",
        choices=("arrayrecord", "parquet", "tfrecord"),
    )
    grain_record_format: str = key(
        "bytes",
        "What a record of ArrayRecord or TFRecord is: the text, or a tf.Example.",
        choices=("bytes", "tf_example"),
    )
    train_data_columns: str = key(
        "text",
        "The column, or feature of a tf.Example, that has the text or tokens; or, as"
        " MaxText writes it, a list of that one.",
        listed=True,
    )
    text_directory: str = key(
        "",
        "If a dataset is a single path that does not exist yet, it is written from the"
        " text files below this directory, as `elastic-ckpt data` does; `python-stdlib`"
        " stands for the sources of Python's standard library, `python-stdlib/email`"
        " for a part of them. Several datasets, those to evaluate on last, have several"
        " directories, separated by semicolons.",
    )
    num_logical_shards: int = key(
        0,
        "Logical shards of the run, frozen for its life; every number of hosts that"
        " divides it (`elastic-ckpt plan` tells) works at no cost. 0 chooses the"
        " positional engine: ArrayRecord, one record one example, no packing.",
        at_least=0,
    )
    num_epoch: int = key(
        0, "Epochs until the data ends, and the run with it; 0 never ends.", at_least=0
    )
    drop_remainder: bool = key(
        False,
        "Leave out the last batch if it is not full; otherwise pad and mask it.",
    )
    corrupt_records: str = key(
        "fail",
        "Whether a record that is not what was written ends the run, or is left out.",
        choices=("fail", "skip"),
    )
    tokenize_train_data: bool = key(
        True, "Tokenize the column; false if it has the tokens."
    )
    tokenizer_type: str = key(
        "bytes",
        "The tokenizer; the last three need the extra `tokenizers`.",
        choices=("bytes", "sentencepiece", "tiktoken", "huggingface"),
    )
    tokenizer_path: str = key("", "The tokenizer's file, a path or a URI.")
    tokenizer_threads: int = key(
        0,
        "Threads of each host that tokenise, ahead of the packing. 0 takes the cores of"
        " the machine, divided by the hosts on it. May change at a resume.",
        at_least=0,
    )
    add_bos: bool = key(True, "Begin a text with the tokenizer's begin token.")
    add_eos: bool = key(True, "End a text with the tokenizer's end token.")
    max_target_length: int = key(256, "Tokens of a row.", at_least=1)
    use_truncation: bool = key(
        True, "Trim longer texts to a row; false cuts them into several examples."
    )
    packing: bool = key(False, "Fill a row with several examples.")
    grain_packing_type: str = key(
        "first_fit",
        "How rows are filled.",
        choices=("first_fit", "best_fit", "concat_then_split"),
    )
    max_segments_per_seq: int = key(
        0,
        "Examples of a packed row at most, for first_fit and best_fit; 0, or -1 as in"
        " MaxText, sets no limit.",
        at_least=0,
        off=-1,
    )
    grain_shuffle_buffer_size: int = key(
        100,
        "Examples of a logical shard that are shuffled at a time, if"
        " enable_data_shuffling; 0 shuffles files and their blocks alone.",
        at_least=0,
    )
    per_device_batch_size: float = key(
        1.0, "Rows a device takes each step, if global_batch_size is 0.", at_least=0
    )
    global_batch_size: int = key(
        0,
        "Rows of a global batch whatever the number of devices; 0 takes"
        " per_device_batch_size times the devices that are there.",
        at_least=0,
    )
    enable_rampup_batch_size: bool = key(
        False,
        "Begin with smaller batches, in equal stages; needs per_device_batch_size.",
    )
    per_device_batch_size_start: float = key(
        4.0, "Rows a device takes each step of the first stage.", at_least=0
    )
    per_device_batch_size_increment: float = key(
        2.0, "Rows by which each stage is larger than the one before.", at_least=0
    )
    global_rampup_samples: int = key(
        500, "Rows that all stages before the last take together.", at_least=1
    )
    enable_data_shuffling: bool = key(True, "Shuffle the records anew each epoch.")
    data_shuffle_seed: int = key(0, "Seed of the shuffle.", at_least=0)
    grain_use_elastic_iterator: bool = key(
        False,
        "Let Grain's ElasticIterator deal the rows out to the hosts: each batch has the"
        " same rows on any number of hosts, in other places. Otherwise hosts load the"
        " rows that their devices hold, and batches are row for row the same.",
    )
    grain_num_threads: int = key(
        4, "Threads that read records on each host; positional engine.", at_least=0
    )
    grain_prefetch_buffer_size: int = key(
        16, "Records read ahead on each host; positional engine.", at_least=1
    )
    grain_worker_count: int = key(
        0,
        "Processes that run the logical shards of each host; 0 runs them in the host's"
        " own process, and so does -1. May change at a resume.",
        at_least=0,
        off=-1,
    )
    grain_per_worker_buffer_size: int = key(
        1, "Batches that each of these processes has ready.", at_least=1
    )
    data_read_ahead_batches: int = key(
        2,
        "Batches that each host has ready on devices before they are asked for; 0 reads"
        " when a batch is due. May change at a resume.",
        at_least=0,
    )
    data_read_ahead_mib: int = key(
        1024, "Memory that these batches take on each host, at most.", at_least=1
    )
    grain_eval_files: str = key(
        "", "Files to evaluate on, written and read like grain_train_files."
    )
    eval_interval: int = key(
        0,
        "Training steps between two evaluations; 0 or -1 evaluates never.",
        at_least=0,
        off=-1,
    )
    eval_steps: int = key(
        0,
        "Batches of an evaluation; 0 or -1 takes all that there are.",
        at_least=0,
        off=-1,
    )
    colocated_python_data_input: bool = key(
        False,
        "Run the data iterator, which writes its state, in colocated Python.",
    )
