"""The program of a host, or with Pathways of the head, and its files.

It is `elastic-ckpt train` with the run's configuration, `elastic-ckpt maxtext` with
MaxText's keys, or a command or module of the user. The files are in a ConfigMap, so
that one image serves many runs, and a run can change its keys without a new image.

With `elastic_enabled`, but not under Pathways, each pod has one slice, whose hosts a
supervisor starts as processes and restarts in the same pod. Of those of all pods one
leads (`elastic.machines`).
"""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import yaml

from elastic_ckpt.core import errors
from elastic_ckpt.deploy import settings
from elastic_ckpt.training import keys, schema

# The directory of the files in a pod.
DIRECTORY = "/etc/elastic-ckpt"
_CONFIG_FILE = "config.yml"
_MAXTEXT_FILE = "maxtext.yml"
# The variables with the path of the configuration, and with that of the RAM disk.
CONFIG_VARIABLE = "ELASTIC_CKPT_CONFIG"
LOCAL_VARIABLE = "ELASTIC_CKPT_LOCAL"
# Sections that are about the pods, and that no program in them reads.
_OF_PODS = ("pods", "slurm")
_KEYS = ("command", "python_module", "maxtext")
# MaxText takes these keys of metrics; its TensorBoard is its own.
_METRICS = ("prometheus_port", "prometheus_interface")
# With this value JAX asks its cluster for the other hosts, as in `train`.
_MAXTEXT_HARDWARE = {"gpu": "gpu_multiprocess"}
# What the supervisors of MaxText's hosts have to know besides the elastic section.
_OF_SUPERVISORS = (
    "devices_per_host",
    "hosts",
    "slices",
    "termination_grace_period_seconds",
)


# The Job of pods that have the program, and of backup hosts, and the port of these.
JOB, BACKUP_JOB = "hosts", "backup"
BACKUP_PORT = 8476


def check_one(config: schema.Config) -> None:
    """Raises a ConfigError if several programs are set."""
    chosen = [key for key in _KEYS if getattr(config.deploy, key)]
    if len(chosen) > 1:
        raise errors.ConfigError(
            f"{' and '.join(chosen)} are set, but a host runs one program; keep one"
        )


def is_train(config: schema.Config) -> bool:
    """Whether the program is `elastic-ckpt train`."""
    return not any(getattr(config.deploy, key) for key in _KEYS)


def has_supervisors(config: schema.Config) -> bool:
    """Whether each pod has a supervisor; under Pathways the head is one itself."""
    return config.elastic.elastic_enabled and not config.world.enable_single_controller


def with_addresses(config: schema.Config) -> schema.Config:
    """`config` as the pods have it: with their number, and where backup hosts are.

    Those have the names that JobSet gives to pods.
    """
    name, elastic, tiers = config.run.run_name, config.elastic, config.tiers
    if has_supervisors(config):
        elastic = dataclasses.replace(elastic, elastic_machines=config.world.slices)
    if config.deploy.backup_hosts:
        scheme = "https" if tiers.peer_tls_certificate else "http"
        urls = ";".join(
            f"{scheme}://{name}-{BACKUP_JOB}-0-{pod}.{name}:{BACKUP_PORT}"
            for pod in range(config.deploy.backup_hosts)
        )
        tiers = dataclasses.replace(tiers, peer_backup_urls=urls)
    return dataclasses.replace(config, elastic=elastic, tiers=tiers)


def command(config: schema.Config, directory: str = DIRECTORY) -> list[str]:
    """The arguments of the program, whose files are in `directory`.

    Raises:
      ConfigError: if the command cannot be split.
    """
    deploy = config.deploy
    if deploy.command:
        return settings.arguments("command", deploy.command)
    if deploy.python_module:
        words = settings.arguments("python_module", deploy.python_module)
        return ["python", "-m", *words]
    if deploy.maxtext:
        return ["elastic-ckpt", "maxtext", os.path.join(directory, _MAXTEXT_FILE)]
    return ["elastic-ckpt", "train", os.path.join(directory, _CONFIG_FILE)]


def check_maxtext(config: schema.Config) -> None:
    """Raises a ConfigError if MaxText's keys contradict those of its supervisors."""
    counted = ("elastic_machine", "elastic_machines")
    beside = ("elastic_enabled", *_OF_SUPERVISORS)
    for key, value in settings.mapping("maxtext", config.deploy.maxtext).items():
        if key in (*counted, *beside):
            remedy = "leave it out" if key in counted else f"set {key} beside maxtext"
            raise errors.ConfigError(
                f"maxtext has {key}={value}, and with elastic_enabled=true it follows"
                f" from the manifest; {remedy}"
            )


def words(options: dict[str, str]) -> list[str]:
    """The options of a command that have values, as its arguments."""
    return [word for pair in options.items() if pair[1] for word in pair]


def files(config: schema.Config) -> dict[str, str]:
    """The text of each file of the program, by its name."""
    if config.deploy.maxtext:
        return {_MAXTEXT_FILE: _yaml(_maxtext(config))}
    return {_CONFIG_FILE: _yaml(_chosen(config))}


def _chosen(config: schema.Config) -> dict[str, Any]:
    # What is not the default, and is for the program.
    defaults = keys.values(schema.Config())
    sections = keys.keys()
    left_out = {*_KEYS, "manifest_patches"}
    if config.elastic.elastic_machines == 1:
        # The JobSet determines the number of hosts.
        left_out.add("hosts")
    return {
        key: value
        for key, value in keys.values(config).items()
        if value != defaults[key]
        and key not in left_out
        and sections[key][0] not in _OF_PODS
    }


def variables(config: schema.Config, directory: str = DIRECTORY) -> dict[str, str]:
    """The variables with which a program of the user finds its files and its RAM disk.

    `train` and MaxText have them in their configuration.
    """
    deploy, local = config.deploy, config.tiers.local_checkpoint_directory
    if not deploy.command and not deploy.python_module:
        return {}
    paths = {CONFIG_VARIABLE: os.path.join(directory, _CONFIG_FILE)}
    return {**paths, LOCAL_VARIABLE: local} if local else paths


def _maxtext(config: schema.Config) -> dict[str, Any]:
    world, tiers, hardware = config.world, config.tiers, config.world.hardware
    has_own_hosts = has_supervisors(config)
    if not has_own_hosts:
        hardware = _MAXTEXT_HARDWARE.get(hardware, hardware)
    known: dict[str, Any] = {
        "base_config": "base.yml",
        "run_name": config.run.run_name,
        "base_output_directory": config.run.base_output_directory,
        "steps": config.run.steps,
        "hardware": hardware,
    }
    if world.enable_single_controller:
        known["enable_single_controller"] = True
    if tiers.local_checkpoint_directory:
        known["local_checkpoint_directory"] = tiers.local_checkpoint_directory
    sections = keys.keys()
    known |= {
        key: value
        for key, value in _chosen(config).items()
        if sections[key][0] == "tiers"
        or key in _METRICS
        or (has_own_hosts and sections[key][0] == "elastic")
        or (has_own_hosts and key in _OF_SUPERVISORS)
    }
    return known | settings.mapping("maxtext", config.deploy.maxtext)


def _yaml(values: dict[str, Any]) -> str:
    return yaml.safe_dump(values, sort_keys=False, width=1000)
