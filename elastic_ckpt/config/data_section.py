"""The configuration keys of the input pipeline."""

from __future__ import annotations

import dataclasses

from elastic_ckpt.config.key import key


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataSection:
    """The input data: datasets, tokens, batches and loading."""

    grain_train_files: str = key(
        "",
        "Files with the training records: a path, a URI or a glob pattern, or several"
        " separated by commas. A mixture has the form"
        " patterns,weight;patterns,weight.",
    )
    grain_train_mixture_config_path: str = key(
        "",
        "A JSON file with the mixture instead:"
        ' {"name": {"path": "files*", "weight": 0.5}, ...}; `datasets` instead of'
        " `path` nests another mixture. Weights and datasets may change at a resume.",
    )
    grain_file_type: str = key(
        "arrayrecord",
        "Format of the files.",
        choices=("arrayrecord", "parquet", "tfrecord"),
    )
    grain_record_format: str = key(
        "bytes",
        "Content of an ArrayRecord or TFRecord record: the text, or a tf.Example.",
        choices=("bytes", "tf_example"),
    )
    train_data_columns: str = key(
        "text",
        "The column, or feature of a tf.Example, that has the text or tokens; a list of"
        " one column, as in MaxText, is accepted.",
        lists="one",
    )
    text_directory: str = key(
        "",
        "If a dataset is a single path that does not exist yet, it is written from the"
        " text files below this directory, as by `elastic-ckpt data`; `python-stdlib`"
        " means the sources of Python's standard library, `python-stdlib/email` a part"
        " of them. For several datasets give several directories, separated by"
        " semicolons, those for evaluation last.",
    )
    num_logical_shards: int = key(
        0,
        "Number of logical shards, fixed for the whole run; the run can use any number"
        " of hosts that divides it, at no cost (`elastic-ckpt plan` lists them). 0"
        " selects the positional engine: ArrayRecord files, one example in each"
        " record, no packing.",
        at_least=0,
    )
    num_epoch: int = key(
        0, "Epochs after which the data and the run end; 0 never ends.", at_least=0
    )
    drop_remainder: bool = key(
        False,
        "Drop the last batch if it is not full; otherwise pad and mask it.",
    )
    corrupt_records: str = key(
        "fail",
        "Whether a corrupt record ends the run, or is skipped.",
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
        "Tokenizer threads on each host. 0 uses the machine's cores, divided by the"
        " number of hosts on it. May change at a resume.",
        at_least=0,
    )
    add_bos: bool = key(
        True, "Begin a text with the tokenizer's begin token; false if there is none."
    )
    add_eos: bool = key(
        True, "End a text with the tokenizer's end token; false if there is none."
    )
    max_target_length: int = key(256, "Tokens of a row.", at_least=1)
    use_truncation: bool = key(
        True, "Truncate longer texts to a row; false cuts them into several examples."
    )
    packing: bool = key(False, "Pack several examples into a row.")
    grain_packing_type: str = key(
        "first_fit",
        "How examples are packed into rows.",
        choices=("first_fit", "best_fit", "concat_then_split"),
    )
    max_segments_per_seq: int = key(
        0,
        "The most examples in a packed row, for first_fit and best_fit; 0, or -1 as in"
        " MaxText, sets no limit.",
        at_least=0,
        off=-1,
    )
    grain_shuffle_buffer_size: int = key(
        100,
        "Size of each logical shard's shuffle buffer in examples, if"
        " enable_data_shuffling; 0 shuffles only files and their blocks.",
        at_least=0,
    )
    per_device_batch_size: float = key(
        1.0, "Rows of each device in a step, if global_batch_size is 0.", at_least=0
    )
    global_batch_size: int = key(
        0,
        "Rows of a global batch, for any number of devices; 0 takes"
        " per_device_batch_size times the number of devices.",
        at_least=0,
    )
    enable_rampup_batch_size: bool = key(
        False,
        "Start with smaller batches, in equal stages; needs per_device_batch_size.",
    )
    per_device_batch_size_start: float = key(
        4.0, "Rows of each device in a step of the first stage.", at_least=0
    )
    per_device_batch_size_increment: float = key(
        2.0, "Rows of each device that each stage adds to the previous.", at_least=0
    )
    global_rampup_samples: int = key(
        500, "Rows of all stages before the last together.", at_least=1
    )
    enable_data_shuffling: bool = key(
        True, "Shuffle the records, differently in each epoch."
    )
    data_shuffle_seed: int = key(0, "Seed of the shuffle.", at_least=0)
    grain_use_elastic_iterator: bool = key(
        False,
        "Use Grain's ElasticIterator to assign rows to hosts: each batch has the same"
        " rows on any number of hosts, but in a different order. Otherwise hosts load"
        " the rows that their devices hold, and the order is the same, too.",
    )
    grain_num_threads: int = key(
        4, "Threads that read records on each host; positional engine.", at_least=0
    )
    grain_prefetch_buffer_size: int = key(
        16, "Records read ahead on each host; positional engine.", at_least=1
    )
    grain_worker_count: int = key(
        0,
        "Worker processes that run the logical shards of each host; 0 or -1 runs them"
        " in the host's own process. May change at a resume.",
        at_least=0,
        off=-1,
    )
    grain_per_worker_buffer_size: int = key(
        1, "Batches that each worker process prepares in advance.", at_least=1
    )
    data_read_ahead_batches: int = key(
        2,
        "Batches that each host loads onto its devices in advance; 0 loads a batch when"
        " it is needed. May change at a resume.",
        at_least=0,
    )
    data_read_ahead_mib: int = key(
        1024, "The most memory of these batches on each host.", at_least=1
    )
    grain_eval_files: str = key(
        "", "Files for evaluation, in the same form as grain_train_files."
    )
    eval_interval: int = key(
        0,
        "Training steps between two evaluations; 0 or -1 never evaluates.",
        at_least=0,
        off=-1,
    )
    eval_steps: int = key(
        0,
        "Batches of an evaluation; 0 or -1 takes all.",
        at_least=0,
        off=-1,
    )
    colocated_python_data_input: bool = key(
        False,
        "Run the data iterator, and write its state, in colocated Python.",
    )
