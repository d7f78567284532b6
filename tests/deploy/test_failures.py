"""What Kubernetes and JobSet do after a failure, by the rules of a manifest."""

import re

import pytest

from elastic_ckpt.cli import main
from elastic_ckpt.core import errors
from tests.deploy import jobsets
from tests.deploy.jobsets import GPU, PATHWAYS, TPU

# From kubernetes/pkg/controller/job/pod_failure_policy.go.
EXIT_MESSAGE = (
    "Container {container} for pod default/demo-0 failed with exit code {code} matching"
    " FailJob rule at index {index}"
)
CONDITION_MESSAGE = (
    "Pod default/demo-0 has condition {condition} matching FailJob rule at index"
    " {index}"
)
IN_PLACE = ("restart_strategy=in_place", "in_place_restart_image=registry/agent:1")
BY_JOB = ("restart_strategy=restart_job",)
ELASTIC = "elastic_h100"
PREEMPTED, WRONG = {"condition": "DisruptionTarget"}, {"code": errors.CONFIG_EXIT_CODE}
FAILED = {"code": 137}


def failed_job(job, code=None, condition=None):
    """The reason and message with which a pod's failure fails its Job, if it does."""
    for index, rule in enumerate(job["podFailurePolicy"]["rules"]):
        on_exit = rule.get("onExitCodes", {"values": []})
        types = [each["type"] for each in rule.get("onPodConditions", [])]
        if code not in on_exit["values"] and condition not in types:
            continue
        if rule["action"] == "Ignore":
            return None
        template = EXIT_MESSAGE if code else CONDITION_MESSAGE
        name = on_exit.get("containerName")
        message = template.format(
            container=name, code=code, condition=condition, index=index
        )
        return "PodFailurePolicy", message
    if job.get("backoffLimit") == 0:
        return "BackoffLimitExceeded", "Job has reached the specified backoff limit"
    return None


def action(jobset, failure):
    """The action of JobSet: of the first rule that matches, or a counted restart.

    None if the Job only replaces its pod.
    """
    failed = failed_job(
        jobset["spec"]["replicatedJobs"][0]["template"]["spec"], **failure
    )
    if failed is None:
        return None
    reason, message = failed
    for rule in jobset["spec"]["failurePolicy"]["rules"]:
        patterns = rule.get("onJobFailureMessagePatterns", [""])
        if reason in rule.get("onJobFailureReasons", [reason]) and any(
            re.search(pattern, message) for pattern in patterns
        ):
            return rule["action"]
    return "RestartJobSet"


@pytest.mark.parametrize(
    ("name", "overrides", "after_preemption", "after_failure"),
    [
        (GPU, (), "RestartJobSetAndIgnoreMaxRestarts", "RestartJobSet"),
        (TPU, (), "RestartJobSetAndIgnoreMaxRestarts", "RestartJobSet"),
        (PATHWAYS, (), "RestartJobSetAndIgnoreMaxRestarts", "RestartJobSet"),
        (TPU, BY_JOB, "RestartJobAndIgnoreMaxRestarts", "RestartJob"),
        # Only the pod is replaced.
        (GPU, IN_PLACE, None, None),
        (TPU, IN_PLACE, None, None),
        (ELASTIC, (), None, None),
    ],
)
def test_a_wrong_configuration_ends_the_run_and_other_failures_restart_what_they_should(
    name, overrides, after_preemption, after_failure
):
    jobset = jobsets.only("JobSet", jobsets.documents(name, *overrides))
    assert action(jobset, WRONG) == "FailJobSet"
    assert action(jobset, PREEMPTED) == after_preemption
    assert action(jobset, FAILED) == after_failure
    for job in jobset["spec"]["replicatedJobs"]:
        # Kubernetes has rules for pods that run once alone.
        spec = job["template"]["spec"]
        runs_once = spec["template"]["spec"]["restartPolicy"] == "Never"
        assert ("podFailurePolicy" in spec) == runs_once


def test_a_supervisors_pod_is_replaced_so_often_and_then_the_run_has_failed():
    built = jobsets.documents(ELASTIC, "max_restarts=7")
    (job,) = jobsets.jobs(built).values()
    assert job["backoffLimitPerIndex"] == 7
    # It would count the failures of all pods together.
    assert "backoffLimit" not in job
    assert jobsets.only("JobSet", built)["spec"]["failurePolicy"]["maxRestarts"] == 0
    assert job["successPolicy"] == {"rules": [{"succeededCount": 1}]}


@pytest.mark.parametrize("name", [GPU, TPU])
def test_in_place_every_failure_but_a_wrong_configuration_restarts_all_containers(name):
    (job,) = jobsets.jobs(jobsets.documents(name, *IN_PLACE)).values()
    spec = job["template"]["spec"]
    agent, program = (*spec["initContainers"], *spec["containers"])
    for container, codes in ((agent, [0]), (program, [0, errors.CONFIG_EXIT_CODE])):
        exit_codes = {"operator": "NotIn", "values": codes}
        rule = {"action": "RestartAllContainers", "exitCodes": exit_codes}
        assert container["restartPolicyRules"] == [rule]


def test_a_wrong_configuration_ends_the_program_with_that_status(tmp_path, capsys):
    path = tmp_path / "a.yml"
    path.write_text("stesp: 5\n")
    assert main.main(["train", str(path)]) == errors.CONFIG_EXIT_CODE
    assert "unknown key 'stesp'" in capsys.readouterr().err
