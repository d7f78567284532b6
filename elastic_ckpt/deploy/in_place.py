"""Pods that restart in place: JobSet's agent beside the program, and what it needs.

The fields are those of KEP 467 as JobSet 0.11 has it (feature gate InPlaceRestart,
alpha), with the action RestartAllContainers of Kubernetes 1.35 (KEP 5532). JobSet
checks that Jobs never fail by failures of pods, that a pod is replaced when it has
failed, and that a sidecar can restart its pod.
"""

from __future__ import annotations

from elastic_ckpt.config import schema
from elastic_ckpt.core import errors
from elastic_ckpt.deploy import addition, names

# The largest int32: a Job never fails by its pods.
_BACKOFF_LIMIT = 2**31 - 1
_AGENT = "in-place-restart-agent"
_BARRIER = {"path": "/barrier-is-down", "port": 8081}
_BARRIER_SECS = 600
_JOBSET_NAME = "metadata.annotations['jobset.sigs.k8s.io/jobset-name']"


def check(config: schema.Config) -> None:
    """Raises a ConfigError if pods cannot restart in place."""
    names.check_image("in_place_restart_image", config.deploy.in_place_restart_image)


def add(config: schema.Config, pods: addition.Pods) -> None:
    """Adds the agent, and the rules by which containers restart."""
    pods.job["backoffLimit"] = _BACKOFF_LIMIT
    pods.job["podReplacementPolicy"] = "Failed"
    # Every other failure fails the pod, as a wrong configuration does the run.
    pods.program()["restartPolicy"] = "Never"
    pods.program()["restartPolicyRules"] = _rules([0, errors.CONFIG_EXIT_CODE])
    spec = pods.template["spec"]
    spec["initContainers"] = [_agent(config), *spec.get("initContainers", [])]


def access_rules() -> list[addition.Object]:
    """The permissions of the agent: to watch its JobSet and annotate its pod."""
    return [
        {"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "patch"]},
        {
            "apiGroups": ["jobset.x-k8s.io"],
            "resources": ["jobsets"],
            "verbs": ["get", "list", "watch"],
        },
    ]


def _agent(config: schema.Config) -> addition.Object:
    fields = {"JOBSET_NAME": _JOBSET_NAME, "POD_NAME": "metadata.name"}
    fields["NAMESPACE"] = "metadata.namespace"
    return {
        "name": _AGENT,
        "image": config.deploy.in_place_restart_image,
        # A sidecar, which starts before the program.
        "restartPolicy": "Always",
        "restartPolicyRules": _rules([0]),
        # The program starts when all pods have.
        "startupProbe": {
            "httpGet": dict(_BARRIER),
            "failureThreshold": _BARRIER_SECS,
            "periodSeconds": 1,
        },
        "env": [
            {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}
            for name, path in fields.items()
        ],
    }


def _rules(codes: list[int]) -> list[addition.Object]:
    exit_codes = {"operator": "NotIn", "values": codes}
    return [{"action": "RestartAllContainers", "exitCodes": exit_codes}]
