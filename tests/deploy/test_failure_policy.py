"""A wrong configuration ends a run; a preempted pod starts it again, uncounted."""

import re

import pytest

from elastic_ckpt.cli import main
from elastic_ckpt.core import errors
from tests.deploy import jobsets

# From kubernetes/pkg/controller/job/pod_failure_policy.go.
EXIT_MESSAGE = (
    "Container {container} for pod default/demo-0 failed with exit code {code} matching"
    " FailJob rule at index {index}"
)
CONDITION_MESSAGE = (
    "Pod default/demo-0 has condition {type} matching FailJob rule at index {index}"
)


def failed_job(job, *, code=None, condition=None):
    """The reason and message with which Kubernetes fails a Job, by its rules."""
    for index, rule in enumerate(job["podFailurePolicy"]["rules"]):
        on_exit = rule.get("onExitCodes")
        types = [each["type"] for each in rule.get("onPodConditions", [])]
        if on_exit and code in on_exit["values"]:
            name = on_exit["containerName"]
            message = EXIT_MESSAGE.format(container=name, code=code, index=index)
            return "PodFailurePolicy", message
        if condition in types:
            message = CONDITION_MESSAGE.format(type=condition, index=index)
            return "PodFailurePolicy", message
    return "BackoffLimitExceeded", "Job has reached the specified backoff limit"


def action(jobset, reason, message):
    """The action of JobSet: of the first rule that matches, or a counted restart."""
    for rule in jobset["spec"]["failurePolicy"]["rules"]:
        patterns = rule["onJobFailureMessagePatterns"]
        if reason in rule["onJobFailureReasons"] and any(
            re.search(pattern, message) for pattern in patterns
        ):
            return rule["action"]
    return "RestartJobSet"


@pytest.mark.parametrize("name", [jobsets.GPU, jobsets.TPU, jobsets.PATHWAYS])
@pytest.mark.parametrize(
    ("failure", "expected"),
    [
        ({"code": errors.CONFIG_EXIT_CODE}, "FailJobSet"),
        ({"condition": "DisruptionTarget"}, "RestartJobSetAndIgnoreMaxRestarts"),
        ({"code": 1}, "RestartJobSet"),
        ({"code": 137}, "RestartJobSet"),
    ],
)
def test_each_failure_has_its_answer(name, failure, expected):
    jobset = jobsets.only("JobSet", jobsets.documents(name))
    job = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]
    assert action(jobset, *failed_job(job, **failure)) == expected
    # Kubernetes has rules for pods that run once alone.
    assert job["template"]["spec"]["restartPolicy"] == "Never"


def test_workers_that_restart_their_containers_have_no_rules():
    jobset = jobsets.only("JobSet", jobsets.documents(jobsets.PATHWAYS))
    job = jobset["spec"]["replicatedJobs"][1]["template"]["spec"]
    assert job["template"]["spec"]["restartPolicy"] == "OnFailure"
    assert "podFailurePolicy" not in job


def test_a_wrong_configuration_ends_the_program_with_that_status(tmp_path, capsys):
    path = tmp_path / "a.yml"
    path.write_text("stesp: 5\n")
    assert main.main(["train", str(path)]) == errors.CONFIG_EXIT_CODE
    assert "unknown key 'stesp'" in capsys.readouterr().err
