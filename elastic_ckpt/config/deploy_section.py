"""The keys of the JobSet that `elastic-ckpt manifest` writes."""

from __future__ import annotations

import dataclasses

from elastic_ckpt.core.sections import key


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeploySection:
    """The JobSet on GKE that `elastic-ckpt manifest` writes (guides/kubernetes.md)."""

    command: str = key(
        "",
        "Program of each host (with Pathways, of the head): python train.py --lr=1,"
        " or a list of arguments. No shell interprets it; [sh, -c, ...] starts one."
        " Empty trains with this configuration.",
        lists="yaml",
    )
    python_module: str = key(
        "",
        "Python module, with its arguments, to run instead of `command`:"
        " my_project.train --lr=1, or a list.",
        lists="yaml",
    )
    maxtext: str = key(
        "",
        "Keys of MaxText, and of ours that it takes, to run `elastic-ckpt maxtext`"
        " instead of `command`: {base_config: base.yml, model_name: llama2-7b}."
        " run_name, base_output_directory, steps and the RAM disk come from this file.",
        lists="yaml",
    )

    docker_image: str = key(
        "", "Image with elastic_ckpt for the head, or without Pathways for every host."
    )
    machine_type: str = key(
        "",
        "Machine type of the accelerator hosts, on GKE ct6e-standard-4t or"
        " a3-highgpu-8g; for TPUs it is that of a multi-host slice. Without"
        " accelerators, or with machine_gpus, it may be that of any cloud, and empty"
        " allows any.",
    )
    machine_gpus: int = key(
        0,
        "GPUs of each pod; 0 uses all of a known machine_type. Set it for other"
        " machines, and select their nodes with machine_type or pod_node_selector.",
        at_least=0,
    )
    gpu_resource: str = key(
        "nvidia.com/gpu",
        "Name of the GPUs among the resources of a Kubernetes node; for AMD it is"
        " amd.com/gpu.",
    )
    topology: str = key(
        "",
        "Chips of a TPU slice along each dimension, for example 4x4; this determines"
        " the hosts of a slice. On other hardware, `hosts` are divided among `slices`.",
    )
    namespace: str = key("default", "Namespace of all objects in the manifest.")
    service_account: str = key(
        "",
        "Kubernetes service account of the pods, for example one with access to the"
        " bucket. Empty uses the namespace's default, or a new one in the manifest if"
        " JAX queries the Kubernetes API for the hosts.",
    )
    local_checkpoint_volume: str = key(
        "empty_dir",
        "Volume of local_checkpoint_directory. `empty_dir` is lost with the pod;"
        " `node_agent` belongs to the node, and `elastic-ckpt manifest --nodes`"
        " deploys its agent; `gke_multitier` belongs to GKE's multi-tier"
        " checkpointing.",
        choices=("empty_dir", "node_agent", "gke_multitier"),
    )
    node_agent_directory: str = key(
        "/dev/shm/elastic-ckpt",
        "node_agent: directory of the node, on a file system in its memory.",
    )
    node_agent_image: str = key(
        "", "node_agent: image of the agent; empty uses docker_image."
    )
    node_agent_size_limit: str = key(
        "",
        "node_agent: memory limit, such as 256Gi, for all runs of a node together."
        " Above it, the runs unused for the longest time are removed. Empty sets no"
        " limit.",
    )
    node_agent_port: int = key(
        0,
        "node_agent: port of the agent on the node's network for one run; others on"
        " the node have the next ones. 0 lets the system choose.",
        at_least=0,
    )
    node_agent_priority_class: str = key(
        "",
        "node_agent: priority class of the agents. Empty adds a class to the manifest"
        " that is above all pods of runs, so that they do not evict agents.",
    )
    node_agent_hours_unused: float = key(
        24.0,
        "node_agent: hours after which the memory of a run is freed if no process"
        " uses it; 0 keeps it.",
        at_least=0,
    )
    node_agent_domain_labels: str = key(
        "",
        "node_agent: node labels that name failure domains, by kind:"
        " rack=example.com/rack;row=example.com/row. Region and zone, and on GKE block"
        " and rack, are known without labels here.",
    )
    backup_hosts: int = key(
        0,
        "Number of pods without accelerators that together hold one more copy of"
        " everything in memory, as for a huge model with peer_copies=0. Needs"
        " peer_secret_file, and elastic_enabled=true or restart_strategy=restart_job.",
        at_least=0,
    )
    backup_machine_type: str = key(
        "",
        "GKE machine type of the backup hosts, such as m3-ultramem-32; empty allows"
        " any.",
    )
    backup_size_limit: str = key(
        "64Gi",
        "Memory for steps on each backup host; choose three times its share of a step.",
    )
    shared_memory_size_limit: str = key(
        "16Gi",
        "Size of /dev/shm on each host; with Pathways, also of the memory in which a"
        " host's server and sidecar pass batches.",
    )
    restart_strategy: str = key(
        "recreate",
        "What JobSet restarts after a failure: `recreate` replaces all pods;"
        " `in_place` restarts all containers and replaces only failed pods;"
        " `restart_job` replaces the pods of the failed slice."
        " docs/pages/guides/kubernetes-failures.md lists versions and feature gates.",
        choices=("recreate", "in_place", "restart_job"),
    )
    in_place_restart_image: str = key(
        "",
        "in_place: image of JobSet's restart agent, built from"
        " cmd/in-place-restart-agent of JobSet.",
    )
    max_restarts: int = key(
        10,
        "Number of restarts of the whole job after failures. Preemptions do not"
        " count; a wrong configuration is never restarted.",
        at_least=0,
    )
    ttl_seconds_after_finished: int = key(
        -1,
        "Seconds until the JobSet is deleted after its end; -1 keeps it.",
        at_least=-1,
    )
    kueue_queue: str = key(
        "",
        "Kueue's LocalQueue that admits the JobSet, which is suspended until then;"
        " empty uses none.",
    )
    metrics_monitor: str = key(
        "none",
        "What collects the metrics at prometheus_port: Google Cloud's managed"
        " Prometheus (`pod_monitoring`), or the Prometheus operator (`pod_monitor`, or"
        " `service_monitor` with a Service).",
        choices=("none", "pod_monitoring", "pod_monitor", "service_monitor"),
    )
    termination_grace_period_seconds: int = key(
        60,
        "Seconds between SIGTERM and SIGKILL, in which the run saves its last step.",
        at_least=1,
    )
    colocated_python_sidecar_image: str = key(
        "", "Pathways: image of the sidecar, built from sidecar/Dockerfile."
    )
    server_image: str = key(
        "us-docker.pkg.dev/cloud-tpu-v2-images/pathways/server:jax-0.10.0",
        "Pathways: image of the resource manager and the workers.",
    )
    proxy_server_image: str = key(
        "us-docker.pkg.dev/cloud-tpu-v2-images/pathways/proxy_server:jax-0.10.0",
        "Pathways: image of the proxy beside the head.",
    )
    pathways_gcs_location: str = key(
        "",
        "Pathways: directory of its servers' scratch files, gs://bucket/path; empty"
        " uses base_output_directory/pathways.",
    )
    pathways_head_node_pool: str = key(
        "cpu-np", "Pathways: node pool, without accelerators, for the head."
    )
    manifest_patches: str = key(
        "",
        "Changes to the manifest: [{kind: JobSet, patch: {spec: {managedBy: x}}}]."
        " Mappings are merged, and so are lists of named members; other lists are"
        " replaced, and null removes a key. `name` selects among several objects of a"
        " kind.",
        lists="yaml",
    )
