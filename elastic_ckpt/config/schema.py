"""Every configuration key: its section, type, default and meaning.

Keys are flat, as in MaxText, and carry MaxText's names where they mean the same. Keys
are defined here and, for the input pipeline, in `config.data_section`; `config.keys`
looks them up.
"""

from __future__ import annotations

import dataclasses

from elastic_ckpt.config.data_section import DataSection
from elastic_ckpt.config.key import key


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunSection:
    """What the run is called, where it lives, how long it is."""

    run_name: str = key(
        "",
        "Names the run: its files are in base_output_directory/run_name. The same name"
        " again continues the run from its newest complete step.",
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
        "Steps between two progress lines where the output is not a terminal.",
        at_least=1,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorldSection:
    """Which hosts and devices take part."""

    hosts: int = key(
        1,
        "Host processes that the local launcher starts on this machine. Under an outer"
        " launcher (Slurm, JobSet) the world is what that launcher started.",
        at_least=1,
    )
    slices: int = key(
        1,
        "Groups of hosts: the failure domains of a run, the outer axis of the mesh.",
        at_least=1,
    )
    devices_per_host: int = key(
        1,
        "CPU devices of each host process. With hardware=cpu they train; with other"
        " hardware colocated Python needs as many as the host has accelerators.",
        at_least=1,
    )
    jax_cache_dir: str = key(
        "",
        "Directory of JAX's compilation cache: a restart on a known topology compiles"
        " nothing again. Empty caches nothing.",
    )
    hardware: str = key(
        "cpu", "The kind of device to compute on.", choices=("cpu", "gpu", "tpu")
    )
    enable_single_controller: bool = key(
        False,
        "One program, the head, drives the devices of all hosts through Pathways; needs"
        " the extra `pathways`. Otherwise each host runs the program.",
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelSection:
    """The decoder-only transformer."""

    base_emb_dim: int = key(128, "Width of the residual stream.", at_least=1)
    base_num_query_heads: int = key(4, "Attention heads of a layer.", at_least=1)
    head_dim: int = key(32, "Width of a head.", at_least=2)
    base_mlp_dim: int = key(512, "Width inside the feed-forward block.", at_least=1)
    base_num_decoder_layers: int = key(4, "Layers.", at_least=1)
    vocab_size: int = key(
        0,
        "Rows of the embedding; 0 takes the tokenizer's vocabulary, or for tokens that"
        " are not made here 259, that of bytes.",
        at_least=0,
    )
    init_weights_seed: int = key(0, "Seed of the initial weights.", at_least=0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerSection:
    """AdamW with warm-up and cosine decay."""

    learning_rate: float = key(1e-3, "Peak learning rate.", at_least=0)
    learning_rate_final_fraction: float = key(
        0.1, "Final learning rate as a fraction of the peak.", at_least=0
    )
    warmup_steps_fraction: float = key(
        0.1, "Fraction of learning_rate_schedule_steps that warms up.", at_least=0
    )
    learning_rate_schedule_steps: int = key(
        -1,
        "Length of the schedule; -1 takes `steps`. Set it in a run that is continued"
        " with larger `steps`, so that the schedule does not move.",
        at_least=-1,
    )
    gradient_clipping_threshold: float = key(
        1.0, "Global norm that gradients are clipped to; 0 clips nothing.", at_least=0
    )
    adam_b1: float = key(0.9, "Decay of the first moment.", at_least=0)
    adam_b2: float = key(0.95, "Decay of the second moment.", at_least=0)
    adam_eps: float = key(1e-8, "Added to the denominator.", at_least=0)
    adam_weight_decay: float = key(0.1, "Decoupled weight decay.", at_least=0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointSection:
    """When to save, and what to keep."""

    enable_checkpointing: bool = key(True, "Save checkpoints and continue from them.")
    async_checkpointing: bool = key(True, "Write checkpoints while training goes on.")
    checkpoint_period: int = key(100, "Steps between two checkpoints.", at_least=1)
    save_checkpoint_on_completion: bool = key(True, "Save the last step as well.")
    max_num_checkpoints_to_keep: int = key(
        0,
        "Keep the newest so many steps and delete older ones; 0 keeps all.",
        at_least=0,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class TiersSection:
    """Checkpoints in the memory of hosts, with copies in that of their peers."""

    enable_multi_tier_checkpointing: bool = key(
        False,
        "Save to the hosts' RAM every `local_checkpoint_period` steps, and back up from"
        " there to persistent storage now and then.",
    )
    local_checkpoint_directory: str = key(
        "/local",
        "A RAM disk on each host, /dev/shm on a machine of your own. The JobSet mounts"
        " one here, which lives as long as its pod; empty mounts none.",
    )
    local_checkpoint_size_limit: str = key(
        "64Gi",
        "The most that the RAM disk may hold, of the host's memory: 64Gi, 512Mi.",
    )
    local_checkpoint_period: int = key(
        0, "Steps between two saves to RAM; has to be set.", at_least=0
    )
    multi_tier_checkpointing_backup_interval_minutes: float = key(
        0.0,
        "Minutes between two backups to persistent storage; this or the next key.",
        at_least=0,
        off=-1,
    )
    multi_tier_checkpointing_backup_interval_steps: int = key(
        0,
        "Steps between two backups to persistent storage; this or the last key.",
        at_least=0,
    )
    peer_copies: int = key(
        2,
        "Holders of everything besides the host that saved it, on other machines; hosts"
        " that hold the same by data parallelism count.",
        at_least=0,
    )
    peer_assume_data_parallelism: bool = key(
        False,
        "Copy nothing to peers, for a model of which no copy fits into memory.",
    )
    peer_domain: str = key(
        "slice",
        "The failure domain that goes as a whole: one copy is outside of it, the others"
        " inside. `slice`, or a kind of `peer_domains`.",
    )
    peer_domains: str = key(
        "",
        "This host's failure domains, such as `rack=r7;zone=us-east5-a`; `slice` and"
        " `host` are known without, and what is in its ELASTIC_CKPT_DOMAINS.",
    )
    peer_interface: str = key(
        "",
        "The address at which other machines reach this host's memory; empty takes the"
        " environment's POD_IP, or else the one by which it reaches JAX's coordinator.",
    )
    peer_port: int = key(0, "The port there; 0 lets the system choose one.", at_least=0)
    peer_urls: str = key(
        "",
        "Agents of idle machines to ask as well when a run continues, separated by `;`;"
        " those of its machines, past and present, are known.",
    )
    peer_max_mib_per_sec: float = key(
        0.0,
        "The most that a host takes from peers in MiB/s; 0 sets no bound.",
        at_least=0,
    )
    peer_tls_certificate: str = key(
        "", "A PEM file with this host's certificate; empty sends unencrypted."
    )
    peer_tls_key: str = key("", "A PEM file with the certificate's private key.")
    peer_tls_ca: str = key(
        "", "A PEM file with the authority that signs the certificates of all hosts."
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class MetricsSection:
    """Where metrics go, besides the JSON lines of each host in the run's `metrics/`."""

    enable_tensorboard: bool = key(
        False,
        "Write them for TensorBoard as well, to the run's `tensorboard/`; needs the"
        " extra `tensorboard`.",
    )
    prometheus_port: int = key(
        0,
        "Serve them to Prometheus at this port of each host; several hosts that the"
        " local launcher starts take this port and the next ones. 0 serves none. Needs"
        " the extra `prometheus`.",
        at_least=0,
    )
    prometheus_interface: str = key(
        "127.0.0.1",
        "Interface of that port: 0.0.0.0 lets every machine read them that reaches the"
        " host.",
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeploySection:
    """The JobSet on GKE that `elastic-ckpt manifest` writes; sidecar/README.md."""

    docker_image: str = key(
        "", "Image with elastic_ckpt: of the head, or without one of every host."
    )
    machine_type: str = key(
        "",
        "GKE machine type of the accelerator hosts: ct6e-standard-4t, a3-highgpu-8g. Of"
        " TPUs it is those of a slice; without accelerators empty takes any.",
    )
    topology: str = key(
        "",
        "Chips of a TPU slice, for example 4x4; the hosts of a slice follow from it. On"
        " other hardware `hosts` are shared out over `slices`.",
    )
    namespace: str = key("default", "The namespace of everything that is written.")
    service_account: str = key(
        "",
        "The Kubernetes service account of the pods, for instance one that may use the"
        " bucket; empty takes the namespace's, or where JAX asks the Kubernetes API who"
        " takes part one that is written too.",
    )
    shared_memory_size_limit: str = key(
        "16Gi",
        "The most that /dev/shm may hold on each host, and through Pathways also the"
        " memory that a host's server and sidecar hand batches over in.",
    )
    max_restarts: int = key(
        10, "Times that the whole job starts again by itself.", at_least=0
    )
    termination_grace_period_seconds: int = key(
        60, "Seconds from SIGTERM until hosts that still save are killed.", at_least=1
    )
    colocated_python_sidecar_image: str = key(
        "", "Pathways: the image built from sidecar/Dockerfile."
    )
    server_image: str = key(
        "us-docker.pkg.dev/cloud-tpu-v2-images/pathways/server:jax-0.10.0",
        "Pathways: the image of the resource manager and of the workers.",
    )
    proxy_server_image: str = key(
        "us-docker.pkg.dev/cloud-tpu-v2-images/pathways/proxy_server:jax-0.10.0",
        "Pathways: the image of the proxy beside the head.",
    )
    pathways_gcs_location: str = key(
        "",
        "Pathways: where its servers keep scratch files, gs://bucket/path; empty takes"
        " base_output_directory/pathways.",
    )
    pathways_head_node_pool: str = key(
        "cpu-np", "Pathways: the node pool, without accelerators, of the head."
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """A whole configuration; each section's keys are unique over all sections."""

    run: RunSection = RunSection()
    world: WorldSection = WorldSection()
    model: ModelSection = ModelSection()
    optimizer: OptimizerSection = OptimizerSection()
    data: DataSection = dataclasses.field(default_factory=DataSection)
    checkpoint: CheckpointSection = CheckpointSection()
    tiers: TiersSection = TiersSection()
    metrics: MetricsSection = MetricsSection()
    deploy: DeploySection = DeploySection()
