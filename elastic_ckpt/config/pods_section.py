"""The keys of the pods of a JobSet: resources, nodes, environment and volumes."""

from __future__ import annotations

import dataclasses

from elastic_ckpt.config.key import key


@dataclasses.dataclass(frozen=True, kw_only=True)
class PodsSection:
    """The pods of the JobSet: their resources, nodes, environment and volumes."""

    program_cpus: float = key(
        0.0,
        "CPUs that the program of a host, or the head's, requests; 0 requests none.",
        at_least=0,
    )
    program_memory: str = key(
        "",
        "Memory that this program needs itself: 200Gi. Request and limit of the pod are"
        " larger by its RAM disk and shared memory, which count as its memory. Empty"
        " requests the memory of these alone, and sets no limit.",
    )
    sidecar_cpus: float = key(
        0.0,
        "Pathways: CPUs that the sidecar of a worker requests; 0 requests none.",
        at_least=0,
    )
    sidecar_memory: str = key(
        "", "Pathways: memory that the sidecar needs itself, as in program_memory."
    )
    spot: bool = key(
        False, "Run the accelerator hosts on GKE's Spot VMs, which may be preempted."
    )
    reservation: str = key(
        "",
        "The reservation of Compute Engine whose machines the accelerator hosts use:"
        " NAME, or PROJECT/NAME if another project shares it. On Slurm it is one of"
        " its reservations.",
    )
    pod_node_selector: str = key(
        "",
        "Further labels of the nodes of the accelerator hosts, such as {pool: a}.",
        lists="yaml",
    )
    pod_affinity: str = key(
        "",
        "The affinity of the accelerator hosts, as Kubernetes writes it: {nodeAffinity:"
        " {...}}.",
        lists="yaml",
    )
    pod_tolerations: str = key(
        "",
        "Tolerations of all pods, as Kubernetes writes them: [{key: team, operator:"
        " Exists}].",
        lists="yaml",
    )
    pod_unreachable_seconds: int = key(
        -1,
        "Seconds until Kubernetes evicts a pod whose node is unreachable or not ready;"
        " -1 takes the cluster's default, 300.",
        at_least=-1,
    )
    pod_priority_class: str = key("", "The priority class of all pods.")
    pod_labels: str = key(
        "", "Labels of the JobSet and of all pods: {team: speech}.", lists="yaml"
    )
    pod_annotations: str = key(
        "", "Annotations of the JobSet and of all pods.", lists="yaml"
    )
    pod_image_pull_secrets: str = key(
        "", "Names of the secrets to pull images with: [registry].", lists="yaml"
    )
    pod_env: str = key(
        "",
        "Variables of the programs and sidecars: {LEVEL: info, TOKEN: {secretKeyRef:"
        " {name: hub, key: token}}}. A mapping is a source as Kubernetes writes it.",
        lists="yaml",
    )
    pod_env_secrets: str = key(
        "", "Names of secrets whose keys become variables: [hub].", lists="yaml"
    )
    pod_volumes: str = key(
        "",
        "Volumes of the programs and sidecars by their path: {/data:"
        " {persistentVolumeClaim: {claimName: texts}}, /bucket: {gcsfuse: my-bucket},"
        " /keys: {secret: {secretName: keys}, readOnly: true}}.",
        lists="yaml",
    )
    pod_security_context: str = key(
        "",
        "The security context of all pods, as Kubernetes writes it: {runAsUser: 1000,"
        " fsGroup: 1000}.",
        lists="yaml",
    )
    program_security_context: str = key(
        "",
        "The security context of the programs and sidecars: {capabilities: {add:"
        " [IPC_LOCK]}}.",
        lists="yaml",
    )
    pod_startup_probe: str = key(
        "",
        "A probe of the program that has to succeed once, as Kubernetes writes it:"
        " {exec: {command: [test, -e, /tmp/ready]}, failureThreshold: 60}. Without"
        " exec, httpGet, tcpSocket or grpc it reads the metrics at `prometheus_port`.",
        lists="yaml",
    )
    pod_liveness_probe: str = key(
        "",
        "A probe that has to go on succeeding, or the program is killed; see"
        " pod_startup_probe.",
        lists="yaml",
    )
    host_network: bool = key(
        False, "Use the network of the nodes; DNS still resolves the cluster's names."
    )
    gpu_direct: bool = key(
        False,
        "Connect the GPUs of hosts directly, by the method of machine_type:"
        " GPUDirect-TCPX on A3 High, -TCPXO on A3 Mega, RDMA on A3 Ultra and A4.",
    )
    gpu_direct_networks: str = key(
        "",
        "The networks of the GPUs, in the order of their interfaces, separated by `;`;"
        " empty takes the names of Google's guides: vpc1;vpc2;... or rdma-0;rdma-1;...",
    )
