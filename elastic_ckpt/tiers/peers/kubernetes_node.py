"""The failure domains of a node, by the labels of its object in Kubernetes.

A pod does not get the labels of its node, but the agent of a node may read them: the
manifest of its DaemonSet binds its service account to a role for that.
"""

from __future__ import annotations

import http
import os
import pathlib
import urllib.parse
from collections.abc import Mapping

import urllib3

from elastic_ckpt.core import errors

# The label of each kind of domain, from large to small. Zone and region are
# Kubernetes's well-known labels; GKE has the others on machines that are placed
# compactly ("Schedule GKE workloads with Topology Aware Scheduling", 2026).
LABELS = {
    "region": "topology.kubernetes.io/region",
    "zone": "topology.kubernetes.io/zone",
    "block": "cloud.google.com/gce-topology-block",
    "rack": "cloud.google.com/gce-topology-subblock",
}
ACCOUNT_DIRECTORY = "/var/run/secrets/kubernetes.io/serviceaccount"
_TIMEOUT_SECS = 30.0


def domains(labels: Mapping[str, str], label_of: Mapping[str, str]) -> dict[str, str]:
    """The failure domains that a node is in, by kind.

    Args:
      labels: of the node.
      label_of: the label of each kind of domain; kinds without a label are left out.
    """
    names = {kind: labels.get(label, "") for kind, label in label_of.items()}
    return {kind: name for kind, name in names.items() if name}


def read_labels(
    node: str,
    *,
    server: str | None = None,
    account_directory: str = ACCOUNT_DIRECTORY,
) -> dict[str, str]:
    """The labels of a node, from the Kubernetes API.

    Args:
      node: its name, `spec.nodeName` of a pod.
      server: URL of the API; by default that of the cluster, from the environment.
      account_directory: with the token, and the authority of the API's certificate.

    Raises:
      RunError: if they cannot be read.
    """
    account = pathlib.Path(account_directory)
    url = f"{server or _server()}/api/v1/nodes/{urllib.parse.quote(node, safe='')}"
    try:
        token = (account / "token").read_text(encoding="ascii").strip()
        with urllib3.PoolManager(ca_certs=str(account / "ca.crt")) as pool:
            response = pool.request(
                "GET",
                url,
                headers={"Authorization": f"Bearer {token}"},
                timeout=_TIMEOUT_SECS,
                retries=False,
                redirect=False,
            )
        if response.status != http.HTTPStatus.OK:
            raise ValueError(f"status {response.status}")
        labels = response.json()["metadata"].get("labels", {})
    except (OSError, ValueError, KeyError, urllib3.exceptions.HTTPError) as error:
        raise errors.RunError(
            f"the labels of node {node} cannot be read from {url} ({error}); the"
            " service account needs the verb get on nodes, as the manifest of the"
            " node agent has it"
        ) from None
    return dict(labels)


def _server() -> str:
    host = os.environ.get("KUBERNETES_SERVICE_HOST")
    if not host:
        raise errors.RunError(
            "the labels of a node are read from the Kubernetes API, but this is no pod"
            " (KUBERNETES_SERVICE_HOST is not set); name the domains with --domains"
        )
    port = os.environ.get("KUBERNETES_SERVICE_PORT", "443")
    return f"https://{f'[{host}]' if ':' in host else host}:{port}"
