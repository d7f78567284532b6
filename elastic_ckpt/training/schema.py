"""Every configuration key: its section, type, default and description.

Keys are flat, as in MaxText, and have MaxText's names where they mean the same. They
are defined here and, for the input pipeline, in `data.data_keys`; `load.keys` lists
them.
"""

from __future__ import annotations

import dataclasses

from elastic_ckpt.core.sections import key
from elastic_ckpt.data.data_keys import DataKeys
from elastic_ckpt.elastic.host import Hardware


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunSection:
    """The run: its name, directory and length."""

    run_name: str = key(
        "",
        "Name of the run, whose files are in base_output_directory/run_name. Use the"
        " same name again to continue the run from its newest complete step.",
    )
    base_output_directory: str = key(
        "runs",
        "Directory of all runs: a local or shared path, or gs://bucket/path.",
    )
    steps: int = key(
        100,
        "Train until this step, counted over all launches of the run.",
        at_least=1,
    )
    log_period: int = key(
        10,
        "Steps between progress lines when the output is not a terminal.",
        at_least=1,
    )
    termination_grace_period_seconds: int = key(
        60,
        "Seconds between SIGTERM and SIGKILL, as set in Kubernetes or Slurm. The run"
        " saves its last step within this time.",
        at_least=1,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorldSection(Hardware):
    """The world: hosts and devices."""

    hosts: int = key(
        1,
        "Total number of hosts in all slices. The local launcher starts that many"
        " processes on this machine; other launchers (Slurm, JobSet) set this number"
        " themselves.",
        at_least=1,
    )
    slices: int = key(
        1,
        "Number of slices: groups of hosts that fail together, and the outer axis of"
        " the mesh.",
        at_least=1,
    )
    devices_per_host: int = key(
        1,
        "Number of devices of each host process: CPU devices with hardware=cpu, or"
        " GPUs with hardware=gpu and multiple hosts on a machine. On accelerators,"
        " colocated Python requires it to be the number of accelerators on the host.",
        at_least=1,
    )
    jax_cache_dir: str = key(
        "",
        "Directory of JAX's compilation cache. With a cache, a restart on a topology"
        " that was used before compiles nothing. Empty disables the cache.",
    )
    hardware: str = key(
        "cpu", "Kind of device to train on.", choices=("cpu", "gpu", "tpu")
    )
    enable_single_controller: bool = key(
        False,
        "Let one process, the head, control the devices of all hosts through Pathways;"
        " needs the `pathways` extra. If false, every host runs the training program.",
    )

    def gpus(self, slot: int) -> range | None:
        """See `Hardware`; a single host uses all GPUs that JAX finds."""
        return None if self.hosts == 1 else super().gpus(slot)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelSection:
    """The decoder-only transformer."""

    base_emb_dim: int = key(128, "Width of the residual stream.", at_least=1)
    base_num_query_heads: int = key(
        4, "Number of attention heads per layer.", at_least=1
    )
    head_dim: int = key(32, "Width of each attention head.", at_least=2, multiple_of=2)
    base_mlp_dim: int = key(512, "Width inside the feed-forward block.", at_least=1)
    base_num_decoder_layers: int = key(4, "Number of decoder layers.", at_least=1)
    vocab_size: int = key(
        0,
        "Rows of the embedding table. 0 uses the size of the tokenizer's vocabulary"
        " or, for data that is already tokenized, 259, the size for bytes.",
        at_least=0,
    )
    init_weights_seed: int = key(0, "Seed of the initial weights.", at_least=0)
    init_from: str = key(
        "",
        "Checkpoint with the initial weights of a new run, in any supported format,"
        " local or in a bucket; its data state is not used. Once the run has saved a"
        " step, it continues from that step and ignores this key.",
    )
    init_from_layout: str = key(
        "",
        "Layout of init_from: a YAML file, or the name of a bundled layout. It maps the"
        " checkpoint's tensors (from) to the model's tensors (to), such as"
        " params/embedding. Leave it empty for a step that a run of the same model"
        " saved.",
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerSection:
    """AdamW with warm-up and cosine decay."""

    learning_rate: float = key(1e-3, "Peak learning rate.", at_least=0)
    learning_rate_final_fraction: float = key(
        0.1, "Final learning rate as a fraction of the peak.", at_least=0
    )
    warmup_steps_fraction: float = key(
        0.1,
        "Length of the warm-up as a fraction of learning_rate_schedule_steps.",
        at_least=0,
    )
    learning_rate_schedule_steps: int = key(
        -1,
        "Length of the schedule in steps; -1 uses `steps`. Set it if you may continue"
        " the run with a larger `steps`, so that the schedule does not change.",
        at_least=-1,
    )
    gradient_clipping_threshold: float = key(
        1.0, "Clip gradients to this global norm; 0 disables clipping.", at_least=0
    )
    adam_b1: float = key(0.9, "Decay rate of the first moment.", at_least=0, below=1)
    adam_b2: float = key(0.95, "Decay rate of the second moment.", at_least=0, below=1)
    adam_eps: float = key(
        1e-8, "Epsilon, the small number added to the denominator.", at_least=0
    )
    adam_weight_decay: float = key(0.1, "Decoupled weight decay.", at_least=0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointSection:
    """Checkpoints: when they are saved and how many are kept."""

    enable_checkpointing: bool = key(
        True, "Save checkpoints and continue from the newest one."
    )
    async_checkpointing: bool = key(
        True, "Write checkpoints in the background while training continues."
    )
    checkpoint_period: int = key(
        100,
        "Steps between checkpoints. With enable_multi_tier_checkpointing, the tiers'"
        " own periods apply instead.",
        at_least=1,
    )
    save_checkpoint_on_completion: bool = key(
        True, "Also save the last step, even if it is not due."
    )
    max_num_checkpoints_to_keep: int = key(
        0,
        "Number of newest steps to keep in storage; older ones are deleted. 0 keeps"
        " all.",
        at_least=0,
    )
    num_best_checkpoints_to_keep: int = key(
        0,
        "Number of best steps to keep in storage, in addition to the newest;"
        " best_checkpoint_metric ranks them.",
        at_least=0,
    )
    best_checkpoint_metric: str = key(
        "eval_loss",
        "Metric that ranks steps. eval_loss is the mean loss of an evaluation;"
        " processes that follow the run can record others.",
    )
    best_checkpoint_mode: str = key(
        "min",
        "Whether a lower (`min`) or a higher (`max`) metric is better.",
        choices=("min", "max"),
    )
    save_best_checkpoint: bool = key(
        False,
        "Also save a step to storage, due or not, if its evaluation is better than"
        " all earlier ones. The run then waits for a backup that is in progress.",
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class DivergenceSection:
    """Callbacks of the training loop and detectors of divergence."""

    training_callbacks: str = key(
        "",
        "Your own callbacks: `module:function`, a function that takes the"
        " configuration and returns a dict of callbacks by name"
        " (elastic_ckpt.training.callbacks). Every host calls it. Empty uses none.",
    )
    distrust_steps: int = key(
        20,
        "If the loss becomes non-finite or a detector or callback finds a divergence"
        " within this many steps of a restore, return once to the newest earlier"
        " checkpoint in storage and train on the same rows again, because the restored"
        " state may have been corrupt when it was saved. 0 disables this.",
        at_least=0,
    )
    divergence_action: str = key(
        "off",
        "What happens when the loss or the gradient norm is infinite or NaN, or when a"
        " detector below finds a divergence: `warn` reports it; `stop` stops the run"
        " and leaves the last checkpoint before the divergence as the newest; `abort`"
        " stops the run without saving; `rollback` returns to that checkpoint or, if"
        " there is none, to the beginning, and skips the data read since.",
        choices=("off", "warn", "stop", "abort", "rollback"),
    )
    divergence_patience_steps: int = key(
        10,
        "Consecutive bad steps after which a detector acts; for a non-finite loss, one"
        " step is enough.",
        at_least=1,
    )
    divergence_loss_factor: float = key(
        0.0,
        "A step is bad if the smoothed loss exceeds its best value by this factor, such"
        " as 1.5; 0 disables this detector.",
        at_least=0,
    )
    divergence_gradient_norm_factor: float = key(
        0.0,
        "A step is bad if its gradient norm, before clipping, exceeds the smoothed norm"
        " of earlier steps by this factor, such as 10; 0 disables this detector.",
        at_least=0,
    )
    divergence_rollback_steps: int = key(
        0,
        "With `rollback`, return to a checkpoint at least this many steps before the"
        " first bad step.",
        at_least=0,
    )
    divergence_max_rollbacks: int = key(
        3,
        "Maximum number of rollbacks; at the next divergence the run stops instead.",
        at_least=0,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class TiersSection:
    """Checkpoints in the RAM of hosts, with copies in the RAM of peers."""

    enable_multi_tier_checkpointing: bool = key(
        False,
        "Save to the hosts' RAM every local_checkpoint_period steps, and back up from"
        " there to persistent storage at longer intervals.",
    )
    local_checkpoint_directory: str = key(
        "/local",
        "RAM disk on each host, for example /dev/shm; pods have one at /local.",
    )
    local_checkpoint_size_limit: str = key(
        "64Gi",
        "Size of the RAM disk, such as 64Gi or 512Mi; it is part of the host's memory.",
    )
    local_checkpoint_pinned_memory: str = key(
        "512Mi",
        "Amount of pinned host memory. Accelerators copy a state of up to this size"
        " into it in one piece; they first copy a larger state within their own memory"
        " if there is room.",
    )
    local_checkpoint_period: int = key(
        0,
        "Steps between saves to RAM; required by enable_multi_tier_checkpointing.",
        at_least=0,
    )
    multi_tier_checkpointing_backup_interval_minutes: float = key(
        0.0,
        "Minutes between backups to persistent storage; set either this or"
        " multi_tier_checkpointing_backup_interval_steps.",
        at_least=0,
        off=-1,
    )
    multi_tier_checkpointing_backup_interval_steps: int = key(
        0,
        "Steps between backups to persistent storage; set either this or"
        " multi_tier_checkpointing_backup_interval_minutes.",
        at_least=0,
    )
    peer_copies: int = key(
        2,
        "Copies of each step on other machines, in addition to the one on the host"
        " that saved it. Data-parallel replicas count as copies.",
        at_least=0,
    )
    peer_assume_data_parallelism: bool = key(
        False,
        "Do not copy steps to peers; use it if a model's copies do not fit in memory.",
    )
    peer_domain: str = key(
        "zone;block;rack;slice",
        "Kinds of failure domains, from large to small: `slice`, or kinds from"
        " peer_domains or a node's agent. One copy goes outside the host's domain of"
        " the first kind in which no domain has most of the hosts (otherwise of the"
        " last kind). The other copies stay in the host's domain, in different domains"
        " of the last kind if possible.",
    )
    peer_domains: str = key(
        "",
        "Failure domains of this host, such as `rack=r7;zone=us-east5-a`. `slice`,"
        " `host` and those in the environment variable ELASTIC_CKPT_DOMAINS need not be"
        " listed.",
    )
    peer_interface: str = key(
        "",
        "Address at which other machines reach this host's memory. Empty uses POD_IP"
        " from the environment or, if it is not set, the address from which the host"
        " reaches JAX's coordinator.",
    )
    peer_port: int = key(
        0, "Port on peer_interface; 0 lets the system choose one.", at_least=0
    )
    peer_urls: str = key(
        "",
        "Agents on other machines to ask for steps when the run continues, separated"
        " by `;`. The run's own machines, past and present, need not be listed.",
    )
    peer_backup_urls: str = key(
        "",
        "Agents of backup hosts (`elastic-ckpt agent --backup`), separated by `;`."
        " Together they store one more copy of everything, in addition to peer_copies.",
    )
    peer_secret_file: str = key(
        "",
        "File with the run's secret, which must be the same on the backup hosts. Empty"
        " lets the hosts choose a secret; with backup hosts, the file is required.",
    )
    peer_max_mib_per_sec: float = key(
        0.0,
        "Maximum rate at which a host reads from peers, in MiB/s; 0 sets no limit.",
        at_least=0,
    )
    peer_timeout_secs: float = key(
        10.0,
        "Seconds after which a silent peer is ignored, for three times this long. At"
        " startup and for a run's last backup, hosts wait this long for a peer that is"
        " the only one with the data they need.",
        at_least=0.1,
    )
    peer_tls_certificate: str = key(
        "",
        "PEM file with this host's certificate. Set it together with the next two"
        " keys; empty disables encryption.",
    )
    peer_tls_key: str = key(
        "", "PEM file with the private key of peer_tls_certificate."
    )
    peer_tls_ca: str = key(
        "",
        "PEM file with the certificate of the authority that signed the certificates of"
        " all hosts.",
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ValidationSection:
    """Comparison of replicas of the state, which should be identical."""

    replica_validation: str = key(
        "none",
        "Compare the replicas of the state on devices and hosts to find silent memory"
        " corruption: `quick` compares a sample of each array, `tensor` compares a"
        " digest of each array, `full` also counts the elements that differ.",
        choices=("none", "quick", "tensor", "full"),
    )
    replica_validation_at_saves: bool = key(True, "Compare before each save.")
    replica_validation_interval: int = key(
        0,
        "Steps between additional comparisons, apart from those before saves; 0"
        " disables them.",
        at_least=0,
    )
    replica_validation_action: str = key(
        "warn",
        "What to do if replicas differ: `warn` reports it, preserves the newest earlier"
        " step in storage and continues; `stop` stops the run before saving the step.",
        choices=("warn", "stop"),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ElasticSection:
    """Elastic runs: slices that are lost, and slices that rejoin."""

    elastic_enabled: bool = key(
        False,
        "When a slice is lost, continue on the others and let it rejoin when it"
        " returns; with one slice, restart its hosts. If false, the run stops when a"
        " host fails.",
    )
    elastic_min_slice_count: int = key(
        0, "Minimum number of slices to train on; 0 requires all.", at_least=0, off=-1
    )
    elastic_max_slice_count: int = key(
        0,
        "Maximum number of slices to train on. Slices beyond it are spares, which"
        " replace lost ones; 0 trains on all.",
        at_least=0,
    )
    elastic_timeout_seconds: int = key(
        300,
        "How long to wait for elastic_min_slice_count slices before the run fails.",
        at_least=0,
    )
    elastic_max_retries: int = key(
        10,
        "Number of consecutive losses, without a new step in between, that the run"
        " survives. At the next loss, it fails and reports the first cause.",
        at_least=0,
    )
    elastic_settle_seconds: float = key(
        10.0,
        "How long a slice must be back before the run uses it.",
        at_least=0,
    )
    elastic_quarantine_failures: int = key(
        3,
        "Number of failures within elastic_quarantine_seconds after which a slice is"
        " not used again until the run is restarted. A slice fails if it is lost or"
        " computes wrong values when it rejoins. 0 disables this.",
        at_least=0,
    )
    elastic_quarantine_seconds: float = key(
        3600.0, "Time window in which a slice's failures count.", at_least=0
    )
    elastic_leave_out_slow_hosts: bool = key(
        False,
        "Continue without the slices of slow hosts if enough others remain, until these"
        " hosts are replaced or the run is restarted. If false, slow hosts are only"
        " reported.",
    )
    elastic_hang_timeout_seconds: float = key(
        600.0,
        "Maximum time that a host may take to run or compile a step. The host's own"
        " earlier steps shorten the limit; other hosts' steps do not.",
        at_least=1,
    )
    elastic_heartbeat_timeout_seconds: float = key(
        30.0,
        "A host that sends no heartbeat for this long, because it is stopped or frozen,"
        " counts as lost.",
        at_least=2,
    )
    elastic_machines: int = key(
        1,
        "Number of machines, which share the slices evenly. Run the same command on"
        " each. All machines share base_output_directory; the machine that holds the"
        " claim next to the run's steps leads the others.",
        at_least=1,
    )
    elastic_machine: int = key(
        -1,
        "Index of this machine, from 0. -1 reads it from NODE_RANK, SLURM_NODEID or"
        " JOB_COMPLETION_INDEX in the environment.",
        at_least=-1,
    )
    elastic_machine_timeout_seconds: float = key(
        10.0,
        "A machine that is silent for this long counts as lost. If it leads, its claim"
        " lapses, and another machine leads.",
        at_least=2,
    )
    faults: str = key(
        "",
        "Failures to inject, for tests and demonstrations: [{kill_slice: 1, at_step:"
        " 40}, {return_slice: 1, at_step: 80}]. Other kinds are break_slice, kill_host"
        " and hang_host.",
        lists="any",
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class MetricsSection:
    """Outputs of metrics in addition to the JSON lines in the run's `metrics/`."""

    enable_tensorboard: bool = key(
        False,
        "Also write metrics for TensorBoard to the run's `tensorboard/`; needs the"
        " `tensorboard` extra.",
    )
    prometheus_port: int = key(
        0,
        "Port on which each host serves metrics to Prometheus; needs the `prometheus`"
        " extra. Hosts of the local launcher use this port and the following ports; the"
        " launcher serves the whole run's metrics on the port after them. 0 disables"
        " it.",
        at_least=0,
    )
    prometheus_interface: str = key(
        "127.0.0.1",
        "Network interface of prometheus_port. With 0.0.0.0, every machine that can"
        " reach the host can read the metrics.",
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """A complete configuration; no two sections have the same key."""

    run: RunSection = RunSection()
    world: WorldSection = WorldSection()
    model: ModelSection = ModelSection()
    optimizer: OptimizerSection = OptimizerSection()
    data: DataKeys = dataclasses.field(default_factory=DataKeys)
    checkpoint: CheckpointSection = CheckpointSection()
    divergence: DivergenceSection = DivergenceSection()
    tiers: TiersSection = TiersSection()
    validation: ValidationSection = ValidationSection()
    elastic: ElasticSection = ElasticSection()
    metrics: MetricsSection = MetricsSection()
