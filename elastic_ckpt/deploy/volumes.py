"""Volumes of the user in the containers of our code, by the path of their mount.

A volume is written as Kubernetes writes its source: {persistentVolumeClaim: {claimName:
texts}}, {hostPath: {path: /mnt/ssd}}, {secret: {secretName: keys}}. Besides, `gcsfuse`
names a bucket that GKE's Cloud Storage FUSE driver mounts, and `readOnly` and `subPath`
are those of the mount.
"""

from __future__ import annotations

import os
import pathlib
import re
from collections.abc import Collection, Mapping
from typing import Any

from elastic_ckpt.core import errors, storage
from elastic_ckpt.deploy import names, settings
from elastic_ckpt.deploy.template import Object
from elastic_ckpt.training import schema

_OF_MOUNT = ("readOnly", "subPath")
# Sources that end with the pod, or hold files of Kubernetes.
_LOCAL = frozenset(
    ("emptyDir", "ephemeral", "configMap", "secret", "downwardAPI", "projected")
)
GCSFUSE = "gcsfuse.csi.storage.gke.io"


def volumes(
    by_path: Mapping[str, Any], taken: Collection[str]
) -> tuple[list[Object], list[Object]]:
    """The volumes of `pod_volumes`, and their mounts.

    Args:
      by_path: the value of the key.
      taken: the paths at which the manifest mounts other volumes.

    Raises:
      ConfigError: if a path or a source is not one, or something else is mounted there.
    """
    built, mounts = [], []
    for path, value in by_path.items():
        names.refuse(
            path in taken,
            f"pod_volumes has {path}, where the manifest mounts another volume;"
            " choose another path",
        )
        name, source = _name(path), _source(path, value)
        fields = {key: value[key] for key in value if key in _OF_MOUNT}
        mounts.append({"name": name, "mountPath": path, **fields})
        built.append({"name": name, **source})
    return built, mounts


def check_shared(config: schema.Config) -> None:
    """Raises a ConfigError unless the run's directory is one for all pods.

    It is in a bucket, or on a shared file system that `pod_volumes` mounts.
    """
    directory = config.run.base_output_directory
    if not storage.is_local(directory):
        return
    by_path = settings.mapping("pod_volumes", config.pods.pod_volumes)
    mounted = [path for path in by_path if _is_above(path, directory)]
    names.refuse(
        not mounted,
        f"base_output_directory={directory!r} is local to each pod and is deleted"
        " with it; set base_output_directory=gs://bucket/path, or mount a shared"
        " file system there: pod_volumes={/runs: {persistentVolumeClaim:"
        " {claimName: runs}}} and base_output_directory=/runs",
    )
    path = max(mounted, key=len)
    value = by_path[path]
    source = _source(path, value)
    for kind in _LOCAL.intersection(source):
        raise errors.ConfigError(
            f"base_output_directory={directory!r} is on the {kind} that pod_volumes"
            f" mounts at {path}, which each pod has for itself; mount a shared file"
            " system there, such as {persistentVolumeClaim: {claimName: runs}}"
        )
    names.refuse(
        value.get("readOnly"),
        f"base_output_directory={directory!r} is on {path}, which pod_volumes"
        " mounts with readOnly: true; remove that",
    )


def _is_above(path: str, directory: str) -> bool:
    # Whether a directory is on the volume at a path.
    own = pathlib.PurePosixPath(os.path.normpath(directory))
    return own.is_absolute() and own.is_relative_to(os.path.normpath(path))


def _name(path: str) -> str:
    words = re.sub(r"[^a-z0-9]+", "-", path.lower()).strip("-")
    names.refuse(
        not path.startswith("/") or not words,
        f"pod_volumes has the path {path!r}; write an absolute path of letters and"
        " digits, such as /data",
    )
    return f"user-{words}"[:63].rstrip("-")


def _source(path: str, value: Any) -> Object:
    sources = [key for key in value if key not in _OF_MOUNT] if value else []
    if not isinstance(value, dict) or len(sources) != 1:
        raise errors.ConfigError(
            f"pod_volumes has {value!r} at {path}; write one source, such as"
            " {persistentVolumeClaim: {claimName: texts}} or {gcsfuse: my-bucket}"
        )
    (source,) = sources
    if source != "gcsfuse":
        return {source: value[source]}
    attributes = {"bucketName": value[source], "mountOptions": "implicit-dirs"}
    return {"csi": {"driver": GCSFUSE, "volumeAttributes": attributes}}
