"""Every configuration key: its section, type, default and meaning.

Keys are flat, as in MaxText, and carry MaxText's names where they mean the same. This
module is the one place that defines them; `config.keys` looks them up.
"""

from __future__ import annotations

import dataclasses
from typing import Any, TypeAlias

Value: TypeAlias = bool | int | float | str


def _key(
    default: Value,
    doc: str,
    *,
    choices: tuple[Value, ...] = (),
    at_least: float | None = None,
    off: int | None = None,
    listed: bool = False,
) -> Any:
    # MaxText's ways to write a value are read too: `off` for the default, and of a text
    # that is `listed` a list of one.
    metadata = {
        "doc": doc,
        "choices": choices,
        "at_least": at_least,
        "off": off,
        "listed": listed,
    }
    return dataclasses.field(default=default, metadata=metadata)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunSection:
    """What the run is called, where it lives, how long it is."""

    run_name: str = _key(
        "",
        "Names the run: its files are in base_output_directory/run_name. The same name"
        " again continues the run from its newest complete step.",
    )
    base_output_directory: str = _key(
        "runs",
        "The directory of all runs: a local or shared path, or gs://bucket/path.",
    )
    steps: int = _key(
        100,
        "Train until this many steps are done, counted over all starts.",
        at_least=1,
    )
    log_period: int = _key(
        10,
        "Steps between two progress lines where the output is not a terminal.",
        at_least=1,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorldSection:
    """Which hosts and devices take part."""

    hosts: int = _key(
        1,
        "Host processes that the local launcher starts on this machine. Under an outer"
        " launcher (Slurm, JobSet) the world is what that launcher started.",
        at_least=1,
    )
    slices: int = _key(
        1,
        "Groups of hosts: the failure domains of a run, the outer axis of the mesh.",
        at_least=1,
    )
    devices_per_host: int = _key(
        1,
        "CPU devices of each host process. With hardware=cpu they train; with other"
        " hardware colocated Python needs as many as the host has accelerators.",
        at_least=1,
    )
    jax_cache_dir: str = _key(
        "",
        "Directory of JAX's compilation cache: a restart on a known topology compiles"
        " nothing again. Empty caches nothing.",
    )
    hardware: str = _key(
        "cpu", "The kind of device to compute on.", choices=("cpu", "gpu", "tpu")
    )
    enable_single_controller: bool = _key(
        False,
        "One program, the head, drives the devices of all hosts through Pathways; needs"
        " the extra `pathways`. Otherwise each host runs the program.",
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelSection:
    """The decoder-only transformer."""

    base_emb_dim: int = _key(128, "Width of the residual stream.", at_least=1)
    base_num_query_heads: int = _key(4, "Attention heads of a layer.", at_least=1)
    head_dim: int = _key(32, "Width of a head.", at_least=2)
    base_mlp_dim: int = _key(512, "Width inside the feed-forward block.", at_least=1)
    base_num_decoder_layers: int = _key(4, "Layers.", at_least=1)
    vocab_size: int = _key(
        0,
        "Rows of the embedding; 0 takes the tokenizer's vocabulary, or for tokens that"
        " are not made here 259, that of bytes.",
        at_least=0,
    )
    init_weights_seed: int = _key(0, "Seed of the initial weights.", at_least=0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerSection:
    """AdamW with warm-up and cosine decay."""

    learning_rate: float = _key(1e-3, "Peak learning rate.", at_least=0)
    learning_rate_final_fraction: float = _key(
        0.1, "Final learning rate as a fraction of the peak.", at_least=0
    )
    warmup_steps_fraction: float = _key(
        0.1, "Fraction of learning_rate_schedule_steps that warms up.", at_least=0
    )
    learning_rate_schedule_steps: int = _key(
        -1,
        "Length of the schedule; -1 takes `steps`. Set it in a run that is continued"
        " with larger `steps`, so that the schedule does not move.",
        at_least=-1,
    )
    gradient_clipping_threshold: float = _key(
        1.0, "Global norm that gradients are clipped to; 0 clips nothing.", at_least=0
    )
    adam_b1: float = _key(0.9, "Decay of the first moment.", at_least=0)
    adam_b2: float = _key(0.95, "Decay of the second moment.", at_least=0)
    adam_eps: float = _key(1e-8, "Added to the denominator.", at_least=0)
    adam_weight_decay: float = _key(0.1, "Decoupled weight decay.", at_least=0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataSection:
    """Where examples come from, and how many a step takes."""

    grain_train_files: str = _key(
        "",
        "Files with the training records: a path, a URI or a glob pattern, or several"
        " separated by commas. A mixture is written patterns,weight;patterns,weight.",
    )
    grain_train_mixture_config_path: str = _key(
        "",
        "A JSON file of the mixture instead:"
        ' {"name": {"path": "files*", "weight": 0.5}, ...}; in the place of path,'
        " datasets nests another mixture. Weights and datasets may change at a resume.",
    )
    grain_file_type: str = _key(
        "arrayrecord",
        "Format of the files.",
        choices=("arrayrecord", "parquet", "tfrecord"),
    )
    grain_record_format: str = _key(
        "bytes",
        "What a record of ArrayRecord or TFRecord is: the text, or a tf.Example.",
        choices=("bytes", "tf_example"),
    )
    train_data_columns: str = _key(
        "text",
        "The column, or feature of a tf.Example, that has the text or tokens; or, as"
        " MaxText writes it, a list of that one.",
        listed=True,
    )
    text_directory: str = _key(
        "",
        "If a dataset is a single path that does not exist yet, it is written from the"
        " text files below this directory, as `elastic-ckpt data` does; `python-stdlib`"
        " stands for the sources of Python's standard library, `python-stdlib/email`"
        " for a part of them. Several datasets, those to evaluate on last, have several"
        " directories, separated by semicolons.",
    )
    num_logical_shards: int = _key(
        0,
        "Logical shards of the run, frozen for its life; every number of hosts that"
        " divides it (`elastic-ckpt plan` tells) works at no cost. 0 chooses the"
        " positional engine: ArrayRecord, one record one example, no packing.",
        at_least=0,
    )
    num_epoch: int = _key(
        0, "Epochs until the data ends, and the run with it; 0 never ends.", at_least=0
    )
    drop_remainder: bool = _key(
        False,
        "Leave out the last batch if it is not full; otherwise pad and mask it.",
    )
    corrupt_records: str = _key(
        "fail",
        "Whether a record that is not what was written ends the run, or is left out.",
        choices=("fail", "skip"),
    )
    tokenize_train_data: bool = _key(
        True, "Tokenize the column; false if it has the tokens."
    )
    tokenizer_type: str = _key(
        "bytes",
        "The tokenizer; the last three need the extra `tokenizers`.",
        choices=("bytes", "sentencepiece", "tiktoken", "huggingface"),
    )
    tokenizer_path: str = _key("", "The tokenizer's file, a path or a URI.")
    tokenizer_threads: int = _key(
        0,
        "Threads of each host that tokenise, ahead of the packing. 0 takes the cores of"
        " the machine, divided by the hosts on it. May change at a resume.",
        at_least=0,
    )
    add_bos: bool = _key(True, "Begin a text with the tokenizer's begin token.")
    add_eos: bool = _key(True, "End a text with the tokenizer's end token.")
    max_target_length: int = _key(256, "Tokens of a row.", at_least=1)
    use_truncation: bool = _key(
        True, "Trim longer texts to a row; false cuts them into several examples."
    )
    packing: bool = _key(False, "Fill a row with several examples.")
    grain_packing_type: str = _key(
        "first_fit",
        "How rows are filled.",
        choices=("first_fit", "best_fit", "concat_then_split"),
    )
    max_segments_per_seq: int = _key(
        0,
        "Examples of a packed row at most, for first_fit and best_fit; 0, or -1 as in"
        " MaxText, sets no limit.",
        at_least=0,
        off=-1,
    )
    grain_shuffle_buffer_size: int = _key(
        100,
        "Examples of a logical shard that are shuffled at a time, if"
        " enable_data_shuffling; 0 shuffles files and their blocks alone.",
        at_least=0,
    )
    per_device_batch_size: float = _key(
        1.0, "Rows a device takes each step, if global_batch_size is 0.", at_least=0
    )
    global_batch_size: int = _key(
        0,
        "Rows of a global batch whatever the number of devices; 0 takes"
        " per_device_batch_size times the devices that are there.",
        at_least=0,
    )
    enable_rampup_batch_size: bool = _key(
        False,
        "Begin with smaller batches, in equal stages; needs per_device_batch_size.",
    )
    per_device_batch_size_start: float = _key(
        4.0, "Rows a device takes each step of the first stage.", at_least=0
    )
    per_device_batch_size_increment: float = _key(
        2.0, "Rows by which each stage is larger than the one before.", at_least=0
    )
    global_rampup_samples: int = _key(
        500, "Rows that all stages before the last take together.", at_least=1
    )
    enable_data_shuffling: bool = _key(True, "Shuffle the records anew each epoch.")
    data_shuffle_seed: int = _key(0, "Seed of the shuffle.", at_least=0)
    grain_use_elastic_iterator: bool = _key(
        False,
        "Let Grain's ElasticIterator deal the rows out to the hosts: each batch has the"
        " same rows on any number of hosts, in other places. Otherwise hosts load the"
        " rows that their devices hold, and batches are row for row the same.",
    )
    grain_num_threads: int = _key(
        4, "Threads that read records on each host; positional engine.", at_least=0
    )
    grain_prefetch_buffer_size: int = _key(
        16, "Records read ahead on each host; positional engine.", at_least=1
    )
    grain_worker_count: int = _key(
        0,
        "Processes that run the logical shards of each host; 0 runs them in the host's"
        " own process, and so does -1. May change at a resume.",
        at_least=0,
        off=-1,
    )
    grain_per_worker_buffer_size: int = _key(
        1, "Batches that each of these processes has ready.", at_least=1
    )
    data_read_ahead_batches: int = _key(
        2,
        "Batches that each host has ready on devices before they are asked for; 0 reads"
        " when a batch is due. May change at a resume.",
        at_least=0,
    )
    data_read_ahead_mib: int = _key(
        1024, "Memory that these batches take on each host, at most.", at_least=1
    )
    grain_eval_files: str = _key(
        "", "Files to evaluate on, written and read like grain_train_files."
    )
    eval_interval: int = _key(
        0,
        "Training steps between two evaluations; 0 or -1 evaluates never.",
        at_least=0,
        off=-1,
    )
    eval_steps: int = _key(
        0,
        "Batches of an evaluation; 0 or -1 takes all that there are.",
        at_least=0,
        off=-1,
    )
    colocated_python_data_input: bool = _key(
        False,
        "Run the data iterator, which writes its state, in colocated Python.",
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointSection:
    """When to save, and what to keep."""

    enable_checkpointing: bool = _key(True, "Save checkpoints and continue from them.")
    async_checkpointing: bool = _key(True, "Write checkpoints while training goes on.")
    checkpoint_period: int = _key(100, "Steps between two checkpoints.", at_least=1)
    save_checkpoint_on_completion: bool = _key(True, "Save the last step as well.")
    max_num_checkpoints_to_keep: int = _key(
        0,
        "Keep the newest so many steps and delete older ones; 0 keeps all.",
        at_least=0,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class TiersSection:
    """Checkpoints in the memory of hosts, with copies in that of their peers."""

    enable_multi_tier_checkpointing: bool = _key(
        False,
        "Save to the hosts' RAM every `local_checkpoint_period` steps, and back up from"
        " there to persistent storage now and then.",
    )
    local_checkpoint_directory: str = _key(
        "/local",
        "A RAM disk on each host, /dev/shm on a machine of your own. The JobSet mounts"
        " one here, which lives as long as its pod; empty mounts none.",
    )
    local_checkpoint_size_limit: str = _key(
        "64Gi",
        "The most that the RAM disk may hold, of the host's memory: 64Gi, 512Mi.",
    )
    local_checkpoint_period: int = _key(
        0, "Steps between two saves to RAM; has to be set.", at_least=0
    )
    multi_tier_checkpointing_backup_interval_minutes: float = _key(
        0.0,
        "Minutes between two backups to persistent storage; this or the next key.",
        at_least=0,
        off=-1,
    )
    multi_tier_checkpointing_backup_interval_steps: int = _key(
        0,
        "Steps between two backups to persistent storage; this or the last key.",
        at_least=0,
    )
    peer_copies: int = _key(
        2,
        "Holders of everything besides the host that saved it, on other machines; hosts"
        " that hold the same by data parallelism count.",
        at_least=0,
    )
    peer_assume_data_parallelism: bool = _key(
        False,
        "Copy nothing to peers, for a model of which no copy fits into memory.",
    )
    peer_domain: str = _key(
        "slice",
        "The failure domain that goes as a whole: one copy is outside of it, the others"
        " inside. `slice`, or a kind of `peer_domains`.",
    )
    peer_domains: str = _key(
        "",
        "This host's failure domains, such as `rack=r7;zone=us-east5-a`; `slice` and"
        " `host` are known without, and what is in its ELASTIC_CKPT_DOMAINS.",
    )
    peer_interface: str = _key(
        "",
        "The address at which other machines reach this host's memory; empty takes the"
        " environment's POD_IP, or else this machine alone, 127.0.0.1.",
    )
    peer_port: int = _key(
        0, "The port there; 0 lets the system choose one.", at_least=0
    )
    peer_urls: str = _key(
        "",
        "Agents of idle machines to ask as well when a run continues, separated by `;`;"
        " those of its machines, past and present, are known.",
    )
    peer_max_mib_per_sec: float = _key(
        0.0,
        "The most that a host takes from peers in MiB/s; 0 sets no bound.",
        at_least=0,
    )
    peer_tls_certificate: str = _key(
        "", "A PEM file with this host's certificate; empty sends unencrypted."
    )
    peer_tls_key: str = _key("", "A PEM file with the certificate's private key.")
    peer_tls_ca: str = _key(
        "", "A PEM file with the authority that signs the certificates of all hosts."
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class MetricsSection:
    """Where metrics go, besides the JSON lines of each host in the run's `metrics/`."""

    enable_tensorboard: bool = _key(
        False,
        "Write them for TensorBoard as well, to the run's `tensorboard/`; needs the"
        " extra `tensorboard`.",
    )
    prometheus_port: int = _key(
        0,
        "Serve them to Prometheus at this port of each host; several hosts that the"
        " local launcher starts take this port and the next ones. 0 serves none. Needs"
        " the extra `prometheus`.",
        at_least=0,
    )
    prometheus_interface: str = _key(
        "127.0.0.1",
        "Interface of that port: 0.0.0.0 lets every machine read them that reaches the"
        " host.",
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeploySection:
    """The JobSet on GKE that `elastic-ckpt manifest` writes; sidecar/README.md."""

    docker_image: str = _key(
        "", "Image with elastic_ckpt: of the head, or without one of every host."
    )
    machine_type: str = _key(
        "",
        "GKE machine type of the accelerator hosts: ct6e-standard-4t, a3-highgpu-8g. Of"
        " TPUs it is those of a slice; without accelerators empty takes any.",
    )
    topology: str = _key(
        "",
        "Chips of a TPU slice, for example 4x4; the hosts of a slice follow from it. On"
        " other hardware `hosts` are shared out over `slices`.",
    )
    namespace: str = _key("default", "The namespace of everything that is written.")
    service_account: str = _key(
        "",
        "The Kubernetes service account of the pods, for instance one that may use the"
        " bucket; empty takes the namespace's, or where JAX asks the Kubernetes API who"
        " takes part one that is written too.",
    )
    shared_memory_size_limit: str = _key(
        "16Gi",
        "The most that /dev/shm may hold on each host, and through Pathways also the"
        " memory that a host's server and sidecar hand batches over in.",
    )
    max_restarts: int = _key(
        10, "Times that the whole job starts again by itself.", at_least=0
    )
    termination_grace_period_seconds: int = _key(
        60, "Seconds from SIGTERM until hosts that still save are killed.", at_least=1
    )
    colocated_python_sidecar_image: str = _key(
        "", "Pathways: the image built from sidecar/Dockerfile."
    )
    server_image: str = _key(
        "us-docker.pkg.dev/cloud-tpu-v2-images/pathways/server:jax-0.10.0",
        "Pathways: the image of the resource manager and of the workers.",
    )
    proxy_server_image: str = _key(
        "us-docker.pkg.dev/cloud-tpu-v2-images/pathways/proxy_server:jax-0.10.0",
        "Pathways: the image of the proxy beside the head.",
    )
    pathways_gcs_location: str = _key(
        "",
        "Pathways: where its servers keep scratch files, gs://bucket/path; empty takes"
        " base_output_directory/pathways.",
    )
    pathways_head_node_pool: str = _key(
        "cpu-np", "Pathways: the node pool, without accelerators, of the head."
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """A whole configuration; each section's keys are unique over all sections."""

    run: RunSection = RunSection()
    world: WorldSection = WorldSection()
    model: ModelSection = ModelSection()
    optimizer: OptimizerSection = OptimizerSection()
    data: DataSection = DataSection()
    checkpoint: CheckpointSection = CheckpointSection()
    tiers: TiersSection = TiersSection()
    metrics: MetricsSection = MetricsSection()
    deploy: DeploySection = DeploySection()
