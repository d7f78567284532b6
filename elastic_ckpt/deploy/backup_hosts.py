"""The pods of backup hosts: a replicated job without accelerators in the same JobSet.

Each runs `elastic-ckpt agent --backup` over a RAM disk. The program's configuration has
their addresses, by the names that JobSet gives to pods. They have to stay while pods of
the program are made anew, so the JobSet must not recreate all pods.
"""

from __future__ import annotations

import dataclasses

from elastic_ckpt.config import schema
from elastic_ckpt.core import errors
from elastic_ckpt.deploy import environment, job, machine, names, program, supervisors
from elastic_ckpt.deploy.addition import Object

REPLICATED_JOB = "backup"
CONTAINER = "backup"
_PORT = 8476
_VOLUME = "backup-steps"
# Its container restarts in the pod, and a pod is replaced, however often.
_BACKOFF_LIMIT = 2**31 - 1


def are_used(config: schema.Config) -> bool:
    """Whether the JobSet has backup hosts."""
    return config.deploy.backup_hosts > 0


def check(config: schema.Config) -> None:
    """Raises a ConfigError if the run cannot have backup hosts, but is to."""
    deploy, tiers = config.deploy, config.tiers
    if not are_used(config):
        return
    names.check_size("backup_size_limit", deploy.backup_size_limit)
    names.check_mount("local_checkpoint_directory", tiers.local_checkpoint_directory)
    if not supervisors.are_used(config) and deploy.restart_strategy != "restart_job":
        raise errors.ConfigError(
            f"backup_hosts={deploy.backup_hosts} with"
            f" restart_strategy={deploy.restart_strategy}: backup hosts would be made"
            " anew, without their memory, with all pods; set elastic_enabled=true, or"
            " on TPUs restart_strategy=restart_job"
        )
    if program.is_train(config) and not tiers.enable_multi_tier_checkpointing:
        raise errors.ConfigError(
            f"backup_hosts={deploy.backup_hosts} with"
            " enable_multi_tier_checkpointing=false: there would be no steps in memory"
            " for them to hold; set enable_multi_tier_checkpointing=true"
        )
    if tiers.peer_backup_urls:
        raise errors.ConfigError(
            f"peer_backup_urls={tiers.peer_backup_urls!r}: the pods of backup_hosts"
            " have names of their JobSet; leave it empty"
        )
    if not tiers.peer_secret_file:
        raise errors.ConfigError(
            f"backup_hosts={deploy.backup_hosts} needs peer_secret_file: mount a Secret"
            " with pod_volumes, and name its file"
        )


def configured(config: schema.Config) -> schema.Config:
    """The configuration of the program, with the addresses of backup hosts."""
    if not are_used(config):
        return config
    name = config.run.run_name
    scheme = "https" if config.tiers.peer_tls_certificate else "http"
    urls = ";".join(
        f"{scheme}://{name}-{REPLICATED_JOB}-0-{pod}.{name}:{_PORT}"
        for pod in range(config.deploy.backup_hosts)
    )
    tiers = dataclasses.replace(config.tiers, peer_backup_urls=urls)
    return dataclasses.replace(config, tiers=tiers)


def replicated_jobs(config: schema.Config) -> list[Object]:
    """The replicated job of the backup hosts; none if there are none."""
    if not are_used(config):
        return []
    deploy = config.deploy
    memory = {"medium": "Memory", "sizeLimit": deploy.backup_size_limit}
    selector = (
        {machine.INSTANCE: deploy.backup_machine_type}
        if deploy.backup_machine_type
        else {}
    )
    pod: Object = {
        # The RAM disk outlives a container that restarts.
        "restartPolicy": "OnFailure",
        "nodeSelector": selector,
        "containers": [_container(config)],
        "volumes": [{"name": _VOLUME, "emptyDir": memory}],
    }
    if deploy.service_account:
        pod["serviceAccountName"] = deploy.service_account
    spec = {
        "completionMode": "Indexed",
        "completions": deploy.backup_hosts,
        "parallelism": deploy.backup_hosts,
        "backoffLimit": _BACKOFF_LIMIT,
        "template": {"spec": pod},
    }
    return [{"name": REPLICATED_JOB, "replicas": 1, "template": {"spec": spec}}]


def _container(config: schema.Config) -> Object:
    tiers = config.tiers
    directory = tiers.local_checkpoint_directory
    options = {
        "--secret-file": tiers.peer_secret_file,
        "--interface": "$(POD_IP)",
        "--port": str(_PORT),
        "--tls-certificate": tiers.peer_tls_certificate,
        "--tls-key": tiers.peer_tls_key,
        "--tls-ca": tiers.peer_tls_ca,
    }
    words = [word for pair in options.items() if pair[1] for word in pair]
    run_directory = f"{directory}/{config.run.run_name}"
    return {
        "name": CONTAINER,
        "image": config.deploy.docker_image,
        "command": ["elastic-ckpt", "agent", run_directory, "--backup", *words],
        "env": environment.place_variables(),
        "terminationMessagePolicy": job.TERMINATION_MESSAGE_POLICY,
        "ports": [{"containerPort": _PORT}],
        "volumeMounts": [{"name": _VOLUME, "mountPath": directory}],
    }
