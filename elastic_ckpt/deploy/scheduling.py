"""The nodes of the pods: Spot VMs, reservations, labels, affinity and tolerations.

The labels and taints of Spot VMs and reservations are those of GKE's guides "Spot VMs"
and "Consuming reserved zonal resources" (read in 2026). Under Pathways the head runs in
its own node pool; the settings of accelerator hosts are those of the workers.
"""

from __future__ import annotations

from typing import Any

from elastic_ckpt.config import schema
from elastic_ckpt.core import errors
from elastic_ckpt.deploy import addition, names, settings

_SPOT = "cloud.google.com/gke-spot"
_RESERVATION = "cloud.google.com/reservation-name"
_PROJECT = "cloud.google.com/reservation-project"
_AFFINITY = "cloud.google.com/reservation-affinity"


def check(config: schema.Config) -> None:
    """Raises a ConfigError if a name is invalid, or Spot VMs are to be reserved."""
    pods = config.pods
    if pods.spot and pods.reservation:
        raise errors.ConfigError(
            f"spot=true with reservation={pods.reservation}: Spot VMs cannot be"
            " reserved; set only one of the two"
        )
    for name in pods.reservation.split("/") if pods.reservation else ():
        names.check_name("reservation", name)
    if pods.pod_priority_class:
        names.check_name("pod_priority_class", pods.pod_priority_class, dots=True)


def addition_for(config: schema.Config, role: addition.Role) -> addition.Addition:
    """The constraints of the pods with `role`."""
    pods = config.pods
    spec: dict[str, Any] = {}
    tolerations = settings.sequence("pod_tolerations", pods.pod_tolerations)
    if pods.pod_unreachable_seconds >= 0:
        tolerations += [
            {
                "key": f"node.kubernetes.io/{condition}",
                "operator": "Exists",
                "effect": "NoExecute",
                "tolerationSeconds": pods.pod_unreachable_seconds,
            }
            for condition in ("unreachable", "not-ready")
        ]
    if pods.pod_priority_class:
        spec["priorityClassName"] = pods.pod_priority_class
    if role not in ("head", "backup"):
        if pods.spot:
            tolerations.append(
                {
                    "key": _SPOT,
                    "operator": "Equal",
                    "value": "true",
                    "effect": "NoSchedule",
                }
            )
        labels = _node_labels(pods)
        if labels:
            spec["nodeSelector"] = labels
        affinity = settings.mapping("pod_affinity", pods.pod_affinity)
        if affinity:
            spec["affinity"] = affinity
    if tolerations:
        spec["tolerations"] = tolerations
    return addition.Addition(spec=spec)


def _node_labels(pods: schema.PodsSection) -> dict[str, str]:
    labels = settings.mapping("pod_node_selector", pods.pod_node_selector)
    if pods.spot:
        labels[_SPOT] = "true"
    if pods.reservation:
        project, _, name = pods.reservation.rpartition("/")
        labels |= {_AFFINITY: "specific", _RESERVATION: name}
        if project:
            labels[_PROJECT] = project
    return labels
