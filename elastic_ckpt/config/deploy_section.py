"""The keys of the JobSet that `elastic-ckpt manifest` writes."""

from __future__ import annotations

import dataclasses

from elastic_ckpt.config.key import key


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeploySection:
    """The JobSet on GKE that `elastic-ckpt manifest` writes (guides/kubernetes.md)."""

    command: str = key(
        "",
        "The program of each host, or with Pathways of the head: python train.py"
        " --lr=1, or a list of arguments. No shell reads it; [sh, -c, ...] starts one."
        " Empty trains with this configuration.",
        lists="yaml",
    )
    python_module: str = key(
        "",
        "A Python module with its arguments, in place of `command`: my_project.train"
        " --lr=1, or a list.",
        lists="yaml",
    )
    maxtext: str = key(
        "",
        "Keys of MaxText, and ours that it takes, in place of `command`: {base_config:"
        " base.yml, model_name: llama2-7b}. `elastic-ckpt maxtext` runs with them, and"
        " with run_name, base_output_directory, steps and the RAM disk from here.",
        lists="yaml",
    )

    docker_image: str = key(
        "", "Image with elastic_ckpt: for the head, or for every host if there is none."
    )
    machine_type: str = key(
        "",
        "Machine type of the accelerator hosts, on GKE ct6e-standard-4t, a3-highgpu-8g."
        " For TPUs it is that of a multi-host slice. Without accelerators, and with"
        " machine_gpus, it may be that of any cloud, and empty allows any.",
    )
    machine_gpus: int = key(
        0,
        "GPUs that a pod takes; 0 takes all of a machine_type that is known. Set it for"
        " other machines, with machine_type or pod_node_selector to choose their"
        " nodes.",
        at_least=0,
    )
    gpu_resource: str = key(
        "nvidia.com/gpu",
        "The name by which Kubernetes counts the GPUs of a node: amd.com/gpu.",
    )
    topology: str = key(
        "",
        "Chips of a TPU slice, for example 4x4; it determines the hosts of a slice. On"
        " other hardware `hosts` are divided among `slices`.",
    )
    namespace: str = key("default", "The namespace of all objects in the manifest.")
    service_account: str = key(
        "",
        "The Kubernetes service account of the pods, for instance one with access to"
        " the bucket; empty takes the namespace's default, or a new one in the manifest"
        " if JAX queries the Kubernetes API for the hosts.",
    )
    local_checkpoint_volume: str = key(
        "empty_dir",
        "The volume of local_checkpoint_directory: `empty_dir` is lost with the pod;"
        " `node_agent` belongs to the node, whose agent `elastic-ckpt manifest"
        " --nodes` deploys; `gke_multitier` to GKE's multi-tier checkpointing.",
        choices=("empty_dir", "node_agent", "gke_multitier"),
    )
    node_agent_directory: str = key(
        "/dev/shm/elastic-ckpt",
        "node_agent: the directory of the node, on a file system in its memory.",
    )
    node_agent_image: str = key(
        "", "node_agent: the image of the agent; empty takes docker_image."
    )
    node_agent_size_limit: str = key(
        "",
        "node_agent: the memory of all runs of a node together, such as 256Gi; above it"
        " those that were unused the longest are removed. Empty sets no limit.",
    )
    node_agent_port: int = key(
        0,
        "node_agent: the port of the agent, on the network of the node; 0 has the"
        " system choose one.",
        at_least=0,
    )
    node_agent_priority_class: str = key(
        "",
        "node_agent: the priority class of the agents; empty writes one of their own,"
        " above all pods of runs, which therefore do not evict them.",
    )
    node_agent_hours_unused: float = key(
        24.0,
        "node_agent: hours after which the memory of a run that no process uses is"
        " freed; 0 keeps it.",
        at_least=0,
    )
    node_agent_domain_labels: str = key(
        "",
        "node_agent: labels of the nodes that name failure domains, by kind:"
        " rack=example.com/rack;row=example.com/row. Region, zone, and on GKE block and"
        " rack are known without.",
    )
    backup_hosts: int = key(
        0,
        "Pods without accelerators in the JobSet that together hold one more copy of"
        " everything in memory, as with peer_copies=0 for a huge model; needs"
        " elastic_enabled=true or restart_strategy=restart_job, and peer_secret_file.",
        at_least=0,
    )
    backup_machine_type: str = key(
        "", "GKE machine type of the backup hosts: m3-ultramem-32; empty allows any."
    )
    backup_size_limit: str = key(
        "64Gi",
        "Memory for steps on each backup host: three times its share of a step.",
    )
    shared_memory_size_limit: str = key(
        "16Gi",
        "Size of /dev/shm on each host, and with Pathways also of the memory that a"
        " host's server and sidecar share to pass batches.",
    )
    restart_strategy: str = key(
        "recreate",
        "The way JobSet restarts after failures: `recreate` makes all pods anew;"
        " `in_place` restarts the containers of healthy pods and replaces failed ones"
        " (JobSet 0.11 with the gate InPlaceRestart, Kubernetes 1.35); `restart_job`"
        " makes the pods of the failed slice anew (JobSet 0.12 with the gate of its"
        " action RestartJob). See docs/pages/guides/kubernetes-failures.md.",
        choices=("recreate", "in_place", "restart_job"),
    )
    in_place_restart_image: str = key(
        "",
        "in_place: the image of JobSet's agent, which restarts pods in place, built"
        " from cmd/in-place-restart-agent of JobSet.",
    )
    max_restarts: int = key(
        10,
        "How often the whole job is restarted after failures. Preempted pods restart it"
        " without limit, a wrong configuration never.",
        at_least=0,
    )
    ttl_seconds_after_finished: int = key(
        -1,
        "Seconds after its end when the JobSet is deleted; -1 keeps it.",
        at_least=-1,
    )
    kueue_queue: str = key(
        "",
        "The LocalQueue of Kueue that admits the JobSet; it is suspended until then.",
    )
    metrics_monitor: str = key(
        "none",
        "Have the metrics at `prometheus_port` collected: `pod_monitoring` by Google"
        " Cloud's managed Prometheus, `pod_monitor` or (with a Service)"
        " `service_monitor` by the Prometheus operator.",
        choices=("none", "pod_monitoring", "pod_monitor", "service_monitor"),
    )
    termination_grace_period_seconds: int = key(
        60, "Seconds between SIGTERM and SIGKILL, for a last save.", at_least=1
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
        "Pathways: the directory of its servers' scratch files, gs://bucket/path; empty"
        " takes base_output_directory/pathways.",
    )
    pathways_head_node_pool: str = key(
        "cpu-np", "Pathways: the node pool, without accelerators, of the head."
    )
    manifest_patches: str = key(
        "",
        "Changes of the manifest, such as [{kind: JobSet, patch: {spec: {managedBy:"
        " x}}}]: mappings are merged, null removes a key, lists whose members have"
        " names are merged by name, and others replaced. `name` chooses among several"
        " objects of a kind.",
        lists="yaml",
    )
