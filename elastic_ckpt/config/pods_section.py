"""The keys of the pods of a JobSet: resources, nodes, environment and volumes."""

from __future__ import annotations

import dataclasses

from elastic_ckpt.core.sections import key


@dataclasses.dataclass(frozen=True, kw_only=True)
class PodsSection:
    """The pods of the JobSet: their resources, nodes, environment and volumes."""

    program_cpus: float = key(
        0.0,
        "CPUs that the program of a host (with Pathways, of the head) requests; 0"
        " requests none.",
        at_least=0,
    )
    program_memory: str = key(
        "",
        "Memory that this program itself needs: 200Gi. The pod's request and limit"
        " add its RAM disk and shared memory, which count as its memory. Empty"
        " requests only these, and sets no limit.",
    )
    sidecar_cpus: float = key(
        0.0,
        "Pathways: CPUs that the sidecar of each worker requests; 0 requests none.",
        at_least=0,
    )
    sidecar_memory: str = key(
        "", "Pathways: memory that the sidecar itself needs, as in program_memory."
    )
    spot: bool = key(
        False, "Run the accelerator hosts on GKE's Spot VMs, which may be preempted."
    )
    reservation: str = key(
        "",
        "Compute Engine reservation for the accelerator hosts: NAME, or PROJECT/NAME"
        " if another project shares it. On Slurm, the name of a Slurm reservation.",
    )
    pod_node_selector: str = key(
        "",
        "Further labels that the nodes of the accelerator hosts must have, such as"
        " {pool: a}.",
        lists="yaml",
    )
    pod_affinity: str = key(
        "",
        "Affinity of the accelerator hosts, in Kubernetes' syntax: {nodeAffinity:"
        " {...}}.",
        lists="yaml",
    )
    pod_tolerations: str = key(
        "",
        "Tolerations of all pods, in Kubernetes' syntax: [{key: team, operator:"
        " Exists}].",
        lists="yaml",
    )
    pod_unreachable_seconds: int = key(
        -1,
        "Seconds until Kubernetes evicts a pod whose node is unreachable or not"
        " ready; -1 uses the cluster's default, 300.",
        at_least=-1,
    )
    pod_priority_class: str = key("", "Priority class of all pods.")
    pod_labels: str = key(
        "",
        "Labels of the JobSet and of all pods, such as {team: speech}.",
        lists="yaml",
    )
    pod_annotations: str = key(
        "", "Annotations of the JobSet and of all pods.", lists="yaml"
    )
    pod_image_pull_secrets: str = key(
        "",
        "Names of the secrets to pull images with, such as [registry].",
        lists="yaml",
    )
    pod_env: str = key(
        "",
        "Environment variables of the programs and sidecars: {LEVEL: info, TOKEN:"
        " {secretKeyRef: {name: hub, key: token}}}. A mapping is a source in"
        " Kubernetes' syntax.",
        lists="yaml",
    )
    pod_env_secrets: str = key(
        "",
        "Names of secrets whose keys become environment variables, such as [hub].",
        lists="yaml",
    )
    pod_volumes: str = key(
        "",
        "Volumes of the programs and sidecars, by mount path: {/data:"
        " {persistentVolumeClaim: {claimName: texts}}, /bucket: {gcsfuse: my-bucket},"
        " /keys: {secret: {secretName: keys}, readOnly: true}}.",
        lists="yaml",
    )
    pod_security_context: str = key(
        "",
        "Security context of all pods, in Kubernetes' syntax: {runAsUser: 1000,"
        " fsGroup: 1000}.",
        lists="yaml",
    )
    program_security_context: str = key(
        "",
        "Security context of the programs and sidecars: {capabilities: {add:"
        " [IPC_LOCK]}}.",
        lists="yaml",
    )
    pod_startup_probe: str = key(
        "",
        "Probe of the program that must succeed once, in Kubernetes' syntax: {exec:"
        " {command: [test, -e, /tmp/ready]}, failureThreshold: 60}. Without exec,"
        " httpGet, tcpSocket or grpc it reads the metrics at prometheus_port.",
        lists="yaml",
    )
    pod_liveness_probe: str = key(
        "",
        "Probe that must keep succeeding, or the program is killed; written as"
        " pod_startup_probe.",
        lists="yaml",
    )
    host_network: bool = key(
        False, "Use the nodes' network; DNS still resolves the cluster's names."
    )
    gpu_direct: bool = key(
        False,
        "Connect the GPUs of different hosts directly, by the method of machine_type:"
        " GPUDirect-TCPX on A3 High, GPUDirect-TCPXO on A3 Mega, RDMA on A3 Ultra and"
        " A4.",
    )
    gpu_direct_networks: str = key(
        "",
        "Networks of the GPUs, in the order of their interfaces, separated by `;`."
        " Empty uses the names of Google's guides: vpc1;vpc2;... or rdma-0;rdma-1;...",
    )
