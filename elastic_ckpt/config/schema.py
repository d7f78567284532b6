"""Every configuration key: its section, type, default and description.

Keys are flat, as in MaxText, and have the same names if they have the same meaning.
They are defined here and, for the input pipeline, in `config.data_section`;
`config.keys` looks them up.
"""

from __future__ import annotations

import dataclasses

from elastic_ckpt.config.data_section import DataSection
from elastic_ckpt.config.deploy_section import DeploySection
from elastic_ckpt.config.divergence_section import DivergenceSection
from elastic_ckpt.config.elastic_section import ElasticSection
from elastic_ckpt.config.key import key
from elastic_ckpt.config.pods_section import PodsSection
from elastic_ckpt.config.slurm_section import SlurmSection
from elastic_ckpt.config.validation_section import ValidationSection


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunSection:
    """The run: its name, directory and length."""

    run_name: str = key(
        "",
        "Name of the run: its files are in base_output_directory/run_name. Using the"
        " same name again continues the run from its newest complete step.",
    )
    base_output_directory: str = key(
        "runs",
        "The directory of all runs: a local or shared path, or gs://bucket/path.",
    )
    steps: int = key(
        100,
        "Train until this many steps are done, counted over all starts.",
        at_least=1,
    )
    log_period: int = key(
        10,
        "Steps between two progress lines if the output is not a terminal.",
        at_least=1,
    )
    step_log: str = key(
        "proof",
        "Detail of the log of each step's examples: proof has an audit name the rows"
        " that differ; summary has one digest a step, in a tenth of the space.",
        choices=("proof", "summary"),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorldSection:
    """The world: hosts and devices."""

    hosts: int = key(
        1,
        "Host processes that the local launcher starts on this machine. An outer"
        " launcher (Slurm, JobSet) sets their number itself.",
        at_least=1,
    )
    slices: int = key(
        1,
        "Groups of hosts: the failure domains of a run, the outer axis of the mesh.",
        at_least=1,
    )
    devices_per_host: int = key(
        1,
        "Devices of each host process: with hardware=cpu so many CPU devices, with"
        " hardware=gpu and several hosts on a machine the GPUs of each. On accelerators"
        " colocated Python needs as many CPU devices as the host has accelerators.",
        at_least=1,
    )
    jax_cache_dir: str = key(
        "",
        "Directory of JAX's compilation cache: a restart on a topology that was used"
        " before compiles nothing. Empty disables the cache.",
    )
    hardware: str = key(
        "cpu", "The kind of device to compute on.", choices=("cpu", "gpu", "tpu")
    )
    enable_single_controller: bool = key(
        False,
        "One program, the head, controls the devices of all hosts through Pathways;"
        " needs the extra `pathways`. Otherwise each host runs the program.",
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelSection:
    """The decoder-only transformer."""

    base_emb_dim: int = key(128, "Width of the residual stream.", at_least=1)
    base_num_query_heads: int = key(4, "Attention heads of a layer.", at_least=1)
    head_dim: int = key(32, "Width of a head.", at_least=2, multiple_of=2)
    base_mlp_dim: int = key(512, "Width inside the feed-forward block.", at_least=1)
    base_num_decoder_layers: int = key(4, "Layers.", at_least=1)
    vocab_size: int = key(
        0,
        "Rows of the embedding; 0 takes the size of the tokenizer's vocabulary, or, for"
        " data that is already tokenized, 259, that of bytes.",
        at_least=0,
    )
    init_weights_seed: int = key(0, "Seed of the initial weights.", at_least=0)
    init_from: str = key(
        "",
        "A checkpoint of any format, local or in a bucket, with the weights of a new"
        " run; its data are not used. A run that has saved a step continues from that,"
        " and does not read this again.",
    )
    init_from_optimizer: bool = key(
        False,
        "Whether the run goes on from that checkpoint: the state of the optimizer and"
        " the number of steps are read, too. Otherwise they are new.",
    )
    init_from_layout: str = key(
        "",
        "The layout of that checkpoint, a YAML file or the name of a layout that ships:"
        " it relates its tensors (from) with those of the model (to), such as"
        " params/embedding. Empty for a step that a run of the same model has saved.",
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerSection:
    """AdamW with warm-up and cosine decay."""

    learning_rate: float = key(1e-3, "Peak learning rate.", at_least=0)
    learning_rate_final_fraction: float = key(
        0.1, "Final learning rate as a fraction of the peak.", at_least=0
    )
    warmup_steps_fraction: float = key(
        0.1, "Warm-up as a fraction of learning_rate_schedule_steps.", at_least=0
    )
    learning_rate_schedule_steps: int = key(
        -1,
        "Length of the schedule; -1 takes `steps`. Set it in a run that is continued"
        " with larger `steps`, so that the schedule does not change.",
        at_least=-1,
    )
    gradient_clipping_threshold: float = key(
        1.0, "Global norm to which gradients are clipped; 0 disables it.", at_least=0
    )
    adam_b1: float = key(0.9, "Decay of the first moment.", at_least=0, below=1)
    adam_b2: float = key(0.95, "Decay of the second moment.", at_least=0, below=1)
    adam_eps: float = key(1e-8, "Added to the denominator.", at_least=0)
    adam_weight_decay: float = key(0.1, "Decoupled weight decay.", at_least=0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointSection:
    """Checkpoints: their period and their number."""

    enable_checkpointing: bool = key(True, "Save checkpoints and continue from them.")
    async_checkpointing: bool = key(True, "Write checkpoints while training continues.")
    checkpoint_period: int = key(100, "Steps between two checkpoints.", at_least=1)
    save_checkpoint_on_completion: bool = key(True, "Save the last step as well.")
    max_num_checkpoints_to_keep: int = key(
        0,
        "Number of newest steps to keep; older ones are deleted. 0 keeps all.",
        at_least=0,
    )
    num_best_checkpoints_to_keep: int = key(
        0,
        "Number of best steps in storage to keep besides the newest: those with the"
        " best `best_checkpoint_metric`.",
        at_least=0,
    )
    best_checkpoint_metric: str = key(
        "eval_loss",
        "The metric that ranks steps: eval_loss is the mean loss of an evaluation, and"
        " programs that follow the run can record others.",
    )
    best_checkpoint_mode: str = key(
        "min", "Whether a lower or a higher metric is better.", choices=("min", "max")
    )
    save_best_checkpoint: bool = key(
        False,
        "Save a step to storage, besides those that are due, if its evaluation is"
        " better than all before. The run waits for a backup that is under way then.",
    )
    checkpoint_steps_to_keep: str = key(
        "",
        "Steps that are saved to storage, besides those that are due, and kept besides"
        " the newest, separated by `;`: 1000;5000.",
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class TiersSection:
    """Checkpoints in the memory of hosts, with copies in the memory of peers."""

    enable_multi_tier_checkpointing: bool = key(
        False,
        "Save to the hosts' RAM every `local_checkpoint_period` steps, and back up from"
        " there to persistent storage at longer intervals.",
    )
    local_checkpoint_directory: str = key(
        "/local",
        "A RAM disk on each host, for example /dev/shm. The JobSet mounts one here,"
        " which exists as long as its pod; empty mounts none.",
    )
    local_checkpoint_size_limit: str = key(
        "64Gi",
        "Size of the RAM disk, taken from the host's memory: 64Gi, 512Mi.",
    )
    local_checkpoint_period: int = key(
        0, "Steps between two saves to RAM; must be set.", at_least=0
    )
    multi_tier_checkpointing_backup_interval_minutes: float = key(
        0.0,
        "Minutes between two backups to persistent storage; set this or the next key.",
        at_least=0,
        off=-1,
    )
    multi_tier_checkpointing_backup_interval_steps: int = key(
        0,
        "Steps between two backups to persistent storage; set this or the previous"
        " key.",
        at_least=0,
    )
    peer_copies: int = key(
        2,
        "Number of copies on other machines, besides that of the host that saved;"
        " replicas by data parallelism count as copies.",
        at_least=0,
    )
    peer_assume_data_parallelism: bool = key(
        False,
        "Copy nothing to peers, for a model whose copies do not fit into memory.",
    )
    peer_domain: str = key(
        "zone;block;rack;slice",
        "Kinds of failure domains that are lost as a whole, from large to small:"
        " `slice`, and kinds of `peer_domains` or of the agent of a node. The first"
        " counts among which the hosts of a world are spread evenly, or else the last:"
        " one copy is outside of it, the others inside. All are in different domains of"
        " the last kind, too, if there are enough.",
    )
    peer_domains: str = key(
        "",
        "This host's failure domains, such as `rack=r7;zone=us-east5-a`; `slice`,"
        " `host` and those in its ELASTIC_CKPT_DOMAINS need not be listed.",
    )
    peer_interface: str = key(
        "",
        "The address at which other machines reach this host's memory; empty takes"
        " POD_IP from the environment, or else the address by which it reaches JAX's"
        " coordinator.",
    )
    peer_port: int = key(
        0, "The port at this address; 0 lets the system choose one.", at_least=0
    )
    peer_urls: str = key(
        "",
        "Agents of further machines to query when a run continues, separated by `;`;"
        " those of the run's own machines, past and present, need not be listed.",
    )
    peer_backup_urls: str = key(
        "",
        "Agents of backup hosts (`elastic-ckpt agent --backup`), separated by `;`,"
        " which together hold one more copy of everything, besides peer_copies.",
    )
    peer_secret_file: str = key(
        "",
        "A file with the run's secret, the same as that of backup hosts; empty lets the"
        " hosts choose one.",
    )
    peer_max_mib_per_sec: float = key(
        0.0,
        "The most that a host reads from peers, in MiB/s; 0 sets no limit.",
        at_least=0,
    )
    peer_timeout_secs: float = key(
        10.0,
        "How long a peer may send nothing before it is left alone, for three times as"
        " long. Hosts wait for it as long where nobody else has what it has: at a"
        " start, and for the last backup of a run.",
        at_least=0.1,
    )
    peer_tls_certificate: str = key(
        "", "A PEM file with this host's certificate; empty disables encryption."
    )
    peer_tls_key: str = key("", "A PEM file with the certificate's private key.")
    peer_tls_ca: str = key(
        "", "A PEM file with the authority that signs all hosts' certificates."
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class MetricsSection:
    """Outputs of metrics besides the JSON lines in the run's `metrics/`."""

    enable_tensorboard: bool = key(
        False,
        "Write metrics for TensorBoard, too, to the run's `tensorboard/`; needs the"
        " extra `tensorboard`.",
    )
    prometheus_port: int = key(
        0,
        "Serve metrics to Prometheus at this port of each host; several hosts that the"
        " local launcher starts use this port and the next ones, and the launcher,"
        " which has the metrics of the run as a whole, the one after them. 0 disables"
        " it. Needs the extra `prometheus`.",
        at_least=0,
    )
    prometheus_interface: str = key(
        "127.0.0.1",
        "Interface of that port; with 0.0.0.0 every machine that reaches the host can"
        " read the metrics.",
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """A complete configuration; no two sections have the same key."""

    run: RunSection = RunSection()
    world: WorldSection = WorldSection()
    model: ModelSection = ModelSection()
    optimizer: OptimizerSection = OptimizerSection()
    data: DataSection = dataclasses.field(default_factory=DataSection)
    checkpoint: CheckpointSection = CheckpointSection()
    divergence: DivergenceSection = dataclasses.field(default_factory=DivergenceSection)
    tiers: TiersSection = TiersSection()
    validation: ValidationSection = dataclasses.field(default_factory=ValidationSection)
    elastic: ElasticSection = dataclasses.field(default_factory=ElasticSection)
    metrics: MetricsSection = MetricsSection()
    deploy: DeploySection = dataclasses.field(default_factory=DeploySection)
    pods: PodsSection = dataclasses.field(default_factory=PodsSection)
    slurm: SlurmSection = dataclasses.field(default_factory=SlurmSection)
