"""The settings that both kinds of JobSet share, added to a JobSet and its pods."""

from __future__ import annotations

from typing import TypeAlias

from elastic_ckpt.config import schema
from elastic_ckpt.deploy import (
    addition,
    environment,
    failure_policy,
    gpu_network,
    labels,
    monitoring,
    resources,
    scheduling,
    volumes,
)

# The role of each replicated job, and the container in which our code runs.
Programs: TypeAlias = dict[str, tuple[addition.Role, str]]


def completed(
    config: schema.Config,
    jobset: addition.Object,
    programs: Programs,
) -> list[addition.Object]:
    """The JobSet with all settings, and the objects that follow it.

    Args:
      config: of the run.
      jobset: with its jobs, their pods, and the volumes in the memory of hosts; it is
        changed.
      programs: the role of each replicated job, and the container of our code in it.

    Raises:
      ConfigError: if a value is invalid.
    """
    with_metrics = []
    for replicated in jobset["spec"]["replicatedJobs"]:
        role, container = programs[replicated["name"]]
        spec = replicated["template"]["spec"]
        pods = addition.Pods(
            role=role, job=spec, template=spec["template"], container=container
        )
        _add(config, pods)
        if role in ("host", "head"):
            with_metrics += monitoring.documents(config, replicated["name"])
    added = labels.jobset_fields(config)
    added["spec"]["failurePolicy"] = failure_policy.jobset_policy(config)
    addition.merge(jobset, added)
    return [jobset, *with_metrics]


def _add(config: schema.Config, pods: addition.Pods) -> None:
    if pods.role != "backup":
        pods.add(gpu_network.addition_for(config))
    for each in (
        environment.addition_for(config, pods.role),
        labels.addition_for(config),
        scheduling.addition_for(config, pods.role),
        volumes.addition_for(config, pods),
        monitoring.addition_for(config, pods.role),
    ):
        pods.add(each)
    # When all volumes are there.
    pods.add(resources.addition_for(config, pods))
    failure_policy.add(config, pods)
