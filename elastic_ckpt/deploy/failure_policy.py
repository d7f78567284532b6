"""Which failures end a run, which restart it, and how.

A program that ends with the exit status of a wrong configuration would end so again:
its Job fails by a rule, and so does the JobSet. A pod that is evicted, preempted or
loses its node (Kubernetes gives it the condition DisruptionTarget) fails its Job by
another rule, and `max_restarts` does not count it. The JobSet distinguishes the two by
the message that Kubernetes' Job controller writes, which needs JobSet 0.10
(`onJobFailureMessagePatterns`). Each other failure is counted.

`restart_strategy` chooses what is made anew: all pods, or those of the failed Job
(JobSet 0.12), or a failed pod alone while the others restart in place (`in_place`).

The Job of elastic supervisors replaces pods itself, up to `max_restarts` times each,
and evicted ones uncounted; when no pod may restart it fails, and so does the JobSet.
"""

from __future__ import annotations

from elastic_ckpt.config import schema
from elastic_ckpt.core import errors
from elastic_ckpt.deploy import addition, in_place, supervisors

_REASON = "PodFailurePolicy"
_STRATEGIES = {"in_place": "InPlaceRestart"}


def check(config: schema.Config) -> None:
    """Raises a ConfigError if the kind of JobSet lacks the strategy."""
    strategy, world = config.deploy.restart_strategy, config.world
    if strategy == "recreate":
        return
    if world.enable_single_controller:
        raise errors.ConfigError(
            f"restart_strategy={strategy} with enable_single_controller=true: the head"
            " of Pathways starts again with all of its workers; set"
            " restart_strategy=recreate"
        )
    if supervisors.are_used(config):
        raise errors.ConfigError(
            f"restart_strategy={strategy} with elastic_enabled=true: the supervisors"
            " restart hosts, and a pod that fails is replaced alone; set"
            " restart_strategy=recreate"
        )
    if strategy == "in_place":
        in_place.check(config)
    elif world.hardware != "tpu":
        raise errors.ConfigError(
            f"restart_strategy=restart_job with hardware={world.hardware}: all hosts"
            " are one Job, so that nothing else would go on; set"
            " restart_strategy=in_place"
            " or recreate"
        )


def add(config: schema.Config, pods: addition.Pods) -> None:
    """Adds the rules of Kubernetes to the Job of a program, whose pods run once."""
    if pods.role in ("worker", "backup"):
        # Their pods restart containers, for which Kubernetes has no rules.
        return
    exit_codes = {
        "containerName": pods.container,
        "operator": "In",
        "values": [errors.CONFIG_EXIT_CODE],
    }
    rules: list[addition.Object] = [{"action": "FailJob", "onExitCodes": exit_codes}]
    if config.deploy.restart_strategy == "in_place":
        # A pod that is evicted is replaced, and its Job goes on.
        in_place.add(config, pods)
    else:
        disruption = {"type": "DisruptionTarget", "status": "True"}
        action = "Ignore" if supervisors.are_used(config) else "FailJob"
        rules.append({"action": action, "onPodConditions": [disruption]})
    pods.job["podFailurePolicy"] = {"rules": rules}


def jobset_policy(config: schema.Config) -> addition.Object:
    """The failure policy of the JobSet; the first rule that matches counts."""
    strategy = config.deploy.restart_strategy
    rules = [
        _rule(
            "configuration",
            "FailJobSet",
            f"failed with exit code {errors.CONFIG_EXIT_CODE} matching",
        )
    ]
    if supervisors.are_used(config):
        return {"rules": rules, "maxRestarts": 0}
    if strategy != "in_place":
        target = "RestartJob" if strategy == "restart_job" else "RestartJobSet"
        action = f"{target}AndIgnoreMaxRestarts"
        condition = "has condition DisruptionTarget matching"
        rules.append(_rule("disruption", action, condition))
    if strategy == "restart_job":
        rules.append({"name": "failure", "action": "RestartJob"})
    policy: addition.Object = {"rules": rules}
    if strategy in _STRATEGIES:
        policy["restartStrategy"] = _STRATEGIES[strategy]
    return policy


def _rule(name: str, action: str, pattern: str) -> addition.Object:
    return {
        "name": name,
        "action": action,
        "onJobFailureReasons": [_REASON],
        "onJobFailureMessagePatterns": [pattern],
    }
