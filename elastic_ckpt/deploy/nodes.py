"""The objects that nodes need once so that their memory outlives pods."""

from __future__ import annotations

import urllib.parse

from elastic_ckpt.config import schema
from elastic_ckpt.core import errors
from elastic_ckpt.deploy import job, node_agent, scheduling
from elastic_ckpt.deploy.addition import Object

# GKE's name of the taint of its accelerator nodes, by hardware.
_TAINTS = {"tpu": "google.com/tpu", "gpu": "nvidia.com/gpu"}


def documents(config: schema.Config) -> list[Object]:
    """The agents of nodes, or GKE's configuration of its multi-tier volumes.

    Raises:
      ConfigError: if a value is invalid, or nodes need nothing.
    """
    match config.deploy.local_checkpoint_volume:
        case "node_agent":
            return node_agent.documents(config)
        case "gke_multitier":
            return [_checkpoint_configuration(config)]
        case volume:
            raise errors.ConfigError(
                f"local_checkpoint_volume={volume} needs nothing of the nodes; set"
                " local_checkpoint_volume=node_agent or gke_multitier"
            )


def _checkpoint_configuration(config: schema.Config) -> Object:
    """The fields are those of checkpointing.gke.io/v1, GKE 1.32.4-gke.1415000."""
    host = job.check(config)
    directory = config.run.base_output_directory
    url = urllib.parse.urlsplit(directory)
    if url.scheme != "gs":
        raise errors.ConfigError(
            f"base_output_directory={directory!r} is not in a bucket of Google Cloud,"
            " which local_checkpoint_volume=gke_multitier needs; set"
            " base_output_directory=gs://bucket/path"
        )
    added = scheduling.addition_for(config, "host").spec
    tolerations = list(added.get("tolerations", []))
    if config.world.hardware in _TAINTS:
        taint = _TAINTS[config.world.hardware]
        tolerations.append({"key": taint, "operator": "Exists", "effect": "NoSchedule"})
    spec: Object = {
        "cloudStorageBucketName": url.netloc,
        "nodeSelector": host.node_selector | added.get("nodeSelector", {}),
        "tolerations": tolerations,
        "inMemoryVolumeSize": config.tiers.local_checkpoint_size_limit,
    }
    return {
        "apiVersion": "checkpointing.gke.io/v1",
        "kind": "CheckpointConfiguration",
        # It belongs to no namespace.
        "metadata": {"name": f"{config.run.run_name}-configuration"},
        "spec": spec,
    }
