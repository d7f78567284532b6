"""The JobSet in which every host runs the program and JAX detects the other hosts.

On TPUs each slice is a separate Job with one pod for each host: GKE sets the slice and
the index of each pod in its environment, and JAX reads them. Elsewhere JAX queries the
Kubernetes API for its own Job and uses the pods of that Job as the world
(`jax/_src/clusters/k8s_cluster.py`). Therefore all slices are one Job, and its pods
need an account with permission to read pods and jobs. With elastic supervisors a pod is
a slice, and its supervisor detects nothing (`supervisors`).
"""

from __future__ import annotations

from elastic_ckpt.config import schema
from elastic_ckpt.core import errors
from elastic_ckpt.deploy import (
    backup_hosts,
    environment,
    gpu_network,
    in_place,
    job,
    jobset,
    machine,
    names,
    program,
    supervisors,
)
from elastic_ckpt.deploy.addition import Object

_EXCLUSIVE = "alpha.jobset.sigs.k8s.io/exclusive-topology"
_RBAC = "rbac.authorization.k8s.io"
# The ports of JAX's coordination service and of libtpu.
_PORTS = {"tpu": (8471, 8482), "gpu": (55527,), "cpu": (55527,)}


def documents(config: schema.Config) -> list[Object]:
    """The objects that the pods need, and then the JobSet.

    Raises:
      ConfigError: as in `job.check` and `names.check_jobset_name`.
    """
    host = job.check(config)
    _check(config, host)
    config = backup_hosts.configured(supervisors.configured(config))
    slices = config.world.slices
    name, replicas, pods = supervisors.REPLICATED_JOB, 1, slices * host.hosts_per_slice
    before = [job.config_map(config)]
    if supervisors.are_used(config):
        pods = slices
    elif config.world.hardware == "tpu":
        name, replicas, pods = "slice", slices, host.hosts_per_slice
    before += _access(config)
    counts = {name: (replicas, pods)}
    if backup_hosts.are_used(config):
        counts[backup_hosts.REPLICATED_JOB] = (1, config.deploy.backup_hosts)
    names.check_jobset_name(config.run.run_name, counts)
    replicated = {
        "name": name,
        "replicas": replicas,
        "template": _job_template(config, host, pods),
    }
    built = _jobset(config, host, replicated)
    programs: jobset.Programs = {
        name: ("host", job.CONTAINER),
        backup_hosts.REPLICATED_JOB: ("backup", backup_hosts.CONTAINER),
    }
    return [*before, *jobset.completed(config, built, programs)]


def _check(config: schema.Config, host: machine.Machine) -> None:
    deploy, world = config.deploy, config.world
    on_tpus = world.hardware == "tpu"
    if on_tpus and world.slices > 1 and host.hosts_per_slice == 1:
        raise errors.ConfigError(
            f"slices={world.slices} of topology={deploy.topology} on"
            f" machine_type={deploy.machine_type} have one host each, but GKE connects"
            " only slices of several hosts; choose a larger topology, or set"
            " enable_single_controller=true"
        )
    wrong = host.devices and world.devices_per_host != host.devices
    if config.data.colocated_python_data_input and wrong:
        raise errors.ConfigError(
            f"devices_per_host={world.devices_per_host}: a host of"
            f" machine_type={deploy.machine_type} has {host.devices} devices, and"
            " colocated Python needs as many CPU devices; set"
            f" devices_per_host={host.devices}"
        )


def _jobset(config: schema.Config, host: machine.Machine, replicated: Object) -> Object:
    metadata = job.metadata(config)
    if config.world.hardware == "tpu" and host.hosts_per_slice > 1:
        # A node pool is one slice; without this, pods of two slices could share one.
        metadata["annotations"] = {_EXCLUSIVE: job.NODE_POOL}
    backups = backup_hosts.replicated_jobs(config)
    success: Object = {"operator": "All"}
    if backups:
        # They run as long as the program does.
        success["targetReplicatedJobs"] = [replicated["name"]]
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": metadata,
        "spec": {
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
            "successPolicy": success,
            "failurePolicy": {
                "maxRestarts": config.deploy.max_restarts,
                "restartStrategy": "Recreate",
            },
            "replicatedJobs": [replicated, *backups],
        },
    }


def _job_template(config: schema.Config, host: machine.Machine, pods: int) -> Object:
    deploy = config.deploy
    volumes, mounts = job.host_memory(config)
    ports: tuple[int, ...] = _PORTS[config.world.hardware]
    # A pod that fails ends the world: failurePolicy restarts all pods.
    restarts: Object = {"backoffLimit": 0}
    if supervisors.are_used(config):
        ports, restarts = (supervisors.PORT,), supervisors.restarts(config)
    container: Object = {
        "name": job.CONTAINER,
        "image": deploy.docker_image,
        "command": gpu_network.command(config, program.command(config)),
        "env": environment.place_variables(),
        "terminationMessagePolicy": job.TERMINATION_MESSAGE_POLICY,
        "ports": [{"containerPort": port} for port in ports],
        "resources": {"limits": dict(host.limits)},
        "volumeMounts": [job.CONFIG_MOUNT, *mounts],
    }
    pod: Object = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": deploy.termination_grace_period_seconds,
        "nodeSelector": host.node_selector,
        "containers": [container],
        "volumes": [job.config_volume(config), *volumes],
    }
    account = _account(config)
    if account:
        pod["serviceAccountName"] = account
    return {
        "spec": {
            "completionMode": "Indexed",
            "completions": pods,
            "parallelism": pods,
            **restarts,
            "template": {"spec": pod},
        }
    }


def _access(config: schema.Config) -> list[Object]:
    """The permission of the pods to use the Kubernetes API, if they do."""
    rules = _access_rules(config)
    if not rules:
        return []
    account: Object = {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": job.metadata(config),
    }
    subject = {"name": _account(config), "namespace": config.deploy.namespace}
    reference = {"apiGroup": _RBAC, "kind": "Role", "name": config.run.run_name}
    role = {
        "apiVersion": f"{_RBAC}/v1",
        "kind": "Role",
        "metadata": job.metadata(config),
        "rules": rules,
    }
    binding = {
        "apiVersion": f"{_RBAC}/v1",
        "kind": "RoleBinding",
        "metadata": job.metadata(config),
        "subjects": [{"kind": "ServiceAccount", **subject}],
        "roleRef": reference,
    }
    if config.deploy.service_account:
        return [role, binding]
    return [account, role, binding]


def _access_rules(config: schema.Config) -> list[Object]:
    rules: list[Object] = []
    if config.world.hardware != "tpu" and not supervisors.are_used(config):
        # JAX looks up the Job of its pod.
        rules += [
            {"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list"]},
            {"apiGroups": ["batch"], "resources": ["jobs"], "verbs": ["get", "list"]},
        ]
    if config.deploy.restart_strategy == "in_place":
        rules += in_place.access_rules()
    return rules


def _account(config: schema.Config) -> str:
    if not _access_rules(config):
        return config.deploy.service_account
    return config.deploy.service_account or config.run.run_name
