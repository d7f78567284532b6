"""Which failures end a run, and which start it again without being counted.

A program that ends with the exit status of a wrong configuration would end so again:
its Job fails by a rule, and so does the JobSet. A pod that is evicted, preempted or
loses its node (Kubernetes gives it the condition DisruptionTarget) fails its Job by
another rule, so that the whole JobSet starts again at once, and `max_restarts` does not
count it. The JobSet distinguishes the two by the message that Kubernetes' Job
controller writes, which needs JobSet 0.10 (`onJobFailureMessagePatterns`). Each other
failure is counted.
"""

from __future__ import annotations

from elastic_ckpt.core import errors
from elastic_ckpt.deploy import addition

_REASON = "PodFailurePolicy"


def add(pods: addition.Pods) -> None:
    """Adds the rules of Kubernetes to the Job of a program, whose pods run once."""
    if pods.role == "worker":
        # Its pods restart their containers, for which Kubernetes has no rules.
        return
    exit_codes = {
        "containerName": pods.container,
        "operator": "In",
        "values": [errors.CONFIG_EXIT_CODE],
    }
    disruption = {"type": "DisruptionTarget", "status": "True"}
    pods.job["podFailurePolicy"] = {
        "rules": [
            {"action": "FailJob", "onExitCodes": exit_codes},
            {"action": "FailJob", "onPodConditions": [disruption]},
        ]
    }


def rules() -> list[addition.Object]:
    """The rules of the JobSet; the first that matches counts."""
    return [
        {
            "name": "configuration",
            "action": "FailJobSet",
            "onJobFailureReasons": [_REASON],
            "onJobFailureMessagePatterns": [
                f"failed with exit code {errors.CONFIG_EXIT_CODE} matching"
            ],
        },
        {
            "name": "disruption",
            "action": "RestartJobSetAndIgnoreMaxRestarts",
            "onJobFailureReasons": [_REASON],
            "onJobFailureMessagePatterns": ["has condition DisruptionTarget matching"],
        },
    ]
