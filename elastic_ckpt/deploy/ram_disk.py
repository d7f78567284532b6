"""The RAM disk of a host in a pod: its volume, by what it has to survive.

`empty_dir` ends with the pod. With `node_agent` it is a directory of the node, which
the agent of the node owns and serves (`node_agent`). With `gke_multitier` it is a
volume of GKE's multi-tier checkpointing, which the node keeps, too.
"""

from __future__ import annotations

from elastic_ckpt.config import schema
from elastic_ckpt.deploy import names
from elastic_ckpt.deploy.addition import Object

VOLUME = "local-checkpoints"
# The driver of GKE 1.32.4-gke.1415000 and later, with the add-on
# HighScaleCheckpointing ("Multi-Tier Checkpointing", 2026).
GKE_DRIVER = "multitier-checkpoint.csi.storage.gke.io"


def check(config: schema.Config) -> None:
    """Raises a ConfigError if a value of the RAM disk is invalid."""
    tiers, deploy = config.tiers, config.deploy
    if not tiers.local_checkpoint_directory:
        return
    names.check_mount("local_checkpoint_directory", tiers.local_checkpoint_directory)
    size = tiers.local_checkpoint_size_limit
    names.check_size("local_checkpoint_size_limit", size)
    if deploy.local_checkpoint_volume == "node_agent":
        names.check_mount("node_agent_directory", deploy.node_agent_directory)


def volumes(config: schema.Config) -> list[Object]:
    """The volume of the RAM disk; none if there is no RAM disk."""
    if not config.tiers.local_checkpoint_directory:
        return []
    return [{"name": VOLUME, **_source(config)}]


def mounts(config: schema.Config) -> list[Object]:
    """The mount of the volume."""
    path = config.tiers.local_checkpoint_directory
    return [{"name": VOLUME, "mountPath": path}] if path else []


def _source(config: schema.Config) -> Object:
    match config.deploy.local_checkpoint_volume:
        case "node_agent":
            # The pod waits until the agent of the node has made it.
            path = config.deploy.node_agent_directory
            return {"hostPath": {"path": path, "type": "Directory"}}
        case "gke_multitier":
            return {"csi": {"driver": GKE_DRIVER}}
        case _:
            size = config.tiers.local_checkpoint_size_limit
            return {"emptyDir": {"medium": "Memory", "sizeLimit": size}}
