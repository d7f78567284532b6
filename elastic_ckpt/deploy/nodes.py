"""The objects that nodes need once so that their memory outlives pods."""

from __future__ import annotations

import re
import urllib.parse

from elastic_ckpt.deploy import (
    checks,
    manifest,
    names,
    program,
    quantity,
    settings,
    template,
)
from elastic_ckpt.deploy.template import Object, fill
from elastic_ckpt.training import schema

_NAME = "elastic-ckpt-node-agent"
# GKE's name of the taint of its accelerator nodes, by hardware.
_TAINTS = {"tpu": "google.com/tpu", "gpu": "nvidia.com/gpu"}


def documents(config: schema.Config) -> list[Object]:
    """The agents of nodes, or GKE's configuration of its multi-tier volumes.

    Raises:
      ConfigError: if a value is invalid, or nodes need nothing.
    """
    volume = config.deploy.local_checkpoint_volume
    names.refuse(
        volume not in ("node_agent", "gke_multitier"),
        f"local_checkpoint_volume={volume} needs nothing of the nodes; set"
        " local_checkpoint_volume=node_agent or gke_multitier",
    )
    host = checks.run(config)
    values = settings.values(config)
    values |= manifest.node_fields(values, host)
    values["node_selector"] = host.node_selector | values["node_labels"]
    if volume == "node_agent":
        return _agents(config, values, "-".join(host.node_selector.values()))
    return [_checkpoint_configuration(config, values)]


def _checkpoint_configuration(config: schema.Config, values: Object) -> Object:
    directory = config.run.base_output_directory
    url = urllib.parse.urlsplit(directory)
    names.refuse(
        url.scheme != "gs",
        f"base_output_directory={directory!r} is not in a bucket of Google Cloud,"
        " which local_checkpoint_volume=gke_multitier needs; set"
        " base_output_directory=gs://bucket/path",
    )
    tolerations = [*values["tolerations"], *values["spot_tolerations"]]
    if taint := _TAINTS.get(config.world.hardware):
        tolerations.append({"key": taint, "operator": "Exists", "effect": "NoSchedule"})
    values |= {"bucket": url.netloc, "tolerations": tolerations}
    filled: Object = fill(template.read("templates/gke_multitier.yaml"), values)
    return filled


def _agents(config: schema.Config, values: Object, kind: str) -> list[Object]:
    """The objects of the agents on nodes of a kind; those of others are others."""
    deploy, tiers = config.deploy, config.tiers
    image = deploy.node_agent_image or deploy.docker_image
    checks.node_agent(config, image)
    secs = round(deploy.node_agent_hours_unused * 3600)
    limit = deploy.node_agent_size_limit
    options = {
        "--node": tiers.local_checkpoint_directory,
        "--interface": "$(POD_IP)",
        "--port": str(deploy.node_agent_port or ""),
        "--kubernetes-node": "$(NODE_NAME)",
        "--domain-labels": deploy.node_agent_domain_labels,
        "--remove-unused-after": str(secs or ""),
        "--max-bytes": str(quantity.to_bytes(limit)) if limit else "",
        "--tls-certificate": tiers.peer_tls_certificate,
        "--tls-key": tiers.peer_tls_key,
    }
    suffix = re.sub(r"[^a-z0-9]+", "-", kind.lower())
    values |= {
        "agents": f"{_NAME}-{suffix}" if suffix else _NAME,
        "agent_image": image,
        "agent_command": ["elastic-ckpt", "agent", *program.words(options)],
        "agent_port": deploy.node_agent_port or None,
        "agent_priority_class": deploy.node_agent_priority_class or _NAME,
    }
    *others, agents = fill(template.read("templates/node_agent.yaml"), values)
    if deploy.node_agent_priority_class:
        others = [each for each in others if each["kind"] != "PriorityClass"]
    if tiers.peer_tls_certificate:
        # The files of the certificate are in volumes of the user.
        pods = manifest.Pods("agent", "containers", "agent")
        agents["spec"] = manifest.with_volumes(agents["spec"], pods, values)
    return [*others, agents]
