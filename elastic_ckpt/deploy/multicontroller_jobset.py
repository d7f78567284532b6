"""The JobSet in which every host runs the program; JAX finds out who takes part.

On TPUs each slice is a Job of its own, as wide as the slice has hosts: GKE tells each
pod its slice and its place, and JAX reads that. Elsewhere JAX asks the Kubernetes API
for its own Job and takes that Job's pods for the world
(`jax/_src/clusters/k8s_cluster.py`): so all slices are one Job, and its pods need an
account that may read pods and jobs.
"""

from __future__ import annotations

from elastic_ckpt.config import schema
from elastic_ckpt.core import errors
from elastic_ckpt.deploy import job, machine, names

_EXCLUSIVE = "alpha.jobset.sigs.k8s.io/exclusive-topology"
_RBAC = "rbac.authorization.k8s.io"
# Where JAX's coordination service and libtpu listen.
_PORTS = {"tpu": (8471, 8482), "gpu": (55527,), "cpu": (55527,)}


def documents(config: schema.Config) -> list[job.Object]:
    """The JobSet, and before it what its pods need.

    Raises:
      ConfigError: as `job.check` and `names.check_jobset_name` do.
    """
    of_hosts = job.check(config)
    _check(config, of_hosts)
    slices = config.world.slices
    if config.world.hardware == "tpu":
        replicated_job = ("slice", slices, of_hosts.hosts_per_slice)
    else:
        replicated_job = ("hosts", 1, slices * of_hosts.hosts_per_slice)
    name, replicas, pods = replicated_job
    names.check_jobset_name(config.run.run_name, {name: (replicas, pods)})
    replicated = {
        "name": name,
        "replicas": replicas,
        "template": _job_template(config, of_hosts, pods),
    }
    before = [job.config_map(config)]
    if config.world.hardware != "tpu":
        before += _access(config)
    return [*before, _jobset(config, of_hosts, replicated)]


def _check(config: schema.Config, of_hosts: machine.Machine) -> None:
    deploy, world = config.deploy, config.world
    on_tpus = world.hardware == "tpu"
    if on_tpus and world.slices > 1 and of_hosts.hosts_per_slice == 1:
        raise errors.ConfigError(
            f"slices={world.slices} of topology={deploy.topology} on"
            f" machine_type={deploy.machine_type} have one host each, and GKE joins"
            " slices of several; take a larger topology, or"
            " enable_single_controller=true"
        )
    wrong = of_hosts.devices and world.devices_per_host != of_hosts.devices
    if config.data.colocated_python_data_input and wrong:
        raise errors.ConfigError(
            f"devices_per_host={world.devices_per_host}: a host of"
            f" machine_type={deploy.machine_type} has {of_hosts.devices} devices, and"
            " colocated Python needs as many of the CPU; set"
            f" devices_per_host={of_hosts.devices}"
        )


def _jobset(
    config: schema.Config, of_hosts: machine.Machine, replicated: job.Object
) -> job.Object:
    deploy = config.deploy
    metadata: job.Object = _named(config)
    if config.world.hardware == "tpu" and of_hosts.hosts_per_slice > 1:
        # A node pool is one slice; without this pods of two would mix.
        metadata["annotations"] = {_EXCLUSIVE: job.NODE_POOL}
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": metadata,
        "spec": {
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
            "successPolicy": {"operator": "All"},
            "failurePolicy": {
                "maxRestarts": deploy.max_restarts,
                "restartStrategy": "Recreate",
            },
            "replicatedJobs": [replicated],
        },
    }


def _job_template(
    config: schema.Config, of_hosts: machine.Machine, pods: int
) -> job.Object:
    deploy = config.deploy
    memory = job.host_memory(config)
    pod: job.Object = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": deploy.termination_grace_period_seconds,
        "nodeSelector": of_hosts.node_selector,
        "containers": [_container(config, of_hosts, memory)],
        "volumes": [
            {"name": job.CONFIG, "configMap": {"name": config.run.run_name}},
            *(
                {
                    "name": part.name,
                    "emptyDir": {"medium": "Memory", "sizeLimit": part.size_limit},
                }
                for part in memory
            ),
        ],
    }
    account = _account(config)
    if account:
        pod["serviceAccountName"] = account
    return {
        "spec": {
            "completionMode": "Indexed",
            "completions": pods,
            "parallelism": pods,
            # A pod that fails ends the world: all begin again, by failurePolicy.
            "backoffLimit": 0,
            "template": {"spec": pod},
        }
    }


def _container(
    config: schema.Config, of_hosts: machine.Machine, memory: list[job.Memory]
) -> job.Object:
    return {
        "name": job.CONTAINER,
        "image": config.deploy.docker_image,
        "command": list(job.COMMAND),
        "env": job.environment(),
        "terminationMessagePolicy": job.TERMINATION_MESSAGE_POLICY,
        "ports": [{"containerPort": port} for port in _PORTS[config.world.hardware]],
        "resources": {"limits": of_hosts.limits},
        "volumeMounts": [
            {
                "name": job.CONFIG,
                "mountPath": job.CONFIG_DIRECTORY,
                "readOnly": True,
            },
            *({"name": part.name, "mountPath": part.path} for part in memory),
        ],
    }


def _access(config: schema.Config) -> list[job.Object]:
    """Lets the pods ask the Kubernetes API which Job they are of."""
    role = _RBAC + "/v1"
    account = _account(config)
    found: list[job.Object] = []
    if not config.deploy.service_account:
        found.append(
            {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": _named(config)}
        )
    rules = [
        {"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list"]},
        {"apiGroups": ["batch"], "resources": ["jobs"], "verbs": ["get", "list"]},
    ]
    subject = {"name": account, "namespace": config.deploy.namespace}
    return [
        *found,
        {
            "apiVersion": role,
            "kind": "Role",
            "metadata": _named(config),
            "rules": rules,
        },
        {
            "apiVersion": role,
            "kind": "RoleBinding",
            "metadata": _named(config),
            "subjects": [{"kind": "ServiceAccount", **subject}],
            "roleRef": {
                "apiGroup": _RBAC,
                "kind": "Role",
                "name": config.run.run_name,
            },
        },
    ]


def _account(config: schema.Config) -> str:
    if config.world.hardware == "tpu":
        return config.deploy.service_account
    return config.deploy.service_account or config.run.run_name


def _named(config: schema.Config) -> job.Object:
    return {"name": config.run.run_name, "namespace": config.deploy.namespace}
