"""The objects of a run: its files, the permissions of its pods, JobSet and monitors.

`documents` are those for `kubectl apply`. `templates/jobset.yaml` has the run in which
every host runs the program; `pathways` builds the other kind. Patches of
`templates/pods.yaml` and `restarts.yaml` complete both: a patch is made by what the
pods of a replicated job do.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import yaml

from elastic_ckpt.core import errors
from elastic_ckpt.deploy import (
    checks,
    gpu_network,
    machine,
    monitoring,
    names,
    pathways,
    program,
    quantity,
    settings,
    template,
    volumes,
)
from elastic_ckpt.deploy.patch import merged, patched
from elastic_ckpt.deploy.template import Object, fill
from elastic_ckpt.training import schema

_QUEUE = "kueue.x-k8s.io/queue-name"
_BACKUP_MEMORY = "4Gi"


@dataclasses.dataclass(frozen=True)
class Pods:
    """What the pods of a replicated job do, and where their container of ours is.

    Attributes:
      role: `host` runs the program; under Pathways `head` does, and `worker` has the
        devices. A `backup` host has neither.
      containers: the field of the pod with the container in which our code runs.
      container: its name.
    """

    role: str
    containers: str
    container: str


_HOST = Pods("host", "containers", "train")
_PODS = {
    program.JOB: _HOST,
    "slice": _HOST,
    program.BACKUP_JOB: Pods("backup", "containers", "backup"),
    pathways.HEAD: Pods("head", "containers", "train"),
    pathways.WORKER: Pods("worker", "initContainers", pathways.SIDECAR),
}


def documents(config: schema.Config) -> list[Object]:
    """The objects that the pods need, the JobSet, and what collects its metrics.

    They are in the order in which they are to be created.

    Raises:
      ConfigError: if a value is invalid; names the key and a remedy.
    """
    names.refuse(
        not config.run.run_name,
        "run_name is empty, but it becomes the name of the job; set it, for example"
        " run_name=first",
    )
    checks.backup_hosts(config)
    is_pathways = config.world.enable_single_controller
    if is_pathways:
        pathways.check(config)
    host = checks.run(config)
    if not is_pathways:
        checks.multicontroller(config, host)
        config = program.with_addresses(config)
    jobs = _jobs(config, host)
    names.check_jobset_name(config.run.run_name, jobs)
    values = settings.values(config)
    values |= _parts(values) | node_fields(values, host)
    values |= _world(config, host, jobs, values)
    built: list[Object] = fill(template.read("templates/jobset.yaml"), values)
    if is_pathways:
        built = [built[0], pathways.jobset(config, values["command"])]
    else:
        # The permissions of the pods, and an account for those who have none.
        rights = {"Role", "RoleBinding"} if values["access_rules"] else set()
        if rights and not config.deploy.service_account:
            rights.add("ServiceAccount")
        kinds = {"ConfigMap", "JobSet", *rights}
        built = [each for each in built if each["kind"] in kinds]
    built[-1] = _completed(config, host, built[-1], values)
    built += monitoring.documents(config, next(iter(jobs)))
    return patched(built, values["manifest_patches"])


def to_yaml(objects: list[Object]) -> str:
    """`objects` as one YAML stream."""
    return yaml.dump_all(objects, Dumper=_Dumper, sort_keys=False, width=1000)


class _Dumper(yaml.SafeDumper):
    """Writes multi-line text as a literal block, and equal parts out in full."""

    def ignore_aliases(self, data: object) -> bool:
        del data
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)


def _parts(values: Object) -> Object:
    """The parts of `templates/pods.yaml` that pods of several kinds have."""
    pods = template.read("templates/pods.yaml")
    has_disk = values["local_checkpoint_directory"]
    disk = pods["ram_disk"][values["local_checkpoint_volume"]]
    return {
        "ram_disk": fill(disk, values) if has_disk else None,
        "ram_disk_mount": fill(pods["ram_disk_mount"], values) if has_disk else None,
        "shared_memory": fill(pods["shared_memory"], values),
        "place_variables": pods["place_variables"],
    }


def node_fields(values: Object, host: machine.Machine) -> Object:
    """What selects the nodes of pods, and what pods say to all of them."""
    pods = template.read("templates/pods.yaml")
    project, _, name = values["reservation"].rpartition("/")
    reserved = {"reservation_name": name, "reservation_project": project}
    labels = dict(values["pod_node_selector"])
    tolerations = list(values["pod_tolerations"])
    if values["pod_unreachable_seconds"] >= 0:
        tolerations += fill(pods["unreachable"], values)
    if values["spot"]:
        labels |= pods["spot"]["labels"]
    if values["reservation"]:
        labels |= fill(pods["reservation"], reserved)
    for key in ("pod_image_pull_secrets", "pod_env_secrets"):
        for secret in values[key]:
            names.check_name(key, secret, dots=True)
    return {
        "node_selector": host.node_selector,
        "node_labels": labels,
        "tolerations": tolerations,
        "spot_tolerations": pods["spot"]["tolerations"] if values["spot"] else [],
        "pull_secrets": [{"name": name} for name in values["pod_image_pull_secrets"]],
    }


def _jobs(config: schema.Config, host: machine.Machine) -> dict[str, tuple[int, int]]:
    """The number of Jobs, and of pods in each, by replicated job; ours is the first."""
    slices, on_slice = config.world.slices, host.hosts_per_slice
    if config.world.enable_single_controller:
        return {pathways.HEAD: (1, 1), pathways.WORKER: (slices, on_slice)}
    if program.has_supervisors(config):
        jobs = {program.JOB: (1, slices)}
    elif config.world.hardware == "tpu":
        jobs = {"slice": (slices, on_slice)}
    else:
        jobs = {program.JOB: (1, slices * on_slice)}
    if config.deploy.backup_hosts:
        jobs[program.BACKUP_JOB] = (1, config.deploy.backup_hosts)
    return jobs


def _world(
    config: schema.Config,
    host: machine.Machine,
    jobs: dict[str, tuple[int, int]],
    values: Object,
) -> Object:
    """The values of `templates/jobset.yaml` that are no keys."""
    pods = template.read("templates/pods.yaml")
    has_supervisors, hardware = program.has_supervisors(config), config.world.hardware
    has_slices = hardware == "tpu" and host.hosts_per_slice > 1
    job, (replicas, number) = next(iter(jobs.items()))
    rules = []
    if hardware != "tpu" and not has_supervisors:
        rules += pods["access"]["jax"]
    if config.deploy.restart_strategy == "in_place":
        rules += pods["access"]["in_place"]
    account = config.deploy.service_account or (rules and config.run.run_name)
    backups = config.deploy.backup_hosts
    return {
        "files": program.files(config),
        "command": gpu_network.command(config, program.command(config)),
        "job": job,
        "replicas": replicas,
        "pods": number,
        "limits": host.limits,
        "ports": [] if has_supervisors else pods["ports"][hardware],
        "exclusive_topology": pathways.NODE_POOL if has_slices else "",
        "backoff_limit": None if has_supervisors else 0,
        "backoff_limit_per_index": (
            config.deploy.max_restarts if has_supervisors else None
        ),
        "succeeded_pods": 1 if has_supervisors else None,
        "access_rules": rules,
        "account": account,
        "awaited_jobs": [job] if backups else [],
        "backup_job": _backup_job(config, values) if backups else None,
        "config_exit_code": errors.CONFIG_EXIT_CODE,
    }


def _backup_job(config: schema.Config, values: Object) -> Object:
    tiers = config.tiers
    directory = f"{tiers.local_checkpoint_directory}/{config.run.run_name}"
    options = {
        "--secret-file": tiers.peer_secret_file,
        "--interface": "$(POD_IP)",
        "--port": str(program.BACKUP_PORT),
        "--tls-certificate": tiers.peer_tls_certificate,
        "--tls-key": tiers.peer_tls_key,
        "--tls-ca": tiers.peer_tls_ca,
    }
    words = ["elastic-ckpt", "agent", directory, "--backup", *program.words(options)]
    agent = {"agent_command": words, "agent_port": program.BACKUP_PORT}
    job: Object = fill(template.read("templates/backup_hosts.yaml"), values | agent)
    return job


def _completed(
    config: schema.Config, host: machine.Machine, jobset: Object, values: Object
) -> Object:
    """`jobset` with the settings of its pods and of itself."""
    strategy = config.deploy.restart_strategy
    if program.has_supervisors(config):
        strategy = "supervisors"
    restarts = fill(template.read("templates/restarts.yaml")[strategy], values)
    of_pathways = template.read("templates/pathways.yaml")
    jobs = []
    for replicated in jobset["spec"]["replicatedJobs"]:
        pods, job = _PODS[replicated["name"]], replicated["template"]["spec"]
        job = patched_pods(job, fill(of_pathways.get(pods.role, {}), values), pods)
        # Others restart containers, for which Kubernetes has no rules.
        if pods.role in ("host", "head"):
            job = merged(job, restarts["job"])
            job = patched_pods(job, restarts.get("pods", {}), pods)
        job = _with_settings(config, host, job, pods, values)
        changed = {**replicated["template"], "spec": job}
        jobs.append({**replicated, "template": changed})
    labels = dict(values["pod_labels"])
    if config.deploy.kueue_queue:
        labels[_QUEUE] = config.deploy.kueue_queue
    ttl_secs = config.deploy.ttl_seconds_after_finished
    values = values | {
        "jobset_labels": labels,
        "is_queued": bool(config.deploy.kueue_queue),
        "ttl_secs": ttl_secs if ttl_secs >= 0 else None,
    }
    own = fill(template.read("templates/pods.yaml")["jobset"], values) or {}
    jobset = merged(jobset, own)
    spec = merged({**jobset["spec"], "replicatedJobs": jobs}, restarts["jobset"])
    return {**jobset, "spec": spec}


def _with_settings(
    config: schema.Config,
    host: machine.Machine,
    job: Object,
    pods: Pods,
    values: Object,
) -> Object:
    patches = template.read("templates/pods.yaml")["patches"]
    has_devices = pods.role in ("host", "worker")
    has_program = pods.role in ("host", "head")
    own = program.variables(config) if has_program else {}
    if pods.role != "backup":
        job = patched_pods(job, gpu_network.patch(config), pods)
    spot = values["spot_tolerations"] if has_devices else []
    values = values | {
        "variables": [*map(_variable, (own | values["pod_env"]).items())],
        "secret_variables": [
            {"secretRef": {"name": name}} for name in values["pod_env_secrets"]
        ],
        "dns_policy": values["host_network"] and "ClusterFirstWithHostNet",
        "tolerations": [*values["tolerations"], *spot],
        "metrics_ports": [
            {"name": name, "containerPort": port}
            for name, port in monitoring.ports(config).items()
        ],
        "startup_probe": monitoring.probe(config, "startup"),
        "liveness_probe": monitoring.probe(config, "liveness"),
    }
    job = patched_pods(job, fill(patches["all"], values), pods)
    if has_devices:
        job = patched_pods(job, fill(patches["accelerated"], values), pods)
    job = with_volumes(job, pods, values)
    if has_program:
        job = patched_pods(job, fill(patches["program"], values), pods)
    resources = _resources(config, host, job, pods)
    return patched_pods(job, fill(patches["resources"], resources), pods)


def _variable(pair: tuple[str, Any]) -> Object:
    name, value = pair
    if isinstance(value, dict):
        return {"name": name, "valueFrom": value}
    return {"name": name, "value": settings.text(value)}


def with_volumes(job: Object, pods: Pods, values: Object) -> Object:
    """`job` with the volumes of the user in its pods.

    Raises:
      ConfigError: if the pods mount another volume at the path of one.
    """
    taken = {mount["mountPath"] for mount in _container(job, pods)["volumeMounts"]}
    built, mounts = volumes.volumes(values["pod_volumes"], taken)
    drivers = [volume.get("csi", {}).get("driver") for volume in built]
    filled = fill(
        template.read("templates/pods.yaml")["patches"]["volumes"],
        {
            "volumes": built,
            "mounts": mounts,
            "with_gcsfuse": volumes.GCSFUSE in drivers and "true",
        },
    )
    return patched_pods(job, filled, pods)


def patched_pods(job: Object, patch: Object | None, pods: Pods) -> Object:
    """`job` with a patch of its pods: of their metadata, spec and container of ours."""
    if not patch:
        return job
    fields = {name: patch[name] for name in ("spec", "metadata") if name in patch}
    if "container" in patch:
        ours = [{"name": pods.container, **patch["container"]}]
        fields["spec"] = merged(fields.get("spec", {}), {pods.containers: ours})
    patched: Object = merged(job, {"template": fields})
    return patched


def _container(job: Object, pods: Pods) -> Object:
    containers = job["template"]["spec"][pods.containers]
    (container,) = (each for each in containers if each["name"] == pods.container)
    return container


def _resources(
    config: schema.Config, host: machine.Machine, job: Object, pods: Pods
) -> Object:
    """The requests and limits of the container, whose volumes are complete.

    The kernel counts the pages of a memory-backed volume as memory of the container
    that wrote them, and Kubernetes ends a container above its limit. So all such
    volumes that it mounts are added to what the program needs itself, and the scheduler
    places no other pod into their memory.
    """
    section = config.pods
    cpus, memory = section.program_cpus, section.program_memory
    if pods.role == "worker":
        cpus, memory = section.sidecar_cpus, section.sidecar_memory
    elif pods.role == "backup":
        cpus, memory = 0, _BACKUP_MEMORY
    mounted = {mount["name"] for mount in _container(job, pods)["volumeMounts"]}
    sizes = {}
    for volume in job["template"]["spec"]["volumes"]:
        source = volume.get("emptyDir", {})
        if source.get("medium") == "Memory" and "sizeLimit" in source:
            sizes[volume["name"]] = source["sizeLimit"]
        elif volume["name"] == "local-checkpoints":
            # Also in a volume of the node memory counts as that of the pod that wrote.
            sizes[volume["name"]] = config.tiers.local_checkpoint_size_limit
    total = sum(quantity.to_bytes(sizes[name]) for name in sizes.keys() & mounted)
    total += quantity.to_bytes(memory) if memory else 0
    if pods.role in ("host", "worker"):
        checks.fit(config, host, cpus, total)
    amount = quantity.of_bytes(total) if total else ""
    return {
        "cpus": quantity.of_cpus(cpus) if cpus else "",
        "memory": amount,
        "memory_limit": amount if memory else "",
    }
